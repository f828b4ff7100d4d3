"""Top-k selection of compressed entries by the lightning indexer, in one or two levels.

Belongs here: scoring and selecting. Does not belong here: packing index keys (cache.py), attention over the selection.
Legend: M query rows, h index heads, D index dim, n visible entries of a row, k entries kept, b candidate blocks kept.
Order is fixed everywhere: score descending, entry ascending; results are ascending entry ids, -1 at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import records
from deepinfer.ops.common import MANY_PAGES, high_pages, nbytes, randn
from deepinfer.ops.registry import define


def _keys(pool: Tensor, pages: Tensor, n: int, ratio: int, page_size: int, dim: int) -> Tensor:
    """Entries 0..n-1 of one slot as float32 [n, D]; pages int32 [pages of the slot]."""
    entries = page_size // ratio
    used = pages[: -(-n // entries)].long()
    if pool.dtype is torch.float32:
        return pool[used].flatten(0, 1)[:n]
    codes, scales = records.split_index_page(pool, entries, dim)
    rec = torch.cat((codes[used], scales[used]), dim=2).flatten(0, 1)[:n]
    return records.unpack_index(rec, dim)


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """sum_h w_h relu(q_h . k_j): q [m, h, D] float32, weights float32 [m, h], keys [n, D] -> float32 [m, n].

    float64 sums: products of e2m1 codes and powers of two are exact there, so a row's score does not depend on how many
    rows or keys are scored with it.
    """
    dots = torch.relu(q.double() @ keys.double().t())  # [m, h, n]
    return torch.einsum("mh,mhn->mn", weights.double(), dots).float()


def _top(scores: Tensor, k: int) -> Tensor:
    """Ascending ids of the k best finite scores of each row, -1 filled. scores [m, n] -> int32 [m, k]."""
    m, n = scores.shape
    order = torch.sort(scores, dim=1, descending=True, stable=True)
    ids = order.indices[:, :k].masked_fill(order.values[:, :k] == float("-inf"), n).sort(dim=1).values
    out = torch.full((m, k), -1, dtype=torch.int32, device=scores.device)
    out[:, : ids.shape[1]] = ids.masked_fill(ids == n, -1).to(torch.int32)
    return out


def _by_slot(slots: Tensor, visible: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """(row ids, slot, most visible entries) of each slot that sees at least one entry."""
    for slot in torch.unique(slots).tolist():
        rows = (slots == slot).nonzero().squeeze(1)
        n = int(visible[rows].max())
        if n > 0:
            yield rows, slot, n


def _masked_scores(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    pages: Tensor,
    visible: Tensor,
    n: int,
    ratio: int,
    page_size: int,
    dim: int,
) -> Tensor:
    keys = _keys(pool, pages, n, ratio, page_size, dim)
    s = _scores(records.unpack_index(q, dim), weights, keys)
    return s.masked_fill(torch.arange(n, device=q.device) >= visible.unsqueeze(1), float("-inf"))


def _inputs(with_blocks: int) -> Any:
    def inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
        dim, page, ratio = 32, 16, 2
        table = torch.tensor([[0, 0, 0], [3, 1, 5], [2, 4, 0]], dtype=torch.int32)
        rec = records.pack_index(randn(g, 6, page // ratio, dim))
        pool = torch.cat((rec[..., : dim // 2].flatten(1), rec[..., dim // 2 :].flatten(1)), dim=1)
        for m in (0, 1, 2, 13):
            q = records.pack_index(randn(g, m, 4, dim))
            pos = torch.arange(m, dtype=torch.int32) * 3
            slots = torch.where(torch.arange(m) < 8, 1, 2).to(torch.int32)
            pos = torch.where(slots == 2, pos - 24, pos)
            visible = ((pos + 1) // ratio).to(torch.int32)
            common = (q, torch.randn((m, 4), generator=g), pool, table, slots, visible, ratio, page, 6)
            if with_blocks == 0:
                yield common
            elif with_blocks == 1:
                yield (*common, 3, 4)
            else:
                blocks = torch.tensor([0, 2, -1], dtype=torch.int32).repeat(m, 1)
                yield (*common, blocks, 4)
        yield _many_rows(g, dim, page, ratio, with_blocks)

    return inputs


def _many_rows(g: torch.Generator, dim: int, page: int, ratio: int, with_blocks: int) -> tuple[Any, ...]:
    """64 rows of three slots, high page ids, 0, 1, 2, k - 1, k, k + 1 and all visible entries; tied keys."""
    m, k, entries, block = 64, 6, page // ratio, 4
    table = high_pages(g, 4, 5)
    rec = records.pack_index(randn(g, table.numel(), entries, dim))
    rec[1] = rec[0]
    pool = torch.zeros((MANY_PAGES, entries * records.index_bytes(dim)), dtype=torch.uint8)
    pool[table.flatten().long()] = torch.cat((rec[..., : dim // 2].flatten(1), rec[..., dim // 2 :].flatten(1)), dim=1)
    visible = torch.tensor([0, 1, 2, k - 1, k, k + 1, entries, 5 * entries], dtype=torch.int32).repeat(m // 8)
    slots = (torch.arange(m, dtype=torch.int32) // 22) + 1
    q = records.pack_index(randn(g, m, 4, dim))
    common = (q, torch.randn((m, 4), generator=g), pool, table, slots, visible, ratio, page, k)
    if with_blocks == 0:
        return common
    if with_blocks == 1:
        return (*common, 3, block)
    return (*common, torch.tensor([1, 4, 9], dtype=torch.int32).repeat(m, 1), block)


def _cost(
    q: Tensor, w: Tensor, pool: Tensor, table: Tensor, slots: Tensor, visible: Tensor, *rest: Any
) -> tuple[float, float]:
    n = float(visible.sum()) if visible.numel() else 0.0
    dim = q.shape[2] * 32 // 17 if q.dtype is torch.uint8 else q.shape[2]
    return 2.0 * q.shape[1] * dim * n, nbytes(q, w) + n * q.shape[2]


_HEAD = (
    "Tensor q, Tensor weights, Tensor pool, Tensor page_table, Tensor slots, Tensor visible, int ratio, int page_size,"
    " int k"
)


def _fake_topk(
    q: Tensor, weights: Tensor, pool: Tensor, page_table: Tensor, slots: Tensor, visible: Tensor, *rest: Any
) -> Tensor:
    return slots.new_empty((q.shape[0], rest[2]))


@define(f"index_topk({_HEAD}) -> Tensor", fake=_fake_topk, inputs=_inputs(0), cost=_cost)
def index_topk(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    slots: Tensor,
    visible: Tensor,
    ratio: int,
    page_size: int,
    k: int,
) -> Tensor:
    """Best k of the first `visible` entries of each row. spec/model.md 6.

    q [M, h, 68] packed (exact: float32 [M, h, D]), weights float32 [M, h], pool as `index_page_write` fills it,
    page_table int32 [S, pages], slots/visible int32 [M] -> int32 [M, k].
    """
    dim = _dim(q)
    out = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    for rows, slot, n in _by_slot(slots, visible):
        s = _masked_scores(q[rows], weights[rows], pool, page_table[slot], visible[rows], n, ratio, page_size, dim)
        out[rows] = _top(s, k)
    return out


@define(
    f"index_topk_publish({_HEAD}, int num_blocks, int block) -> (Tensor, Tensor)",
    fake=lambda q, w, pool, table, slots, visible, ratio, page, k, num_blocks, block: (
        slots.new_empty((q.shape[0], k)),
        slots.new_empty((q.shape[0], num_blocks)),
    ),
    inputs=_inputs(1),
    cost=_cost,
)
def index_topk_publish(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    slots: Tensor,
    visible: Tensor,
    ratio: int,
    page_size: int,
    k: int,
    num_blocks: int,
    block: int,
) -> tuple[Tensor, Tensor]:
    """`index_topk` that also returns the best `num_blocks` blocks of `block` entries, int32 [M, num_blocks] (-1
    filled).

    A block scores as its best visible entry; the block of the newest visible entry is always kept. spec/model.md 6.
    """
    dim = _dim(q)
    selected = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    blocks = torch.full((q.shape[0], num_blocks), -1, dtype=torch.int32, device=q.device)
    for rows, slot, n in _by_slot(slots, visible):
        s = _masked_scores(q[rows], weights[rows], pool, page_table[slot], visible[rows], n, ratio, page_size, dim)
        selected[rows] = _top(s, k)
        pad = torch.nn.functional.pad(s, (0, -n % block), value=float("-inf"))
        best = pad.unflatten(1, (-1, block)).amax(2)
        newest = (visible[rows].long() - 1) // block
        live = newest >= 0
        best[live, newest[live]] = float("inf")
        blocks[rows] = _top(best, num_blocks)
    return selected, blocks


@define(
    f"index_topk_blocks({_HEAD}, Tensor blocks, int block) -> Tensor",
    fake=lambda q, w, pool, table, slots, visible, ratio, page, k, blocks, block: slots.new_empty((q.shape[0], k)),
    inputs=_inputs(2),
    cost=_cost,
)
def index_topk_blocks(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    slots: Tensor,
    visible: Tensor,
    ratio: int,
    page_size: int,
    k: int,
    blocks: Tensor,
    block: int,
) -> Tensor:
    """`index_topk` restricted to candidate blocks int32 [M, num_blocks] (-1 unused), as `index_topk_publish` returned
    them.
    """
    dim = _dim(q)
    out = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    for rows, slot, n in _by_slot(slots, visible):
        s = _masked_scores(q[rows], weights[rows], pool, page_table[slot], visible[rows], n, ratio, page_size, dim)
        count = -(-n // block)
        keep = torch.zeros((rows.shape[0], count + 1), dtype=torch.bool, device=q.device)
        ids = blocks[rows].long()
        keep.scatter_(1, torch.where((ids < 0) | (ids > count), count, ids), True)
        allowed = keep[:, :count].repeat_interleave(block, dim=1)[:, :n]
        out[rows] = _top(s.masked_fill(~allowed, float("-inf")), k)
    return out


def _dim(q: Tensor) -> int:
    return q.shape[2] if q.dtype is torch.float32 else q.shape[2] * 32 // 17
