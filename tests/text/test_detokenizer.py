"""Incremental text and stop strings: the pieces never matter (bugs B24)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer.errors import RequestError
from deepinfer.text.detokenizer import Detokenizer, StopChecker
from deepinfer.text.tokenizer import Tokenizer

HARD_TEXT = "你好，世界！👩‍👩‍👧‍👦🏳️‍🌈 naïve e\u0301 ﷽ 𝕏 \u200d end"


def pushed(tokenizer: Tokenizer, groups: list[list[int]], skip: bool = True) -> tuple[list[str], str]:
    """Text given out after each group, and the flush."""
    detokenizer = Detokenizer(tokenizer, skip)
    return [detokenizer.push(group) for group in groups], detokenizer.finish()


@settings(max_examples=300, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(0, 511) | st.integers(100, 260), max_size=4), max_size=20),
    skip=st.booleans(),
)
def test_pieces_equal_whole(tiny: Tokenizer, groups: list[list[int]], skip: bool) -> None:
    ids = [i for group in groups for i in group]
    pieces, rest = pushed(tiny, groups, skip)
    singles, single_rest = pushed(tiny, [[i] for i in ids], skip)
    whole = tiny.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) + rest == "".join(singles) + single_rest == whole
    assert rest in ("", "\ufffd")


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example(HARD_TEXT)
def test_complete_text_shows_no_replacement(tiny: Tokenizer, v4: Tokenizer, text: str) -> None:
    for tokenizer in (tiny, v4):
        pieces, rest = pushed(tokenizer, [[i] for i in tokenizer.encode_ordinary(text)])
        assert "".join(pieces) == text and rest == ""
        assert "".join(pieces).count("\ufffd") == text.count("\ufffd")
        shown = ""
        for piece in pieces:
            shown += piece
            assert text.startswith(shown)


def test_character_split_over_byte_tokens(tiny: Tokenizer) -> None:
    single = {tiny.token_bytes(i): i for i in range(tiny.vocab_size) if len(tiny.token_bytes(i)) == 1}
    assert len(single) == 256
    family = "👩‍👧"
    pieces, rest = pushed(tiny, [[single[bytes([byte])]] for byte in family.encode()])
    assert [piece for piece in pieces if piece] == list(family) and rest == ""
    # cut inside the last character: it is held back, then flushed as one sign, whatever its number of bytes
    for cut in (1, 2, 3):
        ids = [single[bytes([byte])] for byte in ("x" + "👧").encode()[: 1 + cut]]
        assert pushed(tiny, [[i] for i in ids]) == (["x"] + [""] * cut, "\ufffd")
    # bytes that can never become a character show at once, and what follows is not lost
    stray = [single[b"\xa0"], single[b"A"], single[b"\xe4"], single[b"B"]]
    assert pushed(tiny, [[i] for i in stray]) == (["\ufffd", "A", "", "\ufffdB"], "")


def test_special_tokens(tiny: Tokenizer, v4: Tokenizer) -> None:
    ids = [0, *tiny.encode_ordinary("a"), 505, *tiny.encode_ordinary("b"), 1]
    assert "".join(pushed(tiny, [[i] for i in ids], True)[0]) == "ab"
    kept = "<｜begin▁of▁sentence｜>a</think>b<｜end▁of▁sentence｜>"
    assert "".join(pushed(tiny, [[i] for i in ids], False)[0]) == kept
    # V4 marks </think> as ordinary: it stays
    ids = [0, *v4.encode_ordinary("a"), 128822, 1]
    assert "".join(pushed(v4, [[i] for i in ids], True)[0]) == "a</think>"


# ---- stop strings ----


def stream(stops: list[str], pieces: list[str], include: bool = False, unarmed: int = 0) -> tuple[str, str | None]:
    """Feed pieces, the first `unarmed` of them without may_stop."""
    checker = StopChecker(stops, include)
    out = ""
    for number, piece in enumerate(pieces):
        emit, hit = checker.push(piece, number >= unarmed)
        out += emit
        if hit is not None:
            return out, hit
    return out + checker.finish(), None


def by_find(stops: list[str], text: str, include: bool, after: int = 0) -> tuple[str, str | None]:
    """The definition: of all occurrences that end beyond `after`, the first to end; the longest of these."""
    found = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > after
    ]
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include else start], stop


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


LETTERS = st.text("ab\n你", max_size=24)


@settings(max_examples=1000, deadline=None)
@given(
    stops=st.lists(st.text("ab\n你", min_size=1, max_size=5), min_size=1, max_size=4),
    text=LETTERS,
    cuts=st.lists(st.integers(0, 24), max_size=8),
    include=st.booleans(),
    data=st.data(),
)
def test_stop_equals_find(stops: list[str], text: str, cuts: list[int], include: bool, data: st.DataObject) -> None:
    pieces = cut(text, cuts)
    unarmed = data.draw(st.integers(0, len(pieces)))
    after = len("".join(pieces[:unarmed]))
    assert stream(stops, pieces, include, unarmed) == by_find(stops, text, include, after)
    if len(stops) == 1 and not unarmed and not include:
        at = text.find(stops[0])
        assert stream(stops, pieces)[0] == (text if at < 0 else text[:at])


@pytest.mark.parametrize("pieces", [["a E", "ND b"], ["a EN", "D b"], ["a ", "E", "N", "D"], ["a xENDy"], ["a END"]])
def test_b24_stop_split_over_tokens(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert stream(["END"], pieces) == (text[: text.index("END")], "END")
    assert stream(["END"], pieces, include=True) == (text[: text.index("END") + 3], "END")


def test_first_complete_wins() -> None:
    assert stream(["bcd", "c"], ["a", "b", "c", "d"]) == ("ab", "c")
    assert stream(["bcd", "c"], ["abcd"]) == ("ab", "c")  # the same in one piece, in either order
    assert stream(["c", "bcd"], ["abcd"]) == ("ab", "c")
    assert stream(["ND", "END"], ["xEND"]) == ("x", "END")  # they end together: the longest


def test_min_tokens() -> None:
    assert stream(["END"], ["a", "END", "b"], unarmed=2) == ("aENDb", None)
    assert stream(["END"], ["a", "EN", "D", "b"], unarmed=2) == ("a", "END")  # completed after the minimum
    assert stream(["END"], ["END", "-", "END"], unarmed=1) == ("END-", "END")


def test_holds_back_no_more_than_it_must() -> None:
    checker = StopChecker(["abc", "zz"])
    assert checker.push("xxab") == ("xx", None)
    assert checker.push("ab") == ("ab", None)
    assert checker.push("d") == ("abd", None)
    assert checker.push("z") == ("", None)
    assert checker.finish() == "z" and checker.finish() == ""
    checker = StopChecker(["a" * 50 + "b"])
    emitted = 0
    for count in range(1, 2000):
        emitted += len(checker.push("a")[0])
        assert count - emitted <= 50


def test_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError, match="empty string"):
        StopChecker(["ok", ""])
    assert StopChecker([]).push("text") == ("text", None)


def test_split_character_and_stop_together(tiny: Tokenizer) -> None:
    detokenizer, checker = Detokenizer(tiny), StopChecker(["世界"])
    out, hit = "", None
    for token in tiny.encode_ordinary("你好世界！"):
        emit, hit = checker.push(detokenizer.push([token]))
        out += emit
        if hit:
            break
    assert (out, hit) == ("你好", "世界")
