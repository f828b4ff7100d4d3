"""Page and slot numbers: exclusive, never 0, never lost, free only when no step can touch them any more."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from deepinfer.cache.pages import Pool, pages_for
from deepinfer.errors import EngineError

TOTAL = 8


class PoolMachine(RuleBasedStateMachine):
    """A pool against a model of it: who refers to a number, which step may still touch it, whose content is kept."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool("page", TOTAL)
        self.refs: Counter[int] = Counter()
        self.busy: dict[int, int] = {}  # number that nobody refers to -> last step that may touch it
        self.kept: set[int] = set()
        self.idle: list[int] = []  # in the order of their release
        self.step = self.confirmed = 0
        self.reused: list[int] = []
        self.pool.kept = self.kept.__contains__
        self.pool.evict = self.kept.discard
        self.pool.on_reuse = self.reused.append

    def released(self, number: int) -> None:
        if number in self.kept:
            self.idle.append(number)
            assert number not in self.reused
        else:
            assert self.reused.pop(0) == number

    @rule(target=held, count=st.integers(0, 4))
    def take(self, count: int) -> object:
        free = TOTAL - len(self.refs) - len(self.busy)
        assert self.pool.num_free == free
        if count > free:
            with pytest.raises(EngineError, match=f"{count} pages were asked for, {free} of {TOTAL}"):
                self.pool.take(count)
            return multiple()
        taken = self.pool.take(count)
        assert len(set(taken)) == count and all(1 <= n <= TOTAL for n in taken)
        assert not set(taken) & ({*self.refs, *self.busy}), "handed out twice, or while a step may touch it"
        evicted = [n for n in taken if n in self.idle]
        assert evicted == self.idle[: len(evicted)] == self.reused, "the oldest first, and each is told"
        if evicted:
            assert taken[-len(evicted) :] == evicted, "what is kept is taken last"
        del self.idle[: len(evicted)], self.reused[:]
        self.refs.update(taken)
        return multiple(*taken)

    @rule(target=held, number=st.integers(1, TOTAL))
    def share(self, number: int) -> object:
        if number not in self.refs and number not in self.busy and number not in self.idle:
            return multiple()  # its content is gone
        self.pool.share([number])
        self.refs[number] += 1
        self.busy.pop(number, None)
        if number in self.idle:
            self.idle.remove(number)
        return number

    @rule(number=consumes(held))
    def give_back(self, number: int) -> None:
        self.pool.give_back([number])
        self.refs[number] -= 1
        if not self.refs[number]:
            del self.refs[number]
            if self.step > self.confirmed:
                self.busy[number] = self.step
            else:
                self.released(number)

    @rule(number=held)
    def keep(self, number: int) -> None:
        if number in self.refs:
            self.kept.add(number)

    @rule()
    def launch(self) -> None:
        self.step += 1
        self.pool.launched(self.step)

    @rule()
    def confirm(self) -> None:
        if self.confirmed < self.step:
            self.confirmed += 1
            self.pool.confirmed(self.confirmed)
            for number in [n for n, step in self.busy.items() if step <= self.confirmed]:
                del self.busy[number]
                self.released(number)

    @rule()
    def forget(self) -> None:
        self.pool.forget_idle()
        assert self.reused == self.idle
        self.idle, self.reused[:] = [], []

    @rule(number=st.integers(0, TOTAL + 1))
    def double_free(self, number: int) -> None:
        if number not in self.refs:
            with pytest.raises(EngineError, match=f"page {number} is freed but was not in use"):
                self.pool.give_back([number])

    @invariant()
    def counts_agree(self) -> None:
        pool = self.pool
        assert (pool.num_used, pool.num_fenced, pool.num_idle) == (len(self.refs), len(self.busy), len(self.idle))
        assert pool.num_free + pool.num_used + pool.num_fenced == TOTAL
        assert all(pool.is_idle(n) == (n in self.idle) for n in range(TOTAL + 2))
        assert not self.reused
        if self.refs or self.busy:
            with pytest.raises(EngineError, match="leaked"):
                pool.check_idle()
        else:
            pool.check_idle()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_fenced_number_waits_for_the_last_step_launched() -> None:
    pool = Pool("page", 1)
    (number,) = pool.take(1)
    pool.launched(1)
    pool.launched(2)
    pool.give_back([number])
    pool.confirmed(1)
    assert (pool.num_free, pool.num_fenced) == (0, 1)
    pool.confirmed(2)
    assert (pool.num_free, pool.num_fenced) == (1, 0)


def test_a_shared_number_is_free_after_the_last_reference() -> None:
    pool = Pool("page", 1)
    (number,) = pool.take(1)
    pool.share([number])
    pool.give_back([number])
    assert pool.num_free == 0
    pool.give_back([number])
    assert pool.num_free == 1
    with pytest.raises(EngineError, match="page 1 is freed but was not in use"):
        pool.give_back([number])


def test_freed_numbers_are_reused_last() -> None:
    pool = Pool("page", 3)
    pool.give_back(pool.take(1))
    assert pool.take(3) == [2, 3, 1]


def test_reset_after_an_interrupt_finds_every_number() -> None:
    pool = Pool("page", 5)
    pool.take(2)
    pool.launched(1)
    pool.give_back([1])
    pool._free.popleft()  # taken off the list, not yet recorded
    pool.reset()
    pool.check_idle()
    pool.give_back(pool.take(5))  # no step is in flight any more: nothing is fenced
    pool.check_idle()


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (128, 1), (129, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 128) == pages
