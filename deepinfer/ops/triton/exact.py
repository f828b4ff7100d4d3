"""Arithmetic that sampling kernels share: numbers with the reference's bits, random bits, launch options.

Belongs here: what several of filters.py, sampling.py, penalties.py and acceptance.py need. Does not belong here:
kernels. The `fixed` functions are ops/sampling.py's, in IEEE additions, products and divisions without fused
multiply-add (`options` says so to the compiler); the `near` functions only preselect.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.ops.sampling import ATANH, EXP
from deepinfer.ops.triton.support import INTERPRET

INTERPRETED = bool(INTERPRET.value)
REACH = tl.constexpr(-26.1)
MASS = tl.constexpr(2.0**36)
SCALE32 = tl.constexpr(2.0**-32)
E0, E1, E2, E3, E4, E5 = (tl.constexpr(c) for c in EXP)
A0, A1, A2, A3, A4, A5, A6, A7, A8, A9, A10, A11 = (tl.constexpr(c) for c in ATANH)
ANY = {90: "", 100: ""}


def options(warps: int = 8) -> dict[str, Any]:
    out: dict[str, Any] = {"num_warps": warps}
    return out if INTERPRETED else {**out, "enable_fp_fusion": False, "launch_pdl": True}


def fixed(warps: int = 8) -> dict[str, Any]:
    """Options of a variant: no fused multiply-add anywhere."""
    return {"num_warps": warps, "enable_fp_fusion": False}


@triton.jit
def begin():
    """Programmatic dependent launch: the next kernel may start, and waits here for this one's results."""
    if not INTERPRET:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def exp_fixed(x):
    """ops/sampling.exp_fixed: float32 in [REACH, 0]."""
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    y = ((((r * E0 + E1) * r + E2) * r + E3) * r + E4) * r + E5
    y = y * (r * r)
    y = (y + r) + 1.0
    return y * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def log_fixed(x):
    """ops/sampling.log_fixed: positive float64."""
    bits = x.to(tl.int64, bitcast=True)
    e = (bits >> 52) - 1023
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    big = m > 1.4142135623730951
    m = tl.where(big, m * 0.5, m)
    e = e + tl.where(big, 1, 0)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    y = z * A0 + A1
    y = (((((y * z + A2) * z + A3) * z + A4) * z + A5) * z + A6) * z + A7
    y = (((y * z + A8) * z + A9) * z + A10) * z + A11
    return s * y + e.to(tl.float64) * 0.6931471805599453


@triton.jit
def gumbel_fixed(word):
    u = (word.to(tl.float64) + 0.5) * SCALE32
    return -log_fixed(-log_fixed(1.0 - u))


@triton.jit
def log2_near(x):
    """The hardware's logarithm (tl.log2 is 40 instructions): absolute error 2^-22 near 1, relative elsewhere."""
    if INTERPRET:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def gumbel_near(word):
    """Gumbel noise in float32 within 2e-5: the hardware's log2, and a series where 1 - u would lose digits."""
    half = 0.5 * SCALE32
    u = tl.fma(word.to(tl.float32), SCALE32, half)
    v = tl.fma((word ^ 0xFFFFFFFF).to(tl.float32), SCALE32, half)
    series = tl.fma(u, tl.fma(u, tl.fma(u, tl.fma(u, 0.2, 0.25), 0.33333334), 0.5), 1.0) * u
    e = tl.where(u < 0.0625, series, log2_near(v) * -0.6931472)
    return log2_near(e) * -0.6931472


@triton.jit
def philox(c0, c1, c2, c3, seed):
    """Philox4x32-10 of counters c1 (uint32 tensor) with scalars c0, c2, c3 (int32), seed int64."""
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0 = tl.zeros_like(c1) + c0.to(tl.uint32)
    w1 = c1
    w2 = tl.zeros_like(c1) + c2
    w3 = tl.zeros_like(c1) + c3.to(tl.uint32)
    for _ in tl.static_range(10):
        x0 = tl.umulhi(w2, 0xCD9E8D57) ^ w1 ^ k0
        x2 = tl.umulhi(w0, 0xD2511F53) ^ w3 ^ k1
        w1 = w2 * 0xCD9E8D57
        w3 = w0 * 0xD2511F53
        w0 = x0
        w2 = x2
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return w0, w1, w2, w3


@triton.jit
def words(seeds, positions, index, row, groups, STREAM: tl.constexpr):
    """uint32 [G, 4]: the random bits of ids 4 g + lane."""
    seed = tl.load(seeds + row)
    w0, w1, w2, w3 = philox(
        tl.load(positions + row), groups.to(tl.uint32), tl.full((), STREAM, tl.uint32), tl.load(index + row), seed
    )
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (groups.shape[0], 4))


@triton.jit
def order_key(z):
    """int32 in the order of the floats; -0 ties with 0."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def key_value(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def finite_or_inf(z):
    """NaN -> infinity: one mark for a row that is not finite."""
    return tl.where(z == z, z, float("inf"))


@triton.jit
def divide(x, t):
    return tl.div_rn(x, tl.zeros_like(x) + t)
