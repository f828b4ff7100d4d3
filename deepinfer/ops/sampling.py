"""Sampling: penalties and masks, which ids survive the filters, the draw, log-probabilities.

Belongs here: from logits to ids, as engine/sampler.py defines it, for rows that are independent of each other.
Does not belong here: drafts and their acceptance (ops/acceptance.py), stop rules.

Ids are exact on every device, so whatever decides one is integer arithmetic or IEEE float additions, products and
divisions in one order: `exp_fixed` and `log_fixed` are polynomials without fused multiply-add; probability mass is
counted in units of 2^-36 of the best token, integers whose sum has no order. A token below e^-26.1 of the best has no
mass and cannot win a draw: Gumbel noise of 32 bits lies in [-3.14, 22.88].
Legend: M rows, V vocabulary, W = ceil(V / 32), N entries of a ragged table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.common import nbytes
from deepinfer.ops.registry import define

REACH = -26.1
MASS = 2.0**36  # of the best token; V up to 2^17 sums stay exact in float64
STREAM_TARGET, STREAM_DRAFT, STREAM_ACCEPT, STREAM_RESIDUAL = range(4)  # spec/batch_invariance.md 7.1
NONE_LEFT, NOT_FINITE = -1, -2  # ids of rows without a choice, and of rows whose logits hold NaN or infinity
MAX_COUNT = 32767  # of one id in `counts`: more occurrences count as this many

# e^r on [-ln2/2, ln2/2], Cephes; ln 2 in two parts, the first short enough that its products are exact
LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LN2 = 0.6931471805599453
ATANH = tuple(2.0 / (2 * k + 1) for k in range(11, -1, -1))  # 2 atanh(s) = s (2 + 2/3 s^2 + ...), |s| <= 0.1716


# ---- numbers ----


def exp_fixed(x: Tensor) -> Tensor:
    """e^x of float32 x in [REACH, 0], to two units in the last place."""
    n = torch.floor(x * LOG2E + 0.5)
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    y = torch.full_like(r, EXP[0])
    for c in EXP[1:]:
        y = y * r + c
    y = y * (r * r)
    y = (y + r) + 1.0
    return y * ((n.int() + 127) << 23).view(torch.float32)


def log_fixed(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64, to about 1e-16."""
    bits = x.view(torch.int64)
    e = (bits >> 52) - 1023
    m = ((bits & 0xFFFFFFFFFFFFF) | (1023 << 52)).view(torch.float64)
    big = m > 1.4142135623730951
    m = torch.where(big, m * 0.5, m)
    e = (e + big).double()
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    y = torch.full_like(z, ATANH[0])
    for c in ATANH[1:]:
        y = y * z + c
    return s * y + e * LN2


