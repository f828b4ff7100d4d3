"""`deepinfer chat`: turns, commands, what a failed or stopped turn leaves behind."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.mock_engine import EOS, VOCAB

from deepinfer.model.synthetic import TINY_TOKENIZER
from deepinfer.text.tokenizer import Tokenizer

THINK_END = "</think>"


@pytest.fixture
def talk(deepinfer: Callable[..., Any], mock_model: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`talk(reply, *lines)`: a session in which the model answers every turn with `reply`."""
    tokenizer = Tokenizer(TINY_TOKENIZER)
    assistant = tokenizer.token_to_id("<｜Assistant｜>")

    def call(reply: str, *lines: str, options: tuple[str, ...] = ()) -> Any:
        marks = reply.split(THINK_END)
        wanted = tokenizer.encode_ordinary(marks[0])
        for rest in marks[1:]:
            wanted += [tokenizer.token_to_id(THINK_END), *tokenizer.encode_ordinary(rest)]

        def answer(history: list[int]) -> torch.Tensor:
            start = len(history) - history[::-1].index(assistant)
            said = history[start + 1 :]  # behind <think> or </think>
            logits = torch.zeros(VOCAB)
            logits[wanted[len(said)] if len(said) < len(wanted) else EOS] = 100.0
            return logits

        mock_model.answer = answer
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        return deepinfer("chat", "-m", "mock", *options)

    return call


def test_a_reply_is_shown_and_remembered(talk: Callable[..., Any]) -> None:
    result = talk("I mull.</think>Hello!", "Hi", "/history", "And now?", "/history", "/exit", "never read")
    assert result.code == 0
    assert result.out.splitlines() == [
        *("I mull.", "Hello!"),
        *("user: Hi", "assistant: Hello!"),
        *("I mull.", "Hello!"),
        *("user: Hi", "assistant: Hello!", "user: And now?", "assistant: Hello!"),
    ]


def test_without_thinking_and_with_a_system_message(talk: Callable[..., Any]) -> None:
    result = talk("Hello!", "Hi", "/history", options=("--no-thinking", "--system", "Be brief."))
    assert result.out.splitlines() == ["Hello!", "system: Be brief.", "user: Hi", "assistant: Hello!"]


def test_commands(talk: Callable[..., Any]) -> None:
    result = talk("Yes.", "/think off", "Hi", "/reset", "/history", "/think maybe", "/nonsense", "/quit")
    lines = result.out.splitlines()
    assert lines[0] == "Yes." and "user: Hi" not in lines
    assert sum(line.startswith("/exit") for line in lines) == 2  # the help, twice


def test_a_turn_that_fails_is_forgotten_and_the_chat_goes_on(talk: Callable[..., Any]) -> None:
    result = talk("Yes.", "/think off", "/image absent.png", "Look", "/history", "Hi", "/history")
    assert result.code == 0
    assert "absent.png" in result.err and result.err.count("error:") == 1
    assert result.out.splitlines() == ["Yes.", "user: Hi", "assistant: Yes."]


def test_a_conversation_over_the_limit_is_told(talk: Callable[..., Any]) -> None:
    options = ("--no-thinking", "--max-model-len", "48")
    result = talk("Yes.", "Hi", "x" * 200, "/history", options=options)
    assert result.code == 0 and "48" in result.err
    assert result.out.splitlines() == ["Yes.", "user: Hi", "assistant: Yes."]


def test_ctrl_c_stops_the_reply_only(talk: Callable[..., Any], mock_model: Any) -> None:
    steps = 0

    def interrupt(step: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise KeyboardInterrupt

    mock_model.before_step = interrupt
    result = talk("Yes, indeed.", "/think off", "Hi", "/history", "Again", "/history")
    assert result.code == 0 and "this turn is forgotten" in result.out
    assert result.out.splitlines()[-3:] == ["Yes, indeed.", "user: Again", "assistant: Yes, indeed."]
    assert "user: Hi" not in result.out
