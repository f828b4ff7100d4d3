"""Decode steps as captured graphs, one for each bucket of rows.

Belongs here: life of the graphs (capture largest first, replay, close) and their fixed input buffers. Does not belong
here: the graph class (platform/graphs.py), what a step is (engine).

All buckets share one pool and one input buffer: a replay reads the first rows of it. The largest is captured first, so
that smaller ones reuse its memory. Inputs are written by one copy before a replay; what a graph gives back stays in
its own memory until the next replay of any of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from deepinfer.compile import buckets, counters
from deepinfer.errors import EngineError
from deepinfer.platform import graphs

logger = logging.getLogger(__name__)
R = TypeVar("R")


@dataclass
class CaptureCost:
    seconds: float = 0.0
    bytes: int = 0


class BucketGraphs(Generic[R]):
    """`work(inputs of the bucket)` captured for each bucket of rows.

    inputs: int32 [fields, largest bucket]; a bucket's are its first fields * rows words, [fields, rows], so that one
    copy from the host fills them.

    work must be deterministic in what it launches, allocate only on the device, and wait for nothing.
    """

    def __init__(self, name: str, work: Callable[[Tensor], R], inputs: Tensor, sizes: tuple[int, ...], pool: object):
        self.name, self._work, self._inputs, self.sizes = name, work, inputs, sizes
        self._pool = pool
        self._graphs: dict[int, tuple[graphs.Graph, R]] = {}
        self._address = inputs.data_ptr()
        self.closed = False
        self.cost = CaptureCost()

    def capture(self) -> None:
        """Warm up and capture every bucket."""
        device = self._inputs.device
        backend = graphs.backend(device)
        if backend is None:
            raise EngineError(f"device {device} has no graphs")
        begin, before = time.perf_counter(), backend.mem_get_info(device)[0]
        stream = backend.Stream(device)
        for rows in reversed(self.sizes):
            view = self.inputs(rows)
            stream.wait_stream(backend.current_stream(device))
            with backend.stream(stream):  # kernels that compile, and buffers that are made, at their first call
                self._work(view)
            backend.current_stream(device).wait_stream(stream)
            backend.synchronize(device)
            graph = graphs.new_graph(device, self._pool)
            self._graphs[rows] = (graph, graph.capture(lambda view=view: self._work(view)))  # type: ignore[misc]
            counters.add("captured")
        backend.synchronize(device)
        self.cost = CaptureCost(time.perf_counter() - begin, before - backend.mem_get_info(device)[0])
        logger.info("%s: %d graphs up to %d rows", self.name, len(self.sizes), self.sizes[-1])

    def can_run(self, rows: int) -> int | None:
        """The bucket that `rows` rows run in, None if they are too many."""
        return buckets.fit(self.sizes, rows) if self._graphs else None

    def inputs(self, bucket: int) -> Tensor:
        """int32 [fields, bucket], what a replay reads."""
        fields = self._inputs.shape[0]
        return self._inputs.view(-1)[: fields * bucket].view(fields, bucket)

    def result(self, bucket: int) -> R:
        """What the bucket's graph writes; for work that is captured behind it."""
        return self._graphs[bucket][1]

    def replay(self, bucket: int) -> R:
        """Run the bucket on what the input buffer holds; the result is overwritten by the next replay."""
        if self.closed:
            raise EngineError(f"{self.name}: graphs were closed")
        if __debug__ and self._inputs.data_ptr() != self._address:
            raise EngineError(f"{self.name}: the input buffer moved from {self._address:#x}")
        graph, result = self._graphs[bucket]
        graph.replay()
        counters.add("replayed")
        return result

    def close(self) -> None:
        """Give back all graphs' memory. None may be in flight."""
        self.closed = True
        for graph, _ in self._graphs.values():
            graph.close()
        self._graphs.clear()


def empty_inputs(fields: int, rows: int, device: torch.device) -> Tensor:
    """The input buffer [fields, rows], zeros: a padded row is of slot 0 and page 0, which nobody owns."""
    return torch.zeros((fields, rows), dtype=torch.int32, device=device)
