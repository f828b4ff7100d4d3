"""Our Triton and Gluon kernels for CUDA, one file per family of ops.

Belongs here: which op has a kernel and where it may run. Does not belong here: kernels (family files), what they share
(support.py), compiling them without a GPU (compile.py).

Family files import triton, so they are imported when a provider is chosen, never before. A provider has the op's own
signature. `prepare_<op>` of a family file, where it exists, turns weights into the layout that its kernels read, once,
at load.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import registry

# op -> (family file, compute capabilities that it was written for)
SM90, SM100 = (9, 0), (10, 0)
# The indexer's kernels (indexer.py, csrc/cuda/topk.cu) are not here yet: they compile and have not run on a GPU.
KERNELS: dict[str, tuple[str, tuple[tuple[int, int], ...]]] = {
    "attention": ("attention", (SM90, SM100)),
    "block_attention": ("attention", (SM90, SM100)),
    "engram_gate": ("engram", (SM90, SM100)),
    "engram_gather": ("engram", (SM90, SM100)),
    "engram_lookback": ("engram", (SM90, SM100)),
    "engram_rows": ("engram", (SM90, SM100)),
    "experts": ("experts", (SM90, SM100)),
    "hc_boundary": ("hyper", (SM90, SM100)),
    "hc_collapse": ("hyper", (SM90, SM100)),
    "hc_mix": ("hyper", (SM90, SM100)),
    "hc_write": ("hyper", (SM90, SM100)),
    "index_page_write": ("cache", (SM90, SM100)),
    "linear": ("linear", (SM90, SM100)),
    "linear_dequant": ("linear", (SM90, SM100)),
    "linear_fp8": ("linear", (SM90, SM100)),
    "pack_index": ("cache", (SM90, SM100)),
    "pack_latent": ("cache", (SM90, SM100)),
    "pack_window": ("cache", (SM90, SM100)),
    "page_write": ("cache", (SM90, SM100)),
    "pair_pool": ("cache", (SM90, SM100)),
    "quant_fp8": ("linear", (SM90, SM100)),
    "ring_write": ("cache", (SM90, SM100)),
    "rms_norm": ("hyper", (SM90, SM100)),
    "rope": ("hyper", (SM90, SM100)),
    "router": ("experts", (SM90, SM100)),
    "swiglu": ("experts", (SM90, SM100)),
    "vision_attention": ("attention", (SM90, SM100)),
}


def declare() -> None:
    """Declare every kernel as provider `triton` on CUDA."""
    for op, (family, archs) in KERNELS.items():
        registry.implement(
            op,
            "triton",
            "cuda",
            functools.partial(_install, op, family),
            why_not=functools.partial(_why_not, archs),
            prepare=functools.partial(_prepare, op, family),
        )


def implementation(op: str) -> Callable[..., Any]:
    """The function behind provider `triton` of an op; imports triton."""
    found: Callable[..., Any] = getattr(_family(KERNELS[op][0]), op)
    return found


def _family(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


def _install(op: str, family: str) -> None:
    registry.register(op, getattr(_family(family), op), "cuda")


def _prepare(op: str, family: str, *weights: Tensor) -> tuple[Tensor, ...]:
    step = getattr(_family(family), f"prepare_{op}", None)
    return weights if step is None else step(*weights)


def _why_not(archs: tuple[tuple[int, int], ...]) -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    found = torch.cuda.get_device_capability()
    if found not in archs:
        names = " and ".join(f"sm_{major}{minor}" for major, minor in archs)
        return f"written for {names}, this device is sm_{found[0]}{found[1]}"
    return None
