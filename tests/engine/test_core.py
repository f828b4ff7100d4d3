"""The engine over the mock model: no schedule changes an answer; stop rules; failures."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from engine.mock_engine import (
    BOS,
    CONFIG,
    EOS,
    FIRST_BYTE,
    IMAGE,
    TOKENIZER,
    VOCAB,
    MockModel,
    mock_engine,
    random_logits,
    run,
    scripted,
    text_prompt,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine import sampler as core_sampler
from deepinfer.engine.core import Engine
from deepinfer.engine.requests import ImageSpan, Prompt
from deepinfer.engine.sampler import token_logprobs
from deepinfer.errors import ConfigError, EngineError, RequestError, UnsupportedError
from deepinfer.outputs import CompletionOutput
from deepinfer.params import SamplingParams
from deepinfer.text.images import ImagePatches

LOGPROB_TOLERANCE = 1e-6  # the same numpy code on the same float32 row


def one(engine: Engine, text: str, **params: Any) -> CompletionOutput:
    engine.add_request(text_prompt(text), SamplingParams(**params), "only")
    return run(engine)["only"].outputs[0]


def answer(tokens: list[int], text: str = "Q", **params: Any) -> CompletionOutput:
    """What comes of a model that says `tokens`, then EOS for ever."""
    engine = mock_engine(MockModel(scripted({text: tokens})), max_model_len=300)
    result = one(engine, text, **{"temperature": 0, "max_tokens": 50, "logprobs": 1, **params})
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
    assert all(next(iter(at)) == token for at, token in zip(result.logprobs, result.token_ids, strict=True))
    return result


def ids(text: str) -> list[int]:
    return TOKENIZER.encode_ordinary(text)


# ---- schedule never changes an answer ----


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=6),
    pages=st.integers(8, 16),
    slots=st.integers(1, 4),
    budget=st.integers(4, 48),
    replay=st.sampled_from(["compact", "mask", "off"]),
    late=st.integers(0, 20),
)
def test_any_schedule_gives_the_answers_of_one_at_a_time(
    sizes: list[tuple[int, int]], pages: int, slots: int, budget: int, replay: str, late: int
) -> None:
    prompts = [[(7 * i + 3 * j) % 290 for j in range(length)] for i, (length, _) in enumerate(sizes)]
    params = [
        SamplingParams(max_tokens=new, seed=i, temperature=float(i % 2), ignore_eos=True)
        for i, (_, new) in enumerate(sizes)
    ]
    small = mock_engine(
        num_pages=pages,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        replay=replay,
        replay_keep_tokens=16,
    )
    for i, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
        small.add_request(Prompt(prompt), chosen, str(i))
        if i == 0:
            for _ in range(late):
                if small.has_unfinished and len(small.requests["0"].sequences[0].output_ids) < sizes[0][1] - 1:
                    small.step()
    batched = run(small)
    alone = mock_engine(replay="off")
    for i, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
        alone.add_request(Prompt(prompt), chosen, "x")
        assert run(alone)["x"].outputs[0].token_ids == batched[str(i)].outputs[0].token_ids
    assert small.metrics.max_step_rows <= budget


def test_preemption_happens_and_keeps_the_text() -> None:
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True, logprobs=2)
    engine = mock_engine(num_pages=6, max_num_seqs=3)
    for i in range(3):
        engine.add_request(text_prompt(f"prompt {i}"), params, str(i))
    results = run(engine)
    assert engine.metrics.preemptions > 0
    assert sum(r.metrics.num_preemptions for r in results.values()) == engine.metrics.preemptions
    alone = mock_engine()
    for i in range(3):
        alone.add_request(text_prompt(f"prompt {i}"), params, "x")
        assert run(alone)["x"].outputs == results[str(i)].outputs


def test_a_storm_of_aborts_leaves_nothing_behind() -> None:
    rng = np.random.default_rng(0)
    engine = mock_engine(num_pages=10, max_num_batched_tokens=8)
    numbers = itertools.count()
    for _ in range(150):
        if rng.random() < 0.5:
            prompt = Prompt([int(i) for i in rng.integers(3, 200, rng.integers(1, 30))])
            engine.add_request(prompt, SamplingParams(max_tokens=20, n=int(rng.integers(1, 3))), str(next(numbers)))
        if engine.requests and rng.random() < 0.3:
            engine.abort([list(engine.requests.values())[rng.integers(len(engine.requests))]])
        engine.step()
    run(engine)


# ---- how a sequence ends ----


def test_eos_ends_ids_logprobs_and_text_together() -> None:
    result = answer([*ids("ab"), EOS, *ids("cd")])
    assert (result.token_ids, result.text) == ([*ids("ab"), EOS], "ab")
    assert (result.finish_reason, result.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on_to_the_length() -> None:
    result = answer([*ids("a"), EOS, *ids("b")], ignore_eos=True, max_tokens=3, skip_special_tokens=False)
    assert (result.text, result.finish_reason) == ("a<1>b", "length")


def test_a_stop_token_ends_and_is_named() -> None:
    result = answer(ids("abc"), stop_token_ids=[ids("b")[0]])
    assert (result.token_ids, result.text, result.stop_reason) == (ids("ab"), "a", ids("b")[0])
    kept = answer(ids("abc"), stop_token_ids=[ids("b")[0]], include_stop_str_in_output=True)
    assert kept.text == "ab"


@pytest.mark.parametrize(
    "tokens",
    [[*ids("hiE"), 300], [*ids("hi"), 301, *ids("D")], [*ids("hi"), 303], [*ids("hiEND")]],
    ids=["E+ND", "EN+D", "END", "E+N+D"],
)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_split_over_tokens(tokens: list[int], include: bool) -> None:
    result = answer([*tokens, *ids("after")], stop=["END"], include_stop_str_in_output=include)
    assert (result.token_ids, result.text) == (tokens, "hiEND" if include else "hi")
    assert (result.finish_reason, result.stop_reason) == ("stop", "END")


def test_a_stop_string_inside_one_long_token() -> None:
    result = answer([*ids("a"), 302, *ids("b")], stop=["END"])
    assert (result.token_ids, result.text, result.stop_reason) == ([*ids("a"), 302], "ax", "END")


def test_what_a_stop_string_held_back_comes_at_the_end() -> None:
    assert answer([*ids("aEN"), EOS], stop=["END"]).text == "aEN"
    assert answer(ids("aENx"), stop=["END"], max_tokens=3).text == "aEN"


def test_min_tokens_defers_stop_strings_and_eos() -> None:
    deferred = answer([303, *ids("x"), 303], stop=["END"], min_tokens=2)
    assert (deferred.text, len(deferred.token_ids)) == ("ENDx", 3)
    straddling = answer([*ids("E"), 300, *ids("x")], stop=["END"], min_tokens=2)
    assert (straddling.text, straddling.stop_reason) == ("", "END")  # complete at the second token: allowed
    later = answer([EOS, EOS, EOS], min_tokens=2, max_tokens=9)
    assert len(later.token_ids) == 3 and EOS not in later.token_ids[:2] and later.token_ids[2] == EOS


def test_a_character_split_over_tokens_is_whole_in_the_text() -> None:
    assert answer(ids("a🚀é")).text == "a🚀é"
    assert answer(ids("a🚀"), max_tokens=3).text == "a�"  # cut by max_tokens: not complete


def test_detokenize_off_gives_ids_only() -> None:
    result = answer(ids("abc"), detokenize=False)
    assert (result.text, result.token_ids) == ("", [*ids("abc"), EOS])


def test_max_tokens_is_clamped_to_the_context() -> None:
    engine = mock_engine(max_model_len=20)
    result = one(engine, "0123456789", max_tokens=100, ignore_eos=True)
    assert (len(result.token_ids), result.finish_reason) == (20 - 11, "length")
    assert len(one(engine, "0123456789", max_tokens=None, ignore_eos=True).token_ids) == 9


def test_max_tokens_none_is_clamped_to_the_pool() -> None:
    engine = mock_engine(num_pages=2, max_model_len=300)
    assert len(one(engine, "0123456789", max_tokens=None, ignore_eos=True).token_ids) == 2 * 8 + 1 - 11


# ---- sampling options reach their row ----


def test_the_image_token_is_never_generated() -> None:
    engine = mock_engine()
    assert int(random_logits(TOKENIZER.encode("Q")).argmax()) == IMAGE
    assert IMAGE not in one(engine, "Q", max_tokens=40, ignore_eos=True).token_ids


def test_n_samples_differ_and_repeat_as_a_set() -> None:
    def four(**options: Any) -> list[list[int]]:
        engine = mock_engine(**options)
        engine.add_request(text_prompt("Q"), SamplingParams(n=4, seed=7, max_tokens=12, ignore_eos=True), "x")
        result = run(engine)["x"]
        assert [output.index for output in result.outputs] == [0, 1, 2, 3]
        return [output.token_ids for output in result.outputs]

    first = four()
    assert len({tuple(tokens) for tokens in first}) == 4
    assert first == four(max_num_seqs=2, num_pages=5)


def test_a_seed_holds_among_unseeded_neighbours() -> None:
    seeded = SamplingParams(seed=7, max_tokens=10, ignore_eos=True)
    engine = mock_engine()
    expected = one(engine, "Q", seed=7, max_tokens=10, ignore_eos=True).token_ids
    for i in range(7):
        engine.add_request(text_prompt("Q"), SamplingParams(max_tokens=10), f"n{i}")
    engine.add_request(text_prompt("Q"), seeded, "seeded")
    results = run(engine)
    assert results.pop("seeded").outputs[0].token_ids == expected
    assert len({tuple(r.outputs[0].token_ids) for r in results.values()}) == 7


def test_an_engine_seed_repeats_unseeded_requests() -> None:
    runs = [one(mock_engine(seed=seed), "Q", max_tokens=8).token_ids for seed in (1, 1, 2, None, None)]
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs}) == 4


def test_penalties_touch_their_own_row_only() -> None:
    def repeat(history: list[int]) -> torch.Tensor:
        out = torch.zeros(VOCAB)
        out[400], out[401] = 5.0, 4.0
        return out

    engine = mock_engine(MockModel(repeat))
    greedy = {"temperature": 0, "max_tokens": 3}
    engine.add_request(text_prompt("a"), SamplingParams(**greedy, repetition_penalty=5), "penalised")
    engine.add_request(text_prompt("b"), SamplingParams(**greedy), "plain")
    results = run(engine)
    assert results["plain"].outputs[0].token_ids == [400, 400, 400]
    assert results["penalised"].outputs[0].token_ids[:2] == [400, 401]


def test_bad_words_go_through_the_tokenizer() -> None:
    result = answer(ids("ab"), bad_words=["b"], max_tokens=2)
    assert result.token_ids == [ids("a")[0], EOS]


# ---- logprobs ----


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"num_pages": 7, "max_num_seqs": 2}])
def test_prompt_logprobs_are_those_of_the_whole_prompt(options: dict[str, int]) -> None:
    engine = mock_engine(**options)
    params = SamplingParams(prompt_logprobs=2, logprobs=1, max_tokens=20, n=2, seed=1, ignore_eos=True)
    prompt = TOKENIZER.encode("a prompt of 24 tokens...")
    engine.add_request(Prompt(prompt), params, "x")
    engine.add_request(text_prompt("other"), SamplingParams(max_tokens=20, ignore_eos=True), "y")
    result = run(engine)["x"]
    found = result.prompt_logprobs
    assert found is not None and len(found) == len(prompt) and found[0] is None
    for i in range(1, len(prompt)):
        expected = token_logprobs(random_logits(prompt[:i]).numpy(), prompt[i], 2)
        assert found[i] is not None and found[i].keys() == expected.keys()
        for token, logprob in expected.items():
            assert found[i][token].logprob == pytest.approx(logprob.logprob, abs=LOGPROB_TOLERANCE)
            assert found[i][token].rank == logprob.rank
            assert found[i][token].decoded_token == TOKENIZER.decode([token], skip_special_tokens=False)
    engine.add_request(Prompt(prompt), params.replace(prompt_logprobs=None), "without")
    assert run(engine)["without"].outputs == result.outputs


def test_prompt_logprobs_survive_a_repeated_chunk() -> None:
    model = MockModel()
    engine = mock_engine(model, max_num_batched_tokens=7)
    engine.add_request(Prompt(list(range(3, 27))), SamplingParams(prompt_logprobs=0, max_tokens=1), "x")
    engine.step()
    engine.step()
    engine.scheduler.restart()
    found = run(engine)["x"].prompt_logprobs
    assert found is not None and [next(iter(at)) for at in found if at is not None] == list(range(4, 27))


def test_prompt_logprobs_switch_replay_off_for_their_request_only() -> None:
    model = MockModel()
    engine = mock_engine(model, replay_keep_tokens=16)
    engine.add_request(Prompt([5] * 30), SamplingParams(prompt_logprobs=0, max_tokens=2), "all")
    engine.add_request(Prompt([5] * 30), SamplingParams(max_tokens=2), "trimmed")
    run(engine)
    first = model.steps[0]
    assert first.kept is not None
    assert first.kept.tolist() == [*range(30), *range(30 + 14, 60)]
    assert first.window_floor.tolist() == [0] * 30 + [14] * 30


def test_cumulative_logprob_is_the_sum() -> None:
    result = answer(ids("abc"), logprobs=0)
    assert result.logprobs is not None
    total = sum(at[token].logprob for at, token in zip(result.logprobs, result.token_ids, strict=True))
    assert result.cumulative_logprob == pytest.approx(total)


# ---- images ----


def image_prompt(text: str, length: int) -> Prompt:
    patches = ImagePatches(torch.zeros((1, 3, 14, 14)), 1, 1, 1, 1, length)
    before = TOKENIZER.encode(text)
    return Prompt([*before, *[IMAGE] * length, *ids("?")], text, (ImageSpan(len(before), length, patches),))


@pytest.mark.parametrize("budget", [64, 5])
def test_image_rows_meet_their_embeddings_over_chunks_and_preemption(budget: int) -> None:
    model = MockModel()
    engine = mock_engine(model, num_pages=6, max_num_seqs=3, max_num_batched_tokens=budget)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    engine.add_request(text_prompt("first"), params, "first")
    engine.add_request(image_prompt("look", 11), params, "image")
    run(engine)
    assert engine.metrics.preemptions > 0 and model.images == 1
    seen = 0
    for step in model.steps:
        if step.image_rows is None or step.image_embeds is None:
            assert not step.is_image.any()
            continue
        assert step.is_image.nonzero().flatten().tolist() == step.image_rows.tolist()
        offset = step.positions[step.image_rows] - len(TOKENIZER.encode("look")) + 1
        assert step.image_embeds[:, 0].tolist() == offset.tolist()
        seen += len(offset)
    assert seen == 11 * 2  # once, and once more after the preemption


# ---- what is refused ----


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([3, 512], {}, r"token id 512 at position 1 .* vocabulary of 512 \(0 to 511\)"),
        ([3, -1], {}, "token id -1 at position 1"),
        ([3] * 100, {}, "the prompt has 100 tokens .* max_model_len is 100; shorten"),
        (
            [3] * 30,
            {"max_tokens": 20},
            r"needs 7 pages of 8 tokens \(prompt 30, up to 20 new\), the pool has 6",
        ),
        ([3] * 60, {"max_tokens": None}, "needs 8 pages .* the pool has 6"),
        ([3], {"logprobs": 21}, "logprobs is 21; this engine gives at most 20"),
        ([3], {"stop_token_ids": [512]}, "stop_token_ids holds 512"),
        ([3], {"allowed_token_ids": [IMAGE]}, "all forbidden"),
    ],
)
def test_a_bad_request_says_value_limit_and_remedy(prompt: list[int], params: Any, message: str) -> None:
    engine = mock_engine(num_pages=6, max_model_len=100)
    with pytest.raises(RequestError, match=message):
        engine.add_request(Prompt(prompt), SamplingParams(**params))
    engine.check_idle()
    assert one(engine, "still", max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_the_largest_request_that_fits_runs() -> None:
    engine = mock_engine(num_pages=6, max_model_len=100)
    engine.add_request(Prompt([3] * 30), SamplingParams(max_tokens=19, ignore_eos=True), "x")
    assert len(run(engine)["x"].outputs[0].token_ids) == 19


def test_structured_output_is_not_served_silently() -> None:
    with pytest.raises(UnsupportedError, match="so_args"):
        mock_engine().add_request(text_prompt("Q"), SamplingParams(so_args={"json_object": True}))


def test_options_beyond_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"max_model_len is 5000.*{CONFIG.max_position_embeddings}"):
        mock_engine(max_model_len=5000)


def test_a_used_request_id_is_refused() -> None:
    engine = mock_engine()
    engine.add_request(text_prompt("a"), SamplingParams(), "same")
    with pytest.raises(EngineError, match="'same' is in use"):
        engine.add_request(text_prompt("b"), SamplingParams(), "same")
    assert list(run(engine)) == ["same"]


# ---- failures while running ----


def test_logits_that_are_not_finite_end_their_request_only() -> None:
    def broken(history: list[int]) -> torch.Tensor:
        logits = random_logits(history)
        if history[:2] == TOKENIZER.encode("b")[:2] and len(history) == 4:
            logits[5] = float("nan")
        return logits

    engine = mock_engine(MockModel(broken))
    params = SamplingParams(max_tokens=6, ignore_eos=True, n=2, seed=0)
    for name in ("a", "b", "c"):
        engine.add_request(text_prompt(name), params, name)
    results = run(engine)
    assert results["a"].error is None and results["c"].error is None
    assert len(results["a"].outputs[0].token_ids) == 6
    assert "nan" in str(results["b"].error)
    assert {output.finish_reason for output in results["b"].outputs} == {"abort"}
    assert [len(output.token_ids) for output in results["b"].outputs] == [2, 2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [1, 2, 9])
def test_a_step_that_breaks_off_is_repeated(error: type[BaseException], at: int) -> None:
    model = MockModel()
    calls = itertools.count(1)

    def fail(step: object) -> None:
        if next(calls) == at:
            raise error("in the middle")

    model.before_step = fail
    engine = mock_engine(model, num_pages=8, max_num_batched_tokens=16)
    params = SamplingParams(max_tokens=20, seed=2, ignore_eos=True)
    for i in range(3):
        engine.add_request(text_prompt(f"prompt number {i}"), params, str(i))
    with pytest.raises(error):
        run(engine)
    results = run(engine)
    alone = mock_engine()
    for i in range(3):
        assert (
            results[str(i)].outputs[0].token_ids
            == one(alone, f"prompt number {i}", max_tokens=20, seed=2, ignore_eos=True).token_ids
        )


def test_an_interrupt_after_sampling_repeats_nothing_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = mock_engine()
    for name, length in (("short", 3), ("long", 6)):
        engine.add_request(text_prompt(name), SamplingParams(max_tokens=length, seed=0, ignore_eos=True), name)
    requests = dict(engine.requests)

    def interrupted(seqs: list[Any]) -> None:
        if seqs:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "remove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    assert requests["short"].finished and not requests["long"].finished
    engine.abort([requests["short"]])
    run(engine)
    assert [len(requests[name].sequences[0].output_ids) for name in ("short", "long")] == [3, 6]


def test_noise_is_keyed_by_the_position_of_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    true_sample = core_sampler.sample

    def spy(logits: torch.Tensor, rows: list[core_sampler.SamplingRow]) -> list[core_sampler.Sampled]:
        seen.extend((row.position, len(row.prompt_ids) + len(row.output_ids)) for row in rows)
        return true_sample(logits, rows)

    monkeypatch.setattr(core_sampler, "sample", spy)
    engine = mock_engine()
    engine.add_request(text_prompt("Q"), SamplingParams(max_tokens=5, ignore_eos=True))
    run(engine)
    assert seen == [(p, p) for p in range(2, 7)]


def test_check_idle_finds_leaks_and_leftovers() -> None:
    engine = mock_engine()
    request = engine.add_request(text_prompt("Q"), SamplingParams())
    with pytest.raises(EngineError, match="1 requests are unfinished"):
        engine.check_idle()
    engine.abort([request])
    engine.abort([request])  # harmless
    engine.check_idle()
    engine.scheduler.pages.take(1)
    with pytest.raises(EngineError, match="pages leaked"):
        engine.check_idle()


# ---- accounting ----


def test_metrics_count_rows_tokens_and_times() -> None:
    engine = mock_engine(max_num_batched_tokens=6)
    result = engine.add_request(
        Prompt([BOS, *range(FIRST_BYTE, FIRST_BYTE + 9)]), SamplingParams(max_tokens=4, ignore_eos=True)
    )
    output = run(engine)[result.request_id]
    metrics = engine.metrics
    assert (metrics.steps, metrics.prompt_rows, metrics.decode_rows) == (5, 10, 3)
    assert (metrics.output_tokens, metrics.max_step_rows, metrics.finished_requests) == (4, 6, 1)
    times = output.metrics
    assert times is not None and times.first_token_s is not None and times.finished_s is not None
    assert times.arrival_s <= times.first_scheduled_s <= times.first_token_s <= times.finished_s
    assert metrics.output_tokens_per_s > 0 and metrics.prompt_tokens_per_s > 0


def test_deltas_add_up_to_the_whole() -> None:
    engine = mock_engine(MockModel(scripted({"Q": ids("a🚀 END")})))
    request = engine.add_request(text_prompt("Q"), SamplingParams(temperature=0, stop="END", logprobs=0, max_tokens=30))
    deltas = []
    while not request.finished:
        engine.step()
        deltas.append(request.output(delta=True).outputs[0])
    whole = request.output().outputs[0]
    assert "".join(delta.text for delta in deltas) == whole.text == "a🚀 "
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert sum(len(delta.logprobs or ()) for delta in deltas) == len(whole.token_ids)
    assert all("�" not in delta.text for delta in deltas)
    engine.check_idle()