def gumbel_fixed(words: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, from 32 random bits in int64: -log(-log(1 - u)), u = (word + 0.5) / 2^32."""
    u = (words.double() + 0.5) * 2.0**-32
    return -log_fixed(-log_fixed(1.0 - u))


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: counters int64 (32 bits used), seed int64 (64 bits), broadcast together."""
    low = 0xFFFFFFFF
    k0, k1 = seed & low, (seed >> 32) & low
    w0, w1, w2, w3 = c0 & low, c1 & low, c2 & low, c3 & low
    for _ in range(10):
        left, right = w0 * 0xD2511F53, w2 * 0xCD9E8D57  # the product's 64 bits, signed
        w0, w1 = ((right >> 32) & low) ^ w1 ^ k0, right & low
        w2, w3 = ((left >> 32) & low) ^ w3 ^ k1, left & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return w0, w1, w2, w3


def noise_words(seeds: Tensor, positions: Tensor, sample_index: Tensor, stream: int, vocab: int) -> Tensor:
    """32 random bits of each (row, id), int64 [M, V]: counter (position, id // 4, stream, index), lane id % 4."""
    group = torch.arange(-(-vocab // 4), device=seeds.device)
    per_row = [t.long().unsqueeze(1) for t in (positions, sample_index, seeds)]
    words = philox(per_row[0], group, torch.full_like(group, stream), per_row[1], per_row[2])
    return torch.stack(torch.broadcast_tensors(*words), 2).flatten(1)[:, :vocab]


# ---- penalties ----


def _rows(g: torch.Generator, m: int, low: int, high: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(low, high, (m,), generator=g).to(dtype)


def _ranges(g: torch.Generator, m: int, most: int) -> Tensor:
    sizes = torch.randint(0, most + 1, (m,), generator=g)
    ends = sizes.cumsum(0)
    return torch.stack((ends - sizes, ends), 1).int()


def penalise_example(g: torch.Generator, m: int, vocab: int, slots: int = 5, entries: int = 3) -> tuple[Any, ...]:
    """Every feature on some rows: penalties, bias, forbidden ids, held-back stop ids, drafts before, bitmask."""
    rows = torch.arange(m)
    counts = (torch.randint(0, 40, (slots, vocab), generator=g) - 36).clamp_min(0).short()
    prompt = torch.randint(-(1 << 31), 1 << 31, (slots, -(-vocab // 32)), generator=g)
    prompt &= torch.randint(-(1 << 31), 1 << 31, prompt.shape, generator=g)
    penalties = torch.stack((1 + torch.rand(m, generator=g), torch.randn(m, generator=g), torch.randn(m, generator=g)))
    penalties[:, rows % 3 == 0] = torch.tensor([1.0, 0.0, 0.0]).unsqueeze(1)
    bias, stop = _ranges(g, m, entries), _ranges(g, m, entries)
    ids = torch.stack([torch.randperm(vocab, generator=g)[:entries] for _ in range(m)] or [torch.empty(0, entries)])
    bias_ids = torch.cat([i[: b - a] for i, (a, b) in zip(ids, bias.tolist(), strict=False)] or [ids[0]]).int()
    values = torch.randn(bias_ids.shape, generator=g) * 5
    values[torch.rand(values.shape, generator=g) < 0.3] = float("-inf")
    stop_ids = torch.randint(0, vocab, (int(stop.max()) if m else 0,), generator=g).int()
    positions = _rows(g, m, 10, 20)
    before = torch.randint(-1, vocab, (m, 5), generator=g).int()
    before[rows % 2 == 0] = -1
    allowed = torch.randint(-(1 << 31), 1 << 31, (2, prompt.shape[1]), generator=g).int()
    which = torch.where(rows % 4 == 1, rows // 4 % 2, -1).int()
    logits = torch.randn((m, vocab), generator=g) * 4
    state = (_rows(g, m, 0, slots), counts, prompt.int(), penalties.t().contiguous(), before)
    lists = (bias_ids, values, bias, stop_ids, stop, positions, _rows(g, m, 10, 20))
    return (logits, *state, *lists, allowed, which)


def _penalise_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for m in (0, 1, 2, 7, 33):
        args = penalise_example(g, m, 130)
        yield args if m != 2 else (*args[:5], None, *args[6:13], None, None)


def _penalise_cost(logits: Tensor, slots: Tensor, *rest: Any) -> tuple[float, float]:
    """Counts, prompt bits and bitmask are read; of the logits, those that change."""
    return 4.0 * logits.numel(), 2.3 * logits.numel() + 64


@define(
    "penalise(Tensor(a!) logits, Tensor slots, Tensor counts, Tensor prompt_mask, Tensor penalties, Tensor? before,"
    " Tensor bias_ids, Tensor bias_values, Tensor bias_range, Tensor stop_ids, Tensor stop_range, Tensor positions,"
    " Tensor min_positions, Tensor? allowed, Tensor? allowed_row) -> ()",
    fake=lambda *args: None,
    inputs=_penalise_inputs,
    cost=_penalise_cost,
)
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
    """Masks, bias and penalties on logits float32 [M, V], in place, in the order of engine/sampler.process_logits.

    slots int32 [M]: whose counts. counts int16 [slots, V]: how often each id was generated; prompt_mask int32
    [slots, W]: bit id % 32 of word id // 32 says that the prompt holds it. (256 slots x 129,280: 66 MB + 4 MB; int32
    counts and a byte a prompt id would be 165 MB and twice the traffic.)
    penalties float32 [M, 3]: repetition (1: none), frequency, presence. before int32 [M, E], -1 for none: ids ahead of
    the row that `counts` lacks, the drafts that the row follows.
    Row m adds bias_values to bias_ids at bias_range[m] = (begin, end); -inf forbids; ids of one row differ.
    stop_ids of stop_range[m] are out while positions[m] < min_positions[m] (int32 [M]).
    allowed int32 [G, W]: bitmasks, bit set: may be generated; allowed_row int32 [M]: which one, -1: none.
    """
    m, vocab = logits.shape
    if not m:
        return
    rows = torch.arange(m, device=logits.device)
    z = logits
    if allowed is not None and allowed_row is not None:
        free = (allowed_row < 0).unsqueeze(1)
        z = torch.where(free | _bits(allowed[allowed_row.clamp_min(0).long()], vocab), z, float("-inf"))
    if bias_ids.numel():
        owner, ids = _owners(bias_range, bias_ids.shape[0])
        held = z.new_zeros((m, vocab))
        held[owner, bias_ids.long()[ids]] = bias_values[ids]
        z = torch.where(held == float("-inf"), held, z + held)
    if stop_ids.numel():
        owner, ids = _owners(stop_range, stop_ids.shape[0])
        out = torch.zeros((m, vocab), dtype=torch.bool, device=z.device)
        out[owner, stop_ids.long()[ids]] = True
        z = torch.where(out & (positions < min_positions).unsqueeze(1), float("-inf"), z)
    count = counts[slots.long()].int()
    if before is not None:
        for j in range(before.shape[1]):
            extra = (before[:, j] >= 0).int()
            count[rows, before[:, j].clamp_min(0).long()] += extra
    seen = (count > 0) | _bits(prompt_mask[slots.long()], vocab)
    repetition, frequency, presence = (p.unsqueeze(1) for p in penalties.unbind(1))
    z = torch.where(seen & (repetition != 1), torch.where(z > 0, z / repetition, z * repetition), z)
    logits.copy_(torch.where(count > 0, z - (frequency * count.float() + presence), z))


def _bits(words: Tensor, vocab: int) -> Tensor:
    """int32 [M, W] -> bool [M, V]."""
    shift = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(2) >> shift) & 1).bool().flatten(1)[:, :vocab]


def _owners(ranges: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """(row, entry) pairs of a ragged table; several rows may name one entry."""
    entry = torch.arange(entries, device=ranges.device)
    found = ((entry >= ranges[:, :1]) & (entry < ranges[:, 1:])).nonzero()
    return found[:, 0], found[:, 1]


def _record_prompt_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for n in (0, 1, 2, 7, 33):
        yield (torch.zeros((3, 5), dtype=torch.int32), _rows(g, n, 0, 3), _rows(g, n, -1, 130))


@define(
    "record_prompt(Tensor(a!) prompt_mask, Tensor slots, Tensor ids) -> ()",
    fake=lambda *args: None,
    inputs=_record_prompt_inputs,
    cost=lambda mask, slots, ids: (0.0, 12.0 * ids.numel()),
)
def record_prompt(prompt_mask: Tensor, slots: Tensor, ids: Tensor) -> None:
    """Set the bit of ids[n] in prompt_mask int32 [slots, W] of slot slots[n]; int32 [N] both, negative ids are none."""
    some = (ids >= 0).unsqueeze(1)
    shift = torch.arange(32, dtype=torch.int32, device=ids.device)
    bits = (prompt_mask.unsqueeze(2) >> shift) & 1 == 1
    flat = bits.flatten()
    place = (slots.long() * (prompt_mask.shape[1] * 32) + ids.clamp_min(0).long())[some[:, 0]]
    flat = flat.index_fill(0, place, True)
    powers = torch.ones_like(shift) << shift
    prompt_mask.copy_((flat.view_as(bits).int() * powers).sum(2).int())


def _record_output_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for r in (0, 1, 2, 7, 33):
        counts = torch.randint(0, 3, (40, 20), generator=g).short()
        counts[:, 3] = MAX_COUNT - 1
        slots = torch.randperm(40, generator=g)[:r].int()
        yield (counts, slots, torch.randint(-1, 6, (r, 6), generator=g), _rows(g, r, 0, 7))


@define(
    "record_output(Tensor(a!) counts, Tensor slots, Tensor ids, Tensor num) -> ()",
    fake=lambda *args: None,
    inputs=_record_output_inputs,
    cost=lambda counts, slots, ids, num: (0.0, 12.0 * ids.numel()),
)
def record_output(counts: Tensor, slots: Tensor, ids: Tensor, num: Tensor) -> None:
    """Count the first num[r] of ids int64 [R, n] for slot slots[r] (slots differ): counts int16 [slots, V], at most
    MAX_COUNT; negative ids are none.
    """
    for j in range(ids.shape[1]):
        at = (slots.long(), ids[:, j].clamp_min(0).long())
        more = ((ids[:, j] >= 0) & (j < num)).int()
        counts[at] = (counts[at].int() + more).clamp_max(MAX_COUNT).short()


# ---- filters ----


def _order(z: Tensor) -> Tensor:
    """Ids of every row by descending logit, then ascending id."""
    return torch.sort(z + 0.0, dim=1, descending=True, stable=True).indices


def _safe(temperature: Tensor) -> Tensor:
    return torch.where(temperature > 0, temperature, 1.0)


def scaled_logits(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """((z - max z) / temperature, max z): float32 [M, V], [M, 1]."""
    peak = logits.amax(1, keepdim=True) if logits.shape[0] else logits.new_empty((0, 1))
    return (logits - peak) / _safe(temperature).unsqueeze(1), peak


def mass_of(scaled: Tensor) -> Tensor:
    """Probability mass in units of 2^-36 of the best token's, truncated: int64."""
    inside = scaled >= REACH
    return torch.where(inside, (exp_fixed(torch.where(inside, scaled, 0.0)) * MASS).long(), 0)


def sampling_example(g: torch.Generator, m: int, vocab: int) -> tuple[Tensor, ...]:
    """Logits with ties, and temperature, top_k, top_p, log_min_p of many kinds, greedy and unfiltered rows too."""
    rows = torch.arange(m)
    logits = torch.randn((m, vocab), generator=g) * 3
    logits[rows % 5 == 3] = (logits[rows % 5 == 3] * 2).round() / 2  # ties
    temperature = 0.3 + torch.rand(m, generator=g)
    temperature[rows % 7 == 1] = 0.0
    top_k = torch.where(rows % 3 == 0, _rows(g, m, 1, 40).long(), 0).int()
    top_p = torch.where(rows % 4 < 2, 0.3 + 0.69 * torch.rand(m, generator=g, dtype=torch.float64), 1.0)
    min_p = torch.where(rows % 6 == 5, torch.rand(m, generator=g) * 0.1, 0.0)
    return logits, temperature, top_k, top_p, min_p.log()


def _survivors_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    yield from (sampling_example(g, m, 300) for m in (0, 1, 2, 7, 33))
    flat = sampling_example(g, 7, 300)
    yield (torch.zeros_like(flat[0]), *flat[1:])


@define(
    "survivors(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor log_min_p)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda logits, temperature, *rest: (
        torch.empty_like(temperature),
        torch.empty_like(temperature),
        torch.empty_like(temperature, dtype=torch.int32),
        torch.empty_like(temperature, dtype=torch.int64),
    ),
    inputs=_survivors_inputs,
    cost=lambda logits, *rest: (10.0 * logits.numel(), nbytes(logits)),
)
def survivors(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which ids of processed logits float32 [M, V] pass min_p, then top_k, then top_p.

    temperature float32 [M] (0: greedy), top_k int32 [M] (0: all), top_p float64 [M] (1: all), log_min_p float32 [M]
    (-inf: all). Ids rank by logit, equal logits by id. top_k keeps the first k. top_p keeps the fewest first ids
    whose mass is at least top_p times the mass of what min_p and top_k left.
    Returns peak, threshold float32 [M], last_id int32 [M], total int64 [M]: the last survivor and the survivors' mass.
    Id v survives if min_p and REACH let it and its logit is above the threshold, or equal to it with v <= last_id;
    without top_k and top_p the threshold is -inf. Greedy rows keep the best id alone; rows whose peak is not finite
    nothing (peak infinity for NaN).
    """
    vocab = logits.shape[1]
    scaled, peak = scaled_logits(logits, temperature)
    order = _order(logits)
    s = scaled.gather(1, order)
    mass = mass_of(s)
    keep = s >= log_min_p.clamp_min(REACH).unsqueeze(1)
    rank = torch.arange(vocab, device=logits.device)
    most = torch.where(top_k > 0, top_k, vocab)
    keep &= rank < torch.where(temperature > 0, most, 1).unsqueeze(1)
    mass = torch.where(keep, mass, 0)
    through = mass.cumsum(1)
    need = torch.ceil(top_p.unsqueeze(1) * through[:, -1:].double()).long()
    keep &= (through - mass < need) | (top_p >= 1).unsqueeze(1)
    last = order.gather(1, (keep.sum(1, keepdim=True) - 1).clamp_min(0))
    peak = torch.where(peak == peak, peak, float("inf"))[:, 0] + 0.0
    cut = (top_k > 0) | (top_p < 1) | (temperature <= 0)
    threshold = torch.where(cut, logits.gather(1, last)[:, 0] + 0.0, float("-inf"))
    last_id = torch.where(cut, last[:, 0], vocab - 1)
    total = torch.where(keep, mass, 0).sum(1)
    good = torch.isfinite(peak)
    return (
        peak,
        torch.where(good, threshold, float("inf")),
        torch.where(good, last_id, -1).int(),
        torch.where(good, total, 0),
    )


def survives(logits: Tensor, scaled: Tensor, threshold: Tensor, last_id: Tensor, log_min_p: Tensor) -> Tensor:
    """bool [M, V] from what `survivors` returned; scaled float32 [M, V] from `scaled_logits`."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    t = threshold.unsqueeze(1)
    inside = scaled >= log_min_p.clamp_min(REACH).unsqueeze(1)
    return inside & ((logits > t) | ((logits == t) & (ids <= last_id.unsqueeze(1))))


# ---- the draw ----


def _sample_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for m in (0, 1, 2, 7, 33):
        logits, *params = sampling_example(g, m, 300)
        seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (m,), generator=g)
        who = (seeds, _rows(g, m, 0, 9000), _rows(g, m, 0, 4))
        if m > 7:
            logits[3, 5], logits[4], logits[5, 9] = float("nan"), float("-inf"), float("inf")
        yield (logits, *params, *who, None, STREAM_TARGET, True, True)
        yield (logits, params[0], *params[1:], *who, logits * 0.5, STREAM_DRAFT, False, m != 7)


@define(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor log_min_p, Tensor seeds,"
    " Tensor positions, Tensor sample_index, Tensor? raw, int stream, bool filtered, bool logprobs)"
    " -> (Tensor, Tensor)",
    fake=lambda logits, temperature, *rest: (
        torch.empty_like(temperature, dtype=torch.int64),
        torch.empty_like(temperature),
    ),
    inputs=_sample_inputs,
    cost=lambda logits, *rest: (60.0 * logits.numel(), nbytes(logits)),
    tolerance=1e-5,
)
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
    """The id of every row and its log-probability: int64 [M], float32 [M].

    Parameters as in `survivors`; `filtered` False says that no row filters (they are not looked at then). Rows of
    temperature 0 take the best id, others the survivor with the largest (z - max z) / temperature + Gumbel noise of
    (seed, position, stream, sample index, id) in float64; the smaller of equal ids. seeds int64 [M] (64 bits),
    positions, sample_index int32 [M].
    An id of NONE_LEFT or NOT_FINITE says that the row has no choice. Log-probabilities are those of softmax(raw),
    raw float32 [M, V] (None: the logits); 0 where `logprobs` is False or there is no id.
    """
    best = logits.argmax(1) if logits.shape[0] else logits.new_empty(0, dtype=torch.int64)
    top = logits.gather(1, best.unsqueeze(1))
    scaled, _ = scaled_logits(logits, temperature)
    keep = scaled >= REACH
    if filtered:
        _, threshold, last_id, _ = survivors(logits, temperature, top_k, top_p, log_min_p)
        keep &= survives(logits, scaled, threshold, last_id, log_min_p)
    words = noise_words(seeds, positions, sample_index, stream, logits.shape[1])
    score = torch.where(keep, scaled.double() + gumbel_fixed(words), float("-inf"))
    drawn = score.argmax(1) if logits.shape[0] else best
    ids = torch.where(temperature > 0, drawn, best)
    ids = torch.where(torch.isfinite(top[:, 0]), ids, torch.where(top[:, 0] == float("-inf"), NONE_LEFT, NOT_FINITE))
    if not logprobs:
        return ids, torch.zeros_like(temperature)
    z = (logits if raw is None else raw).double()
    at = z.gather(1, ids.clamp_min(0).unsqueeze(1)) - z.logsumexp(1, keepdim=True)
    return ids, torch.where(ids >= 0, at[:, 0], 0.0).float()


# ---- log-probabilities ----


def _top_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for m in (0, 1, 2, 7, 33):
        logits = sampling_example(g, m, 300)[0]
        if m > 2:
            logits[2, 5:] = float("-inf")
        yield (logits, _rows(g, m, 0, 5, torch.int64), 0 if m == 1 else 7)


@define(
    "top_logprobs(Tensor logits, Tensor ids, int n) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda logits, ids, n: (
        logits.new_empty((ids.shape[0], n), dtype=torch.int64),
        logits.new_empty((ids.shape[0], n)),
        logits.new_empty(ids.shape[0]),
        logits.new_empty(ids.shape[0], dtype=torch.int32),
    ),
    inputs=_top_inputs,
    cost=lambda logits, ids, n: (3.0 * logits.numel(), nbytes(logits)),
    tolerance=1e-5,
)
def top_logprobs(logits: Tensor, ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The n <= 20 most probable ids under softmax(raw logits float32 [M, V]), and the place of ids int64 [M].

    Returns top ids int64 [M, n] (by logit, then id), their log-probabilities float32 [M, n], the given ids'
    log-probabilities float32 [M] and ranks int32 [M] (1: the most probable). A log-probability of -inf is given as
    float32's most negative number. A negative id has log-probability 0 and rank 0.
    """
    z = logits.double()
    total = z.logsumexp(1, keepdim=True) if logits.shape[0] else z[:, :1]
    top = _order(logits)[:, :n].clone(memory_format=torch.contiguous_format)
    lowest = torch.finfo(torch.float32).min
    mine = ids.clamp_min(0).unsqueeze(1)
    own = logits.gather(1, mine)
    before = torch.arange(logits.shape[1], device=logits.device) < mine
    rank = 1 + ((logits > own) | ((logits == own) & before)).sum(1)
    given = (own.double() - total).float()[:, 0].clamp_min(lowest)
    found = (z.gather(1, top) - total).float().clamp_min(lowest)
    return top, found, torch.where(ids >= 0, given, 0.0), torch.where(ids >= 0, rank, 0).int()
