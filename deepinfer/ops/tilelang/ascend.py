"""The row-wise ops in TileLang's dialect for Ascend 950: lowered to Ascend C, never compiled or run (no CANN here).

Belongs here: programs of tiles, which a vector core takes through its buffer row by row. Does not belong here: CUDA
programs (norm.py, hyper.py, engram.py), which name the threads of a block; calling these (no provider uses them yet).
Arguments and results are those of the CUDA programs. A core takes rows core, core + CORES, ...
"""

import functools
from typing import Any

import tilelang.ascend.language as T

from deepinfer.ops.tilelang.compile import Variant
from deepinfer.ops.tilelang.support import BF16, F32, FP8, I32, U8, inverse_scale, scale_code

CORES, THREADS = 32, 512


@functools.cache
def norm_program(n: int) -> Any:
    t = T.dynamic("t")

    @T.prim_func
    def rms_norm(x: T.Tensor((t, n), BF16), weight: T.Tensor((n,), BF16), out: T.Tensor((t, n), BF16), eps: T.float32):
        with T.Kernel(CORES) as core:
            v = T.alloc_shared((n,), BF16)
            w = T.alloc_shared((n,), BF16)
            o = T.alloc_shared((n,), BF16)
            T.copy(weight, w)
            for k in T.serial(T.ceildiv(t, CORES)):
                if k * CORES + core < t:
                    T.copy(x[k * CORES + core, :], v)
                    with T.SimtVF(threads=THREADS):
                        f = T.alloc_fragment((n,), F32)
                        total = T.alloc_fragment((1,), F32)
                        for j in T.Parallel(n):
                            f[j] = T.cast(v[j], F32) * T.cast(v[j], F32)
                        T.reduce_sum(f, total, dim=0)
                        for j in T.Parallel(n):
                            o[j] = T.cast(T.cast(v[j], F32) * T.rsqrt(total[0] / n + eps) * T.cast(w[j], F32), BF16)
                    T.copy(o, out[k * CORES + core, :])

    return rms_norm


@functools.cache
def quant_program(k: int) -> Any:
    """MXFP8: codes and one E8M0 scale a group of 32."""
    t, groups = T.dynamic("t"), k // 32

    @T.prim_func
    def quant_fp8(
        x: T.Tensor((t, groups, 32), BF16), codes: T.Tensor((t, groups, 32), FP8), scales: T.Tensor((t, groups), U8)
    ):
        with T.Kernel(CORES) as core:
            v = T.alloc_shared((groups, 32), BF16)
            q = T.alloc_shared((groups, 32), FP8)
            e = T.alloc_shared((groups,), U8)
            for n in T.serial(T.ceildiv(t, CORES)):
                if n * CORES + core < t:
                    T.copy(x[n * CORES + core, :, :], v)
                    with T.SimtVF(threads=THREADS):
                        f = T.alloc_fragment((groups, 32), F32)
                        top = T.alloc_fragment((groups,), F32)
                        code = T.alloc_fragment((groups,), I32)
                        for g, j in T.Parallel(groups, 32):
                            f[g, j] = T.cast(v[g, j], F32)
                        T.reduce_absmax(f, top, dim=1)
                        for g in T.Parallel(groups):
                            code[g] = scale_code(T.reinterpret(T.max(top[g], 1e-4), I32))
                        for g, j in T.Parallel(groups, 32):
                            q[g, j] = T.cast(f[g, j] * inverse_scale(code[g]), FP8)
                        for g in T.Parallel(groups):
                            e[g] = T.cast(code[g], U8)
                    T.copy(q, codes[n * CORES + core, :, :])
                    T.copy(e, scales[n * CORES + core, :])

    return quant_fp8


@functools.cache
def collapse_program(h: int) -> Any:
    t = T.dynamic("t")

    @T.prim_func
    def hc_collapse(streams: T.Tensor((t, 4, h), BF16), pre: T.Tensor((t, 4), F32), out: T.Tensor((t, h), BF16)):
        with T.Kernel(CORES) as core:
            s = T.alloc_shared((4, h), BF16)
            o = T.alloc_shared((h,), BF16)
            for k in T.serial(T.ceildiv(t, CORES)):
                if k * CORES + core < t:
                    T.copy(streams[k * CORES + core, :, :], s)
                    with T.SimtVF(threads=THREADS):
                        for j in T.Parallel(h):
                            o[j] = T.cast(
                                pre[k * CORES + core, 0] * T.cast(s[0, j], F32)
                                + pre[k * CORES + core, 1] * T.cast(s[1, j], F32)
                                + pre[k * CORES + core, 2] * T.cast(s[2, j], F32)
                                + pre[k * CORES + core, 3] * T.cast(s[3, j], F32),
                                BF16,
                            )
                    T.copy(o, out[k * CORES + core, :])

    return hc_collapse


