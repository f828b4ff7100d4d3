"""`deepinfer generate` over the mock model, and once over real weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SHORT = ("--max-tokens", "3", "--ignore-eos")


def test_json_is_the_whole_of_stdout(deepinfer: Callable[..., Any], mock_model: Any) -> None:
    result = deepinfer("generate", "-m", "mock", "-p", "one", "-p", "二", *SHORT, "--logprobs", "1", "--json")
    assert result.code == 0
    first, second = json.loads(result.out)
    assert (first["prompt"], second["prompt"]) == ("one", "二")
    assert len(first["outputs"][0]["token_ids"]) == 3 and len(first["outputs"][0]["logprobs"]) == 3
    assert "tok/s" in result.err  # the progress bar


def test_text_output_and_every_kind_of_prompt(deepinfer: Callable[..., Any], mock_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": "Why?"}]}
    path.write_text("\n".join(json.dumps(item) for item in ("one", [5, 6], chat)))
    result = deepinfer("generate", "-m", "mock", "-f", path, "-p", "zero", *SHORT)
    assert result.code == 0
    assert [line for line in result.out.splitlines() if line.startswith("> ")] == [
        "> zero",
        "> one",
        "> [5, 6]",
        "> Why?",
    ]
    assert result.out.count("(3 tokens, length)") == 4
    result = deepinfer("generate", "-m", "mock", "-f", path, *SHORT, "--json")
    prompts = [item["prompt"] for item in json.loads(result.out)]
    assert prompts[:2] == ["one", None] and "Why?" in prompts[2] and "<｜User｜>" in prompts[2]


def test_a_bad_prompt_is_told_before_anything_runs(deepinfer: Callable[..., Any], mock_model: Any) -> None:
    result = deepinfer("generate", "-m", "mock", "-p", "fine", "-p", "", *SHORT)
    assert result.code == 2 and result.out == "" and "prompt 1 of 2" in result.err
    assert mock_model.steps == []


@pytest.mark.parametrize(
    "chat", [{"messages": []}, {"messages": ["x"]}, {"messages": [{"role": "user", "content": "x"}], "tools": 5}]
)
def test_a_bad_conversation_is_told_by_its_number(
    deepinfer: Callable[..., Any], mock_model: Any, tmp_path: Path, chat: Any
) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(["fine", chat]))
    result = deepinfer("generate", "-m", "mock", "-f", path, *SHORT)
    assert result.code == 2 and result.out == "" and "error: prompt 1 of 2: " in result.err
    assert mock_model.steps == []


def test_a_request_that_fails_while_it_runs_gives_exit_code_1(deepinfer: Callable[..., Any], mock_model: Any) -> None:
    mock_model.answer = lambda history: torch.full((512,), float("nan"))
    result = deepinfer("generate", "-m", "mock", "-p", "x", "--json")
    assert result.code == 1 and json.loads(result.out)[0]["error"]
    result = deepinfer("generate", "-m", "mock", "-p", "x")
    assert result.code == 1 and "error: " in result.out


def test_an_interrupt_is_told_in_one_line(deepinfer: Callable[..., Any], mock_model: Any) -> None:
    def interrupt(step: Any) -> None:
        raise KeyboardInterrupt

    mock_model.before_step = interrupt
    result = deepinfer("generate", "-m", "mock", "-p", "x")
    assert result.code == 130 and result.out == ""
    assert result.err.endswith("deepinfer: error: interrupted\n")


def test_the_real_path_from_make_checkpoint_to_text(deepinfer: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    assert deepinfer("make-checkpoint", "tiny", folder).code == 0
    again = deepinfer("make-checkpoint", "tiny", folder)
    assert again.code == 2 and "not empty" in again.err
    command = ("generate", "-m", folder, "-p", "Hello", "--max-tokens", "2", "--json", "--temperature", "0")
    first, second = deepinfer(*command), deepinfer(*command)
    assert first.code == 0
    ids = [json.loads(result.out)[0]["outputs"][0]["token_ids"] for result in (first, second)]
    assert len(ids[0]) == 2 and ids[0] == ids[1]


@pytest.mark.parametrize("name", ["huge", "full"])
def test_a_checkpoint_that_cannot_be_made(deepinfer: Callable[..., Any], tmp_path: Path, name: str) -> None:
    result = deepinfer("make-checkpoint", name, tmp_path / "new")
    assert result.code == 2 and name in result.err and result.err.count("\n") == 1


def test_a_model_by_name_uses_its_generation_config(deepinfer: Callable[..., Any], monkeypatch: Any) -> None:
    """`-m tiny` samples as `LLM("tiny")` does, also when the folder does not exist before the command."""
    from deepinfer.cli.options import generation_defaults

    assert generation_defaults("tiny").top_p == 0.95
    result = deepinfer("generate", "-m", "no-such-name", "-p", "x")
    assert result.code == 2 and "neither a folder nor a known name: small" in result.err
