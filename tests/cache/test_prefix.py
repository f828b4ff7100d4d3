"""Keys of prefixes and the map between them and pages."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.cache.pages import Pool
from deepinfer.cache.prefix import KEY_BYTES, PrefixCache, extend_keys

PAGE = 4
LARGEST_ID = 2**31 - 1


@dataclass(frozen=True)
class Image:
    start: int
    length: int
    digest: bytes


def keys_of(
    tokens: list[int], images: tuple[Image, ...] = (), namespace: str = "", end: int | None = None
) -> list[bytes]:
    last = len(tokens) if end is None else end
    return extend_keys([], lambda a, b: tokens[a:b], last, PAGE, images, namespace)


ids = st.lists(st.integers(0, 3), max_size=20)


@given(ids, ids)
def test_keys_agree_exactly_as_far_as_the_full_pages_agree(one: list[int], two: list[int]) -> None:
    first, second = keys_of(one), keys_of(two)
    assert (len(first), len(second)) == (len(one) // PAGE, len(two) // PAGE)
    for page, (a, b) in enumerate(zip(first, second, strict=False)):
        end = (page + 1) * PAGE
        assert (a == b) == (one[:end] == two[:end])


@given(st.lists(st.integers(0, LARGEST_ID), min_size=8, max_size=30), st.lists(st.integers(0, 30), max_size=4))
def test_keys_grow_in_any_portions(tokens: list[int], ends: list[int]) -> None:
    keys: list[bytes] = []
    for end in [*sorted(min(end, len(tokens)) for end in ends), len(tokens)]:
        assert extend_keys(keys, lambda a, b: tokens[a:b], end, PAGE) is keys
    assert keys == keys_of(tokens)
    assert all(len(key) == KEY_BYTES for key in keys)


A, B = b"a" * 16, b"b" * 16


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ((), (Image(5, 3, A),), 1),
        ((Image(5, 3, A),), (Image(5, 3, A),), 4),
        ((Image(5, 3, A),), (Image(5, 3, B),), 1),
        ((Image(5, 3, A),), (Image(6, 3, A),), 1),  # the same pixels one row later
        ((Image(2, 12, A),), (Image(2, 12, B),), 0),
        ((Image(8, 4, A),), (Image(8, 4, B),), 2),  # begins with its page
        ((Image(4, 4, A),), (Image(4, 4, B),), 1),  # ends with its page
        ((Image(4, 2, A), Image(6, 2, B)), (Image(4, 2, B), Image(6, 2, A)), 1),
        ((Image(15, 9, A),), (Image(16, 9, A),), 3),
    ],
)
def test_an_image_is_part_of_every_page_that_shows_it(
    one: tuple[Image, ...], two: tuple[Image, ...], same: int
) -> None:
    tokens = [7] * 16
    equal = [a == b for a, b in zip(keys_of(tokens, one), keys_of(tokens, two), strict=True)]
    assert equal == [page < same for page in range(4)]


def test_namespaces_share_nothing() -> None:
    tokens = [7] * 16
    assert not {*keys_of(tokens)} & {*keys_of(tokens, namespace="a")}
    assert keys_of(tokens, namespace="a") == keys_of(tokens, namespace="a")


def test_every_process_finds_the_same_keys() -> None:
    """The hash seed of the interpreter and its start must not matter."""
    code = (
        "from types import SimpleNamespace\n"
        "from deepinfer.cache.prefix import extend_keys\n"
        "image = SimpleNamespace(start=3, length=9, digest=bytes(16))\n"
        "tokens = list(range(100, 124))\n"
        "keys = extend_keys([], lambda a, b: tokens[a:b], 24, 8, (image,), 'tenant')\n"
        "print(*(key.hex() for key in keys))\n"
    )
    path = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1 and len(printed.pop().split()) == 3


# ---- the cache ----


def cache(total: int = 6) -> tuple[Pool, PrefixCache]:
    pool = Pool("page", total)
    return pool, PrefixCache(pool, PAGE)


def test_lookup_finds_the_longest_chain() -> None:
    pool, prefix = cache()
    keys, pages = keys_of(list(range(16))), pool.take(4)
    for i in (0, 1, 3):
        prefix.insert(keys[i], pages[i])
    assert prefix.lookup(keys) == pages[:2] and prefix.lookup(keys[1:]) == pages[1:2] and prefix.lookup([]) == []
    assert len(prefix) == 3


def test_the_first_page_with_a_key_stays() -> None:
    pool, prefix = cache()
    (first, second), keys = pool.take(2), keys_of(list(range(8)))
    prefix.insert(keys[0], first)
    prefix.insert(keys[0], second)
    assert prefix.lookup(keys) == [first]
    prefix.insert(keys[1], first)  # a page has one content
    assert prefix.lookup(keys) == [first]
    pool.give_back([second, first])
    assert (pool.num_idle, pool.num_free) == (1, 6)


def test_a_page_is_forgotten_when_it_is_needed() -> None:
    pool, prefix = cache(3)
    keys, pages = keys_of(list(range(8))), pool.take(2)
    for key, page in zip(keys, pages, strict=True):
        prefix.insert(key, page)
    pool.give_back(pages[::-1])  # the end of the prefix is the first to go
    taken = pool.take(2)
    assert taken == [3, pages[1]] and prefix.lookup(keys) == pages[:1]
    pool.give_back(taken)
    pool.share(pages[:1])
    assert pool.num_idle == 0 and prefix.lookup(keys) == pages[:1]
    pool.give_back(pages[:1])
    pool.check_idle()


def test_clear_forgets_and_frees() -> None:
    pool, prefix = cache()
    keys, pages = keys_of(list(range(12))), pool.take(3)
    for key, page in zip(keys, pages, strict=True):
        prefix.insert(key, page)
    pool.give_back(pages[:1])
    prefix.clear()
    assert (len(prefix), pool.num_idle, pool.num_used, prefix.lookup(keys)) == (0, 0, 2, [])
    pool.give_back(pages[1:])
    assert pool.num_idle == 0
    pool.check_idle()
