"""Filters on CUDA: which ids survive min_p, top_k and top_p.

Belongs here: `survivors` of ops/sampling.py. Does not belong here: arithmetic (exact.py), draws (sampling.py).

A row is cut into chunks of CHUNK ids, one program each, so nothing depends on how many rows there are. A histogram of
(best - z) / temperature bounds the mass above each bin edge from counts alone, and so brackets the last survivor: in
width 1/32 up to 12, 1/9 beyond. The ids inside the bracket go to a list, everything above it is summed, and the exact
cut is found by bisection over the list. A list that overflows (thousands of equal logits) is replaced by the row.
Triton's histogram takes 9 ballots and BINS / 32 population counts a value, and the latter run at an eighth of the rate.
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
    MASS,
    REACH,
    begin,
    divide,
    exp_fixed,
    finite_or_inf,
    fixed,
    key_value,
    options,
    order_key,
)

CHUNK = 8192  # 2048 / 4096 / 8192: 31 / 25.6 / 23.3 us a plain draw of 64 rows on an H200
WIDE = 16  # warps of kernels with much arithmetic per id
STEP = 1024  # ids that `_collect` takes at a time
LIST = 8192  # ids that a bracket may hold
TILE = 2048  # of the list, or of the row in its place, at a time
BINS = tl.constexpr(512)
WORDS = tl.constexpr(528)  # of a row of `hist`: bins, then two int64 sums, two counters, the bracket


def chunk(vocab: int) -> int:
    return min(CHUNK, max(64, triton.next_power_of_2(vocab)))


# -------------------------------------------------------------------------------------------------------------- filters


@triton.jit
def plain_row(row, top_k, top_p, log_min_p, FILTERED: tl.constexpr):
    """Whether nothing filters this row."""
    if FILTERED:
        return (tl.load(top_k + row) <= 0) & (tl.load(top_p + row) >= 1.0) & (tl.load(log_min_p + row) == float("-inf"))
    else:
        return row >= 0


@triton.jit
def peak_of(parts, row, S, SP: tl.constexpr):
    """Best logit of a row from its chunks' (plane 0)."""
    s = tl.arange(0, SP)
    return tl.max(tl.load(parts + row * 5 * S + s, mask=s < S, other=float("-inf")))


@triton.jit(do_not_specialize=["S"])
def _peaks(logits, parts, marks, stride, V, S, N: tl.constexpr):
    """Per chunk: best logit and its id. Grid (M, S). parts float32 [M, 5, S], marks int32 [M, 2, S]."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    ids = c * N + tl.arange(0, N)
    z = finite_or_inf(tl.load(logits + row * stride + ids, mask=ids < V, other=float("-inf")))
    peak = tl.max(z)
    tl.store(parts + row * 5 * S + c, peak)
    tl.store(marks + row * 2 * S + c, tl.min(tl.where(z == peak, ids, V)))


def peaks(logits: Tensor, parts: Tensor, marks: Tensor) -> None:
    m, vocab = logits.shape
    s = parts.shape[2]
    _peaks[(m, s)](logits, parts, marks, logits.stride(0), vocab, s, N=chunk(vocab), **options())


@triton.jit
def best_id(parts, marks, row, peak, V, S, SP: tl.constexpr):
    """The smallest id with the row's best logit."""
    s = tl.arange(0, SP)
    best = tl.load(parts + row * 5 * S + s, mask=s < S, other=float("-inf"))
    return tl.min(tl.where(best == peak, tl.load(marks + row * 2 * S + s, mask=s < S, other=V), V))


@triton.jit
def _bins(z, peak, t, floor):
    """((z - peak) / t, whether a token counts, its bin): bin 0 holds the best."""
    scaled = divide(z - peak, t)
    inside = scaled >= floor
    x = tl.where(inside, -scaled, 0.0)
    return scaled, inside, tl.where(x < 12.0, x * 32.0, (x - 12.0) * 9.0 + 384.0).to(tl.int32)


@triton.jit
def _row_params(row, parts, temperature, top_k, top_p, log_min_p, S, SP: tl.constexpr):
    t = tl.load(temperature + row)
    floor = tl.maximum(tl.load(log_min_p + row), REACH)
    return peak_of(parts, row, S, SP), t, floor, tl.load(top_k + row), tl.load(top_p + row)


