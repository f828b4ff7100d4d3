"""Faults that only a device that runs behind its thread would show: steps that end before the device has done them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_graph_steps import GREEDY, SIZES, TINY, accelerator  # noqa: F401

from deepinfer import LLM
from deepinfer.engine.runner import Runner
from deepinfer.platform.device import Device, Pending, Ticket

assert Path(TINY).is_dir()


def test_a_chunk_inside_a_prompt_is_waited_for(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """It samples nothing and reads nothing, but its copy from the host buffer may not have run."""
    results = []
    plain = Runner._sample

    def sample(self: Runner, *args: Any) -> Any:
        results.append(plain(self, *args))
        return results[-1]

    monkeypatch.setattr(Runner, "_sample", sample)
    with LLM(TINY, **SIZES, compile="graph") as llm:
        llm.generate([[0, *range(20, 110)]], GREEDY, use_tqdm=False)
    assert all(isinstance(result, Pending) for result in results)


def test_an_interrupted_wait_is_waited_for_again() -> None:
    calls = []

    def finish() -> int:
        calls.append(0)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return 5

    ticket: Ticket[int] = Ticket(lambda: Pending(finish))
    ticket.run()
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    ticket.settle()
    assert ticket.wait() == 5 and len(calls) == 2


def test_recover_waits_for_what_a_broken_step_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(Device, "synchronize", lambda self: waited.append(torch.device("cpu")))
    with LLM(TINY, **SIZES, compile="eager") as llm:
        llm.engine.runner.recover()
        assert waited
