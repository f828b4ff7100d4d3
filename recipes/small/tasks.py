"""Recall over a context: secret words, box codes and lists among stories, with questions at the end.

Belongs here: training documents of recall, short and long, and the held-out cases made the same way.
Does not belong here: the stories in between (stories.py), chat about one story (dialogues.py).

Every answer restates the key in the words of the context ("The secret word of Mia is lamp."), so that
copying what followed those words the last time is enough to be right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from recipes.small import stories
from recipes.small.dialogues import chat
from recipes.small.world import WORDS, any_name

NEEDLE_KINDS = ("secret", "code", "copy")
_PER_STORY = 210  # about the tokens of a story, to plan lengths


@dataclass(frozen=True)
class Fact:
    """What the context says, how it is asked for, and the answer."""

    kind: str
    statement: str
    question: str
    answer: str


def _secret(rng: random.Random, name: str) -> Fact:
    statement = f"The secret word of {name} is {rng.choice(WORDS)}."
    return Fact("secret", statement, f"What is the secret word of {name}?", statement)


def _code(rng: random.Random, word: str) -> Fact:
    statement = f"The code of the {word} box is {rng.randrange(1000, 10000)}."
    return Fact("code", statement, f"What is the code of the {word} box?", statement)


def _copy(rng: random.Random, name: str) -> Fact:
    words = ", ".join(rng.sample(WORDS, rng.randrange(4, 9)))
    return Fact("copy", f"The list of {name}: {words}.", f"Repeat the list of {name}.", f"The list of {name}: {words}.")


def facts(rng: random.Random, count: int, kinds: tuple[str, ...] = NEEDLE_KINDS) -> list[Fact]:
    """Facts with different keys."""
    names: dict[str, None] = {}
    while len(names) < count:
        names[any_name(rng)] = None
    boxes = rng.sample(WORDS, count) if count <= len(WORDS) else []
    made = []
    for name, box in zip(names, boxes, strict=True):
        kind = rng.choice(kinds)
        made.append(_code(rng, box) if kind == "code" else (_secret if kind == "secret" else _copy)(rng, name))
    return made


def _ask(rng: random.Random, context: str, asked: list[Fact]) -> str:
    """The context and its questions with answers, as plain text or as a conversation."""
    if rng.random() < 0.4:
        return context + "".join(f"\n\nQuestion: {f.question}\nAnswer: {f.answer}" for f in asked)
    turns = [(f.question, "", f.answer) for f in asked]
    turns[0] = (f"{context}\n\n{turns[0][0]}", "", turns[0][2])
    return chat(turns, thinking=False)


def recall_document(rng: random.Random) -> str:
    """A short register of facts and questions about most of them, in another order."""
    kinds = rng.choice((("secret",), ("code",), ("copy",), NEEDLE_KINDS))
    count = rng.randrange(2, 9 if kinds == ("copy",) else 25)
    made = facts(rng, count, kinds)
    context = rng.choice((" ", "\n")).join(f.statement for f in made)
    asked = rng.sample(made, max(1, count * 2 // 3))
    return _ask(rng, context, asked)


def _woven(rng: random.Random, made: list[Fact], count: int) -> str:
    """Titled stories with the facts as paragraphs between them."""
    parts = []
    for _ in range(count):
        tale = stories.tell(rng)
        parts.append(f"{tale.title}\n\n{tale.text}")
    for fact in made:
        parts.insert(rng.randrange(len(parts)), fact.statement)
    return "\n\n".join(parts)


def long_document(rng: random.Random) -> str:
    """1,000 to 8,000 tokens of stories, facts between them, several questions at the end."""
    count = rng.randrange(4, 33)
    made = facts(rng, rng.randrange(3, 13))
    return _ask(rng, _woven(rng, made, count), rng.sample(made, min(len(made), 8)))


def lookup_document(rng: random.Random) -> str:
    """Two to eight stories with many facts between them, and a question about every fact: 500 to 2,000 tokens."""
    made = facts(rng, rng.randrange(4, 17), rng.choice((NEEDLE_KINDS, ("secret", "code"))))
    return _ask(rng, _woven(rng, made, rng.randrange(2, 9)), rng.sample(made, len(made)))


def recall_prompt(rng: random.Random) -> tuple[str, str, str | None]:
    """A held-out prompt of a short register and its answer."""
    made = facts(rng, rng.randrange(2, 13))
    fact = rng.choice(made)
    context = " ".join(f.statement for f in made)
    return (
        f"recall-{fact.kind}",
        chat([(f"{context}\n\n{fact.question}", "", "")], thinking=False, open_end=True),
        fact.answer,
    )


def needle(rng: random.Random, kind: str, tokens: int) -> tuple[str, str, str]:
    """A long prompt of about `tokens` ids with one question of that kind: (prompt, answer, the needle in it)."""
    count = max(2, tokens // _PER_STORY)
    made = facts(rng, 6)
    while all(f.kind != kind for f in made):
        made = facts(rng, 6)
    fact = rng.choice([f for f in made if f.kind == kind])
    context = _woven(rng, made, count)
    prompt = chat([(f"{context}\n\n{fact.question}", "", "")], thinking=False, open_end=True)
    return prompt, fact.answer, fact.statement
