"""Finds registers that are overwritten while a wgmma product still reads them, in the SASS that ptxas made.

`python -m tools.wgmma_hazards [--family X]`: every sm_90a variant of the Triton and Gluon kernels that uses wgmma, then
csrc/cuda where there is an nvcc; a line each, exits 1 on a hazard. Without --family all of them.

A wgmma whose operand A is in registers reads them long after it was issued, and ptxas does not always see that: with
products in flight over a loop's back edge it gives A's registers to something else (experts_sm90.py, prefill with 8
warps: wrong sums on the H200, silently). `hazards` follows every path through the code with the products in flight:
`gsb0` on a product closes a group, `WARPGROUP.DEPBAR.LE gsb0, N` returns when at most the N latest groups are in
flight. Not seen: operands in shared memory, which barriers guard, and accumulators, which ptxas does guard.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
PRODUCT = re.compile(r"R\d+, R(\d+), gdesc")  # of [HQIB]GMMA: accumulator, A, descriptor of B in shared memory
A_REGISTERS = 4  # 64 rows x 32 bytes over 128 threads, whatever the type
# their first register is read, not written (stores have an address in front, which `written` sees)
READERS = re.compile(r"\w*SETP2?$|FCHK|BAR$|BRX|JMX|RET|CALL|WARPSYNC|NANOSLEEP|BMOV|R2P$|VOTE")


class Instruction(NamedTuple):
    address: int
    predicate: str  # "" where it always runs
    op: str
    operands: str

    @property
    def target(self) -> int | None:
        """Where a direct jump goes. BSSY names where threads meet again, which they reach by other jumps."""
        jump = self.op.split(".")[0] in ("BRA", "JMP", "CALL")
        found = re.search(r"0x([0-9a-f]+)$", self.operands) if jump else None
        return int(found.group(1), 16) if found else None

    @property
    def ends(self) -> bool:
        """Whether the next instruction never follows."""
        always = not self.predicate and not re.match(r"!?U?P\d", self.operands)  # BRA takes a predicate as operand too
        return always and (
            self.op in ("BRA", "JMP", "EXIT", "BRX", "JMX", "BPT.TRAP") or self.op.startswith(("RET", "BRA.U"))
        )


# a product in flight: its address -> groups closed since it was issued, its own included (0: not closed yet)
Flight = dict[int, int]


def hazards(sass: str) -> list[str]:
    """One line for each write to a register that a product in flight reads, of the text of `cuobjdump -sass`."""
    return [line for name, code in functions(sass) for line in _hazards(name, code)]


def functions(sass: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Name and code of every kernel."""
    for text in re.split(r"^\s*Function : ", sass, flags=re.M)[1:]:
        name, *lines = text.splitlines()
        found = (INSTRUCTION.match(line) for line in lines)
        yield name.strip(), [Instruction(int(m[1], 16), m[2] or "", m[3], m[4]) for m in found if m]


def _hazards(name: str, code: list[Instruction]) -> list[str]:
    products = {i.address: int(m.group(1)) for i in code if "GMMA" in i.op and (m := PRODUCT.search(i.operands))}
    out = []
    for instruction, flight in zip(code, in_flight(code, products), strict=True):
        written_here = written(instruction)
        for product in sorted(flight):
            a = products[product]
            both = sorted(written_here & set(range(a, a + A_REGISTERS)))
            if both:
                registers = ", ".join(f"R{n}" for n in both)
                text = f"{instruction.op} {instruction.operands}"
                out.append(f"{name} {instruction.address:04x}: {text} writes {registers}, read by wgmma {product:04x}")
    return out


def in_flight(code: list[Instruction], products: dict[int, int]) -> list[Flight]:
    """What may be in flight in front of each instruction: the union over all paths, of a product its latest issue."""
    place = {instruction.address: i for i, instruction in enumerate(code)}
    before: list[Flight | None] = [None] * len(code)
    for start in range(len(code)):  # the entry, then what only indirect jumps reach
        if before[start] is not None:
            continue
        before[start], todo = {}, [start]
        while todo:
            i = todo.pop()
            after = _step(code[i], before[i] or {}, products)
            follows = [] if code[i].ends else [i + 1]
            if code[i].target is not None:
                follows.append(place.get(code[i].target or 0, len(code)))
            for n in follows:
                if n < len(code):
                    old = before[n]
                    new = dict(old or {})
                    for product, age in after.items():
                        new[product] = min(age, new.get(product, age))
                    if new != old:
                        before[n] = new
                        todo.append(n)
    return [flight or {} for flight in before]


