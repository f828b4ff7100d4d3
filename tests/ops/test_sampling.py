"""Sampling and acceptance: the ops against the host sampler, against naive rules, against the target distribution.

Ids are equal, not close. Acceptance is tested on a vocabulary of four by chi-square over the first three tokens of
20,000 requests; rules with a known fault must fail the same test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.engine import sampler
from deepinfer.engine.sampler import SamplingRow
from deepinfer.ops import acceptance, sampling
from deepinfer.ops.acceptance import BLOCK, MATCH, TOKENWISE, accept
from deepinfer.ops.sampling import STREAM_DRAFT, STREAM_TARGET, penalise, sample, survives, survivors, top_logprobs
from deepinfer.params import SamplingParams

TOLERANCE = {
    "exp": 2.5e-7,  # relative, two units in the last place of float32
    "log": 1e-15,
    "logprob": 1e-5,  # absolute, float32 exponentials on the host
    "chi_square_z": 4.265,  # normal quantile of 1 - 1e-5
    "acceptance": 0.01,  # absolute, 20,000 draws
}
VOCAB = 260


# ---- numbers ----


def test_fixed_exponential_and_logarithm() -> None:
    x = torch.linspace(-26.1, 0, 20001)
    exact = x.double().exp()
    assert ((sampling.exp_fixed(x).double() - exact).abs() / exact).max() < TOLERANCE["exp"]
    assert sampling.exp_fixed(torch.zeros(1)) == 1
    y = torch.cat((torch.logspace(-300, 300, 5001, dtype=torch.float64), 1 - torch.logspace(-16, -1, 99).double()))
    exact = torch.tensor([math.log(v) for v in y.tolist()], dtype=torch.float64)
    error = (sampling.log_fixed(y) - exact).abs() / exact.abs().clamp_min(1e-300)
    assert error[exact != 0].max() < TOLERANCE["log"]


def test_noise_has_the_hosts_bits() -> None:
    words = torch.cat((torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]), torch.randint(0, 1 << 32, (500,))))
    assert sampling.gumbel_fixed(words).tolist() == [sampler.gumbel(w) for w in words.tolist()]
    scaled = torch.linspace(-27, 0, 3001)
    assert np.array_equal(sampling.mass_of(scaled).numpy(), sampler._mass(scaled.numpy()))


def test_philox_known_answer() -> None:
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    seed = torch.tensor([0x299F31D0A4093822])
    words = sampling.philox(*(torch.tensor([c]) for c in counter), seed)
    assert [int(w) for w in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    ones = [torch.tensor([0xFFFFFFFF])] * 4
    assert int(sampling.philox(*ones, torch.tensor([-1]))[0]) == 0x408F276D


# ---- against the host's sampler ----


def host_rows(count: int, seed: int) -> list[SamplingRow]:
    rng = random.Random(seed)

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    rows = []
    for _ in range(count):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.2, 0.7, 1.0, 3.0]),
            top_k=maybe(rng.randrange(1, 40), 0),
            top_p=maybe(rng.uniform(0.05, 1), 1.0),
            min_p=maybe(rng.uniform(0, 0.2), 0.0),
            repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
            frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
            presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
            min_tokens=maybe(4, 0),
            max_tokens=99,
            stop_token_ids=[rng.randrange(VOCAB) for _ in range(3)],
            logit_bias=maybe({rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(4)}, None),
            allowed_token_ids=maybe(rng.sample(range(VOCAB), 200), None),
        )
        prompt = [rng.randrange(VOCAB) for _ in range(20)]
        output = [rng.randrange(30) for _ in range(rng.randrange(9))]
        position, bits, index = len(prompt) + len(output), rng.getrandbits(64), rng.randrange(4)
        rows.append(SamplingRow(params, prompt, output, position, bits, index, (2,), (5,)))
    return rows


def ragged(lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    ends = np.cumsum([len(x) for x in lists])
    ranges = torch.tensor([[e - len(x), e] for x, e in zip(lists, ends.tolist(), strict=True)], dtype=torch.int32)
    return torch.tensor([i for x in lists for i in x], dtype=torch.int32), ranges


def on_device(logits: Tensor, rows: list[SamplingRow], drafted: int = 0) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Processed logits and the other arguments of `sample`; the last `drafted` output ids come as `before`."""
    m = len(rows)
    slots = torch.arange(m).flip(0).int()
    counts = torch.zeros((m, VOCAB), dtype=torch.int16)
    prompt = torch.zeros((m, -(-VOCAB // 32)), dtype=torch.int32)
    before = torch.full((m, max(drafted, 1)), -1, dtype=torch.int32)
    for i, row in enumerate(rows):
        n = len(row.prompt_ids)
        sampling.record_prompt(prompt, slots[i].expand(n), torch.tensor(row.prompt_ids, dtype=torch.int32))
        old = row.output_ids[: max(len(row.output_ids) - drafted, 0)]
        late = row.output_ids[len(old) :]
        before[i, : len(late)] = torch.tensor(late, dtype=torch.int32)
        for k in range(0, len(old), 6):
            part = torch.tensor([(old[k : k + 6] + [-1] * 6)[:6]])
            sampling.record_output(counts, slots[i : i + 1], part, torch.tensor([6], dtype=torch.int32))
    p = [row.params for row in rows]
    penalties = torch.tensor([[x.repetition_penalty, x.frequency_penalty, x.presence_penalty] for x in p])
    biases = [
        {**(x.logit_bias or {}), **dict.fromkeys(r.forbidden_ids, -math.inf)} for x, r in zip(p, rows, strict=True)
    ]
    bias_ids, bias_range = ragged([list(b) for b in biases])
    values = torch.tensor([v for b in biases for v in b.values()])
    stop_ids, stop_range = ragged([[*x.stop_token_ids, *r.eos_ids] for x, r in zip(p, rows, strict=True)])
    positions = torch.tensor([r.position for r in rows], dtype=torch.int32)
    least = torch.tensor([len(r.prompt_ids) + r.params.min_tokens for r in rows], dtype=torch.int32)
    allowed = torch.zeros((m, prompt.shape[1] * 32), dtype=torch.int32)
    for i, x in enumerate(p):
        allowed[i, list(x.allowed_token_ids or ())] = 1
    bits = (allowed.view(m, -1, 32) * (torch.ones(32, dtype=torch.int32) << torch.arange(32, dtype=torch.int32))).sum(2)
    which = torch.tensor([-1 if x.allowed_token_ids is None else i for i, x in enumerate(p)], dtype=torch.int32)
    z = logits.clone()
    state = (slots, counts, prompt, penalties, before if drafted else None)
    lists = (bias_ids, values, bias_range, stop_ids, stop_range, positions, least)
    penalise(z, *state, *lists, bits.int(), which)
    seeds = torch.tensor([r.seed - (1 << 64 if r.seed >> 63 else 0) for r in rows])
    return z, (
        torch.tensor([0.0 if x.greedy else x.temperature for x in p]),
        torch.tensor([max(x.top_k, 0) for x in p], dtype=torch.int32),
        torch.tensor([x.top_p for x in p], dtype=torch.float64),
        torch.tensor([math.log(x.min_p) if x.min_p else -math.inf for x in p]),
        seeds,
        positions,
        torch.tensor([r.sample_index for r in rows], dtype=torch.int32),
    )


@pytest.mark.parametrize("seed", range(6))
def test_penalties_and_ids_equal_the_hosts(seed: int) -> None:
    """Same bits after the processors, same ids after the draw, same log-probabilities of the raw logits."""
    count = 48
    logits = torch.randn((count, VOCAB), generator=torch.Generator().manual_seed(seed)) * (1 + seed % 3 * 3)
    if seed % 2:
        logits = (logits * 2).round() / 2  # ties
    rows = host_rows(count, seed)
    z, args = on_device(logits, rows, drafted=seed % 3)
    for i, row in enumerate(rows):
        assert np.array_equal(z[i].numpy(), sampler.process_logits(logits[i].numpy(), row)), row.params
    ids, logprobs = sample(z, *args, logits, STREAM_TARGET, True, True)
    want = sampler.sample(logits, rows)
    assert ids.tolist() == [w.token_id for w in want]
    exact = [sampler.token_logprobs(logits[i].numpy(), w.token_id, 0)[w.token_id].logprob for i, w in enumerate(want)]
    assert logprobs.tolist() == pytest.approx(exact, abs=TOLERANCE["logprob"])


def test_survivors_are_the_hosts() -> None:
    rng = random.Random(4)
    for _ in range(60):
        z = torch.randn((1, 90)) * rng.choice([0.5, 2, 9])
        z = (z * 2).round() / 2 if rng.random() < 0.5 else z
        params = SamplingParams(
            temperature=rng.choice([0.3, 1.0, 2.5]),
            top_k=rng.choice([0, 1, 7, 89, 90, 500]),
            top_p=rng.choice([1.0, 0.999999, 0.9, 0.3, 1e-9]),
            min_p=rng.choice([0.0, 0.01, 0.5]),
        )
        t = torch.tensor([params.temperature])
        floor = torch.tensor([math.log(params.min_p) if params.min_p else -math.inf])
        more = (torch.tensor([params.top_k]).int(), torch.tensor([params.top_p]).double(), floor)
        _, threshold, last_id, total = survivors(z, t, *more)
        scaled, _ = sampling.scaled_logits(z, t)
        keep = sampler.keep_mask(z[0].numpy(), scaled[0].numpy(), params) & (scaled[0].numpy() >= sampler.REACH)
        assert survives(z, scaled, threshold, last_id, floor)[0].tolist() == keep.tolist(), params
        assert int(total) == sampler._mass(scaled[0].numpy())[keep].sum()


def test_rows_without_a_choice_say_so() -> None:
    z = torch.zeros((4, 9))
    z[1], z[2, 3], z[3, 4] = -math.inf, math.nan, math.inf
    for temperature in (0.0, 1.0):
        rows = [torch.full((4,), v) for v in (temperature, 0, 0.5, -math.inf)]
        args = (rows[0], rows[1].int(), rows[2].double(), rows[3], rows[1].long(), rows[1].int(), rows[1].int())
        ids, logprobs = sample(z, *args, None, STREAM_TARGET, True, True)
        assert ids[1:].tolist() == [sampling.NONE_LEFT, sampling.NOT_FINITE, sampling.NOT_FINITE] and ids[0] >= 0
        assert torch.isfinite(logprobs).all()


def test_top_logprobs_are_the_hosts() -> None:
    z = (torch.randn((5, 200)) * 3).round() / 2
    ids = torch.tensor([0, 7, 199, 3, -1])
    top, values, given, rank = top_logprobs(z, ids, 12)
    for i, token in enumerate(ids[:4].tolist()):
        want = sampler.token_logprobs(z[i].numpy(), token, 12)
        assert rank[i] == want[token].rank and float(given[i]) == pytest.approx(want[token].logprob, abs=1e-5)
        ranked = sorted((k for k in want if want[k].rank <= 12), key=lambda k: want[k].rank)
        assert top[i].tolist() == ranked
        assert values[i].tolist() == pytest.approx([want[k].logprob for k in ranked], abs=1e-5)
    assert given[4] == 0 and rank[4] == 0


# ---- acceptance: what comes out has the target's distribution ----

N, TOY = 20_000, 4
Rule = Callable[..., tuple[Tensor, Tensor, Tensor]]


class Toy:
    """A target and a draft over three tokens of a vocabulary of four: logits by the ids before."""

    def __init__(self, seed: int, top_p: float = 1.0, temperature: float = 0.8) -> None:
        g = torch.Generator().manual_seed(seed)
        self.target = [torch.randn((TOY,) * i + (TOY,), generator=g) * 1.5 for i in range(3)]
        self.draft = [t + torch.randn(t.shape, generator=g) for t in self.target]
        self.temperature, self.top_p = temperature, top_p
        self.seeds = torch.randint(0, 1 << 62, (N,), generator=g)

    def params(self, seeds: Tensor, positions: Tensor, top_p: float) -> tuple[Tensor, ...]:
        def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(seeds.shape, value, dtype=dtype)

        filters = (full(self.temperature), full(0, torch.int32), full(top_p, torch.float64), full(-math.inf))
        return (*filters, seeds, positions.int(), full(3, torch.int32))

    def expected(self) -> np.ndarray:
        """Probabilities of the 64 triples."""
        joint = torch.ones(1, dtype=torch.float64)
        for z in self.target:
            flat = z.reshape(-1, TOY)
            _, threshold, last_id, _ = survivors(
                flat, *self.params(*[torch.zeros(len(flat)).long()] * 2, self.top_p)[:4]
            )
            scaled, _ = sampling.scaled_logits(flat, torch.full((len(flat),), self.temperature))
            p = scaled.double().exp() * survives(flat, scaled, threshold, last_id, torch.full((len(flat),), -math.inf))
            joint = (joint.reshape(-1, 1) * p / p.sum(1, keepdim=True)).flatten()
        return joint.numpy()

    def drafts(self, lengths: Tensor, stream: int) -> tuple[Tensor, Tensor]:
        """Two drafted ids per request and what they were drawn from."""
        ids: list[Tensor] = []
        logits = []
        for i in range(2):
            z = self.draft[i][tuple(ids)].expand(N, TOY)
            off = self.params(self.seeds, torch.full((N,), 5 + i), 1.0)
            ids.append(sample(z, *off, None, stream, False, False)[0])
            logits.append(z)
        return torch.stack(ids, 1), torch.stack(logits, 1)

    def run(self, rule: int, fn: Rule = accept, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(three tokens of every request, drafts accepted in the first step); later tokens by steps without drafts."""
        lengths = torch.full((N,), 2) if lengths is None else lengths
        drafts, q = self.drafts(lengths, STREAM_TARGET if rule == MATCH else STREAM_DRAFT)
        start = torch.cat((torch.zeros(1, dtype=torch.int64), (lengths + 1).cumsum(0))).int()
        owner = torch.repeat_interleave(torch.arange(N), lengths + 1)
        step = torch.arange(len(owner)) - start[:-1].long()[owner]
        rows = torch.zeros((len(owner), TOY))
        for i in range(3):
            at = owner[step == i]
            rows[step == i] = self.target[i][tuple(drafts[at, j] for j in range(i))]
        params = self.params(self.seeds[owner], step + 5, self.top_p)
        num, _, tokens = fn(start, rows, drafts, q, *params, rule, self.top_p < 1)
        out = tokens.clone()
        for i in range(1, 3):
            need = (out[:, i] < 0).nonzero()[:, 0]
            z = self.target[i][tuple(out[need, j] for j in range(i))]
            args = self.params(self.seeds[need], torch.full((len(need),), 5 + i), self.top_p)
            each = torch.arange(len(need) + 1).int()
            out[need, i] = accept(each, z, drafts[need], q[need], *args, rule, self.top_p < 1)[1]
        return out, num

    def holds(self, out: Tensor) -> bool:
        """Chi-square of the triples, cells below five expected joined."""
        counts = np.bincount((out[:, 0] * 16 + out[:, 1] * 4 + out[:, 2]).numpy(), minlength=64)
        expected = self.expected() * N
        assert counts[expected == 0].sum() == 0, "a token that the filters exclude was emitted"
        small = expected < 5
        e, c = ([*x[~small], x[small].sum()] if small.any() else list(x) for x in (expected, counts))
        e, c = zip(*((a, b) for a, b in zip(e, c, strict=True) if a > 0), strict=True)
        statistic = sum((b - a) ** 2 / a for a, b in zip(e, c, strict=True))
        df = len(e) - 1
        spread = 2 / (9 * df)
        return bool(statistic < df * (1 - spread + TOLERANCE["chi_square_z"] * math.sqrt(spread)) ** 3)


RULES = pytest.mark.parametrize("rule", [MATCH, TOKENWISE, BLOCK], ids=["match", "tokenwise", "block"])


@RULES
@pytest.mark.parametrize(("seed", "top_p"), [(1, 1.0), (2, 1.0), (3, 0.8)])
def test_emitted_tokens_follow_the_target(rule: int, seed: int, top_p: float) -> None:
    toy = Toy(seed, top_p)
    assert toy.holds(toy.run(rule)[0])


@RULES
def test_lengths_that_differ_change_nothing(rule: int) -> None:
    """Verified lengths by a rule that does not look at the drafts."""
    toy = Toy(4)
    out, num = toy.run(rule, lengths=torch.arange(N) % 3)
    assert toy.holds(out)
    assert (num <= torch.arange(N) % 3).all()


def residual_from_p(start: Tensor, logits: Tensor, drafts: Tensor, q: Tensor, *rest: Any) -> Any:
    """Fault: the token after a rejection is drawn from p instead of max(p - q, 0)."""
    num, following, tokens = accept(start, logits, drafts, q, *rest)
    rows = start[:-1].long() + num
    again = accept(torch.arange(len(rows) + 1).int(), logits[rows], drafts, q, *(x[rows] for x in rest[:7]), *rest[7:])[
        1
    ]
    short = num < start.diff() - 1
    following = torch.where(short, again, following)
    return num, following, tokens.scatter(1, num.long().unsqueeze(1), following.unsqueeze(1))


def everything_accepted(start: Tensor, logits: Tensor, drafts: Tensor, q: Tensor, *rest: Any) -> Any:
    """Fault: drafts are never rejected."""
    num, following, tokens = accept(start, logits, drafts, q, *rest)
    return num, following, torch.cat((drafts, tokens[:, 2:]), 1)


def shared_noise(start: Tensor, logits: Tensor, drafts: Tensor, q: Tensor, *rest: Any) -> Any:
    """Fault: one random number both rejects and draws."""
    kept, acceptance.STREAM_RESIDUAL = acceptance.STREAM_RESIDUAL, acceptance.STREAM_ACCEPT
    try:
        return accept(start, logits, drafts, q, *rest)
    finally:
        acceptance.STREAM_RESIDUAL = kept


def generous(start: Tensor, logits: Tensor, drafts: Tensor, q: Tensor, *rest: Any) -> Any:
    """Fault: q is taken at a higher temperature than the drafts were drawn at."""
    return accept(start, logits, drafts, q * 0.8, *rest)


@pytest.mark.parametrize("rule", [TOKENWISE, BLOCK], ids=["tokenwise", "block"])
@pytest.mark.parametrize("fault", [residual_from_p, everything_accepted, shared_noise, generous])
def test_a_biased_rule_fails(rule: int, fault: Rule) -> None:
    toy = Toy(1)
    assert not toy.holds(toy.run(rule, fault)[0])


def test_acceptance_rates() -> None:
    """Token-wise: the first draft stands with probability sum min(p, q); block verification accepts no fewer."""
    toy = Toy(5)
    num = {rule: toy.run(rule)[1].double() for rule in (TOKENWISE, BLOCK, MATCH)}
    p, q = (torch.softmax(z[0] / toy.temperature, -1) for z in (toy.target, toy.draft))
    share = float(torch.minimum(p, q).sum())
    assert float((num[TOKENWISE] > 0).double().mean()) == pytest.approx(share, abs=TOLERANCE["acceptance"])
    assert num[BLOCK].mean() > num[TOKENWISE].mean() - TOLERANCE["acceptance"]
    bound = share / (2 - share)  # of shared noise, (1 - TV) / (1 + TV)
    assert float((num[MATCH] > 0).double().mean()) > bound - TOLERANCE["acceptance"]


@RULES
def test_greedy_requests_compare_best_ids(rule: int) -> None:
    toy = Toy(6, temperature=0.0)
    toy.draft[0], toy.draft[1] = toy.target[0].clone(), toy.draft[1]
    out, num = toy.run(rule)
    want: list[int] = []
    for z in toy.target:
        want.append(int(z[tuple(want)].argmax()))
    assert (out == torch.tensor(want)).all()
    agrees = bool(toy.draft[1][want[0]].argmax() == want[1])
    assert (num == (2 if agrees else 1)).all()


def test_sampled_match_does_not_depend_on_the_drafts() -> None:
    """The emitted tokens are those of steps without drafts, whatever was drafted and however much was verified."""
    toy = Toy(7)
    alone, _ = toy.run(MATCH, lengths=torch.zeros(N, dtype=torch.int64))
    for lengths in (torch.full((N,), 2), torch.arange(N) % 3):
        assert torch.equal(toy.run(MATCH, lengths=lengths)[0], alone)
    toy.draft = [torch.randn(t.shape) for t in toy.draft]
    assert torch.equal(toy.run(MATCH)[0], alone)


@RULES
def test_a_request_does_not_see_its_batch(rule: int) -> None:
    args = acceptance.accept_example(torch.Generator().manual_seed(8), 9, 50, 3, rule)
    full = accept(*args)
    start = args[0]
    for r in range(9):
        a, b = int(start[r]), int(start[r + 1])
        q = None if args[3] is None else args[3][r : r + 1]
        per_row = (x[a:b] for x in args[4:11])
        one = accept(start[r : r + 2] - a, args[1][a:b], args[2][r : r + 1], q, *per_row, *args[11:])
        assert all(torch.equal(x[r : r + 1], y) for x, y in zip(full, one, strict=True))


def test_a_failing_row_fails_its_request_alone() -> None:
    for rule in (MATCH, TOKENWISE, BLOCK):
        args = list(acceptance.accept_example(torch.Generator().manual_seed(9), 4, 50, 3, rule))
        clean = accept(*args)
        args[1] = args[1].clone()
        args[1][args[0][1] : args[0][2]] = math.nan
        num, following, _ = accept(*args)
        assert num[1] == 0 and following[1] == sampling.NOT_FINITE
        others = [0, 2, 3]
        assert torch.equal(following[others], clean[1][others]) and torch.equal(num[others], clean[0][others])
