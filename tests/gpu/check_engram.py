"""Engram kernels against their references on this GPU, tables on the device and in pinned memory:
`python tests/gpu/check_engram.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import SMALL, Args, Checks, poison, raw

from deepinfer.ops import formats, registry
from deepinfer.ops.common import randn

H = 192 if SMALL else 5120
ROWS = (0, 1, 7, 33) if SMALL else (0, 1, 2, 7, 33, 64, 257, 300)


def hashes(g: torch.Generator, t: int) -> Args:
    primes = 16_000_057 + 2 * torch.arange(24)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), primes.cumsum(0)[:-1]))
    multipliers = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
    return (torch.randint(0, 99092, (t, 4), generator=g, dtype=torch.int32), multipliers, primes, offsets)


def cases(g: torch.Generator) -> Iterator[tuple[str, str, Args, tuple[int, ...]]]:
    table, scale = formats.quant_fp8(randn(g, 50_000, 256))
    for t in ROWS:
        half = t // 2
        ids = torch.randint(0, 129_280, (t,), generator=g, dtype=torch.int32)
        pos = torch.cat((torch.arange(half), torch.arange(900, 900 + t - half))).int()
        slots = torch.cat((torch.full((half,), 3), torch.full((t - half,), 1))).int()
        start = torch.cat((torch.zeros(half), torch.full((t - half,), half))).int()
        token_map = torch.randint(0, 99092, (129_280,), generator=g, dtype=torch.int32)
        history = torch.randint(-1, 129_280, (5, 8), generator=g, dtype=torch.int32)
        image = torch.rand(t, generator=g) < 0.2
        yield "engram_lookback", f"{t}", (ids, pos, slots, start, image, token_map, history, 2, 4), ()
        yield "engram_rows", f"{t}", hashes(g, t), (0,)
        rows = torch.randint(0, 50_000, (t, 24), generator=g)
        yield "engram_gather", f"{t}", (rows, table, scale, t % 2 == 1), (0,)
        gate = (randn(g, t, 4, H), randn(g, t, 5 * H), randn(g, 4, H), randn(g, 4, H), image, 1e-20)
        yield "engram_gate", f"{t}", gate, (0, 1, 4)


def pinned(checks: Checks) -> None:
    """A table in pinned host memory, through the kernel and through the dispatcher, gives the same bits."""
    from deepinfer.ops.triton import engram

    def step() -> None:
        g = checks.generator()
        table, scale = (a.pin_memory() for a in formats.quant_fp8(randn(g, 50_000, 256)))
        rows = torch.randint(0, 50_000, (64, 24), generator=g)
        want = registry.OPS["engram_gather"].reference(rows, table, scale, False)
        poison()
        got = engram.engram_gather(rows.cuda(), table, scale, False)
        checks.say("engram_gather", "pinned", float((raw(got.cpu()) != raw(want)).sum()), 0.0)
        if registry.OPS["engram_gather"].chosen["cuda"] == "triton":
            got = registry.OPS["engram_gather"].overload(rows.cuda(), table, scale, False)
            checks.say("engram_gather", "pinned, dispatched", float((raw(got.cpu()) != raw(want)).sum()), 0.0)

    checks.attempt("engram_gather", "pinned", step)


def main() -> None:
    checks = Checks("engram")
    checks.examples("engram_lookback", "engram_rows", "engram_gather", "engram_gate")
    for name, case, args, rows in cases(checks.generator()):
        checks.compare(name, case, args, rows=rows)
    pinned(checks)
    checks.finish()


if __name__ == "__main__":
    main()
