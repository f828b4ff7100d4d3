"""`LLM`: prompts in, results out, in one process and without a server.

Belongs here: the forms a prompt may have, pairing prompts with parameters, the progress bar, streaming, what is queued
and not yet collected, clean-up after an interrupt. Does not belong here: scheduling, sampling, stop rules (engine/),
tokenising and templates (text/), event loops (async_llm.py).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from tqdm import tqdm

from deepinfer.config import EngineConfig
from deepinfer.engine.core import Engine
from deepinfer.engine.load import load_engine
from deepinfer.engine.metrics import Metrics
from deepinfer.engine.requests import ImageSpan, Prompt, Request
from deepinfer.errors import DeepInferError, EngineError, RequestError
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.text.images import ImageInput, place_spans, preprocess

PromptLike = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
Priorities = int | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Progress = bool | Callable[..., Any]
T = TypeVar("T")

REFRESH_S = 0.5  # how often the bar shows new rates while no prompt ends
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data", "cache_salt")


class LLM:
    """An engine with one model loaded.

    model: a checkpoint folder, "small" (a trained model inside the package), or the name of a synthetic checkpoint
    ("tiny", ...), which is written to the cache folder at first use. Options are the fields of `EngineConfig`. Use
    it as a context manager or call `close()`. Not thread-safe.

    >>> with LLM("small") as llm:
    ...     print(llm.generate("Hello", SamplingParams(max_tokens=8))[0].outputs[0].text)
    """

    def __init__(self, model: Any, **options: Any) -> None:
        """Load the model. ConfigError, CheckpointError list everything that is wrong."""
        self.config = EngineConfig.from_options(model, **options)
        begin = time.monotonic()
        self._engine: Engine | None = load_engine(self.config)
        self.config = self._engine.config
        self.load_s = time.monotonic() - begin
        self.default_params = self._engine.default_params
        self._queued: dict[str, Request] = {}  # enqueued and not yet collected, in order

    # ---- generation ----

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params = None,
        *,
        priority: Priorities = 0,
        use_tqdm: Progress = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; results in input order.

        prompts: text, a list of token ids, a dict (`prompt` or `prompt_token_ids`, and
        `multi_modal_data={"image": ...}` with PIL images, paths, bytes or data URLs, one for each image token
        of the prompt), or a list of these. [] gives []. sampling_params: one for all, or a list of the same
        length; None takes the checkpoint's defaults. priority: one for all, or a list of the same length; lower
        numbers run earlier, equal ones in order of arrival, and a later number gives up its memory first.
        use_tqdm: True shows a bar, False none; or a callable that is used like `tqdm.tqdm`.

        Raises RequestError (UnsupportedError for structured output) naming the prompt when one is invalid:
        everything is checked before anything is queued, so nothing of the call runs then. A request that
        fails while it runs comes back with `error` set; the others go on. Ctrl-C aborts the requests of this
        call, frees what they hold and is raised again.
        """
        requests = self._make(_as_list(prompts), self.prepare, sampling_params, priority, "prompt")
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
        priority: Priorities = 0,
        use_tqdm: Progress = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or each of a list of them; `text.chat.parse` splits the text of an answer.

        messages: dicts with `role` and `content` in OpenAI form. tools, thinking, reasoning_effort and
        `text.chat.render`'s other options (tool_choice, response_format) hold for all conversations.
        Everything else, errors included, is as for `generate`.
        """
        options.update(tools=tools, thinking=thinking, reasoning_effort=reasoning_effort)
        if not isinstance(messages, list | tuple):
            kind = type(messages).__name__
            raise RequestError(f"messages must be a list of dicts or a list of such lists, not {kind}")
        conversations = [messages] if _is_conversation(messages) else messages

        def render(conversation: Any) -> Prompt:
            return self.prepare_chat(conversation, **options)

        requests = self._make(list(conversations), render, sampling_params, priority, "conversation")
        return self._run(requests, use_tqdm)

    def enqueue(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params = None,
        *,
        priority: Priorities = 0,
    ) -> list[str]:
        """Queue prompts and return their request ids in input order; nothing runs before `wait` or another call.

        Arguments and errors are as for `generate`: all prompts are checked before any is queued. Results are kept
        until `wait` collects them.
        """
        requests = self._make(_as_list(prompts), self.prepare, sampling_params, priority, "prompt")
        try:
            for request in requests:
                self.engine.submit(request)
            self._queued.update((request.request_id, request) for request in requests)
            return [request.request_id for request in requests]
        except BaseException:
            self._forget(requests)
            self.engine.abort(requests)
            raise

    def wait(self, request_ids: Sequence[str] | None = None, *, use_tqdm: Progress = True) -> list[RequestOutput]:
        """Run until these enqueued requests ended; their results in the order asked.

        request_ids: ids from `enqueue`, one or several; None takes everything not yet collected, in order of
        enqueueing. Each result can be collected once: RequestError names ids that are unknown or collected already.
        Whatever ends a wait early (Ctrl-C, an error of the engine) loses nothing: the same requests, finished or
        not, can be waited for again, and `abort` gives them up.
        """
        engine = self.engine
        chosen = self._chosen(request_ids)
        engine.abort([request for request in chosen.values() if request.finished])  # an interrupt may have left one in
        self._drive(engine, list(chosen.values()), use_tqdm)
        outputs = [request.output() for request in chosen.values()]
        self._forget(chosen.values())
        return outputs

    def abort(self, request_ids: Sequence[str]) -> None:
        """Give up requests, one id or several. Finished and unknown ids are ignored.

        An enqueued request that is given up can still be collected: it has what was generated until then and the
        finish reason "abort".
        """
        engine = self.engine
        engine.abort([engine.requests[name] for name in _as_ids(request_ids) if name in engine.requests])

    def stream(
        self,
        prompt: PromptLike | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
        priority: int = 0,
        **options: Any,
    ) -> Generator[RequestOutput]:
        """Continue one prompt or conversation; yields what is new (text, ids, logprobs) after each step that
        confirmed something.

        The last item has `finished` set. Validation happens here, not at the first item. Leaving the loop
        early aborts the request.
        """
        options.update(tools=tools, thinking=thinking, reasoning_effort=reasoning_effort)
        if _is_conversation(prompt):
            made = self.prepare_chat(prompt, **options)
        elif given := [name for name, value in options.items() if value is not None]:
            raise RequestError(f"{', '.join(given)} are for conversations; this is a plain prompt")
        else:
            made = self.prepare(prompt)
        (params,) = self.each_params(1, sampling_params, "prompt")
        (rank,) = each_priority(1, priority, "prompt")
        return self._stream(self.engine.make_request(made, params, priority=rank))

    def prepare(self, prompt: Any) -> Prompt:
        """One prompt as token ids and images, in the form that the engine takes; RequestError for what is none.

        This and `prepare_chat` touch neither the queue nor the model.
        """
        text, ids, images = _parts(prompt)
        if text is not None:
            if not text:
                raise RequestError("the prompt is empty; give it some text")
            ids = self.engine.tokenizer.encode(text)
        return replace(self._place(text, ids, images), namespace=_salt(prompt))

    def prepare_chat(self, messages: Any, **options: Any) -> Prompt:
        """One conversation in the form that the engine takes; options are those of `chat`."""
        config = self.engine.model_config
        image_token = None if config.vision is None else config.image_token_id
        from deepinfer.text import chat  # deepseek-recipe, which plain prompts do not need

        rendered = chat.render(messages, tokenizer=self.engine.tokenizer, image_token=image_token, **options)
        return self._place(rendered.text, rendered.token_ids, rendered.images)

    def make_request(self, prompt: PromptLike, sampling_params: SamplingParams | None = None) -> Request:
        """Validate one prompt without queueing it: for callers that `engine.submit` and `engine.step`
        themselves.
        """
        params = self.default_params if sampling_params is None else sampling_params
        return self.engine.make_request(self.prepare(prompt), params)

    # ---- what it says about itself ----

    def get_metrics(self) -> Metrics:
        """Counters, gauges and latency histograms at this moment."""
        return self.engine.metrics.read()

    def metrics_text(self) -> str:
        """The metrics in the Prometheus text format, each with the label `model`."""
        return self.get_metrics().to_text({"model": self.config.model})

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; pages in use stay with their requests. False when prefix caching is off."""
        return self.engine.reset_prefix_cache()

    @property
    def engine(self) -> Engine:
        """The engine, for callers that queue and step themselves. EngineError after `close`."""
        if self._engine is None:
            raise EngineError("this LLM is closed; make a new one")
        return self._engine

    # ---- life ----

    def close(self) -> None:
        """Abort what is queued, forget results that nobody collected, drop the model. May be called again."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._queued = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- parts ----

    def _make(
        self,
        items: list[T],
        make: Callable[[T], Prompt],
        params: Params,
        priority: Priorities,
        noun: str,
    ) -> list[Request]:
        """Validate everything; nothing is queued."""
        engine = self.engine
        each = self.each_params(len(items), params, noun)
        ranks = each_priority(len(items), priority, noun)
        requests: list[Request] = []
        for index, (item, chosen, rank) in enumerate(zip(items, each, ranks, strict=True)):
            try:
                requests.append(engine.make_request(make(item), chosen, priority=rank))
            except DeepInferError as error:
                raise type(error)(f"{noun} {index} of {len(items)}: {error}") from error
        return requests

    def _run(self, requests: list[Request], use_tqdm: Progress) -> list[RequestOutput]:
        """Queue, run to the end and read; whatever breaks it off aborts all of them."""
        engine = self.engine
        try:
            for request in requests:
                engine.submit(request)
            self._drive(engine, requests, use_tqdm)
        except BaseException:
            engine.abort(requests)
            settle(engine)
            raise
        return [request.output() for request in requests]

    def _drive(self, engine: Engine, requests: list[Request], use_tqdm: Progress) -> None:
        """Step until all of `requests` ended; the bar counts prompts and shows tokens computed per second."""
        if not requests:
            return
        waiting = {request.request_id for request in requests if not request.finished}
        begin = shown = time.monotonic()
        rows, tokens = engine.metrics.prompt_rows, engine.metrics.output_tokens
        bar_class = use_tqdm if callable(use_tqdm) else tqdm
        with bar_class(total=len(requests), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:
            bar.update(len(requests) - len(waiting))
            while waiting and engine.has_unfinished:
                ended = [output.request_id for output in engine.step() if output.request_id in waiting]
                now = time.monotonic()
                if not ended and now - shown < REFRESH_S:
                    continue
                waiting.difference_update(ended)
                shown = now
                counts = (engine.metrics.prompt_rows - rows, engine.metrics.output_tokens - tokens)
                each = [f"{count / max(now - begin, 1e-9):.0f}" for count in counts]
                bar.set_postfix_str(f"in {each[0]}, out {each[1]} tok/s", refresh=not ended)
                bar.update(len(ended))
        settle(engine)

    def _stream(self, request: Request) -> Generator[RequestOutput]:
        engine = self.engine
        engine.submit(request)
        try:
            while True:
                if not request.finished:  # a call of `generate` in between may have ended it
                    engine.step()
                delta = request.output(delta=True)
                if delta.finished or any(completion.token_ids or completion.text for completion in delta.outputs):
                    yield delta
                if delta.finished:
                    return
        finally:
            if self._engine is not None:
                engine.abort([request])
                settle(engine)

    def _chosen(self, request_ids: Sequence[str] | None) -> dict[str, Request]:
        """The requests that a `wait` is about."""
        names = list(self._queued) if request_ids is None else _as_ids(request_ids)
        if unknown := [name for name in names if name not in self._queued]:
            raise RequestError(f"request ids {', '.join(map(repr, unknown))} are unknown or were collected already")
        if len(set(names)) < len(names):
            twice = [repr(name) for name in dict.fromkeys(names) if names.count(name) > 1]
            raise RequestError(f"request ids {', '.join(twice)} are given twice; a result is collected once")
        return {name: self._queued[name] for name in names}

    def _forget(self, requests: Iterable[Request]) -> None:
        gone = {request.request_id for request in requests}
        self._queued = {name: request for name, request in self._queued.items() if name not in gone}

    def each_params(self, count: int, params: Params, noun: str) -> list[SamplingParams]:
        """The parameters of each of `count` prompts; RequestError for what is none, or not as many."""
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_params] * count
        if not isinstance(params, list | tuple):
            raise RequestError(f"sampling_params must be SamplingParams or a list of them, not {type(params).__name__}")
        each = list(params)
        if len(each) != count:
            raise RequestError(
                f"{count} {noun}s but {len(each)} sampling_params; give one for all, or as many as {noun}s"
            )
        for index, item in enumerate(each):
            if not isinstance(item, SamplingParams):
                raise RequestError(f"sampling_params {index} is {type(item).__name__}, not SamplingParams")
        return each

    def _place(self, text: str | None, ids: list[int], images: Sequence[ImageInput]) -> Prompt:
        """Expand image tokens to the spans of `images`."""
        config = self.engine.model_config
        if config.vision is None:
            if images:
                raise RequestError("this checkpoint has no vision tower; send the prompt without images")
            return Prompt(ids, text)
        patches = [preprocess(image, config.vision) for image in images]
        ids, spans = place_spans(ids, config.image_token_id, patches)
        found = zip(spans, patches, strict=True)
        return Prompt(ids, text, tuple(ImageSpan(start, length, image) for (start, length), image in found))


def settle(engine: Engine) -> None:
    """With nothing left to run, let the steps in flight end, so that all memory is free."""
    if not engine.requests:
        engine.drain()


def _as_ids(request_ids: Sequence[str]) -> list[str]:
    return [request_ids] if isinstance(request_ids, str) else list(request_ids)


def each_priority(count: int, priority: Any, noun: str) -> list[int]:
    """The priority of each of `count` prompts; RequestError for what is none, or not as many."""
    if isinstance(priority, list | tuple):
        each = list(priority)
        if len(each) != count:
            raise RequestError(f"{count} {noun}s but {len(each)} priorities; give one for all, or as many as {noun}s")
    else:
        each = [priority] * max(1, count)
    for value in each:
        if not _is_number(value):
            raise RequestError(f"a priority is an integer, lower ones run earlier; not {value!r}")
    return [operator.index(value) for value in each[:count]]


def _is_conversation(value: Any) -> bool:
    """Whether `value` is one list of messages (rather than several, or a prompt)."""
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def _as_list(prompts: Any) -> list[Any]:
    """One prompt as a list of one; a list of numbers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError(f"prompts must be text, token ids, a dict or a list of these, not {type(prompts).__name__}")
    return [list(prompts)] if prompts and _is_number(prompts[0]) else list(prompts)


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _parts(item: Any) -> tuple[str | None, list[int], list[ImageInput]]:
    """(text or None, token ids, images) of a prompt."""
    if isinstance(item, str):
        return item, [], []
    if isinstance(item, list | tuple):
        return None, _token_ids(item), []
    if not isinstance(item, Mapping):
        raise RequestError(f"a prompt must be text, token ids or a dict, not {type(item).__name__}")
    if unknown := [key for key in item if key not in _PROMPT_KEYS]:
        raise RequestError(f"the prompt has unknown keys {unknown}; known are {', '.join(_PROMPT_KEYS)}")
    if ("prompt" in item) == ("prompt_token_ids" in item):
        raise RequestError("a prompt dict needs exactly one of prompt and prompt_token_ids")
    images = _images(item.get("multi_modal_data"))
    if "prompt_token_ids" in item:
        return None, _token_ids(item["prompt_token_ids"]), images
    if not isinstance(item["prompt"], str):
        raise RequestError(f"prompt must be text, not {type(item['prompt']).__name__}")
    return item["prompt"], [], images


def _salt(prompt: Any) -> str:
    """The part of the prefix cache that a prompt shares: prompts hit those with the same `cache_salt` only."""
    salt = prompt.get("cache_salt", "") if isinstance(prompt, Mapping) else ""
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be text, not {type(salt).__name__}")
    return salt


def _token_ids(values: Any) -> list[int]:
    if not isinstance(values, list | tuple):
        raise RequestError(f"token ids must be a list of integers, not {type(values).__name__}")
    for position, value in enumerate(values):
        if not _is_number(value):
            raise RequestError(f"token ids must be integers; position {position} holds {value!r}")
    return [operator.index(value) for value in values]


def _images(data: Any) -> list[ImageInput]:
    if data is None:
        return []
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise RequestError('multi_modal_data must be {"image": image or list of images}')
    images = data.get("image")
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]
