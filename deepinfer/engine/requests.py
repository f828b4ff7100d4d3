"""What a request is, what it may ask, and when each of its sequences ends.

Belongs here: validation against the engine's limits, per-sequence state, stop rules, results. Does not belong
here: prompt formats (llm.py), order of execution (scheduler.py), tensors (runner.py). A request is one
prompt; each of its `n` sequences is scheduled on its own.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from deepinfer.cache.pages import pages_for
from deepinfer.engine.sampler import SamplingRow
from deepinfer.errors import RequestError
from deepinfer.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.text.detokenizer import Detokenizer, StopChecker
from deepinfer.text.tokenizer import Tokenizer


@dataclass(eq=False)
class ImageSpan:
    """Rows [start, start + length) of a prompt that belong to one image.

    `patches` is a text.images.ImagePatches; the runner turns it into `embeds` (tensor [length, hidden]) at
    first use.
    """

    start: int
    length: int
    patches: Any
    embeds: Any = None

    @cached_property
    def digest(self) -> bytes:
        """Names the image's pixels, for prefix keys."""
        import torch

        image = self.patches
        pixels = hashlib.blake2b(f"{image.n_h}x{image.n_w}".encode(), digest_size=16)
        pixels.update(image.patches.contiguous().view(torch.uint8).numpy().tobytes())
        return pixels.digest()


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids (image placeholders already expanded to spans), the text they came from if any, image spans."""

    token_ids: list[int]
    text: str | None = None
    images: tuple[ImageSpan, ...] = ()
    namespace: str = ""  # prefix hits happen within a namespace only


@dataclass(frozen=True)
class Limits:
    """What one engine can serve."""

    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    eos_token_id: int
    image_token_id: int
    max_logprobs: int | None
    replay_keep: int | None  # rows of a prompt's end that the decoder half runs on; None = all rows

    def check(self, prompt: Prompt, params: SamplingParams, bad_word_ids: tuple[tuple[int, ...], ...]) -> None:
        """RequestError naming value, limit and remedy when the engine could not serve the request."""
        ids = prompt.token_ids
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        for position, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"token id {token} at position {position} is outside the vocabulary of {self.vocab_size} "
                    f"(0 to {self.vocab_size - 1}); use this checkpoint's tokenizer"
                )
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and needs room for one more, max_model_len is "
                f"{self.max_model_len}; shorten the prompt or raise max_model_len"
            )
        params.validate_for(
            self.vocab_size,
            max_logprobs=self.max_logprobs,
            forbidden_ids=(self.image_token_id,),
            bad_word_ids=bad_word_ids,
        )
        rows = len(ids) + self.max_tokens(prompt, params) - 1
        need = pages_for(rows, self.page_size)
        if need > self.num_pages:
            raise RequestError(
                f"the request needs {need} pages of {self.page_size} tokens (prompt {len(ids)}, up to "
                f"{rows + 1 - len(ids)} new), the pool has {self.num_pages}; shorten the prompt, lower "
                "max_tokens, or raise num_pages or kv_cache_memory_bytes"
            )

    def max_tokens(self, prompt: Prompt, params: SamplingParams) -> int:
        """New tokens of a sequence: what was asked for, clamped to the context; without a wish also to the
        pool.
        """
        room = self.max_model_len - len(prompt.token_ids)
        if params.max_tokens is not None:
            return min(params.max_tokens, room)
        return max(1, min(room, self.num_pages * self.page_size + 1 - len(prompt.token_ids)))


class TextWriter:
    """Text of one sequence: incremental detokenisation and stop strings. `pieces` hold what users may see.

    Stop strings count from the `min_tokens`-th token on; one that began before it and ends after it counts.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens) if params.detokenize else None
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
        self.pieces: list[str] = []

    def push(self, tokens: list[int], *, may_stop: bool) -> str | None:
        """Add tokens (one, where there are stop strings); returns the stop string that they completed."""
        if self._detokenizer is None:
            return None
        return self._add(self._detokenizer.push(tokens), may_stop)

    def finish(self) -> str | None:
        """No more tokens: emit what was held back, as far as no stop string forbids it. Returns such a stop
        string.
        """
        if self._detokenizer is None:
            return None
        hit = self._add(self._detokenizer.finish(), True)
        if hit is None and self._checker is not None:
            self.pieces.append(self._checker.finish())
        return hit

    def _add(self, text: str, may_stop: bool) -> str | None:
        if self._checker is None:
            emit, hit = text, None
        else:
            emit, hit = self._checker.push(text, may_stop)
        if emit:
            self.pieces.append(emit)
        return hit


