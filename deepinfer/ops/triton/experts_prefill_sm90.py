"""FP4 grouped GEMM for Hopper (Gluon), many rows: weights and activations as f16, no promotion.

Belongs here: the kernel of prefill and the expansion of its activations. Does not belong here: the weight layout
(experts_sm90.py), routing, the choice of a kernel (experts.py).

With e4m3 operands a sum is promoted every 32 k: 64 FMAs of 186 issue slots a warp and step at 64 tokens, and the tensor
cores idle. f16 needs none. Both operands are exact in it: a weight is e2m1 x 2^(1..12) (its row's base is a factor of
the result), an activation e4m3 x 2^d, d relative to its row's largest scale (exact down to d = -22, where the value is
2^-40 of the row's largest; less is rounded to that grid). The high byte of f16 is e5m2, so PRMT looks up four weights
at once, scale included, as in experts_sm90.py; two more PRMT make f16 pairs of them.

Activations are expanded once, k permuted within 16 so that a lane's 4 bytes of a code word are the 4 k of its fragment:
place 8 h + 2 q + j holds k = 4 q + 2 h + j.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.experts_sm90 import _plane, _quantise, _release, _wait, both, outputs


@triton.jit(do_not_specialize_on_alignment=["base"])
def expand(x, x_scale, out, base, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x e4m3 [R, K], E8M0 [R, K/32] -> out f16 [R, K] permuted, base float32 [R]; x = out * base. Grid (R,)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCK // 32)
    ok = g < K // 32
    code = tl.load(x_scale + row * (K // 32) + g, mask=ok, other=0).to(tl.int32)
    top = tl.max(code)
    at = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    v = tl.load(x + row * K + at, mask=ok[:, None], other=0.0).to(tl.float32)
    factor = (tl.maximum(code - top + 134, 0) << 23).to(tl.float32, bitcast=True)  # 448 * 2^7 fits f16
    v = (v * factor[:, None]).to(tl.float16)
    v = tl.reshape(tl.permute(tl.reshape(v, (BLOCK // 16, 4, 2, 2)), (0, 2, 1, 3)), (BLOCK // 32, 32))
    tl.store(out + row * K + at, v, mask=ok[:, None])
    tl.store(base + row, (tl.maximum(top - 7, 1) << 23).to(tl.float32, bitcast=True))


def _decode_asm() -> str:
    """4 code words and the scale word of a lane -> 16 registers of f16 pairs: (group, kh, h, row + 8)."""
    out = ["{ .reg .b32 m, t, r, lo<4>, hi<4>;"]
    for i in range(4):  # byte i of the scale word: (group, r8) = (i / 2, i % 2)
        out.append(f"shr.u32 r, $20, {8 * i}; and.b32 r, r, 15;" if i else "and.b32 r, $20, 15;")
        out.append(f"mad.lo.u32 lo{i}, r, 0x04040400, 0x06040000; mad.lo.u32 hi{i}, r, 0x04040404, 0x0E0C0A08;")
    for i in range(4):  # word i: (kh, r8) = (i / 2, i % 2)
        w, kh, r8 = f"${16 + i}", i // 2, i % 2
        for group in range(2):
            to = 8 * group + 4 * kh + r8
            out.append("shr.u32 m, m, 16;" if group else f"and.b32 m, {w}, 0x77777777;")
            out.append(f"prmt.b32 t, lo{2 * group + r8}, hi{2 * group + r8}, m;")
            out.append(f"shl.b32 r, {w}, 4; and.b32 r, r, 0x80808080;" if group else f"and.b32 r, {w}, 0x80808080;")
            out.append(f"or.b32 t, t, r; prmt.b32 ${to}, t, 0, 0x1404; prmt.b32 ${to + 2}, t, 0, 0x3424;")
    return " ".join(out) + " }"


_ASM = gl.constexpr(_decode_asm())
_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))
_HALVES = gl.constexpr((gl.float16,) * 8)


@gluon.jit
def _fragment(a, b, c, d, NW: gl.constexpr, MMA: gl.constexpr):
    """Tensors (kh, h) of (row, row + 8) x 2 k -> [16 NW, 32] f16 operand, k = 16 kh + 8 h + 2 q + j."""
    r = gl.join(gl.join(a, b), gl.join(c, d)).reshape([NW, 8, 4, 2, 2, 2, 2])  # w g q r8 j h kh
    r = r.permute([0, 3, 1, 6, 5, 2, 4]).reshape([16 * NW, 32])
    return gl.convert_layout(r, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _row_scale(ws_ptr, NW: gl.constexpr, K: gl.constexpr, LS: gl.constexpr, LROW: gl.constexpr):
    """Factor float32 of every row of the block from the base codes in its first scale words."""
    i = gl.arange(0, NW * 8, layout=gl.SliceLayout(1, LS))
    v = gl.load(ws_ptr + (i // 32) * (K // 2) + (i % 32) * 4)
    r0 = ((((v >> 4) & 15) | (((v >> 20) & 15) << 4)) + 14) << 23
    r1 = ((((v >> 12) & 15) | (((v >> 28) & 15) << 4)) + 14) << 23
    r = gl.join(r0, r1).reshape([NW, 8, 2]).permute([0, 2, 1]).reshape([16 * NW]).to(gl.float32, bitcast=True)
    return gl.convert_layout(r, LROW, assert_trivial=True)


@gluon.jit
def _copy(w_s, ws_s, x_s, w_p, w_o, ws_p, x_ptr, x_o, x_ok, step, slot, go):
    async_copy.async_copy_global_to_shared(w_s.index(slot), (w_p + step * 512) + w_o, mask=(w_o >= 0) & go)
    async_copy.async_copy_global_to_shared(ws_s.index(slot), ws_p + ((step >> 2) * 128 + (step & 3)))
    async_copy.async_copy_global_to_shared(x_s.index(slot), (x_ptr + step * 64) + x_o, mask=x_ok & go)
    async_copy.commit_group()


@gluon.jit
def _tile(
    w_ptr, ws_ptr, x_ptr, base_ptr, pairs, weights, out_ptr, out_scale_ptr, limit, e, start, count, tile,
    N: gl.constexpr, K: gl.constexpr, XDIV: gl.constexpr, NT: gl.constexpr, NW: gl.constexpr, ST: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """16 NW rows of weights x NT tokens, in steps of 64 k.

    A step's products are waited for within it: ptxas does not keep the registers of A for products that are in flight
    over a loop's back edge (they were overwritten, and results wrong). Two blocks an SM take turns at the tensor cores
    instead: one decodes while the other multiplies.
    """
    BN: gl.constexpr = 16 * NW
    STEPS: gl.constexpr = K // 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, NT, 16])
    LROW: gl.constexpr = gl.SliceLayout(1, MMA)
    LCOL: gl.constexpr = gl.SliceLayout(0, MMA)
    S1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    XS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    P: gl.constexpr = _plane(NW)
    LW: gl.constexpr = gl.BlockedLayout([4], [32], [NW], [0])
    LSC: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    LX: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [NW, 1], [1, 0])

    block = (e * (N // 64) + tile * (NW // 4)).to(gl.int64)
    wo = gl.arange(0, BN * 8, layout=LW)  # a step of a tile is 512 words
    w_o = gl.max_contiguous(gl.multiple_of((wo >> 9) * (K * 8) + (wo & 511), 4), 4)
    w_p = w_ptr + block * (K * 8)
    ws_block = ws_ptr + block * (K // 2)
    si = gl.arange(0, NW * 8, layout=LSC)
    ws_p = ws_block + (si // 32) * (K // 2) + (si % 32) * 4
    xr = gl.arange(0, 2 * NT, layout=gl.SliceLayout(1, LX))  # group * NT + token
    xk = gl.arange(0, 32, layout=gl.SliceLayout(0, LX))
    x_row = gl.load(pairs + start + (xr & (NT - 1)), mask=(xr & (NT - 1)) < count, other=0) // XDIV
    x_o = (x_row * K + (xr >> (NT.bit_length() - 1)) * 32)[:, None] + xk[None, :]
    x_ok = ((xr & (NT - 1)) < count)[:, None] & (xk[None, :] >= 0)

    w_s = gl.allocate_shared_memory(gl.int32, [ST, BN * 8], S1)
    ws_s = gl.allocate_shared_memory(gl.int32, [ST, NW * 8], S1)
    x_s = gl.allocate_shared_memory(gl.float16, [ST, 2 * NT, 32], XS)
    x_v = x_s._reinterpret(gl.float16, [ST * 2, NT, 32], XS)
    for i in gl.static_range(ST - 1):
        _copy(w_s, ws_s, x_s, w_p, w_o, ws_p, x_ptr, x_o, x_ok, i, i, True)
    acc = gl.zeros([BN, NT], gl.float32, layout=MMA)
    for c in range(0, STEPS):
        async_copy.wait_group(ST - 2)
        gl.thread_barrier()  # frees the slot of the step before
        ahead = c + ST - 1
        last = gl.minimum(ahead, STEPS - 1)
        _copy(w_s, ws_s, x_s, w_p, w_o, ws_p, x_ptr, x_o, x_ok, last, ahead % ST, ahead < STEPS)
        fence_async_shared()
        gl.thread_barrier()
        slot = c % ST
        w = gl.convert_layout(w_s.index(slot).load(LW).reshape([NW * 8, 16]), P, assert_trivial=True)
        s = ws_s.index(slot).load(gl.SliceLayout(1, P))[:, None] + gl.zeros_like(w)
        a0, a1, a2, a3, b0, b1, b2, b3 = gl.inline_asm_elementwise(
            _ASM, _CONSTRAINTS, [w, s], dtype=_HALVES, is_pure=True, pack=4
        )
        fa = _fragment(a0, a1, a2, a3, NW, MMA)
        fb = _fragment(b0, b1, b2, b3, NW, MMA)
        d = warpgroup_mma(fa, x_v.index(slot * 2).permute((1, 0)), acc, use_acc=True, is_async=True)
        d = warpgroup_mma(fb, x_v.index(slot * 2 + 1).permute((1, 0)), d, use_acc=True, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[d])
    async_copy.wait_group(0)
    column = gl.arange(0, NT, layout=LCOL)
    row = gl.load(pairs + start + column, mask=column < count, other=0) // XDIV
    acc = acc * gl.load(base_ptr + row)[None, :]
    LS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], _bases(NW), [], [NW * 8, 4]
    )
    acc = acc * _row_scale(ws_block, NW, K, LS, LROW)[:, None]
    if ACT:
        LO: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, NW], [0, 1])
        G: gl.constexpr = NW // 4
        gate, up = gl.split(acc.to(gl.bfloat16).reshape([NW, 2, 8, NT]).permute([0, 2, 3, 1]))
        gate = gl.convert_layout(gate.reshape([8 * NW, NT]), LO).to(gl.float32)
        up = gl.convert_layout(up.reshape([8 * NW, NT]), LO).to(gl.float32)
        om = gl.arange(0, NT, layout=gl.SliceLayout(0, LO))
        on = gl.arange(0, 8 * NW, layout=gl.SliceLayout(1, LO))
        ok = om < count
        pair = gl.load(pairs + start + om, mask=ok, other=0)
        weight = gl.load(weights + pair)
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        act = gate / (1.0 + gl.exp(-gate)) * up * weight[None, :]
        q, code = _quantise(act.to(gl.bfloat16).to(gl.float32), G, NT)
        q = gl.convert_layout(q, LO).to(gl.uint8, bitcast=True)
        to = out_ptr + pair.to(gl.int64)[None, :] * (N // 2) + (tile * (8 * NW) + on)[:, None]
        gl.store(to, q, mask=ok[None, :] & (on[:, None] >= 0))
        LG: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, NW], [1, 0])
        code = gl.convert_layout(code, LG).to(gl.uint8)
        gm = gl.arange(0, NT, layout=gl.SliceLayout(0, LG))
        gn = gl.arange(0, G, layout=gl.SliceLayout(1, LG))
        pair = gl.convert_layout(pair, gl.SliceLayout(0, LG))
        gl.store(
            out_scale_ptr + (pair * (N // 64))[None, :] + (tile * G + gn)[:, None],
            code,
            mask=(gm < count)[None, :] & (gn[:, None] >= 0),
        )
    else:
        LY: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, NW], [0, 1])
        y = gl.convert_layout(acc.to(gl.bfloat16), LY)
        om = gl.arange(0, NT, layout=gl.SliceLayout(0, LY))
        on = gl.arange(0, BN, layout=gl.SliceLayout(1, LY))
        ok = om < count
        pair = gl.load(pairs + start + om, mask=ok, other=0)
        to = out_ptr + pair.to(gl.int64)[None, :] * N + (tile * BN + on)[:, None]
        gl.store(to, y, mask=ok[None, :] & (on[:, None] >= 0))


@gluon.constexpr_function
def _bases(nw):
    return [[8 << i, 0] for i in range(nw.bit_length() - 1)]


@gluon.jit(do_not_specialize_on_alignment=["items", "pairs", "weights", "base_ptr"])
def prefill(
    w_ptr, ws_ptr, x_ptr, base_ptr, items, pairs, weights, out_ptr, out_scale_ptr, limit,
    N: gl.constexpr, K: gl.constexpr, XDIV: gl.constexpr, NT: gl.constexpr, MIDDLE: gl.constexpr, SMALL: gl.constexpr,
    NW: gl.constexpr, ST: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Grid (N / (16 NW), items): as experts_sm90.grouped on expanded activations.

    An item takes a tile of NT, MIDDLE or SMALL tokens by its count: what is left of an expert costs what it has. The
    width of a tile does not change the bits of a row.
    """
    tile = gl.program_id(0)
    item = gl.program_id(1)
    _wait()
    _release()
    word = gl.load(items + item * 2)
    if word < 0:
        return
    start = gl.load(items + item * 2 + 1)
    e = word & 0xFFFF
    count = word >> 16
    if count > MIDDLE:
        _tile(
            w_ptr, ws_ptr, x_ptr, base_ptr, pairs, weights, out_ptr, out_scale_ptr, limit, e, start, count, tile,
            N, K, XDIV, NT, NW, ST, ACT,
        )  # fmt: skip
    elif count > SMALL:
        _tile(
            w_ptr, ws_ptr, x_ptr, base_ptr, pairs, weights, out_ptr, out_scale_ptr, limit, e, start, count, tile,
            N, K, XDIV, MIDDLE, NW, ST, ACT,
        )  # fmt: skip
    else:
        _tile(
            w_ptr, ws_ptr, x_ptr, base_ptr, pairs, weights, out_ptr, out_scale_ptr, limit, e, start, count, tile,
            N, K, XDIV, SMALL, NW, ST, ACT,
        )  # fmt: skip


