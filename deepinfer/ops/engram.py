"""Engram: n-gram look-back, hashing, table rows, gated injection.

Belongs here: everything of spec/model.md 8 that runs per token. Does not belong here: the derived constants
(model/config.py), where the tables live.
Legend: T rows, S slots, n look-back positions (max n-gram size), cols = (n-1) * heads hashed columns, d row width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import formats
from deepinfer.ops.common import MORE_ROWS, nbytes, randn, smooth
from deepinfer.ops.registry import define


def _lookback_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    token_map = torch.randperm(50, generator=g).int()
    history = torch.randint(-1, 50, (3, 8), generator=g, dtype=torch.int32)
    for t in MORE_ROWS:
        rows = torch.arange(t, dtype=torch.int32)
        start = torch.where(rows < 5, 0, 5).int()
        pos = torch.where(rows < 5, rows + 9, rows - 5).int()
        slots = torch.where(rows < 5, 1, 2).int()
        ids = torch.randint(0, 50, (t,), generator=g, dtype=torch.int32)
        yield (ids, pos, slots, start, ids % 7 == 0, token_map, history, 2, 4)


@define(
    "engram_lookback(Tensor ids, Tensor positions, Tensor slots, Tensor run_start, Tensor is_image, Tensor token_map,"
    " Tensor history, int pad_id, int n) -> Tensor",
    fake=lambda ids, positions, slots, run_start, is_image, token_map, history, pad_id, n: ids.new_empty(
        (ids.shape[0], n)
    ),
    inputs=_lookback_inputs,
    cost=lambda ids, *rest: (0.0, 4.0 * ids.numel() * 10),
)
def engram_lookback(
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    run_start: Tensor,
    is_image: Tensor,
    token_map: Tensor,
    history: Tensor,
    pad_id: int,
    n: int,
) -> Tensor:
    """Compressed ids at p, p-1, ..., p-n+1 of every row: int32 [T, n].

    ids/positions/slots/run_start int32 [T], is_image bool [T], token_map int32 [vocab], history int32 [S, r] by
    position mod r (-1: image). Before the first token, or from the nearest image token on, everything older is the pad
    id.
    """
    row = torch.arange(ids.shape[0], device=ids.device)
    own = torch.where(is_image, -1, ids).long()
    pos, slot = positions.long(), slots.long()
    raw = []
    broken = torch.zeros_like(is_image)
    for s in range(n):
        here = row - s >= run_start
        token = torch.where(here, own[(row - s).clamp_min(0)], history[slot, (pos - s) % history.shape[1]].long())
        broken = broken | (pos < s) | (token < 0)
        raw.append(torch.where(broken, pad_id, token))
    return token_map[torch.stack(raw, dim=1)] if raw else ids.new_empty((ids.shape[0], 0))


def _rows_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    mult = torch.randint(1, 1 << 40, (4,), generator=g) * 2 + 1
    primes = torch.tensor([1009, 1013, 1019, 1021, 1031, 1033])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), primes.cumsum(0)[:-1]))
    for t in MORE_ROWS:
        yield (torch.randint(0, 400, (t, 4), generator=g, dtype=torch.int32), mult, primes, offsets)


@define(
    "engram_rows(Tensor tokens, Tensor multipliers, Tensor primes, Tensor offsets) -> Tensor",
    fake=lambda tokens, multipliers, primes, offsets: primes.new_empty((tokens.shape[0], primes.shape[0])),
    inputs=_rows_inputs,
    cost=lambda tokens, m, primes, offsets: (
        4.0 * tokens.shape[0] * primes.numel(),
        8.0 * tokens.shape[0] * primes.numel(),
    ),
)
def engram_rows(tokens: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows: tokens int32 [T, n] from `engram_lookback`, multipliers int64 [n], primes/offsets int64 [cols] ->
    int64 [T, cols].

    Column (s-1)*heads + h: ((v_0 m_0) xor ... xor (v_s m_s)) mod prime + offset; products stay below 2^63.
    """
    products = tokens.long() * multipliers
    heads = primes.shape[0] // (tokens.shape[1] - 1)
    running = products[:, 0]
    columns = []
    for s in range(1, tokens.shape[1]):
        running = running ^ products[:, s]
        c = slice((s - 1) * heads, s * heads)
        columns.append(running.unsqueeze(1) % primes[c] + offsets[c])
    return torch.cat(columns, dim=1)


def _gather_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    table, scale = formats.quant_fp8(randn(g, 40, 64))
    for t in MORE_ROWS:
        yield (torch.randint(0, 40, (t, 6), generator=g), table, scale, t % 2 == 1)


@define(
    "engram_gather(Tensor rows, Tensor table, Tensor scale, bool out_f32) -> Tensor",
    fake=lambda rows, table, scale, out_f32: rows.new_empty(
        (rows.shape[0], rows.shape[1] * table.shape[1]), dtype=torch.float32 if out_f32 else torch.bfloat16
    ),
    inputs=_gather_inputs,
    cost=lambda rows, table, scale, f: (0.0, float(rows.numel()) * (table.shape[1] * 3 + scale.shape[1])),
)
def engram_gather(rows: Tensor, table: Tensor, scale: Tensor, out_f32: bool) -> Tensor:
    """Dequantised rows, flattened: rows int64 [T, cols], table e4m3 [N, d], scale E8M0 [N, d/32] -> [T, cols*d]."""
    flat = rows.flatten()
    e = formats.dequant_fp8(table.view(torch.uint8)[flat].view(torch.float8_e4m3fn), scale[flat])
    e = e.view(rows.shape[0], rows.shape[1] * table.shape[1])
    return e if out_f32 else e.to(torch.bfloat16)


def _gate_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for t in MORE_ROWS:
        yield (
            randn(g, t, 4, 64),
            randn(g, t, 5 * 64),
            randn(g, 4, 64),
            randn(g, 4, 64),
            torch.arange(t) % 4 == 1,
            1e-20,
        )


@define(
    "engram_gate(Tensor streams, Tensor kv, Tensor q_weight, Tensor k_weight, Tensor is_image, float eps) -> Tensor",
    fake=lambda streams, kv, q_weight, k_weight, is_image, eps: torch.empty_like(streams),
    inputs=_gate_inputs,
    cost=lambda r, kv, q, k, im, eps: (12.0 * r.numel(), 2 * nbytes(r) + nbytes(kv, q, k)),
    tolerance=2e-3,
)
def engram_gate(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, is_image: Tensor, eps: float
) -> Tensor:
    """R_c + g_c * value, g from the normalised product of stream and key; image rows unchanged. spec/model.md 8.

    streams [T, C, H], kv [T, (C+1)*H] (C keys, then the value), q_weight/k_weight bf16 [C, H], is_image bool [T].
    """
    c, h = streams.shape[1:]
    r = streams.float()
    keys = kv.float().unflatten(1, (c + 1, h))
    keys, value = keys[:, :c], keys[:, c:]
    norm = torch.rsqrt(r.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    dot = (r * (q_weight.float() * k_weight.float()) * keys).sum(-1) * norm * h**-0.5
    gate = smooth(torch.sigmoid, torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    gate = torch.where(is_image.unsqueeze(1), 0.0, gate)
    return (r + gate.unsqueeze(2) * value).to(streams.dtype)
