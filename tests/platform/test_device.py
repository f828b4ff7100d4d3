"""The device's thread: order of work, results and exceptions that arrive later, its end."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from deepinfer.platform.device import Device, host_memory

PATIENCE = 20  # seconds that a step of these tests may take on a busy machine


@pytest.fixture
def device() -> Device:
    return Device("cpu")


def test_work_runs_in_the_order_of_its_submission(device: Device) -> None:
    done: list[int] = []

    def work(number: int) -> int:
        time.sleep(0.002 * (number % 3))  # a later one would overtake an earlier one if it could
        done.append(number)
        return number * number

    tickets = [device.submit(lambda i=i: work(i)) for i in range(30)]  # type: ignore[misc]
    assert [ticket.wait() for ticket in reversed(tickets)] == [i * i for i in reversed(range(30))]
    assert done == list(range(30))
    device.close()


def test_submit_returns_before_the_work_is_done(device: Device) -> None:
    gate = threading.Event()
    first, second = device.submit(lambda: gate.wait(PATIENCE)), device.submit(lambda: "second")
    assert not first.done and not second.done
    gate.set()
    assert second.wait() == "second"
    assert first.done and first.wait() is True
    device.close()


def test_work_runs_in_one_thread_that_is_not_the_callers(device: Device) -> None:
    threads = {device.submit(threading.get_ident).wait() for _ in range(5)}
    assert len(threads) == 1 and threading.get_ident() not in threads
    device.close()


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_reaches_who_waits_and_later_work_runs(device: Device, error: BaseException) -> None:
    def fail() -> None:
        raise error

    failed, fine = device.submit(fail), device.submit(lambda: 5)
    for _ in range(2):  # also when it is asked for again
        with pytest.raises(type(error)) as caught:
            failed.wait()
        assert caught.value is error
    assert fine.wait() == 5
    device.close()


def test_settle_waits_and_raises_nothing(device: Device) -> None:
    ran: list[int] = []

    def fail() -> None:
        time.sleep(0.05)
        ran.append(1)
        raise ValueError

    ticket = device.submit(fail)
    ticket.settle()
    assert ran == [1] and ticket.done
    device.close()


def test_close_ends_the_thread_after_what_was_submitted(device: Device) -> None:
    ran: list[int] = []
    device.submit(lambda: time.sleep(0.05))
    (thread,) = [t for t in threading.enumerate() if t is device._thread]
    device.submit(lambda: ran.append(1))
    device.close()
    assert ran == [1] and not thread.is_alive()
    device.close()  # twice is harmless


def test_a_device_without_work_starts_no_thread_and_closes() -> None:
    before = threading.active_count()
    device = Device("cpu")
    assert threading.active_count() == before
    device.close()


def test_a_closed_device_starts_again(device: Device) -> None:
    for value in (1, 2):
        assert device.submit(lambda value=value: value).wait() == value  # type: ignore[misc]
        device.close()


def test_an_idle_thread_keeps_no_result_alive(device: Device) -> None:
    ticket = device.submit(lambda: torch.zeros(3))
    result = weakref.ref(ticket.wait())
    device.submit(lambda: None).wait()
    del ticket
    gc.collect()
    assert result() is None
    device.close()


def test_host_buffer_is_what_plans_are_written_into(device: Device) -> None:
    buffer = device.host_buffer(7)
    assert (buffer.dtype, buffer.shape, buffer.device.type) == (torch.int32, (7,), "cpu")
    buffer.numpy()[:] = 3
    assert buffer.tolist() == [3] * 7


def test_free_memory_is_plausible(device: Device) -> None:
    assert 1 << 26 < device.free_memory() < 1 << 50
    assert 1 << 26 < host_memory() < 1 << 50


def test_a_device_that_is_dropped_without_close_leaves_no_thread() -> None:
    device = Device("cpu")
    device.submit(lambda: None).wait()
    thread = device._thread
    assert thread is not None and thread.is_alive()
    del device
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
