"""One device and the thread that feeds it.

Belongs here: order of work, results that arrive later, memory figures. Does not belong here: what the work is.

Work runs in one thread, in the order of its submission, while the caller plans what comes next. On a CPU that thread is
the device; on a GPU it launches kernels and waits for their results, so a wait never holds the caller up.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from numpy.typing import NDArray

from deepinfer.errors import EngineError

T = TypeVar("T")


class Pending(Generic[T]):
    """What work returns that was launched but has not ended: `finish` waits for it and gives the result.

    It runs in the thread that wants the result, so the device's thread can launch the next work meanwhile; once, but
    for one that was interrupted (Ctrl-C): the work goes on, so it is waited for again.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self.finish = finish


class Ticket(Generic[T]):
    """A result that arrives later."""

    def __init__(self, work: Callable[[], T | Pending[T]]) -> None:
        self._work: Callable[[], T | Pending[T]] | None = work
        self._done = threading.Event()
        self._result: T | Pending[T] | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._work is not None
        try:
            self._result = self._work()
        except BaseException as error:  # the waiting thread gets it, whatever it is
            self._error = error
        self._work = None
        self._done.set()

    @property
    def done(self) -> bool:
        """Whether it was launched at least."""
        return self._done.is_set()

    def settle(self) -> None:
        """Wait until the work has ended, well or not."""
        self._done.wait()
        if isinstance(self._result, Pending):
            try:
                self._result = self._result.finish()
            except Exception as error:
                self._result, self._error = None, error

    def wait(self) -> T:
        """The result; raises what the work raised."""
        self.settle()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class Device:
    """`torch.device(name)` with a thread of its own, which starts with the first submission and ends with `close`."""

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self._queue: queue.SimpleQueue[Ticket[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], T | Pending[T]]) -> Ticket[T]:
        """Queue work behind all work submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name="deepinfer-device", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)  # an engine that is dropped without `close` leaves no thread
        ticket = Ticket(work)
        self._queue.put(ticket)
        return ticket

    def close(self) -> None:
        """End the thread after what was submitted."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def synchronize(self) -> None:
        """Wait until the device has done everything that was launched."""
        if self.torch.type != "cpu":
            getattr(torch, self.torch.type).synchronize(self.torch)

    def host_buffer(self, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """`dtype` [size] on the host, from which the device can copy without help of the host (pinned)."""
        return torch.empty(size, dtype=dtype, pin_memory=self.torch.type == "cuda")

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        """The array on the device, without waiting for what was launched before: a copy from pinned memory there."""
        host = torch.from_numpy(array)
        if self.torch.type != "cpu":
            host = host.pin_memory()
        return host.to(self.torch, non_blocking=True)

    def to_host(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying `tensor` into the first elements of the pinned `buffer` behind what was launched; returns what
        waits for it and gives them.
        """
        target = buffer[: tensor.numel()]
        target.copy_(tensor.view(-1), non_blocking=True)
        event = torch.Event(device=self.torch.type)
        event.record()

        def arrived() -> torch.Tensor:
            event.synchronize()
            return target

        return arrived

    def free_memory(self) -> int:
        """Bytes that can be allocated on the device now."""
        if self.torch.type == "cuda":
            return int(torch.cuda.mem_get_info(self.torch)[0])
        if self.torch.type == "cpu":
            return host_memory()
        backend = getattr(torch, self.torch.type, None)
        if backend is None or not hasattr(backend, "mem_get_info"):
            raise EngineError(f"torch.{self.torch.type} does not tell its free memory; give num_pages")
        return int(backend.mem_get_info(self.torch)[0])


def _serve(work: queue.SimpleQueue[Ticket[Any] | None]) -> None:
    while (ticket := work.get()) is not None:
        ticket.run()
        del ticket  # keeps no result alive while it waits


def host_memory() -> int:
    """Bytes of host memory that are free or can be freed at once; 4 GiB where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30
