"""Captured device work behind one interface: CUDA graphs, NPU graphs.

Belongs here: the one place that names torch.cuda.CUDAGraph and torch.npu.NPUGraph. Does not belong here: what is
captured (compile/graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Work recorded once and launched again as a whole, on the same addresses."""

    def capture(self, work: Callable[[], Any]) -> Any:
        """Record `work`; returns its result, whose tensors every replay writes again."""
        ...

    def replay(self) -> None: ...

    def close(self) -> None:
        """Give its memory back; it must not be in flight."""
        ...


class DeviceGraph:
    """A graph of the accelerator `backend` (torch.cuda or torch.npu), in the memory pool that its family shares.

    torch.npu follows torch.cuda here: `NPUGraph`, `graph_pool_handle`, streams (spec/ascend.md). Not run on an NPU.
    `torch.cuda.graph` would collect garbage and empty the allocator's cache before each of a hundred captures.
    """

    def __init__(self, backend: Any, pool: Any) -> None:
        self._backend, self._pool = backend, pool
        self._graph = (backend.CUDAGraph if hasattr(backend, "CUDAGraph") else backend.NPUGraph)()

    def capture(self, work: Callable[[], Any]) -> Any:
        stream = self._backend.Stream()
        stream.wait_stream(self._backend.current_stream())
        with self._backend.stream(stream):
            self._graph.capture_begin(pool=self._pool)
            try:
                result = work()
            finally:
                self._graph.capture_end()
        self._backend.current_stream().wait_stream(stream)
        return result

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()


def backend(device: torch.device) -> Any | None:
    """The torch module of an accelerator that has graphs, else None."""
    module = getattr(torch, device.type, None)
    return module if module is not None and hasattr(module, "graph_pool_handle") else None


def new_pool(device: torch.device) -> Any:
    found = backend(device)
    return None if found is None else found.graph_pool_handle()


def new_graph(device: torch.device, pool: Any) -> Graph:
    return DeviceGraph(backend(device), pool)
