"""The sampler: random numbers, exact draws, filters, penalties, logprobs, independence of the batch.

Every reference here is written naively: Python integers, double precision, loops over tokens.
"""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepinfer.engine import sampler
from deepinfer.engine.sampler import SamplingRow, SeedSource, gumbel, philox4x32, sample
from deepinfer.errors import EngineError
from deepinfer.params import SamplingParams

pytestmark = pytest.mark.filterwarnings("error")  # overflow and NaN warnings would hide wrong arithmetic

TOLERANCE = {
    "gumbel": 1e-8,  # relative, of the tail probability computed back in double precision
    "penalty": 1e-6,  # relative, FP32 result against double
    "logprob": 1e-5,  # absolute, FP32 exponentials against a double log-softmax
    "filter_gap": 1e-5,  # examples whose top_p or min_p cut is nearer than this are skipped
    "chi_square_z": 3.719,  # normal quantile of 1 - 1e-4; the tests are seeded, so they cannot flake
}
REAL_VOCAB = 129_280
SECONDS_REAL_BATCH = 1.0  # 32 rows x 129,280 plain draws take 0.05 s on an idle core


def make_row(prompt=(1, 2, 3), output=(), *, seed=7, index=0, position=None, forbidden=(), eos=(), bad=(), **params):
    where = len(prompt) + len(output) if position is None else position
    return SamplingRow(SamplingParams(**params), list(prompt), list(output), where, seed, index, forbidden, eos, bad)


def ids_of(results):
    assert all(result.error is None for result in results)
    return [result.token_id for result in results]


