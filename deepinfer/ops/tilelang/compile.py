"""Build TileLang programs: for the GPU in this machine at first use, for absent ones as a gate.

`python -m deepinfer.ops.tilelang.compile` lowers every program and compiles it with nvcc for sm_90a and sm_100a (no GPU
needed), and lowers those for Ascend to Ascend C; one line each, exit 1 when one fails or spills.
Belongs here: targets, flags, the gate. Does not belong here: which programs exist; a family file lists VARIANTS.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tilelang
import torch
from tilelang import tvm

FAMILIES = ("norm", "engram", "hyper", "ascend")
# no implicit fma: the bits of an expression do not depend on what is around it
FLAGS = ("--fmad=false",)


@dataclass(frozen=True)
class Variant:
    """One program: a factory and its arguments. archs: compute capabilities it is for, none for an Ascend program;
    instruction: what its PTX for sm_90a must hold ("" for none).
    """

    name: str
    program: Callable[..., Any]
    args: tuple[Any, ...]
    archs: tuple[int, ...] = (90, 100)
    instruction: str = ""


_BUILT: dict[tuple[Any, ...], Any] = {}


def build(program: Callable[..., Any], *args: Any) -> Any:
    """The kernel of `program(*args)` for the current device: call it with tensors. Compiled at first use, in 2 s."""
    key = (program, *args)
    if key not in _BUILT:
        mine = target(*torch.cuda.get_device_capability())
        _BUILT[key] = tilelang.compile(program(*args), target=mine, compile_flags=[*FLAGS])
    return _BUILT[key]


def target(major: int, minor: int) -> Any:
    return tvm.target.Target({"kind": "cuda", "arch": f"sm_{major}{minor}a"})


def build_all(variants: list[Variant]) -> None:
    """Compile many programs at once, in threads, for `build` to find."""
    major, minor = torch.cuda.get_device_capability()
    fitting = [v for v in variants if major * 10 + minor in v.archs]
    programs = [v.program(*v.args) for v in fitting]
    kernels = tilelang.par_compile(programs, target=target(major, minor), compile_flags=[*FLAGS])
    _BUILT.update({(v.program, *v.args): kernel for v, kernel in zip(fitting, kernels, strict=True)})


def lower(variant: Variant, where: Any) -> str:
    """Source of a program for a target without a device: CUDA C++ or Ascend C."""
    with where:
        return str(tilelang.lower(variant.program(*variant.args), target=where).kernel_source)


def compile_cuda(source: str, arch: int) -> tuple[str, int, int]:
    """(PTX, registers, spill and stack bytes) of CUDA C++ source by nvcc."""
    root = Path(tilelang.__file__).parent
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty/cutlass/include'}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cu"
        file.write_text(source)
        command = ["nvcc", "-std=c++20", "-O3", "-cubin", "-keep", "--keep-dir", folder, f"-arch=sm_{arch}a"]
        command += [*FLAGS, *includes, "-Xptxas", "-v", "-o", str(file.with_suffix(".cubin")), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError("nvcc: " + " ".join(re.findall(r"error.*", done.stderr))[:400])
        ptx = "".join(p.read_text() for p in Path(folder).glob("*.ptx"))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", done.stderr))
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", done.stderr))
    return ptx, registers, spilled


def variants(families: tuple[str, ...] = FAMILIES) -> list[Variant]:
    return [v for f in families for v in importlib.import_module(f"deepinfer.ops.tilelang.{f}").VARIANTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="*", default=[90, 100])
    parser.add_argument("--family", nargs="+", default=FAMILIES)
    args = parser.parse_args()
    failed = 0
    for variant in variants(tuple(args.family)):
        for arch in args.arch:
            if arch not in variant.archs:
                continue
            try:
                ptx, registers, spilled = compile_cuda(lower(variant, target(arch // 10, arch % 10)), arch)
            except Exception as error:
                print(f"FAIL {variant.name} sm_{arch}a: {type(error).__name__}: {str(error)[:400]}", flush=True)
                failed += 1
                continue
            wanted = variant.instruction if arch == 90 else ""
            bad = spilled > 0 or wanted not in ptx
            failed += bad
            print(
                f"{'FAIL' if bad else 'ok  '} {variant.name} sm_{arch}a: {wanted or '-'}, {registers} registers, "
                f"{spilled} B spilled",
                flush=True,
            )
        if not variant.archs:
            try:
                size = len(lower(variant, tvm.target.Target({"kind": "ascend"})))
                print(f"ok   {variant.name} ascend: {size} characters of Ascend C", flush=True)
            except Exception as error:
                print(f"FAIL {variant.name} ascend: {type(error).__name__}: {str(error)[:400]}", flush=True)
                failed += 1
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
