"""Page and slot numbers: exclusive, never 0, never lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.cache.pages import Pool, pages_for
from deepinfer.errors import EngineError


@given(st.integers(0, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_numbers_are_exclusive_and_conserved(total: int, moves: list[tuple[bool, int]]) -> None:
    pool = Pool("page", total)
    held: list[int] = []
    for take, count in moves:
        if take and count <= pool.num_free:
            taken = pool.take(count)
            assert len(taken) == count and not set(taken) & set(held) and all(1 <= n <= total for n in taken)
            held += taken
        elif take:
            with pytest.raises(EngineError, match=f"{count} pages were asked for, {pool.num_free} of {total}"):
                pool.take(count)
        else:
            pool.give_back(held[:count])
            held = held[count:]
        assert pool.num_used == len(held) and pool.num_free + pool.num_used == total
    if held:
        with pytest.raises(EngineError, match="leaked"):
            pool.check_idle()
    pool.give_back(held)
    pool.check_idle()


def test_a_double_free_is_an_error() -> None:
    pool = Pool("slot", 2)
    (number,) = pool.take(1)
    pool.give_back([number])
    with pytest.raises(EngineError, match=f"slot {number} is freed but was not in use"):
        pool.give_back([number])


def test_freed_numbers_are_reused_last() -> None:
    pool = Pool("page", 3)
    first = pool.take(1)
    pool.give_back(first)
    assert pool.take(3) == [2, 3, 1]


def test_reset_after_an_interrupt_finds_every_number() -> None:
    pool = Pool("page", 5)
    pool.take(2)
    pool._free.popleft()  # taken off the list, not yet recorded
    pool.reset()
    pool.check_idle()


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (128, 1), (129, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 128) == pages
