"""Loader of the optional C++ library (csrc/cpu). Without it every op runs its reference.

Belongs here: finding, loading and declaring the library. Does not belong here: kernels (csrc), building (build.py).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from deepinfer import envs
from deepinfer.ops import registry

LIBRARY = Path(__file__).resolve().parent / "_libdeepinfer_cpu.so"
BUILD = "python -m deepinfer.ops.native.build"
OPS = (
    *("quant_fp8", "linear_fp8", "linear_dequant", "linear"),
    *("router", "swiglu", "experts"),
    *("attention", "block_attention", "vision_attention"),
    *("index_topk", "index_topk_publish", "index_topk_blocks"),
    *("rms_norm", "rope", "hc_mix", "hc_collapse", "hc_write", "hc_boundary"),
    *("rms_norm_quant", "swiglu_quant", "norm_rope_pack_window"),
    *("pack_window", "pack_latent", "pack_index", "ring_write", "page_write", "index_page_write", "pair_pool"),
    *("engram_lookback", "engram_rows", "engram_gather", "engram_gate"),
)


@functools.cache
def library() -> ctypes.CDLL | str:
    """The loaded library, or the reason why it cannot be used in this process."""
    if not envs.get("DEEPINFER_NATIVE"):
        return "DEEPINFER_NATIVE=0"
    if not LIBRARY.exists():
        return f"not built: run `{BUILD}` (needs a C++ compiler)"
    try:
        lib = ctypes.CDLL(str(LIBRARY))
        lib.deepinfer_isa.restype = lib.deepinfer_signature.restype = ctypes.c_char_p
    except (OSError, AttributeError) as e:  # built for another torch or machine
        return f"cannot be loaded, run `{BUILD}`: {e}"
    if lib.deepinfer_isa() is None:
        return "this CPU has neither AVX-512 nor AVX2 with FMA"
    return lib


def isa() -> str | None:
    """Instruction set in use ("avx512", "avx2", "generic"), None without the library."""
    lib = library()
    return None if isinstance(lib, str) else lib.deepinfer_isa().decode()


def _signature(op: str) -> str:
    """One letter per argument of the schema, as csrc/cpu/common.h writes it for the compiled function."""
    letters = {"Tensor": "T", "Optional[Tensor]": "O", "float": "f", "int": "i", "bool": "b"}
    return "".join(letters.get(str(a.type), "?") for a in registry.OPS[op].overload._schema.arguments)


def _why_not(op: str) -> str | None:
    lib = library()
    if isinstance(lib, str):
        return lib
    built = lib.deepinfer_signature(op.encode())
    if built is None or built.decode() != _signature(op):
        return f"library is older than the op: run `{BUILD}`"
    return None


def _register(op: str) -> None:
    code = library().deepinfer_register(op.encode())  # type: ignore[union-attr]  # why_not() was None
    if code:
        raise RuntimeError(f"native op {op!r} could not be registered (code {code}); rebuild with `{BUILD}`")


def declare() -> None:
    """Declare every op of the library as provider `native` on the CPU."""
    for op in OPS:
        registry.implement(
            op,
            "native",
            "cpu",
            functools.partial(_register, op),
            why_not=functools.partial(_why_not, op),
            states={"cpu": registry.MEASURED},
        )