def gaussian(rows, vocab, *, scale=2.0, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# ---- random numbers ----


def naive_philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k[0], right % 2**32, (left >> 32) ^ c[3] ^ k[1], left % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def philox_of(counters, keys):
    return philox4x32(*np.array(counters, dtype=np.uint64).T, key=tuple(np.array(keys, dtype=np.uint64).T)).tolist()


def test_philox_known_answers():
    ones = 0xFFFFFFFF
    counters = [(0, 0, 0, 0), (ones,) * 4, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    keys = [(0, 0), (ones, ones), (0xA4093822, 0x299F31D0)]
    assert philox_of(counters, keys) == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


def test_philox_of_many_counters_is_philox_of_each():
    rng = random.Random(1)
    counters = [[rng.getrandbits(32) for _ in range(4)] for _ in range(sampler.CHUNK + 37)]  # two chunks
    keys = [[rng.getrandbits(32) for _ in range(2)] for _ in counters]
    result = philox_of(counters, keys)
    for i in (0, 1, sampler.CHUNK - 1, sampler.CHUNK, len(counters) - 1):
        assert result[i] == naive_philox(counters[i], keys[i])


def test_gumbel_noise_inverts_its_distribution_and_stays_in_reach():
    for word in (0, 1, 12345, 2**31, 2**32 - 2, 2**32 - 1):
        u = 1 - math.exp(-math.exp(-gumbel(word)))  # P(G > g)
        assert u == pytest.approx((word + 0.5) / 2**32, rel=TOLERANCE["gumbel"])
    noise = [gumbel(word) for word in range(0, 2**32, 2**20)]
    assert noise == sorted(noise, reverse=True)
    assert gumbel(0) == pytest.approx(33 * math.log(2), rel=TOLERANCE["gumbel"])
    assert gumbel(0) - gumbel(2**32 - 1) < -sampler.REACH


# ---- the draw ----


def naive_token(logits, row):
    """Gumbel-max over all ids, without shortlist or reach."""
    z = logits.numpy()
    scaled = (z - z.max()) / np.float32(row.params.temperature)
    best, chosen = -math.inf, -1
    for token, score in enumerate(scaled.tolist()):
        key = (row.seed % 2**32, row.seed >> 32)
        word = naive_philox((row.position, token // 4, 0, row.sample_index), key)[token % 4]
        if score + gumbel(word) > best:
            best, chosen = score + gumbel(word), token
    return chosen


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 12.0])
@pytest.mark.parametrize("vocab", [1, 2, 5, 64, 1003])
def test_draws_equal_the_naive_gumbel_max(vocab, scale):
    logits = gaussian(12, vocab, scale=scale, seed=vocab)
    rows = [make_row(seed=(i << 40) + i, position=2**31 + i, index=i % 3, temperature=0.25 + i / 4) for i in range(12)]
    assert ids_of(sample(logits, rows)) == [naive_token(z, row) for z, row in zip(logits, rows, strict=True)]


def chi_square(counts, expected):
    statistic = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    df = len(counts) - 1
    spread = 2 / (9 * df)  # Wilson and Hilferty's approximation of the quantile
    return statistic, df * (1 - spread + TOLERANCE["chi_square_z"] * math.sqrt(spread)) ** 3


def softmax(logits, temperature=1.0):
    p = np.exp((logits - max(logits)) / temperature)
    return p / p.sum()


LOGITS = [1.5, -0.3, 0.8, -2.0, 0.0, 1.1, -1.0]
DRAWS = 20_000


@pytest.mark.parametrize("vary", ["position", "seed", "index"])
def test_draws_follow_the_distribution(vary):
    rows = [make_row(temperature=0.8, **{"position": 9, "seed": 11, vary: i}) for i in range(DRAWS)]
    counts = np.bincount(ids_of(sample(torch.tensor([LOGITS] * DRAWS), rows)), minlength=len(LOGITS))
    statistic, limit = chi_square(counts, DRAWS * softmax(np.array(LOGITS), 0.8))
    assert statistic < limit
    statistic, limit = chi_square(counts, DRAWS * softmax(np.array(LOGITS), 0.9))
    assert statistic > limit, "the test would not notice a wrong temperature"


def test_filtered_draws_follow_the_renormalised_distribution():
    rows = [make_row(position=i, top_k=4, top_p=0.9) for i in range(DRAWS)]
    counts = np.bincount(ids_of(sample(torch.tensor([LOGITS] * DRAWS), rows)), minlength=len(LOGITS))
    kept = [0, 2, 5]  # of the top four these three hold 0.907; of all seven they would hold 0.813
    assert counts.sum() == counts[kept].sum()
    statistic, limit = chi_square(counts[kept], DRAWS * softmax(np.array(LOGITS)[kept]))
    assert statistic < limit


def test_neighbouring_draws_are_independent():
    weights, count = [0.0, 0.5, 1.0, 0.2], 8000
    p = softmax(np.array(weights))
    logits = torch.tensor([weights] * count)

    def draws(*, shift=0, seed=3, index=0):
        return np.array(
            ids_of(sample(logits, [make_row(position=i + shift, seed=seed, index=index) for i in range(count)]))
        )

    base = draws()
    for other in ({"shift": 1}, {"seed": 4}, {"index": 1}):
        pairs = np.bincount(4 * base + draws(**other), minlength=16)
        statistic, limit = chi_square(pairs, count * np.outer(p, p).reshape(-1))
        assert statistic < limit, other


def test_ties_go_to_the_lowest_id():
    flat = torch.zeros(1, 37)
    assert ids_of(sample(flat, [make_row(temperature=0)])) == [0]
    assert ids_of(sample(flat, [make_row(top_k=1)])) == [0]
    flat[0, [5, 9]] = 1.0
    assert ids_of(sample(flat, [make_row(temperature=0)])) == [5]
    assert {ids_of(sample(flat, [make_row(top_k=2, seed=s)]))[0] for s in range(40)} == {5, 9}


# ---- independence (B08, B09, B48) ----


def mixed_rows(count, vocab):
    kinds = [
        {"temperature": 0},
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.05, "temperature": 1.7},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "temperature": 0},
        {"presence_penalty": 1.5, "top_k": 40, "top_p": 0.9, "logprobs": 3},
        {"logit_bias": {3: 4.0}, "allowed_token_ids": [3, 8, 9, 21], "logprobs": 0},
    ]
    rng = random.Random(5)
    return [
        make_row(
            [rng.randrange(vocab) for _ in range(rng.randrange(1, 30))],
            [rng.randrange(vocab) for _ in range(rng.randrange(12))],
            seed=rng.getrandbits(64),
            index=rng.randrange(4),
            forbidden=(2,),
            **kinds[i % len(kinds)],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("block", [8, 700, 1 << 15])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(block, monkeypatch):
    vocab, count = 1021, 24
    logits, rows = gaussian(count, vocab), mixed_rows(count, vocab)
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(count)]
    monkeypatch.setattr(sampler, "BLOCK", block)
    assert sample(logits, rows) == alone
    order = random.Random(0).sample(range(count), count)
    assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    assert sample(logits.T.contiguous().T, rows) == alone  # another memory layout


def test_the_seed_decides_whatever_the_neighbours_do():
    logits = gaussian(1, 600, scale=0.5)
    mine = make_row(seed=7)
    alone = sample(logits, [mine])[0]
    for place in range(8):
        rows = [make_row(seed=SeedSource().next(), repetition_penalty=5.0, temperature=3.0) for _ in range(7)]
        rows.insert(place, mine)
        assert sample(logits.expand(8, -1), rows)[place] == alone


def test_samples_of_one_prompt_differ_and_repeat_as_a_set():
    logits = gaussian(1, 600, scale=0.3).expand(4, -1)

    def four(seed):
        return [ids_of(sample(logits, [make_row(seed=seed, index=i, position=p) for i in range(4)])) for p in range(6)]

    first = four(7)
    assert first == four(7)
    assert first != four(8)
    assert len({tuple(sequence) for sequence in zip(*first, strict=True)}) == 4


def test_all_64_bits_of_the_seed_count():
    logits = gaussian(1, 4000, scale=0.1).expand(64, -1)
    tokens = ids_of(sample(logits, [make_row(seed=1 << bit) for bit in range(64)]))
    assert len(set(tokens)) > 50


def test_nobodys_generator_is_touched():
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    sample(gaussian(8, 100), mixed_rows(8, 100))
    SeedSource(3).next()
    SeedSource().next()
    assert state == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_seed_source_is_fresh_or_repeatable():
    fresh = []
    for _ in range(2):
        random.seed(1)
        fresh.append(SeedSource().next())
    assert fresh[0] != fresh[1]
    first, second = SeedSource(5), SeedSource(5)
    seeds = [first.next() for _ in range(3)]
    assert seeds == [second.next() for _ in range(3)]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**64 for seed in seeds)


