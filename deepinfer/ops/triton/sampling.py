"""Draws and log-probabilities on CUDA.

Belongs here: `sample` and `top_logprobs` of ops/sampling.py. Does not belong here: arithmetic (exact.py), filters
(filters.py), penalties (penalties.py), drafts (acceptance.py).

A row is cut into chunks, one program each, whose partial results a last small kernel joins. A row that draws without
filters is read once. Scores from approximate logarithms (`gumbel_near`, errors below 2e-5) decide unless two are within
WINDOW; then the chunks that hold them are computed again in the reference's float64 arithmetic.
Legend: M rows, V vocabulary, S chunks of a row, N ids of a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.exact import (
    ANY,
    REACH,
    begin,
    divide,
    finite_or_inf,
    fixed,
    gumbel_fixed,
    gumbel_near,
    key_value,
    options,
    order_key,
    words,
)
from deepinfer.ops.triton.filters import CHUNK, PARAMS, PARTS, SIZES, chunk, partials, peak_of, plain_row, select

WINDOW = 1e-4
STEP = 1024  # ids that a program of 256 threads loads at a time: 16 bytes each
EXACT_TILE = 1024

# ------------------------------------------------------------------------------------------------------ first reading


@triton.jit
def take(best, at, second, score, ids):
    """Running best, its id and second best of every lane; of equal scores the first."""
    over = score > best
    second = tl.maximum(second, tl.minimum(best, score))
    return tl.maximum(best, score), tl.where(over, ids, at), second


@triton.jit
def store_best(best, at, second, parts, marks, row, c, S, V):
    """Planes 1, 2 of `parts` and 1 of `marks`: best score of a chunk, second best, id of the best."""
    most = tl.max(best)
    winner = tl.min(tl.where(best == most, at, V))
    tl.store(parts + (row * 5 + 1) * S + c, most)
    tl.store(parts + (row * 5 + 2) * S + c, tl.max(tl.where(at == winner, second, best)))
    tl.store(marks + (row * 2 + 1) * S + c, winner)


@triton.jit
def store_sum(z, parts, row, c, S):
    """Planes 3, 4: best raw logit of a chunk, sum of e^(z - best)."""
    peak = tl.max(z)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    tl.store(parts + (row * 5 + 3) * S + c, peak)
    tl.store(parts + (row * 5 + 4) * S + c, tl.sum(tl.exp(z - base)))


@triton.jit(do_not_specialize=["S"])
def _scan(
    logits, raw, temperature, top_k, top_p, log_min_p, seeds, positions, index, parts, marks, stride, raw_stride, V, S,
    STREAM: tl.constexpr, N: tl.constexpr, T: tl.constexpr, DRAW: tl.constexpr, FILTERED: tl.constexpr,
    SUM: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Per chunk: best logit and id; with DRAW the noisy scores of rows without filters; SUM of the raw logits.

    Grid (M, S). parts float32 [M, 5, S], marks int32 [M, 2, S]. T ids at a time.
    """
    begin()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    line = logits + row * stride
    group, lane = tl.arange(0, T // 4), tl.arange(0, 4)
    peak = tl.full((T // 4, 4), float("-inf"), tl.float32)
    first = tl.full((T // 4, 4), 0, tl.int32) + V
    t = tl.load(temperature + row)
    draws = (t > 0) & plain_row(row, top_k, top_p, log_min_p, FILTERED) & DRAW
    if draws:
        best, at, second = peak, first, peak
        for o in tl.static_range(0, N, T):
            groups = (c * N + o) // 4 + group
            ids = groups[:, None] * 4 + lane[None, :]
            z = finite_or_inf(tl.load(line + ids, mask=ids < V, other=float("-inf")))
            first = tl.where(z > peak, ids, first)
            peak = tl.maximum(peak, z)
            noise = gumbel_near(words(seeds, positions, index, row, groups, STREAM))
            score = tl.fma(z, tl.zeros_like(z) + 1.0 / t, noise)
            best, at, second = take(best, at, second, score, ids)
        store_best(best, at, second, parts, marks, row, c, S, V)
    else:
        for o in tl.static_range(0, N, T):
            ids = (c * N + o) + group[:, None] * 4 + lane[None, :]
            z = finite_or_inf(tl.load(line + ids, mask=ids < V, other=float("-inf")))
            first = tl.where(z > peak, ids, first)
            peak = tl.maximum(peak, z)
    most = tl.max(peak)
    tl.store(parts + row * 5 * S + c, most)
    tl.store(marks + row * 2 * S + c, tl.min(tl.where(peak == most, first, V)))
    if SUM:
        ids = c * N + tl.arange(0, N)
        if RAW:
            store_sum(tl.load(raw + row * raw_stride + ids, mask=ids < V, other=float("-inf")), parts, row, c, S)
        else:
            store_sum(tl.load(line + ids, mask=ids < V, other=float("-inf")), parts, row, c, S)


# ------------------------------------------------------------------------------------------------------------- the draw


@triton.jit(do_not_specialize=["S"])
def _draw(
    logits, temperature, top_k, top_p, log_min_p, seeds, positions, index, parts, marks, thresholds, last_ids,
    stride, V, S, STREAM: tl.constexpr, N: tl.constexpr, T: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Noisy scores of rows with filters, chunk by chunk. Grid (M, S)."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    t = tl.load(temperature + row)
    if (t > 0) & (plain_row(row, top_k, top_p, log_min_p, True) == 0):
        threshold, last = tl.load(thresholds + row), tl.load(last_ids + row)
        best = tl.full((T // 4, 4), float("-inf"), tl.float32)
        second = best
        at = tl.full((T // 4, 4), 0, tl.int32) + V
        if tl.load(parts + row * 5 * S + c) >= threshold:  # else nothing here survives
            peak = peak_of(parts, row, S, SP)
            floor = tl.maximum(tl.load(log_min_p + row), REACH)
            for o in range(0, N, T):
                groups = (c * N + o) // 4 + tl.arange(0, T // 4)
                ids = groups[:, None] * 4 + tl.arange(0, 4)[None, :]
                z = finite_or_inf(tl.load(logits + row * stride + ids, mask=ids < V, other=float("-inf")))
                keep = (z > threshold) | ((z == threshold) & (ids <= last))
                if tl.max(keep.to(tl.int32)) > 0:
                    scaled = divide(z - peak, t)
                    noise = gumbel_near(words(seeds, positions, index, row, groups, STREAM))
                    score = tl.where(keep & (scaled >= floor), scaled + noise, float("-inf"))
                    best, at, second = take(best, at, second, score, ids)
        store_best(best, at, second, parts, marks, row, c, S, V)


@triton.jit
def exact_winner(
    line, scores, seeds, positions, index, row, t, peak, threshold, last, floor, least, V, S,
    STREAM: tl.constexpr, N: tl.constexpr, SP: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The winner in float64 among chunks whose best score [SP] is at least `least`, smaller ids first."""
    best = tl.full((), float("-inf"), tl.float64)
    winner = V
    s = tl.arange(0, SP)
    near = (scores >= least) & (s < S)
    c = tl.min(tl.where(near, s, SP))
    while c < SP:
        for o in range(0, N, T):
            groups = c * (N // 4) + o // 4 + tl.arange(0, T // 4)
            ids = groups[:, None] * 4 + tl.arange(0, 4)[None, :]
            z = tl.load(line + ids, mask=ids < V, other=float("-inf"))
            scaled = divide(z - peak, t)
            keep = ((z > threshold) | ((z == threshold) & (ids <= last))) & (scaled >= floor)
            noise = gumbel_fixed(words(seeds, positions, index, row, groups, STREAM))
            score = tl.where(keep, scaled.to(tl.float64) + noise, float("-inf"))
            most = tl.max(score)
            at = tl.min(tl.where(score == most, ids, V))
            winner = tl.where(most > best, at, winner)
            best = tl.maximum(best, most)
        c = tl.min(tl.where(near & (s > c), s, SP))
    return winner


@triton.jit
def winner_of(
    line, temperature, top_k, top_p, log_min_p, seeds, positions, index, parts, marks, thresholds, last_ids, row, V, S,
    window, STREAM: tl.constexpr, N: tl.constexpr, SP: tl.constexpr, T: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """The id of a row whose chunks are done; NONE_LEFT or NOT_FINITE where there is none."""
    s = tl.arange(0, SP)
    ok = s < S
    best = tl.load(parts + row * 5 * S + s, mask=ok, other=float("-inf"))
    peak = tl.max(best)
    winner = tl.min(tl.where(best == peak, tl.load(marks + row * 2 * S + s, mask=ok, other=V), V))
    t = tl.load(temperature + row)
    if peak == float("inf"):
        winner = -2
    elif peak == float("-inf"):
        winner = -1
    elif t > 0:
        score = tl.load(parts + (row * 5 + 1) * S + s, mask=ok, other=float("-inf"))
        most = tl.max(score)
        place = tl.min(tl.where(score == most, s, SP))
        others = tl.max(tl.where(s == place, float("-inf"), score))
        others = tl.maximum(others, tl.max(tl.load(parts + (row * 5 + 2) * S + s, mask=ok, other=float("-inf"))))
        winner = tl.load(marks + (row * 2 + 1) * S + place)
        # products of z / t carry the rounding of large logits at low temperatures
        least = most - (window + tl.abs(peak) * (1.0 / t) * 1e-6)
        if others >= least:
            threshold, last, floor = float("-inf"), V, REACH + 0.0
            if FILTERED:  # noqa: SIM102
                if plain_row(row, top_k, top_p, log_min_p, True) == 0:
                    threshold, last = tl.load(thresholds + row), tl.load(last_ids + row)
                    floor = tl.maximum(tl.load(log_min_p + row), REACH)
            winner = exact_winner(
                line,
                score,
                seeds,
                positions,
                index,
                row,
                t,
                peak,
                threshold,
                last,
                floor,
                least,
                V,
                S,
                STREAM,
                N,
                SP,
                T,
            )
    return winner


@triton.jit
def log_total(parts, row, S, SP: tl.constexpr):
    """log of the sum of e^z over the raw logits, from planes 3 and 4."""
    s = tl.arange(0, SP)
    tops = tl.load(parts + (row * 5 + 3) * S + s, mask=s < S, other=float("-inf"))
    sums = tl.load(parts + (row * 5 + 4) * S + s, mask=s < S, other=0.0)
    top = tl.max(tops)
    return top + tl.log(tl.sum(sums * tl.exp(tops - top)))


@triton.jit(do_not_specialize=["S"])
def _finish(
    logits, raw, temperature, top_k, top_p, log_min_p, seeds, positions, index, parts, marks, thresholds, last_ids,
    out, logprob, stride, raw_stride, V, S, window, STREAM: tl.constexpr, N: tl.constexpr, SP: tl.constexpr,
    T: tl.constexpr, FILTERED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Grid (M,)."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    winner = winner_of(
        logits + row * stride, temperature, top_k, top_p, log_min_p, seeds, positions, index, parts, marks, thresholds,
        last_ids, row, V, S, window, STREAM, N, SP, T, FILTERED,
    )  # fmt: skip
    tl.store(out + row, winner.to(tl.int64))
    value = 0.0
    if SUM:  # noqa: SIM102
        if winner >= 0:
            value = tl.load(raw + row * raw_stride + winner) - log_total(parts, row, S, SP)
    tl.store(logprob + row, value)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sample_index: Tensor,
    raw: Tensor | None,
    stream: int,
    filtered: bool,
    logprobs: bool,
) -> tuple[Tensor, Tensor]:
    m, vocab = logits.shape
    ids = torch.empty(m, dtype=torch.int64, device=logits.device)
    logprob = torch.empty(m, dtype=torch.float32, device=logits.device)
    if not m:
        return ids, logprob
    n = chunk(vocab)
    parts, marks = partials(m, vocab, logits.device)
    s = parts.shape[2]
    source = logits if raw is None else raw
    params, who = (temperature, top_k, top_p, log_min_p), (seeds, positions, sample_index)
    strides = (logits.stride(0), source.stride(0))
    _scan[(m, s)](
        logits, source, *params, *who, parts, marks, *strides, vocab, s,
        STREAM=stream, N=n, T=min(n, STEP), DRAW=True, FILTERED=filtered, SUM=logprobs, RAW=raw is not None,
        **options(),
    )  # fmt: skip
    threshold, last_id = parts, marks
    if filtered:
        f = select(logits, params, parts, marks, False)
        threshold, last_id = f.threshold, f.last_id
        _draw[(m, s)](
            logits, *params, *who, parts, marks, threshold, last_id, logits.stride(0), vocab, s,
            STREAM=stream, N=n, T=min(n, STEP), SP=triton.next_power_of_2(s), **options(),
        )  # fmt: skip
    _finish[(m,)](
        logits, source, *params, *who, parts, marks, threshold, last_id, ids, logprob, *strides, vocab, s, WINDOW,
        STREAM=stream, N=n, SP=triton.next_power_of_2(s), T=min(n, EXACT_TILE), FILTERED=filtered, SUM=logprobs,
        **options(4),
    )  # fmt: skip
    return ids, logprob


# --------------------------------------------------------------------------------------------------- log-probabilities


@triton.jit(do_not_specialize=["S", "n"])
def _top(logits, ids_in, keys, parts, ranks, stride, V, S, n, N: tl.constexpr):
    """Per chunk: the n largest (logit, id) as int64, how many precede the given id, sum of e^z. Grid (M, S)."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    ids = c * N + tl.arange(0, N)
    z = tl.load(logits + row * stride + ids, mask=ids < V, other=float("-inf"))
    store_sum(z, parts, row, c, S)
    mine = tl.load(ids_in + row)
    if mine >= 0:
        own = tl.load(logits + row * stride + mine)
        tl.store(ranks + row * S + c, tl.sum(((z > own) | ((z == own) & (ids < mine))).to(tl.int32)))
    key = (order_key(z).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    key = tl.where(ids < V, key, -9223372036854775807)
    for j in range(0, n):
        most = tl.max(key)
        tl.store(keys + (row * S + c) * n + j, most)
        key = tl.where(key == most, -9223372036854775807, key)


@triton.jit(do_not_specialize=["S", "n"])
def _top_finish(
    logits, ids_in, keys, parts, ranks, top_ids, top_values, given, given_rank, stride, S, n,
    SP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SP)
    total = log_total(parts, row, S, SP)
    mine = tl.load(ids_in + row)
    value = 0.0
    rank = 0
    if mine >= 0:
        value = tl.maximum(tl.load(logits + row * stride + mine) - total, -3.4028234663852886e38)
        rank = 1 + tl.sum(tl.load(ranks + row * S + s, mask=s < S, other=0))
    tl.store(given + row, value)
    tl.store(given_rank + row, rank)
    i = tl.arange(0, KP)
    key = tl.load(keys + row * S * n + i, mask=i < S * n, other=-9223372036854775807)
    for j in range(0, n):
        most = tl.max(key)
        z = key_value((most >> 32).to(tl.int32))
        tl.store(top_ids + row * n + j, 0x7FFFFFFF - (most & 0xFFFFFFFF))
        tl.store(top_values + row * n + j, tl.maximum(z - total, -3.4028234663852886e38))
        key = tl.where(key == most, -9223372036854775807, key)


def top_logprobs(logits: Tensor, ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, vocab = logits.shape
    device = logits.device
    top_ids = torch.empty((m, n), dtype=torch.int64, device=device)
    values = torch.empty((m, n), dtype=torch.float32, device=device)
    given = torch.empty(m, dtype=torch.float32, device=device)
    rank = torch.empty(m, dtype=torch.int32, device=device)
    if m:
        size = chunk(vocab)
        parts, marks = partials(m, vocab, device)
        s = parts.shape[2]
        keys = torch.empty((m, s, n), dtype=torch.int64, device=device)
        _top[(m, s)](logits, ids, keys, parts, marks, logits.stride(0), vocab, s, n, N=size, **options())
        _top_finish[(m,)](
            logits, ids, keys, parts, marks, top_ids, values, given, rank, logits.stride(0), s, n,
            SP=triton.next_power_of_2(s), KP=triton.next_power_of_2(max(s * n, 1)), **options(4),
        )  # fmt: skip
    return top_ids, values, given, rank


# ----------------------------------------------------------------------------------------------------------- compiling

_WHO = {"seeds": "*i64", "positions": "*i32", "index": "*i32"}
_ROW = {"logits": "*fp32", "raw": "*fp32", **PARAMS, **_WHO, **PARTS, **SIZES, "raw_stride": "i32"}
_CUT = {"thresholds": "*fp32", "last_ids": "*i32"}
_OUT = {"out": "*i64", "logprob": "*fp32", "window": "fp32"}
_TOP = {"logits": "*fp32", "ids_in": "*i64", "keys": "*i64", "parts": "*fp32", "ranks": "*i32", **SIZES, "n": "i32"}
_TOPS = {"top_ids": "*i64", "top_values": "*fp32", "given": "*fp32", "given_rank": "*i32"}
_DRAWS = {"STREAM": 0, "N": CHUNK, "SP": 16}
VARIANTS = [
    *(
        Variant(
            _scan,
            _ROW,
            {"STREAM": 0, "N": CHUNK, "T": STEP, "DRAW": draw, "FILTERED": True, "SUM": True, "RAW": False},
            ANY,
            fixed(),
        )
        for draw in (False, True)
    ),
    Variant(_draw, {**_ROW, **_CUT}, {**_DRAWS, "T": STEP}, ANY, fixed()),
    Variant(
        _finish, {**_ROW, **_CUT, **_OUT}, {**_DRAWS, "T": EXACT_TILE, "FILTERED": True, "SUM": True}, ANY, fixed(4)
    ),
    Variant(_top, _TOP, {"N": CHUNK}, ANY, fixed()),
    Variant(_top_finish, {**_TOP, **_TOPS}, {"SP": 16, "KP": 1024}, ANY, fixed(4)),
]
