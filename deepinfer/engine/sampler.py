"""From rows of logits to token ids: processors, filters, the draw, log-probabilities. Host code, numpy only.

Belongs here: everything between the model's logits and the sampled ids, and the counter-based random numbers.
Does not belong here: stop rules and text (requests, text/), acceptance of drafts (speculative/).

A row is treated on its own: its result has the same bits alone and in any batch, and there is no generator
whose state anybody else could move. Noise is a pure function of (seed, position, token, stream, sample):
Philox4x32-10 and the Gumbel-max rule of spec/batch_invariance.md 7.1 and 7.2.

Legend: S rows, V vocabulary, W = ceil(V / 4) groups of four neighbouring ids, one Philox counter each.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import EngineError
from deepinfer.ops.sampling import ATANH, EXP, LN2, LN2_HIGH, LN2_LOW, LOG2E, MASS
from deepinfer.outputs import Logprob
from deepinfer.params import SamplingParams

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float32]
Words = NDArray[np.uint64]  # 32-bit values in 64-bit lanes, so that products need no carry handling

STREAM_TARGET = 0  # Gumbel noise of the target model; drafts and acceptance tests have streams of their own

# u = (x + 0.5) / 2**32 is at least 2**-33 and at most 1 - 2**-33, so Gumbel noise lies in [-3.14, 22.88].
# With the best scaled logit at 0, a token further below it than the width of that interval cannot win.
REACH = np.float32(-26.1)
SLACK = 1e-2  # covers the FP32 rounding of the quick bound in `_winner` a thousand times
CHUNK = 8192  # counters at a time: ten arrays of 64 KiB stay in L2 (0.57 ms per 32,320 counters, 1.3 in one go)
BLOCK = 32768  # groups whose noise is held at a time


@dataclass(slots=True)
class SamplingRow:
    """What decides the tokens of one sequence, row by row of logits. It caches prompt ids, so keep it.

    position: absolute position of the token being produced: len(prompt_ids) + len(output_ids).
    seed: 64 bits. sample_index: which of the n samples. output_ids: generated so far.
    forbidden_ids: never generated. eos_ids: held back until min_tokens. bad_word_ids: from SamplingParams.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: list[int]
    position: int
    seed: int
    sample_index: int = 0
    forbidden_ids: Sequence[int] = ()
    eos_ids: Sequence[int] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()
    processed: bool = field(init=False)
    just_highest: bool = field(init=False)
    _prompt_set: NDArray[np.int64] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """processed: more than `forbidden_ids` changes its logits. just_highest: the token of the highest logit is the
        answer, unless that is forbidden.
        """
        p = self.params
        penal = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
        masks = p.logit_bias or p.allowed_token_ids is not None or p.min_tokens or self.bad_word_ids
        self.processed = bool(penal or masks)
        self.just_highest = p.greedy and not self.processed

    def append(self, token: int) -> None:
        """The token that was drawn for this position."""
        self.output_ids.append(token)
        self.position += 1

    def prompt_set(self) -> NDArray[np.int64]:
        """The different ids of the prompt, ascending."""
        if self._prompt_set is None:
            self._prompt_set = np.unique(np.asarray(self.prompt_ids, dtype=np.int64))
        return self._prompt_set


@dataclass(slots=True)
class Sampled:
    """The token of a row. `logprob` and `logprobs` are None unless asked for.

    `logprobs` maps the sampled id (first), then the most probable ids, to `Logprob`; probabilities are those
    of the raw logits. `error` says why no token could be chosen (token_id is -1): this row's request ends,
    the others go on.
    """

    token_id: int
    logprob: float | None = None
    logprobs: dict[int, Logprob] | None = None
    error: str | None = None


