"""Router of the mixture of experts on CUDA.

Belongs here: scores and the choice of experts. Does not belong here: their work (experts.py).

Two launches: logits by bf16 products, few rows split over K to fill the device; then a warp a row for the choice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer import envs
from deepinfer.ops import moe
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.support import INTERPRET, f32

PDL = not bool(INTERPRET.value)
# the same bits of a row for every number of rows
INVARIANT = bool(envs.get("DEEPINFER_BATCH_INVARIANT"))


def _launch_options() -> dict[str, Any]:
    return {"launch_pdl": True} if PDL else {}


LOWEST = tl.constexpr(-(1 << 31))
SPLITS = 10  # K segments of few rows' logits, summed in order


@triton.jit(do_not_specialize=["T"])
def _router_gemm(
    x, w, out, T,
    E: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr, LOOP: tl.constexpr, EARLY: tl.constexpr,
    FULL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits float32 = x bf16 [T, H] w bf16 [E, H]^T. Grid (T / BM, E / BN, 1 or SPLITS).

    LOOP: a program adds the segments itself and writes [T, E]; otherwise a segment a program, partials [SPLITS, T, E],
    which the selection adds in the same order: the same bits. EARLY: a segment is one step of BK, its weights (which no
    kernel writes) are read before the wait. FULL: steps divide H. Rows past the end repeat the last and are not stored:
    no masks in the loop.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    segment = tl.cdiv(tl.cdiv(H, 128), SPLITS) * 128
    x_p = x + tl.minimum(m, T - 1).to(tl.int64)[:, None] * H + k[None, :]
    w_p = w + tl.minimum(n, E - 1)[None, :] * H + k[:, None]
    m_ok = (m < T)[:, None]
    n_ok = (n < E)[None, :]
    first = tl.program_id(2)
    to = out + (first * T + m).to(tl.int64)[:, None] * E + n[None, :]
    if EARLY:
        o = first * segment
        k_ok = (k < segment) & (o + k < H)
        b = tl.load(w_p + o, mask=k_ok[:, None], other=0.0)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        a = tl.load(x_p + o, mask=k_ok[None, :], other=0.0)
        if INTERPRET:
            total = tl.dot(f32(a), f32(b))
        else:
            total = tl.dot(a, b)
    else:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        total = tl.zeros((BM, BN), tl.float32)
        for s in range(first, SPLITS if LOOP else first + 1):
            acc = tl.zeros((BM, BN), tl.float32)
            for o in range(s * segment, tl.minimum((s + 1) * segment, H), BK):
                if FULL:
                    a = tl.load(x_p + o)
                    b = tl.load(w_p + o)
                else:
                    a = tl.load(x_p + o, mask=(o + k < H)[None, :], other=0.0)
                    b = tl.load(w_p + o, mask=(o + k < H)[:, None], other=0.0)
                if INTERPRET:
                    acc = tl.dot(f32(a), f32(b), acc)
                else:
                    acc = tl.dot(a, b, acc)
            total = acc if SPLITS == 1 else total + acc
    tl.store(to, total, mask=m_ok & n_ok)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["is_image"])
def _router_select(
    logits, bias, bias_vl, is_image, ids, weights, T, E, scale,
    SPLITS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Top K of a row: largest choice first, ties to the lower id; written in ascending order of ids. Grid (T,)."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    ok = e < E
    text = tl.load(bias + e, mask=ok, other=0.0)  # weights: no kernel writes them
    vision = tl.load(bias_vl + e, mask=ok, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    image = tl.load(is_image + t) != 0
    x = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(SPLITS):
        x += tl.load(logits + (s * T + t) * E + e, mask=ok, other=0.0)
    # softplus; log1p(p) = log(1 + p) p / ((1 + p) - 1), exact where 1 + p rounds
    p = tl.exp(tl.minimum(x, 20.0))
    q = 1.0 + p
    soft = tl.where(q == 1.0, p, tl.log(q) * (p / tl.where(q == 1.0, 1.0, q - 1.0)))
    score = tl.sqrt(tl.where(x > 20.0, x, soft))
    extra = tl.where(image, vision, text)
    # integers in the order of the floats: their maximum over a warp is one instruction
    key = (score + extra).to(tl.int32, bitcast=True)
    key = tl.where(ok, key ^ ((key >> 31) & 0x7FFFFFFF), LOWEST)
    place = e * 0  # slot of a picked expert: the picked ones of lower id
    picked = e < 0
    for _ in tl.static_range(K):
        best = tl.min(tl.where(key == tl.max(key), e, BLOCK))
        picked = picked | (e == best)
        place += tl.where(best < e, 1, 0)
        key = tl.where(e == best, LOWEST, key)
    bits = tl.where(picked, score.to(tl.int32, bitcast=True), 0)  # scores are not negative
    total = tl.max(tl.where(place == 0, bits, 0)).to(tl.float32, bitcast=True)
    for i in tl.static_range(1, K):  # slot order
        total += tl.max(tl.where(place == i, bits, 0)).to(tl.float32, bitcast=True)
    tl.store(ids + t * K + place, e, mask=picked)
    tl.store(weights + t * K + place, score / (total + 1e-20) * scale, mask=picked)


def router(
    x: Tensor, weight: Tensor, bias: Tensor, bias_vl: Tensor, is_image: Tensor, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Provider of `router`. Two launches; few rows are split over K to fill the device, many rows over rows."""
    if x.dtype is not torch.bfloat16:  # exact numerics
        return moe.router(x, weight, bias, bias_vl, is_image, k, scale)
    if not x.shape[0]:
        return x.new_empty((0, k), dtype=torch.int32), x.new_empty((0, k), dtype=torch.float32)
    logits = router_logits(x, weight)
    return router_select(logits, bias, bias_vl, is_image, k, scale)


