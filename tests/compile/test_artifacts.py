"""Where compiled code is kept: the key, the user's own folders, the bound, clearing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from deepinfer.compile import artifacts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPINFER_CACHE_ROOT", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # restored afterwards, whatever `use` writes
        monkeypatch.delenv(name)
    return tmp_path / "compile"


def test_use_points_inductor_and_triton_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = artifacts.use(CPU)
    assert folder == cache / artifacts.key(CPU)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    monkeypatch.setenv("DEEPINFER_PASSES", "none")  # other code: another engine of this process gets another folder
    other = artifacts.use(CPU)
    assert other != folder and os.environ["TRITON_CACHE_DIR"] == str(other) + "/triton"


def test_the_users_folder_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    assert artifacts.use(CPU) is None
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine")


def test_the_oldest_go_first_and_clear_takes_all(cache: Path) -> None:
    for age in range(artifacts.FOLDERS + 3):
        (cache / f"k{age}").mkdir(parents=True)
        (cache / f"k{age}" / "code").write_bytes(b"x" * 10)
        os.utime(cache / f"k{age}", (1000 - age, 1000 - age))
    oldest = cache / f"k{artifacts.FOLDERS + 2}"
    removed = artifacts.trim(keep=oldest)
    assert [a.key for a in removed] == [f"k{artifacts.FOLDERS + i}" for i in range(2)]
    assert oldest.exists() and len(artifacts.listed()) == artifacts.FOLDERS + 1
    assert artifacts.clear() == 10 * (artifacts.FOLDERS + 1)
    assert artifacts.listed() == [] and artifacts.clear() == 0