# ---- filters ----


def naive_kept(logits, params):
    """Ids that survive, and the distance of the nearest decision to its limit."""
    scaled = [(z - max(logits)) / params.temperature for z in logits]
    ranked = sorted((i for i in range(len(logits)) if logits[i] > -math.inf), key=lambda i: (-logits[i], i))
    gap = 1.0
    if params.min_p > 0:
        gap = min(abs(scaled[i] - math.log(params.min_p)) for i in ranked)
        ranked = [i for i in ranked if scaled[i] >= math.log(params.min_p)]
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        total, mass, kept = sum(math.exp(scaled[i]) for i in ranked), 0.0, []
        for i in ranked:
            mass += math.exp(scaled[i]) / total
            kept.append(i)
            gap = min(gap, abs(mass - params.top_p))
            if mass >= params.top_p:
                break
        ranked = kept
    return set(ranked), gap


values = st.one_of(st.floats(-8, 8, width=32), st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]))


@given(
    st.lists(values, min_size=1, max_size=40),
    st.integers(0, 12),
    st.sampled_from([1.0, 0.97, 0.8, 0.33, 0.001]),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.sampled_from([0.3, 1.0, 2.5]),
)
@settings(max_examples=400, deadline=None)
def test_filters_equal_the_naive_ones(logits, top_k, top_p, min_p, temperature):
    assume(max(logits) > -math.inf)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    expected, gap = naive_kept(logits, params)
    assume(gap > TOLERANCE["filter_gap"])
    z = np.array(logits, dtype=np.float32)
    keep = sampler.keep_mask(z, (z - z.max()) / np.float32(temperature), params)
    assert set(np.flatnonzero(keep).tolist()) == expected


