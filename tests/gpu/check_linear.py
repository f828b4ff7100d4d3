"""Linears and the quantiser against their references on a GPU: `python tests/gpu/check_linear.py [seed]`.

Prints `ok|FAIL op case err=... limit=...` a case and one JSON line; a failing case does not stop the others. Fresh
random inputs each run. With DEEPINFER_BATCH_INVARIANT=1 every row's bits must be those of the largest batch.
DEEPINFER_CHECK_SMALL=1: small sizes only.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from deepinfer.ops import formats, registry
from deepinfer.ops import linear as reference
from deepinfer.ops.triton import linear as kernels

NUMBERS = [int(a) for a in sys.argv[1:] if a.isdigit()]
SEED = NUMBERS[0] if NUMBERS else int(time.time()) % 100000
SMALL = os.environ.get("DEEPINFER_CHECK_SMALL") == "1"  # sizes that compute-sanitizer gets through
ROWS = (0, 1, 9, 33, 70) if SMALL else (0, 1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 130, 257, 600)
FP8 = {
    "wqkv_a": (1792, 5120),
    "wq_b": (32768, 1280),
    "index_wq_b": (4096, 1280),
    "wo_b": (5120, 8192),
    "shared_w13": (4608, 5120),
    "shared_w2": (5120, 2304),
    "engram_wkv": (25600, 6144),
    "odd": (160, 416),
    "odd_chunks": (96, 4608),
}
REPEATED = (1, 64) if SMALL else (1, 9, 40, 64, 130)
DEQUANT = {"wo_a": (8, 8192, 4096), "one": (1, 512, 1280), "odd": (3, 288, 224)}  # name -> groups, N, K
BF16 = {
    "lm_head": (129280, 5120),
    "compressor": (1024, 5120),
    "index_weights": (32, 5120),
    "wk": (128, 512),
    "vision": (3456, 1152),
    "odd": (40, 2100),
}
if SMALL:
    DEQUANT = {"two": (2, 512, 512), "odd": (3, 288, 224)}
    BF16 = {"chunks": (64, 2048), "wk": (128, 512), "odd": (40, 2100)}
    FP8 = {"few": (384, 2304), "short": (256, 512), "odd": (160, 416)}
BITS = " (rows with other bits)" if kernels.INVARIANT else ""
RESULTS: list[dict[str, Any]] = []


def error(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius error; inf where a holds NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel():
        return 0.0
    if not bool(torch.isfinite(a.double()).all()):
        return float("inf")
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def differing(a: Tensor, b: Tensor) -> float:
    """Number of rows with other bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    return float((a != b).any(dim=-1).sum()) if a.numel() else 0.0


def case(op: str, name: str, limit: float, measure: Callable[[], float]) -> None:
    try:
        value = measure()
        torch.cuda.synchronize()
        ok, note = value <= limit, ""
    except Exception as problem:
        value, ok, note = float("nan"), False, f"{type(problem).__name__}: {str(problem)[:300]}"
        traceback.print_exc(limit=4)
    RESULTS.append({"op": op, "case": name, "ok": ok, "err": value, "limit": limit})
    print(f"{'ok  ' if ok else 'FAIL'} {op} {name} err={value:.3g} limit={limit:.3g} {note}", flush=True)


