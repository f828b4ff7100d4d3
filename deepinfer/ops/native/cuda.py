"""Loader of the optional CUDA C++ library (csrc/cuda). Without it its users run their Triton kernels.

Belongs here: finding, loading and calling the library. Does not belong here: kernels (csrc), building (build_cuda.py).
The library takes raw pointers, so it loads beside any torch; a call costs a few microseconds of host time.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from deepinfer import envs
from deepinfer.ops.native.build_cuda import LIBRARY

BUILD = "python -m deepinfer.ops.native.build_cuda"
VERSION = 1  # of the C interface
MAX_K = 4096  # of `topk`


@functools.cache
def library() -> ctypes.CDLL | str:
    """The loaded library, or the reason why it cannot be used in this process."""
    if not envs.get("DEEPINFER_NATIVE"):
        return "DEEPINFER_NATIVE=0"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not LIBRARY.exists():
        return f"not built: run `{BUILD}` (needs nvcc)"
    try:
        lib = ctypes.CDLL(str(LIBRARY))
        if lib.deepinfer_cuda_version() != VERSION:
            return f"library is of another version: run `{BUILD}`"
    except (OSError, AttributeError) as e:
        return f"cannot be loaded, run `{BUILD}`: {e}"
    i, p = ctypes.c_int, ctypes.c_void_p
    wide = ctypes.c_longlong
    lib.deepinfer_topk.argtypes = [p, wide, i, i, p, i, p, i, i, p, i, p]
    lib.deepinfer_index_logits.argtypes = [*[p] * 8, wide, wide, *[i] * 8, p]
    lib.deepinfer_attention.argtypes = [*[p] * 13, ctypes.c_float, *[i] * 9, p]
    lib.deepinfer_cuda_error.restype = ctypes.c_char_p
    return lib


def topk(
    lib: ctypes.CDLL, scores: Tensor, out: Tensor, visible: Tensor | None, unit: int, blocks: Tensor | None, block: int
) -> None:
    """out int32 [M, k] = ascending ids of the k best finite scores of each row, -1 filled (csrc/cuda/topk.cu, Args).

    scores float32 [M, n] with rows 16 bytes aligned. A row holds ceil(visible / unit) scores, all n without `visible`;
    `blocks` turns positions into entries.
    """
    assert scores.stride(0) % 4 == 0 and scores.data_ptr() % 16 == 0 and scores.stride(1) == 1
    assert out.is_contiguous() and scores.shape[0] == out.shape[0]
    code = lib.deepinfer_topk(
        scores.data_ptr(), scores.stride(0), scores.shape[0], scores.shape[1],
        None if visible is None else visible.data_ptr(), unit,
        None if blocks is None else blocks.data_ptr(), 0 if blocks is None else blocks.shape[1], block,
        out.data_ptr(), out.shape[1], torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    if code:
        raise RuntimeError(f"top-k selection could not be launched: {lib.deepinfer_cuda_error(code).decode()}")


def index_logits(
    lib: ctypes.CDLL, q: Tensor, weights: Tensor, pool: Tensor, table: Tensor, slots: Tensor, visible: Tensor,
    blocks: Tensor | None, out: Tensor, block: int, entries: int, free: int, tile: int, parts: int,
) -> None:  # fmt: skip
    """Scores of 32 heads x 128 on sm_90 (csrc/cuda/logits.cu, Args), `tile` rows of 1, 4 or 8 a block,
    `parts` blocks for them.

    q uint8 [M, 32, 68], pool uint8 [pages, 68 * entries] with rows 16 bytes aligned; entries, block: powers of two.
    """
    code = lib.deepinfer_index_logits(
        q.data_ptr(), weights.data_ptr(), pool.data_ptr(), table.data_ptr(), slots.data_ptr(), visible.data_ptr(),
        None if blocks is None else blocks.data_ptr(), out.data_ptr(), pool.stride(0), out.stride(0), out.shape[0],
        table.shape[1], 0 if blocks is None else blocks.shape[1], max(block, 1).bit_length() - 1,
        entries.bit_length() - 1, free, tile, parts, torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    if code:
        raise RuntimeError(f"index scores could not be launched: {lib.deepinfer_cuda_error(code).decode()}")


def attention(
    lib: ctypes.CDLL,
    tensors: tuple[Tensor, ...],
    out: Tensor,
    scale2: float,
    shape: tuple[int, ...],
    split: int,
    sms: int,
) -> None:
    """Attention of 64 heads x 512 on sm_90 (csrc/cuda/attention.cu, Args: the same tensors and numbers in order)."""
    code = lib.deepinfer_attention(
        *(t.data_ptr() for t in tensors), out.data_ptr(), scale2, out.shape[0], *shape, split, sms,
        torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    if code:
        raise RuntimeError(f"attention could not be launched: {lib.deepinfer_cuda_error(code).decode()}")