WARPS, SLOTS = 8, 4  # 83 KB and 128 registers: two blocks an SM
Widths = tuple[int, int, int]  # tokens of an item, and of the two narrower tiles
WIDE: Widths = (128, 64, 16)
NARROW: Widths = (64, 32, 16)


def widths(pairs: int, experts: int) -> Widths:
    """By the mean number of pairs of an expert."""
    return NARROW if pairs <= 48 * experts else WIDE


def expanded(x: Tensor, x_scale: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [R, K], E8M0 -> f16 [R, K] in the kernel's order of k, float32 [R]: x = f16 * float32."""
    r, k = x.shape
    out = torch.empty((r, k), dtype=torch.float16, device=x.device)
    base = torch.empty((r,), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    expand[(r,)](x, x_scale.view(torch.uint8), out, base, k, block, True, num_warps=block // 1024, launch_pdl=True)
    return out, base


def project(
    x: Tensor,
    base: Tensor,
    lists: tuple[Tensor, Tensor],
    weights: Tensor,
    w: Tensor,
    w_scale: Tensor,
    limit: float,
    *,
    xdiv: int,
    act: bool,
    tiles: Widths,
) -> tuple[Tensor, Tensor]:
    """One projection of many rows, x and base as `expanded` returns them; results as experts_sm90.outputs."""
    (items, pairs), n, k = lists, w.shape[1], 2 * w.shape[2]
    out, out_scale = outputs(weights.numel(), n, act, x.device)
    nt, middle, small = tiles
    prefill[(n // (16 * WARPS), items.shape[0])](
        w.view(torch.int32), w_scale.view(torch.int32), x, base, items, pairs, weights,
        out.view(torch.uint8) if act else out, out_scale if act else items, limit, N=n, K=k, XDIV=xdiv, NT=nt,
        MIDDLE=middle, SMALL=small, NW=WARPS, ST=SLOTS, ACT=act, num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    return out, out_scale


def fits(n: int) -> bool:
    """Whether weights of n rows divide into the kernel's tiles."""
    return n % (16 * WARPS) == 0


def variants() -> list[Variant]:
    out = []
    for nt, middle, small in (WIDE, NARROW):
        constants = {"NT": nt, "MIDDLE": middle, "SMALL": small, "NW": WARPS, "ST": SLOTS}
        out += both(prefill, {"x_ptr": "*fp16"}, constants, num_warps=WARPS)
    types = {"x": "*fp8e4nv", "x_scale": "*u8", "out": "*fp16", "base": "*fp32", "K": "i32"}
    wait = {90: "griddepcontrol.wait"}
    return [*out, Variant(expand, types, {"BLOCK": 8192, "PDL": True}, wait, {"num_warps": 8})]
