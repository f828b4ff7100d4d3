"""Compressed entries from a linear's output to their page in one launch: norm, rotation, packing, write.

Belongs here: kernels of the fused writes of ops/cache.py. Does not belong here: the single steps (norm.py, cache.py),
whose bits these have: the same block and warps give the same sum, and what rounds to bf16 there rounds here.
Legend: T rows, D head dim, R rotated pairs, G scale groups of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.ops import records
from deepinfer.ops.triton import cache
from deepinfer.ops.triton.cache import divided, fp4_words
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.norm import PDL, norm_warps, options, rms_norm, rope
from deepinfer.ops.triton.support import bf16, e4m3_code, e4m3_value, e8m0_inverse, f32, fp4_scale, round_bf16


@triton.jit
def _turned(x, cos, sin, row, D: tl.constexpr, R: tl.constexpr):
    """The last 2 R columns of a row rotated, as float32 of the rounded values."""
    even, odd = tl.split(x.reshape(D // 2, 2))
    i = tl.arange(0, D // 2) - (D // 2 - R)
    co = tl.load(cos + row * R + i, mask=i >= 0, other=1.0)
    si = tl.load(sin + row * R + i, mask=i >= 0, other=0.0)
    # not a product with 1 and 0 elsewhere: that would lose the sign of a zero
    a = tl.where(i >= 0, round_bf16(even * co - odd * si), even)
    b = tl.where(i >= 0, round_bf16(even * si + odd * co), odd)
    return tl.join(a, b).reshape(D)


@triton.jit
def _write(
    x, weight, cos, sin, pool, out, table, slots, positions, stride, eps, table_width, ratio, page_size,
    D: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr, LATENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """LATENT: record [codes | scales e4m3 a 16 | pad], and the normed row goes to `out`; else an index key, whose page
    holds all codes, then all scales (E8M0 a 32).
    """
    GROUP: tl.constexpr = 16 if LATENT else 32
    G: tl.constexpr = D // GROUP
    c = tl.arange(0, D)
    g = tl.arange(0, G)
    word = tl.arange(0, GROUP // 8)[None, :]
    w = f32(tl.load(weight + c))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    pos = tl.load(positions + row)
    done = (pos + 1) % ratio == 0
    slot = tl.load(slots + row).to(tl.int64)
    page = tl.load(table + slot * table_width + pos // page_size, mask=done, other=0).to(tl.int64)
    entry = pos % page_size // ratio
    v = f32(tl.load(x + row * stride + c))
    mean = tl.div_rn(tl.sum(v * v), 1.0 * D)
    v = round_bf16(v * tl.rsqrt(mean + eps) * w)
    if LATENT:
        tl.store(out + row * D + c, bf16(v))
    v = _turned(v, cos, sin, row, D, R).reshape(G, GROUP // 8, 8)
    amax = tl.max(tl.max(tl.abs(v), 2), 1)
    if LATENT:
        e = e4m3_code(tl.minimum(tl.maximum(tl.div_rn(tl.maximum(amax, 6.0 * 0.001953125), 6.0), 0.001953125), 448.0))
        q = divided(v, e4m3_value(e)[:, None, None])
        q = tl.minimum(tl.maximum(q, -6.0), 6.0)
        codes = pool + (page * (page_size // ratio) + entry) * SIZE
        scales = codes + D // 2
        for pad in tl.static_range(D // 2 + G, SIZE):
            tl.store(codes + pad, tl.zeros((), tl.uint8), mask=done)
    else:
        e = fp4_scale(tl.maximum(amax, 7.052966104933725e-38)).to(tl.uint8)  # 6 * 2^-126
        q = v * e8m0_inverse(e.to(tl.int32))[:, None, None]
        first = pool + page * (page_size // ratio) * SIZE
        codes = first + entry * (D // 2)
        scales = first + (page_size // ratio) * (D // 2) + entry * G
    words = codes.to(tl.pointer_type(tl.int32))
    tl.store(words + (g * (GROUP // 8))[:, None] + word, fp4_words(q), mask=done & (word >= 0) & (g >= 0)[:, None])
    tl.store(scales + g, e, mask=done & (g >= 0))


def _launch(
    pool: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, table: Tensor, slots: Tensor,
    positions: Tensor, ratio: int, page_size: int, latent: bool,
) -> Tensor:  # fmt: skip
    t, d = x.shape
    size = records.latent_bytes(d) if latent else records.index_bytes(d)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((t, d), dtype=x.dtype, device=x.device) if latent else x
    if t:
        assert pool.is_contiguous() and table.stride(1) == 1
        _write[(t,)](
            x, weight, cos.contiguous(), sin.contiguous(), pool, out, table, slots, positions, x.stride(0), eps,
            table.stride(0), ratio, page_size, D=d, R=cos.shape[1], SIZE=size, LATENT=latent, PDL=PDL,
            num_warps=norm_warps(d), **options(),
        )  # fmt: skip
    return out


def _plain(x: Tensor) -> bool:
    """Whether words of a row and its records can be stored at once: quantised, a head of 2^n >= 64."""
    return x.dtype is torch.bfloat16 and x.shape[1] >= 64 and x.shape[1] & (x.shape[1] - 1) == 0


def kv_global_write(
    pool: Tensor,
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    ratio: int,
    page_size: int,
) -> Tensor:
    where = (page_table, slots, positions, ratio, page_size)
    if _plain(kv):
        return _launch(pool, kv, weight, cos, sin, eps, *where, latent=True)
    out = rms_norm(kv, weight, eps)
    cache.page_write(pool, cache.pack_latent(rope(out, cos, sin, False)), *where)
    return out


def index_key_write(
    pool: Tensor,
    key: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    ratio: int,
    page_size: int,
) -> None:
    where = (page_table, slots, positions, ratio, page_size)
    if _plain(key):
        _launch(pool, key, weight, cos, sin, eps, *where, latent=False)
    else:
        cache.index_page_write(pool, cache.pack_index(rope(rms_norm(key, weight, eps), cos, sin, False)), *where)


# ----------------------------------------------------------------------------------------------------------- compiling

_ANY = {90: "", 100: ""}
_TENSORS = {"x": "*bf16", "weight": "*bf16", "cos": "*fp32", "sin": "*fp32", "pool": "*u8", "out": "*bf16"}
_WHERE = dict.fromkeys(("table", "slots", "positions"), "*i32") | dict.fromkeys(
    ("stride", "table_width", "ratio", "page_size"), "i32"
)


def _variant(d: int, size: int, latent: int) -> Variant:
    constants = {"D": d, "R": 32, "SIZE": size, "LATENT": latent, "PDL": 1}
    signature = {**_TENSORS, **_WHERE, "eps": "fp32"}
    return Variant(_write, signature, constants, _ANY, {"num_warps": 1, "enable_fp_fusion": False})


VARIANTS = [_variant(512, 288, 1), _variant(128, 68, 0)]
