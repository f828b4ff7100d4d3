"""Number formats of the checkpoint and the caches: E8M0, E4M3, E2M1 and their quantisers, in plain torch.

Belongs here: bit-exact conversions (spec/model.md section 4), usable on any device and while writing checkpoints.
Does not belong here: byte layouts of records (records.py), registered ops (quant.py), kernels.

Every scale but the 16-wide one of the compressed KV is a power of two stored as an E8M0 code: code c means 2^(c-127).
E8M0 codes are always uint8 tensors: a numeric cast of torch.float8_e8m0fnu would destroy them.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0  # largest finite e4m3fn
FP4_MAX = 6.0  # largest e2m1
BLOCK = 32  # elements that share one E8M0 scale, along K (and along N for dense weights)
LATENT_BLOCK = 16  # elements of compressed KV that share one E4M3 scale
AMAX_FLOOR = 1e-4  # activations and window KV
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_E2M1_TABLES: dict[torch.device, Tensor] = {}


def e8m0_ceil(x: Tensor) -> Tensor:
    """E8M0 code of the smallest power of two >= x, read from the IEEE bits (exact at powers of two).

    x: float32, positive and normal. Returns uint8 of the same shape.
    """
    bits = x.contiguous().view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8)


def e8m0_value(code: Tensor) -> Tensor:
    """2^(code-127) as float32 (code 0 is the subnormal 2^-127, not zero). code: uint8."""
    c = code.to(torch.int32)
    return torch.where(c == 0, 1 << 22, c << 23).view(torch.float32)


def e2m1_code(x: Tensor) -> Tensor:
    """Nearest-even e2m1 code (0..15, sign in bit 3) of float32 x, saturating at +-6. Returns uint8."""
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for bound, closed in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= bound) if closed else (a > bound)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def pack_fp4(code: Tensor) -> Tensor:
    """Two e2m1 codes a byte, even column in the low nibble. uint8 [..., K] -> uint8 [..., K/2]."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Values of packed e2m1 codes. uint8 [..., K/2] -> float32 [..., K]."""
    table = _E2M1_TABLES.get(packed.device)
    if table is None:
        table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
        if type(table) is Tensor:  # a fake tensor of a trace must not outlive it
            _E2M1_TABLES[packed.device] = table
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[codes.to(torch.int64)]


def quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8 along the last axis: x [..., K] -> (e4m3 [..., K], E8M0 uint8 [..., K/32]); amax floor 1e-4."""
    g = x.float().unflatten(-1, (-1, BLOCK))
    scale = e8m0_ceil(g.abs().amax(-1).clamp_min(AMAX_FLOOR) / FP8_MAX)
    q = (g / e8m0_value(scale).unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return q.flatten(-2).to(torch.float8_e4m3fn), scale


def dequant_fp8(q: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quant_fp8`, float32 [..., K] (exact)."""
    return (q.float().unflatten(-1, (-1, BLOCK)) * e8m0_value(scale).unsqueeze(-1)).flatten(-2)


def quant_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 along the last axis, for index rows and expert weights.

    x [..., K] -> (packed uint8 [..., K/2], E8M0 uint8 [..., K/32]).
    """
    g = x.float().unflatten(-1, (-1, BLOCK))
    scale = e8m0_ceil(g.abs().amax(-1).clamp_min(FP4_MAX * 2.0**-126) / FP4_MAX)
    code = e2m1_code(g / e8m0_value(scale).unsqueeze(-1))
    return pack_fp4(code.flatten(-2)), scale


def dequant_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quant_fp4`, float32 [..., K] (exact)."""
    return (unpack_fp4(packed).unflatten(-1, (-1, BLOCK)) * e8m0_value(scale).unsqueeze(-1)).flatten(-2)


def quant_latent(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compressed KV: e2m1 with one E4M3 scale per 16. x [..., K] -> (packed uint8 [..., K/2], e4m3 [..., K/16])."""
    g = x.float().unflatten(-1, (-1, LATENT_BLOCK))
    amax = g.abs().amax(-1).clamp_min(FP4_MAX * 2.0**-9)
    scale = (amax / FP4_MAX).clamp(2.0**-9, FP8_MAX).to(torch.float8_e4m3fn)
    return pack_fp4(e2m1_code(g / scale.float().unsqueeze(-1)).flatten(-2)), scale


def dequant_latent(packed: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quant_latent`, float32 [..., K] (products are exact in bf16)."""
    return (unpack_fp4(packed).unflatten(-1, (-1, LATENT_BLOCK)) * scale.float().unsqueeze(-1)).flatten(-2)


def quant_fp8_block(w: Tensor) -> tuple[Tensor, Tensor]:
    """Dense weights: one E8M0 scale per 32x32 block. w [N, K] -> (e4m3 [N, K], uint8 [N/32, K/32])."""
    g = w.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [N/32, 32, K/32, 32]
    scale = e8m0_ceil(g.abs().amax((1, 3)).clamp_min(AMAX_FLOOR) / FP8_MAX)
    q = (g / e8m0_value(scale)[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return q.reshape(w.shape).to(torch.float8_e4m3fn), scale


def dequant_fp8_block(q: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quant_fp8_block`, float32 [N, K] (exact)."""
    g = q.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return (g * e8m0_value(scale)[:, None, :, None]).reshape(q.shape)
