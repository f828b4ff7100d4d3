"""Experts, router and SwiGLU kernels against their references on a GPU: `python tests/gpu/check_experts.py [seed]`.

Real dimensions need about 25 GB; with DEEPINFER_CHECK_SMALL=1 small ones that reach every kernel (compute-sanitizer).
With DEEPINFER_BATCH_INVARIANT=1 a row must have the same bits for every number of rows.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from harness import SMALL, Checks, poison
from torch import Tensor

from deepinfer.ops import formats, moe, registry
from deepinfer.ops.common import fp4_weight, randn
from deepinfer.ops.triton import experts as kernels

CHECKS = Checks("experts")
SEED, case = CHECKS.seed, CHECKS.case
EXPERTS, HIDDEN, WIDTH, TOP = 384, 5120, 2304, 6


def error(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius error; inf where a holds NaN."""
    if not a.numel():
        return 0.0
    if not bool(torch.isfinite(a.double()).all()):
        return float("inf")
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


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

    for n in (0, 1, 2, 7, 8, 9, 33, 64, 257, 640, 1200, 2500, 8192):
        nt = kernels.tokens_per_item(n * TOP, EXPERTS)
        # one row: a rounding of a large activation that falls the other way counts
        case("experts", f"real/T{n}/nt{nt}", 1e-2 if n == 1 else 5e-3, lambda n=n: against_reference(n))
    same = torch.arange(0, EXPERTS, EXPERTS // TOP, device="cuda", dtype=torch.int32)[:TOP].repeat(rows, 1)
    same[:, -1] = EXPERTS - 1
    for n in (1, 64, 257, 2500):
        case("experts", f"real/T{n}/six-experts", 1e-2 if n == 1 else 5e-3, lambda n=n: against_reference(n, same))

    def bits() -> float:
        """Row 5 of every batch size against the row alone."""
        at = 5
        alone = kernels.experts(
            x[at : at + 1], scale[at : at + 1], ids[at : at + 1], weights[at : at + 1], *prepared, 10.0
        )
        sizes = (6, 8, 9, 33, 64, 257, 640, 1200, 2500, 8192)
        if not kernels.INVARIANT:  # one row, and prefill, have their own kernels
            alone = run(6)[at : at + 1]
            sizes = tuple(n for n in sizes if n * TOP <= kernels.PREFILL_MEAN * EXPERTS)
        bad = [n for n in sizes if not torch.equal(run(n)[at], alone[0])]
        if bad:
            print("  bits differ at rows", bad, [error(run(n)[at], alone[0]) for n in bad], flush=True)
        return float(len(bad))

    case("experts", "real/row-bits", 0.0, bits)

    def prefill(n: int, ids: Tensor = ids) -> Tensor:
        """Prefill's kernel, whether or not the op takes it at n rows."""
        y = kernels._run_prefill(x[:n], scale[:n], ids[:n], weights[:n], *prepared, 10.0)
        return y.float().view(n, TOP, HIDDEN).sum(1)

    for n in (1800, 2500, 8192):
        case("experts", f"real/T{n}/prefill", 5e-3, lambda n=n: error(prefill(n), reference(n)))
    for n in (2460, 2500, 3080, 3100):  # the last item of an expert takes every width of the tiles
        case("experts", f"real/T{n}/six-experts/prefill", 5e-3, lambda n=n: error(prefill(n, same), reference(n, same)))

    def prefill_bits() -> float:
        """A row in batches of other sizes: all widths of the tiles."""
        want = prefill(rows)[5]
        return float(sum(not torch.equal(prefill(n)[5], want) for n in (6, 1800, 2500, 4100, 6000)))

    case("experts", "real/prefill-row-bits", 0.0, prefill_bits)

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
        y = kernels._run_portable(x[:64], scale[:64], ids[:64], weights[:64], *stored, 10.0)
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

    for n in (0, 1, 2, 7, 16, 17, 64, 257, 1024, 1025, 2100):
        case("router", f"real/T{n}", 1e-4, lambda n=n: measure(n))

    def bits() -> float:
        alone = kernels.router(x[3:4], w, bias, bias_vl, image[3:4], TOP, 1.5)
        sizes = (4, 33, 256, 257, 1024) + ((2100,) if kernels.INVARIANT else ())  # prefill adds in another order
        batches = [kernels.router(x[:n], w, bias, bias_vl, image[:n], TOP, 1.5) for n in sizes]
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


def small_experts() -> None:
    """Every Hopper kernel at small dimensions, inputs between guard pages: one row, 8 to 64 tokens an item, prefill."""
    g = CHECKS.generator()
    e, h, i = 8, 1280, 1280
    weights = (*fp4_weight(g, e, 2 * i, h), *fp4_weight(g, e, h, i))

    def run(*args: Any) -> Tensor:
        return kernels.experts(*args[:4], *kernels.prepare_experts(*args[4:8]), args[8])

    def prefill(*args: Any) -> Tensor:
        y = kernels._run_prefill(*args[:4], *kernels.prepare_experts(*args[4:8]), args[8])
        return y.float().view(*args[2].shape, h).sum(1)

    for t in (1, 2, 9, 23, 40, 60, 150, 380):
        ids = torch.stack([torch.randperm(e, generator=g)[:3].sort().values for _ in range(t)]).int()
        args = (*formats.quant_fp8(randn(g, t, h)), ids, torch.rand((t, 3), generator=g), *weights, 10.0)
        CHECKS.compare("experts", f"small/T{t}", args, run=run, limits={0: 2e-2 if t < 9 else 5e-3})
        if t >= 60:
            CHECKS.compare("experts", f"small/T{t}/prefill", args, run=prefill)


def main() -> None:
    print(f"batch invariant: {kernels.INVARIANT}", flush=True)
    torch.manual_seed(SEED)
    parts = [lambda: op_inputs("swiglu"), lambda: op_inputs("router"), lambda: op_inputs("experts"), small_experts]
    for part in parts if SMALL else (*parts, real_swiglu, real_router, real_experts):
        try:
            part()
        except Exception as problem:
            traceback.print_exc(limit=6)
            print(f"FAIL {part.__name__} setup {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            CHECKS.failed.append(f"{part.__name__} setup")
    CHECKS.finish()


if __name__ == "__main__":
    main()
