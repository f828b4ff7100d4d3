"""Prompts from the command line and from prompts files, as the dictionaries that `LLM` takes.

Belongs here: reading, the shape of each item, and opening the LLM that they are for. Does not belong here:
tokenising, images, lengths (llm.py checks them).

A `.jsonl` file holds one JSON value per line, a `.json` file a list of them; any other file (and `-`,
standard input) one prompt per line. A value is a text, a list of token ids, or an object with one of
`prompt`, `prompt_token_ids` or `messages` (chat form; with `tools`, `thinking`, `reasoning_effort`), and
`multi_modal_data` beside a prompt. Image paths are relative to the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.config import EngineConfig
from deepinfer.errors import RequestError, list_problems

if TYPE_CHECKING:
    from deepinfer.llm import LLM
    from deepinfer.text.chat import RenderedChat

SOURCES = ("prompt", "prompt_token_ids", "messages")
WITH_PROMPT = ("multi_modal_data",)
WITH_MESSAGES = ("tools", "thinking", "reasoning_effort")

Prompt = dict[str, Any]
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def read_prompts(path: str) -> list[Prompt]:
    """Every prompt of a file. Raises RequestError listing all bad items by line."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise RequestError(f"cannot read the prompts file {path}: {error.strerror}") from error
    problems: list[str] = []
    prompts: list[Prompt] = []
    for where, item in _items(path, text, problems):
        if reason := _fault(item):
            problems.append(f"{where}: {reason}")
        else:
            prompts.append(_normal(item, Path(path).parent))
    if not problems and not prompts:
        problems.append("no prompts in it")
    if problems:
        raise RequestError(list_problems(path, problems))
    return prompts


def _items(path: str, text: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    if path.endswith(".json"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            problems.append(f"not JSON: {error}")
            return
        yield from ((f"item {i}", value) for i, value in enumerate(values if isinstance(values, list) else [values]))
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line) if path.endswith(".jsonl") else line
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: not JSON: {error}")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _fault(item: Any) -> str | None:
    if isinstance(item, str) or _is_ids(item):
        return None
    if not isinstance(item, dict):
        return f"expected a text, a list of token ids or an object, got {type(item).__name__}"
    sources = [name for name in SOURCES if name in item]
    if len(sources) != 1:
        return f"needs exactly one of {', '.join(SOURCES)}; has {', '.join(sources) or 'none'}"
    allowed = {*sources, *(WITH_MESSAGES if sources == ["messages"] else WITH_PROMPT)}
    if unknown := sorted(set(item) - allowed):
        known = ", ".join(sorted(allowed - set(sources)))
        return f"unknown keys {', '.join(unknown)}; known beside {sources[0]}: {known}"
    if not isinstance(item.get("multi_modal_data", {}), dict):
        return 'multi_modal_data must be an object such as {"image": "picture.png"}'
    value = item[sources[0]]
    shapes = {
        "prompt": isinstance(value, str),
        "prompt_token_ids": _is_ids(value),
        "messages": isinstance(value, list),
    }
    return None if shapes[sources[0]] else f"{sources[0]} has the wrong type, {type(value).__name__}"


def _normal(value: Any, folder: Path) -> Prompt:
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, list):
        return {"prompt_token_ids": value}
    item: Prompt = value
    if "messages" in item:
        return item | {"messages": [_resolve_message(message, folder) for message in item["messages"]]}
    if images := item.get("multi_modal_data", {}).get("image"):
        paths = images if isinstance(images, list) else [images]
        return item | {"multi_modal_data": {"image": [_resolve(path, folder) for path in paths]}}
    return item


def _resolve_message(message: Any, folder: Path) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    return message | {"content": [_resolve_part(part, folder) for part in message["content"]]}


def _resolve_part(part: Any, folder: Path) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("image", "image_url"):
        return part
    image = part.get(kind)
    if isinstance(image, dict):
        return part | {kind: image | {"url": _resolve(image.get("url"), folder)}}
    return part | {kind: _resolve(image, folder)}


def _resolve(path: Any, folder: Path) -> Any:
    return path if not isinstance(path, str) or ":" in path else str(folder / path)


def shown(prompt: Prompt, width: int = 100) -> str:
    """A line that reminds a person of the prompt: its text, its last message, or its ids."""
    if "messages" in prompt:
        message = prompt["messages"][-1] if prompt["messages"] else {}
        content = message.get("content") if isinstance(message, dict) else message
        parts = content if isinstance(content, list) else [{"text": content}]
        text = " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts if isinstance(part, dict))
    else:
        text = str(prompt.get("prompt") or prompt.get("prompt_token_ids"))
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def terminal_text(text: str) -> str:
    """Model text for a person: control characters, which could steer a terminal, are replaced."""
    return text.translate(_CONTROLS)


def open_llm(config: EngineConfig) -> LLM:
    """The LLM for validated engine options. This is where a command imports torch."""
    from dataclasses import asdict

    from deepinfer.llm import LLM

    return LLM(**asdict(config))


def as_llm_prompt(prompt: Prompt, llm: LLM) -> tuple[Prompt, str | None]:
    """The prompt in a form that `LLM.generate` takes, and the text that a conversation was rendered to."""
    if "messages" not in prompt:
        return prompt, None
    rendered = render(prompt, llm)
    return {
        "prompt_token_ids": rendered.token_ids,
        "multi_modal_data": {"image": rendered.images},
    }, rendered.text


def render(prompt: Prompt, llm: LLM) -> RenderedChat:
    """A conversation in the model's format; its `parse` reads the reply."""
    from deepinfer.text import chat

    config = llm.engine.model_config
    options = {name: value for name, value in prompt.items() if name != "messages"}
    image_token = None if config.vision is None else config.image_token_id
    return chat.render(prompt["messages"], tokenizer=llm.engine.tokenizer, image_token=image_token, **options)
