"""The compile gate compiles every kernel: what is launched anywhere is listed in VARIANTS, for both architectures.

The gate itself is `make kernels` (tools/compile_kernels.py): a minute of compiling, outside pytest.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton", exc_type=ImportError)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("triton was imported for its interpreter", allow_module_level=True)

from deepinfer.ops import registry
from deepinfer.ops.triton import EARLIER, KERNELS, compile

FOLDER = Path(compile.__file__).parent
FAMILIES = sorted({family for family, _ in KERNELS.values()})
SMALL = {"_attend", "_markov", "_project"}  # forms with tiles below 64 rows: mma.sync, or no instruction of their own
PRODUCTS = ("dot", "dot_scaled", "warpgroup_mma", "mma_v2", "tcgen05_mma")


def functions() -> dict[str, ast.FunctionDef]:
    """Every function of the kernel files, by name."""
    out = {}
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                out[node.name] = node
    return out


def launched() -> dict[str, set[str]]:
    """Kernel name -> files with `kernel[grid](...)`."""
    out: dict[str, set[str]] = {}
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                target = node.func.value
                name = getattr(target, "attr", getattr(target, "id", None))
                if name is not None:
                    out.setdefault(name, set()).add(file.name)
    return out


def compiled() -> dict[str, set[int]]:
    """Kernel name -> architectures that the gate compiles it for."""
    out: dict[str, set[int]] = {}
    for family in FAMILIES:
        for variant in compile.variants(family):
            out.setdefault(variant.kernel.__name__, set()).update(variant.archs)
    return out


def test_every_kernel_that_is_launched_is_compiled() -> None:
    found, names = compiled(), functions()
    kernels = {name for name in launched() if name in names and names[name].decorator_list}
    assert len(kernels) > 30
    assert not kernels - set(found), "launched, not in VARIANTS"


def test_every_op_has_a_form_for_sm_100() -> None:
    assert all((10, 0) in archs and (9, 0) in archs for _, archs in KERNELS.values())
    for family in FAMILIES:
        assert {100} <= {arch for variant in compile.variants(family) for arch in variant.archs}, family


def test_products_promise_an_instruction() -> None:
    """A kernel that multiplies matrices names the tensor core instruction that its PTX must hold, where it has one."""
    names = functions()

    def multiplies(name: str, seen: frozenset[str] = frozenset()) -> bool:
        for node in ast.walk(names[name]):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called in PRODUCTS:
                    return True
                if called in names and called not in seen and multiplies(called, seen | {name, called}):
                    return True
        return False

    for family in FAMILIES:
        for variant in compile.variants(family):
            if multiplies(variant.kernel.__name__) and variant.kernel.__name__ not in SMALL:
                for arch, instruction in variant.archs.items():
                    assert instruction, f"{family}.{variant.kernel.__name__} sm_{arch} promises nothing"


def test_states_of_our_kernels() -> None:
    for op in KERNELS:
        (mine,) = [p for p in registry.OPS[op].providers if p.name == "triton"]
        assert mine.states["sm_100"] == registry.COMPILED  # no SM100 device was at hand
        assert mine.states["sm_90"] in (registry.MEASURED, EARLIER, registry.COMPILED)
