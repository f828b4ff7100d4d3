"""Norm, rotary embedding and quantisation in TileLang: the chain in front of a linear and of a window record.

Belongs here: kernels of rms_norm, rope, quant_fp8 and pack_window. Does not belong here: their definitions
(ops/hyper.py, linear.py, cache.py).

A thread owns 8 neighbouring bf16 values (16 bytes) at a time, so that a rotated pair and a quarter of a scale group of
32 stay in one thread; the maximum of a group is two shuffles. A row's bits depend on the row alone.
Legend: T rows, D or N width of a row, chunk 8 values.
"""

import functools
from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from deepinfer.ops import cache, hyper, linear, records
from deepinfer.ops.tilelang.compile import Variant, build
from deepinfer.ops.tilelang.support import (
    BF16,
    F32,
    FP8,
    I32,
    U8,
    U32,
    high_half,
    inverse_scale,
    low_half,
    scale_code,
)  # fmt: skip


@functools.cache
def norm_program(n: int) -> Any:
    """rms_norm of rows of n values: a row a block."""
    vector = next(v for v in (8, 4, 2) if n % (32 * v) == 0)
    threads = max(t for t in range(32, 513, 32) if n // vector % t == 0)
    each = n // vector // threads  # chunks of a thread
    warps = threads // 32
    t = T.dynamic("t")

    @T.prim_func
    def rms_norm(x: T.Tensor((t, n), BF16), weight: T.Tensor((n,), BF16), out: T.Tensor((t, n), BF16), eps: T.float32):
        with T.Kernel(t, threads=threads) as row:
            tx = T.get_thread_binding()
            v = T.alloc_local((each, vector), BF16)
            w = T.alloc_local((each, vector), BF16)
            o = T.alloc_local((vector,), BF16)
            v2, w2 = (T.view(b, (each, vector // 2), U32) for b in (v, w))
            f = T.alloc_local((each, vector), F32)
            parts = T.alloc_shared((warps,), F32)
            total = T.alloc_local((1,), F32)
            for c in T.unroll(each):
                for j in T.vectorized(vector):
                    w[c, j] = weight[(c * threads + tx) * vector + j]
            T.pdl_sync()
            for c in T.unroll(each):
                for j in T.vectorized(vector):
                    v[c, j] = x[row, (c * threads + tx) * vector + j]
            T.pdl_trigger()
            total[0] = 0.0
            for c in T.unroll(each):
                for j in T.unroll(vector // 2):
                    f[c, 2 * j] = low_half(v2[c, j])
                    f[c, 2 * j + 1] = high_half(v2[c, j])
                for j in T.unroll(vector):
                    total[0] = T.ieee_fmaf(f[c, j], f[c, j], total[0])
            total[0] = T.warp_reduce_sum(total[0])
            if warps > 1:
                if tx % 32 == 0:
                    parts[tx // 32] = total[0]
                T.sync_threads()
                total[0] = 0.0
                for k in T.unroll(warps):
                    total[0] += parts[k]
            total[0] = T.rsqrt(total[0] * T.float32(1 / n) + eps)
            for c in T.unroll(each):
                for j in T.unroll(vector // 2):
                    f[c, 2 * j] = f[c, 2 * j] * total[0] * low_half(w2[c, j])
                    f[c, 2 * j + 1] = f[c, 2 * j + 1] * total[0] * high_half(w2[c, j])
                for j in T.vectorized(vector):
                    o[j] = T.cast(f[c, j], BF16)
                for j in T.vectorized(vector):
                    out[row, (c * threads + tx) * vector + j] = o[j]

    return rms_norm


@functools.cache
def rope_program(heads: int, d: int, rotary: int, inverse: bool) -> Any:
    """rope of [T, heads, d]: the last 2 * rotary columns turn, the others are copied. A thread takes CHUNKS chunks."""
    t = T.dynamic("t")
    width, sign = d // 8, -1.0 if inverse else 1.0
    still = width - rotary // 4  # chunks of a head that are copied
    chunks = 4 if heads > 1 else 1
    threads = 256 if heads > 1 else 64
    span = chunks * threads

    def chunk(block: Any, k: Any, tx: Any) -> Any:
        return block * span + k * threads + tx

    def angle(block: Any, k: Any, tx: Any) -> Any:
        """Where the four angles of a turned chunk begin."""
        return chunk(block, k, tx) // (width * heads) * rotary + (chunk(block, k, tx) % width - still) * 4

    @T.prim_func
    def rope(
        x: T.Tensor((t * heads * d,), BF16),
        cos: T.Tensor((t * rotary,), F32),
        sin: T.Tensor((t * rotary,), F32),
        out: T.Tensor((t * heads * d,), BF16),
    ):
        with T.Kernel(T.ceildiv(t * heads * width, span), threads=threads) as block:
            tx = T.get_thread_binding()
            v = T.alloc_local((chunks, 8), BF16)
            co = T.alloc_local((4,), F32)
            si = T.alloc_local((4,), F32)
            a = T.alloc_local((1,), F32)
            b = T.alloc_local((1,), F32)
            T.pdl_sync()
            T.pdl_trigger()
            for k in T.unroll(chunks):
                if chunk(block, k, tx) < t * heads * width:
                    for j in T.vectorized(8):
                        v[k, j] = x[chunk(block, k, tx) * 8 + j]
            for k in T.unroll(chunks):
                if chunk(block, k, tx) < t * heads * width:
                    if chunk(block, k, tx) % width >= still:
                        for j in T.vectorized(4):
                            co[j] = cos[angle(block, k, tx) + j]
                        for j in T.vectorized(4):
                            si[j] = sin[angle(block, k, tx) + j]
                        for j in T.unroll(4):
                            a[0] = T.cast(v[k, 2 * j], F32)
                            b[0] = T.cast(v[k, 2 * j + 1], F32)
                            v[k, 2 * j] = T.cast(a[0] * co[j] - b[0] * (si[j] * sign), BF16)
                            v[k, 2 * j + 1] = T.cast(a[0] * (si[j] * sign) + b[0] * co[j], BF16)
                    for j in T.vectorized(8):
                        out[chunk(block, k, tx) * 8 + j] = v[k, j]

    return rope


@functools.cache
def quant_program(width: int, size: int) -> Any:
    """MXFP8 of rows of `width` chunks; a group of 32 values is the four threads of four neighbouring chunks.

    size 0: codes and scales are two tensors (quant_fp8). Else a record of `size` bytes (pack_window): codes, scales,
    zeros. One signature for both: `codes` is the record then.
    """
    t = T.dynamic("t")
    threads = 128
    groups = width // 4
    row_bytes = size or width * 8
    pad = size - groups * 33 if size else 0

    def chunk(block: Any, tx: Any) -> Any:
        return block * threads + tx

    def record(block: Any, tx: Any) -> Any:
        """Where the record of a chunk's row begins."""
        return chunk(block, tx) // width * size

    @T.prim_func
    def quant(
        x: T.Tensor((t * width * 8,), BF16),
        codes: T.Tensor((t * row_bytes,), FP8),
        scales: T.Tensor((t * (row_bytes if size else groups),), U8),
    ):
        with T.Kernel(T.ceildiv(t * width, threads), threads=threads) as block:
            tx = T.get_thread_binding()
            v = T.alloc_local((8,), BF16)
            v2 = T.view(v, (4,), U32)
            f = T.alloc_local((8,), F32)
            q = T.alloc_local((8,), FP8)
            top = T.alloc_local((1,), F32)
            code = T.alloc_local((1,), I32)
            factor = T.alloc_local((1,), F32)
            T.pdl_sync()
            T.pdl_trigger()
            if chunk(block, tx) < t * width:
                for j in T.vectorized(8):
                    v[j] = x[chunk(block, tx) * 8 + j]
            else:
                for j in T.unroll(8):
                    v[j] = T.cast(0.0, BF16)
            top[0] = 1e-4
            for j in T.unroll(4):
                f[2 * j] = low_half(v2[j])
                f[2 * j + 1] = high_half(v2[j])
            for j in T.unroll(8):
                top[0] = T.max(top[0], T.abs(f[j]))
            top[0] = T.max(top[0], T.shfl_xor(top[0], 1))
            top[0] = T.max(top[0], T.shfl_xor(top[0], 2))
            code[0] = T.reinterpret(top[0], I32)
            code[0] = scale_code(code[0])
            factor[0] = inverse_scale(code[0])
            if chunk(block, tx) < t * width:
                for j in T.vectorized(8):
                    q[j] = T.cast(f[j] * factor[0], FP8)
                if size:
                    for j in T.vectorized(8):
                        codes[record(block, tx) + chunk(block, tx) % width * 8 + j] = q[j]
                    if tx % 4 == 0:
                        scales[record(block, tx) + groups * 32 + chunk(block, tx) % width // 4] = T.cast(code[0], U8)
                    if pad > 0 and chunk(block, tx) % width == 0:
                        for k in T.serial(pad):
                            scales[record(block, tx) + groups * 33 + k] = T.cast(0, U8)
                else:
                    for j in T.vectorized(8):
                        codes[chunk(block, tx) * 8 + j] = q[j]
                    if tx % 4 == 0:
                        scales[chunk(block, tx) // 4] = T.cast(code[0], U8)

    return quant


# ----------------------------------------------------------------------------------------------------------------- ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    n = x.shape[-1]
    if n % 64 or x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        return hyper.rms_norm(x, weight, eps)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        build(norm_program, n)(x.contiguous().view(-1, n), weight, out.view(-1, n), eps)
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    d, rotary = x.shape[-1], cos.shape[1]
    if d % 8 or rotary % 4 or x.dtype is not torch.bfloat16:
        return hyper.rope(x, cos, sin, inverse)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        heads = x.shape[1] if x.dim() == 3 else 1
        flat = (a.contiguous().view(-1) for a in (x, cos, sin))
        build(rope_program, heads, d, rotary, inverse)(*flat, out.view(-1))
    return out


def quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype is not torch.bfloat16:
        return linear.quant_fp8(x)
    q = torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    scale = torch.empty((*x.shape[:-1], x.shape[-1] // 32), dtype=torch.uint8, device=x.device)
    if x.numel():
        build(quant_program, x.shape[-1] // 8, 0)(x.contiguous().view(-1), q.view(-1), scale.view(-1))
    return q, scale


def pack_window(kv: Tensor) -> Tensor:
    if kv.dtype is not torch.bfloat16:
        return cache.pack_window(kv)
    size = records.window_bytes(kv.shape[-1])
    rec = torch.empty((*kv.shape[:-1], size), dtype=torch.uint8, device=kv.device)
    if kv.numel():
        flat = rec.view(-1)
        build(quant_program, kv.shape[-1] // 8, size)(kv.contiguous().view(-1), flat.view(torch.float8_e4m3fn), flat)
    return rec


VARIANTS = [
    Variant("rms_norm/5120", norm_program, (5120,)),
    Variant("rms_norm/512", norm_program, (512,)),
    Variant("rms_norm/128", norm_program, (128,)),
    Variant("rope/64x512", rope_program, (64, 512, 32, False)),
    Variant("rope/64x512/inverse", rope_program, (64, 512, 32, True)),
    Variant("rope/512", rope_program, (1, 512, 32, False)),
    Variant("quant_fp8/5120", quant_program, (640, 0)),
    Variant("pack_window/512", quant_program, (64, 528)),
]
