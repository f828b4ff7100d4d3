"""The op table: overrides, refusals, what doctor shows, and the PrivateUse1 contract. Each override runs in its own
process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from deepinfer.errors import ConfigError
from deepinfer.ops import registry


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    return subprocess.run([sys.executable, "-c", code], env=full, capture_output=True, text=True, timeout=120)


def test_all_bad_overrides_in_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        registry.parse_overrides("swiglu, nothing=reference, swiglu=nobody, rope=reference")
    for part in ("'swiglu' is not op=provider", "'nothing' is no op", "no provider 'nobody' for 'swiglu'"):
        assert part in str(error.value)
    assert registry.parse_overrides(" rope=reference , ") == {"rope": "reference"}


def test_reference_for_all() -> None:
    code = "import json; from deepinfer.ops import registry; print(json.dumps(registry.chosen('cpu')))"
    done = run(code, DEEPINFER_OPS="*=reference")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout).values()) == {"reference"}


def test_bad_override_stops_the_import() -> None:
    done = run("import deepinfer.ops", DEEPINFER_OPS="rope=cutlass")
    assert done.returncode != 0
    assert "no provider 'cutlass' for 'rope'" in done.stderr


def test_native_can_be_switched_off() -> None:
    code = "import json; from deepinfer.ops import registry; print(json.dumps(registry.table()))"
    done = run(code, DEEPINFER_NATIVE="0")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    native = [r for r in rows if r["provider"] == "native"]
    assert native and all("DEEPINFER_NATIVE" in r["state"] for r in native)
    assert all(r["state"] == "chosen" for r in rows if r["provider"] == "reference" and r["device"] == "cpu")


def test_double_definition_and_unknown_op_are_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        registry.define("rope(Tensor x) -> Tensor", fake=None, inputs=None, cost=None)(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown op 'flash'"):
        registry.implement("flash", "mine", "cpu", lambda: None)


def test_table_names_one_choice_per_op_and_device() -> None:
    rows = registry.table()
    for op in registry.OPS:
        for device in registry.DISPATCH_KEYS:
            assert [r["state"] for r in rows if (r["op"], r["device"]) == (op, device)].count("chosen") == 1


PRIVATEUSE1 = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("npu")
from torch._subclasses.fake_tensor import FakeTensorMode
from deepinfer.ops import registry

examples = {n: max(op.inputs(torch.Generator()), key=lambda a: a[0].shape[0]) for n, op in registry.OPS.items()}
with FakeTensorMode():
    for name, op in registry.OPS.items():
        args = examples[name]
        on_npu = [torch.empty(a.shape, dtype=a.dtype, device="npu") if isinstance(a, torch.Tensor) else a for a in args]
        out = op.overload(*on_npu)
        for t in (out if isinstance(out, (tuple, list)) else (out,)):
            assert t is None or t.device.type == "npu", (op.name, t.device)
        has = torch._C._dispatch_has_kernel_for_dispatch_key(f"di::{op.name}", "PrivateUse1")
        assert has, op.name
print("ok", len(registry.OPS))
"""


def test_private_use_one_has_every_op() -> None:
    """The references are registered for Ascend's key, and fakes keep the device: a graph on npu can be captured
    without one.
    """
    done = run(PRIVATEUSE1, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("ok 30")
