"""Life of captured steps, against a device that has the interface of torch.cuda and torch.npu and runs on the CPU.

This is also the contract of the NPU graph class: which calls torch.npu must answer. Not run on an NPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.compile import buckets, counters
from deepinfer.compile.graphs import BucketGraphs, empty_inputs
from deepinfer.errors import EngineError
from deepinfer.platform import graphs


class FakeBackend:
    """Records calls; a graph replays the work that was captured."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.recording: Any = None
        outer = self

        class NPUGraph:
            def __init__(self) -> None:
                self.work: list[Any] = []
                self.open = True

            def capture_begin(self, pool: object) -> None:
                assert pool == "pool" and outer.recording is None
                outer.recording = self

            def capture_end(self) -> None:
                outer.recording = None

            def replay(self) -> None:
                assert self.open
                outer.log.append("replay")
                for work in self.work:
                    work()

            def reset(self) -> None:
                self.open = False
                outer.log.append("reset")

        self.NPUGraph = NPUGraph

    def graph_pool_handle(self) -> object:
        return "pool"

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 100, 200

    class Stream:
        def __init__(self, device: Any = None) -> None: ...
        def wait_stream(self, other: Any) -> None: ...

    def current_stream(self, device: Any = None) -> Stream:
        return self.Stream(device)

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def synchronize(self, device: Any) -> None: ...


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    fake = FakeBackend()
    monkeypatch.setattr(graphs, "backend", lambda device: fake)
    return fake


def captured(backend: FakeBackend, sizes: tuple[int, ...] = (1, 2, 4)) -> tuple[BucketGraphs[Any], torch.Tensor]:
    inputs = empty_inputs(2, sizes[-1], torch.device("cpu"))

    def work(view: torch.Tensor) -> torch.Tensor:
        out = view.sum(0)
        if backend.recording is not None:
            backend.recording.work.append(lambda: out.copy_(view.sum(0)))
        return out

    steps = BucketGraphs("test", work, inputs, sizes, "pool")
    steps.capture()
    return steps, inputs


def test_replay_reads_the_inputs_of_its_bucket(backend: FakeBackend) -> None:
    with counters.expect(captured=3, replayed=2):
        steps, _ = captured(backend)
        for rows, bucket in ((1, 1), (3, 4)):
            assert steps.can_run(rows) == bucket
            steps.inputs(bucket).zero_()
            steps.inputs(bucket)[:, :rows] = torch.arange(rows, dtype=torch.int32) + 1
            out = steps.replay(bucket)
            assert out.tolist() == [2 * (i + 1) if i < rows else 0 for i in range(bucket)]
    assert steps.can_run(5) is None


def test_closed_and_moved(backend: FakeBackend) -> None:
    steps, _ = captured(backend)
    steps._address += 4
    with pytest.raises(EngineError, match="input buffer moved"):
        steps.replay(1)
    steps._address -= 4
    steps.close()
    assert backend.log.count("reset") == 3
    assert steps.can_run(1) is None
    with pytest.raises(EngineError, match="closed"):
        steps.replay(1)


def test_a_device_without_graphs() -> None:
    steps = BucketGraphs("none", lambda view: view, empty_inputs(1, 1, torch.device("cpu")), (1,), None)
    with pytest.raises(EngineError, match="cpu has no graphs"):
        steps.capture()


def test_expect_counts() -> None:
    with pytest.raises(EngineError, match="after warm-up"), counters.expect(captured=0):
        counters.add("captured")


@given(st.integers(1, 2000), st.data())
def test_buckets(most: int, data: st.DataObject) -> None:
    sizes = buckets.row_buckets(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] >= most
    rows = data.draw(st.integers(1, most))
    bucket = buckets.fit(sizes, rows)
    assert bucket is not None and bucket >= rows
    assert bucket - rows <= max(1, rows // 3 if rows < 128 else rows // 4)
    assert buckets.fit(sizes, sizes[-1] + 1) is None
