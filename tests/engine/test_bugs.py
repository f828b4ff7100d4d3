"""Faults that users of other engines reported, tried on this one: a test per row of the project's list, named by it.

Belongs here: rows about scheduling, overlap, preemption, stop strings, logprobs and seeds, at the level of the engine.
Does not belong here: the API (test_llm.py), schedules drawn at random (test_scheduler.py: B26; test_storm.py), the
model's own rows (tests/model).
Where test_core.py has the simple case, the case under overlap is here: two steps in flight, a device that is slower
than the planner, requests that end while their next row runs.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.mock_engine import (
    EOS,
    IMAGE,
    TOKENIZER,
    VOCAB,
    MockModel,
    mock_engine,
    poison_freed,
    random_logits,
    run,
    scripted,
    text_prompt,
)
from torch import Tensor

from deepinfer.config import EngineConfig
from deepinfer.engine.core import Engine
from deepinfer.engine.load import load_engine
from deepinfer.engine.plan import StepPlan
from deepinfer.engine.requests import Prompt
from deepinfer.engine.runner import StepResult
from deepinfer.errors import RequestError
from deepinfer.model.state import StepInputs
from deepinfer.outputs import CompletionOutput, RequestOutput
from deepinfer.params import SamplingParams

OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
SLOW = 0.003  # seconds of a step, several times what it takes to plan one
ROOT = Path(__file__).parents[2]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """Engines over the mock that must end idle; they are closed at the end."""
    made: list[Engine] = []

    def new(model: MockModel | None = None, *, slow: bool = False, **options: Any) -> Engine:
        model = model or MockModel()
        if slow:
            model.before_step = lambda step: time.sleep(SLOW)
        made.append(mock_engine(model, **options))
        return made[-1]

    yield new
    for engine in made:
        engine.check_idle()
        engine.close()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode_ordinary(text)


def serve(engine: Engine, prompts: dict[str, str], **params: Any) -> dict[str, CompletionOutput]:
    """First sample of each."""
    for name, text in prompts.items():
        engine.add_request(text_prompt(text), SamplingParams(**params), name)
    return {name: result.outputs[0] for name, result in run(engine).items()}


# ---- overlap ----


@OVERLAP
@pytest.mark.parametrize(
    "params",
    [{}, {"stop": ["cd"]}, {"stop_token_ids": ids("c")}, {"max_tokens": 2}, {"stop": ["b"], "min_tokens": 3}],
    ids=["EOS", "stop string", "stop token", "max_tokens", "held back"],
)
@pytest.mark.parametrize("logprobs", [1, None])
def test_B03_nothing_follows_the_end(
    make: Callable[..., Engine], overlap: bool, params: dict[str, Any], logprobs: int | None
) -> None:
    """The model goes on after every end, and the row behind the end does run."""
    script = [*ids("abcd"), EOS, *ids("xyz")] if not params.get("min_tokens") else [*ids("abxbcd"), EOS, *ids("y")]
    model = MockModel(scripted({"Q": script, "other": ids("0123456789abc")}))
    engine = make(model, slow=overlap, async_scheduling=overlap)
    chosen = SamplingParams(**{"temperature": 0, "max_tokens": 12, "logprobs": logprobs, **params})
    engine.add_request(text_prompt("Q"), chosen, "Q")
    engine.add_request(text_prompt("other"), SamplingParams(temperature=0, max_tokens=12, logprobs=logprobs), "other")
    results = run(engine)
    output = results["Q"].outputs[0]
    if "max_tokens" in params:
        want, text = ids("ab"), "ab"
    elif "min_tokens" in params:
        want, text = ids("abxb"), "abx"
    elif "stop" in params:
        want, text = ids("abcd"), "ab"
    elif "stop_token_ids" in params:
        want, text = ids("abc"), "ab"
    else:
        want, text = [*ids("abcd"), EOS], "abcd"
    assert (output.token_ids, output.text) == (want, text)
    assert output.finish_reason == ("length" if "max_tokens" in params else "stop")
    assert results["other"].outputs[0].token_ids == ids("0123456789ab")
    if logprobs is not None:
        assert output.logprobs is not None and [next(iter(at)) for at in output.logprobs] == want
        assert output.cumulative_logprob == pytest.approx(
            sum(at[token].logprob for at, token in zip(output.logprobs, want, strict=True))
        )
    ran = sum(int((step.slots == 1).sum()) for step in model.steps)  # slot 1 is Q's
    late = overlap and "max_tokens" not in params  # a length is known when the step is planned
    assert ran == len(TOKENIZER.encode("Q")) + len(want) - 1 + late


def test_B06_freed_pages_are_not_written_by_a_step_in_flight(make: Callable[..., Engine]) -> None:
    """Finishes, aborts and preemptions while a slow step runs; freed memory is NaN at once, and NaN fails the mock."""
    rng = np.random.default_rng(6)
    engine = make(slow=True, num_pages=8, max_num_seqs=4, max_num_batched_tokens=20)
    alone, wanted = make(), {}
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    results: dict[str, RequestOutput] = {}
    fenced = 0
    for i in range(60):
        prompt = Prompt([int(t) for t in rng.integers(3, 200, rng.integers(1, 24))])
        wanted[str(i)] = prompt
        engine.add_request(prompt, params, str(i))
        if i % 4 == 3:
            victim = list(engine.requests.values())[rng.integers(len(engine.requests))]
            engine.abort([victim])
            del wanted[victim.request_id]
        fenced += engine.scheduler.pages.num_fenced > 0
        results |= {result.request_id: result for result in engine.step()}
    results |= run(engine)
    assert engine.metrics.preemptions > 0 and fenced > 5
    assert results.keys() == wanted.keys()
    for name, prompt in wanted.items():
        alone.add_request(prompt, params, name)
        assert run(alone)[name].outputs == results[name].outputs


@OVERLAP
@pytest.mark.parametrize("penalty", [{"repetition_penalty": 5}, {"presence_penalty": 2}, {"frequency_penalty": 2}])
def test_B08_penalties_see_every_token_and_their_own_row_only(
    make: Callable[..., Engine], overlap: bool, penalty: dict[str, float]
) -> None:
    """A model that repeats itself: token k of a penalised request differs from all before it."""

    def repeat(history: list[int]) -> Tensor:
        return torch.arange(VOCAB).flip(0) / 100 + 1

    free = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
    want = [*range(10)]  # best first, each once; 0 is BOS, which the prompt holds
    if "repetition_penalty" in penalty:
        want = [*range(1, 11)]
    small = {"num_pages": 5}
    for options in ({}, small):
        engine = make(MockModel(repeat), async_scheduling=overlap, slow=overlap, **options)
        assert serve(engine, {"alone": "zz"}, **free, **penalty)["alone"].token_ids == want
        for i in range(6):
            chosen = penalty if i % 2 else {}
            engine.add_request(text_prompt("zzzz"), SamplingParams(**free, **chosen), str(i))
        for name, result in run(engine).items():
            assert result.outputs[0].token_ids == (want if int(name) % 2 else [0] * 10), name
    assert engine.metrics.preemptions > 0


@OVERLAP
def test_B09_a_seed_gives_its_tokens_whatever_runs_beside_it(make: Callable[..., Engine], overlap: bool) -> None:
    """Alone, among unseeded neighbours, after preemptions, with n = 4 and as each of the four."""
    seeded = SamplingParams(seed=7, max_tokens=24, ignore_eos=True)
    want = serve(make(async_scheduling=False), {"x": "Q"}, seed=7, max_tokens=24, ignore_eos=True)["x"].token_ids
    engine = make(async_scheduling=overlap, slow=overlap, num_pages=8)
    for i in range(7):
        engine.add_request(text_prompt("Q"), SamplingParams(max_tokens=24, ignore_eos=True), f"n{i}")
    engine.add_request(text_prompt("Q"), seeded.replace(n=4), "four")
    engine.add_request(text_prompt("Q"), seeded, "seeded")
    results = run(engine)
    assert results["seeded"].outputs[0].token_ids == want
    assert results["seeded"].metrics.num_preemptions + results["four"].metrics.num_preemptions > 0
    four = [output.token_ids for output in results["four"].outputs]
    assert four[0] == want and len({tuple(tokens) for tokens in four}) == 4
    roomy = make(async_scheduling=overlap)
    roomy.add_request(text_prompt("Q"), seeded.replace(n=4), "four")
    assert [output.token_ids for output in run(roomy)["four"].outputs] == four


def stream(engine: Engine) -> dict[str, list[int]]:
    """Many short prefills beside two long answers."""
    params = SamplingParams(max_tokens=3, seed=2, ignore_eos=True)
    for i in range(2):
        engine.add_request(text_prompt(f"long {i}"), params.replace(max_tokens=40), f"long{i}")
    for i in range(30):
        engine.add_request(text_prompt(f"{i}"), params, str(i))
    return {name: result.outputs[0].token_ids for name, result in run(engine).items()}


def poison_buffers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow device, and plan buffers that hold -1 from the moment their step is confirmed."""
    runner, true_apply, true_unpack = engine.runner, engine._apply, engine.runner._unpack

    def apply(plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        runner._buffers[plan.step % len(runner._buffers)].fill_(-1)
        return true_apply(plan, result)

    def unpack(plan: StepPlan, buffer: Tensor) -> dict[str, Tensor]:
        time.sleep(SLOW)  # the plan lies there while the host goes on
        return true_unpack(plan, buffer)

    monkeypatch.setattr(engine, "_apply", apply)
    monkeypatch.setattr(runner, "_unpack", unpack)


def test_B10_a_slow_device_never_reads_a_plan_that_was_overwritten(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = stream(make(async_scheduling=False))
    engine = make()
    poison_buffers(engine, monkeypatch)
    assert stream(engine) == want


def test_B10_one_buffer_too_few_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above can fail."""
    engine = mock_engine()
    engine.runner._buffers.pop()
    poison_buffers(engine, monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        assert stream(engine) == stream(mock_engine(async_scheduling=False))
    engine.close()


@OVERLAP
def test_B28_ids_that_enter_the_model_are_in_the_vocabulary(make: Callable[..., Engine], overlap: bool) -> None:
    """Also those of rows that run once more after a stop, an error or an abort."""
    rows: list[tuple[int, int]] = []

    def check(step: StepInputs) -> None:
        assert ((step.ids >= 0) & (step.ids < VOCAB)).all()
        assert ((step.positions >= 0) & (step.slots > 0)).all()
        rows.extend(zip(step.slots.tolist(), step.positions.tolist(), strict=True))
        if overlap:
            time.sleep(SLOW)

    def broken(history: list[int]) -> Tensor:
        logits = random_logits(history)
        if history[:2] == TOKENIZER.encode("b") and len(history) == 6:
            logits[5] = float("nan")
        if history[:2] == TOKENIZER.encode("c") and len(history) == 6:
            logits[EOS] = 99.0
        return logits

    model = MockModel(broken)
    model.before_step = check
    engine = make(model, async_scheduling=overlap)
    for name in "abc":
        engine.add_request(text_prompt(name), SamplingParams(max_tokens=12, seed=0, ignore_eos=name == "a"), name)
    gone = engine.add_request(text_prompt("d"), SamplingParams(max_tokens=12, ignore_eos=True), "gone")
    done = [result for _ in range(7) for result in engine.step()]
    engine.abort([gone])
    results = {result.request_id: result for result in done} | run(engine)
    assert "nan" in str(results["b"].error) and results["c"].outputs[0].finish_reason == "stop"
    assert len(results["a"].outputs[0].token_ids) == 12
    for slot in (2, 3):  # b and c: their last tokens came from position 5; position 6 is the row too many
        assert max(position for at, position in rows if at == slot) == 5 + overlap


# ---- what a request may ask ----


@OVERLAP
@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([*ids("hiE"), 300], "hi"),
        ([*ids("hi"), 301, *ids("D")], "hi"),
        ([*ids("hi"), 302], "hix"),
        ([*ids("hiEND")], "hi"),
    ],
    ids=["E+ND", "EN+D", "xENDy", "E+N+D"],
)
def test_B24_a_stop_string_over_tokens_steps_and_preemptions(
    make: Callable[..., Engine], overlap: bool, tokens: list[int], text: str
) -> None:
    """test_core.py has each split alone; here a recomputation cuts every one of them, and neighbours go on."""
    script = {"Q": [*tokens, *ids("after")], "R": ids("0123456789012345")}
    stop = SamplingParams(temperature=0, max_tokens=16, stop=["END"], logprobs=0)
    for cut in range(1, 8):
        engine = make(MockModel(scripted(script)), slow=overlap, async_scheduling=overlap)
        engine.add_request(text_prompt("R"), stop, "R")
        engine.add_request(text_prompt("Q"), stop, "Q")
        done: list[RequestOutput] = []
        for _ in range(cut):
            done += engine.step()
        running = engine.scheduler.running
        if running and running[-1].request.request_id == "Q":
            engine.scheduler._preempt(running[-1])
        results = {r.request_id: r for r in done} | (run(engine) if engine.has_unfinished else {})
        output = results["Q"].outputs[0]
        assert (output.token_ids, output.text, output.stop_reason) == (tokens, text, "END")
        assert output.logprobs is not None and len(output.logprobs) == len(tokens)
        assert results["R"].outputs[0].text == "0123456789012345"


@OVERLAP
def test_B24_min_tokens_goes_past_a_stop_string(make: Callable[..., Engine], overlap: bool) -> None:
    script = {"Q": [303, *ids("x"), 303, *ids("after")]}
    engine = make(MockModel(scripted(script)), slow=overlap, async_scheduling=overlap)
    output = serve(engine, {"Q": "Q"}, temperature=0, max_tokens=16, stop=["END"], min_tokens=2)["Q"]
    assert (output.token_ids, output.text, output.stop_reason) == ([303, *ids("x"), 303], "ENDx", "END")


def test_B34_a_request_larger_than_the_pool_is_refused_alone(make: Callable[..., Engine]) -> None:
    """While others run; the message names the pages (test_core.py has the other limits)."""
    engine = make(num_pages=6, max_model_len=100)
    params = SamplingParams(max_tokens=10, seed=0, ignore_eos=True)
    for i in range(3):
        engine.add_request(text_prompt(f"small {i}"), params, str(i))
    done = [result for _ in range(3) for result in engine.step()]
    with pytest.raises(RequestError, match=r"needs 8 pages of 8 tokens \(prompt 50, up to 10 new\), the pool has 6"):
        engine.add_request(Prompt([3] * 50), params, "large")
    results = {result.request_id: result for result in done} | run(engine)
    assert sorted(results) == ["0", "1", "2"]
    assert all(len(result.outputs[0].token_ids) == 10 for result in results.values())


# ---- seeds and determinism ----


def test_B48_no_constant_seed_and_no_touch_of_the_callers_generators(make: Callable[..., Engine]) -> None:
    def draws() -> tuple[list[float], float, float]:
        return torch.rand(4).tolist(), random.random(), float(np.random.random())

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    want = draws()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    chosen = {"max_tokens": 12, "ignore_eos": True}
    tokens = [serve(make(), {"x": "Q"}, **chosen)["x"].token_ids for _ in range(2)]
    assert draws() == want
    assert tokens[0] != tokens[1]


def test_B49_order_batch_and_run_do_not_change_greedy_answers(make: Callable[..., Engine]) -> None:
    """32 prompts, shuffled, in batches of 1, 8 and 32, with and without overlap. The mock's answers depend on nothing
    but the memory it reads; test_equality.py asks the same of the models.
    """
    prompts = {str(i): f"prompt {'x' * (i % 7)} {i}" for i in range(32)}
    order = list(prompts)
    seen = []
    for run_number, (batch, overlap) in enumerate([(1, True), (8, True), (32, True), (32, False), (8, True)]):
        engine = make(max_num_seqs=batch, num_pages=100, async_scheduling=overlap)
        random.Random(run_number).shuffle(order)
        outputs = serve(engine, {name: prompts[name] for name in order}, temperature=0, max_tokens=6, ignore_eos=True)
        seen.append({name: output.token_ids for name, output in outputs.items()})
    assert all(one == seen[0] for one in seen)


def tiny(**options: Any) -> Engine:
    engine = load_engine(EngineConfig("tiny", page_size=16, num_pages=30, max_num_seqs=4, **options))
    poison_freed(engine)
    return engine


def test_B49_three_runs_of_one_batch_are_equal_bit_for_bit() -> None:
    """The model as people run it: quantised numerics through the chosen kernels."""
    seen = []
    for _ in range(3):
        engine = tiny()
        for i in range(4):
            prompt = Prompt([3 + (7 * i + 5 * j) % 300 for j in range(10 + 9 * i)])
            engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True), str(i))
        seen.append({name: result.outputs for name, result in run(engine).items()})
        engine.close()
    assert seen[0] == seen[1] == seen[2]


# ---- ids below zero, first calls, chunks ----


def test_B63_nothing_in_slot_zero_or_page_zero_reaches_a_live_row() -> None:
    """Look-back ids of images are -1, rows run again below a hit write to page 0; both beside live rows."""

    def answers(poison: bool) -> list[list[int]]:
        engine = tiny(replay_keep_tokens=16)
        state = engine.runner.state
        by_slot = [*state.window, *state.open_pair.values()]
        for tensor in [*by_slot, *state.latent.values(), *state.index_key.values()] if poison else []:
            tensor[0] = float("nan") if tensor.is_floating_point() else 255
        if poison:
            state.history[0] = -1
        start = [3 + 5 * j % 300 for j in range(48)]
        for i in range(2):  # the second hits what the first left
            for j in range(3):
                prompt = Prompt([*start, *range(10 + j, 20 + 2 * j)])
                params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
                engine.add_request(prompt, params, f"{i}{j}")
            results = run(engine)
            assert all(bool(result.num_cached_tokens) == bool(i) for result in results.values())
        engine.close()
        return [result.outputs[0].token_ids for result in results.values()]

    assert answers(poison=True) == answers(poison=False)


FIRST_CALL = """
import sys
from deepinfer.config import EngineConfig
from deepinfer.engine.load import load_engine
from deepinfer.engine.requests import Prompt
from deepinfer.params import SamplingParams
engine = load_engine(EngineConfig("tiny", page_size=16, num_pages=30, max_num_seqs=4))
def ask():
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine.add_request(Prompt([3 + 11 * i for i in range(int(sys.argv[1]))]), params, "x")
    while engine.has_unfinished:
        for result in engine.step():
            print(result.outputs[0].token_ids)
ask()
ask()
"""


def test_B64_the_first_step_of_a_process_is_like_any_other() -> None:
    """A process whose very first call of each op has 1 row, and one with 13 rows."""
    command = [sys.executable, "-c", FIRST_CALL]
    running = [subprocess.Popen([*command, rows], stdout=subprocess.PIPE, text=True, cwd=ROOT) for rows in ("1", "13")]
    for process in running:
        first, again = process.communicate(timeout=120)[0].splitlines()
        assert process.returncode == 0 and first == again


@OVERLAP
def test_B70_a_step_has_as_many_rows_as_the_option_says(make: Callable[..., Engine], overlap: bool) -> None:
    """Decode rows count, and the prompt's chunk takes exactly what they leave, until the prompt ends."""
    model = MockModel()
    engine = make(model, max_num_batched_tokens=16, async_scheduling=overlap)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for i in range(3):
        engine.add_request(text_prompt(f"{i}"), params, str(i))
    done = [result for _ in range(4) for result in engine.step()]
    before = len(model.steps)
    engine.add_request(Prompt([5] * 100), SamplingParams(max_tokens=2, ignore_eos=True), "long")
    run(engine)
    assert not done
    sizes = [len(step.ids) for step in model.steps]
    chunks = [int((step.slots == 4).sum()) for step in model.steps]
    assert max(sizes) == engine.metrics.max_step_rows == 16
    prefill = [chunk for chunk in chunks if chunk > 1]
    assert prefill == [13] * 7 + [9]
    assert sum(chunks) == 100 + 1 and before <= 5
    assert IMAGE not in model.steps[-1].ids
