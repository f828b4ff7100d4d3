"""`small`, the trained checkpoint inside the package: it loads, talks, and says the same however it is run.

The assertions hold for any good run of recipes/small, not for the texts of one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from deepinfer import LLM, ConfigError, RequestOutput, SamplingParams
from deepinfer.cli.main import run
from deepinfer.config import DEFAULT_MODEL, SHIPPED
from deepinfer.engine.load import checkpoint_folder
from deepinfer.text import chat
from recipes.small.mixture import document
from recipes.small.prepare import held_out_prompts, needle_cases

ROOT = Path(__file__).parents[1]
FOLDER = SHIPPED["small"]
MOST_BYTES = 10_000_000
KNOWN_WORDS = 0.95  # least share of a text's words that the training text has
GREEDY = SamplingParams(max_tokens=350, temperature=0)
OPENINGS = ("Once upon a time, there was a little fox named", "One day, a girl named Mia went to the park.")
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "How many legs does a spider have?": "eight",
    "What color is a banana?": "yellow",
    "How many days are in a week?": "seven",
    "What is your name?": "Pip",
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("small", max_num_seqs=16) as made:
        yield made
        made.engine.check_idle()


@cache
def vocabulary() -> frozenset[str]:
    """The words of the recipe's tables and of a thousand documents that the model never saw."""
    tables = [(ROOT / "recipes" / "small" / name).read_text(encoding="utf-8") for name in ("talk.txt", "plots.txt")]
    documents = [document(0, "heldout", i).text for i in range(1000)]
    return frozenset(word for text in (*tables, *documents) for word in words(text))


def words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def known(text: str) -> float:
    """The share of known words; broken characters count as words that nobody knows."""
    found = [*words(text), *("\ufffd" * text.count("\ufffd"))]
    return sum(word in vocabulary() for word in found) / len(found)


def texts(outputs: Sequence[RequestOutput]) -> list[str]:
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].text for output in outputs]


# ---- the folder and its name ----


def test_the_folder_is_whole_small_and_says_how_it_was_made() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= MOST_BYTES
    assert (FOLDER / "tokenizer.json").read_bytes() == (ROOT / "recipes" / "small" / "tokenizer.json").read_bytes()
    about = json.loads((FOLDER / "about.json").read_text(encoding="utf-8"))
    assert about["made_by"] == "recipes/small"
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?", about["commit"]) and re.fullmatch(r"\d{4}-\d\d-\d\d", about["date"])
    assert about["steps"] > 0 and about["seconds"] > 0 and about["device"]


def test_the_wheel_takes_every_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for file in FOLDER.iterdir():
        path = PurePosixPath("data", "small", file.name)
        assert any(path.match(pattern) for pattern in project["package-data"]["deepinfer"]), path


def test_the_name_means_the_package_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()  # anybody's folder
    assert DEFAULT_MODEL == "small" and checkpoint_folder("small") == FOLDER
    assert checkpoint_folder("./small") == Path("small")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_missing_folder_and_an_unknown_name_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'smal' is neither .* small \(trained\), tiny, "):
        checkpoint_folder("smal")
    (tmp_path / "config.json").write_text("{}")  # the weights were stripped
    for folder in (tmp_path / "absent", tmp_path):
        monkeypatch.setitem(SHIPPED, "small", folder)
        with pytest.raises(ConfigError, match=rf"not in {folder}: install deepinfer again, .*docs/small\.md"):
            checkpoint_folder("small")


# ---- what it says ----


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_stories_are_english_and_end(llm: LLM, temperature: float) -> None:
    params = GREEDY.replace(temperature=temperature, seed=1)
    outputs = llm.generate(list(OPENINGS), params, use_tqdm=False)
    for text in texts(outputs):
        assert len(words(text)) >= 40 and text.count(".") >= 4
        assert known(text) >= KNOWN_WORDS, text
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


@pytest.mark.parametrize("thinking", [False, True])
def test_answers_are_parsed_and_mostly_right(llm: LLM, thinking: bool) -> None:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = GREEDY.replace(max_tokens=80, skip_special_tokens=False)
    outputs = llm.chat(conversations, params, thinking=thinking, use_tqdm=False)
    right = 0
    for text, answer in zip(texts(outputs), QUESTIONS.values(), strict=True):
        reply: dict[str, Any] = chat.parse(text, stage="reasoning" if thinking else None)
        assert bool(reply.get("reasoning_content")) == thinking
        assert "<" not in reply["content"] and known(reply["content"]) >= KNOWN_WORDS
        right += answer in reply["content"]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    assert right >= len(QUESTIONS) - 1


