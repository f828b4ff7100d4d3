"""The Markov step and acceptance of drafts on CUDA.

Belongs here: kernels of ops/acceptance.py. Does not belong here: filters, draws of ordinary rows.

Markov step: the product (66 MB of weights at real size, read once) is added to the logits in place and its noisy
scores are reduced in the same program, so a draw costs no further reading. Ids are the N side: a thread holds many of
a row, and reductions cost four shuffles instead of fifty.
Acceptance by ratio: each vocabulary row is read for its peak, for its mass and once more for the residual weights,
whose integer sums per chunk both decide (block verification) and lead the draw to its chunk.
Legend: R requests, g drafts, T target rows, B rows, S chunks of a row, N ids of a chunk, r Markov rank, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops import acceptance as definition
from deepinfer.ops.sampling import STREAM_ACCEPT, STREAM_RESIDUAL, STREAM_TARGET
from deepinfer.ops.triton import filters, sampling
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.exact import (
    ANY,
    MASS,
    REACH,
    SCALE32,
    begin,
    exp_fixed,
    finite_or_inf,
    fixed,
    gumbel_near,
    options,
    philox,
)
from deepinfer.ops.triton.filters import PARTS, best_id, chunk
from deepinfer.ops.triton.sampling import EXACT_TILE, WINDOW, winner_of
from deepinfer.ops.triton.support import INTERPRET, f32

INTERPRETED = bool(INTERPRET.value)
WEIGHT = tl.constexpr(definition.WEIGHT)
ACCEPT, RESIDUAL = tl.constexpr(STREAM_ACCEPT), tl.constexpr(STREAM_RESIDUAL)
MARKOV_IDS = 64  # of a program: 16 a thread of 64 rows, so that two programs fit a multiprocessor

# --------------------------------------------------------------------------------------------------------- Markov step


@triton.jit
def noise_words(seed, position, index, groups, STREAM: tl.constexpr):
    """uint32 [B, 4 G]: words of ids 4 g + lane, rows of seed int64, position, index int32 [B]; groups uint32 [G]."""
    c1 = groups[None, :] + tl.zeros_like(position).to(tl.uint32)[:, None]
    zero = tl.zeros_like(c1)
    w0, w1 = zero + position.to(tl.uint32)[:, None], c1
    w2, w3 = zero + STREAM, zero + index.to(tl.uint32)[:, None]
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)[:, None]
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)[:, None]
    for _ in tl.static_range(10):
        x0 = tl.umulhi(w2, zero + 0xCD9E8D57) ^ w1 ^ k0
        x2 = tl.umulhi(w0, zero + 0xD2511F53) ^ w3 ^ k1
        w1 = w2 * 0xCD9E8D57
        w3 = w0 * 0xD2511F53
        w0 = x0
        w2 = x2
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    word = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(word, (position.shape[0], groups.shape[0] * 4))


@triton.jit(do_not_specialize=["B", "S"])
def _markov(
    logits, previous, embed, head, temperature, seeds, positions, index, parts, marks, stride, B, V, S,
    RANK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BB: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """logits [B, V] += embed[previous] @ head^T, best and second score of BV ids. Grid (B / BB, S)."""
    begin()
    b = tl.program_id(0) * BB + tl.arange(0, BB)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    k = tl.arange(0, BK)
    live = b < B
    token = tl.load(previous + b, mask=live, other=0)
    at = logits + b.to(tl.int64)[:, None] * stride + v[None, :]
    inside = live[:, None] & (v < V)[None, :]
    z = tl.load(at, mask=inside, other=float("-inf"))
    acc = tl.zeros((BB, BV), tl.float32)
    for o in tl.range(0, RANK, BK):
        w = tl.load(head + v.to(tl.int64)[:, None] * RANK + (o + k)[None, :], mask=(v < V)[:, None], other=0.0)
        m = tl.load(embed + token[:, None] * RANK + (o + k)[None, :], mask=live[:, None], other=0.0)
        acc = tl.dot(m, tl.trans(w), acc)
    z = finite_or_inf(z + acc)
    tl.store(at, z, mask=inside)
    ids = v[None, :] + tl.zeros((BB, BV), tl.int32)
    plane = parts + b.to(tl.int64) * 5 * S + tl.program_id(1)
    mark = marks + b.to(tl.int64) * 2 * S + tl.program_id(1)
    peak = tl.max(z, 1)
    tl.store(plane, peak, mask=live)
    tl.store(mark, tl.min(tl.where(z == peak[:, None], ids, V), 1), mask=live)
    t = tl.load(temperature + b, mask=live, other=0.0)
    if tl.max(t) > 0:
        seed = tl.load(seeds + b, mask=live, other=0)
        position = tl.load(positions + b, mask=live, other=0)
        sample = tl.load(index + b, mask=live, other=0)
        groups = (tl.program_id(1) * (BV // 4) + tl.arange(0, BV // 4)).to(tl.uint32)
        noise = gumbel_near(noise_words(seed, position, sample, groups, STREAM))
        score = tl.fma(z, tl.zeros_like(z) + (1.0 / tl.where(t > 0, t, 1.0))[:, None], noise)
        best = tl.max(score, 1)
        place = tl.min(tl.where(score == best[:, None], ids, V), 1)
        second = tl.max(tl.where(ids == place[:, None], float("-inf"), score), 1)
        tl.store(plane + S, best, mask=live)
        tl.store(plane + 2 * S, second, mask=live)
        tl.store(mark + S, place, mask=live)


@triton.jit(do_not_specialize=["S"])
def _markov_finish(
    logits, hidden, previous, embed, weight, temperature, seeds, positions, index, parts, marks, out, confidence,
    stride, hidden_stride, V, S, window, H: tl.constexpr, HP: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    STREAM: tl.constexpr, N: tl.constexpr, SP: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The id and the confidence of a row. Grid (B,)."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    winner = winner_of(
        logits + row * stride, temperature, marks, parts, parts, seeds, positions, index, parts, marks, parts, marks,
        row, V, S, window, STREAM, N, SP, T, False,
    )  # fmt: skip
    tl.store(out + row, winner.to(tl.int64))
    token = tl.load(previous + row)
    h, k = tl.arange(0, HP), tl.arange(0, RP)
    x = f32(tl.load(hidden + row * hidden_stride + h, mask=h < H, other=0.0))
    sums = tl.sum(x * f32(tl.load(weight + h, mask=h < H, other=0.0)))
    m = f32(tl.load(embed + token * RANK + k, mask=k < RANK, other=0.0))
    sums += tl.sum(m * f32(tl.load(weight + H + k, mask=k < RANK, other=0.0)))
    tl.store(confidence + row, sums)


def markov_warps(bb: int) -> int:
    return 8 if bb == 64 else 4


def markov_step(
    logits: Tensor,
    hidden: Tensor,
    previous: Tensor,
    embed: Tensor,
    head: Tensor,
    weight: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sample_index: Tensor,
    stream: int,
) -> tuple[Tensor, Tensor]:
    b, vocab = logits.shape
    ids = torch.empty(b, dtype=torch.int64, device=logits.device)
    confidence = torch.empty(b, dtype=torch.float32, device=logits.device)
    if not b:
        return ids, confidence
    if hidden.dtype is not torch.bfloat16:
        raise ValueError(f"markov_step: hidden is {hidden.dtype}; this kernel takes bfloat16")
    rank, h = embed.shape[1], hidden.shape[1]
    n = MARKOV_IDS
    s = triton.cdiv(vocab, n)
    parts = torch.empty((b, 5, s), dtype=torch.float32, device=logits.device)
    marks = torch.empty((b, 2, s), dtype=torch.int32, device=logits.device)
    bb = 16 if b <= 16 else 32 if b <= 32 else 64  # the K order of the product is the same for all
    who = (temperature, seeds, positions, sample_index)
    source, table = (head.float(), embed.float()) if INTERPRETED else (head, embed)
    _markov[(triton.cdiv(b, bb), s)](
        logits, previous, table, source, *who, parts, marks, logits.stride(0), b, vocab, s,
        RANK=rank, BK=min(64, rank), BV=n, BB=bb, STREAM=stream, **options(markov_warps(bb)),
    )  # fmt: skip
    _markov_finish[(b,)](
        logits, hidden, previous, embed, weight, *who, parts, marks, ids, confidence, logits.stride(0),
        hidden.stride(0), vocab, s, WINDOW, H=h, HP=triton.next_power_of_2(h), RANK=rank,
        RP=triton.next_power_of_2(rank), STREAM=stream, N=n, SP=triton.next_power_of_2(s), T=min(n, EXACT_TILE),
        **options(4),
    )  # fmt: skip
    return ids, confidence


# ---------------------------------------------------------------------------------------------------------- acceptance


@triton.jit(do_not_specialize=["G"])
def _match(row_start, drafts, drawn, num, following, tokens, G, GP: tl.constexpr):
    """Accept drafts while they equal the drawn ids. Grid (R,)."""
    begin()
    r = tl.program_id(0)
    first = tl.load(row_start + r)
    length = tl.load(row_start + r + 1) - first - 1
    i = tl.arange(0, GP)
    draft = tl.load(drafts + r * G + i, mask=i < G, other=-1)
    drew = tl.load(drawn + first + i, mask=i <= length, other=-1)
    a = tl.min(tl.where((i >= length) | (draft != drew), i, length))
    tl.store(num + r, a)
    tl.store(following + r, tl.load(drawn + first + a))
    tl.store(tokens + r * (G + 1) + i, tl.where(i <= a, drew, -1), mask=i <= G)


@triton.jit
def _e(z, id, peak, inverse, threshold, last, floor):
    """e^scaled of survivors, else 0."""
    scaled = (z - peak) * inverse
    keep = ((z > threshold) | ((z == threshold) & (id <= last))) & (scaled >= floor)
    return tl.where(keep, exp_fixed(tl.where(keep, scaled, 0.0)), 0.0)


@triton.jit
def _inverse(temperature, row):
    t = tl.load(temperature + row)
    return tl.div_rn(1.0, tl.where(t > 0, t, 1.0))


@triton.jit
def _scale(totals, row):
    """1 / sum of e^scaled; 0 for a row without a choice."""
    total = tl.load(totals + row).to(tl.float64)
    return tl.where(total > 0, (tl.zeros((), tl.float64) + MASS) / tl.where(total > 0, total, 1.0), 0.0).to(tl.float32)


@triton.jit
def _word(seeds, positions, index, row, STREAM: tl.constexpr):
    zero = tl.zeros((1,), tl.uint32)
    w, _, _, _ = philox(
        tl.load(positions + row), zero, tl.full((), STREAM, tl.uint32), tl.load(index + row), tl.load(seeds + row)
    )
    return tl.sum(w.to(tl.int64))


@triton.jit(do_not_specialize=["G"])
def _rows(row_start, temperature, row_of, owner, t_draft, G, GP: tl.constexpr):
    """For every draft its target row, or -1; its temperature; for every target row its request. Grid (R,)."""
    begin()
    r = tl.program_id(0)
    first = tl.load(row_start + r)
    length = tl.load(row_start + r + 1) - first - 1
    i = tl.arange(0, GP)
    tl.store(row_of + r * G + i, tl.where(i < length, first + i, -1), mask=i < G)
    t = tl.load(temperature + first + i, mask=i < length, other=0.0)
    tl.store(t_draft + r * G + i, t, mask=i < G)
    tl.store(owner + first + i, tl.zeros((GP,), tl.int32) + r, mask=i <= length)


@triton.jit(do_not_specialize=["S"])
def _spread(logits, temperature, row_of, parts, marks, masses, stride, V, S, N: tl.constexpr, SKIP: tl.constexpr):
    """Best logit of every chunk, its id, and the chunk's mass in units of it. Grid (M, S). masses int64 [M, S]."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    wanted = c >= 0
    if SKIP:
        wanted = tl.load(row_of + row) >= 0
    if wanted:
        ids = c * N + tl.arange(0, N)
        z = finite_or_inf(tl.load(logits + row * stride + ids, mask=ids < V, other=float("-inf")))
        peak = tl.max(z)
        tl.store(parts + row * 5 * S + c, peak)
        tl.store(marks + row * 2 * S + c, tl.min(tl.where(z == peak, ids, V)))
        scaled = (z - peak) * _inverse(temperature, row)
        inside = scaled >= REACH
        mass = tl.where(inside, exp_fixed(tl.where(inside, scaled, 0.0)) * MASS, 0.0)
        tl.store(masses + row * S + c, tl.sum(mass.to(tl.int64)))


