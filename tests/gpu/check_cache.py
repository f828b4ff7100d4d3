"""Cache record kernels against their references on this GPU: `python tests/gpu/check_cache.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import SMALL, Args, Checks, poison, raw

from deepinfer.ops import records
from deepinfer.ops.common import randn

ROWS = (0, 1, 7, 33) if SMALL else (0, 1, 2, 7, 33, 64, 257, 2049)


def extreme(g: torch.Generator, t: int, dim: int) -> torch.Tensor:
    """Rows of every magnitude, subnormals, ties, zeros."""
    x = randn(g, t, dim).float() * 2.0 ** torch.randint(-140, 120, (t, 1), generator=g).float()
    x[::5] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(dim // 8)
    x[1::7] = -0.0
    return x.bfloat16()


def cases(g: torch.Generator) -> Iterator[tuple[str, str, Args]]:
    for t in ROWS:
        for name, shape in (
            ("pack_window", (512,)),
            ("pack_latent", (512,)),
            ("pack_index", (128,)),
            ("pack_index", (32, 128)),
        ):
            yield name, f"{t}x{shape}", (randn(g, t, *shape),)
            yield name, f"{t}x{shape} extreme", (extreme(g, t, shape[-1]).view(t, *[1] * (len(shape) - 1), shape[-1]),)
        yield "pack_window", f"{t} float32", (torch.randn((t, 512), generator=g),)
        half = t // 2
        pos = torch.cat((torch.arange(100, 100 + half), torch.arange(7, 7 + t - half))).int()
        slots = torch.cat((torch.full((half,), 3), torch.full((t - half,), 1))).int()
        last = torch.cat((torch.full((half,), 99 + half), torch.full((t - half,), 6 + t - half))).int()
        for dtype, ring, width in (
            (torch.uint8, 140, 528),
            (torch.int32, 8, 1),
            (torch.float32, 8, 1024),
            (torch.uint8, 140, 80),
        ):
            rec = torch.randint(0, 255, (t, width), generator=g).to(dtype)
            yield (
                "ring_write",
                f"{t} {dtype} {width}",
                (torch.zeros((5, ring, width), dtype=dtype), rec, slots, pos, last),
            )
        for ratio in (1, 2):
            # 30,000 pages of 128 x 288 B: byte offsets beyond 2^30 (once: copies of it take most of this script's time)
            pages = 30_000 if (t, ratio) == (64, 1) else 300
            table = (pages - 1 - torch.randperm(140, generator=g)[:120]).view(4, 30).int()
            entries = 128 // ratio
            meta = (table, slots, pos, ratio, 128)
            latent = torch.randint(0, 255, (t, records.latent_bytes(512)), generator=g, dtype=torch.uint8)
            key = torch.randint(0, 255, (t, records.index_bytes(128)), generator=g, dtype=torch.uint8)
            pool = torch.zeros((pages, entries, 288), dtype=torch.uint8)
            yield "page_write", f"{t} ratio {ratio}", (pool, latent, *meta)
            pool = torch.zeros((pages, entries * 68), dtype=torch.uint8)
            yield "index_page_write", f"{t} ratio {ratio}", (pool, key, *meta)
        gate, ring = torch.randn((t, 1024), generator=g), torch.randn((5, 8, 1024), generator=g)
        start = torch.cat((torch.zeros(half), torch.full((t - half,), half))).int()
        for wide in (False, True):
            yield "pair_pool", f"{t} f32={wide}", (gate, ring, slots, pos, start, wide)


def written(checks: Checks, t: int) -> None:
    """Fused writes have the bits of the single kernels: returned rows and the whole pool."""
    from deepinfer.ops.triton import cache, norm, writes

    def chain(name: str, args: Args) -> torch.Tensor:
        pool, x, weight, cos, sin, eps, *where = args
        normed = norm.rms_norm(x, weight, eps)
        turned = norm.rope(normed, cos, sin, False)
        if name == "kv_global_write":
            cache.page_write(pool, cache.pack_latent(turned), *where)
        else:
            cache.index_page_write(pool, cache.pack_index(turned), *where)
        return normed

    def step(name: str, dim: int, ratio: int) -> None:
        g = checks.generator()
        pos = torch.arange(100, 100 + t).int().cuda()
        table = torch.randperm(300, generator=g)[:90].view(3, 30).int().cuda()
        angle = torch.rand((t, 32), generator=g).cuda() * 6.0
        x, weight = extreme(g, t, 2 * dim).cuda()[:, dim:], randn(g, dim).cuda()
        shape = (300, 128 // ratio, 288) if dim == 512 else (300, 128 // ratio * 68)
        pools = [torch.full(shape, 7, dtype=torch.uint8, device="cuda") for _ in range(2)]
        rest = (x, weight, angle.cos(), angle.sin(), 1e-20, table, torch.full_like(pos, 2), pos, ratio, 128)
        poison()
        got, want = getattr(writes, name)(pools[0], *rest), chain(name, (pools[1], *rest))
        wrong = float((pools[0] != pools[1]).sum())
        if got is not None:
            wrong += float((raw(got) != raw(want)).sum())
        checks.say(name, f"{t} ratio {ratio} equals the chain", wrong, 0.0)

    for name, dim in (("kv_global_write", 512), ("index_key_write", 128)):
        for ratio in (1, 2):
            checks.attempt(name, f"{t} ratio {ratio}", lambda n=name, d=dim, r=ratio: step(n, d, r))


def main() -> None:
    checks = Checks("cache")
    ops = ("pack_window", "pack_latent", "pack_index", "ring_write", "page_write", "index_page_write", "pair_pool")
    checks.examples(*ops)
    for name, case, args in cases(checks.generator()):
        checks.compare(name, case, args, rows=(0,) if name.startswith("pack") else ())
    for t in ROWS:
        written(checks, t)
    checks.finish()


if __name__ == "__main__":
    main()
