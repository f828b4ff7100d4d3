"""Norm, RoPE and hyper-connection kernels against their references on this GPU: `python tests/gpu/check_hyper.py`.

With DEEPINFER_BATCH_INVARIANT=1 also: a row of mHC alone has the bits that it has in any batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import SMALL, Args, Checks, poison, raw, relative

from deepinfer.ops import formats, registry
from deepinfer.ops.common import randn

H = 192 if SMALL else 5120
ROWS = (0, 1, 2, 7, 9, 65) if SMALL else (0, 1, 2, 7, 33, 65, 257)


def boundary(g: torch.Generator, t: int, h: int = H) -> Args:
    state = (torch.rand((t, 4), generator=g), torch.rand((t, 4, 4), generator=g) / 2, torch.rand((t, 4), generator=g))
    fn = torch.randn((24, 4 * h), generator=g) * h**-0.5
    weights = (fn, torch.randn(24, generator=g), torch.rand(3, generator=g), randn(g, h))
    return (randn(g, t, h), randn(g, t, 4, h), *state, *weights, 20, 1e-6, 1e-20)


def cuda(args: Args) -> Args:
    return tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in args)


def differ(a: Args, b: Args) -> float:
    """Bytes that two results do not share."""
    return sum(float((raw(x) != raw(y)).sum()) for x, y in zip(a, b, strict=True))


def boundary_case(checks: Checks, t: int, h: int = H) -> None:
    """Every output against what the reference makes of the kernel's own input to that step.

    A stream that lies next to a boundary between two bf16 may fall on its other side (fma rounds once where the
    reference rounds twice): 2^-8 of one of 20,480 terms, 2e-5 of a coefficient, which is no error of the mix.
    """
    from deepinfer.ops.triton import hyper, implementation

    def step() -> None:
        args = boundary(checks.generator(), t, h)
        poison()
        on_gpu = cuda(args)
        got = implementation("hc_boundary")(*on_gpu)
        streams, pre, post, comb, x, codes, scales = (o.cpu() for o in got)
        want = registry.OPS["hc_write"].reference(*args[:4])
        checks.say("hc_boundary", f"T{t}/H{h} streams", relative(streams.float(), want.float()), 1e-3)
        mixed = registry.OPS["hc_mix"].reference(streams, *args[5:8], *args[9:])
        for name, a, b in zip(("pre", "post", "comb"), (pre, post, comb), mixed, strict=True):
            checks.say("hc_boundary", f"T{t}/H{h} {name}", relative(a, b), 1e-5)
        row = registry.OPS["hc_collapse"].reference(streams, args[4])
        want = registry.OPS["rms_norm"].reference(row, args[8], args[11])
        checks.say("hc_boundary", f"T{t}/H{h} x", relative(x.float(), want.float()), 5e-3)
        wrong = (raw(codes) != raw(formats.quant_fp8(x)[0])).sum() + (scales != formats.quant_fp8(x)[1]).sum()
        checks.say("hc_boundary", f"T{t}/H{h} codes of x", float(wrong), 0.0)
        if t:
            mixed = hyper.hc_mix(got[0], *on_gpu[5:8], *on_gpu[9:])
            checks.say("hc_mix", f"T{t}/H{h} equals hc_boundary", differ(mixed, got[1:4]), 0.0)
        if t and (hyper.INVARIANT or h % 64):
            for r in sorted({0, t // 2, t - 1}):
                one = hyper.hc_boundary(*(a[r : r + 1] if j < 5 else a for j, a in enumerate(on_gpu)))
                checks.say("hc_boundary", f"T{t}/H{h} row {r} alone", differ(one, [o[r : r + 1] for o in got]), 0.0)

    checks.attempt("hc_boundary", f"T{t}/H{h}", step)


def forms(checks: Checks, t: int) -> None:
    """Forms and cuts of the first half agree: streams and rows exactly, coefficients up to the order of sums."""
    from deepinfer.ops.triton import hyper

    plan = hyper.Plan
    cuts = [plan("any", 32, -(-t // 16), 8, 4), plan("sm90", 64, 1, 32, 1), plan("sm90", 64, 3, 8, 4)]
    cuts += [plan("sm90", 32, 2, 1, 32), plan("sm90", 128, 2, 8, 4)]
    if t <= hyper.FEW_ROWS:
        cuts.append(plan("few", 32, 1, 1, 32))

    def step() -> None:
        args = cuda(boundary(checks.generator(), t, 5120))
        want = hyper.hc_boundary(*args)
        for cut in cuts:
            poison()
            got = hyper.hc_boundary(*args, plan=cut)
            name = f"T{t} {'/'.join(map(str, cut))}"
            checks.say("hc_boundary", name, differ(got[:1] + got[4:], want[:1] + want[4:]), 0.0)
            worst = max(relative(a, b) for a, b in zip(got[1:4], want[1:4], strict=True))
            checks.say("hc_boundary", f"{name} coefficients", worst, 1e-5)

    checks.attempt("hc_boundary", f"T{t} forms", step)


def graphs(checks: Checks, t: int) -> None:
    """A replayed graph gives what eager gave: programmatic launches keep their order."""
    from deepinfer.ops.triton import hyper

    def step() -> None:
        args = cuda(boundary(checks.generator(), t))
        want = hyper.hc_boundary(*args)
        want_next = hyper.hc_boundary(args[0], *want[:1], want[2], want[3], want[1], *args[5:])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = hyper.hc_boundary(*args)
            second = hyper.hc_boundary(args[0], *first[:1], first[2], first[3], first[1], *args[5:])
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        checks.say("hc_boundary", f"T{t} graph", differ(first, want) + differ(second, want_next), 0.0)

    checks.attempt("hc_boundary", f"T{t} graph", step)


def cases(g: torch.Generator) -> Iterator[tuple[str, str, Args, tuple[int, ...]]]:
    from deepinfer.ops.triton import hyper

    for t in ROWS:
        angle = torch.rand((t, 32), generator=g) * 6.0
        for n in (128, H) if SMALL else (128, 512, 1280, H):
            yield "rms_norm", f"{t}x{n}", (randn(g, t, n), randn(g, n), 1e-20), (0,)
        yield "rope", f"q/{t}", (randn(g, t, 64, 512), angle.cos(), angle.sin(), t % 2 == 0), (0, 1, 2)
        yield "rope", f"kv/{t}", (randn(g, t, 512), angle.cos(), angle.sin(), False), (0, 1, 2)
        b = boundary(g, t)
        yield "hc_mix", f"T{t}", (b[1], *b[5:8], *b[9:]), (0,) if hyper.INVARIANT else ()
        yield "hc_collapse", f"T{t}", (b[1], b[4]), (0, 1)
        yield "hc_write", f"T{t}", b[:4], (0, 1, 2, 3)


def main() -> None:
    checks = Checks("hyper")
    checks.examples("rms_norm", "rope", "hc_mix", "hc_collapse", "hc_write")
    for name, case, args, rows in cases(checks.generator()):
        checks.compare(name, case, args, rows=rows)
    for t in ROWS:
        boundary_case(checks, t)
        if not SMALL:  # compute-sanitizer cannot capture
            graphs(checks, max(1, t))
    boundary_case(checks, 9, 5120)
    if not SMALL:
        boundary_case(checks, 600)
        for h in (96, 192, 2048, 7168):
            boundary_case(checks, 9, h)
        for t in (1, 4, 64, 130, 600):
            forms(checks, t)
    checks.finish()


if __name__ == "__main__":
    main()
