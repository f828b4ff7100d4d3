"""Chat messages to prompt ids, and a reply back to a message, in the V4.1 format (spec section 13).

Belongs here: the bridge to deepseek-recipe, which owns the format, and encoding by its special ranges.
Does not belong here: the format itself, image pixels (images.py), generation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import deepseek_recipe as recipe

from deepinfer.errors import RequestError
from deepinfer.text.images import ImageInput
from deepinfer.text.tokenizer import EOS, Tokenizer

_MODEL = "DeepSeek-V4.1-Flash"
_IMAGE = recipe.SpecialToken.Image.default_str()
_STUB = "https://image.invalid/"  # stands for an image while the messages pass through the recipe
_EFFORT_LINE = "Reasoning Effort: "
_STAGES = {
    "reasoning": recipe.ThinkingInitialStage.ReasoningStart,
    "reasoning_continued": recipe.ThinkingInitialStage.ReasoningContinuation,
    "content_continued": recipe.ThinkingInitialStage.ContentContinuation,
}


@dataclass(frozen=True)
class RenderedChat:
    """A prompt and how to read the reply to it.

    text: the prompt as deepseek-recipe spells it. token_ids: its ids, one image token for each image
    (images.place_spans makes the spans). images: what the messages gave, in the order of their image tokens.
    special_ranges: (start, end) character ranges of `text` that are control tokens.
    stage, tools, forced_call: see `parse`.
    """

    text: str
    token_ids: list[int]
    images: list[ImageInput]
    special_ranges: list[tuple[int, int]]
    stage: str | None
    tools: bool
    forced_call: bool

    @property
    def thinking(self) -> bool:
        """Whether the reply starts in reasoning."""
        return self.stage in ("reasoning", "reasoning_continued")

    def parse(self, text: str) -> dict[str, Any]:
        """The reply as a message, see the function `parse`."""
        return parse(text, stage=self.stage, tools=self.tools, forced_call=self.forced_call)


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer,
    image_token: int | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    thinking: bool | None = None,
    reasoning_effort: str | int | None = None,
    response_format: Mapping[str, Any] | None = None,
) -> RenderedChat:
    """Prompt for a conversation in the OpenAI form. Text that spells control tokens stays text.

    messages: dicts with role and content. A content part {"type": "image", "image": X}, or OpenAI's
    {"type": "image_url", "image_url": {"url": X}}, takes whatever images.preprocess takes (`detail` has no
    effect: the checkpoint's token budget decides). image_token: the config's id, None without vision.
    thinking: None = on. reasoning_effort: "none" (thinking off), "minimal", "low", "medium", "high" (the
    default), "xhigh", "max" or 1..100. tool_choice, response_format: as in the OpenAI API.
    Raises RequestError for whatever the format does not allow.
    """
    effort = _check_effort(thinking, reasoning_effort)
    converted, prompt, images = _convert(messages, tools, tool_choice, thinking, effort, response_format)
    if images and image_token is None:
        raise RequestError(f"the messages hold {len(images)} images, but this checkpoint has no vision tower")
    pieces = _split(prompt.prompt, prompt.special_ranges)
    if isinstance(effort, int) and converted.conversation.thinking_mode:
        pieces[2] = (_set_effort(pieces[2][0], effort), False)  # after BOS and the system token
    options = converted.parsing_options
    stages = [name for name, stage in _STAGES.items() if stage == options.thinking_initial_stage]
    return RenderedChat(
        text="".join(piece for piece, _ in pieces),
        token_ids=_encode(pieces, tokenizer, image_token),
        images=[images[int((source.url or "").removeprefix(_STUB))] for source in prompt.image_sources],
        special_ranges=_ranges(pieces),
        stage=stages[0] if stages else None,
        tools=options.parse_tool_calls,
        forced_call=options.starts_in_tool_calls,
    )


def check(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool | None = None,
    reasoning_effort: str | int | None = None,
) -> None:
    """Raise what `render` would raise about the format; needs no tokenizer, so files are checked before a model."""
    _convert(messages, tools, None, thinking, _check_effort(thinking, reasoning_effort), None)


def _convert(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    thinking: bool | None,
    effort: str | int | None,
    response_format: Mapping[str, Any] | None,
) -> tuple[recipe.ConversationRequest, recipe.RenderedPrompt, list[ImageInput]]:
    """The conversation as deepseek-recipe understands and spells it, and the images of its messages."""
    plain_messages, images = _detach_images(messages)
    if tools is not None and not isinstance(tools, list | tuple):
        raise RequestError(f"tools must be a list of dicts, not {type(tools).__name__}")
    body = {
        "model": _MODEL,
        "messages": plain_messages,
        "tools": list(tools) if tools else None,
        "tool_choice": tool_choice,
        "thinking": None if thinking is None else {"type": "enabled" if thinking else "disabled"},
        "reasoning_effort": "high" if isinstance(effort, int) else effort,
        "response_format": response_format,
    }
    try:
        given = {key: value for key, value in body.items() if value is not None}
        converted = recipe.ChatCompletionRequest(given).convert(recipe.ConversionOptions())
        prompt = recipe.DeepseekV41Encoding().render_conversation(converted.conversation)
    except (recipe.ConversionError, ValueError, TypeError) as exc:
        raise RequestError(f"chat request: {exc}") from exc
    return converted, prompt, images


def parse(
    text: str, *, stage: str | None = "reasoning", tools: bool = True, forced_call: bool = False
) -> dict[str, Any]:
    """A reply as {"role", "content", "reasoning_content": str | None, "tool_calls": list | None}.

    The result can be appended to the messages of the next turn. text: decoded with skip_special_tokens=False,
    since a vocabulary may mark `</think>` as special; one EOS at the end is dropped. stage: where the prompt
    left off, "reasoning" (thinking on), None (off), or "reasoning_continued" / "content_continued" after a
    message with `prefix`. tools: look for tool calls. forced_call: the prompt has already opened the block of
    calls.
    """
    generator = recipe.ChatCompletionRequest.chunk_generator(
        recipe.ConversationRequest(recipe.Conversation([recipe.UserMessage("")]), recipe.ModelVersion.DeepseekV41Flash),
        "",
        _MODEL,
    )
    options = recipe.ParsingOptions(
        parse_tool_calls=tools,
        starts_in_tool_calls=forced_call,
        thinking_initial_stage=None if stage is None else _STAGES[stage],
    )
    processor = recipe.StreamProcessor(generator, options)
    response = recipe.ChatCompletionResponse("", _MODEL, 0, 0, 0)
    chunks = (
        recipe.InferenceChunk.ready(),
        recipe.InferenceChunk.text(text.removesuffix(EOS)),
        recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop),
    )
    events = [event for chunk in chunks for event in processor.push(chunk)] + processor.finish()
    for event in events:
        response.accumulate(cast("recipe.ChatCompletionChunk", event))
    message = json.loads(response.to_json())["choices"][0]["message"]
    calls = [{k: v for k, v in call.items() if k != "index"} for call in message.get("tool_calls", [])]
    return {
        "role": "assistant",
        "content": message["content"],
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": calls or None,
    }


def _check_effort(thinking: bool | None, effort: str | int | None) -> str | int | None:
    if isinstance(effort, bool) or (isinstance(effort, int) and not 1 <= effort <= 100):
        raise RequestError(f"reasoning_effort = {effort!r}: a number must be within 1..100")
    if thinking and effort == "none":
        raise RequestError('thinking=True and reasoning_effort="none" contradict each other: leave one out')
    return effort


def _detach_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[ImageInput]]:
    """Messages in which a numbered stub URL stands for each image, and the images."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of dicts, not {type(messages).__name__}")
    images: list[ImageInput] = []
    plain = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{number}] must be a dict with role and content, not {message!r}")
        message = dict(message)
        if isinstance(message.get("content"), list | tuple):
            message["content"] = [_detach(part, images, number) for part in message["content"]]
        plain.append(message)
    return plain, images


