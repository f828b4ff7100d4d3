"""TileLang kernels and the TileKernels adapter against the references. `python tests/gpu/check_tilelang.py`.

Without TileLang (PYTHONPATH has no site with it) it says so and passes. Programs are compiled first, in threads.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import SMALL, Args, Checks, poison, raw, relative

from deepinfer.ops import formats, registry
from deepinfer.ops.common import randn

H = 5120
ROWS = (0, 1, 7) if SMALL else (0, 1, 33, 128, 129, 257)
# streams within one bf16 rounding; coefficients 1e-5; x and codes follow the order of one sum
BOUNDARY = (1e-3, 1e-5, 1e-5, 1e-5, 5e-3)


def boundary(g: torch.Generator, t: int, h: int = H) -> Args:
    state = (torch.rand((t, 4), generator=g), torch.rand((t, 4, 4), generator=g) / 2, torch.rand((t, 4), generator=g))
    fn = torch.randn((24, 4 * h), generator=g) * h**-0.5
    weights = (fn, torch.randn(24, generator=g), torch.rand(3, generator=g), randn(g, h))
    return (randn(g, t, h), randn(g, t, 4, h), *state, *weights, 20, 1e-6, 1e-20)


def cases(g: torch.Generator) -> Iterator[tuple[str, str, Args, tuple[int, ...]]]:
    for t in ROWS:
        angle = torch.rand((t, 32), generator=g) * 6.0
        for n in (512, H):
            yield "rms_norm", f"{t}x{n}", (randn(g, t, n), randn(g, n), 1e-20), (0,)
        yield ("rope", f"q/{t}", (randn(g, t, 64, 512), angle.cos(), angle.sin(), False), (0, 1, 2))
        yield ("rope", f"kv/{t}", (randn(g, t, 512), angle.cos(), angle.sin(), False), (0, 1, 2))
        yield ("quant_fp8", f"T{t}", (randn(g, t, H) * 10 ** torch.randint(-6, 5, (t, 1), generator=g),), (0,))
        yield "pack_window", f"T{t}", (randn(g, t, 512),), (0,)
        b = boundary(g, t)
        yield "hc_collapse", f"T{t}", (b[1], b[4]), (0, 1)
        yield "hc_write", f"T{t}", b[:4], (0, 1, 2, 3)
        yield "hc_mix", f"T{t}", (b[1], *b[5:8], *b[9:]), (0,)
        gate = (randn(g, t, 4, H), randn(g, t, 5 * H), randn(g, 4, H), randn(g, 4, H), torch.arange(t) % 4 == 1, 1e-20)
        yield "engram_gate", f"T{t}", gate, (0, 1, 4)


def boundaries(checks: Checks, run: Callable[..., Any], t: int, h: int) -> None:
    """hc_boundary against the reference; its codes are those of its own x; row bits; a replayed graph."""
    args = boundary(checks.generator(), t, h)
    mine = tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in args)
    poison()
    got = run(*mine)
    want = registry.OPS["hc_boundary"].reference(*args)
    name = f"T{t}/H{h}"
    for i, limit in enumerate(BOUNDARY):
        checks.say("hc_boundary", f"{name}[{i}]", relative(got[i].cpu().float(), want[i].float()), limit)
    values = [formats.dequant_fp8(o[5].cpu(), o[6].cpu()) for o in (got, want)]
    checks.say("hc_boundary", f"{name}[codes]", relative(*values), 2e-2)
    codes, scales = formats.quant_fp8(got[4].cpu())
    wrong = (raw(got[5].cpu()) != raw(codes)).sum() + (got[6].cpu() != scales).sum()
    checks.say("hc_boundary", f"{name} codes of x", float(wrong), 0.0)
    for r in sorted({0, t // 2, t - 1}) if t else ():
        one = run(*(a[r : r + 1] if j < 5 else a for j, a in enumerate(mine)))
        wrong = sum(float((raw(a) != raw(b[r : r + 1])).sum()) for a, b in zip(one, got, strict=True))
        checks.say("hc_boundary", f"{name} row {r} alone", wrong, 0.0)


def graph(checks: Checks, run: Callable[..., Any]) -> None:
    """A replayed graph gives what eager gave, and four pairs of launches in flight what one pair gives."""
    args = tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in boundary(checks.generator(), 1900))
    want = run(*args)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        first = run(*args, block_rows=512)
        second = run(*args, block_rows=512)
    for _ in range(5):
        captured.replay()
    torch.cuda.synchronize()
    for out in (first, second):
        wrong = sum(float((raw(a) != raw(b)).sum()) for a, b in zip(out, want, strict=True))
        checks.say("hc_boundary", "graph", wrong, 0.0)
    captured.reset()


def libraries(checks: Checks) -> None:
    """TileKernels through the adapter, where it can be bound here."""
    from deepinfer.ops.providers import reason_against, tile_kernels

    def step(binding: Any, case: str, args: Args) -> None:
        if reason := reason_against(binding):
            print(f"no   tile_kernels {binding.op}: {reason}", flush=True)
            return
        checks.compare(binding.op, f"tile_kernels/{case}", args, run=binding.run)

    for binding in tile_kernels.BINDINGS:
        g = checks.generator()
        for t in (1, 65):
            args = {
                "hc_write": lambda t=t, g=g: boundary(g, t)[:4],
                "rms_norm": lambda t=t, g=g: (randn(g, t, H), randn(g, H), 1e-20),
                "quant_fp8": lambda t=t, g=g: (randn(g, t, H),),
                "swiglu": lambda t=t, g=g: (randn(g, t, 4608) * 8, 10.0),
                "engram_gate": lambda t=t, g=g: (
                    randn(g, t, 4, H), randn(g, t, 5 * H), randn(g, 4, H), randn(g, 4, H), torch.arange(t) % 4 == 1,
                    1e-20,
                ),
                "router": lambda t=t, g=g: (
                    randn(g, t, H), randn(g, 384, H) * H**-0.5, torch.rand(384, generator=g),
                    torch.rand(384, generator=g), torch.arange(t) % 4 == 1, 6, 1.5,
                ),
            }[binding.op]()  # fmt: skip
            checks.attempt(binding.op, f"tile_kernels/T{t}", lambda b=binding, t=t, a=args: step(b, f"T{t}", a))


def others() -> list[Any]:
    """Programs of the shapes below that are not the release's: compiled in the same threads."""
    from deepinfer.ops.tilelang import engram, hyper, norm
    from deepinfer.ops.tilelang.compile import Variant

    found = [
        (norm.norm_program, 64),
        (norm.rope_program, 3, 32, 8, False),
        (norm.rope_program, 1, 32, 8, True),
        (norm.quant_program, 12, 0),
        (norm.quant_program, 8, 80),
        (engram.gate_program, 4, 64, 1),
    ]
    hopper = torch.cuda.get_device_capability()[0] == 9
    for h in (64,) if SMALL else (64, 192, 2048, 7168):
        _, each = hyper._slices(h, True)
        found.append((hyper.project_program, h, 1, True, True, hopper))
        found.append((hyper.finish_program, h, h // hyper.BK, each, True, True))
    found += [
        (hyper.write_program, 64),
        (hyper.collapse_program, 64),
        (hyper.project_program, 64, 1, False, True, hopper),
    ]
    found += [(hyper.finish_program, 64, 2, 2, True, False), (hyper.project_program, H, 5, False, True, hopper)]
    found += [(hyper.finish_program, H, 32, 1, False, False)]
    return [Variant(program.__name__, program, tuple(args)) for program, *args in found]


def main() -> None:
    checks = Checks("tilelang")
    if importlib.util.find_spec("tilelang") is None:
        print("tilelang is not installed: nothing to check", flush=True)
        checks.finish()
    from deepinfer.ops.tilelang import KERNELS, compile, implementation

    start = time.time()
    compile.build_all(compile.variants() + others())
    print(f"compiled in {time.time() - start:.1f} s", flush=True)
    for op in KERNELS:
        if op != "hc_boundary":
            checks.examples(op, run=implementation(op))
    for op, case, args, rows in cases(checks.generator()):
        checks.compare(op, case, args, run=implementation(op), rows=rows)
    run = implementation("hc_boundary")
    sizes = [(t, H) for t in ROWS] + ([] if SMALL else [(600, H), (9, 192), (9, 2048), (9, 7168)])
    for t, h in sizes:
        checks.attempt("hc_boundary", f"T{t}/H{h}", lambda t=t, h=h: boundaries(checks, run, t, h))
    if not SMALL:
        checks.attempt("hc_boundary", "graph", lambda: graph(checks, run))
        libraries(checks)
    checks.finish()


if __name__ == "__main__":
    sys.exit(main())
