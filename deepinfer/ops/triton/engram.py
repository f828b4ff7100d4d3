"""Engram on CUDA: look-back, hashing, table rows, gated injection.

Belongs here: kernels of ops/engram.py. Does not belong here: where the table lives (`visible` says what can be read).

The table may be a pinned CPU tensor: with unified virtual addressing (Linux x86-64 and arm64, every GPU of these
kernels) pinned memory that torch or cudaHostRegister made is mapped, and its host address is its device address. Reads
go over PCIe: random rows of 256 B reach 13 to 33 GB/s.
Legend: T rows, cols hashed columns of a row, d row width, H hidden, C streams.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.support import INTERPRET, bf16, e4m3_value, e8m0_value, f32

INTERPRETED = bool(INTERPRET.value)
PDL = not INTERPRETED
GATHER = 8  # table rows of a program of two warps: 3.4 us at T = 512, where 4 warps take 3.7 and 4 rows 4.8


def _options() -> dict[str, Any]:
    return {} if INTERPRETED else {"enable_fp_fusion": False, "launch_pdl": PDL}


# ------------------------------------------------------------------------------------------------------------- hashing


@triton.jit
def _lookback(
    ids, positions, slots, run_start, is_image, token_map, history, out, T, R, pad_id,
    N: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    live = row < T
    pos = tl.load(positions + row, mask=live, other=0)
    slot = tl.load(slots + row, mask=live, other=0).to(tl.int64)
    start = tl.load(run_start + row, mask=live, other=0)
    broken = row < 0
    for s in tl.static_range(N):
        here = row - s >= start
        image = tl.load(is_image + row - s, mask=live & here, other=0) != 0
        own = tl.load(ids + row - s, mask=live & here, other=0)
        old = tl.load(history + slot * R + (pos + R * N - s) % R, mask=live & (here == 0), other=0)
        token = tl.where(here, tl.where(image, -1, own), old)
        broken = broken | (pos < s) | (token < 0)
        token = tl.where(broken, pad_id, token)
        tl.store(out + row.to(tl.int64) * N + s, tl.load(token_map + token, mask=live, other=0), mask=live)


def engram_lookback(
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    run_start: Tensor,
    is_image: Tensor,
    token_map: Tensor,
    history: Tensor,
    pad_id: int,
    n: int,
) -> Tensor:
    t = ids.shape[0]
    out = torch.empty((t, n), dtype=torch.int32, device=ids.device)
    if out.numel():
        _lookback[(triton.cdiv(t, 128),)](
            ids, positions, slots, run_start, is_image.view(torch.uint8), token_map, history, out, t,
            history.shape[1], pad_id, N=n, BT=128, PDL=PDL, num_warps=4, **_options(),
        )  # fmt: skip
    return out


@triton.jit
def _rows(
    tokens, multipliers, primes, offsets, out, T, COLS, HEADS,
    N: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.arange(0, BC)
    order = c // HEADS
    live = row < T
    running = tl.load(tokens + row * N, mask=live, other=0).to(tl.int64) * tl.load(multipliers)
    mine = tl.zeros((BT, BC), tl.int64)
    for s in tl.static_range(1, N):
        running = running ^ (tl.load(tokens + row * N + s, mask=live, other=0).to(tl.int64) * tl.load(multipliers + s))
        mine = tl.where((order == s - 1)[None, :], running[:, None], mine)
    prime = tl.load(primes + c, mask=c < COLS, other=1)
    offset = tl.load(offsets + c, mask=c < COLS, other=0)
    at = out + row.to(tl.int64)[:, None] * COLS + c[None, :]
    tl.store(at, mine % prime[None, :] + offset[None, :], mask=live[:, None] & (c < COLS)[None, :])


def engram_rows(tokens: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    t, n = tokens.shape
    cols = primes.shape[0]
    out = torch.empty((t, cols), dtype=torch.int64, device=tokens.device)
    if out.numel():
        bc = triton.next_power_of_2(cols)
        bt = max(1, 256 // bc)
        _rows[(triton.cdiv(t, bt),)](
            tokens.contiguous(), multipliers, primes, offsets, out, t, cols, cols // (n - 1),
            N=n, BT=bt, BC=bc, PDL=PDL, num_warps=4, **_options(),
        )  # fmt: skip
    return out


# -------------------------------------------------------------------------------------------------------------- gather


@triton.jit
def _value(code):
    """e4m3 bits (uint8) -> float32."""
    if INTERPRET:  # the sign by bits: a negated zero would be +0
        bits = e4m3_value(code & 127).to(tl.int32, bitcast=True) | ((code & 128).to(tl.int32) << 24)
        return bits.to(tl.float32, bitcast=True)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["total"])
def _gather(rows, table, scale, out, total, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.arange(0, BD)
    g = tl.arange(0, BD // 32)
    live = i < total
    line = tl.load(rows + i, mask=live, other=0)
    code = tl.load(table + line[:, None] * D + c[None, :], mask=live[:, None] & (c < D)[None, :], other=0)
    e = tl.load(scale + line[:, None] * (D // 32) + g[None, :], mask=live[:, None] & (g < D // 32)[None, :], other=0)
    value = _value(code).reshape(BR, BD // 32, 32) * e8m0_value(e.to(tl.int32))[:, :, None]
    value = value.reshape(BR, BD)
    at = out + i.to(tl.int64)[:, None] * D + c[None, :]
    ok = live[:, None] & (c < D)[None, :]
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(at, bf16(value), mask=ok)
    else:
        tl.store(at, value, mask=ok)


def visible(table: Tensor, device: torch.device) -> Tensor:
    """`table` if a kernel on `device` can read it in place: device memory, or pinned host memory (see above)."""
    if table.device == device or (table.device.type == "cpu" and device.type == "cuda" and table.is_pinned()):
        return table
    raise ValueError(
        f"engram_gather: {device} cannot read a table on {table.device}; pin it (tensor.pin_memory()) or move it"
    )


def engram_gather(rows: Tensor, table: Tensor, scale: Tensor, out_f32: bool) -> Tensor:
    t, cols = rows.shape
    d = table.shape[1]
    out = torch.empty((t, cols * d), dtype=torch.float32 if out_f32 else torch.bfloat16, device=rows.device)
    if out.numel():
        codes = visible(table, rows.device).view(torch.uint8)
        _gather[(triton.cdiv(t * cols, GATHER),)](
            rows.contiguous(), codes, visible(scale, rows.device), out, t * cols,
            D=d, BD=triton.next_power_of_2(d), BR=GATHER, PDL=PDL, num_warps=2, **_options(),
        )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------------------- gate


@triton.jit
def _gate(
    streams, kv, q_weight, k_weight, is_image, out, eps, root, H: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr
):
    """One stream of a row, in pieces of 1024 columns that stay in registers. (More rows a program share the weights and
    were slower, 291 instead of 264 us at T = 8192: three sums a row wait for each other.)
    """
    s = tl.program_id(0) % C
    row = (tl.program_id(0) // C).to(tl.int64)
    col = tl.arange(0, 1024)
    w = ()
    for c in tl.static_range(0, H, 1024):
        at = s * H + c + col
        q = f32(tl.load(q_weight + at, mask=c + col < H, other=0.0))
        w += (q * f32(tl.load(k_weight + at, mask=c + col < H, other=0.0)),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    r = ()
    value = ()
    rr = tl.zeros((1024,), tl.float32)
    kk = tl.zeros((1024,), tl.float32)
    rk = tl.zeros((1024,), tl.float32)
    for c in tl.static_range(0, H, 1024):
        ok = c + col < H
        a = tl.load(streams + (row * C + s) * H + c + col, mask=ok, other=0.0)
        b = f32(tl.load(kv + (row * (C + 1) + s) * H + c + col, mask=ok, other=0.0))
        r += (a,)  # type: ignore[assignment]
        value += (tl.load(kv + (row * (C + 1) + C) * H + c + col, mask=ok, other=0.0),)  # type: ignore[assignment]
        rr = tl.fma(f32(a), f32(a), rr)
        kk = tl.fma(b, b, kk)
        rk = tl.fma(f32(a) * w[c // 1024], b, rk)
    norm = tl.rsqrt(tl.div_rn(tl.sum(rr), 1.0 * H) + eps) * tl.rsqrt(tl.div_rn(tl.sum(kk), 1.0 * H) + eps)
    dot = tl.sum(rk) * norm * root
    size = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    gate = 1.0 / (1.0 + tl.exp(tl.where(dot.to(tl.int32, bitcast=True) < 0, size, -size)))
    gate = tl.where(tl.load(is_image + row) != 0, 0.0, gate)
    for c in tl.static_range(0, H, 1024):
        new = tl.fma(gate, f32(value[c // 1024]), f32(r[c // 1024]))
        to = out + (row * C + s) * H + c + col
        if out.dtype.element_ty == tl.bfloat16:
            tl.store(to, bf16(new), mask=c + col < H)
        else:
            tl.store(to, new, mask=c + col < H)


def engram_gate(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, is_image: Tensor, eps: float
) -> Tensor:
    t, c, h = streams.shape
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if out.numel():
        _gate[(t * c,)](
            streams.contiguous(), kv.contiguous(), q_weight, k_weight, is_image.view(torch.uint8), out, eps, h**-0.5,
            H=h, C=c, PDL=PDL, num_warps=4, **_options(),
        )  # fmt: skip
    return out


# ----------------------------------------------------------------------------------------------------------- compiling

_ANY = {90: "", 100: ""}
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_INT = "*i32"


VARIANTS = [
    Variant(
        _lookback,
        {
            **dict.fromkeys(("ids", "positions", "slots", "run_start", "token_map", "history", "out"), _INT),
            "is_image": "*u8",
            **dict.fromkeys(("T", "R", "pad_id"), "i32"),
        },
        {"N": 4, "BT": 128, "PDL": 1},
        _ANY,
        _OPTIONS,
    ),
    Variant(
        _rows,
        {
            "tokens": _INT,
            **dict.fromkeys(("multipliers", "primes", "offsets", "out"), "*i64"),
            **dict.fromkeys(("T", "COLS", "HEADS"), "i32"),
        },
        {"N": 4, "BT": 8, "BC": 32, "PDL": 1},
        _ANY,
        _OPTIONS,
    ),
    Variant(
        _gather,
        {"rows": "*i64", "table": "*u8", "scale": "*u8", "out": "*bf16", "total": "i32"},
        {"D": 256, "BD": 256, "BR": GATHER, "PDL": 1},
        _ANY,
        {**_OPTIONS, "num_warps": 2},
    ),
    Variant(
        _gate,
        {
            **dict.fromkeys(("streams", "kv", "q_weight", "k_weight", "out"), "*bf16"),
            **{"is_image": "*u8", "eps": "fp32", "root": "fp32"},
        },
        {"H": 5120, "C": 4, "PDL": 1},
        _ANY,
        _OPTIONS,
    ),
]
