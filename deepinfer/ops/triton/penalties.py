"""Penalties, bias and masks on CUDA.

Belongs here: `penalise`, `record_prompt`, `record_output` of ops/sampling.py. Does not belong here: filters, draws.

A program owns CHUNK ids of one row and works in the reference's order with a barrier between the steps.
Legend: M rows, V vocabulary, W = ceil(V / 32).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer.ops.sampling import MAX_COUNT
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.exact import ANY, begin, divide, fixed, options

CHUNK = 8192
STEP = 1024
COUNT_LIMIT = tl.constexpr(MAX_COUNT)


@triton.jit
def _listed(line, ids, values, first, last, lo, hi, V, BIAS: tl.constexpr):
    """Apply entries first..last-1 of a list whose ids lie in lo..hi-1: add values (BIAS), or forbid."""
    for o in range(first, last, 128):
        i = o + tl.arange(0, 128)
        at = tl.load(ids + i, mask=i < last, other=-1)
        mine = (at >= lo) & (at < tl.minimum(hi, V))
        if BIAS:
            value = tl.load(values + i, mask=mine, other=0.0)
            z = tl.load(line + at, mask=mine, other=0.0)
            tl.store(line + at, tl.where(value == float("-inf"), value, z + value), mask=mine)
        else:
            tl.store(line + at, tl.full((128,), float("-inf"), tl.float32), mask=mine)


@triton.jit
def _bit(words, ids, W):
    """Bit id % 32 of word id // 32, 0 beyond the row."""
    word = ids // 32
    return (tl.load(words + word, mask=word < W, other=0) >> (ids % 32)) & 1