def test_filters_off_keep_everything_and_extremes_keep_one():
    logits = gaussian(1, 50)
    best = int(logits.argmax())
    for off in ({"top_k": -1}, {"top_k": 0}, {"top_k": 50}, {"top_k": 10**9}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert ids_of(sample(logits, [make_row(**off)])) == ids_of(sample(logits, [make_row()]))
    for one in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert ids_of(sample(logits, [make_row(temperature=50.0, **one)])) == [best]


def test_huge_and_tiny_temperatures_stay_finite():
    logits = torch.tensor([[0.0, 5.0, -math.inf, 4.0]])
    seen = {ids_of(sample(logits, [make_row(temperature=1e300, seed=s)]))[0] for s in range(60)}
    assert seen == {0, 1, 3}
    assert {ids_of(sample(logits, [make_row(temperature=1e-5, seed=s)]))[0] for s in range(20)} == {1}


# ---- processors ----


def naive_processed(logits, row):
    params, z = row.params, logits.tolist()
    if params.allowed_token_ids is not None:
        z = [v if i in params.allowed_token_ids else -math.inf for i, v in enumerate(z)]
    for token in row.forbidden_ids:
        z[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        z[token] += bias
    for token in range(len(z)):
        if token in row.prompt_ids or token in row.output_ids:
            z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in range(len(z)):
        count = row.output_ids.count(token)
        z[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return z


@given(st.integers(0, 10**6), st.sampled_from([1.0, 1.3, 0.7, 5.0]), st.floats(-2, 2), st.floats(-2, 2))
@settings(max_examples=60, deadline=None)
def test_penalties_and_bias_equal_naive_loops(seed, repetition, frequency, presence):
    rng = random.Random(seed)
    row = make_row(
        [rng.randrange(30) for _ in range(9)],
        [rng.randrange(30) for _ in range(rng.randrange(15))],
        forbidden=(rng.randrange(30),),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias={rng.randrange(30): rng.uniform(-9, 9) for _ in range(3)} if seed % 2 else None,
        allowed_token_ids=rng.sample(range(30), 20) if seed % 3 == 0 else None,
    )
    logits = gaussian(1, 30, seed=seed)[0]
    before = logits.clone()
    result = sampler.process_logits(logits.numpy(), row)
    np.testing.assert_allclose(
        result, naive_processed(logits, row), rtol=TOLERANCE["penalty"], atol=TOLERANCE["penalty"]
    )
    assert torch.equal(logits, before), "the caller's logits were modified"


def test_a_repetition_penalty_changes_the_second_token_in_any_company():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    plain, penal = {"temperature": 0}, {"temperature": 0, "repetition_penalty": 5.0}
    assert ids_of(sample(logits, [make_row([0], **penal)])) == [1]
    assert ids_of(sample(logits, [make_row([0], [1], **penal)])) == [2]
    rows = [make_row([0], [1], **(penal if i == 2 else plain)) for i in range(5)]
    assert ids_of(sample(logits.expand(5, -1), rows)) == [1, 1, 2, 1, 1]


def test_a_growing_output_needs_no_new_row():
    output: list[int] = []
    row = SamplingRow(SamplingParams(temperature=0, presence_penalty=2.0), [0], output, 1, 0)
    logits = torch.tensor([[0.0, 3.0, 2.5, 2.0]])
    for expected in (1, 2, 3, 1):
        assert ids_of(sample(logits, [row])) == [expected]
        output.append(expected)
        row.position += 1


def test_min_tokens_holds_back_every_stop_token():
    logits = torch.tensor([[9.0, 8.0, 7.0, 1.0]])
    params = {"temperature": 0, "min_tokens": 2, "stop_token_ids": [1]}
    for output, expected in (([], 2), ([2], 2), ([2, 2], 0)):
        assert ids_of(sample(logits, [make_row([3], output, eos=(0,), **params)])) == [expected]
    assert ids_of(sample(logits, [make_row([3], eos=(0,), ignore_eos=True, **params)])) == [0]


def test_bad_words_are_never_completed():
    logits = torch.tensor([[9.0, 8.0, 7.0, 6.0]])
    bad = ((0,), (2, 3, 1))
    for output, expected in (([], 1), ([2, 3], 2), ([3, 2], 1), ([3], 1), ([2, 3, 2], 1)):
        assert ids_of(sample(logits, [make_row([2, 3], output, bad=bad, temperature=0)])) == [expected]


def test_a_row_without_a_choice_fails_alone():
    logits = torch.zeros(4, 6)
    logits[1, 3] = math.nan
    logits[3, 2] = math.inf
    impossible = make_row(allowed_token_ids=[4], forbidden=(4,))
    for temperature in (0, 1.0):
        rows = [make_row(temperature=temperature) for _ in range(4)]
        rows[2] = impossible
        results = sample(logits, rows)
        assert results[0].error is None
        assert [result.token_id for result in results[1:]] == [-1, -1, -1]
        assert "nan" in results[1].error and "inf" in results[3].error
        assert "no token is left" in results[2].error


def test_rows_and_logits_must_match():
    with pytest.raises(EngineError, match="2 rows of logits for 1"):
        sample(torch.zeros(2, 5), [make_row()])
    assert sample(torch.zeros(0, 5), []) == []


# ---- logprobs ----


def test_logprobs_are_those_of_the_raw_logits():
    logits = gaussian(3, 200, seed=4)
    rows = [make_row(temperature=t, logprobs=n, logit_bias={17: 50.0}) for t, n in ((0, 4), (2.0, 0), (0, 200))]
    expected = torch.log_softmax(logits.double(), -1)
    for i, result in enumerate(sample(logits, rows)):
        assert result.token_id == 17
        assert result.logprob == result.logprobs[17].logprob
        assert next(iter(result.logprobs)) == 17
        ranked = sorted(range(200), key=lambda t: (-float(logits[i, t]), t))
        assert set(result.logprobs) == {17, *ranked[: rows[i].params.logprobs]}
        for token, found in result.logprobs.items():
            assert found.logprob == pytest.approx(float(expected[i, token]), abs=TOLERANCE["logprob"])
            assert ranked[found.rank - 1] == token
    assert sample(logits[:1], [make_row()])[0].logprobs is None


def test_ranks_of_equal_logits_follow_the_ids():
    found = sampler.token_logprobs(np.array([1.0, 2.0, 2.0, 2.0, 0.0], dtype=np.float32), 3, 2)
    assert [(token, entry.rank) for token, entry in found.items()] == [(3, 3), (1, 1), (2, 2)]
    assert len(sampler.token_logprobs(np.zeros(5, dtype=np.float32), 0, 50)) == 5


def test_prompt_logprobs_belong_to_the_next_ids():
    logits = gaussian(5, 40)
    expected = torch.log_softmax(logits.double(), -1)
    found = sampler.prompt_logprobs(logits, [3, 1, 4, 1, 5], 2)
    for i, token in enumerate((3, 1, 4, 1, 5)):
        assert found[i][token].logprob == pytest.approx(float(expected[i, token]), abs=TOLERANCE["logprob"])
        assert len(found[i]) in (2, 3)


# ---- speed ----


def test_a_full_vocabulary_batch_is_quick():
    logits = gaussian(32, REAL_VOCAB, scale=1.0)
    rows = [make_row(seed=i) for i in range(32)]
    sample(logits[:1], rows[:1])
    start = time.process_time()
    sample(logits, rows)
    assert time.process_time() - start < SECONDS_REAL_BATCH
