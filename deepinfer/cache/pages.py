"""Hands out page and slot numbers: reference counts, fences, pages that keep their content for prefix hits.

Belongs here: which number is free, used, shared, fenced or kept. Does not belong here: when to allocate or preempt
(engine/scheduler.py), what a kept page holds (prefix.py), the tensors behind the numbers (model/state.py).
Number 0 is reserved: padded rows point at it, so it is never handed out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from deepinfer.errors import EngineError


def _nothing(number: int) -> None: ...


class Pool:
    """The numbers 1..total of one kind of thing ("page", "slot"), first freed first reused.

    A number that nobody refers to any more stays fenced until the last step launched so far was confirmed: that step
    may still read or write its memory. Then it is free, or, where `kept` says that its content is worth it, idle: it
    counts as free and is taken last, oldest first. `on_reuse(number)` hears of every number whose content is given up
    (tests poison its memory there).
    """

    def __init__(self, kind: str, total: int) -> None:
        self.kind = kind
        self.total = total
        self.kept: Callable[[int], bool] = lambda number: False
        self.evict: Callable[[int], None] = _nothing
        self.on_reuse: Callable[[int], None] = _nothing
        self._free: deque[int] = deque(range(1, total + 1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._refs: dict[int, int] = {}
        self._fenced: dict[int, int] = {}  # number -> step, steps ascending
        self._launched = self._confirmed = 0

    @property
    def num_free(self) -> int:
        """Numbers that can be taken now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_used(self) -> int:
        return len(self._refs)

    @property
    def num_fenced(self) -> int:
        """Numbers that become free when the steps in flight are confirmed."""
        return len(self._fenced)

    def is_idle(self, number: int) -> bool:
        return number in self._idle

    def take(self, count: int) -> list[int]:
        """`count` numbers, or EngineError when fewer are free: callers ask `num_free` first."""
        if count > self.num_free:
            free = f"{self.num_free} of {self.total} are free"
            raise EngineError(f"{count} {self.kind}s were asked for, {free}: the scheduler must check first")
        taken = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        self._refs.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, numbers: Iterable[int]) -> None:
        """One more reference to each; idle and fenced ones come back to life with their content."""
        for number in numbers:
            if number in self._refs:
                self._refs[number] += 1
                continue
            if self._fenced.pop(number, None) is None:
                del self._idle[number]
            self._refs[number] = 1

    def give_back(self, numbers: Sequence[int]) -> None:
        """Drop one reference to each; EngineError for one that is not in use (a double free)."""
        for number in numbers:
            refs = self._refs.get(number, 0)
            if not refs:
                raise EngineError(f"{self.kind} {number} is freed but was not in use")
            if refs > 1:
                self._refs[number] = refs - 1
                continue
            del self._refs[number]
            if self._launched > self._confirmed:
                self._fenced[number] = self._launched
            else:
                self._release(number)

    def launched(self, step: int) -> None:
        """Step `step` was planned: it may touch everything that is in use now."""
        self._launched = step

    def confirmed(self, step: int) -> None:
        """Step `step` and all before it have ended: what only they could touch is free."""
        self._confirmed = step
        while self._fenced:
            number, fence = next(iter(self._fenced.items()))
            if fence > step:
                return
            del self._fenced[number]
            self._release(number)

    def reset(self) -> None:
        """Free everything, whatever state an interrupt left the lists in. Nothing may be in flight."""
        self._refs, self._fenced, self._idle = {}, {}, OrderedDict()
        self._free = deque(range(1, self.total + 1))
        self._confirmed = self._launched

    def forget_idle(self) -> None:
        """Give up the content of every idle number."""
        while self._idle:
            self._free.append(self._evict())

    def check_idle(self) -> None:
        """EngineError unless every number is free or idle, each exactly once."""
        numbers = sorted([*self._free, *self._idle])
        if self._refs or self._fenced or numbers != list(range(1, self.total + 1)):
            raise EngineError(
                f"{self.kind}s leaked: the engine is idle, but of {self.total} {len(numbers)} are free "
                f"and {len(self._refs)} in use: {sorted(self._refs)[:8]}, {len(self._fenced)} fenced"
            )

    def _release(self, number: int) -> None:
        if self.kept(number):
            self._idle[number] = None
        else:
            self.on_reuse(number)
            self._free.append(number)

    def _evict(self) -> int:
        number, _ = self._idle.popitem(last=False)
        self.evict(number)
        self.on_reuse(number)
        return number


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // page_size)