# segments of K, whether a program adds them itself, reads weights early, rows, experts, k of a step, warps, stages
Shape = tuple[int, bool, bool, int, int, int, int, int]


def _shape(t: int, h: int) -> Shape:
    if t <= 16:
        step = triton.next_power_of_2(triton.cdiv(triton.cdiv(h, 128), SPLITS) * 128)
        return (SPLITS, False, True, 16, 32, step, 8, 1)
    if t <= 256:
        return (SPLITS, False, False, 64, 32, 128, 4, 4)
    if t <= 1024:
        return (SPLITS, False, False, 64, 128, 64, 4, 4)
    return (SPLITS, True, False, 64, 128, 64, 8, 4) if INVARIANT else (1, True, False, 128, 128, 64, 8, 4)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [segments or 1, T, E]."""
    (t, h), e = x.shape, weight.shape[0]
    splits, loop, early, bm, bn, bk, warps, stages = _shape(t, h)
    logits = torch.empty((1 if loop else splits, t, e), dtype=torch.float32, device=x.device)
    _router_gemm[(triton.cdiv(t, bm), triton.cdiv(e, bn), 1 if loop else splits)](
        x.contiguous(), weight.contiguous(), logits, t, e, h, splits, loop, early, h % 128 == 0, bm, bn, bk, PDL,
        num_warps=warps, num_stages=stages, **_launch_options(),
    )  # fmt: skip
    return logits


def router_select(
    logits: Tensor, bias: Tensor, bias_vl: Tensor, is_image: Tensor, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    splits, t, e = logits.shape
    ids = torch.empty((t, k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((t, k), dtype=torch.float32, device=logits.device)
    _router_select[(t,)](
        logits, bias, bias_vl, is_image.view(torch.uint8), ids, weights, t, e, scale, splits, k,
        triton.next_power_of_2(e), PDL, num_warps=4, **_launch_options(),
    )  # fmt: skip
    return ids, weights


def _variants() -> list[Variant]:
    both = {90: "griddepcontrol.wait", 100: "griddepcontrol.wait"}
    out = [
        Variant(
            _router_select,
            {"logits": "*fp32", "bias": "*fp32", "bias_vl": "*fp32", "is_image": "*u8", "ids": "*i32",
             "weights": "*fp32", "T": "i32", "E": "i32", "scale": "fp32"},
            {"SPLITS": SPLITS, "K": 6, "BLOCK": 512, "PDL": True},
            both,
            {"num_warps": 4},
        ),
    ]  # fmt: skip
    gemm = {"x": "*bf16", "w": "*bf16", "out": "*fp32", "T": "i32"}
    for rows in (16, 256, 1024, 8192):
        splits, loop, early, bm, bn, bk, warps, stages = _shape(rows, 5120)
        constants = {"SPLITS": splits, "LOOP": loop, "EARLY": early, "BM": bm, "BN": bn, "BK": bk}
        constants |= {"E": 384, "H": 5120, "FULL": True, "PDL": True}
        archs = {90: "wgmma", 100: "tcgen05.mma"} if bm > 16 else {90: "mma.sync", 100: "mma.sync"}
        out.append(Variant(_router_gemm, gemm, constants, archs, {"num_warps": warps, "num_stages": stages}))
    return out


VARIANTS = _variants()