class Sequence:
    """One sampled continuation: tokens, text, and what the scheduler knows of it between steps.

    `output_ids` are confirmed tokens; those of steps in flight are the device's until their results arrive.
    """

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer) -> None:
        self.request = request
        self.prompt = request.prompt
        self.params = request.params
        self.index = index
        self.rank = (request.priority, request.arrival, index)  # who comes first
        self.num_prompt = len(request.prompt.token_ids)
        self.output_ids: list[int] = []
        self.max_rows = self.num_prompt + request.max_tokens - 1  # the last token is never an input
        self.floor = request.floor
        self.eos_id = -1 if request.params.ignore_eos else request.eos_token_id
        params = request.params
        self.careful = bool(params.stop or params.stop_token_ids) or params.logprobs is not None
        # the scheduler's
        self.slot = 0
        self.pages: list[int] = []
        self.keys: list[bytes] = []  # of the prefix cache, page by page
        self.num_known = 0  # tokens the device has or was given to run, while the sequence holds a slot
        self.num_preemptions = 0
        self.hit: int | None = None  # prompt tokens found in the prefix cache when it was admitted first
        self.prompt_logprobs_planned = 0
        self.followers: list[Sequence] = []  # samples that wait for this prompt
        # result
        self.writer = TextWriter(tokenizer, request.params)
        self.logprobs: list[dict[int, Logprob]] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._written = 0  # output tokens that the writer has seen
        self._accepting: tuple[int, float] | None = None  # tokens and cumulative logprob before the one being accepted
        self._shown = (0, 0)  # tokens and text pieces that the last delta ended with

    @property
    def num_tokens(self) -> int:
        """Confirmed tokens, prompt and output."""
        return self.num_prompt + len(self.output_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Ids of positions [start, end), prompt and confirmed output."""
        if start >= self.num_prompt:
            return self.output_ids[start - self.num_prompt : end - self.num_prompt]
        return self.prompt.token_ids[start:end] + self.output_ids[: max(0, end - self.num_prompt)]

    def sampling_row(self) -> SamplingRow:
        """What the sampler needs from here on. It appends the tokens it draws, so it gets a copy of those known."""
        request = self.request
        return SamplingRow(
            params=self.params,
            prompt_ids=self.prompt.token_ids,
            output_ids=list(self.output_ids),
            position=self.num_tokens,
            seed=request.seed,
            sample_index=self.index,
            forbidden_ids=request.forbidden_ids,
            eos_ids=(request.eos_token_id,),
            bad_word_ids=request.bad_word_ids,
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some of them are not even planned."""
        wanted = self.index == 0 and self.request.prompt_logprobs is not None
        return wanted and self.prompt_logprobs_planned < self.num_prompt

    def accept(self, token: int, logprob: float | None, logprobs: dict[int, Logprob] | None) -> None:
        """Append a sampled token and apply every stop rule: the only place where a sequence ends by itself.

        The stop token, or the token that completed a stop string, is part of `output_ids` and `logprobs`; the
        text ends before it. Tokens that can end nothing may be appended to `output_ids` directly.
        """
        params, limit = self.params, self.request
        self._accepting = (len(self.output_ids), self.cumulative_logprob)
        self._catch_up()
        self.output_ids.append(token)
        self._written += 1
        if logprobs is not None and logprob is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprob
        count = len(self.output_ids)
        is_eos = token == limit.eos_token_id and not params.ignore_eos
        if count >= params.min_tokens and (is_eos or token in params.stop_token_ids):
            if params.include_stop_str_in_output:
                self.writer.push([token], may_stop=False)
            self.finish("stop", None if is_eos else token)
        elif (hit := self.writer.push([token], may_stop=count >= params.min_tokens)) is not None:
            self.finish_reason, self.stop_reason = "stop", hit
        elif count >= limit.max_tokens:
            self.finish("length")
        self._accepting = None

    def rewind(self) -> None:
        """After an interrupt in the middle of `accept`: drop the token whose rules were not all applied."""
        if self._accepting is None:
            return
        count, self.cumulative_logprob = self._accepting
        del self.output_ids[count:], self.logprobs[count:]
        self.finish_reason = self.stop_reason = None
        shown = len("".join(self.writer.pieces[: self._shown[1]]))
        self.writer = TextWriter(self.request.tokenizer, self.params)
        for index, token in enumerate(self.output_ids, start=1):
            self.writer.push([token], may_stop=index >= self.params.min_tokens)
        text = "".join(self.writer.pieces)
        self.writer.pieces = [text[:shown], text[shown:]]
        self._shown, self._written = (self._shown[0], 1), count
        self._accepting = None

    def _catch_up(self) -> None:
        """Text of tokens that were appended without a look; they belong to sequences without stop strings."""
        if self._written < len(self.output_ids):
            self.writer.push(self.output_ids[self._written :], may_stop=False)
            self._written = len(self.output_ids)

    def finish(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        """End the sequence. A stop string in text that was held back until now came first, so it is the
        reason.
        """
        self._catch_up()
        hit = self.writer.finish()
        self.finish_reason, self.stop_reason = (reason, stop_reason) if hit is None else ("stop", hit)

    def output(self, *, delta: bool) -> CompletionOutput:
        """The whole result so far, or only what is new since the last delta."""
        self._catch_up()
        tokens, pieces = self._shown if delta else (0, 0)
        if delta:
            self._shown = (len(self.output_ids), len(self.writer.pieces))
        wants = self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text="".join(self.writer.pieces[pieces:]),
            token_ids=self.output_ids[tokens:],
            cumulative_logprob=self.cumulative_logprob if wants else None,
            logprobs=self.logprobs[tokens:] if wants else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass(eq=False)
class Request:
    """One prompt with its parameters; `sequences` are its `n` continuations. Made by `Engine.make_request`."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    seed: int
    max_tokens: int
    floor: int
    eos_token_id: int
    forbidden_ids: tuple[int, ...]
    bad_word_ids: tuple[tuple[int, ...], ...]
    tokenizer: Tokenizer = field(repr=False)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    priority: int = 0  # lower comes first
    arrival: int = 0  # order among equals
    num_cached_tokens: int = 0
    error: str | None = None
    sequences: list[Sequence] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_s=time.monotonic()))

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing precedes the first token
        self.sequences = [Sequence(self, index, self.tokenizer) for index in range(self.params.n)]

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason is not None for seq in self.sequences)

    def output(self, *, delta: bool = False) -> RequestOutput:
        """The result so far; with `delta`, text, ids and logprobs only since the last delta."""
        self.metrics.num_cached_tokens = self.num_cached_tokens
        self.metrics.num_preemptions = sum(seq.num_preemptions for seq in self.sequences)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids if delta else list(self.prompt.token_ids),
            prompt_logprobs=self.prompt_logprobs,
            outputs=[seq.output(delta=delta) for seq in self.sequences],
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )
