"""Compile every kernel for a GPU that is not here: `python -m deepinfer.ops.triton.compile --arch 90 100`.

Belongs here: the gate of CI. Does not belong here: which variants exist; a family file lists them in VARIANTS.
Prints one line per variant: instructions found, registers, spills; exits 1 when one does not compile, spills, or lacks
the instruction that it promises.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.ops.triton import KERNELS


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[90, 100])
    parser.add_argument("--family", nargs="+", default=sorted({"indexer", *(family for family, _ in KERNELS.values())}))
    args = parser.parse_args()
    failed = 0
    for family in args.family:
        for variant in importlib.import_module(f"deepinfer.ops.triton.{family}").VARIANTS:
            for arch in args.arch:
                if arch not in variant.archs:
                    continue
                wanted, name = variant.archs[arch], f"{family}.{variant.kernel.__name__} sm_{arch}a"
                try:
                    done = compile_variant(variant, arch)
                except Exception as error:
                    print(f"FAIL {name}: {type(error).__name__}: {str(error)[:400]}")
                    failed += 1
                    continue
                lacks = bool(wanted) and wanted not in done.ptx
                failed += lacks or done.spills > 0
                verdict = "FAIL" if lacks or done.spills else "ok"
                print(f"{verdict:4} {name}: {wanted or '-'}{' (missing)' if lacks else ''}, ", end="")
                print(f"{done.registers} registers, {done.spills} B spilled")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