def _detach(part: Any, images: list[ImageInput], number: int) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image", "image_url"):
        return part
    image = part.get(kind)
    if isinstance(image, Mapping):
        image = image.get("url")
    if image is None:
        form = f'{{"type": "{kind}", "{kind}": ...}}'
        raise RequestError(f"messages[{number}] has an image part without an image; the form is {form}")
    images.append(image)
    return {"type": "image_url", "image_url": {"url": f"{_STUB}{len(images) - 1}"}}


def _split(prompt: str, ranges: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """The prompt as (text, is a control token) pieces."""
    pieces, at = [], 0
    for start, end in ranges:
        if start > at:
            pieces.append((prompt[at:start], False))
        pieces.append((prompt[start:end], True))
        at = end
    if at < len(prompt):
        pieces.append((prompt[at:], False))
    return pieces


def _ranges(pieces: Sequence[tuple[str, bool]]) -> list[tuple[int, int]]:
    ranges, at = [], 0
    for text, special in pieces:
        if special:
            ranges.append((at, at + len(text)))
        at += len(text)
    return ranges


def _set_effort(text: str, effort: int) -> str:
    """The recipe takes levels only; the format itself takes any number (spec section 13)."""
    _, rest = text.removeprefix(_EFFORT_LINE).split(" ", 1)
    return f"{_EFFORT_LINE}{effort} {rest}"


def _encode(pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer, image_token: int | None) -> list[int]:
    """Ids of the pieces. A control token that the vocabulary lacks is part of the text around it."""
    ids: list[int] = []
    text = ""
    for piece, special in pieces:
        token = None
        if special:
            token = image_token if piece == _IMAGE else tokenizer.token_to_id(piece)
        if token is None:
            text += piece
            continue
        if text:
            ids += tokenizer.encode_ordinary(text)
            text = ""
        ids.append(token)
    return ids + tokenizer.encode_ordinary(text) if text else ids