@triton.jit(do_not_specialize=["S"])
def _histogram(
    logits, temperature, top_k, top_p, log_min_p, parts, hist, stride, V, S, N: tl.constexpr, SP: tl.constexpr
):
    """Counts of BINS bins, added to hist int32 [M, WORDS]. Grid (M, S)."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    peak, t, floor, k, p = _row_params(row, parts, temperature, top_k, top_p, log_min_p, S, SP)
    if (t > 0) & ((k > 0) | (p < 1.0)):
        ids = tl.program_id(1) * N + tl.arange(0, N)
        z = finite_or_inf(tl.load(logits + row * stride + ids, mask=ids < V, other=float("-inf")))
        _, inside, b = _bins(z, peak, t, floor)
        if tl.max(inside.to(tl.int32)) > 0:
            counts = tl.histogram(b, BINS, mask=inside)
            tl.atomic_add(hist + row * WORDS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _bracket(temperature, top_k, top_p, hist):
    """Bins (from, to) that hold the last survivor of top_p, and the bin of top_k: words 8, 9, 10 behind a row's bins.

    A bin's mass is between its count times e^-(far edge) and e^-(near edge). The cut is checked: float32 will do.
    """
    begin()
    row = tl.program_id(0).to(tl.int64)
    t, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    out = hist + row * WORDS + BINS
    if (t > 0) & ((k > 0) | (p < 1.0)):
        j = tl.arange(0, BINS)
        count = tl.load(hist + row * WORDS + j)
        through = tl.cumsum(count, 0)
        some = tl.sum(count)
        cut = tl.minimum(tl.where(k > 0, k, some), some)
        kth = tl.min(tl.where(through >= cut, j, BINS - 1))
        kept = tl.maximum(tl.minimum(count, cut - (through - count)), 0).to(tl.float32)
        edge = j.to(tl.float32)
        edge = tl.where(j < 384, edge * 0.03125, (edge - 384.0) * 0.11111111 + 12.0)
        upper = kept * tl.exp(-edge)
        lower = upper * tl.exp(tl.where(j < 384, -0.03125, -0.11111111))
        share = tl.minimum(p, 1.0).to(tl.float32)
        rest = (1.0 - p).to(tl.float32)
        lower_below = tl.cumsum(lower, 0, reverse=True) - lower
        upper_below = tl.cumsum(upper, 0, reverse=True) - upper
        may = tl.cumsum(upper, 0) * rest * 1.001 >= share * lower_below
        must = tl.cumsum(lower, 0) * rest >= share * upper_below * 1.001
        first = tl.min(tl.where(may, j, kth))
        last = tl.minimum(tl.min(tl.where(must, j, kth)), kth)
        first = tl.where(p < 1.0, tl.minimum(first, last), kth)
        tl.store(out + 8, first)
        tl.store(out + 9, tl.where(p < 1.0, last, kth))
        tl.store(out + 10, kth)
    else:
        tl.store(out + 8, BINS)
        tl.store(out + 9, -1)
        tl.store(out + 10, BINS)


@triton.jit(do_not_specialize=["S"])
def _collect(
    logits, temperature, top_k, top_p, log_min_p, parts, hist, sums, list_z, list_id, list_mass, stride, V, S,
    N: tl.constexpr, T: tl.constexpr, SP: tl.constexpr, CAP: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Mass above the bracket and between it and the bin of top_k (sums int64), ids inside to the list. Grid (M, S).

    `sums` is `hist` as int64 [M, WORDS / 2]. PLAIN: rows without filters too.
    """
    begin()
    row = tl.program_id(0).to(tl.int64)
    peak, t, floor, k, p = _row_params(row, parts, temperature, top_k, top_p, log_min_p, S, SP)
    if (t > 0) & (PLAIN | (k > 0) | (p < 1.0)):
        words_of = hist + row * WORDS + BINS
        total = sums + (row * WORDS + BINS) // 2
        first, last, kth = tl.load(words_of + 8), tl.load(words_of + 9), tl.load(words_of + 10)
        line = logits + row * stride
        over_mass, between_mass = tl.zeros((T,), tl.int64), tl.zeros((T,), tl.int64)
        passed, listed = tl.zeros((T,), tl.int32), tl.zeros((T,), tl.int32)
        for o in range(0, N, T):
            ids = tl.program_id(1) * N + o + tl.arange(0, T)
            z = finite_or_inf(tl.load(line + ids, mask=ids < V, other=float("-inf")))
            over, between, inside, mass = _sides(z, peak, t, floor, first, last, kth)
            mass = mass.to(tl.int64)
            over_mass += tl.where(over, mass, 0)
            between_mass += tl.where(between, mass, 0)
            passed += (over | between).to(tl.int32)
            listed += inside.to(tl.int32)
        tl.atomic_add(total, tl.sum(over_mass), sem="relaxed")
        tl.atomic_add(total + 1, tl.sum(between_mass), sem="relaxed")
        tl.atomic_add(words_of + 4, tl.sum(passed), sem="relaxed")
        if tl.sum(listed) > 0:
            for o in range(0, N, T):
                ids = tl.program_id(1) * N + o + tl.arange(0, T)
                z = finite_or_inf(tl.load(line + ids, mask=ids < V, other=float("-inf")))
                _, _, inside, mass = _sides(z, peak, t, floor, first, last, kth)
                n = tl.sum(inside.to(tl.int32))
                if n > 0:
                    base = tl.atomic_add(words_of + 5, n, sem="relaxed")
                    place = base + tl.cumsum(inside.to(tl.int32), 0) - 1
                    fits = inside & (place < CAP)
                    tl.store(list_z + row * CAP + place, z, mask=fits)
                    tl.store(list_id + row * CAP + place, ids, mask=fits)
                    tl.store(list_mass + row * CAP + place, mass, mask=fits)


