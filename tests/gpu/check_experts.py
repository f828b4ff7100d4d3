"""Experts, router and SwiGLU kernels against their references on a GPU: `python tests/gpu/check_experts.py [seed]`.

Prints `ok|FAIL op case err=... limit=...` a case and one JSON line; a failing case does not stop the others. Fresh
random inputs each run. Needs about 25 GB.
"""

from __future__ import annotations

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

from deepinfer.ops import formats, moe, registry
from deepinfer.ops.triton import experts as kernels

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else int(time.time()) % 100000
EXPERTS, HIDDEN, WIDTH, TOP = 384, 5120, 2304, 6
RESULTS: list[dict[str, Any]] = []


def error(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius error; inf where a holds NaN."""
    if not a.numel():
        return 0.0
    if not bool(torch.isfinite(a.double()).all()):
        return float("inf")
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


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


def cuda(args: tuple[Any, ...]) -> list[Any]:
    return [a.cuda() if isinstance(a, Tensor) else a for a in args]


def op_inputs(op: str) -> None:
    definition = registry.OPS[op]
    for i, args in enumerate(definition.inputs(torch.Generator().manual_seed(SEED))):

        def measure(args: tuple[Any, ...] = args) -> float:
            poison()
            moved = cuda(args)
            if op == "experts":
                moved[4:8] = kernels.prepare_experts(*moved[4:8])
            got, want = getattr(kernels, op)(*moved), definition.reference(*args)
            pairs = zip(*(o if isinstance(o, tuple) else (o,) for o in (got, want)), strict=True)
            worst = 0.0
            for a, b in pairs:
                a = a.cpu()
                assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype)
                worst = max(worst, float((a != b).any()) if a.dtype is torch.int32 else error(a, b))
            return worst

        case(op, f"inputs/{i}", definition.tolerance, measure)


def routing(g: torch.Generator, t: int) -> Tensor:
    return torch.rand((t, EXPERTS), generator=g, device="cuda").topk(TOP).indices.sort(dim=1).values.int()


def real_experts() -> None:
    g = torch.Generator(device="cuda").manual_seed(SEED)

    def rand8(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda", generator=g)

    stored = (
        rand8(0, 256, EXPERTS, 2 * WIDTH, HIDDEN // 2),
        rand8(115, 121, EXPERTS, 2 * WIDTH, HIDDEN // 32),
        rand8(0, 256, EXPERTS, HIDDEN, WIDTH // 2),
        rand8(115, 121, EXPERTS, HIDDEN, WIDTH // 32),
    )
    begin = time.perf_counter()
    prepared = kernels.prepare_experts(*stored)
    torch.cuda.synchronize()
    print(f"prepare_experts: {time.perf_counter() - begin:.1f} s, changed: {prepared[0] is not stored[0]}", flush=True)

    rows = 8192
    x, scale = formats.quant_fp8(torch.randn((rows, HIDDEN), generator=g, device="cuda").bfloat16())
    ids, weights = routing(g, rows), torch.rand((rows, TOP), generator=g, device="cuda")

    def run(n: int, ids: Tensor = ids, weights: Tensor = weights) -> Tensor:
        return kernels.experts(x[:n], scale[:n], ids[:n], weights[:n], *prepared, 10.0)

    def reference(n: int, ids: Tensor = ids, weights: Tensor = weights) -> Tensor:
        return moe.experts(x[:n], scale[:n], ids[:n], weights[:n], *stored, 10.0)

    def against_reference(n: int, ids: Tensor = ids) -> float:
        poison()
        got = run(n, ids)
        assert got.shape == (n, HIDDEN) and got.dtype is torch.float32
        return error(got, reference(n, ids))

    for n in (0, 1, 2, 7, 8, 9, 33, 64, 85, 86, 257, 640, 1200, 2500):
        nt = kernels.tokens_per_item(n * TOP, EXPERTS)
        case("experts", f"real/T{n}/nt{nt}", 5e-3, lambda n=n: against_reference(n))
    same = torch.arange(0, EXPERTS, EXPERTS // TOP, device="cuda", dtype=torch.int32)[:TOP].repeat(rows, 1)
    same[:, -1] = EXPERTS - 1
    for n in (1, 64, 257, 2500):
        case("experts", f"real/T{n}/six-experts", 5e-3, lambda n=n: against_reference(n, same))

    def bits() -> float:
        """Row 5 of every batch size against the row alone."""
        at = 5
        alone = kernels.experts(
            x[at : at + 1], scale[at : at + 1], ids[at : at + 1], weights[at : at + 1], *prepared, 10.0
        )
        bad = [n for n in (6, 8, 9, 33, 64, 257, 640, 1200, 2500, 8192) if not torch.equal(run(n)[at], alone[0])]
        if bad:
            print("  bits differ at rows", bad, [error(run(n)[at], alone[0]) for n in bad], flush=True)
        return float(len(bad))

    case("experts", "real/row-bits", 0.0, bits)

    def repeated(n: int) -> float:
        """A captured graph, replayed: the bits of the eager call every time (races, programmatic launches)."""
        want = run(n)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(n)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [run(n) for _ in range(3)]
        wrong = 0
        for _ in range(20):
            for o in outs:
                o.fill_(float("nan"))
            graph.replay()
            wrong += sum(not torch.equal(o, want) for o in outs)
        return float(wrong)

    for n in (1, 8, 64, 640, 2500):
        case("experts", f"real/T{n}/graph", 0.0, lambda n=n: repeated(n))

    def absent() -> float:
        """Ids outside the experts (another rank's) add nothing: as with a zero weight."""
        gone, none = ids[:33].clone(), weights[:33].clone()
        gone[::3, 1], none[::3, 1] = -1, 0.0
        poison()
        return error(run(33, gone, weights[:33]), reference(33, ids[:33], none))

    case("experts", "real/absent-ids", 5e-3, absent)

    def portable() -> float:
        """The portable kernel at real dimensions, on weights as stored (what sm_100 runs)."""
        nt = kernels.tokens_per_item(64 * TOP, EXPERTS)
        y = kernels._run_portable(x[:64], scale[:64], ids[:64], weights[:64], *stored, 10.0, nt)
        return error(y.float().view(64, TOP, HIDDEN).sum(1), reference(64))

    case("experts", "real/T64/portable", 5e-3, portable)

    def narrow() -> float:
        """A row with scales wider than e4m3 holds (rounded on the grid of 2^11 below its largest)."""
        part = [w[:8].clone() for w in stored]
        part[1][:, ::3, 7] -= 14
        wide = kernels.prepare_experts(*part)
        few = torch.arange(TOP, device="cuda", dtype=torch.int32).repeat(9, 1)
        got = kernels.experts(x[:9], scale[:9], few, weights[:9], *wide, 10.0)
        return error(got, moe.experts(x[:9], scale[:9], few, weights[:9], *part, 10.0))

    case("experts", "real/wide-scales", 5e-3, narrow)


def real_router() -> None:
    g = torch.Generator(device="cuda").manual_seed(SEED + 1)
    rows = 2100
    x = torch.randn((rows, HIDDEN), generator=g, device="cuda").bfloat16()
    w = (torch.randn((EXPERTS, HIDDEN), generator=g, device="cuda") * 0.02).bfloat16()
    bias, bias_vl = torch.randn((2, EXPERTS), generator=g, device="cuda") * 0.1
    image = torch.arange(rows, device="cuda") % 5 == 0

    def measure(n: int) -> float:
        poison()
        ids, weights = kernels.router(x[:n], w, bias, bias_vl, image[:n], TOP, 1.5)
        want, expected = moe.router(x[:n], w, bias, bias_vl, image[:n], TOP, 1.5)
        assert ids.dtype is torch.int32 and ids.shape == (n, TOP)
        equal = (ids == want).all(dim=1)
        if not bool(equal.all()):  # sums in another order: only a near tie may decide otherwise
            score = torch.nn.functional.softplus(x[:n].double() @ w.double().t()).sqrt()
            choice = score + torch.where(image[:n, None], bias_vl, bias).double()
            least = choice.gather(1, want.long()).amin(1), choice.gather(1, ids.long()).amin(1)
            assert bool(((least[0] - least[1]).abs() < 1e-5).all()), "picked another expert"
        return error(weights[equal], expected[equal])

    for n in (0, 1, 2, 7, 33, 64, 256, 257, 2100):
        case("router", f"real/T{n}", 1e-4, lambda n=n: measure(n))

    def bits() -> float:
        alone = kernels.router(x[3:4], w, bias, bias_vl, image[3:4], TOP, 1.5)
        batches = [kernels.router(x[:n], w, bias, bias_vl, image[:n], TOP, 1.5) for n in (4, 33, 256, 257, 2100)]
        return float(
            sum(not all(torch.equal(a[0], b[3]) for a, b in zip(alone, many, strict=True)) for many in batches)
        )

    case("router", "real/row-bits", 0.0, bits)


def real_swiglu() -> None:
    for n in (0, 1, 7, 257, 4096):

        def measure(n: int = n) -> float:
            poison()
            x = torch.randn((n, 2 * WIDTH), device="cuda").bfloat16() * 8
            return error(kernels.swiglu(x, 10.0), moe.swiglu(x, 10.0))

        case("swiglu", f"real/T{n}", 1e-3, measure)


def main() -> int:
    print(f"experts family, seed {SEED}, {torch.cuda.get_device_name()}", flush=True)
    torch.manual_seed(SEED)
    for part in (lambda: op_inputs("swiglu"), lambda: op_inputs("router"), lambda: op_inputs("experts")):
        part()
    for part in (real_swiglu, real_router, real_experts):
        try:
            part()
        except Exception as problem:
            traceback.print_exc(limit=6)
            RESULTS.append({"op": part.__name__, "case": "setup", "ok": False, "err": str(problem)[:200]})
            print(f"FAIL {part.__name__} setup {type(problem).__name__}: {str(problem)[:300]}", flush=True)
    failed = [r for r in RESULTS if not r["ok"]]
    print(json.dumps({"family": "experts", "seed": SEED, "cases": len(RESULTS), "failed": failed}, default=str))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
