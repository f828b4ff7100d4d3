"""The corpus of the small model: reproducible, well formed, in the formats that training and the engine read."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer.text import chat
from deepinfer.text.tokenizer import Tokenizer, engram_token_map
from recipes.small import dialogues, knowledge, mixture, prepare, stories, tasks
from recipes.small import tokenizer as tok
from recipes.small.world import ANIMALS, PLACES

STORIES = 400  # stories that a check of the language reads
NEEDLE_LENGTH = 0.3  # a needle prompt may miss its nominal length by this share
TOKENIZER_LIMIT = 100_000  # bytes of the shipped tokenizer.json


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tok.FILE)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A small corpus made by two workers."""
    out = tmp_path_factory.mktemp("corpus")
    return out, prepare.prepare(out, tokens=60_000, heldout=10_000, seed=5, workers=2)


def _documents(path: Path) -> list[np.ndarray]:
    ids = np.fromfile(path, "<u2")
    ends = np.flatnonzero(np.append(ids[1:], tok.BOS_ID) == tok.BOS_ID) + 1
    return np.split(ids, ends[:-1])


def test_the_number_of_workers_does_not_matter(prepared: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, meta = prepared
    assert prepare.prepare(tmp_path, tokens=60_000, heldout=10_000, seed=5, workers=1) == meta
    for file in sorted(out.iterdir()):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_files_hold_whole_documents_as_the_mixture_makes_them(
    prepared: tuple[Path, dict[str, Any]], tokenizer: Tokenizer
) -> None:
    out, meta = prepared
    for split, least in (("train", 60_000), ("heldout", 10_000)):
        documents = _documents(out / f"{split}.bin")
        expected = [mixture.document(5, split, i) for i in range(len(documents))]
        for ids, made in zip(documents, expected, strict=True):
            assert ids[0] == tok.BOS_ID and ids[-1] == tok.EOS_ID and tok.BOS_ID not in ids[1:]
            assert tokenizer.decode(ids[1:-1].tolist(), skip_special_tokens=False) == made.text
        said = meta["files"][f"{split}.bin"]
        assert said["tokens"] == sum(map(len, documents)) >= least
        assert said["tokens"] - len(documents[-1]) < least  # not a document more than asked for
        assert said["documents"] == len(documents)
        counts = Counter(d.source for d in expected)
        assert {name: row["documents"] for name, row in said["sources"].items()} == {
            **dict.fromkeys(mixture.SOURCES, 0),
            **counts,
        }
        assert said["bytes"] == sum(len("".join(tok.split_control(d.text)).encode()) for d in expected)


def test_shipped_tokenizer_is_what_its_command_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tokenizer", "--out", str(tmp_path / "tokenizer.json")])
    tok.main()
    assert (tmp_path / "tokenizer.json").read_bytes() == tok.FILE.read_bytes()
    assert tok.FILE.stat().st_size <= TOKENIZER_LIMIT


def test_control_tokens_stand_where_the_synthetic_checkpoints_have_them(tokenizer: Tokenizer) -> None:
    tiny = Tokenizer(Path(__file__).parents[1] / "data/tiny")
    assert tokenizer.vocab_size == tok.VOCAB_SIZE
    shift = tok.VOCAB_SIZE - tiny.vocab_size
    for text in tok.CONTROL:
        old = tiny.token_to_id(text)
        assert old is not None
        assert tokenizer.token_to_id(text) == (old if old < 3 else old + shift), text
    assert tokenizer.special_ids == {0, 1, 2, *range(tok.VOCAB_SIZE - len(tok.LAST), tok.VOCAB_SIZE)}
    assert 1000 < engram_token_map(tokenizer, tok.VOCAB_SIZE).max() < tok.VOCAB_SIZE


@pytest.mark.parametrize("text", ["\x00\x7f\u00a0 é ß 漢字 🦊\r\n\t", "Sums: 12 + 305 = 317.", "  two  blanks  "])
def test_every_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text


def test_numbers_are_read_digit_by_digit(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.token_bytes(i).decode() for i in tokenizer.encode_ordinary("7 and 305 is 312.")]
    assert pieces == ["7", " and", " 3", "0", "5", " is", " 3", "1", "2", "."]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("system", ["", "You are Pip."])
def test_chat_documents_are_in_the_format_of_the_engine(tokenizer: Tokenizer, thinking: bool, system: str) -> None:
    turns = [("Hi!", "A greeting.", "Hello!"), ("What is 1 plus 1?", "I have to add.", "2.")]
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello!"}]
    messages += [{"role": "user", "content": "What is 1 plus 1?"}]
    rendered = chat.render(messages, tokenizer=tokenizer, image_token=tok.IMAGE_ID, thinking=thinking)
    prompt = dialogues.chat(turns, thinking=thinking, system=system, open_end=True)
    assert tok.BOS + prompt == rendered.text
    assert tokenizer.encode(prompt) == rendered.token_ids
    document = dialogues.chat(turns, thinking=thinking, system=system)
    reply = rendered.parse(document.removeprefix(prompt) + tok.EOS)
    assert reply["content"] == "2." and reply["reasoning_content"] == ("I have to add." if thinking else None)


def _tales() -> list[stories.Tale]:
    return [stories.tell(random.Random(f"tale {n}")) for n in range(STORIES)]


def test_stories_are_clean_english_and_differ() -> None:
    tales = _tales()
    assert len({tale.text for tale in tales}) > 0.98 * STORIES
    assert len({tale.title for tale in tales}) > 50
    for tale in tales:
        text = tale.text
        assert not re.search(r"[{}|@<>_]|  | ,| \.|\.\.|\bNone\b", text), text
        assert not re.search(r"\b[Aa] [aeio]\w|\b[Aa]n [^aeio\W]", text), text  # no word here breaks the rule of vowels
        assert not re.search(r"(^|[.!?] |\n)[a-z]", text), text
        assert text.count('"') % 2 == 0, text
        assert re.search(r'[.!?]"?$', text), text
        assert all(len(paragraph) > 30 for paragraph in text.split("\n\n")[:-1]), text


def test_questions_about_a_story_are_answered_in_it() -> None:
    for tale in _tales():
        assert len(tale.facts) >= 3
        assert len({question for question, _ in tale.facts}) == len(tale.facts)
        for question, answer in tale.facts:
            assert re.fullmatch(r"[A-Z].*\?", question) and re.fullmatch(r"[A-Z\"].*[.!]", answer), (question, answer)
            names = re.findall(r"\b[A-Z]\w+", question)[1:]
            assert all(name in tale.text for name in names), (question, tale.text)


def test_every_plot_is_told_everywhere_by_everybody() -> None:
    for plot in stories.plots():
        for kind in stories.HEROES:
            tale = stories.Tale(random.Random(f"{plot.title} {kind}"), kind)
            tale.play(plot)
            assert tale.hero.kind == kind and tale.hero.name in tale.text and tale.friend.name != tale.hero.name
    assert all(kind in ANIMALS for place in PLACES.values() for kind in place.kinds)


def test_sums_are_right() -> None:
    rng = random.Random(0)
    for _ in range(500):
        question, thought, reply = knowledge.total(rng)
        left, right = re.search(r"(\d+ [+-] \d+) = (\d+)", thought).groups()
        a, sign, b = left.split(" ")
        assert int(a) + (int(b) if sign == "+" else -int(b)) == int(right) >= 0
        assert reply.endswith(f" is {right}.") and a in question and b in question


@pytest.mark.parametrize("kind", tasks.NEEDLE_KINDS)
@pytest.mark.parametrize("length", [1000, 4000])
def test_needles_can_be_found_and_only_once(tokenizer: Tokenizer, kind: str, length: int) -> None:
    cases = [row for row in prepare.needle_cases(3, ((length, 4),)) if row["kind"] == kind]
    assert len(cases) == 4
    for case in cases:
        assert case["prompt"].count(case["answer"]) == 1
        assert case["tokens"] == len(tokenizer.encode(case["prompt"])) == pytest.approx(length, rel=NEEDLE_LENGTH)
        assert 0 < case["distance"] < case["tokens"]


def test_prompts_of_every_kind_are_ready_to_continue(
    prepared: tuple[Path, dict[str, Any]], tokenizer: Tokenizer
) -> None:
    rows = [json.loads(line) for line in (prepared[0] / "prompts.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) >= 200 and len({row["prompt"] for row in rows}) > 0.9 * len(rows)
    kinds = Counter(row["kind"] for row in rows)
    assert {"story", "chat", "story-question", "recall-secret", "recall-code", "recall-copy"} == set(kinds)
    for row in rows:
        assert row["prompt"] == row["prompt"].strip()
        ids = tokenizer.encode(row["prompt"])
        assert ids[0] == tok.BOS_ID and tok.BOS_ID not in ids[1:] and ids[-1] != tok.EOS_ID
        assert (row["answer"] is None) == (row["kind"] in ("story", "chat"))


def test_samples_show_the_present_corpus() -> None:
    file = Path(mixture.__file__).parent / "samples/documents.txt"
    assert file.read_text("utf-8") == mixture.samples(2)