@triton.jit
def _sides(z, peak, t, floor, first, last, kth):
    """(above the bracket, between it and bin `kth`, to be listed, mass as float32) of ids."""
    scaled, inside, b = _bins(z, peak, t, floor)
    mass = tl.floor(exp_fixed(tl.where(inside, scaled, 0.0)) * MASS)
    inside = inside & (b <= kth)
    over = inside & (b < first)
    between = inside & (b > last) & (b < kth)
    return over, between, inside & (over == 0) & (between == 0), mass


@triton.jit
def _entries(list_z, list_id, list_mass, line, o, n, full, peak, t, floor, key1, id1, T: tl.constexpr):
    """(key, id, inside, mass) of entries o..o+T-1 of the list, or of the whole row; inside: not cut by (key1, id1)."""
    i = o + tl.arange(0, T)
    ok = i < n
    if full:
        z = finite_or_inf(tl.load(line + i, mask=ok, other=float("-inf")))
        ids = i
        scaled = divide(z - peak, t)
        ok = ok & (scaled >= floor)
        mass = tl.floor(exp_fixed(tl.where(ok, scaled, 0.0)) * MASS)
    else:
        z = tl.load(list_z + i, mask=ok, other=float("-inf"))
        ids = tl.load(list_id + i, mask=ok, other=0)
        mass = tl.load(list_mass + i, mask=ok, other=0.0)
    key = order_key(z).to(tl.int64)
    return key, ids, ok & ((key > key1) | ((key == key1) & (ids <= id1))), mass


@triton.jit
def _weight(list_z, list_id, list_mass, line, n, full, peak, t, floor, key1, id1, at, masses, T: tl.constexpr):
    """Mass (or count) of entries with key >= at."""
    total = tl.zeros((), tl.int64)
    for o in range(0, n, T):
        key, _, ok, mass = _entries(list_z, list_id, list_mass, line, o, n, full, peak, t, floor, key1, id1, T)
        total += tl.sum(tl.where(ok & (key >= at), tl.where(masses, mass, 1.0), 0.0).to(tl.int64))
    return total


@triton.jit
def _ties(list_z, list_id, list_mass, line, n, full, peak, t, floor, key1, id1, at, upto, T: tl.constexpr):
    """(how many entries of key `at` have ids <= upto, the largest of these ids, their mass each)."""
    total = tl.zeros((), tl.int32)
    highest = tl.zeros((), tl.int32)
    one = tl.zeros((), tl.float32)
    for o in range(0, n, T):
        key, ids, ok, mass = _entries(list_z, list_id, list_mass, line, o, n, full, peak, t, floor, key1, id1, T)
        ok = ok & (key == at) & (ids <= upto)
        total += tl.sum(ok.to(tl.int32))
        highest = tl.maximum(highest, tl.max(tl.where(ok, ids, 0)))
        one = tl.maximum(one, tl.max(tl.where(ok, mass, 0.0)))
    return total, highest, one


