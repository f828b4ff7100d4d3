"""What kernels share: number formats by integer operations, launch helpers.

Belongs here: rounding that has the bits of ops/formats.py on a GPU and in Triton's interpreter. Does not belong here:
kernels.

The interpreter computes bf16 as raw integers and truncates narrowing casts. So kernels load bf16 through `f32`, compute
in float32 and store through `bf16` or the quantisers here; these take the hardware's cast on a GPU, and integer
operations where INTERPRET is set.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
FP8_MAX = tl.constexpr(448.0)
FP4_MAX = tl.constexpr(6.0)


@triton.jit
def f32(x):
    """bf16 (or float32) as loaded -> float32."""
    return x.to(tl.float32)


@triton.jit
def bf16(x):
    """float32 -> bf16, to nearest even."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def round_bf16(x):
    """float32 -> the nearest bf16 value as float32."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_ceil(x):
    """E8M0 code (int32) of the smallest power of two >= x; x positive and normal."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)


@triton.jit
def e8m0_value(code):
    """2^(code - 127), code int32 (0 is 2^-127)."""
    return tl.where(code == 0, 1 << 22, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(x):
    """float32 within +-448 -> e4m3fn bits as uint8, to nearest even."""
    if INTERPRET:
        a = tl.abs(x)
        bits = a.to(tl.int32, bitcast=True)
        # normal: keep 3 mantissa bits; below 2^-6 the code is the value in units of 2^-9
        kept = bits + 0x7FFFF + ((bits >> 20) & 1)
        normal = (kept >> 20) - (120 << 3)
        unit = a * 512.0
        low = tl.floor(unit)
        rest = unit - low
        low_int = low.to(tl.int32)
        up = (rest > 0.5) | ((rest == 0.5) & ((low_int & 1) == 1))
        code = tl.where(a < 0.015625, low_int + tl.where(up, 1, 0), normal)
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        return (code | sign).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_value(code):
    """e4m3fn bits (uint8) -> float32 (no NaN)."""
    c = code.to(tl.int32)
    exponent = (c >> 3) & 15
    mantissa = (c & 7).to(tl.float32)
    normal = (((exponent + 120) << 23) | ((c & 7) << 20)).to(tl.float32, bitcast=True)
    a = tl.where(exponent == 0, mantissa * 0.001953125, normal)
    return tl.where((c & 0x80) != 0, -a, a)


@triton.jit
def e2m1_code(x):
    """float32 -> nearest-even e2m1 code 0..15 (int32), saturating at +-6."""
    a = tl.abs(x)
    code = tl.where(a > 0.25, 1, 0) + tl.where(a >= 0.75, 1, 0) + tl.where(a > 1.25, 1, 0)
    code += tl.where(a >= 1.75, 1, 0) + tl.where(a > 2.5, 1, 0) + tl.where(a >= 3.5, 1, 0) + tl.where(a > 5.0, 1, 0)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_value(code):
    """e2m1 code 0..15 (int32) -> float32."""
    exponent = (code >> 1) & 3
    normal = (((exponent + 126) << 23) | ((code & 1) << 22)).to(tl.float32, bitcast=True)
    a = tl.where(exponent == 0, (code & 1).to(tl.float32) * 0.5, normal)
    return tl.where((code & 8) != 0, -a, a)


@triton.jit
def fp8_scale(amax):
    """E8M0 code (int32) of the smallest power of two >= amax / 448, without the division: 448 is 1.75 * 2^8."""
    return ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8


@triton.jit
def fp4_scale(amax):
    """E8M0 code (int32) of the smallest power of two >= amax / 6 = amax / (1.5 * 2^2)."""
    return ((amax.to(tl.int32, bitcast=True) + 0x3FFFFF) >> 23) - 2


@triton.jit
def e8m0_inverse(code):
    """2^(127 - code): a product with it has the bits of a division by the scale."""
    return e8m0_value(254 - code)
