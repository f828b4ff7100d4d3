"""Dense linears and the activation quantiser on CUDA.

Belongs here: the choice of a variant, the portable kernels. Does not belong here: the Hopper kernels (linear_sm90.py).

By default the kernel is chosen by M for speed, so bits of a row may depend on M: up to 32 rows linear_sm90, more
linear_ws_sm90, many rows cuBLAS on weights and codes widened to bf16, which is exact.

With DEEPINFER_BATCH_INVARIANT bits never depend on M. Two kinds of sums, each the same in every variant:
* linear_fp8: fp8 dots of 32 k, promoted to float32 in k order with a power of two (exact): one rounding per 32 k.
* linear and linear_dequant: bf16 dots, float32 accumulator, in k order; e4m3 times its block scale is exact in bf16.
K is cut into CHUNKS equal parts for shapes with few tiles of weight rows (`fp8_chunks`, `bf16_chunks`: by N and K
only); sums of parts are added in order, by one program or by `add_chunks`.

Weights stay as stored, so views of rows (multiples of 32) work. The Hopper kernels read weights before the programmatic
launch's wait: they must be older than the kernel before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from deepinfer import envs
from deepinfer.ops import linear as reference
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.support import INTERPRET, bf16, e4m3_code, e4m3_value, e8m0_value, f32

INTERPRETED = bool(INTERPRET.value)
PDL = not INTERPRETED
FEW = 64  # rows up to which weights are the M side of the bf16 kernels
INVARIANT = bool(envs.get("DEEPINFER_BATCH_INVARIANT"))
# rows from which FP8 codes are widened to bf16 for cuBLAS. With the widening, percent of the bf16 rate at 8192 rows:
# wq_b 100, wo_b 99, engram_wkv 94 (our fp8 kernel 63, 59, 73); 512 rows of wo_b 90 us (149), wq_b 95 us (94)
WIDE = 512
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # cuBLAS adds parts of K in float32, as we do


def _options(warps: int, stages: int | None = None) -> dict[str, Any]:
    out: dict[str, Any] = {"num_warps": warps}
    if stages is not None:
        out["num_stages"] = stages
    return out | ({"launch_pdl": True} if PDL else {})


@functools.cache
def _hopper(device: int | None) -> bool:
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)


def fp8_chunks(n: int, k: int) -> int:
    """Parts of K of an FP8 linear; rows of a weight and of its fused form (all below 16384) have the same."""
    if n >= 16384 or k < 2048 or k % 256:
        return 1
    return 4 if k >= 4096 and k % 512 == 0 else 2


def bf16_chunks(n: int, k: int) -> int:
    if n > 4096 or k < 2048:
        return 1
    return 8 if n <= 2048 else 4


# --------------------------------------------------------------------------------------------------------- quant_fp8


@triton.jit(do_not_specialize=["GROUPS"])
def _quant(x, q, scale, GROUPS, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Groups of 32 values: bf16 [GROUPS, 32] -> e4m3 codes uint8, E8M0."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = g.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    ok = g < GROUPS
    v = f32(tl.load(x + at, mask=ok[:, None], other=0.0))
    amax = tl.maximum(tl.max(tl.abs(v), axis=1), 1e-4)
    bits = amax.to(tl.int32, bitcast=True)
    # smallest power of two >= amax / 448, 448 = 1.75 * 2^8, without a division
    code = (bits >> 23) - 8 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
    v = v * ((254 - code) << 23).to(tl.float32, bitcast=True)[:, None]
    tl.store(q + at, e4m3_code(v), mask=ok[:, None])
    tl.store(scale + g, code.to(tl.uint8), mask=ok)


def quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype is not torch.bfloat16:
        return reference.quant_fp8(x)
    x = x.contiguous()
    q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty((*x.shape[:-1], x.shape[-1] // 32), dtype=torch.uint8, device=x.device)
    if groups := scale.numel():
        block = 16 if groups <= 8192 else 128
        warps = 1 if block == 16 else 4
        _quant[(triton.cdiv(groups, block),)](
            x, q.view(torch.uint8), scale, groups, BLOCK=block, PDL=PDL, **_options(warps)
        )
    return q, scale


# -------------------------------------------------------------------------------------------------------- linear_fp8


@triton.jit(do_not_specialize=["M"])
def _fp8(
    x, x_scale, w, w_scale, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Portable: out bf16 [M, N], weights as the M side. Grid (N / BN, M / BM). scales uint8 [M, K/32], [N/32, K/32]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, 32)
    groups = K // 32
    x_p = x + m.to(tl.int64)[None, :] * K + k[:, None]
    w_p = w + n.to(tl.int64)[:, None] * K + k[None, :]
    xs_p = x_scale + m.to(tl.int64) * groups
    ws_p = w_scale + n // 32 * groups
    total = tl.zeros((BN, BM), tl.float32)
    for c in range(CHUNKS):
        acc = tl.zeros((BN, BM), tl.float32)
        for g in range(c * (groups // CHUNKS), (c + 1) * (groups // CHUNKS)):
            a = tl.load(w_p + g * 32, mask=(n < N)[:, None], other=0.0)
            b = tl.load(x_p + g * 32, mask=(m < M)[None, :], other=0.0)
            s = e8m0_value(tl.load(ws_p + g, mask=n < N, other=0).to(tl.int32))
            t = e8m0_value(tl.load(xs_p + g, mask=m < M, other=0).to(tl.int32))
            acc += tl.dot(a, b) * (s[:, None] * t[None, :])
        if CHUNKS == 1:
            total = acc
        else:
            total += acc
    to = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(to, bf16(total), mask=(n < N)[:, None] & (m < M)[None, :])


def _fp8_plan(m: int, n: int, k: int) -> dict[str, Any]:
    """Hopper variant: constants of linear_sm90.fp8, and `cap` (registers)."""
    chunks = fp8_chunks(n, k)
    if m <= 32:  # weights are the M side: promotion is cheap in few columns
        bm = 8 if m <= 8 else 16 if m <= 16 else 32
        plan = {"BM": bm, "BN": 64, "FLIP": True, "NW": 4, "DEEP": 4, "SPLIT": chunks > 1, "cap": 128}
        # slots of the ring; where blocks are many they share the memory of an SM. Up to 8 rows, percent of the floor
        # with 4 / 6 / 8 slots on an H200: wq_b 76 / 85 / 70, wo_b (split) 68 / 69 / 74
        plan["ST"] = (8 if chunks > 1 else 6) if m <= 8 else (6 if chunks > 1 else 4)
        return plan
    tiles = triton.cdiv(m, 64) * (n // 128)
    if m <= 64 or tiles < 264:  # two blocks an SM hide each other's latency
        split = chunks > 1 and tiles < 264
        return {"BM": 64, "BN": 128, "FLIP": False, "NW": 8, "DEEP": 1, "SPLIT": split, "ST": 4, "cap": 128}
    return {"BM": 128, "BN": 128, "FLIP": False, "NW": 8, "DEEP": 2, "SPLIT": False, "ST": 4, "cap": None}


def linear_fp8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    m, k = x.shape
    n = weight.shape[0]
    out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    if not out.numel():
        return out
    x, x_scale = x.contiguous(), x_scale.contiguous()
    free = not INVARIANT and not INTERPRETED
    if free and m >= WIDE:
        return torch.mm(widen(x, x_scale, 1), widen(weight, weight_scale, 32).t(), out=out)
    if _hopper(x.device.index) and n % 128 == 0 and k % 128 == 0 and _aligned(x, weight, x_scale, weight_scale):
        if free and m > 32 and (k >= 2048 or m > 64):
            hopper_many(x, x_scale, weight, weight_scale, out, many_chunks(m, n, k))
        else:
            hopper_fp8(x, x_scale, weight, weight_scale, out, _fp8_plan(m, n, k))
        return out
    bm = 16 if m <= 16 else 64
    grid = (triton.cdiv(n, 128), triton.cdiv(m, bm))
    _fp8[grid](
        x, x_scale, weight, weight_scale, out, m, n, k,
        BM=bm, BN=128, CHUNKS=fp8_chunks(n, k), PDL=PDL, **_options(8 if bm == 64 else 4, 4),
    )  # fmt: skip
    return out


def _aligned(*tensors: Tensor) -> bool:
    """16-byte copies of codes, 4-byte words of scales."""
    return all(t.data_ptr() % (4 if t.dtype is torch.uint8 else 16) == 0 and t.is_contiguous() for t in tensors)


def hopper_fp8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor, plan: dict[str, Any]
) -> None:
    from deepinfer.ops.triton import linear_sm90 as hopper

    (m, k), n = x.shape, weight.shape[0]
    plan = dict(plan)
    cap = plan.pop("cap")
    chunks, split = fp8_chunks(n, k), plan["SPLIT"]
    tiles = triton.cdiv(m, plan["BM"]) * (n // plan["BN"])
    part = torch.empty((chunks, m, n), dtype=torch.float32, device=x.device) if split else x_scale
    hopper.fp8[(tiles, chunks if split else 1)](
        x, x_scale.view(torch.int32), weight, weight_scale.view(torch.int32), out, part, m, n,
        K=k, CHUNKS=chunks, GROUP=8, **plan, **_options(plan["NW"]), **({"maxnreg": cap} if cap else {}),
    )  # fmt: skip
    if split:
        add_chunks(part, out)


@triton.jit
def _add(
    part, bias, out, SIZE, N, CHUNKS: tl.constexpr, BIAS: tl.constexpr, F32: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] = sum of part [CHUNKS, M, N] in order, + bias [N]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < SIZE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for c in tl.static_range(CHUNKS):
        total += tl.load(part + c * SIZE + at, mask=ok, other=0.0)
    if BIAS:
        total += f32(tl.load(bias + at % N, mask=ok, other=0.0))
    tl.store(out + at, total if F32 else bf16(total), mask=ok)


def add_chunks(part: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = sum of part float32 [CHUNKS, M, N] in order, + bias."""
    size = out.numel()
    _add[(triton.cdiv(size, 512),)](
        part, bias, out, size, out.shape[1],
        CHUNKS=part.shape[0], BIAS=bias is not None, F32=out.dtype is torch.float32, BLOCK=512, PDL=PDL, **_options(4),
    )  # fmt: skip


