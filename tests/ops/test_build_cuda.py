"""When csrc/cuda is built, and what is said when it is not. Compiling itself: `make kernels`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import runpy
from pathlib import Path

import pytest

from deepinfer.ops.native import build_cuda, cuda

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cuda: Optional[str] = '13.0'\n", True),
        ("__version__ = '2.11.0+cu130'\ncuda = '13.0'\nhip = None\n", True),
        ("cuda: Optional[str] = None\nxpu: Optional[str] = '2025'\n", False),
    ],
)
def test_built_with_the_package_only_where_it_is_of_use(
    text: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(text)
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert build_cuda.torch_has_cuda() is wanted
    built: list[bool] = []
    monkeypatch.setattr(build_cuda, "build", lambda: built.append(True))
    monkeypatch.setattr(build_cuda, "find_nvcc", lambda: "/usr/bin/nvcc")
    build_cuda.build_with_package()
    assert built == [True] * wanted
    monkeypatch.setattr(build_cuda, "find_nvcc", lambda: None)
    build_cuda.build_with_package()
    assert built == [True] * wanted


def test_no_nvcc_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build_cuda, "find_nvcc", lambda: None)
    assert build_cuda.build() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "no CUDA C++ ops: no nvcc found" in line and "NVCC" in line


def test_the_package_build_calls_it() -> None:
    """setup.py runs the file by its path, before the package can be imported."""
    found = runpy.run_path(str(ROOT / "deepinfer/ops/native/build_cuda.py"), run_name="setup")
    assert (
        callable(found["build_with_package"])
        and 'build_cuda.py"))["build_with_package"]()' in (ROOT / "setup.py").read_text()
    )


def test_the_library_says_why_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = cuda.library.__wrapped__()
    assert isinstance(reason, str) and reason  # no GPU in CI
    monkeypatch.setenv("DEEPINFER_NATIVE", "0")
    assert cuda.library.__wrapped__() == "DEEPINFER_NATIVE=0"
    monkeypatch.delenv("DEEPINFER_NATIVE")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(cuda, "LIBRARY", Path("/nowhere.so"))
    assert cuda.BUILD in cuda.library.__wrapped__()
