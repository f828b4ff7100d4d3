"""Cache records: packing rows, writing them to rings and pages, pooling pairs.

Belongs here: every op that writes the model's memory. Does not belong here: byte layouts (records.py), who owns which
page (deepinfer/cache), reads by attention (attention.py, indexer.py).
Legend: T rows, S slots, R ring rows, D head dim, P pages. Rows of a request are adjacent, positions ascending.
Reads of this step's own rows never go through a ring: a ring is committed after they were used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import records
from deepinfer.ops.common import MANY_PAGES, ROWS, high_pages, nbytes, randn, smooth
from deepinfer.ops.hyper import rms_norm, rope
from deepinfer.ops.registry import define


def _pack_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    yield from ((randn(g, t, 64),) for t in ROWS)
    yield (randn(g, 3, 2, 64),)


def _fake_pack(size: Any) -> Any:
    def fake(x: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            return torch.empty_like(x)
        return x.new_empty((*x.shape[:-1], size(x.shape[-1])), dtype=torch.uint8)

    return fake


def _pack_cost(x: Tensor) -> tuple[float, float]:
    return 3.0 * x.numel(), nbytes(x) * 1.5


@define(
    "pack_window(Tensor kv) -> Tensor",
    fake=_fake_pack(records.window_bytes),
    inputs=_pack_inputs,
    cost=_pack_cost,
)
def pack_window(kv: Tensor) -> Tensor:
    """Window record of kv [T, D] after RoPE: uint8 [T, 528] for D = 512. spec/model.md 4, 12."""
    return records.pack_window(kv)


@define(
    "pack_latent(Tensor kv) -> Tensor",
    fake=_fake_pack(records.latent_bytes),
    inputs=_pack_inputs,
    cost=_pack_cost,
)
def pack_latent(kv: Tensor) -> Tensor:
    """Compressed KV record of kv [T, D] after RoPE: uint8 [T, 288] for D = 512."""
    return records.pack_latent(kv)


@define(
    "pack_index(Tensor x) -> Tensor",
    fake=_fake_pack(records.index_bytes),
    inputs=_pack_inputs,
    cost=_pack_cost,
)
def pack_index(x: Tensor) -> Tensor:
    """Index query [T, h, D] or key [T, D] after RoPE: uint8 [..., 68] for D = 128."""
    return records.pack_index(x)


def _ring_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for t in ROWS:
        pos = torch.arange(5, 5 + t, dtype=torch.int32)
        where = (torch.full_like(pos, 1), pos, torch.full_like(pos, 4 + t))
        for dtype, width in ((torch.uint8, 80), (torch.int32, 1), (torch.float32, 64)):  # records, look-back ids, pairs
            rec = torch.randint(0, 255, (t, width), generator=g).to(dtype)
            yield (torch.zeros((3, 12, width), dtype=dtype), rec, *where)


@define(
    "ring_write(Tensor(a!) ring, Tensor rec, Tensor slots, Tensor positions, Tensor run_last) -> ()",
    fake=lambda ring, rec, slots, positions, run_last: None,
    inputs=_ring_inputs,
    cost=lambda ring, rec, slots, positions, run_last: (0.0, 2 * nbytes(rec)),
)
def ring_write(ring: Tensor, rec: Tensor, slots: Tensor, positions: Tensor, run_last: Tensor) -> None:
    """ring[slot, position % R] = rec for the newest R rows of each run.

    ring [S, R, W], rec [T, W], slots/positions/run_last int32 [T]; run_last is the last position of the row's run, so
    that a run longer than the ring writes each ring row once.
    """
    size = ring.shape[1]
    keep = (positions > run_last - size).nonzero().squeeze(1)
    pos = positions[keep].long()
    ring[slots[keep].long(), pos % size] = rec[keep]


def _page_rows(page_table: Tensor, slots: Tensor, positions: Tensor, ratio: int, page_size: int) -> tuple[Tensor, ...]:
    """(rows that complete an entry, their page, their entry inside the page)."""
    done = ((positions + 1) % ratio == 0).nonzero().squeeze(1)
    pos, slot = positions[done].long(), slots[done].long()
    return done, page_table[slot, pos // page_size].long(), (pos % page_size) // ratio


def _page_inputs(width: int, ratio: int, flat: bool) -> Any:
    def inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
        table = torch.tensor([[0, 0, 0], [5, 2, 4], [3, 1, 0]], dtype=torch.int32)
        shape = (6, 16 // ratio * width) if flat else (6, 16 // ratio, width)
        for t in ROWS:
            rec = torch.randint(0, 255, (t, width), generator=g, dtype=torch.uint8)
            pos = torch.arange(3, 3 + t, dtype=torch.int32)
            yield (torch.zeros(shape, dtype=torch.uint8), rec, table, torch.full_like(pos, 1), pos, ratio, 16)
        pos = torch.cat((torch.arange(9, 41), torch.arange(32))).int()  # 64 rows of two runs
        rec = torch.randint(0, 255, (64, width), generator=g, dtype=torch.uint8)
        slots, pool = torch.arange(64).int() // 32 + 1, torch.zeros((MANY_PAGES, *shape[1:]), dtype=torch.uint8)
        yield (pool, rec, high_pages(g, 3, 3), slots, pos, ratio, 16)

    return inputs


@define(
    "page_write(Tensor(a!) pool, Tensor rec, Tensor page_table, Tensor slots, Tensor positions, int ratio,"
    " int page_size) -> ()",
    fake=lambda pool, rec, page_table, slots, positions, ratio, page_size: None,
    inputs=_page_inputs(48, 2, flat=False),
    cost=lambda pool, rec, table, slots, positions, ratio, page_size: (0.0, 2 * nbytes(rec) / ratio),
)
def page_write(
    pool: Tensor,
    rec: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    ratio: int,
    page_size: int,
) -> None:
    """Write rows that complete a group of `ratio` tokens to their page. pool [P, page_size/ratio, W], rec [T, W]."""
    rows, page, entry = _page_rows(page_table, slots, positions, ratio, page_size)
    pool[page, entry] = rec[rows]


@define(
    "index_page_write(Tensor(a!) pool, Tensor rec, Tensor page_table, Tensor slots, Tensor positions, int ratio,"
    " int page_size) -> ()",
    fake=lambda pool, rec, page_table, slots, positions, ratio, page_size: None,
    inputs=_page_inputs(34, 1, flat=True),
    cost=lambda pool, rec, table, slots, positions, ratio, page_size: (0.0, 2 * nbytes(rec) / ratio),
)
def index_page_write(
    pool: Tensor,
    rec: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    ratio: int,
    page_size: int,
) -> None:
    """Like `page_write` for index keys: a page holds all codes, then all scales. pool uint8 [P, entries*68] (exact:
    [P, entries, D]).
    """
    if pool.dtype is torch.float32:
        return page_write(pool, rec, page_table, slots, positions, ratio, page_size)
    rows, page, entry = _page_rows(page_table, slots, positions, ratio, page_size)
    dim = rec.shape[1] * 32 // 17  # D/2 + D/32 bytes a record
    codes, scales = records.split_index_page(pool, page_size // ratio, dim)
    codes[page, entry] = rec[rows, : dim // 2]
    scales[page, entry] = rec[rows, dim // 2 :]
    return None


def _entry_inputs(dim: int, size: Any, flat: bool) -> Any:
    """Rows of width `dim` before their norm, and where they go."""

    def inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
        for where in _page_inputs(size(dim), 2, flat)(g):
            t = where[1].shape[0]
            angle = torch.rand((t, 16), generator=g) * 6.0
            yield (where[0], randn(g, t, dim), randn(g, dim), angle.cos(), angle.sin(), 1e-20, *where[2:])

    return inputs


def _entry_cost(pool: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> tuple[float, float]:
    return 13.0 * x.numel(), nbytes(x) * 1.3 + nbytes(weight, cos, sin)


@define(
    "kv_global_write(Tensor(a!) pool, Tensor kv, Tensor weight, Tensor cos, Tensor sin, float eps, Tensor page_table,"
    " Tensor slots, Tensor positions, int ratio, int page_size) -> Tensor",
    fake=lambda pool, kv, *rest: torch.empty_like(kv, memory_format=torch.contiguous_format),
    inputs=_entry_inputs(64, records.latent_bytes, flat=False),
    cost=_entry_cost,
    tolerance=5e-3,
)
def kv_global_write(
    pool: Tensor,
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    ratio: int,
    page_size: int,
) -> Tensor:
    """rms_norm, rope, pack_latent, page_write of compressed KV [T, D]; returns the normed rows, before rotation."""
    latent = rms_norm(kv, weight, eps)
    rec = records.pack_latent(rope(latent, cos, sin, False))
    page_write(pool, rec, page_table, slots, positions, ratio, page_size)
    return latent


@define(
    "index_key_write(Tensor(a!) pool, Tensor key, Tensor weight, Tensor cos, Tensor sin, float eps, Tensor page_table,"
    " Tensor slots, Tensor positions, int ratio, int page_size) -> ()",
    fake=lambda pool, key, *rest: None,
    inputs=_entry_inputs(64, records.index_bytes, flat=True),
    cost=_entry_cost,
)
def index_key_write(
    pool: Tensor,
    key: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    ratio: int,
    page_size: int,
) -> None:
    """rms_norm, rope, pack_index, index_page_write of index keys [T, D]."""
    rec = records.pack_index(rope(rms_norm(key, weight, eps), cos, sin, False))
    index_page_write(pool, rec, page_table, slots, positions, ratio, page_size)


def _pair_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    ring = torch.randn((3, 8, 64), generator=g)
    for t in ROWS:
        pos = torch.arange(5, 5 + t, dtype=torch.int32)
        one = torch.full_like(pos, 1)
        yield (torch.randn((t, 64), generator=g), ring, one, pos, torch.zeros_like(pos), t % 2 == 0)


@define(
    "pair_pool(Tensor kv_gate, Tensor open_pair, Tensor slots, Tensor positions, Tensor run_start, bool out_f32)"
    " -> Tensor",
    fake=lambda kv_gate, open_pair, slots, positions, run_start, out_f32: kv_gate.new_empty(
        (kv_gate.shape[0], kv_gate.shape[1] // 2), dtype=torch.float32 if out_f32 else torch.bfloat16
    ),
    inputs=_pair_inputs,
    cost=lambda kv, ring, slots, positions, run_start, f: (6.0 * kv.numel(), nbytes(kv) * 1.5),
    tolerance=2e-3,
)
def pair_pool(
    kv_gate: Tensor, open_pair: Tensor, slots: Tensor, positions: Tensor, run_start: Tensor, out_f32: bool
) -> Tensor:
    """Ratio-2 compression: softmax over the two tokens of a pair, per channel. spec/model.md 6.

    kv_gate float32 [T, 2D] (values | scores), open_pair float32 [S, n, 2D] by position mod n -> [T, D]; rows with an
    even position (open pairs) hold an unused value. The first half of a pair is the row above, or the ring when the
    run starts here.
    """
    row = torch.arange(kv_gate.shape[0], device=kv_gate.device)
    pos = positions.long()
    above = kv_gate[(row - 1).clamp_min(0)]
    stored = open_pair[slots.long(), (pos - 1) % open_pair.shape[1]]
    first = torch.where((row > run_start).unsqueeze(1), above, stored)
    (v0, s0), (v1, s1) = first.chunk(2, dim=1), kv_gate.chunk(2, dim=1)
    w1 = smooth(torch.sigmoid, s1 - s0)
    out = torch.where((pos % 2 == 1).unsqueeze(1), v0 * (1 - w1) + v1 * w1, torch.zeros_like(v1))
    return out if out_f32 else out.to(torch.bfloat16)