class SeedSource:
    """64-bit seeds for requests that bring none: fresh ones, or a repeatable sequence from `seed`."""

    def __init__(self, seed: int | None = None) -> None:
        self._own = None if seed is None else random.Random(seed)

    def next(self) -> int:
        return secrets.randbits(64) if self._own is None else self._own.getrandbits(64)


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Choose the next token of every row.

    logits: [S, V] float32 on any device (moved to the host); not modified. A row whose logits are not finite,
    or where nothing is left to choose, yields `Sampled.error`. EngineError when S is not len(rows).
    """
    values = _to_host(logits)
    if len(values) != len(rows):
        raise EngineError(f"sampler got {len(values)} rows of logits for {len(rows)} rows of parameters")
    results = [Sampled(-1) for _ in rows]
    drawn: list[int] = []
    lots: list[_Lots] = []
    highest = values.argmax(1).tolist() if rows else []
    for i, row in enumerate(rows):
        if row.just_highest and highest[i] not in row.forbidden_ids and math.isfinite(values[i, highest[i]]):
            results[i].token_id = highest[i]
            continue
        z = process_logits(values[i], row)
        best = int(z.argmax())
        if not math.isfinite(z[best]):
            results[i].error = why_not(float(z[best]))
        elif row.params.greedy:
            results[i].token_id = best
        else:
            drawn.append(i)
            lots.append(_Lots.of(z, row))
    for i, token in zip(drawn, _draw(lots), strict=True):
        results[i].token_id = token
    for raw, row, result in zip(values, rows, results, strict=True):
        if row.params.logprobs is not None and result.error is None:
            result.logprobs = token_logprobs(raw, result.token_id, row.params.logprobs)
            result.logprob = result.logprobs[result.token_id].logprob
    return results


def prompt_logprobs(logits: torch.Tensor, next_ids: Sequence[int], num: int) -> list[dict[int, Logprob]]:
    """`Logprob` of each given next id, and of the `num` most probable ids, for consecutive rows of a prompt.

    logits: [T, V] float32; row t belongs to the token before next_ids[t]. Works row by row.
    """
    return [token_logprobs(z, token, num) for z, token in zip(_to_host(logits), next_ids, strict=True)]


def _to_host(logits: torch.Tensor) -> Floats:
    host: Floats = logits.detach().float().cpu().contiguous().numpy()
    return host


def why_not(best: float) -> str:
    if best == -math.inf:
        return (
            "no token is left to choose: allowed_token_ids, bad_words, min_tokens and the ids that this "
            "model never generates exclude all of them; relax one of these"
        )
    return f"the model's logits hold {best}; please report this with the prompt"


# ---- processors ----


def process_logits(z: Floats, row: SamplingRow) -> Floats:
    """Masks, bias and penalties, in the order of `SamplingParams`. z: [V]; copied if any applies."""
    params = row.params
    forbidden = _forbidden(row)
    penal = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    if not (forbidden or penal or params.logit_bias or params.allowed_token_ids is not None):
        return z
    if params.allowed_token_ids is None:
        z = z.copy()
    else:
        allowed = np.asarray(params.allowed_token_ids)
        z, raw = np.full_like(z, -np.inf), z
        z[allowed] = raw[allowed]
    if forbidden:
        z[forbidden] = -np.inf
    if params.logit_bias:
        z[list(params.logit_bias)] += np.fromiter(params.logit_bias.values(), dtype=np.float32)
    if penal:
        _penalise(z, row)
    return z


def _forbidden(row: SamplingRow) -> list[int]:
    ids = list(row.forbidden_ids)
    if len(row.output_ids) < row.params.min_tokens:
        ids += row.params.stop_token_ids
        if not row.params.ignore_eos:
            ids += row.eos_ids
    for *before, last in row.bad_word_ids:
        if not before or list(row.output_ids[-len(before) :]) == before:
            ids.append(last)
    return ids


def _penalise(z: Floats, row: SamplingRow) -> None:
    params = row.params
    generated, counts = np.unique(np.asarray(row.output_ids, dtype=np.int64), return_counts=True)
    if params.repetition_penalty != 1:
        seen = np.union1d(row.prompt_set(), generated)
        penalty = np.float32(params.repetition_penalty)
        z[seen] = np.where(z[seen] > 0, z[seen] / penalty, z[seen] * penalty)
    frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
    z[generated] -= frequency * counts.astype(np.float32) + presence


# ---- filters ----


def keep_mask(z: Floats, scaled: Floats, params: SamplingParams) -> NDArray[np.bool_]:
    """Which ids survive min_p, then top_k, then top_p. Returns [V].

    z: processed logits [V]; scaled: (z - max z) / temperature [V], float32 both. Tokens rank by logit, and by
    id where logits are equal, so that k tokens are k tokens. top_p is measured within what min_p and top_k
    left, in whole units (ops/sampling.py): every device cuts at the same token. The one that reaches it is kept.
    """
    keep = scaled > -np.inf
    if params.min_p > 0:
        keep &= scaled >= np.float32(math.log(params.min_p))
    if 0 < params.top_k < np.count_nonzero(keep):
        _keep_first(keep, z, params.top_k, np.partition(z[keep], -params.top_k)[-params.top_k])
    if params.top_p < 1:
        ranked = np.sort(z[keep])[::-1]
        mass = _mass((ranked - ranked[0]) / _temperature(params)).cumsum()
        count = int(np.searchsorted(mass, math.ceil(params.top_p * float(mass[-1])))) + 1
        if count < len(ranked):
            _keep_first(keep, z, count, ranked[count - 1])
    return keep


def _keep_first(keep: NDArray[np.bool_], z: Floats, count: int, last: np.float32) -> None:
    """Reduce `keep` to its `count` highest ranking ids; `last` is the logit of the last of them."""
    ties = np.flatnonzero(keep & (z == last))
    keep &= z > last
    keep[ties[: count - np.count_nonzero(keep)]] = True


def _mass(scaled: Floats) -> NDArray[np.int64]:
    """e^scaled of non-positive `scaled` in units of 2^-36, as ops/sampling.mass_of computes it."""
    f = np.float32
    x = np.maximum(scaled, REACH)
    n = np.floor(x * f(LOG2E) + f(0.5))
    r = (x - n * f(LN2_HIGH)) - n * f(LN2_LOW)
    y = np.full_like(r, EXP[0])
    for c in EXP[1:]:
        y = y * r + f(c)
    y = (y * (r * r) + r) + f(1)
    mass: NDArray[np.int64] = (np.ldexp(y, n.astype(np.int32)) * f(MASS)).astype(np.int64)
    mass[scaled < REACH] = 0
    return mass


def _temperature(params: SamplingParams) -> np.float32:
    return np.float32(min(params.temperature, 1e30))  # FP32 infinity would turn -inf logits into NaN


# ---- the draw ----


@dataclass(slots=True)
class _Lots:
    """What is drawn from for one row: groups of four ids that hold a token which can win."""

    row: SamplingRow
    groups: NDArray[np.intp]  # [G] ascending; group g holds ids 4g to 4g + 3
    scores: Floats  # [G, 4] scaled logits, -inf for ids that are out

    @classmethod
    def of(cls, z: Floats, row: SamplingRow) -> _Lots:
        scaled = (z - z.max()) / _temperature(row.params)
        width = -(-len(z) // 4)
        keep = np.zeros(4 * width, dtype=np.bool_)
        keep[: len(z)] = keep_mask(z, scaled, row.params) & (scaled >= REACH)
        scores = np.full(4 * width, -np.inf, dtype=np.float32)
        np.copyto(scores[: len(z)], scaled, where=keep[: len(z)])
        groups = np.flatnonzero(keep.view(np.uint32))  # four flags at a time
        return cls(row, groups, scores.reshape(width, 4)[groups])


def _draw(lots: Sequence[_Lots]) -> Iterator[int]:
    """The Gumbel-max token of each: argmax over ids of scaled logit + noise; of equal ones the lowest id."""
    for start, stop in _blocks([len(lot.groups) for lot in lots]):
        block = lots[start:stop]
        sizes = [len(lot.groups) for lot in block]
        rows = [lot.row for lot in block]
        per_row = [(r.position, STREAM_TARGET, r.sample_index, r.seed & 0xFFFFFFFF, r.seed >> 32) for r in rows]
        c0, c2, c3, low, high = np.repeat(np.array(per_row, dtype=np.uint64).T, sizes, axis=1)
        c1 = np.concatenate([lot.groups for lot in block]).astype(np.uint64)
        noise = philox4x32(c0, c1, c2, c3, key=(low, high))
        for lot, words in zip(block, np.split(noise, np.cumsum(sizes)[:-1]), strict=True):
            yield _winner(lot, words)


def _blocks(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive rows with at most BLOCK groups together, or one row."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > BLOCK:
            yield start, i
            start, total = i, 0
        total += size
    if sizes:
        yield start, len(sizes)


def _winner(lot: _Lots, words: Words) -> int:
    """Exact argmax in double precision over the few ids that a quick upper bound leaves. words: [G, 4].

    G = -log(-log1p(-u)) <= -log(u), and the two agree for small u, where winners are: one FP32 log per id
    decides almost everything, and which bits that log has on this machine decides nothing.
    """
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    bound = (lot.scores - np.log(u)).reshape(-1)
    scores, flat = lot.scores.reshape(-1), words.reshape(-1)

    def score(j: int) -> float:
        return float(scores[j]) + gumbel(int(flat[j]))

    short = np.flatnonzero(bound >= score(int(bound.argmax())) - SLACK)
    best = max(short.tolist(), key=score)  # the first of equal ones, and ids ascend
    return 4 * int(lot.groups[best >> 2]) + (best & 3)


def gumbel(word: int) -> float:
    """Standard Gumbel noise from 32 random bits, -log(-log(1 - u)); 1 - u is exact, and so are the large values."""
    return -_log(-_log(1.0 - (word + 0.5) * 2.0**-32))


def _log(x: float) -> float:
    """ops/sampling.log_fixed: the same bits on every device, which libraries' logarithms do not promise."""
    m, e = math.frexp(x)  # 0.5 <= m < 1
    if 2 * m > 1.4142135623730951:
        e += 1
    else:
        m *= 2
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    y = ATANH[0]
    for c in ATANH[1:]:
        y = y * z + c
    return s * y + (e - 1) * LN2


