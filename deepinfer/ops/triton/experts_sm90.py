"""FP4 grouped GEMM for Hopper (Gluon): one kernel for both projections, from one row to prefill.

Belongs here: the weight layout that it reads ("fragment order") and the kernel. Does not belong here: routing, choice
of a variant, the portable kernel (experts.py).

Structure (spec/h200_facts.md 3, structure A: 96 to 100% of the byte floor per projection at 8 and 64 rows): weights are
the M side of wgmma m64nNTk32 (e4m3), read from registers. A lane owns its fragment as 16 contiguous bytes, so decoding
moves nothing between lanes. Weights, their scales and the rows of x travel in one cp.async ring. Sums are promoted to
float32 every 32 k; nothing depends on NT, so every variant gives a row the same bits (n8 and n64 tiles: one class).

Fragment order of [N, K] codes: tile of 64 rows, step of 64 k, warp w, g = lane / 4, q = lane % 4, word (kh, r8). Row is
16 w + 8 r8 + g, k is 32 group + 16 kh + 4 q + b. A word holds 8 codes: the magnitude of byte b is nibble b (group 0) or
4 + b (group 1), so that a half word is a selector of PRMT; signs lie where a byte's sign bit must go: bit 8 b + 7
(group 0) and 8 b + 3 (group 1).

Scales: a row keeps one base code; what a group has above it, 1..12, goes into the exponent of the e4m3 code (a value of
e2m1 is exact there), so promotion is one FMA per sum instead of a product and an FMA. PRMT reads the code from 8 bytes
that two multiply-adds make: [0, 8r, 8r+8, 8r+12 | 8r+16, 8r+20, 8r+24, 8r+28]. A group whose scale is more than 2^11
below its row's largest is rounded to the grid of 2^11 below (4e-5 of the row's largest weight; no checkpoint has shown
one). Scale words: tile, chunk of 256 k, (w, g), step; bytes (group, r8); low nibble = exponent; the base lies in the
high nibbles of the first word (group 0 low, group 1 high).
"""

from __future__ import annotations

from typing import Any

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

TILE, STEP, CHUNK = 64, 64, 256  # rows of a tile; k of a step (two scale groups); k of a ring slot
SPREAD = 12  # exponents 1..12 fit e4m3: 28 + 8 * 12 < 0x7F


def fits(n: int, k: int) -> bool:
    """Whether [n, k] weights can be in fragment order; a ring is filled without a look at the end of k."""
    return n % (2 * TILE) == 0 and k % CHUNK == 0 and k >= 5 * CHUNK


# ------------------------------------------------------------------------------------------------------------ layout


def pack(code: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [B, N, K/2] and E8M0 [B, N, K/32] as stored -> the same number of bytes in fragment order."""
    b, n, half = code.shape
    k = 2 * half
    c = torch.stack((code & 15, code >> 4), dim=-1).view(b, n, k // 32, 32)
    c, exponent, base = _rebase(c, scale)
    # [B, tile, w, r8, g, step, group, kh, q, byte] -> [B, tile, step, w, g, q, kh, r8, group, byte]
    c = c.view(b, n // TILE, 4, 2, 8, k // STEP, 2, 2, 4, 4).permute(0, 1, 5, 2, 4, 8, 7, 3, 6, 9).to(torch.int32)
    words = torch.zeros(c.shape[:-2], dtype=torch.int32, device=code.device)
    for i in range(4):
        low, high = c[..., 0, i], c[..., 1, i]
        words |= ((low & 7) << (4 * i)) | ((high & 7) << (16 + 4 * i))
        words |= ((low >> 3) << (8 * i + 7)) | ((high >> 3) << (8 * i + 3))
    exponent[:, :, 0] |= (base & 15) << 4
    exponent[:, :, 1] |= (base >> 4) << 4
    # [B, tile, w, r8, g, chunk, step, group] -> [B, tile, chunk, w, g, step, group, r8]
    e = exponent.view(b, n // TILE, 4, 2, 8, k // CHUNK, 4, 2).permute(0, 1, 5, 2, 4, 6, 7, 3)
    return words.contiguous().view(torch.uint8).view(code.shape), e.contiguous().view(scale.shape)


def _rebase(c: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [B, N, G, 32], E8M0 [B, N, G] -> codes, exponents uint8 1..SPREAD [B, N, G], base code uint8 [B, N]."""
    used = (c & 7).amax(-1) != 0
    s = scale.to(torch.int32)
    top = torch.where(used, s, 0).amax(-1)
    base = (top - SPREAD).clamp_min(0)
    exponent = s - base.unsqueeze(-1)
    under = (1 - exponent).clamp(0, 31)  # binades below the grid
    if bool((used & (under > 0)).any()):
        values = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=c.device)
        small = values[(c & 7).long()] * torch.exp2(-under.float()).unsqueeze(-1)
        bounds = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=c.device)
        rounded = torch.bucketize(small, bounds).to(torch.uint8) | (c & 8)
        c = torch.where((under > 0).unsqueeze(-1), rounded, c)
    return c, exponent.clamp(1, SPREAD).to(torch.uint8), base.to(torch.uint8)


