"""Sparse attention with a sink over window rows and selected compressed entries; draft-block and vision attention.

Belongs here: softmax attention. Does not belong here: choosing entries (indexer.py), writing records (cache.py).
Legend: M query rows, h heads, D head dim, N rows of this step's buffer, S slots, R ring rows, P pages, k selected
entries. K and V are the same record. Reference sums are float32; probabilities are not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import records
from deepinfer.ops.common import MANY_PAGES, high_pages, nbytes, randn, smooth
from deepinfer.ops.registry import define

QUERY_CHUNK = 64  # rows of gathered keys the reference holds at once


def _softmax_sink(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """q [m, h, D], keys [m, J, D] float32, valid [m, J], sink [h] -> [m, h, D] float32; no valid key gives 0."""
    s = torch.bmm(q, keys.transpose(1, 2)) * scale
    s = s.masked_fill(~valid.unsqueeze(1), float("-inf"))
    top = torch.maximum(s.amax(-1), sink).unsqueeze(-1)
    p = smooth(torch.exp, s - top)
    denom = p.sum(-1, keepdim=True) + smooth(torch.exp, sink.unsqueeze(-1) - top)
    return torch.bmm(p / denom, keys)


def _attention_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    dim, window, ring = 64, 8, 14
    sink = torch.randn(4, generator=g)
    table = torch.tensor([[0, 0], [3, 1], [2, 4]], dtype=torch.int32)
    ring_rec = records.pack_window(randn(g, 3, ring, dim))
    pool = records.pack_latent(randn(g, 5, 8, dim))
    for m, first in ((0, 0), (1, 9), (2, 0), (7, 3), (19, 11)):
        rows = torch.arange(m, dtype=torch.int32)
        pos = (rows + first).to(torch.int32)
        slots = torch.ones_like(rows)
        new = records.pack_window(randn(g, m, dim))
        firsts = torch.full_like(rows, first)
        sel = torch.full((m, 6), -1, dtype=torch.int32)
        for i in range(m):
            n = min(6, int(pos[i] + 1) // 2)
            sel[i, :n] = torch.randperm(int(pos[i] + 1) // 2, generator=g)[:n].sort().values.to(torch.int32)
        common = (
            randn(g, m, 4, dim),
            new,
            ring_rec,
            slots,
            pos,
            rows,
            firsts,
            torch.full_like(rows, first // 2),
            sink,
        )
        yield (*common, None, None, table, 0.125, window, 0, 16)
        yield (*common, pool, sel, table, 0.125, window, 2, 16)
    yield _many_rows(g, dim, window, ring_rec, sink)


def _many_rows(g: torch.Generator, dim: int, window: int, ring: Tensor, sink: Tensor) -> tuple[Any, ...]:
    """65 rows of two runs, high page ids; row 3 has no key at all, row 4 one window key, row 5 one selected entry."""
    m, first, page, ratio = 65, 20, 16, 2
    rows = torch.arange(m, dtype=torch.int32)
    pos = torch.where(rows < 40, rows + first, rows - 40).int()
    slots = torch.where(rows < 40, 1, 2).int()
    floor = torch.zeros_like(pos)
    floor[3:6] = pos[3:6] + torch.tensor([1, 0, 1], dtype=torch.int32)
    visible = (pos + 1) // ratio
    selected = torch.full((m, 6), -1, dtype=torch.int32)
    for i, n in enumerate(visible.tolist()):
        chosen = torch.randperm(n, generator=g)[:6].sort().values
        selected[i, : chosen.shape[0]] = chosen.int()
    selected[3:5] = -1
    selected[5, 1:] = -1
    table = high_pages(g, 3, 4)  # 64 positions a slot
    pool = torch.zeros((MANY_PAGES, page // ratio, records.latent_bytes(dim)), dtype=torch.uint8)
    pool[table.flatten().long()] = records.pack_latent(randn(g, table.numel(), page // ratio, dim))
    new, firsts = records.pack_window(randn(g, m, dim)), torch.where(rows < 40, first, 0).int()
    per_row = (slots, pos, rows, firsts, floor)
    return (randn(g, m, 4, dim), new, ring, *per_row, sink, pool, selected, table, 0.125, window, ratio, page)


@define(
    "attention(Tensor q, Tensor new, Tensor ring, Tensor slots, Tensor positions, Tensor rows, Tensor first,"
    " Tensor floor, Tensor sink, Tensor? pool, Tensor? selected, Tensor page_table, float scale, int window,"
    " int ratio, int page_size) -> Tensor",
    fake=lambda q, *rest: torch.empty_like(q),
    inputs=_attention_inputs,
    cost=lambda q, new, ring, slots, pos, rows, first, floor, sink, pool, sel, table, scale, window, ratio, page: (
        4.0 * q.numel() * (window + (0 if sel is None else sel.shape[1])),
        2 * nbytes(q)
        + float(
            q.shape[0] * (window * new.shape[1] + (0 if sel is None or pool is None else sel.shape[1] * pool.shape[2]))
        ),
    ),
    tolerance=5e-3,
)
def attention(
    q: Tensor,
    new: Tensor,
    ring: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    first: Tensor,
    floor: Tensor,
    sink: Tensor,
    pool: Tensor | None,
    selected: Tensor | None,
    page_table: Tensor,
    scale: float,
    window: int,
    ratio: int,
    page_size: int,
) -> Tensor:
    """One softmax over the window [max(floor, p-window+1), p] and the selected entries, plus a sink. spec/model.md 6.

    q [M, h, D] after RoPE; new [N, W] window records of this step; ring [S, R, W] older ones; per query int32 [M]:
    slots, positions, rows (the query's own row in `new`), first (position of the first row of its run in `new`: older
    keys come from the ring), floor (no key below it exists). sink float32 [h], in logit units. pool [P,
    page_size/ratio, L] with selected int32 [M, k] (-1 unused) and page_table int32 [S, pages], or None for a
    window-only layer. Returns [M, h, D] in q.dtype, still rotated.
    """
    out = torch.empty_like(q)
    dim = q.shape[2]
    back = torch.arange(window - 1, -1, -1, device=q.device)
    for i in range(0, q.shape[0], QUERY_CHUNK):
        c = slice(i, i + QUERY_CHUNK)
        slot = slots[c].long()
        pos = positions[c].long().unsqueeze(1) - back  # [m, window] ascending
        in_step = pos >= first[c].unsqueeze(1)
        row = (rows[c].long().unsqueeze(1) - back).clamp_min(0)
        rec = torch.where(in_step.unsqueeze(2), new[row], ring[slot.unsqueeze(1), pos % ring.shape[1]])
        keys, valid = records.unpack_window(rec, dim), pos >= floor[c].clamp_min(0).unsqueeze(1)
        if pool is not None and selected is not None:
            entry = selected[c].long()
            at = entry.clamp_min(0)
            page = page_table[slot.unsqueeze(1), at * ratio // page_size].long()
            latent = records.unpack_latent(pool[page, at % (page_size // ratio)], dim)
            keys, valid = torch.cat((keys, latent), dim=1), torch.cat((valid, entry >= 0), dim=1)
        keys = keys.masked_fill(~valid.unsqueeze(2), 0.0)  # unused memory may hold anything
        out[c] = _softmax_sink(q[c].float(), keys, valid, sink, scale).to(q.dtype)
    return out


def _block_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    dim, ring = 64, 14
    rec = records.pack_window(randn(g, 4, ring, dim))
    for b in (0, 1, 2, 3, 13):  # context rows by request: 3, 8 of 10, none, one, none at position 0
        slots = torch.arange(b, dtype=torch.int32) % 3 + 1
        start = torch.tensor([3, 40, 9, 8, 0], dtype=torch.int32).repeat(3)[:b]
        block = records.pack_window(randn(g, b * 5, dim))
        floor = torch.tensor([0, 30, 9, 7, 0], dtype=torch.int32).repeat(3)[:b]
        yield (
            randn(g, b * 5, 4, dim),
            block,
            rec,
            slots,
            start,
            floor,
            torch.randn(4, generator=g),
            0.125,
            8,
        )


@define(
    "block_attention(Tensor q, Tensor block, Tensor ring, Tensor slots, Tensor start, Tensor floor, Tensor sink,"
    " float scale, int window) -> Tensor",
    fake=lambda q, *rest: torch.empty_like(q),
    inputs=_block_inputs,
    cost=lambda q, block, ring, slots, start, floor, sink, scale, window: (
        4.0 * q.numel() * (window + q.shape[0] // max(1, slots.shape[0])),
        2 * nbytes(q, block) + float(slots.shape[0] * window * ring.shape[2]),
    ),
    tolerance=5e-3,
)
def block_attention(
    q: Tensor,
    block: Tensor,
    ring: Tensor,
    slots: Tensor,
    start: Tensor,
    floor: Tensor,
    sink: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Draft block: every row sees the context rows [max(floor, start-window), start) and the whole block.
    spec/dspark.md 2.4.

    q [B*g, h, D], block [B*g, W] records of the g rows at positions start..start+g-1, ring [S, R, W] context records,
    slots/start/floor int32 [B]. Returns [B*g, h, D] in q.dtype.
    """
    b, dim = slots.shape[0], q.shape[2]
    if b == 0:
        return torch.empty_like(q)
    g = q.shape[0] // b
    pos = start.long().unsqueeze(1) - torch.arange(window, 0, -1, device=q.device)
    context = records.unpack_window(ring[slots.long().unsqueeze(1), pos % ring.shape[1]], dim)
    valid = pos >= floor.clamp_min(0).unsqueeze(1)
    context = context.masked_fill(~valid.unsqueeze(2), 0.0)
    keys = torch.cat((context, records.unpack_window(block, dim).unflatten(0, (b, g))), dim=1)
    valid = torch.cat((valid, valid.new_ones((b, g))), dim=1)
    keys, valid = keys.repeat_interleave(g, 0), valid.repeat_interleave(g, 0)
    return _softmax_sink(q.float(), keys, valid, sink, scale).to(q.dtype)


