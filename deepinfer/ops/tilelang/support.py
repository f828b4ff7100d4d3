"""What TileLang programs share: type names, bf16 pairs, the MXFP8 scale of a group.

Belongs here: expressions that several families use. Does not belong here: programs.

nvcc takes two instructions to make a float32 of the upper bf16 of a register, and converts float32 to bf16 one by one
in the slow unit unless two are converted together. So programs view bf16 chunks as 32-bit pairs when they read them,
and write them in a vectorized loop that does nothing else.
The code generator names the operand of `T.reinterpret` after its expression and keeps the name as long as its C scope:
a second reinterpret of the same expression there takes the first one's value, even if a buffer has changed since.
"""

from typing import Any

import tilelang.language as T

BF16, F32, I32, U32, U8, FP8 = ("bfloat16", "float32", "int32", "uint32", "uint8", "float8_e4m3fn")


def low_half(pair: Any) -> Any:
    """First of two bf16 (uint32) as float32."""
    return T.reinterpret(pair << T.uint32(16), F32)


def high_half(pair: Any) -> Any:
    """Second of two bf16 (uint32) as float32."""
    return T.reinterpret(pair & T.uint32(0xFFFF0000), F32)


def scale_code(bits: Any) -> Any:
    """E8M0 code of the smallest power of two >= x / 448 from the bits (int32) of x; 448 = 1.75 * 2^8."""
    return (bits >> 23) - 8 + T.if_then_else((bits & 0x7FFFFF) > 0x600000, 1, 0)


def inverse_scale(code: Any) -> Any:
    """1 / 2^(code - 127)."""
    return T.reinterpret((254 - code) << 23, F32)