def unpack(code: Tensor, scale: Tensor) -> Tensor:
    """Values float32 [B, N, K] of packed weights, by the arithmetic of the kernel (its emulation in the tests)."""
    b, n, half = code.shape
    k = 2 * half
    w = code.contiguous().view(torch.int32).view(b, n // TILE, k // STEP, 4, 8, 4, 2, 2)
    s = scale.contiguous().view(torch.int32).view(b, n // TILE, k // CHUNK, 4, 8, 4)  # [B, tile, chunk, w, g, step]
    step = s.permute(0, 1, 2, 5, 3, 4).reshape(b, n // TILE, k // STEP, 4, 8)
    out = torch.empty((b, n // TILE, 4, 2, 8, k // STEP, 2, 2, 4, 4), device=code.device)
    first = s[:, :, 0, :, :, 0]  # [B, tile, w, g]
    for r8 in range(2):
        base = ((first >> (8 * r8 + 4)) & 15) | (((first >> (8 * r8 + 20)) & 15) << 4)
        row = torch.exp2((base + 6 - 127).float())
        for group in range(2):
            r = (step >> (16 * group + 8 * r8)) & 15
            for kh in range(2):
                word = w[..., kh, r8]  # [B, tile, step, w, g, q]
                for i in range(4):
                    pick = (word >> (16 * group + 4 * i)) & 7
                    table = torch.stack([x * r if x else 0 * r for x in (0, 8, 8, 8, 8, 8, 8, 8)], -1)
                    table = table + torch.tensor((0, 0, 8, 12, 16, 20, 24, 28), device=code.device)
                    picks = pick.unsqueeze(-1).long()
                    byte = table.unsqueeze(-2).expand(*pick.shape, 8).gather(-1, picks).squeeze(-1)
                    byte = byte | (((word >> (8 * i + 7 - 4 * group)) & 1) << 7)
                    value = byte.to(torch.uint8).view(torch.float8_e4m3fn).float()  # [B, tile, step, w, g, q]
                    value = value.permute(0, 1, 3, 4, 2, 5) * row[..., None, None]
                    out[:, :, :, r8, :, :, group, kh, :, i] = value
    return out.view(b, n, k)


# ------------------------------------------------------------------------------------------------------------ kernel


def _decode_asm() -> str:
    """4 code words and the scale word of a lane -> 4 registers of e4m3 for group 0 ($0..3), 4 for group 1 ($4..7)."""
    out = ["{ .reg .b32 m, t, r, lo<4>, hi<4>;"]
    for i in range(4):  # byte i of the scale word: (group, r8) = (i / 2, i % 2)
        out.append(f"shr.u32 r, $12, {8 * i}; and.b32 r, r, 15;" if i else "and.b32 r, $12, 15;")
        out.append(f"mad.lo.u32 lo{i}, r, 0x08080800, 0x0C080000; mad.lo.u32 hi{i}, r, 0x08080808, 0x1C181410;")
    for i in range(4):  # word i: (kh, r8) = (i / 2, i % 2)
        w, r8 = f"${8 + i}", i % 2
        out.append(f"and.b32 m, {w}, 0x77777777; prmt.b32 t, lo{r8}, hi{r8}, m;")
        out.append(f"and.b32 r, {w}, 0x80808080; or.b32 ${i}, t, r;")
        out.append(f"shr.u32 m, m, 16; prmt.b32 t, lo{2 + r8}, hi{2 + r8}, m;")
        out.append(f"shl.b32 r, {w}, 4; and.b32 r, r, 0x80808080; or.b32 ${4 + i}, t, r;")
    return " ".join(out) + " }"


_ASM = gl.constexpr(_decode_asm())
# early clobber: outputs are written before all inputs are read
_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))
_BYTES = gl.constexpr((gl.uint8,) * 8)


@gluon.jit
def _wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _release():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _warps(nw, step):
    return [[step << i, 0] for i in range(nw.bit_length() - 1)]


@gluon.constexpr_function
def _plane(nw):
    """Code words of a step as [8 nw, 16]: a lane holds the 4 words of its (w, g, q)."""
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]], lanes, _warps(nw, 8), [], [nw * 8, 16])