@functools.cache
def write_program(h: int) -> Any:
    t = T.dynamic("t")

    @T.prim_func
    def hc_write(
        y: T.Tensor((t, h), BF16),
        streams: T.Tensor((t, 4, h), BF16),
        post: T.Tensor((t, 4), F32),
        comb: T.Tensor((t, 4, 4), F32),
        out: T.Tensor((t, 4, h), BF16),
    ):
        with T.Kernel(CORES) as core:
            v = T.alloc_shared((h,), BF16)
            s = T.alloc_shared((4, h), BF16)
            o = T.alloc_shared((4, h), BF16)
            for k in T.serial(T.ceildiv(t, CORES)):
                if k * CORES + core < t:
                    T.copy(y[k * CORES + core, :], v)
                    T.copy(streams[k * CORES + core, :, :], s)
                    with T.SimtVF(threads=THREADS):
                        for i, j in T.Parallel(4, h):
                            o[i, j] = T.cast(
                                post[k * CORES + core, i] * T.cast(v[j], F32)
                                + comb[k * CORES + core, 0, i] * T.cast(s[0, j], F32)
                                + comb[k * CORES + core, 1, i] * T.cast(s[1, j], F32)
                                + comb[k * CORES + core, 2, i] * T.cast(s[2, j], F32)
                                + comb[k * CORES + core, 3, i] * T.cast(s[3, j], F32),
                                BF16,
                            )
                    T.copy(o, out[k * CORES + core, :, :])

    return hc_write


@functools.cache
def gate_program(streams: int, h: int) -> Any:
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
        with T.Kernel(CORES) as core:
            q = T.alloc_shared((h,), BF16)
            w = T.alloc_shared((h,), BF16)
            a = T.alloc_shared((h,), BF16)
            key = T.alloc_shared((h,), BF16)
            value = T.alloc_shared((h,), BF16)
            o = T.alloc_shared((h,), BF16)
            for s in T.serial(streams):
                T.copy(q_weight[s, :], q)
                T.copy(k_weight[s, :], w)
                for k in T.serial(T.ceildiv(t, CORES)):
                    if k * CORES + core < t:
                        T.copy(r[k * CORES + core, s, :], a)
                        T.copy(kv[k * CORES + core, s, :], key)
                        T.copy(kv[k * CORES + core, streams, :], value)
                        with T.SimtVF(threads=THREADS):
                            f = T.alloc_fragment((h,), F32)
                            squares = T.alloc_fragment((1,), F32)
                            key_squares = T.alloc_fragment((1,), F32)
                            dot = T.alloc_fragment((1,), F32)
                            for j in T.Parallel(h):
                                f[j] = T.cast(a[j], F32) * T.cast(a[j], F32)
                            T.reduce_sum(f, squares, dim=0)
                            for j in T.Parallel(h):
                                f[j] = T.cast(key[j], F32) * T.cast(key[j], F32)
                            T.reduce_sum(f, key_squares, dim=0)
                            for j in T.Parallel(h):
                                f[j] = T.cast(a[j], F32) * (T.cast(q[j], F32) * T.cast(w[j], F32)) * T.cast(key[j], F32)
                            T.reduce_sum(f, dot, dim=0)
                            for i in T.Parallel(1):
                                dot[i] = (
                                    dot[i] * T.rsqrt(squares[i] / h + eps) * T.rsqrt(key_squares[i] / h + eps) * h**-0.5
                                )
                                squares[i] = T.sqrt(T.max(T.abs(dot[i]), 1e-6))
                                squares[i] = T.if_then_else(dot[i] < 0, squares[i], -squares[i])
                                squares[i] = 1.0 / (1.0 + T.exp(squares[i]))
                                if is_image[k * CORES + core] != T.cast(0, U8):
                                    squares[i] = 0.0
                            for j in T.Parallel(h):
                                o[j] = T.cast(T.cast(a[j], F32) + squares[0] * T.cast(value[j], F32), BF16)
                        T.copy(o, out[k * CORES + core, s, :])

    return engram_gate


VARIANTS = [
    Variant("rms_norm/5120", norm_program, (5120,), archs=()),
    Variant("quant_fp8/5120", quant_program, (5120,), archs=()),
    Variant("hc_collapse/5120", collapse_program, (5120,), archs=()),
    Variant("hc_write/5120", write_program, (5120,), archs=()),
    Variant("engram_gate/4x5120", gate_program, (4, 5120), archs=()),
]