@triton.jit
def _cut(list_z, list_id, list_mass, line, n, full, peak, t, floor, key1, id1, need, V, masses, T: tl.constexpr):
    """(key, id) of the last entry that is needed for a weight of `need`, entries by (key descending, id ascending)."""
    lo = tl.full((), 2147483647, tl.int64)
    hi = tl.full((), -2147483648, tl.int64)
    for o in range(0, n, T):
        key, _, ok, _ = _entries(list_z, list_id, list_mass, line, o, n, full, peak, t, floor, key1, id1, T)
        lo = tl.minimum(lo, tl.min(tl.where(ok, key, 2147483647)))
        hi = tl.maximum(hi, tl.max(tl.where(ok, key, -2147483648)))
    while lo < hi:
        mid = lo + ((hi - lo + 1) >> 1)
        got = _weight(list_z, list_id, list_mass, line, n, full, peak, t, floor, key1, id1, mid, masses, T)
        lo = tl.where(got >= need, mid, lo)
        hi = tl.where(got >= need, hi, mid - 1)
    over = _weight(list_z, list_id, list_mass, line, n, full, peak, t, floor, key1, id1, lo + 1, masses, T)
    ties, last, one = _ties(list_z, list_id, list_mass, line, n, full, peak, t, floor, key1, id1, lo, V, T)
    unit = tl.where(masses, tl.maximum(one, 1.0), 1.0).to(tl.int64)
    rest = (need - over + unit - 1) // unit
    if rest < ties:
        a = tl.zeros((), tl.int32)
        b = last
        while a < b:
            mid = (a + b) // 2
            got, _, _ = _ties(list_z, list_id, list_mass, line, n, full, peak, t, floor, key1, id1, lo, mid, T)
            a = tl.where(got >= rest, a, mid + 1)
            b = tl.where(got >= rest, mid, b)
        last = a
    return lo, last


