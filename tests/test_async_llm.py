"""`AsyncLLM` over the mock: what readers see, whatever they do, and that the engine ends idle every time."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from engine.mock_engine import CONFIG, EOS, TOKENIZER, MockModel, poison_freed, scripted

from deepinfer import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineError,
    RequestError,
    RequestOutput,
    SamplingParams,
    async_llm,
)
from deepinfer.config import EngineConfig
from deepinfer.engine.core import Engine
from deepinfer.outputs import CompletionOutput

LONG = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
QUICK = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
LIMIT_S = 60  # of anything that could hang

Use = Callable[[AsyncLLM], Awaitable[None]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a coroutine with an AsyncLLM over the mock, which must be idle after it."""

    def run(use: Use, model: MockModel | None = None, **options: Any) -> None:
        def load(config: EngineConfig) -> Engine:
            engine = Engine(config, CONFIG, model or MockModel(), TOKENIZER)
            poison_freed(engine)
            return engine

        monkeypatch.setattr("deepinfer.llm.load_engine", load)
        chosen = {"num_pages": 40, "page_size": 8, "max_num_seqs": 4, **options}

        async def main() -> None:
            async with AsyncLLM("mock", numerics="exact", **chosen) as llm:
                await use(llm)
                await llm.drain()
                await llm._call(lambda inner: inner.engine.check_idle())
                assert not llm._serving and not llm._live and not llm._outbox

        asyncio.run(asyncio.wait_for(main(), LIMIT_S))
        assert not engine_threads()

    return run


def engine_threads() -> list[threading.Thread]:
    """Those that do not end by themselves."""
    threads = [thread for thread in threading.enumerate() if thread.name == "deepinfer-engine"]
    for thread in threads:
        thread.join(5)
    return [thread for thread in threads if thread.is_alive()]


async def read(items: AsyncGenerator[RequestOutput]) -> list[RequestOutput]:
    return [item async for item in items]


def ids_of(items: list[RequestOutput], index: int = 0) -> list[int]:
    return [token for item in items for token in item.outputs[index].token_ids]


def text_of(items: list[RequestOutput]) -> str:
    return "".join(item.outputs[0].text for item in items)


