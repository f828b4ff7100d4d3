"""Counts of what must not happen in the loop: compilations, graph captures.

Belongs here: the counts, and `expect`. Does not belong here: what is counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from deepinfer.errors import EngineError

NAMES = (
    "compiled",  # functions traced by torch.compile and lowered
    "generated",  # graphs that Inductor made code for: those that its cache on disk did not hold
    "captured",  # graphs captured
    "replayed",  # graph replays
)
_counts: Counter[str] = Counter()
_lock = threading.Lock()


def add(name: str, n: int = 1) -> None:
    assert name in NAMES, name
    with _lock:
        _counts[name] += n


def get(name: str) -> int:
    return _counts[name]


def snapshot() -> dict[str, int]:
    return {name: _counts[name] for name in NAMES}


@contextmanager
def expect(**changes: int) -> Iterator[None]:
    """Raise EngineError unless the counters named in `changes` grow by exactly so much inside the block."""
    before = snapshot()
    yield
    found = {name: _counts[name] - before[name] for name in changes}
    if found != changes:
        raise EngineError(f"expected {changes}, counted {found}: something compiled or captured after warm-up")