@gluon.jit
def _fragment(a, b, c, d, NW: gl.constexpr, MMA: gl.constexpr):
    """Registers 0..3 of a lane, (row, row + 8) x (k, k + 16), 4 consecutive k each -> [16 NW, 32] e4m3 operand."""
    r = gl.join(gl.join(a, b), gl.join(c, d)).reshape([NW, 8, 4, 4, 2, 2])  # w g q byte r8 kh
    r = r.permute([0, 4, 1, 5, 2, 3]).reshape([16 * NW, 32])
    return gl.convert_layout(r, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _step(acc, w, s, x_s, xs_s, g, zero, gx, NW: gl.constexpr, MMA: gl.constexpr, SERIAL: gl.constexpr):
    """acc += 64 k: w int32 [128 NW] code words, s int32 [8 NW] scale words, groups g, g + 1 of the ring."""
    LC: gl.constexpr = gl.SliceLayout(0, MMA)
    P: gl.constexpr = _plane(NW)
    w = gl.convert_layout(w.reshape([NW * 8, 16]), P, assert_trivial=True)
    s = gl.convert_layout(s, gl.SliceLayout(1, P), assert_trivial=True)
    s = s[:, None] + gl.zeros_like(w)
    a0, a1, a2, a3, b0, b1, b2, b3 = gl.inline_asm_elementwise(
        _ASM, _CONSTRAINTS, [w, s], dtype=_BYTES, is_pure=True, pack=4
    )
    fa = _fragment(a0, a1, a2, a3, NW, MMA)
    fb = _fragment(b0, b1, b2, b3, NW, MMA)
    if SERIAL:  # half the registers: two blocks of 8 warps fit on an SM and hide each other's latency
        d0 = warpgroup_mma(fa, x_s.index(g).permute((1, 0)), zero, use_acc=False, is_async=True)
        x0 = xs_s.index(gx).load(LC)
        d0 = warpgroup_mma_wait(0, deps=[d0])
        acc = acc + d0 * x0[None, :]
        d1 = warpgroup_mma(fb, x_s.index(g + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        x1 = xs_s.index(gx + 1).load(LC)
        d1 = warpgroup_mma_wait(0, deps=[d1])
    else:
        d0 = warpgroup_mma(fa, x_s.index(g).permute((1, 0)), zero, use_acc=False, is_async=True)
        d1 = warpgroup_mma(fb, x_s.index(g + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        x0 = xs_s.index(gx).load(LC)
        x1 = xs_s.index(gx + 1).load(LC)
        d0, d1 = warpgroup_mma_wait(0, deps=[d0, d1])
        acc = acc + d0 * x0[None, :]
    return acc + d1 * x1[None, :]


@gluon.jit
def _expand(v, NT: gl.constexpr):
    """int32 [NT, 2] of four E8M0 codes each -> float32 [8, NT]"""
    b0 = (v & 255) << 23
    b1 = ((v >> 8) & 255) << 23
    b2 = ((v >> 16) & 255) << 23
    b3 = ((v >> 24) & 255) << 23
    r = gl.join(gl.join(b0, b2), gl.join(b1, b3)).reshape([NT, 8]).permute([1, 0])
    return r.to(gl.float32, bitcast=True)


@gluon.jit
def _copy(w_s, ws_s, w_p, w_o, ws_p, chunk, slot, ok, NW: gl.constexpr):
    async_copy.async_copy_global_to_shared(w_s.index(slot), (w_p + chunk * 2048) + w_o, mask=ok)
    async_copy.async_copy_global_to_shared(ws_s.index(slot), ws_p + chunk * 128)


@gluon.jit
def _row_scale(ws_ptr, NW: gl.constexpr, K: gl.constexpr, LS: gl.constexpr, LROW: gl.constexpr):
    """Factor float32 of every row of the block from the base codes in its first scale words."""
    i = gl.arange(0, NW * 8, layout=gl.SliceLayout(1, LS))
    v = gl.load(ws_ptr + (i // 32) * (K // 2) + (i % 32) * 4)
    r0 = ((((v >> 4) & 15) | (((v >> 20) & 15) << 4)) + 6) << 23
    r1 = ((((v >> 12) & 15) | (((v >> 28) & 15) << 4)) + 6) << 23
    r = gl.join(r0, r1).reshape([NW, 8, 2]).permute([0, 2, 1]).reshape([16 * NW]).to(gl.float32, bitcast=True)
    return gl.convert_layout(r, LROW, assert_trivial=True)


@gluon.jit
def _quantise(act, G: gl.constexpr, NT: gl.constexpr):
    """float32 (bf16 values) [32 G, NT] -> e4m3 [32 G, NT], E8M0 int32 [G, NT]; one scale per 32 rows."""
    a = act.reshape([G, 32, NT])
    amax = gl.maximum(gl.max(gl.abs(a), axis=1), 1e-4)
    bits = amax.to(gl.int32, bitcast=True)
    # smallest power of two >= amax / 448, 448 = 1.75 * 2^8, without a division
    code = (bits >> 23) - 8 + gl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
    inverse = ((254 - code) << 23).to(gl.float32, bitcast=True)
    q = a * gl.expand_dims(inverse, 1)
    return q.reshape([32 * G, NT]).to(gl.float8e4nv), code


@gluon.jit(do_not_specialize_on_alignment=["items", "pairs", "weights"])
def grouped(
    w_ptr,
    ws_ptr,
    x_ptr,
    xs_ptr,
    items,
    pairs,
    weights,
    out_ptr,
    out_scale_ptr,
    limit,
    N: gl.constexpr,
    K: gl.constexpr,
    XDIV: gl.constexpr,
    NT: gl.constexpr,
    NW: gl.constexpr,
    ST: gl.constexpr,
    SERIAL: gl.constexpr,
    ACT: gl.constexpr,
):
    """Grid (N / (16 NW), items). Rows of weights x tokens of one item: y[pair] = W[e] x[pair / XDIV].

    items int32 [.., 2]: (expert | count << 16, first place in pairs), -1 for none. pairs: pair ids.
    ACT: rows are (gate, up) pairs of channels; writes e4m3 [pairs, N/2] and E8M0 [pairs, N/64] of the weighted
    activation. Otherwise bf16 [pairs, N].

    Programmatic launch: the gate+up kernel waits for its predecessor, then lets the down kernel start. So when that
    runs, routing is complete: it reads its items and fills its ring before it waits for the activations.
    """
    BN: gl.constexpr = 16 * NW
    CH: gl.constexpr = K // 256
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, NT, 32])
    LROW: gl.constexpr = gl.SliceLayout(1, MMA)
    S1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    S2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    XS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=8, rank=2)
    LW: gl.constexpr = gl.BlockedLayout([4], [32], [NW], [0])
    LS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], _warps(NW, 8), [], [NW * 8, 4]
    )
    LSC: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [NW, 1], [1, 0])
    P: gl.constexpr = _plane(NW)
    LX: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [NW, 1], [1, 0])
    LXS: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [NW, 1], [1, 0])

    tile = gl.program_id(0)
    item = gl.program_id(1)
    if ACT:
        _wait()
    _release()
    word = gl.load(items + item * 2)
    if word < 0:
        return
    start = gl.load(items + item * 2 + 1)
    e = word & 0xFFFF
    count = word >> 16

    # a block is NW / 4 tiles of 64 rows; a tile is K * 8 words of codes and K / 2 of scales
    block = (e * (N // 64) + tile * (NW // 4)).to(gl.int64)
    LOG_STEP: gl.constexpr = (BN * 8).bit_length() - 1
    wo = gl.arange(0, BN * 32, layout=LW)
    # ring order is (step, tile, lane); 16-byte copies need the hint, because the arithmetic hides whole runs of 512
    w_o = ((wo >> 9) & (NW // 4 - 1)) * (K * 8) + (wo >> LOG_STEP) * 512 + (wo & 511)
    w_o = gl.max_contiguous(gl.multiple_of(w_o, 4), 4)  # added to a scalar at each copy: half the registers of pointers
    w_p = w_ptr + block * (K * 8)
    ws_block = ws_ptr + block * (K // 2)
    if SERIAL:  # [step, (w, g)] in the ring, so that a step is a row
        LST: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, NW // 4], [1, 0])
        sj = gl.arange(0, 4, layout=gl.SliceLayout(1, LST))
        si = gl.arange(0, NW * 8, layout=gl.SliceLayout(0, LST))
        ws_p = ws_block + ((si // 32) * (K // 2) + (si % 32) * 4)[None, :] + sj[:, None]
        ws_s = gl.allocate_shared_memory(gl.int32, [ST, 4, NW * 8], S2)
        ws_v = ws_s._reinterpret(gl.int32, [ST * 4, NW * 8], S1)
    else:
        si = gl.arange(0, NW * 8, layout=gl.SliceLayout(1, LSC))
        sj = gl.arange(0, 4, layout=gl.SliceLayout(0, LSC))
        ws_p = ws_block + ((si // 32) * (K // 2) + (si % 32) * 4)[:, None] + sj[None, :]
        ws_s = gl.allocate_shared_memory(gl.int32, [ST, NW * 8, 4], S2)
    w_s = gl.allocate_shared_memory(gl.int32, [ST, BN * 32], S1)
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [ST, 8 * NT, 32], XS)
    xs_s = gl.allocate_shared_memory(gl.float32, [2, 8, NT], S2)
    if not ACT:
        for i in gl.static_range(ST - 1):
            _copy(w_s, ws_s, w_p, w_o, ws_p, i, i, wo >= 0, NW)
            async_copy.commit_group()

    xr = gl.arange(0, 8 * NT, layout=gl.SliceLayout(1, LX))  # group * NT + token
    xk = gl.arange(0, 32, layout=gl.SliceLayout(0, LX))
    cm = gl.arange(0, NT, layout=gl.SliceLayout(1, LXS))
    cw = gl.arange(0, 2, layout=gl.SliceLayout(0, LXS))
    x_row = gl.load(pairs + start + (xr & (NT - 1)), mask=(xr & (NT - 1)) < count, other=0) // XDIV
    s_row = gl.load(pairs + start + cm, mask=cm < count, other=0) // XDIV
    x_o = (x_row * K + (xr >> (NT.bit_length() - 1)) * 32)[:, None] + xk[None, :]
    x_ok = ((xr & (NT - 1)) < count)[:, None] & (xk[None, :] >= 0)  # absent tokens are zeros
    xs_p = xs_ptr + (s_row * (K // 128))[:, None] + cw[None, :]
    if ACT:
        for i in gl.static_range(ST - 1):
            _copy(w_s, ws_s, w_p, w_o, ws_p, i, i, wo >= 0, NW)
            async_copy.async_copy_global_to_shared(x_s.index(i), (x_ptr + i * 256) + x_o, mask=x_ok)
            async_copy.commit_group()
        xs = gl.load(xs_p)
    else:
        _wait()
        for i in gl.static_range(ST - 1):
            async_copy.async_copy_global_to_shared(x_s.index(i), (x_ptr + i * 256) + x_o, mask=x_ok)
        async_copy.commit_group()
        xs = gl.load(xs_p)
        async_copy.wait_group(0)

    w_v = w_s._reinterpret(gl.int32, [ST * 4, BN * 8], S1)
    x_v = x_s._reinterpret(gl.float8e4nv, [ST * 8, NT, 32], XS)
    xs_v = xs_s._reinterpret(gl.float32, [16, NT], S1)
    acc = gl.zeros([BN, NT], gl.float32, layout=MMA)
    zero = gl.zeros([BN, NT], gl.float32, layout=MMA)
    for c in range(0, CH):
        next_xs = gl.load(xs_p + gl.minimum(c + 1, CH - 1) * 2)
        async_copy.wait_group(ST - 2)
        # two barriers a chunk: this one frees the slot of the chunk before, the one below publishes the ring and the
        # scales of x; the copies are issued between them, else the compiler adds a third
        gl.thread_barrier()
        xs_s.index(c % 2).store(_expand(xs, NT))
        slot = c % ST
        ahead = c + ST - 1
        go = ahead < CH
        last = gl.minimum(ahead, CH - 1)
        _copy(w_s, ws_s, w_p, w_o, ws_p, last, ahead % ST, (wo >= 0) & go, NW)
        async_copy.async_copy_global_to_shared(x_s.index(ahead % ST), (x_ptr + last * 256) + x_o, mask=x_ok & go)
        async_copy.commit_group()
        fence_async_shared()
        gl.thread_barrier()
        g = slot * 8
        gx = (c % 2) * 8
        if SERIAL:  # a real loop: unrolled, ptxas hoists the loads of x's scales and spills
            for j in range(0, 4):
                w = w_v.index(slot * 4 + j).load(LW)
                s = ws_v.index(slot * 4 + j).load(gl.SliceLayout(1, P))
                acc = _step(acc, w, s, x_v, xs_v, g + 2 * j, zero, gx + 2 * j, NW, MMA, SERIAL)
        else:
            w0 = w_v.index(slot * 4).load(LW)
            w1 = w_v.index(slot * 4 + 1).load(LW)
            w2 = w_v.index(slot * 4 + 2).load(LW)
            w3 = w_v.index(slot * 4 + 3).load(LW)
            ws = ws_s.index(slot).load(LS)
            even, odd = gl.split(ws.reshape([NW * 8, 2, 2]))  # steps 0, 2 and 1, 3
            s0, s2 = gl.split(even)
            s1, s3 = gl.split(odd)
            acc = _step(acc, w0, s0, x_v, xs_v, g, zero, gx, NW, MMA, SERIAL)
            acc = _step(acc, w1, s1, x_v, xs_v, g + 2, zero, gx + 2, NW, MMA, SERIAL)
            acc = _step(acc, w2, s2, x_v, xs_v, g + 4, zero, gx + 4, NW, MMA, SERIAL)
            acc = _step(acc, w3, s3, x_v, xs_v, g + 6, zero, gx + 6, NW, MMA, SERIAL)
        xs = next_xs
    async_copy.wait_group(0)
    word = gl.load(items + item * 2)  # read again rather than kept: registers
    start = gl.load(items + item * 2 + 1)
    count = word >> 16
    ws_block = ws_ptr + ((word & 0xFFFF) * (N // 64) + tile * (NW // 4)).to(gl.int64) * (K // 2)
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


# ------------------------------------------------------------------------------------------------------------ launch

# tokens of an item -> warps (16 rows of weights each), ring slots, one wgmma in flight instead of two, register cap
SHAPES: dict[int, tuple[int, int, bool, int | None]] = {
    8: (4, 3, False, None),
    16: (4, 3, False, None),
    64: (8, 3, True, 128),
}


def outputs(pairs: int, n: int, act: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """(e4m3 [P, N/2], E8M0 [P, N/64]) of the activation, or (bf16 [P, N], nothing)."""
    if not act:
        return torch.empty((pairs, n), dtype=torch.bfloat16, device=device), torch.empty(0, device=device)
    out = torch.empty((pairs, n // 2), dtype=torch.float8_e4m3fn, device=device)
    return out, torch.empty((pairs, n // 64), dtype=torch.uint8, device=device)


def project(
    x: Tensor,
    x_scale: Tensor,
    lists: tuple[Tensor, Tensor],
    weights: Tensor,
    w: Tensor,
    w_scale: Tensor,
    limit: float,
    nt: int,
    *,
    xdiv: int,
    act: bool,
) -> tuple[Tensor, Tensor]:
    """One projection; lists of experts._route for `nt`, row of pair p is p // xdiv. Results as `outputs`."""
    (items, pairs), n, k = lists, w.shape[1], 2 * w.shape[2]
    out, out_scale = outputs(weights.numel(), n, act, x.device)
    nw, stages, serial, cap = SHAPES[nt]
    grouped[(n // (16 * nw), items.shape[0])](
        w.view(torch.int32), w_scale.view(torch.int32), x, x_scale.view(torch.int32), items, pairs, weights,
        out.view(torch.uint8) if act else out, out_scale if act else x_scale, limit, N=n, K=k, XDIV=xdiv, NT=nt,
        NW=nw, ST=stages, SERIAL=serial, ACT=act, num_warps=nw, maxnreg=cap, launch_pdl=True,
    )  # fmt: skip
    return out, out_scale


# what the Hopper kernels of this family share in the compile gate
TYPES = {"w_ptr": "*i32", "ws_ptr": "*i32", "x_ptr": "*fp8e4nv", "xs_ptr": "*i32", "base_ptr": "*fp32", "E": "i32"}
TYPES |= {"ids": "*i32", "items": "*i32", "pairs": "*i32", "weights": "*fp32", "out_scale_ptr": "*u8", "limit": "fp32"}


def both(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> list[Variant]:
    """Variants of both projections at the model's dimensions."""
    out = []
    for act, n, k, xdiv in ((True, 4608, 5120, 6), (False, 5120, 2304, 1)):
        signature = {**TYPES, "out_ptr": "*u8" if act else "*bf16", **types}
        out.append(
            Variant(
                kernel, signature, {"N": n, "K": k, "XDIV": xdiv, "ACT": act, **constants}, {90: "wgmma"}, options, True
            )
        )
    return out


def variants() -> list[Variant]:
    out = []
    for nt, (nw, stages, serial, cap) in SHAPES.items():
        constants = {"NT": nt, "NW": nw, "ST": stages, "SERIAL": serial}
        out += both(grouped, {}, constants, num_warps=nw, **({"maxnreg": cap} if cap else {}))
    return out