def _vision_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for n in (0, 1, 2, 7, 64):
        angle = torch.rand((n, 8), generator=g) * 6
        yield (randn(g, n, 3 * 2 * 16), angle.cos(), angle.sin(), 2)


@define(
    "vision_attention(Tensor qkv, Tensor cos, Tensor sin, int heads) -> Tensor",
    fake=lambda qkv, cos, sin, heads: qkv.new_empty((qkv.shape[0], qkv.shape[1] // 3)),
    inputs=_vision_inputs,
    cost=lambda qkv, cos, sin, heads: (4.0 * qkv.shape[0] ** 2 * qkv.shape[1] / 3, nbytes(qkv) * 4 / 3),
    tolerance=5e-3,
)
def vision_attention(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Full attention inside one image with 2D RoPE (half-split pairs). spec/model.md 10.

    qkv [n, 3*heads*d] (q | k | v), cos/sin float32 [n, d/2] -> [n, heads*d] in qkv.dtype.
    """
    q, k, v = qkv.unflatten(1, (3, heads, -1)).float().unbind(1)  # [n, heads, d]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=2)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=2).to(qkv.dtype).float()

    q, k = rotate(q), rotate(k)
    p = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5, dim=-1)
    return torch.einsum("hqk,khd->qhd", p, v).flatten(1).to(qkv.dtype)
