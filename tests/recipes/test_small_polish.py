"""The registers of the polish stage: only answers count, and their commas and stops count more."""

from __future__ import annotations

import random
import re

import torch

from recipes.small import polish
from recipes.small import tokenizer as tok


def test_only_answers_count_and_their_stops_count_more() -> None:
    backend = tok.load()
    ids, weights = polish.registers(random.Random(1), 4, 160)
    assert ids.shape == (4, 161) and weights.shape == (4, 160)
    assert set(weights.unique().tolist()) == {0.0, 1.0, polish.POINT}
    for row, weight in zip(ids[:, 1:].tolist(), weights.tolist(), strict=True):
        inside = [token for token, w in zip(row, weight, strict=True) if w]
        text = backend.decode(inside, skip_special_tokens=True)
        assert text.startswith("The list of") and "Repeat" not in text
        points = [backend.decode([token]) for token, w in zip(row, weight, strict=True) if w == polish.POINT]
        assert set(points) <= {",", "."} and "," in points


def test_lists_have_every_length_and_answers_repeat_them() -> None:
    rng = random.Random(2)
    lengths = set()
    for _ in range(200):
        text = polish.register(rng)
        lists = re.findall(r"The list of \w+: ([^.]*)\.", text)
        assert len(lists) % 2 == 0 and sorted(lists[: len(lists) // 2]) == sorted(lists[len(lists) // 2 :])
        lengths |= {item.count(",") + 1 for item in lists}
    assert lengths == set(range(*polish.WORDS_OF_A_LIST))


def test_a_seed_gives_the_same_registers() -> None:
    first, again = (polish.registers(random.Random("lists"), 2, 64)[0] for _ in range(2))
    assert torch.equal(first, again)
