"""`LLM`: prompts in, results out, in one process and without a server.

Belongs here: the forms a prompt may have, pairing prompts with parameters, the progress bar, streaming,
clean-up after an interrupt. Does not belong here: scheduling, sampling, stop rules (engine/), tokenising and
templates (text/).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from tqdm import tqdm

from deepinfer.config import EngineConfig
from deepinfer.engine.core import Engine, load_engine
from deepinfer.engine.requests import ImageSpan, Prompt, Request
from deepinfer.errors import DeepInferError, EngineError, RequestError
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.text.images import ImageInput, place_spans, preprocess

PromptLike = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]
Progress = bool | Callable[..., Any]
T = TypeVar("T")

REFRESH_S = 0.5  # how often the bar shows new rates while no prompt ends
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")


class LLM:
    """An engine with one model loaded.

    model: a checkpoint folder, or the name of a synthetic checkpoint ("tiny", ...), which is written to the
    cache folder at first use. Options are the fields of `EngineConfig`. Use it as a context manager or call
    `close()`. Not thread-safe.

    >>> with LLM("tiny") as llm:
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

    # ---- generation ----

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; results in input order.

        prompts: text, a list of token ids, a dict (`prompt` or `prompt_token_ids`, and
        `multi_modal_data={"image": ...}` with PIL images, paths, bytes or data URLs, one for each image token
        of the prompt), or a list of these. [] gives []. sampling_params: one for all, or a list of the same
        length; None takes the checkpoint's defaults. use_tqdm: True shows a bar, False none; or a callable
        that is used like `tqdm.tqdm`.

        Raises RequestError (UnsupportedError for structured output) naming the prompt when one is invalid:
        everything is checked before anything is queued, so nothing of the call runs then. A request that
        fails while it runs comes back with `error` set; the others go on. Ctrl-C aborts the requests of this
        call, frees what they hold and is raised again.
        """
        items = _as_list(prompts)
        return self._run(items, self._prompt, sampling_params, use_tqdm, "prompt")

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
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
            return self._render(conversation, options)

        return self._run(list(conversations), render, sampling_params, use_tqdm, "conversation")

    def stream(
        self,
        prompt: PromptLike | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
        **options: Any,
    ) -> Generator[RequestOutput]:
        """Continue one prompt or conversation; yields what is new (text, ids, logprobs) after each step that
        gave something.

        The last item has `finished` set. Validation happens here, not at the first item. Leaving the loop
        early aborts the request.
        """
        params = self.default_params if sampling_params is None else sampling_params
        options.update(tools=tools, thinking=thinking, reasoning_effort=reasoning_effort)
        if _is_conversation(prompt):
            made = self._render(prompt, options)
        elif given := [name for name, value in options.items() if value is not None]:
            raise RequestError(f"{', '.join(given)} are for conversations; this is a plain prompt")
        else:
            made = self._prompt(prompt)
        return self._stream(self.engine.make_request(made, params))

    def make_request(self, prompt: PromptLike, sampling_params: SamplingParams | None = None) -> Request:
        """Validate one prompt without queueing it: for callers that `engine.submit` and `engine.step`
        themselves.
        """
        params = self.default_params if sampling_params is None else sampling_params
        return self.engine.make_request(self._prompt(prompt), params)

    @property
    def engine(self) -> Engine:
        """The engine, for callers that queue and step themselves. EngineError after `close`."""
        if self._engine is None:
            raise EngineError("this LLM is closed; make a new one")
        return self._engine

    # ---- life ----

    def close(self) -> None:
        """Abort what is queued and drop the model. May be called again."""
        if self._engine is not None:
            self._engine.abort(list(self._engine.requests.values()))
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- parts ----

    def _run(
        self, items: list[T], make: Callable[[T], Prompt], params: Params, use_tqdm: Progress, noun: str
    ) -> list[RequestOutput]:
        engine = self.engine
        each = self._pair(len(items), params, noun)
        if not items:
            return []
        requests: list[Request] = []
        for index, (item, chosen) in enumerate(zip(items, each, strict=True)):
            try:
                requests.append(engine.make_request(make(item), chosen))
            except DeepInferError as error:
                raise type(error)(f"{noun} {index} of {len(items)}: {error}") from error
        try:
            for request in requests:
                engine.submit(request)
            self._drive(requests, use_tqdm)
        except BaseException:
            engine.abort(requests)
            raise
        return [request.output() for request in requests]

    def _drive(self, requests: list[Request], use_tqdm: Progress) -> None:
        """Step until all of `requests` ended; the bar counts prompts and shows tokens computed per second."""
        engine, waiting = self.engine, {request.request_id for request in requests}
        begin = shown = time.monotonic()
        rows, tokens = engine.metrics.prompt_rows, engine.metrics.output_tokens
        bar_class = use_tqdm if callable(use_tqdm) else tqdm
        with bar_class(total=len(requests), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:
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
            engine.abort([request])

    def _pair(self, count: int, params: Params, noun: str) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_params] * count
        if not isinstance(params, list | tuple):
            raise RequestError(
                f"sampling_params must be SamplingParams or a list of them, not {type(params).__name__}"
            )
        each = list(params)
        if len(each) != count:
            raise RequestError(
                f"{count} {noun}s but {len(each)} sampling_params; give one for all, or as many as {noun}s"
            )
        for index, item in enumerate(each):
            if not isinstance(item, SamplingParams):
                raise RequestError(f"sampling_params {index} is {type(item).__name__}, not SamplingParams")
        return each

    def _prompt(self, item: Any) -> Prompt:
        """A user's prompt as ids and image spans; RequestError for what is no prompt."""
        text, ids, images = _parts(item)
        if text is not None:
            if not text:
                raise RequestError("the prompt is empty; give it some text")
            ids = self.engine.tokenizer.encode(text)
        return self._place(text, ids, images)

    def _render(self, messages: Any, options: Mapping[str, Any]) -> Prompt:
        config = self.engine.model_config
        image_token = None if config.vision is None else config.image_token_id
        from deepinfer.text import chat  # deepseek-recipe, which plain prompts do not need

        rendered = chat.render(messages, tokenizer=self.engine.tokenizer, image_token=image_token, **options)
        return self._place(rendered.text, rendered.token_ids, rendered.images)

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
