"""Compiled code on disk: one folder for each content that it was made from, so that a second start compiles nothing.

Belongs here: where Inductor and Triton keep what they generate, the key, the bound on size, listing and clearing. Does
not belong here: generating code.

The key hashes what numbers and code depend on: the sources of model, ops and compile, torch, Python, the device, the
chosen providers and passes. Files inside are content-addressed and published by atomic rename by Inductor and Triton
themselves, so ranks and processes share a folder. TORCHINDUCTOR_CACHE_DIR or TRITON_CACHE_DIR set by the user win.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer import envs
from deepinfer.compile import passes
from deepinfer.ops import registry

FOLDERS = 4  # of different keys that are kept: the oldest by last use goes first
BYTES = 4 << 30  # of all folders together
SOURCES = ("model", "ops", "compile")


@dataclass(frozen=True)
class Artifact:
    """A folder of compiled code. used: seconds since the epoch of its last use."""

    key: str
    path: Path
    bytes: int
    used: float


def root() -> Path:
    return Path(envs.get("DEEPINFER_CACHE_ROOT")) / "compile"


def key(device: torch.device) -> str:
    """Hash of everything that compiled code for `device` depends on."""
    h = hashlib.blake2b(digest_size=12)
    package = Path(__file__).parents[1]
    for folder in SOURCES:
        for file in sorted((package / folder).rglob("*.py")):
            h.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    h.update(repr((torch.__version__, platform.python_version(), device.type, name)).encode())
    h.update(repr(sorted(registry.chosen(device.type).items())).encode())
    h.update(repr([p.name for p in passes.enabled(device.type)]).encode())
    return h.hexdigest()


def use(device: torch.device) -> Path | None:
    """Make Inductor and Triton keep their code in the folder of this content; None where the user chose other ones."""
    chosen = (os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.environ.get("TRITON_CACHE_DIR"))
    if any(value is not None and not value.startswith(str(root())) for value in chosen):
        return None
    folder = root() / key(device)
    try:
        for name in ("inductor", "triton"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        os.utime(folder, (now := time.time(), now))
    except OSError:  # read-only home: their own defaults
        return None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    trim(keep=folder)
    return folder


def listed() -> list[Artifact]:
    """All folders, the last used first."""
    found = []
    for path in root().iterdir() if root().is_dir() else ():
        if path.is_dir():
            size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
            found.append(Artifact(path.name, path, size, path.stat().st_mtime))
    return sorted(found, key=lambda a: -a.used)


def trim(keep: Path | None = None) -> list[Artifact]:
    """Remove the oldest folders beyond FOLDERS and BYTES, never `keep`; returns those removed."""
    removed, total = [], 0
    for i, artifact in enumerate(listed()):
        total += artifact.bytes
        if artifact.path != keep and (i >= FOLDERS or total > BYTES):
            _remove(artifact.path)
            removed.append(artifact)
            total -= artifact.bytes
    return removed


def clear() -> int:
    """Remove everything; returns the bytes that were held."""
    held = sum(a.bytes for a in listed())
    if root().exists():
        _remove(root())
    return held


def _remove(path: Path) -> None:
    """Renamed first: a process that starts meanwhile finds all of a folder or nothing."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return  # somebody else did
    shutil.rmtree(aside, ignore_errors=True)
