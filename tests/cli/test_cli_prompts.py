"""Prompts files: every form, paths relative to the file, every bad item told by its line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.cli.prompts import read_prompts, shown, terminal_text
from deepinfer.errors import RequestError


def jsonl(folder: Path, *items: Any) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(item) for item in items), encoding="utf-8")
    return str(path)


def test_text_files_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('one\n\n{"two"}\n你好\n', encoding="utf-8")
    wanted = [{"prompt": "one"}, {"prompt": '{"two"}'}, {"prompt": "你好"}]
    assert read_prompts(str(path)) == wanted
    monkeypatch.setattr("sys.stdin", io.StringIO(path.read_text(encoding="utf-8")))
    assert read_prompts("-") == wanted


def test_json_forms(tmp_path: Path) -> None:
    items = ["text", [1, 2], {"prompt": "p"}, {"prompt_token_ids": [3]}, {"messages": [], "thinking": False}]
    wanted = [{"prompt": "text"}, {"prompt_token_ids": [1, 2]}, *items[2:]]
    assert read_prompts(jsonl(tmp_path, *items)) == wanted
    (tmp_path / "prompts.json").write_text(json.dumps(items))
    assert read_prompts(str(tmp_path / "prompts.json")) == wanted


def test_image_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    data = "data:image/png;base64,AAAA"
    part = {"type": "image_url", "image_url": {"url": "b.png"}}
    text = {"type": "text", "text": "t"}
    path = jsonl(
        tmp_path,
        {"prompt": "p", "multi_modal_data": {"image": ["a.png", data, "/abs/c.png"]}},
        {"prompt": "p", "multi_modal_data": {"image": "a.png"}},
        {"messages": [{"role": "user", "content": [part, text, {"type": "image", "image": "d.png"}]}]},
    )
    many, one, chat = read_prompts(path)
    assert many["multi_modal_data"]["image"] == [str(tmp_path / "a.png"), data, "/abs/c.png"]
    assert one["multi_modal_data"]["image"] == [str(tmp_path / "a.png")]
    picture, same_text, other = chat["messages"][0]["content"]
    assert picture["image_url"]["url"] == str(tmp_path / "b.png")
    assert same_text == text and other["image"] == str(tmp_path / "d.png")


def test_every_bad_item_is_told(tmp_path: Path) -> None:
    bad = {
        "5": "expected a text",
        "[1, true]": "expected a text",
        "{}": "exactly one of",
        '{"prompt": "a", "messages": []}': "exactly one of",
        '{"prompt": 5}': "prompt has the wrong type",
        '{"messages": "hi"}': "messages has the wrong type",
        '{"prompt": "a", "thinking": true}': "unknown keys thinking",
        '{"prompt": "a", "multi_modal_data": "x.png"}': "multi_modal_data must be",
        "{": "not JSON",
        "[" * 100_000: "not JSON",
    }
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(['"fine"', *bad]))
    with pytest.raises(RequestError) as error:
        read_prompts(str(path))
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == len(bad)
    for number, words in enumerate(bad.values(), start=2):
        assert any(f"line {number}: " in line and words in line for line in lines), (number, lines)


def test_files_without_prompts(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "bad.json").write_text("[1")
    for name, words in (("empty.txt", "no prompts"), ("bytes.txt", "UTF-8"), ("bad.json", "not JSON")):
        with pytest.raises(RequestError, match=words):
            read_prompts(str(tmp_path / name))
    with pytest.raises(RequestError, match="absent"):
        read_prompts(str(tmp_path / "absent"))


def test_model_text_cannot_steer_the_terminal() -> None:
    assert terminal_text("a\x1b[2J\tb\n\x9bé好") == "a\ufffd[2J\tb\n\ufffdé好"


def test_shown_is_one_short_line() -> None:
    assert shown({"prompt": "a\n  b"}) == "a b"
    assert shown({"prompt_token_ids": [1, 2]}) == "[1, 2]"
    content = [{"type": "image", "image": "x"}, {"type": "text", "text": "what?"}]
    assert shown({"messages": [{"role": "user", "content": content}]}) == "[image] what?"
    assert len(shown({"prompt": "x" * 500})) == 100
