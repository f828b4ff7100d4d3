"""FP8 linear for 33 rows and more on Hopper (Gluon): a loader warp with TMA and a consumer warpgroup.

Belongs here: the kernel for many rows when bits may depend on the batch. Does not belong here: few rows and the
batch-invariant form (linear_sm90.py), the choice of a variant (linear.py).

A block makes 64 rows x 128 weight rows. Every 32 k are one wgmma (k32) from zero, which the consumer (four warps)
multiplies with both scales and adds to float32 sums: 64 FMA a thread. Two wgmmas are in flight, and two blocks share an
SM, so that one's sums hide behind the other's wgmma. The loader keeps 24 registers a thread, the consumer takes 232.
On an H200, percent of bytes at 64 rows: engram_wkv 77 to 82 (linear_sm90.fp8: 69), wo_b 54 (38). A second consumer in
the same block (128 rows) hung on the device, registers for setmaxnreg being the suspect, and was taken out.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from deepinfer.ops.triton.linear_sm90 import (
    _column_blocks,
    _mma,
    _promote,
    _release,
    _spread,
    _tile,
    _wait,
)

# layouts of the descriptors
S8 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
S16 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _load(x_desc, w_desc, x_s, w_s, full, empty, m, n, first, count, ST: gl.constexpr):
    """Steps first .. first + count into the ring; weights start before the wait for the kernel before."""
    BYTES: gl.constexpr = (64 + 128) * 128
    for i in gl.static_range(ST):
        go = i < count
        mbarrier.expect(full.index(i), BYTES, pred=go)
        tma.async_copy_global_to_shared(w_desc, [n, (first + i) * 128], full.index(i), w_s.index(i), pred=go)
    _wait()
    for i in gl.static_range(ST):
        go = i < count
        tma.async_copy_global_to_shared(x_desc, [m, (first + i) * 128], full.index(i), x_s.index(i), pred=go)
    slot = 0
    phase = 1
    for it in range(ST, count):
        mbarrier.wait(empty.index(slot), phase ^ 1)
        mbarrier.expect(full.index(slot), BYTES)
        at = (first + it) * 128
        tma.async_copy_global_to_shared(w_desc, [n, at], full.index(slot), w_s.index(slot))
        tma.async_copy_global_to_shared(x_desc, [m, at], full.index(slot), x_s.index(slot))
        slot += 1
        if slot == ST:
            slot = 0
            phase ^= 1


@gluon.jit
def _consume(
    x_s,
    w_s,
    full,
    empty,
    out_s,
    xs_ptr,
    ws_ptr,
    out_desc,
    part_ptr,
    M,
    N,
    m,
    n,
    first,
    count,
    ST: gl.constexpr,
    CHUNKS: gl.constexpr,
    WORDS: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    LROW: gl.constexpr = gl.SliceLayout(1, MMA)
    LCOL: gl.constexpr = gl.SliceLayout(0, MMA)
    LWS: gl.constexpr = _column_blocks(128, 4, 1)
    wb = gl.arange(0, 4, layout=gl.SliceLayout(1, LWS))
    xm = gl.arange(0, 64, layout=LROW)
    ok = xm < M - m
    # scale words come from the L1, a step ahead
    ws_p = ws_ptr + (n // 32 * WORDS + first) + wb * WORDS
    xs_p = xs_ptr + (m * WORDS + first) + xm * WORDS
    zero = gl.zeros([64, 128], gl.float32, layout=MMA)
    acc = gl.zeros([64, 128], gl.float32, layout=MMA)
    _wait()
    column_next = gl.load(ws_p)
    row_next = gl.load(xs_p, mask=ok, other=0)
    slot = 0
    phase = 0
    for it in range(0, count):
        row = row_next
        column = _spread(column_next, 4, LWS, LCOL)
        more = it + 1 < count
        column_next = gl.load(ws_p + (it + 1), mask=(wb >= 0) & more, other=0)
        row_next = gl.load(xs_p + (it + 1), mask=ok & more, other=0)
        a_s = x_s.index(slot)
        b_s = w_s.index(slot)
        mbarrier.wait(full.index(slot), phase)
        d0 = _mma(a_s, b_s, zero, 0)
        d1 = _mma(a_s, b_s, zero, 1)
        d0 = warpgroup_mma_wait(1, deps=[d0])
        acc = _promote(acc, d0, row, column, 0)
        d2 = _mma(a_s, b_s, zero, 2)
        d1 = warpgroup_mma_wait(1, deps=[d1])
        acc = _promote(acc, d1, row, column, 1)
        d3 = _mma(a_s, b_s, zero, 3)
        d2 = warpgroup_mma_wait(1, deps=[d2])
        acc = _promote(acc, d2, row, column, 2)
        d3 = warpgroup_mma_wait(0, deps=[d3])
        mbarrier.arrive(empty.index(slot), count=1)
        acc = _promote(acc, d3, row, column, 3)
        slot += 1
        if slot == ST:
            slot = 0
            phase ^= 1
    if CHUNKS > 1:
        pm = m + xm
        pn = n + gl.arange(0, 128, layout=LCOL)
        part_p = part_ptr + gl.program_id(1).to(gl.int64) * M * N
        gl.store(
            part_p + (pm[:, None] * N + pn[None, :]),
            acc,
            mask=ok[:, None] & (pn >= 0)[None, :],
        )
    else:  # bf16 rows through shared memory; the copy drops rows that do not exist
        out_s.store(acc.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [m, n], out_s)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])  # one binary for every M
def fp8_many(
    x_desc,
    xs_ptr,
    w_desc,
    ws_ptr,
    out_desc,
    part_ptr,
    M,
    N,
    K: gl.constexpr,
    ST: gl.constexpr,
    CHUNKS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """out bf16 [M, N] = x e4m3 [M, K] w e4m3 [N, K]^T; xs int32 [M, K/128], ws int32 [N/32, K/128] scale words.

    Blocks of x_desc, w_desc, out_desc: [64, 128], [128, 128], [64, 128]. Grid (tiles, CHUNKS). CHUNKS > 1: sums of
    parts of K go to part float32 [CHUNKS, M, N] instead of out.
    """
    _release()
    WORDS: gl.constexpr = K // 128
    PER: gl.constexpr = (WORDS + CHUNKS - 1) // CHUNKS
    first = gl.program_id(1) * PER
    count = gl.minimum(PER, WORDS - first)
    tm, tn = _tile(gl.program_id(0), M, N // 128, 64, GROUP)
    m = tm * 64
    n = tn * 128
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [ST, 64, 128], x_desc.layout)
    w_s = gl.allocate_shared_memory(gl.float8e4nv, [ST, 128, 128], w_desc.layout)
    out_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    # fmt: off
    gl.warp_specialize([
        (_consume, (x_s, w_s, full, empty, out_s, xs_ptr, ws_ptr, out_desc, part_ptr, M, N, m, n, first, count,
                    ST, CHUNKS, WORDS)),
        (_load, (x_desc, w_desc, x_s, w_s, full, empty, m, n, first, count, ST)),
    ], [1], [24])
    # fmt: on