@triton.jit(do_not_specialize=["S"])
def _threshold(
    logits, temperature, top_k, top_p, log_min_p, parts, marks, hist, sums, list_z, list_id, list_mass,
    peaks, thresholds, last_ids, totals, stride, V, S, SP: tl.constexpr, CAP: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The exact last survivor of every row and the survivors' mass. Grid (M,)."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    peak, t, floor, k, p = _row_params(row, parts, temperature, top_k, top_p, log_min_p, S, SP)
    words_of = hist + row * WORDS + BINS
    acc = sums + (row * WORDS + BINS) // 2
    line = logits + row * stride
    list_z += row * CAP
    list_id += row * CAP
    list_mass += row * CAP
    value = float("-inf")
    last = V - 1
    kept = tl.load(acc)
    if (peak == float("inf")) | (peak == float("-inf")):
        value = float("inf")
        last = -1
        kept = tl.zeros((), tl.int64)
    elif t <= 0:
        value = peak
        last = best_id(parts, marks, row, peak, V, S, SP)
        kept = tl.full((), 1 << 36, tl.int64)
    elif (k > 0) | (p < 1.0):
        listed = tl.load(words_of + 5)
        bracket_end = tl.load(words_of + 9)
        full = listed > CAP
        key = tl.full((), -2147483648, tl.int64)
        done = row < 0
        while done == 0:
            n = tl.where(full, V, listed)
            over = tl.where(full, 0, tl.load(acc))
            between = tl.where(full, 0, tl.load(acc + 1))
            key = tl.full((), -2147483648, tl.int64)
            last = V - 1
            done = row >= 0
            for phase in range(0, 2):  # top_k by counts, then top_p by mass
                masses = phase == 1
                if tl.where(masses, p < 1.0, k > 0):
                    low = tl.full((), -2147483648, tl.int64)
                    mine = _weight(
                        list_z, list_id, list_mass, line, n, full, peak, t, floor, key, last, low, masses, T
                    )  # fmt: skip
                    if masses:
                        need = tl.ceil(p * (mine + over + between).to(tl.float64)).to(tl.int64) - over
                    else:
                        need = tl.minimum((k - tl.where(full, 0, tl.load(words_of + 4))).to(tl.int64), mine)
                    key, last = _cut(
                        list_z, list_id, list_mass, line, n, full, peak, t, floor, key, last, need, V, masses, T
                    )  # fmt: skip
                    if masses:
                        _, _, b = _bins(key_value(key.to(tl.int32)), peak, t, floor)
                        done = full | ((need > 0) & (need <= mine) & ((b <= bracket_end) | (between == 0)))
            kept = over + _weight(
                list_z, list_id, list_mass, line, n, full, peak, t, floor, key, last, key, row >= 0, T
            )  # fmt: skip
            full = row >= 0
        value = key_value(key.to(tl.int32))
    tl.store(peaks + row, peak + 0.0)
    tl.store(thresholds + row, value)
    tl.store(last_ids + row, last)
    tl.store(totals + row, kept)


class Filtered:
    """Buffers of the filter kernels for M rows, and what they found."""

    def __init__(self, m: int, vocab: int, device: torch.device) -> None:
        self.hist = torch.zeros((m, WORDS.value), dtype=torch.int32, device=device)
        self.sums = self.hist.view(torch.int64)
        self.list_z, self.list_mass = torch.empty((2, m, LIST), dtype=torch.float32, device=device).unbind(0)
        self.list_id = torch.empty((m, LIST), dtype=torch.int32, device=device)
        self.peak, self.threshold = torch.empty((2, m), dtype=torch.float32, device=device).unbind(0)
        self.last_id = torch.empty(m, dtype=torch.int32, device=device)
        self.total = torch.empty(m, dtype=torch.int64, device=device)


def select(logits: Tensor, params: tuple[Tensor, ...], parts: Tensor, marks: Tensor, plain: bool) -> Filtered:
    """Survivors of rows whose chunks' best logits are in `parts`; with `plain` the mass of rows without filters too."""
    m, vocab = logits.shape
    n = chunk(vocab)
    s = parts.shape[2]
    sp = triton.next_power_of_2(s)
    found = Filtered(m, vocab, logits.device)
    f, stride = found, logits.stride(0)
    lists = (f.list_z, f.list_id, f.list_mass)
    _histogram[(m, s)](logits, *params, parts, f.hist, stride, vocab, s, N=n, SP=sp, **options(WIDE))
    _bracket[(m,)](*params[:3], f.hist, **options())
    _collect[(m, s)](
        logits, *params, parts, f.hist, f.sums, *lists, stride, vocab, s,
        N=n, T=min(n, STEP), SP=sp, CAP=LIST, PLAIN=plain, **options(),
    )  # fmt: skip
    _threshold[(m,)](
        logits, *params, parts, marks, f.hist, f.sums, *lists, f.peak, f.threshold, f.last_id, f.total, stride, vocab,
        s, SP=sp, CAP=LIST, T=TILE, **options(WIDE),
    )  # fmt: skip
    return found


def partials(m: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    s = triton.cdiv(vocab, chunk(vocab))
    parts = torch.empty((m, 5, s), dtype=torch.float32, device=device)
    return parts, torch.empty((m, 2, s), dtype=torch.int32, device=device)


def survivors(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, vocab = logits.shape
    parts, marks = partials(m, vocab, logits.device)
    params = (temperature, top_k, top_p, log_min_p)
    if not m:
        f = Filtered(m, vocab, logits.device)
    else:
        peaks(logits, parts, marks)
        f = select(logits, params, parts, marks, True)
    return f.peak, f.threshold, f.last_id, f.total


# ----------------------------------------------------------------------------------------------------------- compiling

PARAMS = {"temperature": "*fp32", "top_k": "*i32", "top_p": "*fp64", "log_min_p": "*fp32"}
PARTS = {"parts": "*fp32", "marks": "*i32"}
SIZES = {"stride": "i32", "V": "i32", "S": "i32"}
_LISTS = {"hist": "*i32", "sums": "*i64", "list_z": "*fp32", "list_id": "*i32", "list_mass": "*fp32"}
_FOUND = {"peaks": "*fp32", "thresholds": "*fp32", "last_ids": "*i32", "totals": "*i64"}

_ROW = {"logits": "*fp32", **PARAMS, **PARTS, **SIZES}
VARIANTS = [
    Variant(_peaks, {"logits": "*fp32", **PARTS, **SIZES}, {"N": CHUNK}, ANY, fixed()),
    Variant(_histogram, {**_ROW, "hist": "*i32"}, {"N": CHUNK, "SP": 16}, ANY, fixed(WIDE)),
    Variant(_bracket, {**PARAMS, "hist": "*i32"}, {}, ANY, fixed()),
    Variant(_collect, {**_ROW, **_LISTS}, {"N": CHUNK, "T": STEP, "SP": 16, "CAP": LIST, "PLAIN": False}, ANY, fixed()),
    Variant(_threshold, {**_ROW, **_LISTS, **_FOUND}, {"SP": 16, "CAP": LIST, "T": TILE}, ANY, fixed(WIDE)),
]