@triton.jit
def _penalise(
    logits, slots, counts, prompt_mask, penalties, before, bias_ids, bias_values, bias_range, stop_ids, stop_range,
    positions, min_positions, allowed, allowed_row, stride, V, W, E, MASKED: tl.constexpr, N: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Grid (M, chunks). T ids at a time: logits are read whole (16 bytes a thread), written where they change."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    lo = tl.program_id(1) * N
    line = logits + row * stride
    if MASKED:
        which = tl.load(allowed_row + row).to(tl.int64)
        if which >= 0:
            for o in range(0, N, T):
                ids = lo + o + tl.arange(0, T)
                out = (_bit(allowed + which * W, ids, W) == 0) & (ids < V)
                tl.store(line + ids, tl.full((T,), float("-inf"), tl.float32), mask=out)
            tl.debug_barrier()
    first, last = tl.load(bias_range + 2 * row), tl.load(bias_range + 2 * row + 1)
    if first < last:
        _listed(line, bias_ids, bias_values, first, last, lo, lo + N, V, True)
        tl.debug_barrier()
    first, last = tl.load(stop_range + 2 * row), tl.load(stop_range + 2 * row + 1)
    if (first < last) & (tl.load(positions + row) < tl.load(min_positions + row)):
        _listed(line, stop_ids, bias_values, first, last, lo, lo + N, V, False)
        tl.debug_barrier()
    repetition = tl.load(penalties + 3 * row)
    frequency, presence = tl.load(penalties + 3 * row + 1), tl.load(penalties + 3 * row + 2)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        slot = tl.load(slots + row).to(tl.int64)
        for o in range(0, N, T):
            ids = lo + o + tl.arange(0, T)
            ok = ids < V
            z = tl.load(line + ids, mask=ok, other=0.0)
            count = tl.load(counts + slot * V + ids, mask=ok, other=0).to(tl.int32)
            for j in range(0, E):
                count += (tl.load(before + row * E + j) == ids).to(tl.int32)
            generated = count > 0
            seen = (generated | (_bit(prompt_mask + slot * W, ids, W) != 0)) & (tl.zeros_like(z) + repetition != 1.0)
            z = tl.where(seen, tl.where(z > 0, divide(z, repetition), z * repetition), z)
            z = tl.where(generated, z - (frequency * count.to(tl.float32) + presence), z)
            tl.store(line + ids, z, mask=ok & (generated | seen))


def penalise(
    logits: Tensor,
    slots: Tensor,
    counts: Tensor,
    prompt_mask: Tensor,
    penalties: Tensor,
    before: Tensor | None,
    bias_ids: Tensor,
    bias_values: Tensor,
    bias_range: Tensor,
    stop_ids: Tensor,
    stop_range: Tensor,
    positions: Tensor,
    min_positions: Tensor,
    allowed: Tensor | None,
    allowed_row: Tensor | None,
) -> None:
    m, vocab = logits.shape
    if not m:
        return
    masked = allowed is not None and allowed_row is not None
    n = min(CHUNK, max(128, triton.next_power_of_2(vocab)))
    _penalise[(m, triton.cdiv(vocab, n))](
        logits, slots, counts, prompt_mask, penalties, slots if before is None else before, bias_ids, bias_values,
        bias_range, stop_ids, stop_range, positions, min_positions, allowed if masked else slots,
        allowed_row if masked else slots, logits.stride(0), vocab, prompt_mask.shape[1],
        0 if before is None else before.shape[1], MASKED=masked, N=n, T=min(n, STEP), **options(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def _record_prompt(prompt_mask, slots, ids, n, W, N: tl.constexpr):
    begin()
    i = tl.program_id(0) * N + tl.arange(0, N)
    at = tl.load(ids + i, mask=i < n, other=-1)
    some = at >= 0
    slot = tl.load(slots + i, mask=some, other=0).to(tl.int64)
    bit = tl.full((N,), 1, tl.int32) << (at & 31)
    tl.atomic_or(prompt_mask + slot * W + (at >> 5), bit, mask=some, sem="relaxed")


def record_prompt(prompt_mask: Tensor, slots: Tensor, ids: Tensor) -> None:
    if n := ids.shape[0]:
        _record_prompt[(triton.cdiv(n, 256),)](prompt_mask, slots, ids, n, prompt_mask.shape[1], N=256, **options(2))


@triton.jit(do_not_specialize=["R"])
def _record_output(counts, slots, ids, num, R, V, E: tl.constexpr, N: tl.constexpr):
    """One lane a request: equal ids of a request follow each other."""
    begin()
    r = tl.program_id(0) * N + tl.arange(0, N)
    slot = tl.load(slots + r, mask=r < R, other=0).to(tl.int64)
    most = tl.load(num + r, mask=r < R, other=0)
    for j in tl.static_range(E):
        at = tl.load(ids + r.to(tl.int64) * E + j, mask=r < R, other=-1)
        some = (at >= 0) & (j < most)
        value = tl.load(counts + slot * V + at, mask=some, other=0).to(tl.int32)
        tl.store(counts + slot * V + at, tl.minimum(value + 1, COUNT_LIMIT).to(tl.int16), mask=some)
        tl.debug_barrier()


def record_output(counts: Tensor, slots: Tensor, ids: Tensor, num: Tensor) -> None:
    if ids.numel():
        r, e = ids.shape
        _record_output[(triton.cdiv(r, 32),)](
            counts, slots, ids, num, r, counts.shape[1], E=e, N=32, **options(1)
        )  # fmt: skip


_ROWS = dict.fromkeys(("slots", "prompt_mask", "before", "bias_ids", "bias_range", "stop_ids", "stop_range"), "*i32")
_ROWS |= dict.fromkeys(("positions", "min_positions", "allowed", "allowed_row"), "*i32")
_FLOATS = dict.fromkeys(("logits", "penalties", "bias_values"), "*fp32")
_SIZES = dict.fromkeys(("stride", "V", "W", "E"), "i32")
VARIANTS = [
    Variant(
        _penalise,
        {**_FLOATS, **_ROWS, "counts": "*i16", **_SIZES},
        {"MASKED": True, "N": CHUNK, "T": STEP},
        ANY,
        fixed(),
    ),
    Variant(
        _record_prompt,
        {**dict.fromkeys(("prompt_mask", "slots", "ids"), "*i32"), "n": "i32", "W": "i32"},
        {"N": 256},
        ANY,
        fixed(2),
    ),
    Variant(
        _record_output,
        {"counts": "*i16", "slots": "*i32", "ids": "*i64", "num": "*i32", "R": "i32", "V": "i32"},
        {"E": 6, "N": 32},
        ANY,
        fixed(1),
    ),
]