def _step(instruction: Instruction, flight: Flight, products: dict[int, int]) -> Flight:
    """What is in flight after an instruction."""
    if instruction.op == "WARPGROUP.DEPBAR.LE" and not instruction.predicate:
        left = int(instruction.operands.split(",")[1], 0)
        return {product: age for product, age in flight.items() if age <= left}
    if "GMMA" not in instruction.op:
        return flight
    flight = {**flight, **({instruction.address: 0} if instruction.address in products else {})}
    return {p: age + 1 for p, age in flight.items()} if "gsb0" in instruction.operands else flight


def written(instruction: Instruction) -> set[int]:
    """Registers that an instruction writes; wgmma's accumulators are left out."""
    op, *kinds = instruction.op.split(".")
    if "GMMA" in op or READERS.match(op):
        return set()
    operands = re.sub(r"^(?:U?P\d|U?PT), ", "", instruction.operands)  # SHFL PT, R4, ...: a predicate first
    found = re.match(r"R(\d+)(?:\.\w+)*(?:,|$)", operands)
    if not found:
        return set()
    if "128" in kinds or (op == "LDSM" and "4" in kinds) or op in ("HMMA", "IMMA", "QMMA"):
        count = 4
    elif op == "CS2R":
        count = 1 if "32" in kinds else 2
    else:
        wide = "64" in kinds or "WIDE" in kinds or (op == "LDSM" and "2" in kinds)
        count = 2 if wide or op in ("DADD", "DMUL", "DFMA") or kinds[:1] == ["F64"] else 1
    return set(range(int(found.group(1)), int(found.group(1)) + count))


def crossings(sass: str) -> int:
    """Back edges that products with A in registers are in flight over: no fault by itself, but where to look first."""
    count = 0
    for _, code in functions(sass):
        products = {i.address: int(m.group(1)) for i in code if "GMMA" in i.op and (m := PRODUCT.search(i.operands))}
        back = [i.target is not None and i.target < i.address for i in code]
        count += sum(1 for jump, flight in zip(back, in_flight(code, products), strict=True) if jump and flight)
    return count


def disassembled(cubin: Path) -> str:
    """SASS, with the cuobjdump of the triton wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([str(tool), "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout


def triton_kernels(families: list[str]) -> Iterator[tuple[str, str]]:
    """(name, SASS) of every sm_90a variant that uses wgmma."""
    from triton import knobs

    from deepinfer.ops.triton import compile

    files: dict[str, str] = {}

    def keep(*, metadata_group: dict[str, str], **_: Any) -> None:
        files.update({Path(file).suffix: file for file in metadata_group.values()})

    knobs.compilation.listener = keep  # told of every kernel, compiled or found in the cache
    for family in families:
        for i, variant in enumerate(compile.variants(family)):
            if 90 in variant.archs and "wgmma" in (done := compile.compile_variant(variant, 90)).ptx:
                yield f"{family}.{done.name} {i}", disassembled(Path(files[".cubin"]))


def cuda_kernels() -> Iterator[tuple[str, str]]:
    """(name, SASS) of every file of csrc/cuda."""
    from deepinfer.ops.native import build_cuda

    nvcc = build_cuda.find_nvcc()
    for source in sorted(build_cuda.SOURCES.glob("*.cu")) if nvcc else ():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            command = [str(nvcc), "-std=c++17", "-O3", "-cubin", "-arch=sm_90a", '-DDI_STAMP="gate"', str(source)]
            subprocess.run([*command, "-o", file.name], check=True)
            yield source.name, disassembled(Path(file.name))


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    from deepinfer.ops.triton import KERNELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted({family for family, _ in KERNELS.values()})
    parser.add_argument("--family", nargs="+", choices=known, help="only these, without csrc/cuda")
    parser.add_argument("--quiet", action="store_true", help="only hazards, and the total")
    args = parser.parse_args()
    kernels = found = 0
    for source in (triton_kernels(args.family or known), () if args.family else cuda_kernels()):
        for name, sass in source:
            lines = hazards(sass)
            kernels, found = kernels + 1, found + bool(lines)
            count = len(re.findall(r"GMMA\S+ " + PRODUCT.pattern, sass))
            if lines or not args.quiet:
                text = f"{count} of {len(re.findall(r'GMMA[.]', sass))} wgmma with A in registers"
                print(f"{'FAIL' if lines else 'ok':4} {name}: {text}, {crossings(sass)} loops with some in flight")
            print("".join(f"     {line}\n" for line in lines), end="", flush=True)
    print(f"wgmma hazards: {kernels - found} of {kernels} kernels clean")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
