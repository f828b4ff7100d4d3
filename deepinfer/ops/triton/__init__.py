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
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import registry

# op -> (family file, compute capabilities that it was written for)
SM90, SM100 = (9, 0), (10, 0)
GLUON = ("attention", "experts", "hyper", "linear")  # families whose sm_90 kernels are Gluon, which changes by version
GLUON_TRITON = ("3.6", "3.7")  # releases that compile them: those of torch 2.11 to 2.13
EARLIER = "measured in an earlier form"  # timed as they are; their whole check ran before their last change
CHECK_AGAIN = {
    *("linear", "linear_fp8", "linear_dequant", "experts", "router", "attention", "block_attention"),
    *("hc_boundary", "hc_mix", "kv_global_write", "index_key_write"),
    *("sample", "survivors", "top_logprobs", "penalise", "record_output", "record_prompt", "markov_step", "accept"),
}
NEVER_RAN = {"rms_norm_quant", "swiglu_quant", "norm_rope_pack_window"}  # on a GPU
KERNELS: dict[str, tuple[str, tuple[tuple[int, int], ...]]] = {
    "accept": ("acceptance", (SM90, SM100)),
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
    "index_key_write": ("writes", (SM90, SM100)),
    "index_page_write": ("cache", (SM90, SM100)),
    "index_topk": ("indexer", (SM90, SM100)),
    "index_topk_blocks": ("indexer", (SM90, SM100)),
    "index_topk_publish": ("indexer", (SM90, SM100)),
    "kv_global_write": ("writes", (SM90, SM100)),
    "linear": ("linear", (SM90, SM100)),
    "linear_dequant": ("linear", (SM90, SM100)),
    "linear_fp8": ("linear", (SM90, SM100)),
    "markov_step": ("acceptance", (SM90, SM100)),
    "norm_rope_pack_window": ("fused", (SM90, SM100)),
    "pack_index": ("cache", (SM90, SM100)),
    "pack_latent": ("cache", (SM90, SM100)),
    "pack_window": ("cache", (SM90, SM100)),
    "page_write": ("cache", (SM90, SM100)),
    "pair_pool": ("cache", (SM90, SM100)),
    "penalise": ("penalties", (SM90, SM100)),
    "quant_fp8": ("linear", (SM90, SM100)),
    "record_output": ("penalties", (SM90, SM100)),
    "record_prompt": ("penalties", (SM90, SM100)),
    "ring_write": ("cache", (SM90, SM100)),
    "rms_norm": ("norm", (SM90, SM100)),
    "rms_norm_quant": ("fused", (SM90, SM100)),
    "rope": ("norm", (SM90, SM100)),
    "router": ("experts", (SM90, SM100)),
    "sample": ("sampling", (SM90, SM100)),
    "survivors": ("filters", (SM90, SM100)),
    "swiglu": ("experts", (SM90, SM100)),
    "swiglu_quant": ("fused", (SM90, SM100)),
    "top_logprobs": ("sampling", (SM90, SM100)),
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
            why_not=functools.partial(_why_not, family, archs),
            prepare=functools.partial(_prepare, op, family),
            states={f"sm_{major}{minor}": _state(op, (major, minor)) for major, minor in archs},
        )


def _state(op: str, arch: tuple[int, int]) -> str:
    """How far the kernel was seen on an architecture (docs/ops.md)."""
    if arch == SM100 or op in NEVER_RAN:
        return registry.COMPILED
    return EARLIER if op in CHECK_AGAIN else registry.MEASURED


def implementation(op: str) -> Callable[..., Any]:
    """The function behind provider `triton` of an op; imports triton."""
    found: Callable[..., Any] = getattr(_family(KERNELS[op][0]), op)
    return found


def _family(name: str) -> Any:
    _one_gluon()
    return importlib.import_module(f"{__name__}.{name}")


@functools.cache
def _one_gluon() -> None:
    """Triton 3.7 calls `barrier` what 3.6, for which the kernels are written, calls `thread_barrier`."""
    from triton.experimental.gluon import language

    if not hasattr(language, "thread_barrier"):
        language.thread_barrier = language.barrier


def _install(op: str, family: str) -> None:
    registry.register(op, getattr(_family(family), op), "cuda")


def _prepare(op: str, family: str, *weights: Tensor) -> tuple[Tensor, ...]:
    step = getattr(_family(family), f"prepare_{op}", None)
    return weights if step is None else step(*weights)


def _why_not(family: str, archs: tuple[tuple[int, int], ...]) -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    version = installed_triton()
    if not version:
        return "triton is not installed"
    found = torch.cuda.get_device_capability()
    if found not in archs:
        names = " and ".join(f"sm_{major}{minor}" for major, minor in archs)
        return f"written for {names}, this device is sm_{found[0]}{found[1]}"
    if found == SM90 and family in GLUON and not version.startswith(GLUON_TRITON):
        return f"its Gluon kernels need triton {' or '.join(GLUON_TRITON)} (torch 2.11 to 2.13), found {version}"
    return None


@functools.cache
def installed_triton() -> str:
    """Version of triton, "" without one."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
