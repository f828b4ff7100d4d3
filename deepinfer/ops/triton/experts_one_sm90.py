"""FP4 grouped GEMM for Hopper (Gluon), one row: the weights of its experts, streamed.

Belongs here: the kernel of one row. Does not belong here: the weight layout (experts_sm90.py), the choice of a kernel
(experts.py).

wgmma has at least 8 columns and one row fills one. Here column j holds group j of a chunk of 256 k, zeros elsewhere:
eight products later a column has its group's sum, so scales of weights and of x are applied once a chunk, four FMAs a
lane, instead of in the decoder and every 32 k. A lane of the accumulator has rows g, g + 8 and groups 2 q, 2 q + 1: the
four scales of one scale word. About half the issue slots of experts_sm90.grouped, which one row leaves bound by them
(94 slots a warp and step; 3 or 4 blocks an SM).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.experts_sm90 import (
    _fragment,
    _plane,
    _quantise,
    _release,
    _row_scale,
    _wait,
    _warps,
    both,
    outputs,
)


def _decode_asm() -> str:
    """4 code words of a lane -> 4 registers of e4m3 (value * 2^-6) for group 0 ($0..3), 4 for group 1 ($4..7).

    The low half of the table comes in $12 as a value that ptxas cannot know: a constant costs a move at every PRMT.
    """
    out = ["{ .reg .b32 m, t, r;"]
    for i in range(4):
        w = f"${8 + i}"
        out.append(f"and.b32 m, {w}, 0x77777777; prmt.b32 t, $12, 0x1C181410, m;")
        out.append(f"and.b32 r, {w}, 0x80808080; or.b32 ${i}, t, r;")
        out.append("shr.u32 m, m, 16; prmt.b32 t, $12, 0x1C181410, m;")
        out.append(f"shl.b32 r, {w}, 4; and.b32 r, r, 0x80808080; or.b32 ${4 + i}, t, r;")
    return " ".join(out) + " }"


_ASM = gl.constexpr(_decode_asm())
_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))
_BYTES = gl.constexpr((gl.uint8,) * 8)


@gluon.jit
def _groups(w, low, NW: gl.constexpr, MMA: gl.constexpr):
    """Code words of a step -> its two fragments [16 NW, 32]."""
    w = gl.convert_layout(w.reshape([NW * 8, 16]), _plane(NW), assert_trivial=True)
    a0, a1, a2, a3, b0, b1, b2, b3 = gl.inline_asm_elementwise(
        _ASM, _CONSTRAINTS, [w, low + gl.zeros_like(w)], dtype=_BYTES, is_pure=True, pack=4
    )
    return _fragment(a0, a1, a2, a3, NW, MMA), _fragment(b0, b1, b2, b3, NW, MMA)


@gluon.jit
def _half(d, w0, w1, low, x_s, first: gl.constexpr, NW: gl.constexpr, MMA: gl.constexpr):
    """d += 128 k (two steps), in flight; x_s [8, 128]."""
    a, b = _groups(w0, low, NW, MMA)
    c, e = _groups(w1, low, NW, MMA)
    f = gl.join(gl.join(a, c), gl.join(b, e)).reshape([16 * NW, 32, 4]).permute([0, 2, 1]).reshape([16 * NW, 128])
    f = gl.convert_layout(f, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)
    return warpgroup_mma(f, x_s.permute((1, 0)), d, use_acc=not first, is_async=True)


@gluon.jit
def _scales(s, xs, NW: gl.constexpr, MMA: gl.constexpr):
    """Scale words int32 [8 NW, 4] (a step each), codes of x int32 [8] -> product of both scales [16 NW, 8]."""
    e0 = gl.join(s & 15, (s >> 16) & 15)
    e1 = gl.join((s >> 8) & 15, (s >> 24) & 15)
    e = gl.join(e0, e1).reshape([NW, 8, 4, 2, 2]).permute([0, 4, 1, 2, 3]).reshape([16 * NW, 8])  # w g q group r8
    e = gl.convert_layout(e, MMA, assert_trivial=True) + xs[None, :]
    return (e << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _copy(w_s, ws_s, w_p, ws_p, chunk, slot):
    async_copy.async_copy_global_to_shared(w_s.index(slot), w_p + chunk * 2048)
    async_copy.async_copy_global_to_shared(ws_s.index(slot), ws_p + chunk * 128)


@gluon.jit(do_not_specialize_on_alignment=["ids", "weights"])
def single(
    w_ptr, ws_ptr, x_ptr, xs_ptr, ids, weights, out_ptr, out_scale_ptr, limit, E,
    N: gl.constexpr, K: gl.constexpr, XDIV: gl.constexpr, ST: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Grid (N / 64, pairs of the row): as experts_sm90.grouped, pair p is expert ids[p] on row p / XDIV of x."""
    NW: gl.constexpr = 4
    CH: gl.constexpr = K // 256
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, 8, 32])
    LROW: gl.constexpr = gl.SliceLayout(1, MMA)
    LCOL: gl.constexpr = gl.SliceLayout(0, MMA)
    S1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    S2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    XS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    LW: gl.constexpr = gl.BlockedLayout([4], [32], [NW], [0])
    LQ: gl.constexpr = gl.DistributedLinearLayout(
        [], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], _warps(NW, 8), [], [NW * 8, 4]
    )
    LS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], _warps(NW, 8), [], [NW * 8, 4]
    )
    LX: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [NW, 1], [1, 0])

    tile = gl.program_id(0)
    pair = gl.program_id(1)
    if ACT:
        _wait()
    _release()
    e = gl.load(ids + pair)
    if (e < 0) | (e >= E):
        return
    low = gl.inline_asm_elementwise(
        "shr.u32 $0, $1, 31; or.b32 $0, $0, 0x0C080400;", "=r,r", [e], dtype=gl.int32, is_pure=True, pack=1
    )
    block = (e * (N // 64) + tile).to(gl.int64)
    w_p = w_ptr + block * (K * 8) + gl.arange(0, 2048, layout=LW)
    ws_block = ws_ptr + block * (K // 2)
    ws_p = ws_block + (
        gl.arange(0, NW * 8, layout=gl.SliceLayout(1, LQ))[:, None] * 4
        + gl.arange(0, 4, layout=gl.SliceLayout(0, LQ))[None, :]
    )
    w_s = gl.allocate_shared_memory(gl.int32, [ST, 2048], S1)
    ws_s = gl.allocate_shared_memory(gl.int32, [ST, NW * 8, 4], S2)
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [ST, 16, 128], XS)
    xr = gl.arange(0, 16, layout=gl.SliceLayout(1, LX))  # half * 8 + column
    xk = gl.arange(0, 128, layout=gl.SliceLayout(0, LX))
    row = pair // XDIV
    x_p = x_ptr + (row * K + (xr >> 3) * 128)[:, None] + xk[None, :]
    x_ok = (xk >> 5)[None, :] + ((xr >> 3) * 4)[:, None] == (xr & 7)[:, None]  # elsewhere the copy writes zeros
    x_ok = gl.max_constancy(x_ok, [1, 32])
    xs_p = xs_ptr + row * (K // 32) + gl.arange(0, 8, layout=LCOL)
    if ACT:
        for i in gl.static_range(ST - 1):
            _copy(w_s, ws_s, w_p, ws_p, i, i)
            async_copy.async_copy_global_to_shared(x_s.index(i), x_p + i * 256, mask=x_ok)
            async_copy.commit_group()
    else:  # routing is complete: the gate+up kernel waited for it before it let this one start
        for i in gl.static_range(ST - 1):
            _copy(w_s, ws_s, w_p, ws_p, i, i)
            async_copy.commit_group()
        _wait()
        for i in gl.static_range(ST - 1):
            async_copy.async_copy_global_to_shared(x_s.index(i), x_p + i * 256, mask=x_ok)
        async_copy.commit_group()
        async_copy.wait_group(0)
    xs = gl.load(xs_p)
    factor = _row_scale(ws_block, NW, K, LS, LROW)  # what the end needs is read here, behind the ring's copies
    weight = gl.load(weights + pair)
    w_v = w_s._reinterpret(gl.int32, [ST * 4, 512], S1)
    x_v = x_s._reinterpret(gl.float8e4nv, [ST * 2, 8, 128], XS)
    acc = gl.zeros([64, 8], gl.float32, layout=MMA)
    zero = gl.zeros([64, 8], gl.float32, layout=MMA)
    for c in range(0, CH):
        next_xs = gl.load(xs_p + gl.minimum(c + 1, CH - 1) * 8)
        async_copy.wait_group(ST - 2)
        gl.thread_barrier()  # frees the slot of the chunk before
        ahead = c + ST - 1
        if ahead < CH:
            _copy(w_s, ws_s, w_p, ws_p, ahead, ahead % ST)
            async_copy.async_copy_global_to_shared(x_s.index(ahead % ST), x_p + ahead * 256, mask=x_ok)
        async_copy.commit_group()
        fence_async_shared()
        gl.thread_barrier()
        slot = c % ST
        w0 = w_v.index(slot * 4).load(LW)
        w1 = w_v.index(slot * 4 + 1).load(LW)
        d = _half(zero, w0, w1, low, x_v.index(slot * 2), True, NW, MMA)
        w2 = w_v.index(slot * 4 + 2).load(LW)
        w3 = w_v.index(slot * 4 + 3).load(LW)
        d = _half(d, w2, w3, low, x_v.index(slot * 2 + 1), False, NW, MMA)
        scale = _scales(ws_s.index(slot).load(LQ), xs.to(gl.int32), NW, MMA)
        d = warpgroup_mma_wait(0, deps=[d])
        acc = acc + d * scale
        xs = next_xs
    async_copy.wait_group(0)
    y = gl.sum(acc, axis=1) * factor

    if ACT:
        LO: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, NW], [0, 1])
        LC: gl.constexpr = gl.SliceLayout(1, LO)
        gate, up = gl.split(y.to(gl.bfloat16).reshape([NW, 2, 8]).permute([0, 2, 1]))
        gate = gl.convert_layout(gate.reshape([8 * NW]), LC).to(gl.float32)
        up = gl.convert_layout(up.reshape([8 * NW]), LC).to(gl.float32)
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        act = gate / (1.0 + gl.exp(-gate)) * up * weight
        act = gl.expand_dims(act.to(gl.bfloat16).to(gl.float32), 1)
        q, code = _quantise(act, 1, 1)
        q = gl.convert_layout(q, LO).to(gl.uint8, bitcast=True)
        to = out_ptr + pair * (N // 2) + tile * 32 + gl.arange(0, 32, layout=LC)
        gl.store(gl.expand_dims(to, 1), q)
        code = gl.convert_layout(code, gl.BlockedLayout([1, 1], [1, 32], [1, NW], [1, 0])).to(gl.uint8)
        at = gl.arange(0, 1, layout=gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [1, NW], [1, 0])))
        gl.store(gl.expand_dims(out_scale_ptr + pair * (N // 64) + tile + at, 1), code)
    else:
        LY: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
        y = gl.convert_layout(y.to(gl.bfloat16), LY)
        gl.store(out_ptr + pair * N + tile * 64 + gl.arange(0, 64, layout=LY), y)


# ring slots of gate+up, of down. The op took 35.5 and 38.4 us in two runs; (3, 5) 37.4 and 38.2, (5, 5) and (3, 3) 35.6
STAGES = {True: 4, False: 5}


def project(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: Tensor,
    w_scale: Tensor,
    limit: float,
    *,
    act: bool,
) -> tuple[Tensor, Tensor]:
    """One projection of one row; results as experts_sm90.outputs."""
    p, n, k = ids.numel(), w.shape[1], 2 * w.shape[2]
    out, out_scale = outputs(p, n, act, x.device)
    single[(n // 64, p)](
        w.view(torch.int32), w_scale.view(torch.int32), x, x_scale.view(torch.uint8), ids, weights,
        out.view(torch.uint8) if act else out, out_scale if act else x_scale, limit, w.shape[0], N=n, K=k,
        XDIV=p if act else 1, ST=STAGES[act], ACT=act, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out, out_scale


def variants() -> list[Variant]:
    gate_up, _ = both(single, {"xs_ptr": "*u8"}, {"ST": STAGES[True]}, num_warps=4)
    _, down = both(single, {"xs_ptr": "*u8"}, {"ST": STAGES[False]}, num_warps=4)
    return [gate_up, down]
