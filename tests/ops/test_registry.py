"""The op table: overrides, refusals, what doctor shows. Each override runs in its own process."""

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
    assert native and all("DEEPINFER_NATIVE" in r["why"] for r in native)
    assert all(r["chosen"] for r in rows if r["provider"] == "reference" and r["device"] == "cpu")


def test_double_definition_and_unknown_op_are_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        registry.define("rope(Tensor x) -> Tensor", fake=None, inputs=None, cost=None)(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown op 'flash'"):
        registry.implement("flash", "mine", "cpu", lambda: None)


def test_table_names_one_choice_per_op_and_device() -> None:
    rows = registry.table()
    for op in registry.OPS:
        for device in registry.DISPATCH_KEYS:
            assert sum(r["chosen"] for r in rows if (r["op"], r["device"]) == (op, device)) == 1
    assert all(r["why"] and r["state"] for r in rows)


def test_what_was_not_run_is_chosen_only_when_asked() -> None:
    code = """
import json
from deepinfer.ops import registry
for op in registry.OPS.values():
    op.providers.insert(0, registry.Provider("mine", "cpu", lambda: None, only_if_asked=registry.NOT_RUN))
picked = [registry._select(registry.OPS["rope"], "cpu", choice).name for choice in (None, "mine")]
row = next(r for r in registry.table() if r["op"] == "rope" and r["provider"] == "mine")
print(json.dumps([picked, row["why"]]))
"""
    done = run(code, DEEPINFER_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["reference", "mine"],
        "only if DEEPINFER_OPS asks: not run on hardware",
    ]


def test_a_choice_that_was_asked_for_says_so() -> None:
    done = run(
        "import json; from deepinfer.ops import registry; print(json.dumps(registry.table()))",
        DEEPINFER_OPS="rope=reference",
    )
    rows = {(r["op"], r["device"], r["provider"]): r for r in json.loads(done.stdout)}
    assert rows["rope", "cpu", "reference"]["why"] == "DEEPINFER_OPS asks for it"
