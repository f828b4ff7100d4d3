"""Compile every kernel for a GPU that is not here: `python -m deepinfer.ops.triton.compile --arch 90 100`.

Belongs here: the gate of CI. Does not belong here: which variants exist; a family file lists them in VARIANTS.
Prints one line per variant: instructions found, registers, spills; exits 1 when one does not compile, spills, or lacks
the instruction that it promises.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.ops.triton import KERNELS, _family


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel.

    signature: argument name -> Triton type ("*bf16", "i32", ...); constants: name -> value of constexpr arguments.
    archs: compute capability -> instruction that its PTX must hold ("" for none). gluon: a Gluon kernel.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    archs: dict[int, str]
    options: dict[str, Any] = field(default_factory=dict)
    gluon: bool = False


@dataclass(frozen=True)
class Compiled:
    name: str
    arch: int
    ptx: str
    registers: int
    spills: int


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """PTX, registers and spill bytes of a variant for sm_<arch>a."""
    import triton
    from triton.backends.compiler import GPUTarget

    signature = {name: variant.signature.get(name, "constexpr") for name in variant.kernel.arg_names}
    constants = {(variant.kernel.arg_names.index(name),): value for name, value in variant.constants.items()}
    if variant.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    # pointers are aligned to 16 bytes, as the launcher finds them at run time
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if signature[name].startswith("*")}
    source = Source(variant.kernel, signature, constexprs=constants, attrs=aligned)
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=variant.options)
    registers, spills = _resources(done.asm["cubin"])
    return Compiled(variant.kernel.__name__, arch, done.asm["ptx"], registers, spills)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack (ptxas puts spills there) and local memory, from cuobjdump of the triton wheel."""
    import triton

    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(folder / "cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers = re.search(r"REG:(\d+)", text)
    spilled = sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", text))
    return int(registers.group(1)) if registers else 0, spilled


@dataclass(frozen=True)
class Verdict:
    """good: it compiles and holds the instruction that it promises; spills: bytes."""

    name: str
    good: bool
    spills: int
    text: str


def tasks(families: Iterable[str], archs: Iterable[int], first: bool = False) -> list[tuple[str, int, int]]:
    """(family, number of the variant, arch) of everything to compile; `first`: one variant of each kernel."""
    found: dict[tuple[Any, ...], tuple[str, int, int]] = {}
    for family in families:
        for i, variant in enumerate(variants(family)):
            for arch in (arch for arch in archs if arch in variant.archs):
                found.setdefault((family, variant.kernel.__name__ if first else i, arch), (family, i, arch))
    return list(found.values())


def variants(family: str) -> list[Variant]:
    found: list[Variant] = _family(family).VARIANTS
    return found


def judge(task: tuple[str, int, int]) -> Verdict:
    """Compile one variant: whether it does, holds the instruction that it promises, and spills nothing."""
    family, index, arch = task
    variant = variants(family)[index]
    wanted, name = variant.archs[arch], f"{family}.{variant.kernel.__name__} sm_{arch}a"
    try:
        done = compile_variant(variant, arch)
    except Exception as error:
        return Verdict(name, False, 0, f"{type(error).__name__}: {str(error)[:400]}")
    lacks = bool(wanted) and wanted not in done.ptx
    text = f"{wanted or '-'}{' (missing)' if lacks else ''}, {done.registers} registers, {done.spills} B spilled"
    return Verdict(name, not lacks, done.spills, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[90, 100])
    parser.add_argument("--family", nargs="+", default=sorted({family for family, _ in KERNELS.values()}))
    parser.add_argument("--jobs", type=int, default=1, help="processes; a cold variant takes 0.3 to 3 s")
    parser.add_argument("--spills-allowed", action="store_true", help="for a Triton that the kernels are not tuned for")
    parser.add_argument("--first", action="store_true", help="one variant of each kernel")
    parser.add_argument("--quiet", action="store_true", help="only what fails, and the total")
    args = parser.parse_args()
    import triton

    begin, failed = time.perf_counter(), 0
    todo = tasks(args.family, args.arch, args.first)
    with ProcessPoolExecutor(args.jobs) as pool:
        for verdict in pool.map(judge, todo) if args.jobs > 1 else map(judge, todo):
            good = verdict.good and (args.spills_allowed or not verdict.spills)
            failed += not good
            if not (args.quiet and good):
                print(f"{'ok' if good else 'FAIL':4} {verdict.name}: {verdict.text}", flush=True)
    archs, seconds = " and ".join(f"sm_{arch}a" for arch in args.arch), time.perf_counter() - begin
    total = f"{len(todo) - failed} of {len(todo)} variants good for {archs}"
    print(f"Triton kernels: {total}, triton {triton.__version__}, {seconds:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