def philox4x32(c0: Words, c1: Words, c2: Words, c3: Words, key: tuple[Words, Words]) -> Words:
    """Philox4x32-10 (Salmon et al. 2011) of N counters. Arguments: [N] 32-bit values; returns [N, 4]."""
    out = np.empty((len(c0), 4), dtype=np.uint64)
    for a in range(0, len(c0), CHUNK):
        part = slice(a, a + CHUNK)
        w0, w1, w2, w3, k0, k1 = c0[part], c1[part], c2[part], c3[part], key[0][part], key[1][part]
        for _ in range(10):
            left, right = w0 * _M0, w2 * _M1
            w0, w1 = (right >> _HALF) ^ w1 ^ k0, right & _LOW
            w2, w3 = (left >> _HALF) ^ w3 ^ k1, left & _LOW
            k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
        for lane, word in enumerate((w0, w1, w2, w3)):
            out[part, lane] = word
    return out


_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # multipliers
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)  # key increments: golden ratio, sqrt(3) - 1
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


# ---- log-probabilities ----


def token_logprobs(z: Floats, token: int, num: int) -> dict[int, Logprob]:
    """`Logprob` of `token`, then of the `num` most probable ids, under softmax(z). z: [V] raw logits.

    The sum runs in double precision over ids in order, so its bits do not depend on the batch. Rank 1 is the
    most probable id; of equal ones the lower id comes first.
    """
    top = z.max()
    log_total = float(top) + math.log(np.exp(z - top).sum(dtype=np.float64))
    rank = 1 + int(np.count_nonzero(z > z[token])) + int(np.count_nonzero(z[:token] == z[token]))
    found = {token: Logprob(float(z[token]) - log_total, rank)}
    if num > 0:
        num = min(num, len(z))
        keep = np.ones(len(z), dtype=np.bool_)
        _keep_first(keep, z, num, np.partition(z, -num)[-num])
        ids = np.flatnonzero(keep)
        for place, i in enumerate(ids[np.argsort(-z[ids], kind="stable")].tolist(), start=1):
            found.setdefault(i, Logprob(float(z[i]) - log_total, place))
    return found
