"""`import deepinfer` is quick, imports nothing heavy, and its public names resolve."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import deepinfer

ROOT = Path(__file__).resolve().parents[1]
IMPORT_SECONDS = 0.3
LIGHT_MODULES = ("params", "outputs", "errors", "envs", "config")


def in_fresh_process(statement: str) -> dict:
    """Seconds that `statement` takes, and the heavy modules that it pulls in."""
    code = (
        f"import sys, time; start = time.perf_counter(); {statement}; seconds = time.perf_counter() - start; "
        "import json; heavy = [m for m in ('torch', 'numpy', 'PIL', 'tokenizers') if m in sys.modules]; "
        "print(json.dumps({'seconds': seconds, 'heavy': heavy}))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_import_is_quick_and_light():
    runs = [in_fresh_process("import deepinfer") for _ in range(3)]
    assert all(run["heavy"] == [] for run in runs)
    assert min(run["seconds"] for run in runs) < IMPORT_SECONDS


def test_light_modules_import_nothing_heavy():
    imports = "; ".join(f"import deepinfer.{name}" for name in LIGHT_MODULES)
    assert in_fresh_process(imports)["heavy"] == []


def test_making_params_and_config_imports_no_torch():
    use = "import deepinfer; deepinfer.SamplingParams(top_p=0.9); deepinfer.EngineConfig('tiny', device='cuda')"
    assert "torch" not in in_fresh_process(use)["heavy"]


@pytest.mark.parametrize("name", deepinfer.__all__)
def test_public_name_resolves(name):
    assert getattr(deepinfer, name) is not None
    assert name in dir(deepinfer)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="SamplingParams"):
        deepinfer.SamplingParam  # noqa: B018


def test_version_is_the_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == deepinfer.__version__
