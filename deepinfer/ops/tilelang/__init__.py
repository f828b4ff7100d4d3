"""Our TileLang kernels for CUDA: the small row-wise ops, in the language that the original wrote them in.

Belongs here: which op has a kernel and where it may run. Does not belong here: kernels (family files), building and
lowering them (compile.py).

Family files import tilelang, so they are imported when a provider is chosen, never before. A provider has the op's own
signature. TileLang is no dependency: without it the Triton kernels serve.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from deepinfer.ops import registry

SM90, SM100 = (9, 0), (10, 0)
# op -> (family file, why our Triton kernel is the default; "" would make this one it). Times are of an H200 at 1 / 64 /
# 512 / 8,192 rows, both in one run (bench/ops.py --family tilelang). Within 5% Triton stays: it needs no other package.
KERNELS: dict[str, tuple[str, str]] = {
    "engram_gate": (
        "engram",
        "1.7 / 4.0 / 24.1 / 263.9 us, triton 2.1 / 4.3 / 23.2 / 264.3; to be the default once its check has passed "
        "beyond one row in this form",
    ),
    "hc_boundary": ("hyper", "slower in an earlier form: 8.6 / 13.0 / 44.7 / 514 us, triton 6.4 / 9.6 / 37.2 / 478"),
    "hc_collapse": ("hyper", "equal: 1.0 / 2.2 / 8.5 / 98.8 us, triton 1.0 / 2.3 / 8.4 / 103.1"),
    "hc_mix": ("hyper", "slower in an earlier form: 7.0 us at one row, triton 6.1"),
    "hc_write": ("hyper", "not timed beside triton yet"),
    "pack_window": ("norm", "not timed beside triton yet"),
    "quant_fp8": ("norm", "not timed beside triton yet"),
    "rms_norm": ("norm", "not timed beside triton yet"),
    "rope": ("norm", "not timed beside triton yet"),
}


def declare() -> None:
    """Declare every kernel as provider `tilelang` on CUDA."""
    for op, (family, slower) in KERNELS.items():
        registry.implement(
            op,
            "tilelang",
            "cuda",
            functools.partial(_install, op, family),
            why_not=_why_not,
            states={"sm_90": registry.MEASURED, "sm_100": registry.COMPILED},
            only_if_asked=slower,
        )


def implementation(op: str) -> Callable[..., Any]:
    """The function behind provider `tilelang` of an op; imports tilelang."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{KERNELS[op][0]}"), op)
    return found


def _install(op: str, family: str) -> None:
    registry.register(op, implementation(op), "cuda")


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("tilelang") is None:
        return "tilelang is not installed"
    found = torch.cuda.get_device_capability()
    return None if found in (SM90, SM100) else f"written for sm_90 and sm_100, this device is sm_{found[0]}{found[1]}"
