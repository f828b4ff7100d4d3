"""Compile csrc/cuda for `deepinfer.ops.native.cuda` to load: `python -m deepinfer.ops.native.build_cuda`.

The build of the package does it too where nvcc and a CUDA torch are; without the library Triton kernels take its place.

Belongs here: finding nvcc, flags, the decision whether a build is current. Does not belong here: loading (cuda.py).
The library needs neither torch nor a GPU to build, and no CUDA runtime beside it to run: it holds machine code of both
architectures and libcudart.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "_libdeepinfer_cuda.so"
SOURCES = HERE.parents[2] / "csrc" / "cuda"
ARCHS = ("90a", "100a")
FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-cudart=static", "--threads=0"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-Wall,-Wextra"),
    *(f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHS),
)


def find_nvcc() -> str | None:
    """$NVCC, else nvcc of the path, else the one of the usual folder."""
    wanted = os.environ.get("NVCC")
    return shutil.which(wanted) if wanted else shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def torch_has_cuda() -> bool:
    """Whether the torch of this environment is a CUDA build; not imported, which would take longer than compiling."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    text = Path(torch.origin).with_name("version.py").read_text()
    return re.search(r"^cuda\b.*= *['\"]\d", text, re.M) is not None


def build_with_package() -> Path | None:
    """`build` where nvcc and a CUDA torch are; silent elsewhere, where nobody can use the library."""
    return build() if torch_has_cuda() and find_nvcc() is not None else None


def stamp(nvcc: str) -> str:
    """Hash of everything the library depends on."""
    h = hashlib.blake2b(digest_size=16)
    for path in (Path(__file__), *sorted(SOURCES.glob("*.cu*"))):
        h.update(path.name.encode() + b"\0" + path.read_bytes())
    h.update(subprocess.run([nvcc, "--version"], capture_output=True, check=False).stdout)
    return h.hexdigest()


def build(verbose: bool = False) -> Path | None:
    """Build the library unless it is current. Returns its path, or None with the reason on stderr: it is optional."""
    try:
        return _build(verbose)
    except (RuntimeError, OSError) as e:
        print(f"deepinfer: no CUDA C++ ops: {e}", file=sys.stderr)
        return None


def _build(verbose: bool) -> Path:
    if not SOURCES.is_dir():
        raise RuntimeError(f"no sources at {SOURCES}; build from a source tree")
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("no nvcc found; install the CUDA toolkit 12.8 or newer, or set NVCC")
    key = stamp(nvcc)
    if LIBRARY.exists() and f"DEEPINFER_STAMP={key}".encode() in LIBRARY.read_bytes():
        if verbose:
            print(f"{LIBRARY.name} is current")
        return LIBRARY
    start = time.perf_counter()
    fresh = LIBRARY.with_name(f"{LIBRARY.name}.{os.getpid()}.tmp")
    report = ("--ptxas-options=-v",) if verbose else ()
    sources = [str(path) for path in sorted(SOURCES.glob("*.cu"))]
    command = [nvcc, *FLAGS, *report, f'-DDI_STAMP="{key}"', *sources, "-o", str(fresh)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        fresh.replace(LIBRARY)
    finally:
        fresh.unlink(missing_ok=True)
    if verbose:
        lines = done.stderr.splitlines()
        print("\n".join(line for line in lines if any(w in line for w in ("registers", "spill", "warning"))))
        print(f"built {LIBRARY} in {time.perf_counter() - start:.1f} s")
    return LIBRARY


if __name__ == "__main__":
    if sys.argv[1:] == ["--if-useful"]:
        build_with_package()
    else:
        sys.exit(0 if build(verbose=True) else 1)
