"""First half of an mHC boundary for Hopper (Gluon): streams, collapsed rows and products with fn in one pass.

Belongs here: `project` of hyper.py with registers laid out by hand. Does not belong here: the second half, the choice.

fn is the left operand of mma.sync m16n8k16 and the streams are the right one: a lane loads 16 bytes of a row of each
stream and of y, and two of those four registers are its part of a product, if k is permuted. So a stream goes from
memory through the arithmetic to the tensor cores and back to memory without shared memory, a barrier or a move between
registers. Only fn is shared: a program splits its columns of it into three bf16 parts once (an element is their exact
sum) and walks row tiles with them.

Bits: a row's sum over 32 columns of two streams is one chain of 12 k16 steps from zero (low, middle, high parts), added
to float32 in column order: tensor cores truncate when they add. They depend on STEPS alone, not on the rows of a tile
or the tiles of a program.

Measured on an H200, a whole boundary at T = 8192: 444 us. A bulk prefetch of the next tile into the L2 made it 478;
loads marked evict_first made the version before it 535 instead of 465.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.jit
def _wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _release():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _top(x):
    """The upper 16 bits: a bf16 value, truncated."""
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _four(at):
    """Four floats at 16-byte aligned addresses in one load; volatile, so it stays behind the wait."""
    a, b, c, d = gl.inline_asm_elementwise(
        "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [at.to(gl.int64)],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )
    return a[:, None], b[:, None], c[:, None], d[:, None]


def _pair() -> tuple[str, str]:
    """PTX of two columns of a row, and its constraints: the four new streams, the collapsed row, sums of squares.

    One block, because the compiler would convert whole tensors to float32 and keep them: 250 registers instead of 150.
    Operands: outputs 4 streams, row (bf16x2), 2 squares; inputs y, 4 streams (bf16x2), then in pairs of equal
    registers post 4, comb 16, pre 4.
    """
    y, s, post, comb, pre = 7, 8, 12, 20, 52
    text = [".reg .f32 v<10>, f<2>, g<2>, z<2>, q<2>;"]
    for j, operand in enumerate((y, *range(s, s + 4))):
        text += [f"shl.b32 v{2 * j}, ${operand}, 16;", f"and.b32 v{2 * j + 1}, ${operand}, 0xffff0000;"]
    for i in range(4):
        for e in range(2):
            text.append(f"mul.rn.f32 f{e}, ${post + 2 * i}, v{e};")
            for j in range(4):
                text.append(f"fma.rn.f32 f{e}, ${comb + 2 * (4 * j + i)}, v{2 * (j + 1) + e}, f{e};")
        text += [f"cvt.rn.bf16x2.f32 ${i}, f1, f0;", f"shl.b32 g0, ${i}, 16;", f"and.b32 g1, ${i}, 0xffff0000;"]
        for e in range(2):
            if i == 0:
                text += [f"mul.rn.f32 z{e}, ${pre}, g{e};", f"mul.rn.f32 q{e}, g{e}, g{e};"]
            else:
                text += [f"fma.rn.f32 z{e}, ${pre + 2 * i}, g{e}, z{e};", f"fma.rn.f32 q{e}, g{e}, g{e}, q{e};"]
    text += ["cvt.rn.bf16x2.f32 $4, z1, z0;", "mov.b32 $5, q0;", "mov.b32 $6, q1;"]
    outputs = ["=&r"] * 7
    return "{ " + " ".join(text) + " }", ",".join(outputs + ["r"] * (5 + 48))


PAIR, PAIR_OPERANDS = (gl.constexpr(x) for x in _pair())


@gluon.jit
def _coefficients(post, comb, pre, row):
    """post, comb and pre of the rows of a half."""
    p = _four(post + row * 4)
    a = _four(comb + row * 16)
    b = _four(comb + row * 16 + 4)
    c = _four(comb + row * 16 + 8)
    d = _four(comb + row * 16 + 12)
    q = _four(pre + row * 4)
    return p, a, b, c, d, q


@gluon.jit
def _mixed(v, s0, s1, s2, s3, coefficients):
    """(streams after a sublayer, collapsed row, squares): R'_i = post_i y + sum_j comb[j][i] R_j, sum_i pre_i R'_i."""
    p, a, b, c, d, q = coefficients
    return gl.inline_asm_elementwise(
        PAIR,
        PAIR_OPERANDS,
        [
            v, s0, s1, s2, s3, p[0], p[1], p[2], p[3], a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3],
            c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3], q[0], q[1], q[2], q[3],
        ],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.float32),
        is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def _half(y_ptr, streams_ptr, row, c, ok, H: gl.constexpr, WRITE: gl.constexpr):
    """y and the four streams of rows g (or g + 8) of every warp."""
    at = row[:, None] * (4 * H) + c[None, :]
    inside = ok[:, None] & (c >= 0)[None, :]
    s0 = gl.load(streams_ptr + at, mask=inside, other=0.0)
    s1 = gl.load(streams_ptr + H + at, mask=inside, other=0.0)
    s2 = gl.load(streams_ptr + 2 * H + at, mask=inside, other=0.0)
    s3 = gl.load(streams_ptr + 3 * H + at, mask=inside, other=0.0)
    v = s0
    if WRITE:
        v = gl.load(y_ptr + row[:, None] * H + c[None, :], mask=inside, other=0.0)
    return v, s0, s1, s2, s3


@gluon.jit
def _write(raw, coefficients, out_ptr, x_ptr, row, c, ok, H: gl.constexpr, WRITE: gl.constexpr):
    """New streams, stored, and the sum of their squares over columns."""
    v, s0, s1, s2, s3 = raw
    if WRITE:
        at = row[:, None] * (4 * H) + c[None, :]
        inside = ok[:, None] & (c >= 0)[None, :]
        s0, s1, s2, s3, z, square = _mixed(v, s0, s1, s2, s3, coefficients)
        gl.store(out_ptr + at, s0, mask=inside)
        gl.store(out_ptr + H + at, s1, mask=inside)
        gl.store(out_ptr + 2 * H + at, s2, mask=inside)
        gl.store(out_ptr + 3 * H + at, s3, mask=inside)
        gl.store(x_ptr + row[:, None] * H + c[None, :], z, mask=inside)
    else:
        square = s0.to(gl.float32) * s0.to(gl.float32)
        square = gl.fma(s1.to(gl.float32), s1.to(gl.float32), square)
        square = gl.fma(s2.to(gl.float32), s2.to(gl.float32), square)
        square = gl.fma(s3.to(gl.float32), s3.to(gl.float32), square)
    return s0, s1, s2, s3, gl.sum(square, 1)


@gluon.jit
def _add_products(acc, zero, a, b, a_low, b_low, w_s, part, NW: gl.constexpr, A: gl.constexpr, B: gl.constexpr):
    """acc + products of two streams (top and low rows) with their three parts of fn, a chain from zero."""
    # [row, column 8 + 16, 4, 2, 1, stream, half] -> [k, half and row]
    both = gl.join(gl.join(a, b), gl.join(a_low, b_low)).reshape([8 * NW, 4, 2, 2, 2, 2, 2])
    both = both.permute((3, 1, 5, 2, 4, 6, 0)).reshape([64, 16 * NW])
    both = gl.convert_layout(both, B, assert_trivial=True)
    d = mma_v2(w_s.index(part + 2).load(A), both, zero)
    d = mma_v2(w_s.index(part + 1).load(A), both, d)
    d = mma_v2(w_s.index(part).load(A), both, d)
    return gl.fma(d, 1.0, acc)


@gluon.jit
def _loads(y, streams, r, c, left, H: gl.constexpr, NW: gl.constexpr, WRITE: gl.constexpr):
    """Top and low rows of a tile, 32 columns."""
    top = _half(y, streams, r, c, r < left, H, WRITE)
    low = _half(y, streams, r + 8 * NW, c, r + 8 * NW < left, H, WRITE)
    return top, low


@gluon.jit
def _step(
    acc, zero, top, low, post, comb, pre, out, x, r, c, left, w_s, part,
    H: gl.constexpr, NW: gl.constexpr, WRITE: gl.constexpr, A: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """32 columns of a tile: (sums of products, squares of the top rows, of the low rows)."""
    k = top
    k_low = low
    if WRITE:  # both before the first store, behind which the compiler would leave them
        k = _coefficients(post, comb, pre, gl.minimum(r, left - 1))
        k_low = _coefficients(post, comb, pre, gl.minimum(r + 8 * NW, left - 1))
    s0, s1, s2, s3, q = _write(top, k, out, x, r, c, r < left, H, WRITE)
    t0, t1, t2, t3, q_low = _write(low, k_low, out, x, r + 8 * NW, c, r + 8 * NW < left, H, WRITE)
    acc = _add_products(acc, zero, s0, s1, t0, t1, w_s, part, NW, A, B)
    acc = _add_products(acc, zero, s2, s3, t2, t3, w_s, part + 3, NW, A, B)
    return acc, q, q_low


@gluon.constexpr_function
def _parts(nw):
    """Layout [32, 64] of fn while it is split: as `_shared`, 16 consecutive bytes of fn a load."""
    regs, lanes = [[0, 1], [0, 2], [8, 0], [0, 32]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [0, 4], [0, 0]][: nw.bit_length() - 1]
    return gl.DistributedLinearLayout(regs + [[16, 0], [0, 4]][len(warps) :], lanes, warps, [], [32, 64])


@gluon.constexpr_function
def _shared():
    """Registers of the left operand of a product (rows g and g + 8, k and k + 32) in 16 bytes, lanes side by side."""
    return gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 32], [0, 8], [0, 16], [1, 0], [2, 0], [4, 0], [0, 2], [0, 4], [16, 0]]
    )


@gluon.constexpr_function
def _rows(nw):
    """Layout [8 nw, 32]: 8 columns of row g a lane, which are right operands of mma.sync if k is permuted."""
    warps = [[8 << i, 0] for i in range(nw.bit_length() - 1)]
    regs, lanes = [[0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [8 * nw, 32])


@gluon.jit(do_not_specialize=["T"])
def project(
    y_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    pre_ptr,
    fn_ptr,
    out_ptr,
    x_ptr,
    sums_ptr,
    T,
    H: gl.constexpr,
    SLOTS: gl.constexpr,
    STEPS: gl.constexpr,
    NW: gl.constexpr,
    WRITE: gl.constexpr,
):
    """Grid (SLOTS x row groups). Slot s: columns s * STEPS * 32 on, of every stream. sums float32 [SLOTS, T, 32]: 24
    products with fn, then the sum of squares.
    """
    BM: gl.constexpr = 16 * NW
    BK: gl.constexpr = 32
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, NW], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    LX: gl.constexpr = _rows(NW)
    LW: gl.constexpr = _parts(NW)
    SW: gl.constexpr = _shared()

    slot = gl.program_id(0) % SLOTS
    first = slot * (STEPS * BK)
    w_s = gl.allocate_shared_memory(gl.bfloat16, [STEPS * 6, 32, 2 * BK], SW)
    n = gl.arange(0, 32, layout=gl.SliceLayout(1, LW))
    k = gl.arange(0, 2 * BK, layout=gl.SliceLayout(0, LW))
    # weights are older than any kernel that may still run: read before the wait
    for i in gl.static_range(STEPS * 2):
        fn_at = (
            fn_ptr + (first + i // 2 * BK + i % 2 * (2 * H)) + n[:, None] * (4 * H) + (k // BK * H + k % BK)[None, :]
        )
        w = gl.load(fn_at, mask=(n < 24)[:, None] & (k >= 0)[None, :], other=0.0)
        w = w.reshape([32, 2, 4, 2, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape([32, 2 * BK])  # columns -> k
        high = _top(w)
        rest = w - high
        middle = _top(rest)
        w_s.index(3 * i).store(high.to(gl.bfloat16))
        w_s.index(3 * i + 1).store(middle.to(gl.bfloat16))
        w_s.index(3 * i + 2).store((rest - middle).to(gl.bfloat16))
    gl.thread_barrier()
    _wait()
    _release()

    r = gl.arange(0, 8 * NW, layout=gl.SliceLayout(1, LX))
    c = gl.arange(0, BK, layout=gl.SliceLayout(0, LX))
    col = gl.arange(0, 32, layout=gl.SliceLayout(1, MMA))
    m = gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))
    zero = gl.zeros([32, BM], gl.float32, layout=MMA)
    tiles = (T + BM - 1) // BM
    for tile in range(gl.program_id(0) // SLOTS, tiles, gl.num_programs(0) // SLOTS):
        begin = tile * BM
        left = T - begin
        acc = zero
        squares = gl.zeros([8 * NW], gl.float32, layout=gl.SliceLayout(1, LX))
        squares_low = gl.zeros([8 * NW], gl.float32, layout=gl.SliceLayout(1, LX))
        post = post_ptr + begin * 4
        comb = comb_ptr + begin * 16
        pre = pre_ptr + begin * 4
        near = begin.to(gl.int64) * H + first
        far = begin.to(gl.int64) * (4 * H) + first
        for step in range(STEPS):
            top, low = _loads(y_ptr + near, streams_ptr + far, r, c, left, H, NW, WRITE)
            acc, q, q_low = _step(
                acc, zero, top, low, post, comb, pre, out_ptr + far, x_ptr + near, r, c, left, w_s, step * 6,
                H, NW, WRITE, A, B,
            )  # fmt: skip
            squares += q
            squares_low += q_low
            near += BK
            far += BK
        ok = (m < left)[None, :] & (col < 24)[:, None]
        to = sums_ptr + (slot.to(gl.int64) * T + begin) * 32
        gl.store(to + m[None, :] * 32 + col[:, None], acc, mask=ok)
        gl.store(to + r * 32 + 24, squares, mask=r < left)
        gl.store(to + r * 32 + (24 + 256 * NW), squares_low, mask=r + 8 * NW < left)