@triton.jit(do_not_specialize=["S"])
def _join(
    temperature, row_of, parts, marks, masses, peaks, thresholds, last_ids, totals, V, S,
    SP: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """What `survivors` says of a row without filters. Grid (M,)."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    wanted = row >= 0
    if SKIP:
        wanted = tl.load(row_of + row) >= 0
    if wanted:
        s = tl.arange(0, SP)
        best = tl.load(parts + row * 5 * S + s, mask=s < S, other=float("-inf"))
        peak = tl.max(best)
        t = tl.load(temperature + row)
        value, last, total = float("-inf"), V - 1, tl.full((), 1 << 36, tl.int64)
        if (peak == float("inf")) | (peak == float("-inf")):
            value, last, total = float("inf"), -1, tl.zeros((), tl.int64)
        elif t <= 0:
            value, last = peak, best_id(parts, marks, row, peak, V, S, SP)
        else:
            below = (best - peak) * _inverse(temperature, row)
            inside = below >= REACH
            share = tl.where(inside, exp_fixed(tl.where(inside, below, 0.0)), 0.0).to(tl.float64)
            part = tl.load(masses + row * S + s, mask=s < S, other=0).to(tl.float64)
            total = tl.sum((part * share).to(tl.int64))
        tl.store(peaks + row, peak + 0.0)
        tl.store(thresholds + row, value)
        tl.store(last_ids + row, last)
        tl.store(totals + row, total)


def distribution(logits: Tensor, temperature: Tensor, row_of: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `survivors` says of rows without filters; rows whose row_of int32 [M] is negative are left unwritten."""
    (m, vocab), device = logits.shape, logits.device
    n = min(definition.CHUNK, max(64, triton.next_power_of_2(vocab)))
    s = triton.cdiv(vocab, n)
    parts = torch.empty((m, 5, s), dtype=torch.float32, device=device)
    marks = torch.empty((m, 2, s), dtype=torch.int32, device=device)
    masses = torch.empty((m, s), dtype=torch.int64, device=device)
    peak, threshold = torch.empty((2, m), dtype=torch.float32, device=device).unbind(0)
    last_id = torch.empty(m, dtype=torch.int32, device=device)
    total = torch.empty(m, dtype=torch.int64, device=device)
    which, skip = marks if row_of is None else row_of, row_of is not None
    if m:
        _spread[(m, s)](
            logits, temperature, which, parts, marks, masses, logits.stride(0), vocab, s, N=n, SKIP=skip, **options()
        )  # fmt: skip
        _join[(m,)](
            temperature, which, parts, marks, masses, peak, threshold, last_id, total, vocab, s,
            SP=triton.next_power_of_2(s), SKIP=skip, **options(1),
        )  # fmt: skip
    return peak, threshold, last_id, total


@triton.jit
def _ratios(
    row_start, logits, draft_logits, drafts, temperature, log_min_p, seeds, positions, index, peaks, thresholds,
    last_ids, totals, q_peaks, q_thresholds, q_last_ids, q_totals, keeps, uniforms, num, stride, q_stride, G,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """p(d), q(d) of the drafts: P of block verification per target row, or where token-wise rejection stops. Grid (R,).

    keeps float32 [T]: P; -1 for rows whose residual nobody needs. uniforms float32 [T].
    """
    begin()
    r = tl.program_id(0).to(tl.int64)
    first = tl.load(row_start + r).to(tl.int64)
    length = tl.load(row_start + r + 1).to(tl.int64) - first - 1
    keep = 1.0
    u = 1.0
    stopped = -1
    i = 0
    while i < length:
        row = first + i
        d = r * G + i
        id = tl.load(drafts + d)
        t = _inverse(temperature, row)
        z = finite_or_inf(tl.load(logits + row * stride + id))
        floor = tl.maximum(tl.load(log_min_p + row), REACH)
        p = _e(z, id, tl.load(peaks + row), t, tl.load(thresholds + row), tl.load(last_ids + row), floor)
        p = p * _scale(totals, row)
        y = finite_or_inf(tl.load(draft_logits + d * q_stride + id))
        q = _e(y, id, tl.load(q_peaks + d), t, tl.load(q_thresholds + d), tl.load(q_last_ids + d), REACH)
        q = q * _scale(q_totals, d)
        u = (_word(seeds, positions, index, row, ACCEPT).to(tl.float32) + 0.5) * SCALE32
        if BLOCK:
            tl.store(keeps + row, keep)
            tl.store(uniforms + row, u)
            ratio = tl.where(q > 0, tl.div_rn(p, tl.where(q > 0, q, 1.0)), tl.where(p > 0, float("inf"), 0.0))
            keep = tl.minimum(keep * ratio, 1.0)
        else:
            if (stopped < 0) & (u * q >= p):
                stopped = i
            tl.store(keeps + row, tl.where(stopped == i, 1.0, -1.0))
        i += 1
    if BLOCK:
        # the largest i with u_i <= h_i <= P_i decides: rows that cannot be it need no residual
        whole = (length > 0) & (u <= keep)
        tl.store(keeps + first + length, tl.where(whole | (length == 0), keep, -1.0))
        tl.debug_barrier()
        i = length * 0
        while i < length:
            above = tl.load(uniforms + first + tl.maximum(i - 1, 0))
            own = tl.load(keeps + first + i)
            tl.store(keeps + first + i, tl.where((whole == 0) & ((i == 0) | (above <= own)), own, -1.0))
            i += 1
    else:
        tl.store(keeps + first + length, tl.where(stopped < 0, 1.0, -1.0))
        tl.store(num + r, tl.where(stopped < 0, length.to(tl.int32), stopped))


@triton.jit
def _weights(
    logits, draft_logits, temperature, log_min_p, peaks, thresholds, last_ids, totals, q_peaks, q_thresholds,
    q_last_ids, q_totals, row, d, keep, ids, stride, q_stride, V, MINUS_Q,
):  # fmt: skip
    """Integer weights of the next id: max(P p - q, 0), or p."""
    t = _inverse(temperature, row)
    ok = ids < V
    floor = tl.maximum(tl.load(log_min_p + row), REACH)
    z = finite_or_inf(tl.load(logits + row * stride + ids, mask=ok, other=float("-inf")))
    e = _e(z, ids, tl.load(peaks + row), t, tl.load(thresholds + row), tl.load(last_ids + row), floor)
    scale = _scale(totals, row)
    if MINUS_Q:
        y = finite_or_inf(tl.load(draft_logits + d * q_stride + ids, mask=ok, other=float("-inf")))
        q = _e(y, ids, tl.load(q_peaks + d), t, tl.load(q_thresholds + d), tl.load(q_last_ids + d), REACH)
        rest = tl.maximum(e * (keep * scale) - q * _scale(q_totals, d), 0.0)
    else:
        rest = e * scale
    return (rest * WEIGHT).to(tl.int64)


@triton.jit(do_not_specialize=["S", "G"])
def _residual(
    row_start, owner, logits, draft_logits, temperature, log_min_p, peaks, thresholds, last_ids, totals, q_peaks,
    q_thresholds, q_last_ids, q_totals, keeps, chunks, stride, q_stride, V, S, G, N: tl.constexpr,
):  # fmt: skip
    """chunks int64 [T, S]: the weights' sum of every chunk. Grid (T, S)."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    keep = tl.load(keeps + row)
    if keep >= 0:
        r = tl.load(owner + row).to(tl.int64)
        i = row - tl.load(row_start + r)
        residual = row + 1 < tl.load(row_start + r + 1)
        ids = tl.program_id(1) * N + tl.arange(0, N)
        w = _weights(
            logits, draft_logits, temperature, log_min_p, peaks, thresholds, last_ids, totals, q_peaks, q_thresholds,
            q_last_ids, q_totals, row, r * G + i, keep, ids, stride, q_stride, V, residual,
        )  # fmt: skip
        tl.store(chunks + row * S + tl.program_id(1), tl.sum(w))


@triton.jit(do_not_specialize=["S", "G"])
def _decide(
    row_start, logits, draft_logits, drafts, temperature, log_min_p, seeds, positions, index, peaks, thresholds,
    last_ids, totals, q_peaks, q_thresholds, q_last_ids, q_totals, keeps, uniforms, chunks, num, following, tokens,
    stride, q_stride, V, S, G, GP: tl.constexpr, SP: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many drafts stand (BLOCK), and the draw from the weights that follow. Grid (R,)."""
    begin()
    r = tl.program_id(0).to(tl.int64)
    first = tl.load(row_start + r).to(tl.int64)
    length = tl.load(row_start + r + 1).to(tl.int64) - first - 1
    s = tl.arange(0, SP)
    a = length * 0
    if BLOCK:
        i = length * 0 + 1
        while i <= length:
            keep = tl.load(keeps + first + i)
            if keep >= 0:
                mass = tl.sum(tl.load(chunks + (first + i) * S + s, mask=s < S, other=0))
                share = (mass.to(tl.float64) * (1.0 / WEIGHT)).to(tl.float32)
                under = (share + 1.0) - keep
                h = tl.where(under > 0, tl.div_rn(share, tl.where(under > 0, under, 1.0)), 0.0)
                h = tl.where(i == length, keep, h)
                a = tl.where(tl.load(uniforms + first + i - 1) <= h, i, a)
            i += 1
        tl.store(num + r, a.to(tl.int32))
    else:
        a += tl.load(num + r)
    row = first + a
    sums = tl.load(chunks + row * S + s, mask=s < S, other=0)
    residual = a < length
    if tl.sum(sums) == 0:  # numerically empty: draw from p
        residual = a < 0
        for c in range(0, S):
            w = _weights(
                logits, draft_logits, temperature, log_min_p, peaks, thresholds, last_ids, totals, q_peaks,
                q_thresholds, q_last_ids, q_totals, row, r * G, 1.0, c * N + tl.arange(0, N), stride, q_stride, V,
                False,
            )  # fmt: skip
            sums = tl.where(s == c, tl.sum(w), sums)
    word = _word(seeds, positions, index, row, RESIDUAL)
    total = tl.sum(sums)
    target = (((total >> 20) * word) + (((total & 0xFFFFF) * word) >> 20)) >> 12
    through = tl.cumsum(sums, 0)
    c = tl.min(tl.where(through > target, s, S - 1))
    target -= tl.sum(tl.where(s < c, sums, 0))
    ids = c * N + tl.arange(0, N)
    w = _weights(
        logits, draft_logits, temperature, log_min_p, peaks, thresholds, last_ids, totals, q_peaks, q_thresholds,
        q_last_ids, q_totals, row, r * G + tl.minimum(a, G - 1), tl.load(keeps + row), ids, stride, q_stride, V,
        residual,
    )  # fmt: skip
    inside = tl.cumsum(w, 0)
    winner = tl.min(tl.where(inside > target, ids, V)).to(tl.int64)
    peak = tl.load(peaks + row)
    winner = tl.where(peak == float("inf"), -2, tl.where(peak == float("-inf"), -1, winner))
    tl.store(following + r, winner)
    j = tl.arange(0, GP)
    draft = tl.load(drafts + r * G + j, mask=j < G, other=-1)
    tl.store(tokens + r * (G + 1) + j, tl.where(j < a, draft, tl.where(j == a, winner, -1)), mask=j <= G)


def accept(
    row_start: Tensor,
    logits: Tensor,
    drafts: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sample_index: Tensor,
    rule: int,
    filtered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    r, g = drafts.shape
    device = drafts.device
    num = torch.empty(r, dtype=torch.int32, device=device)
    following = torch.empty(r, dtype=torch.int64, device=device)
    tokens = torch.empty((r, g + 1), dtype=torch.int64, device=device)
    if not r:
        return num, following, tokens
    gp = triton.next_power_of_2(g + 1)
    who = (seeds, positions, sample_index)
    if rule == definition.MATCH or draft_logits is None:
        params = (temperature, top_k, top_p, log_min_p)
        drawn, _ = sampling.sample(logits, *params, *who, None, STREAM_TARGET, filtered, False)
        _match[(r,)](row_start, drafts, drawn, num, following, tokens, g, GP=gp, **options(1))
        return num, following, tokens
    params, out = (temperature, top_k, top_p, log_min_p), (num, following, tokens)
    _ratio(row_start, logits, drafts, draft_logits, params, who, rule, filtered, out)
    return out


def _ratio(
    row_start: Tensor,
    logits: Tensor,
    drafts: Tensor,
    draft_logits: Tensor,
    params: tuple[Tensor, ...],
    who: tuple[Tensor, ...],
    rule: int,
    filtered: bool,
    out: tuple[Tensor, ...],
) -> None:
    (t, vocab), (r, g), device = logits.shape, drafts.shape, drafts.device
    n = chunk(vocab)
    gp = triton.next_power_of_2(g + 1)
    temperature = params[0]
    row_of, owner = (torch.empty(k, dtype=torch.int32, device=device) for k in (r * g, t))
    t_draft = torch.empty(r * g, dtype=torch.float32, device=device)
    _rows[(r,)](row_start, temperature, row_of, owner, t_draft, g, GP=gp, **options(1))
    p = filters.survivors(logits, *params) if filtered else distribution(logits, temperature, None)
    flat = draft_logits.flatten(0, 1)
    found = (*p, *distribution(flat, t_draft, row_of))
    keeps, uniforms = torch.empty((2, t), dtype=torch.float32, device=device).unbind(0)
    num, following, tokens = out
    floor = params[3] if filtered else torch.full_like(temperature, float("-inf"))
    strides = (logits.stride(0), flat.stride(0))
    block = rule == definition.BLOCK
    _ratios[(r,)](
        row_start, logits, flat, drafts, temperature, floor, *who, *found, keeps, uniforms, num, *strides, g,
        BLOCK=block, **options(1),
    )  # fmt: skip
    s = triton.cdiv(vocab, n)
    chunks = torch.empty((t, s), dtype=torch.int64, device=device)
    _residual[(t, s)](
        row_start, owner, logits, flat, temperature, floor, *found, keeps, chunks, *strides, vocab, s, g,
        N=n, **options(16),
    )  # fmt: skip
    _decide[(r,)](
        row_start, logits, flat, drafts, temperature, floor, *who, *found, keeps, uniforms, chunks, num, following,
        tokens, *strides, vocab, s, g, GP=gp, SP=triton.next_power_of_2(s), N=n, BLOCK=block, **options(16),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- compiling

_WHO = {"seeds": "*i64", "positions": "*i32", "index": "*i32"}
_ROW = {"logits": "*fp32", "temperature": "*fp32", **_WHO, **PARTS, "stride": "i32", "V": "i32", "S": "i32"}
_FOUND = {
    side + name: kind
    for side in ("", "q_")
    for name, kind in (("peaks", "*fp32"), ("thresholds", "*fp32"), ("last_ids", "*i32"), ("totals", "*i64"))
}
_PAIR = {
    **dict.fromkeys(("logits", "draft_logits", "temperature", "log_min_p", "keeps", "uniforms"), "*fp32"),
    **dict.fromkeys(("row_start", "owner", "num"), "*i32"),
    **dict.fromkeys(("drafts", "chunks", "following", "tokens", "drawn"), "*i64"),
    **dict.fromkeys(("stride", "q_stride", "V", "S", "G"), "i32"),
    **_WHO,
    **_FOUND,
}
_BF16 = dict.fromkeys(("hidden", "embed", "head", "weight"), "*bf16")
_STEP = {**_ROW, **_BF16, "previous": "*i64", "B": "i32", "out": "*i64", "confidence": "*fp32"}


def _of(kernel: Any, signature: dict[str, str]) -> dict[str, str]:
    return {name: kind for name, kind in signature.items() if name in kernel.arg_names}


VARIANTS = [
    *(
        Variant(
            _markov,
            _of(_markov, _STEP),
            {"RANK": 256, "BK": 64, "BV": MARKOV_IDS, "BB": bb, "STREAM": 1},
            ANY,
            fixed(markov_warps(bb)),
        )
        for bb in (16, 32, 64)
    ),
    Variant(
        _markov_finish,
        {**_of(_markov_finish, _STEP), "hidden_stride": "i32", "window": "fp32"},
        {"H": 5120, "HP": 8192, "RANK": 256, "RP": 256, "STREAM": 1, "N": MARKOV_IDS, "SP": 2048, "T": MARKOV_IDS},
        ANY,
        fixed(4),
    ),
    Variant(_match, _of(_match, _PAIR), {"GP": 8}, ANY, fixed(1)),
    Variant(
        _rows, {**_of(_rows, _PAIR), "row_of": "*i32", "owner": "*i32", "t_draft": "*fp32"}, {"GP": 8}, ANY, fixed(1)
    ),
    Variant(
        _spread,
        {**_of(_spread, _PAIR), **PARTS, "row_of": "*i32", "masses": "*i64"},
        {"N": definition.CHUNK, "SKIP": True},
        ANY,
        fixed(),
    ),
    Variant(
        _join,
        {**_of(_join, _PAIR), **PARTS, "row_of": "*i32", "masses": "*i64"},
        {"SP": 16, "SKIP": True},
        ANY,
        fixed(1),
    ),
    *(Variant(_ratios, _of(_ratios, _PAIR), {"BLOCK": block}, ANY, fixed(1)) for block in (False, True)),
    Variant(_residual, _of(_residual, _PAIR), {"N": filters.CHUNK}, ANY, fixed(16)),
    Variant(_decide, _of(_decide, _PAIR), {"GP": 8, "SP": 16, "N": filters.CHUNK, "BLOCK": True}, ANY, fixed(16)),
]
