"""The graphs that an Ascend NPU would get, captured without one (tests/npu/contract.py). Each look in its own process.

Not a test of an NPU: which di:: ops the model calls there, with which shapes, all on npu:0, and that PrivateUse1 has a
kernel for each. Docs call that device "not run on hardware".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

CONTRACT = Path(__file__).with_name("contract.py")
ROWS, KEPT, DECODED, DRAFTS = 33, 16, 2, 5  # as contract.py runs them
VOCABULARY = 512  # of tiny


def look(mode: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, str(CONTRACT), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def graphs() -> dict[str, Any]:
    return look("graph")


def test_every_op_has_a_kernel_there_and_fakes_keep_the_device() -> None:
    from deepinfer.ops import registry

    found = look("ops")
    assert sorted(found) == registry.names()
    for name, (has_kernel, devices) in found.items():
        assert has_kernel and devices in ([], ["npu:0"]), name


@pytest.mark.parametrize("phase", ["prefill", "decode", "draft"])
def test_the_graph_stays_on_the_device(graphs: dict[str, Any], phase: str) -> None:
    from deepinfer.ops import registry

    assert not graphs[phase]["strays"]
    calls = graphs[phase]["calls"]
    assert calls and all(call["devices"] == ["npu:0"] for call in calls)
    assert {call["op"] for call in calls} <= set(registry.OPS)


def test_ops_of_a_step_by_layer(graphs: dict[str, Any]) -> None:
    layers = graphs["layers"]
    for phase in ("prefill", "decode"):
        count = Counter(call["op"] for call in graphs[phase]["calls"])
        for op in ("attention", "router", "experts", "linear_dequant"):
            assert count[op] == layers, (phase, op)
        assert count["index_topk"] + count["index_topk_publish"] + count["index_topk_blocks"] > 0
    draft = Counter(call["op"] for call in graphs["draft"]["calls"])
    assert draft["block_attention"] == draft["experts"] > 0 and not draft["attention"]


def test_shapes_of_the_steps(graphs: dict[str, Any]) -> None:
    """Decoder replay: the decoder half has the kept rows only; logits are of the rows asked for."""
    rows = [call["rows"] for call in graphs["prefill"]["calls"] if call["op"] == "attention"]
    assert rows == sorted(rows, reverse=True) and set(rows) == {ROWS, KEPT}
    assert {call["rows"] for call in graphs["decode"]["calls"] if call["op"] == "attention"} == {DECODED}
    assert graphs["prefill"]["logits"] == graphs["decode"]["logits"] == [[2, VOCABULARY], "float32", "npu:0"]
    assert graphs["draft"]["logits"] == [[2, DRAFTS, VOCABULARY], "float32", "npu:0"]
    for call in graphs["prefill"]["calls"]:
        if call["op"] == "experts":
            assert call["out"] == [["float32", [call["rows"], 192]]]


def test_references_run_through_a_backend_in_python() -> None:
    """On npu tensors whose aten falls back to the CPU: our PrivateUse1 kernels give the reference's bits."""
    found = look("eager")
    assert len(found) >= 12 and set(found.values()) == {0.0}, found
