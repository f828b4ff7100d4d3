"""Compile csrc/cpu into the library that `deepinfer.ops.native` loads: `python -m deepinfer.ops.native.build`.

Belongs here: finding a compiler, flags, the decision whether a build is current. Does not belong here: loading
(__init__.py). Every family is compiled once per instruction set; the library is replaced by a rename, so a running
process is never disturbed. Built against any torch >= 2.11 it loads in any other one (stable ABI).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "_libdeepinfer_cpu.so"
SOURCES = HERE.parents[2] / "csrc" / "cpu"
COMPILERS = ("g++", "clang++", "c++")
ISA_FLAGS = {"avx2": "-march=x86-64-v3", "avx512": "-march=x86-64-v4"}
# No fast-math and no contraction: the sources say where sums fuse, so every instruction set gives the same bits.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-ignored-attributes", "-Wno-maybe-uninitialized"),
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # nothing newer than torch 2.11
)


def find_compiler() -> str | None:
    """$CXX, else the first of g++, clang++, c++ on the path."""
    wanted = os.environ.get("CXX")
    return next((path for name in ([wanted] if wanted else COMPILERS) if (path := shutil.which(name))), None)


def isas() -> dict[str, str]:
    """Instruction sets of this architecture -> compiler flag, weakest first."""
    return ISA_FLAGS if platform.machine() in ("x86_64", "AMD64") else {"generic": "-O3"}


def stamp(compiler: str, torch_version: str) -> str:
    """Hash of everything the library depends on."""
    h = hashlib.blake2b(digest_size=16)
    for path in (Path(__file__), *sorted(SOURCES.glob("*.[ch]*"))):
        h.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    h.update(repr((isas(), version, torch_version)).encode())
    return h.hexdigest()


def build(verbose: bool = False) -> Path | None:
    """Build the library unless it is current. Returns its path, or None with the reason on stderr: it is optional."""
    try:
        return _build(verbose)
    except (RuntimeError, OSError) as e:
        print(f"deepinfer: no native CPU ops: {e}", file=sys.stderr)
        return None


def _build(verbose: bool) -> Path:
    if not SOURCES.is_dir():
        raise RuntimeError(f"no sources at {SOURCES}; build from a source tree")
    if platform.system() != "Linux":
        raise RuntimeError(f"built on Linux only, this is {platform.system()}")
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError(f"no C++ compiler found; install g++ 12 or newer, or set CXX (tried {', '.join(COMPILERS)})")
    torch = importlib.util.find_spec("torch")  # not imported: that would take longer than compiling
    if torch is None or torch.origin is None:
        raise RuntimeError("torch is not installed in this environment")
    key = stamp(compiler, importlib.metadata.version("torch"))
    if LIBRARY.exists() and f"DEEPINFER_STAMP={key}".encode() in LIBRARY.read_bytes():
        if verbose:
            print(f"{LIBRARY.name} is current")
        return LIBRARY
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="deepinfer-build-") as tmp:
        _compile(compiler, Path(torch.origin).parent, key, Path(tmp), verbose)
    if verbose:
        print(f"built {LIBRARY} in {time.perf_counter() - start:.1f} s")
    return LIBRARY


def _compile(compiler: str, torch_dir: Path, key: str, tmp: Path, verbose: bool) -> None:
    jobs = [(SOURCES / "register.cpp", "base", [f'-DDI_STAMP="{key}"'])]
    families = sorted(p for p in SOURCES.glob("*.cpp") if p.name != "register.cpp")
    jobs += [(path, isa, [flag]) for isa, flag in isas().items() for path in families]

    def run(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        if verbose and done.stderr:
            print(done.stderr, file=sys.stderr)

    def compile_one(job: tuple[Path, str, list[str]]) -> str:
        path, isa, extra = job
        out = str(tmp / f"{path.stem}.{isa}.o")
        include = ("-isystem", str(torch_dir / "include"))
        run([compiler, *FLAGS, *extra, f"-DDI_ISA={isa}", *include, "-c", str(path), "-o", out])
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, jobs))
    # Order matters: of equal template instances (std::) the linker keeps the first, which is the one for the weakest
    # CPU.
    fresh = LIBRARY.with_name(f"{LIBRARY.name}.{os.getpid()}.tmp")
    try:
        run([compiler, "-shared", *objects, "-o", str(fresh), f"-L{torch_dir / 'lib'}", "-ltorch_cpu"])
        fresh.replace(LIBRARY)
    finally:
        fresh.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(0 if build(verbose=True) else 1)
