"""Linears and the quantiser against their references on a GPU: `python tests/gpu/check_linear.py [seed] [--tune]`.

Prints `ok|FAIL op case err=... limit=...` a case and one JSON line; a failing case does not stop the others. Fresh
random inputs each run. --tune times other tiles of the Hopper kernels (lines `tune ...`), checks their bits, and runs
after the checks.
"""

from __future__ import annotations

import functools
import json
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
ROWS = (0, 1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 130, 257, 600)
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
            return float("inf") if error(got, want[:m]) > 1e-3 else differing(got, kept[0][:m])

        case(op, f"{name}/M{m} (rows with other bits)", 0, measure)

    def repeated() -> float:
        return sum(differing(run(m), kept[0][:m]) for m in (1, 40, 64, 130) for _ in range(20))

    case(op, f"{name}/repeated", 0, repeated)


def graphs(name: str, x: tuple[Tensor, Tensor], weights: list[tuple[Tensor, Tensor]]) -> None:
    """Back to back in a graph, where programmatic launches overlap."""

    def measure() -> float:
        bad = 0.0
        for m in (1, 20, 64):
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


def checks() -> None:
    for name in ("quant_fp8", "linear_fp8", "linear_dequant", "linear"):
        examples(registry.OPS[name])
    for m, k in ((1, 5120), (64, 8192), (513, 1280), (8192, 5120)):

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
        graphs(name, x, [w, fp8_weight(n, k)])
        if name == "wqkv_a":
            full = kernels.linear_fp8(*x, *w)
            for m in (1, 64, 600):
                case(
                    "linear_fp8",
                    f"row views/M{m}",
                    0,
                    lambda m=m, x=x, w=w, full=full: differing(
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
            return differing(got[-ROWS[-1] :], kernels.linear_fp8(*x, *w))

        case("linear_fp8", f"{name}/M8192 (rows with other bits)", 0, many)
        del want
    for name, (groups, n, k) in {"wo_a": (8, 8192, 4096), "one": (1, 512, 1280), "odd": (3, 288, 224)}.items():
        w = fp8_weight(n, k)
        x = randn(ROWS[-1], groups * k)
        want = reference.linear_dequant(x, *w, groups)
        rows_of("linear_dequant", name, lambda m, x=x, w=w, g=groups: kernels.linear_dequant(x[:m], *w, g), want)
    for name, (n, k) in {
        "lm_head": (129280, 5120),
        "compressor": (1024, 5120),
        "index_weights": (32, 5120),
        "wk": (128, 512),
        "vision": (3456, 1152),
        "odd": (40, 2100),
    }.items():
        w, x = randn(n, k), randn(ROWS[-1], k)
        for bias, f32 in ((randn(n), False),) if name in ("vision", "odd") else ((None, name != "index_weights"),):
            want = reference.linear(x, w, bias, f32)
            label = f"{name}{'' if bias is None else '/bias'}"
            rows_of("linear", label, lambda m, x=x, w=w, b=bias, f=f32: kernels.linear(x[:m], w, b, f), want)
            del want
    case("linear_fp8", "locks are zero", 0, lambda: float(sum(int(p.abs().sum()) for p in kernels._LOCKS.values())))


def timed(label: str, run: Callable[[Any], Any], weights: list[Any], rate: Callable[[float], str]) -> None:
    """Time of `run` over rotating weights in a graph."""
    from deepinfer.studies.kernels.harness import graph_time_us

    try:
        us = graph_time_us(lambda: [functools.partial(run, w) for w in weights])
        print(f"tune {label}: {us:.1f} us {rate(us)}", flush=True)
    except Exception as problem:
        print(f"tune {label}: {type(problem).__name__} {str(problem)[:160]}", flush=True)


def tune_fp8(name: str, m: int, change: dict[str, Any], x: Any, weights: list[Any], want: Tensor) -> None:
    n, k = FP8[name]
    plan, out = {**kernels._fp8_plan(m, n, k), **change}, torch.empty_like(want)

    def run(w: Any) -> None:
        kernels.hopper_fp8(*x, *w, out, plan)

    def rate(us: float) -> str:
        run(weights[0])
        speed = f"{100 * n * k / 4.28e6 / us:.0f}% of bytes" if m <= 64 else f"{2e-6 * m * n * k / us:.0f} TFLOP/s"
        return speed + ("" if torch.equal(out, want) else " OTHER BITS")

    timed(f"{name}/M{m} {change}", run, weights, rate)


def tune() -> None:
    """Other tiles of the Hopper kernels: time, and whether their bits are the default's."""
    few = [{"ST": st, "BN": 64, "NW": 4} for st in (3, 4, 6, 8)] + [{"ST": st, "BN": 128, "NW": 8} for st in (3, 4)]
    small = {"BN": 64, "NW": 4, "DEEP": 2, "cap": 168}
    rows = [{"ST": 3}, {**small, "ST": 4}, {**small, "ST": 6}, {**small, "FLIP": True, "ST": 4}]
    rows += [{**small, "FLIP": True, "ST": 4, "DEEP": 1, "cap": 128}]
    half = {"BM": 64, "DEEP": 1, "cap": 128}
    many = [{"ST": 3}, {**half, "ST": 3}, {**half, "ST": 4}, {"ST": 3, "DEEP": 1}]
    for name in ("wq_b", "wo_b"):
        n, k = FP8[name]
        weights = [fp8_weight(n, k) for _ in range(4)]
        for m, changes in ((1, few), (8, few), (64, rows), (512, many), (8192, many)):
            x = formats.quant_fp8(activations(m, k))
            want = kernels.linear_fp8(*x, *weights[0])
            split = [{**half, "ST": 4, "SPLIT": True}] if m == 512 and kernels.fp8_chunks(n, k) > 1 else []
            for change in [{}, *changes, *split]:
                tune_fp8(name, m, change, x, weights, want)
    weights = [fp8_weight(8192, 4096) for _ in range(5)]
    for m, options in ((1, (4, 6, 8, 12)), (8, (6, 8, 12)), (64, (4, 5, 7))):
        rows_in = randn(m, 8 * 4096)
        for stages in options:
            timed(
                f"wo_a/M{m} stages={stages}",
                lambda w, x=rows_in, st=stages: kernels.hopper_dequant(x, *w, 8, st),
                weights,
                lambda us: f"{100 * 8192 * 4096 / 4.28e6 / us:.0f}% of bytes",
            )


def main() -> None:
    print(f"seed {SEED}, {torch.cuda.get_device_name()}", flush=True)
    torch.manual_seed(SEED)
    begin = time.time()
    checks()
    failed = sum(not r["ok"] for r in RESULTS)
    seconds = round(time.time() - begin, 1)
    print(json.dumps({"family": "linear", "seed": SEED, "cases": len(RESULTS), "failed": failed, "seconds": seconds}))
    if "--tune" in sys.argv:
        tune()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