async def alone(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> CompletionOutput:
    (result,) = await read(llm.generate(prompt, params, delta=False))
    return result.outputs[0]


# ---- what a reader sees ----


def test_deltas_add_up_to_the_whole(serve: Callable[..., None]) -> None:
    tokens = TOKENIZER.encode_ordinary("a🚀 done")

    async def use(llm: AsyncLLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=30, logprobs=1)
        items = await read(llm.generate("Q", params))
        assert text_of(items) == "a🚀 done" and ids_of(items) == [*tokens, EOS]
        assert [item.finished for item in items] == [False] * (len(items) - 1) + [True]
        assert all(item.finished or ids_of([item]) for item in items)
        assert [next(iter(at)) for item in items for at in item.outputs[0].logprobs or ()] == [*tokens, EOS]
        (whole,) = await read(llm.generate("Q", params, delta=False))
        assert whole.outputs[0].token_ids == [*tokens, EOS] and whole.outputs[0].text == "a🚀 done"
        assert whole.finished and whole.prompt == "Q"
        assert whole.metrics is not None and whole.metrics.tpot_s is not None

    serve(use, MockModel(scripted({"Q": tokens})))


def test_many_at_once_are_what_each_is_alone(serve: Callable[..., None]) -> None:
    params = [SamplingParams(max_tokens=1 + i % 7, seed=i, ignore_eos=True, n=1 + i % 2) for i in range(20)]

    async def use(llm: AsyncLLM) -> None:
        expected = [(await read(llm.generate(f"p{i}", params[i], delta=False)))[0].outputs for i in range(20)]
        got = await asyncio.gather(*(read(llm.generate(f"p{i % 20}", params[i % 20])) for i in range(400)))
        for i, items in enumerate(got):
            for index, one in enumerate(expected[i % 20]):
                assert ids_of(items, index) == one.token_ids
                assert items[-1].outputs[index].finish_reason == one.finish_reason
        assert llm.get_metrics().finished["length"] == 420

    serve(use)


def test_two_tokens_of_one_step_arrive_in_order(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        expected = (await alone(llm, "x", LONG)).token_ids
        engine = llm.llm.engine
        step = engine.step
        engine.step = lambda: [*step(), *step()]  # type: ignore[method-assign]
        items = await read(llm.generate("x", LONG))
        assert ids_of(items) == expected
        assert max(len(ids_of([item])) for item in items) >= 2

    serve(use)


def test_priorities_and_parameters_reach_the_engine(serve: Callable[..., None]) -> None:
    order: list[str] = []

    async def ask(llm: AsyncLLM, name: str, priority: int) -> None:
        await read(llm.generate(name, LONG, priority=priority, delta=False))
        order.append(name)

    async def use(llm: AsyncLLM) -> None:
        first = asyncio.create_task(read(llm.generate("first", LONG)))
        await asyncio.sleep(0.01)
        await asyncio.gather(ask(llm, "late", 5), ask(llm, "early", -5), ask(llm, "middle", 0), first)
        assert order == ["early", "middle", "late"]
        defaults = await alone(llm, "x", llm.llm.default_params.replace(seed=3))
        assert len(defaults.token_ids) == llm.llm.default_params.max_tokens

    serve(use, max_num_seqs=1)


def test_arrival_is_when_the_caller_asked(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        begin = time.monotonic()
        release = threading.Event()
        llm._preparing.submit(release.wait)  # another prompt is being prepared
        task = asyncio.create_task(read(llm.generate("x", QUICK, delta=False)))
        await asyncio.sleep(0.05)
        release.set()
        ((result,),) = await asyncio.gather(task)
        assert result.metrics is not None
        assert begin <= result.metrics.arrival_s < begin + 0.05 < begin + (result.metrics.ttft_s or 0)

    serve(use)


# ---- readers that leave ----


def test_leaving_the_loop_aborts(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        async for _ in llm.generate("x", LONG):
            break
        async with aclosing(llm.generate("y", LONG)) as items:
            await anext(items)
        await llm.drain()
        while llm.get_metrics().finished["abort"] < 2:  # the first generator is closed by the event loop, soon
            await asyncio.sleep(0.001)

    serve(use)


def test_cancelling_aborts_wherever_the_request_is(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        for turns in (0, 1, 2, 3, 5, 8, 20, 50):
            tasks = [asyncio.create_task(read(llm.generate("x" * 9, LONG))) for _ in range(9)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(error, asyncio.CancelledError) for error in done)
        assert (await alone(llm, "x", QUICK)).token_ids

    serve(use)


def test_abort_ends_the_generator_with_what_it_has(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        expected = (await alone(llm, "x", LONG)).token_ids
        items = llm.generate("x", LONG.replace(max_tokens=100), "mine")
        got = [await anext(items)]
        assert got[0].request_id == "mine"
        llm.abort("mine")
        llm.abort("nobody")
        got += await read(items)
        assert got[-1].finished and got[-1].outputs[0].finish_reason == "abort"
        assert ids_of(got)[: len(expected)] == expected[: len(ids_of(got))]
        llm.abort("mine")

    serve(use)


def test_abort_before_the_request_reaches_the_engine(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        release = threading.Event()
        llm._preparing.submit(release.wait)
        task = asyncio.create_task(read(llm.generate("x", LONG, "mine", delta=False)))
        await asyncio.sleep(0.01)
        llm.abort("mine")
        release.set()
        (result,) = await task
        assert result.finished and result.outputs[0].finish_reason == "abort" and not result.outputs[0].token_ids

    serve(use)


# ---- errors ----


def test_errors_of_a_request_concern_its_caller_only(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        open_one = llm.generate("x", LONG, "taken")
        got = [await anext(open_one)]
        for prompt, options, message in [
            ("", {}, "the prompt is empty"),
            ([3, 9999], {}, "token id 9999 at position 1"),
            ("x" * 500, {}, "max_model_len is 200"),
            ("x", {"sampling_params": {"max_tokens": 3}}, "must be SamplingParams"),
            ("x", {"sampling_params": SamplingParams(stop_token_ids=[9999])}, "9999"),
            ("x", {"priority": "high"}, "a priority is an integer"),
            ("x", {"request_id": "taken"}, "request id 'taken' is in use"),
        ]:
            with pytest.raises(RequestError, match=message):
                await read(llm.generate(prompt, **options))
        with pytest.raises(RequestError):
            await read(llm.chat("Hello"))  # type: ignore[arg-type]
        got += await read(open_one)
        assert len(ids_of(got)) == 60
        assert ids_of(await read(llm.generate("x", LONG, "taken"))) == ids_of(got)  # the id is free again

    serve(use, max_model_len=200)


def test_a_step_that_fails_reaches_every_open_generator_and_the_next_works(serve: Callable[..., None]) -> None:
    model = MockModel()
    cause = RuntimeError("device lost")

    def fail(step: Any) -> None:
        model.before_step = lambda step: None
        raise cause

    async def use(llm: AsyncLLM) -> None:
        open_ones = [llm.generate(f"x{i}", LONG, delta=bool(i % 2)) for i in range(7)]
        started = [await anext(open_ones[1]), await anext(open_ones[3])]
        assert all(ids_of([item]) for item in started)
        tasks = [asyncio.create_task(read(items)) for items in open_ones]
        await asyncio.sleep(0.01)
        model.before_step = fail
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineError) and "device lost" in str(error) and error.__cause__ is cause
        assert len((await alone(llm, "x", QUICK)).token_ids) == 4

    serve(use, model)


def test_an_engine_that_cannot_go_on_tells_later_requests(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MockModel()

    def fail(step: Any) -> None:
        raise RuntimeError("device lost")

    async def use(llm: AsyncLLM) -> None:
        def not_idle() -> None:
            raise EngineError("a page is missing")

        monkeypatch.setattr(llm.llm.engine, "check_idle", not_idle)
        model.before_step = fail
        with pytest.raises(EngineError, match="the engine failed: "):
            await read(llm.generate("x", LONG))
        for _ in range(2):
            with pytest.raises(EngineError, match="make a new one") as error:
                await read(llm.generate("x", LONG))
            assert "device lost" in str(error.value.__cause__)
        monkeypatch.undo()

    serve(use, model)


def test_options_are_checked_at_once_and_loading_errors_come_from_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="max_num_sequences"):
        AsyncLLM("tiny", max_num_sequences=3)

    async def main() -> None:
        llm = AsyncLLM(str(tmp_path))
        with pytest.raises(EngineError, match="not started"):
            llm.get_metrics()
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
                await llm.start()
        with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
            await read(llm.generate("x"))
        await llm.drain()
        await llm.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert not engine_threads()


# ---- slow readers, idle engines ----


def test_a_slow_reader_holds_up_nobody_and_gets_one_merged_delta(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        params = LONG.replace(logprobs=1, n=2)
        (expected,) = await read(llm.generate("slow", params, delta=False))
        items = llm.generate("slow", params)
        got = [await anext(items)]
        await asyncio.gather(*(read(llm.generate(f"quick {i}", LONG)) for i in range(6)))
        got.append(await anext(items))
        assert got[-1].finished and len(got) == 2
        for index, one in enumerate(expected.outputs):
            assert ids_of(got, index) == one.token_ids
            assert "".join(item.outputs[index].text for item in got) == one.text
            assert [at for item in got for at in item.outputs[index].logprobs or ()] == one.logprobs
            assert got[-1].outputs[index].cumulative_logprob == one.cumulative_logprob

    serve(use)


def test_a_blocked_event_loop_finds_one_delta_for_each_request(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        items = llm.generate("x", LONG.replace(max_tokens=150))
        got = [await anext(items)]
        while llm._serving:
            time.sleep(0.001)  # the whole loop stands still
            assert len(llm._outbox) <= 1
        got += await read(items)
        assert len(ids_of(got)) == 150 and len(got) <= 4  # what was on its way, and all the rest

    serve(use)


def test_new_requests_do_not_starve_those_that_run(serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps at most COMMANDS_S of them are taken in: here one."""
    monkeypatch.setattr(async_llm, "COMMANDS_S", 0.0)
    taken: list[int] = []

    async def use(llm: AsyncLLM) -> None:
        engine = llm.llm.engine
        step, submit = engine.step, engine.submit
        count = itertools.count()

        def counted(request: Any) -> None:
            next(count)
            submit(request)

        def stepped() -> Any:
            taken.append(next(count))
            return step()

        monkeypatch.setattr(engine, "submit", counted)
        monkeypatch.setattr(engine, "step", stepped)
        await asyncio.gather(*(read(llm.generate("x", QUICK)) for _ in range(30)))

    serve(use)
    gained = [after - before - 1 for before, after in itertools.pairwise(taken)]
    assert sum(taken[:1]) <= 2 and max(gained) <= 1


def test_an_idle_engine_sleeps(serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = itertools.count()
    work = AsyncLLM._work

    def counted(self: AsyncLLM, engine: Engine) -> bool:
        next(rounds)
        return work(self, engine)

    monkeypatch.setattr(AsyncLLM, "_work", counted)

    async def use(llm: AsyncLLM) -> None:
        await alone(llm, "x", QUICK)
        await llm.drain()
        await asyncio.sleep(0.05)
        before = next(rounds)
        await asyncio.sleep(0.2)
        assert next(rounds) == before + 1

    serve(use)


# ---- life ----


def test_drain_waits_for_the_engine_not_for_readers(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        await llm.drain()
        items = llm.generate("x", LONG)
        first = await anext(items)
        await llm.drain()
        assert llm.get_metrics().finished["length"] == 1
        assert len(ids_of([first, *await read(items)])) == 60

    serve(use)


def test_close_ends_open_generators_and_later_calls_say_so(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        other = AsyncLLM("mock", numerics="exact", num_pages=40, page_size=8, max_num_seqs=2)
        tasks = [asyncio.create_task(read(other.generate("x", LONG.replace(max_tokens=200)))) for _ in range(4)]
        while len(other._serving) < 4:
            await asyncio.sleep(0.001)
        await asyncio.gather(other.close(), other.close())
        for items in await asyncio.gather(*tasks):
            assert items[-1].outputs[0].finish_reason == "abort"
        for call in (lambda: read(other.generate("x")), other.start, other.reset_prefix_cache):
            with pytest.raises(EngineError, match="this AsyncLLM is closed"):
                await call()
        await other.drain()
        await other.close()

    serve(use)


def test_close_while_a_prompt_is_prepared(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        other = AsyncLLM("mock", numerics="exact", num_pages=40, page_size=8, max_num_seqs=2)
        await other.start()
        release = threading.Event()
        other._preparing.submit(release.wait)
        task = asyncio.create_task(read(other.generate("x", LONG)))
        await asyncio.sleep(0.01)
        await other.close()
        release.set()
        with pytest.raises(EngineError, match="closed"):
            await task

    serve(use)


def test_one_event_loop(serve: Callable[..., None]) -> None:
    async def use(llm: AsyncLLM) -> None:
        def elsewhere() -> None:
            with pytest.raises(EngineError, match="one for each loop"):
                asyncio.run(read(llm.generate("x")))

        await asyncio.to_thread(elsewhere)

    serve(use)


def test_an_event_loop_that_ends_leaves_no_work(serve: Callable[..., None]) -> None:
    model = MockModel()
    serve(lambda llm: llm.drain(), model)  # sets the mock up
    model.before_step = lambda step: time.sleep(0.005)  # so that requests are open for a second
    options: dict[str, Any] = {"numerics": "exact", "num_pages": 40, "page_size": 8, "max_num_seqs": 2}
    engines: list[Engine] = []
    tidy, rude = AsyncLLM("mock", **options), AsyncLLM("mock", **options)

    async def main() -> None:
        task = asyncio.create_task(read(tidy.generate("x", LONG.replace(max_tokens=200))))
        while not tidy._serving:
            await asyncio.sleep(0.001)
        assert not task.done()
        engines.append(tidy.llm.engine)

    asyncio.run(main())  # cancels the task
    until = time.monotonic() + LIMIT_S  # whether the abort is told to the loop or finds it closed is a race
    while tidy._serving and time.monotonic() < until:
        time.sleep(0.001)
    assert not tidy._serving and engines[0].metrics.finished["abort"] == 1
    tidy._commands.put(None)  # what `close` would do
    loop = asyncio.new_event_loop()
    items = rude.generate("x", LONG.replace(max_tokens=200))
    loop.run_until_complete(anext(items))
    loop.close()  # with a request open
    assert not engine_threads() and not rude._serving and rude.llm._engine is None


def test_an_exit_without_close_does_not_hang(tmp_path: Path) -> None:

    code = (
        "import asyncio, deepinfer; llm = deepinfer.AsyncLLM('tiny', num_pages=4); asyncio.run(llm.start()); print(1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=Path(__file__).parents[1],
        env={"DEEPINFER_CACHE_ROOT": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


# ---- the tiny checkpoint ----


def test_chat_is_what_llm_chat_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_ROOT", str(tmp_path))
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=5, temperature=0)
    options: dict[str, Any] = {"numerics": "exact", "num_pages": 16, "max_num_seqs": 4, "page_size": 16}
    with LLM("tiny", **options) as sync:
        (expected,) = sync.chat(messages, params, thinking=False, use_tqdm=False)

    async def main() -> None:
        async with AsyncLLM("tiny", **options) as llm:
            items = await read(llm.chat(messages, params, thinking=False))
            assert ids_of(items) == expected.outputs[0].token_ids and text_of(items) == expected.outputs[0].text
            assert items[0].prompt == expected.prompt
            assert 'model="tiny"' in llm.metrics_text()
            assert await llm.reset_prefix_cache() in (True, False)
            with pytest.raises(RequestError, match="messages"):
                await read(llm.chat([]))
            await llm._call(lambda inner: inner.engine.check_idle())

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
