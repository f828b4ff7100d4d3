"""`AsyncLLM`: the engine behind asyncio, for services and for programs that do other things meanwhile.

Belongs here: the engine's thread, hand-over between it and the event loop, what happens to a request whose reader
leaves, is slow or is late. Does not belong here: prompt forms (llm.py), protocols (HTTP and the like), the engine.

Two threads besides the event loop's: one prepares prompts (tokens, images) in the order of the calls, one owns the
engine. The engine's thread never waits for a reader: what a request has gained since its reader last looked is one
merged delta, so memory is bounded by the outputs themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from deepinfer.config import EngineConfig
from deepinfer.engine.core import Engine
from deepinfer.engine.metrics import Metrics
from deepinfer.engine.requests import Prompt, Request
from deepinfer.errors import EngineError, RequestError
from deepinfer.llm import LLM, Messages, PromptLike, each_priority, settle
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], None]
COMMANDS_S = 0.005  # longest time between two steps that new requests may take: they must not starve those that run


class AsyncLLM:
    """An engine with one model, used from one event loop. Arguments are those of `LLM`.

    The model is loaded by `start`, by entering the context, or by the first request. All methods are for the thread of
    the event loop. Thousands of requests may be open at once; they run as memory allows, by priority, then arrival.

    >>> async with AsyncLLM("small") as llm:
    ...     async for delta in llm.generate("Hello", SamplingParams(max_tokens=8)):
    ...         print(delta.outputs[0].text, end="", flush=True)
    """

    def __init__(self, model: Any, **options: Any) -> None:
        """ConfigError lists every option that is wrong; nothing is loaded yet."""
        self.config = EngineConfig.from_options(model, **options)
        self._arguments = (model, options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: Future[LLM] = Future()
        self._stopped: Future[None] = Future()
        self._closed = False
        self._preparing = ThreadPoolExecutor(1, "deepinfer-prompts")
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._ids = itertools.count()
        # the event loop's
        self._live: dict[str, _Stream] = {}  # until the engine is done with them or the reader left
        self._idle = asyncio.Event()
        self._idle.set()
        # the engine thread's
        self._serving: dict[str, _Stream] = {}
        self._broken: BaseException | None = None
        self._orphaned = False
        # of both, under the lock: what the event loop has not fetched yet
        self._lock = threading.Lock()
        self._outbox: dict[_Stream, RequestOutput | Exception] = {}

    # ---- requests ----

    def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        delta: bool = True,
    ) -> AsyncGenerator[RequestOutput]:
        """Continue one prompt, in any form that `LLM.generate` takes.

        delta: yield what is new (text, ids, logprobs) whenever something was confirmed, in order; what a slow reader
        missed comes merged. Otherwise yield once: the whole result. Either way the last item has `finished` set.
        priority: lower numbers run earlier. request_id: for `abort`; made up when None.

        Raises, when first iterated, RequestError for a bad prompt, bad parameters or an id that is in use, and
        EngineError when a step failed (its cause is attached; every open request gets one) or the engine is closed. A
        request that fails by itself ends with `error` set. Leaving the loop, closing the generator or cancelling the
        task aborts the request.
        """
        return self._stream(lambda llm: llm.prepare(prompt), sampling_params, request_id, priority, delta)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
        priority: int = 0,
        delta: bool = True,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one conversation; options are those of `LLM.chat`, the rest is as for `generate`."""
        options.update(tools=tools, thinking=thinking, reasoning_effort=reasoning_effort)
        return self._stream(
            lambda llm: llm.prepare_chat(messages, **options), sampling_params, request_id, priority, delta
        )

    def abort(self, request_id: str) -> None:
        """Give up a request: its generator ends with what it has and the finish reason "abort". Finished and unknown
        ids are ignored.
        """
        if (stream := self._live.get(request_id)) is not None:
            stream.unwanted = True
            self._commands.put(lambda: self._abort(stream))

    # ---- what it says about itself ----

    @property
    def llm(self) -> LLM:
        """What it is made of, for reading: `llm.default_params`, `llm.engine.tokenizer`. EngineError before `start`."""
        if not self._ready.done():
            raise EngineError("this AsyncLLM is not started; `await llm.start()` first")
        return self._ready.result()

    def get_metrics(self) -> Metrics:
        """Counters, gauges and latency histograms at this moment."""
        return self.llm.get_metrics()

    def metrics_text(self) -> str:
        """The metrics in the Prometheus text format."""
        return self.llm.metrics_text()

    async def reset_prefix_cache(self) -> bool:
        """As `LLM.reset_prefix_cache`, between two steps."""
        await self.start()
        return await self._call(LLM.reset_prefix_cache)

    # ---- life ----

    async def start(self) -> None:
        """Load the model, unless that was done; raises what `LLM()` raises."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise EngineError("this AsyncLLM is closed; make a new one")
        if self._loop is None:
            self._loop = loop
            threading.Thread(target=self._main, name="deepinfer-engine", daemon=True).start()
        if self._loop is not loop:
            raise EngineError("an AsyncLLM serves the event loop that started it; make one for each loop")
        await asyncio.shield(asyncio.wrap_future(self._ready))

    async def drain(self) -> None:
        """Wait until no request is queued or running. Requests that come meanwhile are served, and waited for."""
        while self._live:
            await self._idle.wait()
        if self._ready.done() and self._ready.exception() is None and not self._closed:
            await self._call(lambda llm: settle(llm.engine))

    async def close(self) -> None:
        """Abort what is queued or running (`drain` first to let it end), drop the model. May be called again."""
        if not self._closed:
            self._closed = True
            self._preparing.shutdown(wait=False)
            self._commands.put(None)
        if self._loop is not None:
            await asyncio.shield(asyncio.wrap_future(self._stopped))

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    # ---- the event loop's side ----

    async def _stream(
        self,
        prepare: Callable[[LLM], Prompt],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        delta: bool,
    ) -> AsyncGenerator[RequestOutput]:
        arrival_s = time.monotonic()
        await self.start()
        name = request_id or f"request-{next(self._ids)}"
        if name in self._live:
            raise RequestError(f"request id {name!r} is in use; ids of open requests must differ")
        stream = self._live[name] = _Stream(name, delta)
        self._idle.clear()
        try:
            llm = self.llm
            prompt = await asyncio.get_running_loop().run_in_executor(self._preparing, prepare, llm)
            if self._closed:
                raise EngineError("this AsyncLLM was closed while the request was prepared")
            (chosen,) = llm.each_params(1, params, "prompt")
            (rank,) = each_priority(1, priority, "prompt")
            self._commands.put(lambda: self._submit(stream, prompt, chosen, rank, arrival_s))
            while True:
                item = await stream.next()
                yield item
                if item.finished:
                    return
        finally:
            if self._live.get(name) is stream:  # the engine is not done with it
                self._forget(stream)
                stream.unwanted = True
                self._commands.put(lambda: self._abort(stream))

    def _forget(self, stream: _Stream) -> None:
        if self._live.get(stream.request_id) is stream:
            del self._live[stream.request_id]
        if not self._live:
            self._idle.set()

    def _deliver(self) -> None:
        with self._lock:
            outbox, self._outbox = self._outbox, {}
        for stream, news in outbox.items():
            stream.put(news)
            if isinstance(news, Exception) or news.finished:
                self._forget(stream)

    async def _call(self, function: Callable[[LLM], T]) -> T:
        """Run something in the engine's thread, between two steps."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self.llm))
            except Exception as error:
                future.set_exception(error)

        self._commands.put(command)
        return await asyncio.wrap_future(future)

    # ---- the engine's thread ----

    def _main(self) -> None:
        model, options = self._arguments
        try:
            llm = LLM(model, **options)
        except BaseException as error:
            self._ready.set_exception(error)
            self._stopped.set_result(None)
            return
        self._ready.set_result(llm)
        while self._obey(wait=not self._work(llm.engine)):
            pass
        try:
            for stream in list(self._serving.values()):
                self._abort(stream)
            llm.close()
        except Exception as error:
            self._fail(error)
        finally:
            self._stopped.set_result(None)

    def _work(self, engine: Engine) -> bool:
        """One step, if there is work; whether there is more."""
        if self._broken is not None:
            return False
        try:
            if engine.has_unfinished:
                self._publish({output.request_id for output in engine.step()})
            if engine.has_unfinished:
                return True
            engine.drain()  # steps in flight hold pages of requests that ended
        except BaseException as error:
            self._fail(error)
        return False

    def _obey(self, *, wait: bool) -> bool:
        """Commands that came in the meantime; with `wait`, sleep until there is one. False: close."""
        try:
            command = self._commands.get(block=wait and not self._orphaned)
            until = time.monotonic() + COMMANDS_S
            while command is not None and not self._orphaned:
                try:
                    command()
                except BaseException as error:
                    self._fail(error)
                if time.monotonic() > until:
                    return True
                command = self._commands.get_nowait()
            return False
        except Empty:
            return not self._orphaned

    def _submit(self, stream: _Stream, prompt: Prompt, params: SamplingParams, priority: int, arrival_s: float) -> None:
        if self._broken is not None:
            self._post({stream: _because("the engine failed and cannot go on; make a new one", self._broken)})
            return
        engine = self.llm.engine
        try:
            request = engine.make_request(prompt, params, stream.request_id, priority=priority)
            request.metrics.arrival_s = arrival_s
            engine.submit(request)
        except Exception as error:
            self._post({stream: error})
            return
        stream.request = request
        self._serving[stream.request_id] = stream
        if stream.unwanted:
            self._abort(stream)

    def _abort(self, stream: _Stream) -> None:
        if self._serving.get(stream.request_id) is stream and stream.request is not None:
            self.llm.engine.abort([stream.request])
            self._publish({stream.request_id})

    def _publish(self, ended: set[str]) -> None:
        """Post what requests gained; `ended` are those that finished, and leave."""
        news: dict[_Stream, RequestOutput] = {}
        for stream in list(self._serving.values()):
            request = stream.request
            assert request is not None
            if stream.request_id in ended:
                del self._serving[stream.request_id]
                news[stream] = request.output(delta=stream.delta)
            elif stream.delta:
                count = sum(len(seq.output_ids) for seq in request.sequences)
                if count != stream.num_tokens:
                    stream.num_tokens = count
                    news[stream] = request.output(delta=True)
        if news:
            self._post(news)

    def _post(self, news: Mapping[_Stream, RequestOutput | Exception]) -> None:
        """Hand over to the event loop. One wake-up for everything that it has not fetched yet."""
        with self._lock:
            asleep = not self._outbox
            for stream, item in news.items():
                self._outbox[stream] = _joined(self._outbox.get(stream), item)
        if asleep:
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop was closed under an open AsyncLLM; nobody is left to read
                self._orphaned = True

    def _fail(self, error: BaseException) -> None:
        """A step failed: every open request ends with an error. Whether the engine is usable, it says itself."""
        logger.error("the engine failed; %d requests end with an error", len(self._serving), exc_info=error)
        self._post({stream: _because(f"the engine failed: {error}", error) for stream in self._serving.values()})
        self._serving.clear()
        try:
            engine = self.llm.engine
            engine.abort(list(engine.requests.values()))
            engine.drain()
            engine.check_idle()
        except BaseException as worse:
            logger.error("the engine cannot go on", exc_info=worse)
            self._broken = error