def poison() -> None:
    """Fill the allocator's free memory with NaN patterns, so that an unwritten output shows."""
    blocks = [torch.full((n,), 0xFF, dtype=torch.uint8, device="cuda") for n in (1 << 20, 16 << 20, 256 << 20) * 2]
    blocks += [torch.full((1 << n,), 0xFF, dtype=torch.uint8, device="cuda") for n in range(9, 20)]
    del blocks


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def fp8_weight(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Blocks of very different size, so that a wrong scale shows."""
    w = torch.randn((n, k), device="cuda") * k**-0.5
    w *= (
        torch.exp2(torch.randint(-3, 4, (n // 32, k // 32), device="cuda").float())
        .repeat_interleave(32, 0)
        .repeat_interleave(32, 1)
    )
    return formats.quant_fp8_block(w)


def activations(m: int, k: int) -> Tensor:
    x = torch.randn((m, k), device="cuda")
    return (
        x * torch.exp2(torch.randint(-4, 5, (m, k // 32), device="cuda").float()).repeat_interleave(32, 1)
    ).bfloat16()


def examples(op: registry.Op) -> None:
    for i, args in enumerate(op.inputs(torch.Generator().manual_seed(SEED))):
        on = [a.cuda() if isinstance(a, Tensor) else a for a in args]

        def measure(args: Any = args, on: Any = on) -> float:
            poison()
            got, want = getattr(kernels, op.name)(*on), op.reference(*args)
            if op.name == "quant_fp8":
                return sum(
                    float((a.cpu().view(torch.uint8) != b.view(torch.uint8)).sum())
                    for a, b in zip(got, want, strict=True)
                )
            return error(got.cpu(), want)

        case(op.name, f"example{i}", op.tolerance, measure)


def rows_of(op: str, name: str, run: Callable[[int], Tensor], want: Tensor) -> None:
    """Every row count against the reference, and its bits against those of the largest."""
    kept: list[Tensor] = []

    def largest() -> float:
        poison()
        kept.append(run(ROWS[-1]))
        return error(kept[0], want)

    case(op, f"{name}/M{ROWS[-1]}", 1e-3, largest)
    for m in ROWS[:-1]:

        def measure(m: int = m) -> float:
            poison()
            got = run(m)
            if not kernels.INVARIANT:
                return error(got, want[:m])
            return float("inf") if error(got, want[:m]) > 1e-3 else differing(got, kept[0][:m])

        case(op, f"{name}/M{m}" + BITS, 0 if kernels.INVARIANT else 1e-3, measure)

    def repeated() -> float:
        first = {m: kept[0][:m] if kernels.INVARIANT else run(m) for m in REPEATED}
        return sum(differing(run(m), want) for m, want in first.items() for _ in range(2 if SMALL else 20))

    case(op, f"{name}/repeated", 0, repeated)


def graphs(name: str, x: tuple[Tensor, Tensor], weights: list[tuple[Tensor, Tensor]]) -> None:
    """Back to back in a graph, where programmatic launches overlap."""

    def measure() -> float:
        bad = 0.0
        for m in (1, 12, 20, 64, 200):
            xs = (x[0][:m].contiguous(), x[1][:m].contiguous())
            want = [kernels.linear_fp8(*xs, *w) for w in weights]
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = [kernels.linear_fp8(*xs, *w) for w in weights for _ in range(3)]
            for _ in range(20):
                for g in got:
                    g.fill_(float("nan"))
                graph.replay()
                torch.cuda.synchronize()
                bad += sum(differing(g, want[i // 3]) for i, g in enumerate(got))
        return bad

    case("linear_fp8", f"{name}/graph", 0, measure)


def subnormal() -> None:
    """Codes below the normal range of e4m3 keep their value on the way through bf16 and the tensor core."""
    n, k = 512, 2304
    codes = torch.randint(0, 8, (n, k), device="cuda") + 128 * torch.randint(0, 2, (n, k), device="cuda")
    w, ws = codes.to(torch.uint8).view(torch.float8_e4m3fn), fp8_weight(n, k)[1]
    x = formats.quant_fp8(activations(64, k))
    want, plain = reference.linear_fp8(*x, w, ws), formats.dequant_fp8(*x).bfloat16()
    for m in (1, 16, 64):
        got = functools.partial(kernels.linear_fp8, x[0][:m], x[1][:m], w, ws)
        case("linear_fp8", f"subnormal codes/M{m}", 1e-3, lambda got=got, m=m: error(got(), want[:m]))
        mixed = functools.partial(kernels.linear_dequant, plain[:m], w, ws, 1)
        case("linear_dequant", f"subnormal codes/M{m}", 1e-3, lambda mixed=mixed, m=m: error(mixed(), want[:m]))


def checks() -> None:
    for name in ("quant_fp8", "linear_fp8", "linear_dequant", "linear"):
        examples(registry.OPS[name])
    for m, k in ((1, 5120), (33, 1280)) if SMALL else ((1, 5120), (64, 8192), (513, 1280), (8192, 5120)):

        def codes(m: int = m, k: int = k) -> float:
            x = activations(m, k)
            x[0, :64] = torch.tensor([448.0, 0.875, 1e-6, 0.0] * 16)
            got, want = kernels.quant_fp8(x), formats.quant_fp8(x)
            return sum(
                float((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in zip(got, want, strict=True)
            )

        case("quant_fp8", f"M{m}xK{k}", 0, codes)
    for name, (n, k) in FP8.items():
        w = fp8_weight(n, k)
        x = formats.quant_fp8(activations(ROWS[-1], k))
        torch.cuda.synchronize()
        want = reference.linear_fp8(*x, *w)
        rows_of("linear_fp8", name, lambda m, x=x, w=w: kernels.linear_fp8(x[0][:m], x[1][:m], *w), want)
        if SMALL:
            continue
        graphs(name, x, [w, fp8_weight(n, k)])
        if name == "wqkv_a":
            full = kernels.linear_fp8(*x, *w)
            for m in (1, 64, 600):
                case(
                    "linear_fp8",
                    f"row views/M{m}",
                    0 if kernels.INVARIANT else 1e-3,
                    lambda m=m, x=x, w=w, full=full: (differing if kernels.INVARIANT else error)(
                        torch.cat(
                            [
                                kernels.linear_fp8(x[0][:m], x[1][:m], w[0][a:b], w[1][a // 32 : b // 32])
                                for a, b in ((0, 1280), (1280, 1792))
                            ],
                            1,
                        ),
                        full[:m],
                    ),
                )

        def many(x: Any = x, w: Any = w, n: int = n, k: int = k) -> float:
            """8192 rows: the last 600 are those known."""
            filler = formats.quant_fp8(randn(8192 - ROWS[-1], k))
            poison()
            got = kernels.linear_fp8(torch.cat([filler[0], x[0]]), torch.cat([filler[1], x[1]]), *w)
            known = kernels.linear_fp8(*x, *w)
            return (differing if kernels.INVARIANT else error)(got[-ROWS[-1] :], known)

        case("linear_fp8", f"{name}/M8192" + BITS, 0 if kernels.INVARIANT else 1e-3, many)
        del want
    for name, (groups, n, k) in DEQUANT.items():
        w = fp8_weight(n, k)
        x = randn(ROWS[-1], groups * k)
        want = reference.linear_dequant(x, *w, groups)
        rows_of("linear_dequant", name, lambda m, x=x, w=w, g=groups: kernels.linear_dequant(x[:m], *w, g), want)
    for name, (n, k) in BF16.items():
        w, x = randn(n, k), randn(ROWS[-1], k)
        for bias, f32 in ((randn(n), False),) if name in ("vision", "odd") else ((None, name != "index_weights"),):
            want = reference.linear(x, w, bias, f32)
            label = f"{name}{'' if bias is None else '/bias'}"
            rows_of("linear", label, lambda m, x=x, w=w, b=bias, f=f32: kernels.linear(x[:m], w, b, f), want)
            del want
    if not kernels.INVARIANT:
        subnormal()


def main() -> None:
    print(f"seed {SEED}, {torch.cuda.get_device_name()}", flush=True)
    torch.manual_seed(SEED)
    begin = time.time()
    checks()
    failed = [f"{r['op']} {r['case']}" for r in RESULTS if not r["ok"]]
    seconds = round(time.time() - begin, 1)
    print(json.dumps({"family": "linear", "seed": SEED, "cases": len(RESULTS), "failed": failed, "seconds": seconds}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
