"""`LLM` as people use it: over the mock for every rule of the API, over tiny for the whole path."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from engine.mock_engine import CONFIG, EOS, IMAGE, TOKENIZER, MockModel, poison_freed, scripted
from PIL import Image

from deepinfer import (
    LLM,
    ConfigError,
    EngineError,
    RequestError,
    RequestOutput,
    SamplingParams,
    UnsupportedError,
)
from deepinfer.config import EngineConfig
from deepinfer.engine import load as load_room
from deepinfer.engine.core import Engine

TOLERANCE = {"prompt logprob, chunked against whole": 2e-4}  # nats; float32 sums in another order
IMAGE_TEXT = "<｜deepseek_image｜>"
QUICK = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)


def ids_of(items: list[RequestOutput]) -> list[int]:
    return [token for item in items for token in item.outputs[0].token_ids]


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """LLMs over the mock model; each must end idle."""
    made: list[LLM] = []

    def make(model: MockModel | None = None, defaults: SamplingParams | None = None, **options: Any) -> LLM:
        def load(config: EngineConfig) -> Engine:
            engine = Engine(config, CONFIG, model or MockModel(), TOKENIZER, defaults)
            poison_freed(engine)
            return engine

        monkeypatch.setattr("deepinfer.llm.load_engine", load)
        chosen = {"num_pages": 40, "page_size": 8, "max_num_seqs": 4, **options}
        made.append(LLM("mock", numerics="exact", **chosen))
        return made[-1]

    yield make
    for llm in made:
        if llm._engine is not None:
            llm.engine.check_idle()


# ---- prompts, params, results ----


def test_every_form_of_prompt_and_the_order_of_results(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    ids = TOKENIZER.encode("same")
    forms: list[Any] = ["same", ids, tuple(ids), {"prompt": "same"}, {"prompt_token_ids": ids}]
    results = llm.generate(forms, QUICK, use_tqdm=False)
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == 1
    assert [r.prompt for r in results] == ["same", None, None, "same", None]
    assert all(r.prompt_token_ids == ids and r.finished and r.error is None for r in results)
    long_first = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    results = llm.generate(["a", "b", "c"], long_first, use_tqdm=False)
    assert [(r.prompt, len(r.outputs[0].token_ids)) for r in results] == [("a", 9), ("b", 1), ("c", 5)]


def test_one_prompt_gives_a_list_of_one(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    for prompt in ("text", [5, 6, 7], {"prompt": "text"}):
        assert len(llm.generate(prompt, QUICK, use_tqdm=False)) == 1


def test_B02_no_prompts_give_no_results(make_llm: Callable[..., LLM]) -> None:
    assert make_llm().generate([], use_tqdm=False) == []
    assert make_llm().generate([], [], use_tqdm=False) == []
    assert make_llm().chat([], use_tqdm=False) == []


def test_B02_params_of_another_length_name_both(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(RequestError, match="4 prompts but 3 sampling_params"):
        make_llm().generate(["a", "b", "c", "d"], [QUICK] * 3)
    with pytest.raises(RequestError, match="0 prompts but 1 sampling_params"):
        make_llm().generate([], [QUICK])
    with pytest.raises(RequestError, match="sampling_params 1 is dict"):
        make_llm().generate(["a", "b"], [QUICK, {"max_tokens": 3}])
    for params in ({"max_tokens": 3}, 5, "x"):  # iterating over these would blame the wrong thing
        with pytest.raises(RequestError, match=f"not {type(params).__name__}"):
            make_llm().generate("a", params)
    with pytest.raises(RequestError, match=r"messages must be a list .* not str"):
        make_llm().chat("Hello")  # a person's first try


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([[3, 4], [3, 600]], "prompt 1 of 2: token id 600 at position 1"),
        ([3, "x"], "position 1 holds 'x'"),
        ([[3, 1.5]], "position 1 holds 1.5"),
        ([True], "text, token ids or a dict, not bool"),
        (7, "not int"),
        ({"text": "x"}, "unknown keys .'text'."),
        ({"prompt": "x", "prompt_token_ids": [3]}, "exactly one of"),
        ({"multi_modal_data": {"image": "x.png"}}, "exactly one of"),
        ({"prompt": 5}, "prompt must be text, not int"),
        ({"prompt_token_ids": "abc"}, "must be a list of integers, not str"),
        ({"prompt": "x", "multi_modal_data": {"video": 1}}, "multi_modal_data must be"),
        ({"prompt": "x", "multi_modal_data": {"image": "/no/such.png"}}, "such.png"),
        ({"prompt": "x", "multi_modal_data": {"image": b"GIF89a broken"}}, "image"),
        ([3, IMAGE], "1 image tokens .* 0 images"),
    ],
)
def test_a_prompt_that_is_none(make_llm: Callable[..., LLM], prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        make_llm().generate(prompt, QUICK)
    assert "prompt" in str(error.value)


def test_B01_one_bad_prompt_stops_the_call_before_anything_is_queued(make_llm: Callable[..., LLM]) -> None:
    model = MockModel()
    llm = make_llm(model, max_model_len=30)
    prompts = ["ok"] * 4 + ["x" * 60] + ["ok"] * 3
    with pytest.raises(RequestError, match=r"prompt 4 of 8: the prompt has 61 tokens .* max_model_len is 30"):
        llm.generate(prompts, QUICK)
    assert not model.steps
    llm.engine.check_idle()
    results = llm.generate(["a", "b"], QUICK, use_tqdm=False)
    assert [r.prompt for r in results] == ["a", "b"]


def test_B02_max_tokens_zero_is_refused() -> None:
    with pytest.raises(RequestError, match="max_tokens is 0"):
        SamplingParams(max_tokens=0)


def test_B75_the_context_is_a_limit_and_the_size_of_a_step_is_none(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_model_len=30, max_num_batched_tokens=4)
    with pytest.raises(RequestError, match=r"prompt 0 of 1: the prompt has 31 tokens .* max_model_len is 30"):
        llm.generate("x" * 30, QUICK)
    (result,) = llm.generate("x" * 20, QUICK, use_tqdm=False)  # five times as long as a step is wide
    assert len(result.outputs[0].token_ids) == 4 and llm.engine.metrics.max_step_rows == 4


def test_a_request_larger_than_the_pool_names_pages(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_pages=3, max_model_len=100)
    with pytest.raises(RequestError, match=r"prompt 1 of 2: the request needs 6 pages .* the pool has 3"):
        llm.generate(["small", "x" * 40], QUICK)
    assert len(llm.generate(["small"], QUICK, use_tqdm=False)) == 1


def test_structured_output_says_that_it_is_not_served_yet(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(UnsupportedError, match=r"prompt 0 of 1: .*so_args"):
        make_llm().generate("x", SamplingParams(so_args={"regex": "a+"}))


def test_without_params_the_checkpoint_decides(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(defaults=SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert len(llm.generate("x", use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_B48_the_callers_random_state_is_left_alone(make_llm: Callable[..., LLM]) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_llm().generate(["a", "b"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert torch.equal(torch.rand(3), expected)


def test_B48_engines_without_a_seed_differ(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def ids(**options: Any) -> list[int]:
        return ids_of(make_llm(**options).generate("x", params, use_tqdm=False))

    assert ids() != ids()
    assert ids(seed=3) == ids(seed=3)


# ---- priorities, enqueue, wait ----


def finishing_order(results: list[RequestOutput]) -> list[int]:
    def end(index: int) -> float:
        metrics = results[index].metrics
        assert metrics is not None and metrics.finished_s is not None
        return metrics.finished_s

    return sorted(range(len(results)), key=end)


def test_lower_priorities_run_first_and_results_keep_their_order(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=1)
    results = llm.generate(["a", "b", "c", "d"], QUICK, priority=[2, 0, -1, 0], use_tqdm=False)
    assert [r.prompt for r in results] == ["a", "b", "c", "d"]
    assert finishing_order(results) == [2, 1, 3, 0]
    results = llm.generate(["a", "b"], QUICK, priority=7, use_tqdm=False)
    assert finishing_order(results) == [0, 1]


def test_priorities_are_checked(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    for call in (llm.generate, llm.enqueue):
        with pytest.raises(RequestError, match="2 prompts but 3 priorities"):
            call(["a", "b"], QUICK, priority=[1, 2, 3])
        for bad in ("high", 1.5, None, True, [0, "x"]):
            with pytest.raises(RequestError, match="a priority is an integer, lower ones run earlier"):
                call(["a", "b"], QUICK, priority=bad)
    with pytest.raises(RequestError, match="a priority is an integer"):
        llm.generate([], priority="high")
    with pytest.raises(RequestError, match="a priority is an integer"):
        llm.stream("a", priority=0.5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="1 conversations but 2 priorities"):
        llm.chat([{"role": "user", "content": "x"}], priority=[1, 2])


def test_enqueued_prompts_wait_until_they_are_waited_for(make_llm: Callable[..., LLM]) -> None:
    model = MockModel()
    llm = make_llm(model)
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (9, 1, 5)]
    expected = [r.outputs for r in llm.generate(["a", "b", "c"], params, use_tqdm=False)]
    model.steps.clear()
    ids = llm.enqueue(["a", "b", "c"], params)
    assert len(set(ids)) == 3 and not model.steps
    results = llm.wait(use_tqdm=False)
    assert [r.request_id for r in results] == ids and [r.outputs for r in results] == expected
    assert llm.wait() == [] and llm.enqueue([]) == []


def test_wait_gives_the_order_asked_and_each_result_once(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    a, b, c, d = llm.enqueue(["a", "b", "c", "d"], QUICK)
    assert [r.prompt for r in llm.wait([c, a], use_tqdm=False)] == ["c", "a"]
    assert [r.prompt for r in llm.wait(b, use_tqdm=False)] == ["b"]
    with pytest.raises(RequestError, match=f"'{c}', 'nobody' are unknown or were collected already"):
        llm.wait([d, c, "nobody"])
    with pytest.raises(RequestError, match=f"'{d}' are given twice"):
        llm.wait([d, d])
    assert [r.prompt for r in llm.wait(use_tqdm=False)] == ["d"]  # the failed calls took nothing


def test_a_bad_prompt_keeps_all_of_its_call_out_of_the_queue(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    (good,) = llm.enqueue("good", QUICK)
    with pytest.raises(RequestError, match="prompt 1 of 2: the prompt is empty"):
        llm.enqueue(["fine", ""], QUICK)
    assert [r.request_id for r in llm.wait(use_tqdm=False)] == [good]


def test_generate_between_enqueue_and_wait_minds_its_own(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    short, long = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 30)]
    ids = llm.enqueue(["quick", "slow"], [short, long])
    (own,) = llm.generate("between", SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert own.prompt == "between"
    assert [item.prompt for item in llm.stream("stream", QUICK)][-1] == "stream"
    results = llm.wait(use_tqdm=False)
    assert [r.request_id for r in results] == ids
    assert [len(r.outputs[0].token_ids) for r in results] == [1, 30]


def test_ctrl_c_in_wait_loses_nothing(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_pages=7, max_num_batched_tokens=12)
    prompts = ["first", "second prompt", "third"]
    params = SamplingParams(max_tokens=8, n=2, seed=1, ignore_eos=True, logprobs=1, stop=["zqz"], min_tokens=2)
    expected = [r.outputs for r in llm.generate(prompts, params, use_tqdm=False)]
    llm.enqueue(prompts, params)
    total = lines_of(lambda: llm.wait(use_tqdm=False))
    for at in range(1, total, total // 80):
        ids = llm.enqueue(prompts, params)
        assert interrupted(at, lambda: llm.wait(use_tqdm=False)) or at > 0.8 * total
        if llm._queued:
            assert [r.outputs for r in llm.wait(ids, use_tqdm=False)] == expected, f"interrupted at line {at}"
        else:  # everything was collected before
            assert at > 0.8 * total
        llm.engine.check_idle()


def test_ctrl_c_in_enqueue_queues_nothing(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    total = lines_of(lambda: llm.enqueue(["a", "b"], QUICK))
    llm.wait(use_tqdm=False)
    for at in range(1, total, 7):
        assert interrupted(at, lambda: llm.enqueue(["a", "b"], QUICK))
        llm.engine.check_idle()
        assert llm.wait() == []


def test_an_aborted_request_is_collected_with_what_it_had(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=30, seed=2, ignore_eos=True)
    ids = llm.enqueue(["a", "b", "c"], params)
    whole = llm.generate(["a"], params.replace(max_tokens=5), use_tqdm=False)[0].outputs[0].token_ids
    llm.abort(ids[0])
    llm.abort([ids[1], "nobody"])
    a, b, c = llm.wait(use_tqdm=False)
    assert [r.outputs[0].finish_reason for r in (a, b, c)] == ["abort", "abort", "length"]
    assert a.finished and a.outputs[0].token_ids[:4] == whole[:4] and len(c.outputs[0].token_ids) == 30
    llm.abort(ids)  # collected: nothing to do


def test_the_prefix_cache_can_be_forgotten(make_llm: Callable[..., LLM]) -> None:
    assert make_llm(enable_prefix_caching=True).reset_prefix_cache()
    assert not make_llm(enable_prefix_caching=False).reset_prefix_cache()


# ---- progress ----


class Bar:
    """Stands in for tqdm and remembers."""

    made: list[Bar]

    def __init__(self, **options: Any) -> None:
        self.options, self.count, self.texts = options, 0, []
        Bar.made.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None: ...

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.texts.append(text)

    def update(self, count: int) -> None:
        self.count += count


def test_B36_the_bar_counts_prompts_not_samples(make_llm: Callable[..., LLM]) -> None:
    Bar.made = []
    make_llm().generate(["a", "b", "c", "d"], SamplingParams(n=3, max_tokens=4), use_tqdm=Bar)
    (bar,) = Bar.made
    assert (bar.options["total"], bar.count) == (4, 4)
    numbers = [int(word) for word in bar.texts[-1].replace(",", "").split() if word.isdigit()]
    assert len(numbers) == 2 and min(numbers) > 0 and bar.texts[-1].endswith("tok/s")


def test_use_tqdm_true_draws_on_stderr_and_false_does_not(
    make_llm: Callable[..., LLM], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = make_llm()
    llm.generate("a", QUICK, use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate("a", QUICK)
    assert "1/1" in capsys.readouterr().err


# ---- interrupts and life ----


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line that runs in the engine's own files."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in ("deepinfer/engine", "deepinfer/cache", "deepinfer/llm")):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def lines_of(call: Callable[[], object]) -> int:
    """How many lines `call` runs in the engine's own files; it varies a little with what the caches hold."""
    counter = Interrupter(-1)
    sys.settrace(counter)
    try:
        call()
    finally:
        sys.settrace(None)
    return -1 - counter.left