@dataclass(eq=False)
class _Stream:
    """One open request. The engine's thread writes `request` and `num_tokens`, the event loop the rest."""

    request_id: str
    delta: bool
    request: Request | None = None
    num_tokens: int = 0  # of all sequences, when something was posted last
    unwanted: bool = False
    pending: RequestOutput | None = None
    error: Exception | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, news: RequestOutput | Exception) -> None:
        if isinstance(news, Exception):
            self.error = news
        else:
            self.pending = news if self.pending is None else _merged(self.pending, news)
        self.news.set()

    async def next(self) -> RequestOutput:
        """What came since the last call, merged; an error comes after it."""
        while True:
            if (item := self.pending) is not None:
                self.pending = None
                return item
            if self.error is not None:
                raise self.error
            self.news.clear()
            await self.news.wait()


def _joined(old: RequestOutput | Exception | None, new: RequestOutput | Exception) -> RequestOutput | Exception:
    if isinstance(old, RequestOutput) and isinstance(new, RequestOutput):
        return _merged(old, new)
    return new


def _merged(old: RequestOutput, new: RequestOutput) -> RequestOutput:
    """`old` grown by `new`, the next delta of the same request."""
    for one, more in zip(old.outputs, new.outputs, strict=True):
        one.text += more.text
        one.token_ids += more.token_ids
        if one.logprobs is not None and more.logprobs is not None:
            one.logprobs += more.logprobs
        one.cumulative_logprob = more.cumulative_logprob
        one.finish_reason, one.stop_reason = more.finish_reason, more.stop_reason
    old.prompt_logprobs, old.num_cached_tokens = new.prompt_logprobs, new.num_cached_tokens
    old.finished, old.error = new.finished, new.error
    return old


def _because(message: str, cause: BaseException) -> EngineError:
    error = EngineError(message)
    error.__cause__ = cause
    return error
