"""Which pages hold which prompt prefix: a hash chain over full pages.

Belongs here: keys, the map between keys and pages, hit counters. Does not belong here: page numbers and their
reference counts (pages.py), when a hit is taken (engine/scheduler.py).

A key names everything before the end of its page: the key before it, the page's token ids, the images that its rows
belong to, a namespace. blake2b with 128 bits, so that two prefixes never meet and every process finds the same keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from deepinfer.cache.pages import Pool

KEY_BYTES = 16


class Span(Protocol):
    """Rows [start, start + length) of a prompt that show one image; `engine.requests.ImageSpan` is one."""

    start: int
    length: int

    @property
    def digest(self) -> bytes: ...


class PrefixCache:
    """Keys of full pages whose content is confirmed. A page that nobody uses keeps its content until it is needed."""

    def __init__(self, pages: Pool, page_size: int) -> None:
        self.page_size = page_size
        self.queries = self.hits = 0  # prompt tokens that were looked up, and found
        self._pages = pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pages.kept = self._key_of.__contains__
        pages.evict = self._forget

    def __len__(self) -> int:
        return len(self._page_of)

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest known prefix of the chain."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, key: bytes, page: int) -> None:
        """`page`, in use and full, holds what `key` names. Where another page holds it already, that one stays."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def forget(self, pages: Iterable[int]) -> None:
        """Never hit these pages again."""
        for page in pages:
            self._forget(page)

    def clear(self) -> None:
        """Forget everything; pages in use stay where they are."""
        self._page_of.clear()
        self._key_of.clear()
        self._pages.forget_idle()

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]


def extend_keys(
    keys: list[bytes],
    tokens: Callable[[int, int], Sequence[int]],
    end: int,
    page_size: int,
    images: Sequence[Span] = (),
    namespace: str = "",
) -> list[bytes]:
    """Append to `keys` those of the full pages before position `end` that are missing; returns `keys`.

    tokens(a, b): ids of positions [a, b).
    """
    for page in range(len(keys), end // page_size):
        begin, stop = page * page_size, (page + 1) * page_size
        before = keys[-1] if keys else hashlib.blake2b(namespace.encode(), person=b"namespace").digest()
        digest = hashlib.blake2b(before, digest_size=KEY_BYTES)
        digest.update(np.asarray(tokens(begin, stop), dtype="<i4").tobytes())
        for span in images:
            if span.start < stop and begin < span.start + span.length:
                digest.update((span.start - begin).to_bytes(8, "little", signed=True) + span.digest)
        keys.append(digest.digest())
    return keys
