"""Token ids to text while they arrive: whole characters only, and stop strings however tokens split them.

Belongs here: the two small state machines of one output sequence. Does not belong here: when a request ends.
Both take time linear in what is pushed, and give the same text however the pushes are cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from deepinfer.errors import RequestError
from deepinfer.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one output sequence. A character is given out when its last byte has arrived, never before."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _Utf8Decoder(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; "" while a character is open. Invalid bytes become U+FFFD."""
        return self._decoder.decode(b"".join(self._token_bytes(i) for i in ids if i not in self._skip))

    def finish(self) -> str:
        """What is left at the end: one U+FFFD if a character stayed open, else ""."""
        return self._decoder.decode(b"", final=True)


class StopChecker:
    """Finds stop strings in text that arrives in pieces, and holds back what may become one.

    The stop string that is complete first wins; of several that end together the longest. So the outcome
    depends on the text alone, not on the pieces. include: leave the stop string in the text. Raises
    RequestError for "".
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if any(not stop for stop in stops):
            raise RequestError('stop has an empty string "", which would match everywhere: remove it')
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """(text that is safe to give out, stop string that was met or None). After a hit the rest is dropped.

        may_stop=False: stop strings that end within this piece do not count (`min_tokens` is not reached
        yet), but one that begins here and ends in a later piece does.
        """
        held, text = len(self._held), self._held + text
        if may_stop:
            hits = []
            for stop in self._stops:
                start = text.find(stop, max(0, held + 1 - len(stop)))  # ends in the new piece
                if start >= 0:
                    hits.append((start + len(stop), start, stop))
            if hits:
                end, start, stop = min(hits)
                self._held = ""
                return text[: end if self._include else start], stop
        safe = self._open_prefix(text)
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        """What was held back, once no more text will come."""
        rest, self._held = self._held, ""
        return rest

    def _open_prefix(self, text: str) -> int:
        """Start of the longest tail of `text` that a stop string begins with; len(text) if there is none."""
        first = len(text)
        for stop in self._stops:
            at = max(0, len(text) - len(stop) + 1)
            while (at := text.find(stop[0], at, first)) >= 0:
                if stop.startswith(text[at:]):
                    first = at
                    break
                at += 1
        return first
