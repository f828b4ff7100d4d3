"""The Engram gate in TileLang.

Belongs here: the kernel of engram_gate. Does not belong here: its definition (ops/engram.py), look-back and table rows.

A block takes one stream of ROWS rows; a thread holds its columns of a row in registers as bf16 and of both norm
weights as their float32 product. The three sums of a row (stream squared, key squared, product) go over one barrier.
Legend: T rows, C streams, H hidden.
"""

import functools
from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from deepinfer.ops import engram
from deepinfer.ops.tilelang.compile import Variant, build
from deepinfer.ops.tilelang.support import BF16, F32, I32, U8, U32, high_half, low_half


@functools.cache
def gate_program(streams: int, h: int, rows: int) -> Any:
    vector = next(v for v in (8, 4, 2) if h % (32 * v) == 0)
    threads = max(t for t in range(32, 321, 32) if h // vector % t == 0)
    each = h // vector // threads  # chunks of a thread
    warps = threads // 32
    t = T.dynamic("t")

    @T.prim_func
    def engram_gate(
        r: T.Tensor((t, streams, h), BF16),
        kv: T.Tensor((t, streams + 1, h), BF16),
        q_weight: T.Tensor((streams, h), BF16),
        k_weight: T.Tensor((streams, h), BF16),
        is_image: T.Tensor((t,), U8),
        out: T.Tensor((t, streams, h), BF16),
        eps: T.float32,
    ):
        with T.Kernel(streams, T.ceildiv(t, rows), threads=threads) as (s, block):
            T.annotate_min_blocks_per_sm(3)
            tx = T.get_thread_binding()
            w = T.alloc_local((each, vector), F32)
            a = T.alloc_local((each, vector), BF16)
            key = T.alloc_local((each, vector), BF16)
            value = T.alloc_local((each, vector), BF16)
            a2, key2, value2 = (T.view(b, (each, vector // 2), U32) for b in (a, key, value))
            q = T.alloc_local((vector,), BF16)
            k = T.alloc_local((vector,), BF16)
            q2, k2 = T.view(q, (vector // 2,), U32), T.view(k, (vector // 2,), U32)
            f = T.alloc_local((each, vector), F32)  # the stream
            g = T.alloc_local((vector,), F32)
            sums = T.alloc_local((3,), F32)
            gate = T.alloc_local((1,), F32)
            parts = T.alloc_shared((2, 3, warps), F32)
            for c in T.unroll(each):
                for j in T.vectorized(vector):
                    q[j] = q_weight[s, (c * threads + tx) * vector + j]
                for j in T.vectorized(vector):
                    k[j] = k_weight[s, (c * threads + tx) * vector + j]
                for j in T.unroll(vector // 2):
                    w[c, 2 * j] = low_half(q2[j]) * low_half(k2[j])
                    w[c, 2 * j + 1] = high_half(q2[j]) * high_half(k2[j])
            T.pdl_sync()
            T.pdl_trigger()
            for i in T.serial(rows):
                if block * rows + i < t:
                    for c in T.unroll(each):
                        for j in T.vectorized(vector):
                            a[c, j] = r[block * rows + i, s, (c * threads + tx) * vector + j]
                        for j in T.vectorized(vector):
                            key[c, j] = kv[block * rows + i, s, (c * threads + tx) * vector + j]
                        for j in T.vectorized(vector):
                            value[c, j] = kv[block * rows + i, streams, (c * threads + tx) * vector + j]
                    for n in T.unroll(3):
                        sums[n] = 0.0
                    for c in T.unroll(each):
                        for j in T.unroll(vector // 2):
                            f[c, 2 * j] = low_half(a2[c, j])
                            f[c, 2 * j + 1] = high_half(a2[c, j])
                            g[2 * j] = low_half(key2[c, j])
                            g[2 * j + 1] = high_half(key2[c, j])
                        for j in T.unroll(vector):
                            sums[0] = T.ieee_fmaf(f[c, j], f[c, j], sums[0])
                            sums[1] = T.ieee_fmaf(g[j], g[j], sums[1])
                            sums[2] = T.ieee_fmaf(f[c, j] * w[c, j], g[j], sums[2])
                    for n in T.unroll(3):
                        sums[n] = T.warp_reduce_sum(sums[n])
                    if tx % 32 == 0:
                        for n in T.unroll(3):
                            parts[i % 2, n, tx // 32] = sums[n]
                    T.sync_threads()
                    for n in T.unroll(3):
                        sums[n] = 0.0
                        for m in T.unroll(warps):
                            sums[n] += parts[i % 2, n, m]
                    # sigmoid of the signed root
                    gate[0] = T.rsqrt(sums[0] * T.float32(1 / h) + eps) * T.rsqrt(sums[1] * T.float32(1 / h) + eps)
                    gate[0] = sums[2] * gate[0] * T.float32(h**-0.5)
                    sums[0] = T.sqrt(T.max(T.abs(gate[0]), T.float32(1e-6)))
                    sums[1] = T.if_then_else(T.reinterpret(gate[0], I32) < 0, sums[0], -sums[0])
                    gate[0] = T.fast_rcp(1.0 + T.exp(sums[1]))
                    if is_image[block * rows + i] != T.cast(0, U8):
                        gate[0] = 0.0
                    for c in T.unroll(each):
                        for j in T.unroll(vector // 2):
                            f[c, 2 * j] = T.ieee_fmaf(gate[0], low_half(value2[c, j]), f[c, 2 * j])
                            f[c, 2 * j + 1] = T.ieee_fmaf(gate[0], high_half(value2[c, j]), f[c, 2 * j + 1])
                        for j in T.vectorized(vector):
                            a[c, j] = T.cast(f[c, j], BF16)
                        for j in T.vectorized(vector):
                            out[block * rows + i, s, (c * threads + tx) * vector + j] = a[c, j]

    return engram_gate


def _rows(t: int) -> int:
    """Rows of a block: from 256 rows on the weights are worth keeping. The bits of a row do not depend on it."""
    return 1 if t < 256 else 4


def engram_gate(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, is_image: Tensor, eps: float
) -> Tensor:
    t, c, h = streams.shape
    if h % 64 or streams.dtype is not torch.bfloat16 or kv.dtype is not torch.bfloat16:
        return engram.engram_gate(streams, kv, q_weight, k_weight, is_image, eps)
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if out.numel():
        build(gate_program, c, h, _rows(t))(
            streams.contiguous(), kv.contiguous().view(t, c + 1, h), q_weight, k_weight, is_image.view(torch.uint8),
            out, eps,
        )  # fmt: skip
    return out


VARIANTS = [Variant(f"engram_gate/4x5120/{rows}", gate_program, (4, 5120, rows)) for rows in (1, 4)]