def test_it_remembers_the_conversation(llm: LLM) -> None:
    messages = [
        {"role": "user", "content": "My name is Mia."},
        {"role": "assistant", "content": "Hello, Mia! Nice to meet you."},
        {"role": "user", "content": "What is my name?"},
    ]
    (text,) = texts(llm.chat(messages, GREEDY, thinking=False, use_tqdm=False))
    assert "Mia" in text


def test_it_finds_what_stands_a_thousand_tokens_above(llm: LLM) -> None:
    """Far beyond the window and the top-k; the cases of recipes/small/evaluate.py."""
    cases = needle_cases(0, ((1000, 2),))
    assert min(case["tokens"] for case in cases) > 800
    found = texts(llm.generate([case["prompt"] for case in cases], GREEDY.replace(max_tokens=40), use_tqdm=False))
    assert sum(text.startswith(case["answer"]) for text, case in zip(found, cases, strict=True)) >= len(cases) - 1


# ---- the same, however it is run ----


def test_batch_chunks_and_replay_do_not_change_the_text(llm: LLM) -> None:
    """Greedy ids of 16 prompts, quantised numerics: margins are wide enough for exact equality."""
    prompts: list[Any] = [row["prompt"] for row in held_out_prompts(0, 14)]
    prompts += [case["prompt"] for case in needle_cases(0, ((1000, 1),))[:2]]
    params = GREEDY.replace(max_tokens=60)

    def ids(made: LLM, one_by_one: bool = False) -> list[list[int]]:
        parts = [[prompt] for prompt in prompts] if one_by_one else [prompts]
        outputs = [output for part in parts for output in made.generate(part, params, use_tqdm=False)]
        return [output.outputs[0].token_ids for output in outputs]

    wanted = ids(llm)
    assert ids(llm, one_by_one=True) == wanted
    for options in ({"replay": "off"}, *({"max_num_batched_tokens": rows} for rows in (128, 37))):
        with LLM("small", max_num_seqs=16, **options) as other:
            assert ids(other) == wanted, options


# ---- the commands ----


def test_generate_and_chat_take_it_when_no_model_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    assert run(["generate", "-p", OPENINGS[0], "--temperature", "0", "--max-tokens", "60"]) == 0
    assert known(capsys.readouterr().out.replace("(60 tokens, length)", "")) >= KNOWN_WORDS
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n/history\n"))
    assert run(["chat", "--no-thinking", "--temperature", "0"]) == 0
    reply, asked, again = capsys.readouterr().out.splitlines()
    assert (asked, again) == ("user: What is the capital of France?", f"assistant: {reply}")


def test_the_demo_is_readable_and_names_the_checkpoint() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "examples/demo.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    said, summary = done.stdout.split("\nmodel  ")
    assert "small: trained by recipes/small on text it generates itself, " in summary
    assert "RESULTS.md" in summary and "tok/s" in summary and "tok/s" in done.stderr
    labels = r"\(temperature [\d.]+\)|^(you|model): "
    assert known(re.sub(labels, "", said, flags=re.M)) >= KNOWN_WORDS


def test_a_long_system_prompt_and_a_second_turn_hit_the_prefix_cache(llm: LLM) -> None:
    system = "You are a kind helper. " + "The fox lives in the green forest with a small bird. " * 340
    params = SamplingParams(temperature=0, max_tokens=60)

    def ask(*messages: tuple[str, str]) -> RequestOutput:
        said = [{"role": role, "content": text} for role, text in messages]
        return llm.chat(said, params, thinking=False, use_tqdm=False)[0]

    llm.reset_prefix_cache()
    first = ask(("system", system), ("user", "Tell me a short story about a fox."))
    second = ask(("system", system), ("user", "What is the capital of France?"))
    assert len(first.prompt_token_ids) > 4000 and first.num_cached_tokens == 0
    assert second.num_cached_tokens > 4000 and "Paris" in second.outputs[0].text

    question = "Tell me a long story about a little bear."
    story = "Once upon a time, a little bear lived in a cave. " * 15
    once = ask(("user", question), ("assistant", story), ("user", "What was it about?"))
    again = ask(
        *(("user", question), ("assistant", story), ("user", "What was it about?")),
        *(("assistant", once.outputs[0].text), ("user", "Thank you!")),
    )
    assert once.num_cached_tokens == 0 and again.num_cached_tokens >= 128