def interrupted(at: int, call: Callable[[], object]) -> bool:
    """Run `call` with Ctrl-C at its n-th line; False when it ended before."""
    sys.settrace(Interrupter(at))
    try:
        call()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)


def test_B73_ctrl_c_at_any_line_leaves_a_usable_engine(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_pages=7, max_num_batched_tokens=12)
    prompts, params = (
        ["first", "second prompt", "third"],
        SamplingParams(max_tokens=12, n=2, seed=1, ignore_eos=True),
    )
    expected = [r.outputs for r in llm.generate(prompts, params, use_tqdm=False)]
    total = lines_of(lambda: llm.generate(prompts, params, use_tqdm=False))
    for at in range(1, total, total // 60):
        assert interrupted(at, lambda: llm.generate(prompts, params, use_tqdm=False)) or at > 0.8 * total
        llm.engine.check_idle()
        (result,) = llm.generate(prompts[:1], params, use_tqdm=False)
        assert result.outputs == expected[0], f"interrupted at line {at}"


def test_an_interrupt_spares_a_stream_that_is_open(make_llm: Callable[..., LLM]) -> None:
    model = MockModel()
    llm = make_llm(model)
    params = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
    expected = llm.generate("stream", params, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream("stream", params)
    got = next(stream).outputs[0].token_ids

    def interrupt(step: Any) -> None:
        if len(step.ids) > 5:
            raise KeyboardInterrupt

    model.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a long prompt", params, use_tqdm=False)
    model.before_step = lambda step: None
    for delta in stream:
        got += delta.outputs[0].token_ids
    assert got == expected


def test_close_and_use_after_close(make_llm: Callable[..., LLM]) -> None:
    with make_llm() as llm:
        stream = llm.stream("x", QUICK)
        next(stream)
    llm.close()
    llm.close()
    for use in (
        lambda: llm.generate("x"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.engine,
        lambda: llm.enqueue("x"),
        lambda: llm.wait(),
        lambda: llm.abort("x"),
        lambda: llm.get_metrics(),
    ):
        with pytest.raises(EngineError, match="this LLM is closed; make a new one"):
            use()
    assert [item.outputs[0].finish_reason for item in stream] == ["abort"]


def test_unknown_options_are_listed() -> None:
    with pytest.raises(ConfigError, match="max_num_sequences"):
        LLM("tiny", max_num_sequences=3)
    with pytest.raises(ConfigError, match=r"neither a folder nor a known name: .*tiny"):
        LLM("no-such-model")


# ---- streaming ----


def test_a_stream_gives_deltas_that_add_up(make_llm: Callable[..., LLM]) -> None:
    tokens = TOKENIZER.encode_ordinary("a🚀 done")
    llm = make_llm(MockModel(scripted({"Q": tokens})))
    items = list(llm.stream("Q", SamplingParams(temperature=0, max_tokens=30)))
    assert "".join(item.outputs[0].text for item in items) == "a🚀 done"
    assert ids_of(items) == [*tokens, EOS]
    assert [item.finished for item in items] == [False] * (len(items) - 1) + [True]


def test_a_stream_left_early_is_aborted(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    for _ in llm.stream("Q", SamplingParams(max_tokens=30, ignore_eos=True)):
        break
    llm.engine.check_idle()


def test_generate_inside_a_stream_loop(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    expected = llm.generate("outer", params, use_tqdm=False)[0].outputs[0].token_ids
    got: list[int] = []
    for item in llm.stream("outer", params):
        got += item.outputs[0].token_ids
        if len(got) == 2:
            assert len(llm.generate(["inner"], QUICK, use_tqdm=False)) == 1
    assert got == expected


def test_a_stream_that_ends_inside_a_generate(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    stream = llm.stream("outer", SamplingParams(max_tokens=3, ignore_eos=True))
    items = [next(stream)]
    llm.generate("inner", SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
    items += stream
    assert [len(item.outputs[0].token_ids) for item in items] == [1, 2] and items[-1].finished


def test_a_stream_validates_at_once(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(RequestError, match="empty"):
        make_llm().stream("")
    with pytest.raises(RequestError, match="thinking are for conversations"):
        make_llm().stream("x", thinking=True)


# ---- the tiny checkpoint ----


@pytest.fixture(scope="module")
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_CACHE_ROOT", str(root))
        yield root


@pytest.fixture(scope="module")
def tiny(cache_root: Path) -> Iterator[LLM]:
    with LLM("tiny", numerics="exact", num_pages=16, max_num_seqs=4, page_size=16) as llm:
        poison_freed(llm.engine)
        yield llm


@pytest.fixture(autouse=True)
def tiny_is_idle(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "tiny" in request.fixturenames:
        request.getfixturevalue("tiny").engine.check_idle()


def test_a_named_model_is_written_once(tiny: LLM, cache_root: Path) -> None:
    (folder,) = (cache_root / "checkpoints").iterdir()
    assert folder.name.startswith("tiny-") and (folder / "tokenizer.json").is_file()
    before = folder.stat().st_mtime_ns
    assert load_room.checkpoint_folder("tiny") == folder
    assert folder.stat().st_mtime_ns == before
    assert load_room.checkpoint_folder(str(folder)) == folder


def test_processes_that_write_the_same_checkpoint_agree_on_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_ROOT", str(tmp_path))

    def make(name: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("mine")
        other = tmp_path / "checkpoints" / f"tiny-{load_room._generator_digest()}"
        other.mkdir()
        (other / "config.json").write_text("theirs, earlier")

    monkeypatch.setattr(load_room.synthetic, "make_checkpoint", make)
    folder = load_room.checkpoint_folder("tiny")
    assert (folder / "config.json").read_text() == "theirs, earlier"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_ROOT", str(tmp_path))

    def fail(name: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(load_room.synthetic, "make_checkpoint", fail)
    with pytest.raises(OSError, match="No space left"):
        load_room.checkpoint_folder("tiny")
    assert not list((tmp_path / "checkpoints").iterdir())


def test_batch_chunks_and_preemption_give_the_same_ids(tiny: LLM) -> None:
    prompts = ["Hello world", "你好，世界", "def f(x):\n    return x", [7, 8, 9] * 8]
    params = [SamplingParams(max_tokens=16, seed=i, temperature=float(i % 2), ignore_eos=True) for i in range(4)]
    together = tiny.generate(prompts, params, use_tqdm=False)
    with LLM("tiny", numerics="exact", num_pages=10, max_num_seqs=4, max_num_batched_tokens=11, page_size=8) as small:
        poison_freed(small.engine)
        chunked = small.generate(prompts, params, use_tqdm=False)
        small.engine.check_idle()
        assert small.engine.metrics.preemptions > 0
        assert small.engine.metrics.max_step_rows <= 11
    for prompt, chosen, a, b in zip(prompts, params, together, chunked, strict=True):
        (alone,) = tiny.generate([prompt], chosen, use_tqdm=False)
        assert alone.outputs[0].token_ids == a.outputs[0].token_ids == b.outputs[0].token_ids
        assert alone.outputs[0].text == a.outputs[0].text


def test_compact_and_mask_replay_agree(tiny: LLM, cache_root: Path) -> None:
    prompt, params = [7, 8, 9, 30] * 20, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    (compact,) = tiny.generate([prompt], params, use_tqdm=False)
    with LLM("tiny", numerics="exact", num_pages=16, page_size=16, replay="mask") as masked:
        (mask,) = masked.generate([prompt], params, use_tqdm=False)
    assert mask.outputs[0].token_ids == compact.outputs[0].token_ids


def test_prompt_logprobs_do_not_depend_on_chunks(tiny: LLM, cache_root: Path) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, seed=0)
    (whole,) = tiny.generate([[7, 8, 9, 30] * 12], params, use_tqdm=False)
    with LLM("tiny", numerics="exact", num_pages=16, max_num_seqs=2, max_num_batched_tokens=7) as small:
        (chunked,) = small.generate([[7, 8, 9, 30] * 12], params, use_tqdm=False)
    assert whole.prompt_logprobs is not None and chunked.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == len(chunked.prompt_logprobs) == 48
    for a, b, token in zip(
        whole.prompt_logprobs[1:], chunked.prompt_logprobs[1:], ([7, 8, 9, 30] * 12)[1:], strict=True
    ):
        assert a is not None and b is not None
        limit = TOLERANCE["prompt logprob, chunked against whole"]
        assert a[token].logprob == pytest.approx(b[token].logprob, abs=limit)


def test_images_in_prompts_and_chats(tiny: LLM, tmp_path: Path) -> None:
    red, blue = Image.new("RGB", (90, 70), (200, 10, 10)), Image.new("RGB", (70, 90), (10, 10, 200))
    red.save(tmp_path / "red.png")
    params = SamplingParams(max_tokens=6, temperature=0)

    def ask(image: Any) -> Any:
        prompt = {"prompt": f"Look {IMAGE_TEXT} what is it?", "multi_modal_data": {"image": image}}
        return tiny.generate(prompt, params, use_tqdm=False)[0]

    first = ask(red)
    span = first.prompt_token_ids.count(IMAGE)
    assert span > 5
    assert ask([str(tmp_path / "red.png")]).outputs[0].token_ids == first.outputs[0].token_ids
    assert ask(blue).outputs[0].token_ids != first.outputs[0].token_ids
    content = [
        {"type": "image_url", "image_url": {"url": str(tmp_path / "red.png")}},
        {"type": "text", "text": "?"},
    ]
    (answer,) = tiny.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    assert answer.prompt_token_ids.count(IMAGE) == span


def test_image_spans_cross_chunks(tiny: LLM, cache_root: Path) -> None:
    image = Image.new("RGB", (90, 70), (200, 10, 10))
    prompt = {"prompt": f"Look {IMAGE_TEXT} and {IMAGE_TEXT}?", "multi_modal_data": {"image": [image, image]}}
    params = SamplingParams(max_tokens=6, temperature=0)
    (whole,) = tiny.generate(prompt, params, use_tqdm=False)
    with LLM("tiny", numerics="exact", num_pages=4, max_num_seqs=2, max_num_batched_tokens=5) as small:
        (chunked,) = small.generate(prompt, params, use_tqdm=False)
    assert chunked.outputs[0].token_ids == whole.outputs[0].token_ids


def test_B72_chat_takes_one_or_many_conversations_each_with_one_bos(tiny: LLM) -> None:
    hello, bye = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]
    params = SamplingParams(max_tokens=5, temperature=0)
    (single,) = tiny.chat(hello, params, thinking=False, use_tqdm=False)
    both = tiny.chat([bye, hello], params, thinking=False, use_tqdm=False)
    assert both[1].outputs[0].token_ids == single.outputs[0].token_ids
    bos = tiny.engine.model_config.bos_token_id
    assert single.prompt_token_ids.count(bos) == 1
    assert "hello" in str(single.prompt) and str(single.prompt).endswith("</think>")
    streamed = list(tiny.stream(hello, params, thinking=False))
    assert ids_of(streamed) == single.outputs[0].token_ids
    with pytest.raises(RequestError, match=r"conversation 1 of 2: .*messages"):
        tiny.chat([hello, [{"role": "user"}, 5]], params)
    assert not tiny.engine.has_unfinished  # B01: nothing of the call is left in the queue


def test_quantised_numerics_and_poisoned_codes(cache_root: Path) -> None:
    with LLM("tiny", num_pages=6, max_num_seqs=3, page_size=16, max_num_batched_tokens=16) as llm:
        poison_freed(llm.engine)
        params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
        results = llm.generate(["Hello world", "one two three", "x"] * 2, params, use_tqdm=False)
        assert all(r.error is None and len(r.outputs[0].token_ids) == 20 for r in results)
        llm.engine.check_idle()


def test_start_up_logs_every_byte(cache_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "deepinfer"), LLM("tiny", num_pages=4) as llm:
        state = llm.engine.runner.state
        for group in state.groups():
            assert f"cache: {group}" in caplog.text
        assert "of weights, ready in" in caplog.text
        assert llm.load_s > 0


def test_prompts_share_the_prefix_cache_within_a_salt_only() -> None:
    ids = [3 + (7 * i) % 400 for i in range(700)]
    with LLM("tiny", max_model_len=1024) as llm:
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        asked = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("a", "a", "b")]
        cached = [llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens for prompt in asked]
        assert cached == [0, 640, 0]
        with pytest.raises(RequestError, match="cache_salt must be text, not int"):
            llm.generate({"prompt": "x", "cache_salt": 3}, params)