def many_chunks(m: int, n: int, k: int) -> int:
    """Parts of K of linear_ws_sm90.fp8_many: up to a block an SM.

    More cost more than they hide: shared_w13 at 64 rows takes 12.5 us with 3 parts, 15.0 with 7.
    """
    words, tiles = k // 128, triton.cdiv(m, 64) * (n // 128)
    return triton.cdiv(words, triton.cdiv(words, max(1, min(words // 2, 132 // tiles))))


def hopper_many(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor, chunks: int) -> None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Descriptor

    from deepinfer.ops.triton import linear_ws_sm90 as hopper

    (m, k), n = x.shape, weight.shape[0]
    part = torch.empty((chunks, m, n), dtype=torch.float32, device=x.device) if chunks > 1 else x_scale
    hopper.fp8_many[(triton.cdiv(m, 64) * (n // 128), chunks)](
        Descriptor.from_tensor(x, [64, 128], hopper.S8), x_scale.view(torch.int32),
        Descriptor.from_tensor(weight, [128, 128], hopper.S8), weight_scale.view(torch.int32),
        Descriptor.from_tensor(out, [64, 128], hopper.S16), part, m, n,
        K=k, ST=4, CHUNKS=chunks, GROUP=8, maxnreg=128, **_options(4),
    )  # fmt: skip
    if chunks > 1:
        add_chunks(part, out)


# ----------------------------------------------------------------------------------------------- linear_dequant, linear


@triton.jit(do_not_specialize=["M"])
def _few(
    x, w, w_scale, bias, out, part, M, N, K: tl.constexpr, ROWS: tl.constexpr, SEGMENT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, SPLIT: tl.constexpr,
    FP8: tl.constexpr, BIAS: tl.constexpr, F32: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x bf16 [M, groups * K] w [N, K]^T, any sizes; weights (bf16; FP8: e4m3 codes uint8) as the M side.

    Grid (N / BN, M / BM, CHUNKS if SPLIT else 1). ROWS: weight rows of a group (0: one group); a tile lies in one.
    SEGMENT: k of a chunk, a multiple of BK.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    if ROWS:
        x_p = x + (m.to(tl.int64) * (N // ROWS * K) + tl.program_id(0) * BN // ROWS * K)[None, :] + k[:, None]
    else:
        x_p = x + m.to(tl.int64)[None, :] * K + k[:, None]
    w_p = w + n.to(tl.int64)[:, None] * K + k[None, :]
    s_p = w_scale + (n // 32)[:, None] * (K // 32)
    x_ok = (m < M)[None, :]
    w_ok = (n < N)[:, None]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if SPLIT:
        chunk = tl.program_id(2)
        y = _segment(x_p, w_p, s_p, x_ok, w_ok, chunk * SEGMENT, K, SEGMENT, BM, BN, BK, FP8)
        at = part + chunk.to(tl.int64) * M * N + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(at, y, mask=w_ok & x_ok)
    elif CHUNKS > 1:
        total = tl.zeros((BN, BM), tl.float32)
        for c in range(CHUNKS):
            total += _segment(x_p, w_p, s_p, x_ok, w_ok, c * SEGMENT, K, SEGMENT, BM, BN, BK, FP8)
        _finish(out, bias, total, m, n, M, N, BIAS, F32)
    else:
        y = _segment(x_p, w_p, s_p, x_ok, w_ok, 0, K, SEGMENT, BM, BN, BK, FP8)
        _finish(out, bias, y, m, n, M, N, BIAS, F32)


@triton.jit
def _segment(
    x_p, w_p, s_p, x_ok, w_ok, first, K: tl.constexpr, SEGMENT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Sum over SEGMENT of k from `first` -> float32 [BN, BM]."""
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BM), tl.float32)
    for o in range(first, tl.minimum(first + SEGMENT, K), BK):
        if K % BK:
            x_k = x_ok & (o + k < K)[:, None]
            w_k = w_ok & (o + k < K)[None, :]
        else:
            x_k = x_ok
            w_k = w_ok
        b = tl.load(x_p + o, mask=x_k, other=0.0)
        a = tl.load(w_p + o, mask=w_k, other=0)
        if FP8:
            g = o // 32 + tl.arange(0, BK // 32)
            s = e8m0_value(tl.load(s_p + g[None, :], mask=w_ok & (g < K // 32)[None, :], other=0).to(tl.int32))
            a = bf16((e4m3_value(a).reshape(BN, BK // 32, 32) * s[:, :, None]).reshape(BN, BK))
        if INTERPRET:
            acc = tl.dot(f32(a), f32(b), acc)
        else:
            acc = tl.dot(a, b, acc)
            if FP8:  # reads acc, so that Triton waits: A lies in registers, which the next step writes
                acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], tl.float32, True, 1)
    return acc


@triton.jit
def _finish(out, bias, y, m, n, M, N, BIAS: tl.constexpr, F32: tl.constexpr):
    """y [n, m] + bias[n] -> out [M, N]."""
    if BIAS:
        y += f32(tl.load(bias + n, mask=n < N, other=0.0))[:, None]
    to = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(to, y if F32 else bf16(y), mask=(n < N)[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=["M"])
def _many(
    x, w, bias, out, M, N, K, ROWS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr,
    BIAS: tl.constexpr, F32: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for many rows: x, w, out are tensor descriptors of [M, groups K], [N, K], [M, N].

    Grid (tiles,); K is a multiple of BK * CHUNKS.
    """
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    width = 8 * tiles_n  # eight row tiles walk the weights together, so both stay in the L2
    pid = tl.program_id(0)
    first = pid // width * 8
    size = tl.minimum(tiles_m - first, 8)
    tm = (first + pid % width % size) * BM
    tn = pid % width // size * BN
    base = tn // ROWS * K
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if CHUNKS == 1:
        y = _span(x, w, tm, tn, base, 0, K, BM, BN, BK)
    else:
        y = tl.zeros((BM, BN), tl.float32)
        for c in range(CHUNKS):
            y += _span(x, w, tm, tn, base, c * (K // CHUNKS), K // CHUNKS, BM, BN, BK)
    if BIAS:
        n = tn + tl.arange(0, BN)
        y += f32(tl.load(bias + n, mask=n < N, other=0.0))[None, :]
    # two stores: one of 256 columns spills
    low, high = tl.split(y.reshape(BM, 2, BN // 2).permute(0, 2, 1))
    out.store([tm, tn], low if F32 else bf16(low))
    out.store([tm, tn + BN // 2], high if F32 else bf16(high))


@triton.jit
def _span(x, w, tm, tn, base, first, length, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    acc = tl.zeros((BM, BN), tl.float32)
    for o in range(first, first + length, BK):
        a = x.load([tm, base + o])
        b = w.load([tn, o]).T
        if INTERPRET:
            acc = tl.dot(f32(a), f32(b), acc)
        else:
            acc = tl.dot(a, b, acc)
    return acc


@triton.jit(do_not_specialize=["GROUPS"])
def _widen(w, w_scale, out, GROUPS, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Groups of 32 codes uint8 [N, K] with scales uint8 [N / ROWS, K/32] -> bf16 [N, K], exact."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = g < GROUPS
    at = g.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    code = tl.load(w + at, mask=ok[:, None], other=0)
    s = tl.load(w_scale + g // (K // 32 * ROWS) * (K // 32) + g % (K // 32), mask=ok, other=0)
    if INTERPRET:
        v = e4m3_value(code)
    else:
        v = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    tl.store(out + at, bf16(v * e8m0_value(s.to(tl.int32))[:, None]), mask=ok[:, None])


def widen(code: Tensor, scale: Tensor, rows: int) -> Tensor:
    """e4m3 [N, K] and E8M0 [N / rows, K/32] -> bf16."""
    n, k = code.shape
    wide = torch.empty((n, k), dtype=torch.bfloat16, device=code.device)
    _widen[(triton.cdiv(n * k, 32 * 128),)](
        code.view(torch.uint8), scale, wide, n * k // 32, K=k, ROWS=rows, BLOCK=128, PDL=PDL, **_options(4)
    )
    return wide


def _dense(x: Tensor, w: Tensor, w_scale: Tensor | None, bias: Tensor | None, groups: int, f32_out: bool) -> Tensor:
    m, (n, k), fp8 = x.shape[0], w.shape, w_scale is not None
    out = torch.empty((m, n), dtype=torch.float32 if f32_out else torch.bfloat16, device=x.device)
    if not out.numel():
        return out
    x, rows = x.contiguous(), n // groups
    chunks = 1 if fp8 else bf16_chunks(n, k)
    tiled = k % (64 if chunks == 1 else 128 * chunks) == 0 and n % 8 == 0 and (groups == 1 or rows % 256 == 0)
    tiled = tiled and x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0
    if m > FEW and tiled:
        if w_scale is not None:
            w = widen(w, w_scale, 32)
        bm, bn, warps, stages = _many_plan(m, n, chunks)
        grid = (triton.cdiv(m, bm) * triton.cdiv(n, bn),)
        _many[grid](
            TensorDescriptor.from_tensor(x, [bm, 64]), TensorDescriptor.from_tensor(w, [bn, 64]),
            bias, TensorDescriptor.from_tensor(out, [bm, bn // 2]), m, n, k, rows,
            BM=bm, BN=bn, BK=64, CHUNKS=chunks, BIAS=bias is not None, F32=f32_out, PDL=PDL, **_options(warps, stages),
        )  # fmt: skip
        return out
    bm, bn, bk, warps = _few_plan(m, n, fp8)
    if groups > 1:
        while rows % bn:
            bn //= 2
    split = chunks > 1 and m <= FEW
    part = torch.empty((chunks, m, n), dtype=torch.float32, device=x.device) if split else out
    segment = triton.cdiv(triton.cdiv(k, 128), chunks) * 128
    _few[(triton.cdiv(n, bn), triton.cdiv(m, bm), chunks if split else 1)](
        x, w.view(torch.uint8) if fp8 else w, w_scale if fp8 else w, bias, out, part, m, n,
        K=k, ROWS=rows if groups > 1 else 0, SEGMENT=segment,
        BM=bm, BN=bn, BK=bk, CHUNKS=chunks, SPLIT=split, FP8=fp8, BIAS=bias is not None, F32=f32_out,
        PDL=PDL, **_options(warps, 4),
    )  # fmt: skip
    if split:
        add_chunks(part, out, bias)
    return out


def _few_plan(m: int, n: int, fp8: bool) -> tuple[int, int, int, int]:
    """Rows, weight rows and k of a tile, warps."""
    bm = 16 if m <= 16 else 32 if m <= 32 else 64
    if n >= 32768 and bm == 64 and not fp8:  # LM head: x comes from the L2 once per tile, so tiles are tall
        return bm, 256, 64, 8
    return bm, 64, 64 if fp8 or bm == 64 else 128, 4


def _many_plan(m: int, n: int, chunks: int) -> tuple[int, int, int, int]:
    """Rows, weight rows, warps and stages of a tile."""
    if chunks > 1 or triton.cdiv(m, 128) * triton.cdiv(n, 256) < 132:
        return 128, 128, 8, 4
    return 128, 256, 8, 4


def linear_dequant(x: Tensor, weight: Tensor, weight_scale: Tensor, groups: int) -> Tensor:
    if x.dtype is not torch.bfloat16:
        return reference.linear_dequant(x, weight, weight_scale, groups)
    m, (n, k) = x.shape[0], weight.shape
    ready = _hopper(x.device.index) and k % 128 == 0 and n // groups % 64 == 0
    if m > FEW and not INVARIANT and not INTERPRETED:
        return _library(x, widen(weight, weight_scale, 32), groups)
    if 0 < m <= FEW and ready and x.is_contiguous() and _aligned(x, weight, weight_scale):
        return hopper_dequant(x, weight, weight_scale, groups)
    return _dense(x, weight, weight_scale, None, groups, False)


def _library(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """cuBLAS: x bf16 [M, groups K], weight bf16 [groups N, K]."""
    m, n = x.shape[0], weight.shape[0]
    out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    if groups == 1:
        return torch.mm(x, weight.t(), out=out)
    torch.bmm(
        x.view(m, groups, -1).transpose(0, 1),
        weight.view(groups, n // groups, -1).transpose(1, 2),
        out=out.view(m, groups, -1).transpose(0, 1),
    )
    return out


def hopper_dequant(x: Tensor, weight: Tensor, weight_scale: Tensor, groups: int) -> Tensor:
    from deepinfer.ops.triton import linear_sm90 as hopper

    m, (n, k) = x.shape[0], weight.shape
    out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    bm = 8 if m <= 8 else 16 if m <= 16 else 32 if m <= 32 else 64
    # a block alone on an SM waits for its own loads and wgmmas most of the time, so two share a tile of wo_a
    chunks = 2 if not INVARIANT and n // 64 <= 132 and k % 256 == 0 else 1
    stages = 8 if bm <= 16 else 6 if bm == 32 else 5
    part = torch.empty((chunks, m, n), dtype=torch.float32, device=x.device) if chunks > 1 else out
    hopper.expand[(n // 64, chunks)](
        x, weight, weight_scale.view(torch.int32), out, part, m, n,
        K=k, ROWS=n // groups, BM=bm, NW=4, CHUNKS=chunks, ST=min(stages, 4) if bm == 64 and chunks > 1 else stages,
        **_options(4),
    )  # fmt: skip
    if chunks > 1:
        add_chunks(part, out)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_f32: bool) -> Tensor:
    if x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        return reference.linear(x, weight, bias, out_f32)
    weight = weight.contiguous()
    if x.shape[0] > FEW and not INVARIANT and not INTERPRETED and not (bias is not None and out_f32):
        if bias is not None:
            return torch.addmm(bias, x, weight.t())
        return torch.mm(x, weight.t(), out_dtype=torch.float32) if out_f32 else torch.mm(x, weight.t())
    return _dense(x, weight, None, bias, 1, out_f32)


# ---------------------------------------------------------------------------------------------------- compile checks


def _variants() -> list[Variant]:
    out = []
    quant = {"x": "*bf16", "q": "*u8", "scale": "*u8", "GROUPS": "i32"}
    for block in (16, 128):
        out.append(Variant(_quant, quant, {"BLOCK": block, "PDL": True}, {90: "", 100: ""}))
    fp8 = {"x": "*fp8e4nv", "x_scale": "*u8", "w": "*fp8e4nv", "w_scale": "*u8", "out": "*bf16"}
    fp8 |= {"M": "i32", "N": "i32", "K": "i32"}
    for bm, chunks in ((16, 1), (64, 4)):
        constants = {"BM": bm, "BN": 128, "CHUNKS": chunks, "PDL": True}
        options = {"num_warps": 8 if bm == 64 else 4, "num_stages": 4}
        out.append(Variant(_fp8, fp8, constants, {90: "wgmma", 100: "tcgen05.mma"}, options))
    sizes = {"M": "i32", "N": "i32", "K": "i32", "ROWS": "i32"}
    few = {"x": "*bf16", "bias": "*bf16", "out": "*bf16", "part": "*fp32", "M": "i32", "N": "i32"}
    tensor_core = {90: "wgmma", 100: "tcgen05.mma"}
    for m, n, f8 in ((1, 129280, False), (64, 129280, False), (1, 1024, False), (64, 1024, False), (1, 8192, True)):
        bm, bn, bk, warps = _few_plan(m, n, f8)
        k, chunks = 4096 if f8 else 5120, 1 if f8 else bf16_chunks(n, 5120)
        constants = {"BM": bm, "BN": bn, "BK": bk, "CHUNKS": chunks, "SPLIT": chunks > 1, "K": k}
        constants |= {"ROWS": 1024 if f8 else 0, "SEGMENT": k // chunks, "FP8": f8, "BIAS": True, "F32": False}
        types = {**few, "w": "*u8" if f8 else "*bf16", "w_scale": "*u8"}
        options = {"num_warps": warps, "num_stages": 4}
        out.append(Variant(_few, types, {**constants, "PDL": True}, tensor_core, options))
    for m, n, chunks in ((8192, 8192, 1), (512, 1024, 8)):
        bm, bn, warps, stages = _many_plan(m, n, chunks)
        types = {"x": f"tensordesc<bf16[{bm}, 64]>", "w": f"tensordesc<bf16[{bn}, 64]>", "bias": "*bf16"}
        types["out"] = f"tensordesc<bf16[{bm}, {bn // 2}]>"
        constants = {"BM": bm, "BN": bn, "BK": 64, "CHUNKS": chunks, "BIAS": False, "F32": False, "PDL": True}
        options = {"num_warps": warps, "num_stages": stages}
        out.append(Variant(_many, {**types, **sizes}, constants, tensor_core, options))
    widen = {"w": "*u8", "w_scale": "*u8", "out": "*bf16", "GROUPS": "i32"}
    for rows in (1, 32):
        constants = {"K": 5120, "ROWS": rows, "BLOCK": 128, "PDL": True}
        out.append(Variant(_widen, widen, constants, {90: "", 100: ""}))
    add = {"part": "*fp32", "bias": "*bf16", "out": "*bf16", "SIZE": "i32", "N": "i32"}
    constants = {"CHUNKS": 8, "BIAS": True, "F32": False, "BLOCK": 512, "PDL": True}
    out.append(Variant(_add, add, constants, {90: "", 100: ""}))
    if INTERPRETED:
        return out
    from deepinfer.ops.triton import linear_sm90 as hopper

    codes = {"x_ptr": "*fp8e4nv", "xs_ptr": "*i32", "w_ptr": "*fp8e4nv", "ws_ptr": "*i32", "out_ptr": "*bf16"}
    codes |= {"part_ptr": "*fp32", "M": "i32", "N": "i32"}
    for m in (8, 16, 32, 64, 8192):
        for n, k in ((5120, 8192), (32768, 1280)):
            plan = _fp8_plan(m, n, k)
            cap = plan.pop("cap")
            options = {"num_warps": plan["NW"], **({"maxnreg": cap} if cap else {})}
            constants = {**plan, "K": k, "CHUNKS": fp8_chunks(n, k), "GROUP": 8}
            out.append(Variant(hopper.fp8, codes, constants, {90: "wgmma"}, options, True))
    wide = {"x_ptr": "*bf16", "w_ptr": "*fp8e4nv", "ws_ptr": "*i32", "out_ptr": "*bf16", "part_ptr": "*fp32"}
    wide |= {"M": "i32", "N": "i32"}
    for bm, stages, chunks in ((8, 8, 1), (16, 8, 1), (32, 6, 1), (64, 5, 1), (64, 4, 2)):
        constants = {"K": 4096, "ROWS": 1024, "BM": bm, "NW": 4, "ST": stages, "CHUNKS": chunks}
        out.append(Variant(hopper.expand, wide, constants, {90: "wgmma"}, {"num_warps": 4}, True))
    from deepinfer.ops.triton import linear_ws_sm90 as ws

    for chunks, k in ((1, 1280), (3, 8192)):
        types = {"x_desc": f"tensordesc<fp8e4nv[64, 128],{ws.S8!r}>", "xs_ptr": "*i32"}
        types |= {"w_desc": f"tensordesc<fp8e4nv[128, 128],{ws.S8!r}>", "ws_ptr": "*i32"}
        types |= {"out_desc": f"tensordesc<bf16[64, 128],{ws.S16!r}>", "part_ptr": "*fp32", "M": "i32", "N": "i32"}
        constants = {"K": k, "ST": 4, "CHUNKS": chunks, "GROUP": 8}
        out.append(Variant(ws.fp8_many, types, constants, {90: "wgmma"}, {"num_warps": 4, "maxnreg": 128}, True))
    return out


VARIANTS = _variants()
