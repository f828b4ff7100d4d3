"""Hands out page and slot numbers.

Belongs here: the free list, its accounting. Does not belong here: when to allocate or preempt
(engine/scheduler.py), the tensors behind the numbers (model/state.py).
Number 0 is reserved: padded rows point at it, so it is never handed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deepinfer.errors import EngineError


class Pool:
    """The numbers 1..total of one kind of thing ("page", "slot"), first freed first reused.

    Oldest-first reuse keeps freed memory untouched as long as possible, so that a read after free meets stale
    data in tests (which poison it) rather than plausible data of a neighbour.
    """

    def __init__(self, kind: str, total: int) -> None:
        self.kind = kind
        self.total = total
        self._free: deque[int] = deque(range(1, total + 1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def take(self, count: int) -> list[int]:
        """`count` numbers, or EngineError when fewer are free: callers ask `num_free` first."""
        if count > len(self._free):
            free = f"{len(self._free)} of {self.total} are free"
            raise EngineError(f"{count} {self.kind}s were asked for, {free}: the scheduler must check first")
        taken = [self._free.popleft() for _ in range(count)]
        self._used.update(taken)
        return taken

    def give_back(self, numbers: Iterable[int]) -> None:
        """Free `numbers`; one that is not in use is a double free and raises EngineError."""
        for number in numbers:
            if number not in self._used:
                raise EngineError(f"{self.kind} {number} is freed but was not in use")
            self._used.remove(number)
            self._free.append(number)

    def reset(self) -> None:
        """Free everything, whatever state an interrupt left the lists in."""
        self._used.clear()
        self._free = deque(range(1, self.total + 1))

    def check_idle(self) -> None:
        """EngineError unless every number is free, each exactly once."""
        if self._used or sorted(self._free) != list(range(1, self.total + 1)):
            raise EngineError(
                f"{self.kind}s leaked: the engine is idle, but of {self.total} {len(self._free)} are free "
                f"and {len(self._used)} in use: {sorted(self._used)[:8]}"
            )


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // page_size)
