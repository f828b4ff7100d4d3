"""csrc/cuda/logits.cu without a GPU: the kernel in an emulation of a warpgroup's products, against exact scores."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.ops import indexer, records
from deepinfer.ops.common import randn

ROOT = Path(__file__).parents[2]
# A thread's part of d (+)= a b^T as the tensor core places it: rows lane / 4 and + 8 of its warp, columns
# 8 j + 2 q + e.
MMA = """
emu::Barrier named[5];
void barrier_arrive(int id) {
  emu::Barrier& b = named[id];
  if (++b.arrived == 256) b.arrived = 0, b.phase++;
}
void barrier_sync(int id) { named[id].size = 256, emu::wait(named[id]); }
uint32_t product(uint32_t a, uint32_t b) {
  uint32_t out = 0;
  for (int i = 0; i < 32; i += 16) {
    float v = __uint_as_float(a >> i << 16) * __uint_as_float(b >> i << 16);
    if (__float_as_uint(v) & 0xffff) fprintf(stderr, "a product is not exact\\n"), abort();
    out |= __float_as_uint(v) >> 16 << i;
  }
  return out;
}
template <bool ADD, int N> void mma(float (&d)[N], const uint32_t* a, uint32_t b) {
  const int quad = int(emu::me().index) % 32 / 4 * 4, q = emu::me().index % 4;
  float rows[2][16];
  for (int i = 0; i < 4; i++)
    for (int lane = 0; lane < 4; lane++) {
      uint32_t two = emu::exchange(a[i], quad + lane);
      for (int e = 0; e < 2; e++) rows[i & 1][i / 2 * 8 + 2 * lane + e] = __uint_as_float(two >> (16 * e) << 16);
    }
  for (int j = 0; j < N / 4; j++)
    for (int e = 0; e < 2; e++) {
      const int n = 8 * j + 2 * q + e;
      float column[16];
      for (int k = 0; k < 16; k++) {
        uint32_t at = ((b & 0x3fff) << 4) + n / 8 * 1024 + n % 8 * 128 + 2 * k;
        at ^= (at >> 7 & 7) << 4;
        uint16_t v;
        memcpy(&v, emu::dynamic[0].data() + at, 2);
        column[k] = __uint_as_float(uint32_t(v) << 16);
      }
      for (int r = 0; r < 2; r++) {
        float sum = 0;
        for (int k = 0; k < 16; k++) sum += rows[r][k] * column[k];
        float& to = d[4 * j + 2 * r + e];
        to = ADD ? to + sum : sum;
      }
    }
}
"""
DRIVER = """
static Args args;
template <int R, int W, bool CANDIDATES> void entry() { logits_kernel<R, W, CANDIDATES>(args); }
template <int R, int W, bool CANDIDATES> void blocks(int parts) {
  emu::second_size = parts;
  for (int y = 0; y < parts; y++)
    for (int x = 0; x * R < args.rows; x++) {
      emu::second = y;
      emu::run_cluster(x, 1, W * kThreads, 16, R * kHeads * 256 + R * kHeads * 4, entry<R, W, CANDIDATES>);
    }
}
}  // namespace
extern "C" void run(const uint32_t* q, const float* weights, const uint8_t* pool, const int32_t* table,
                    const int32_t* slots, const int32_t* visible, const int32_t* candidates, float* out,
                    long long page_stride, long long width, int rows, int table_width, int num_blocks, int block_shift,
                    int page_shift, int free, int tile, int parts) {
  args = Args{q, weights, pool, table, slots, visible, candidates, out, page_stride, width, rows, table_width,
              num_blocks, block_shift, page_shift, free};
  if (candidates) blocks<1, 4, true>(parts);
  else if (tile == 1) blocks<1, 4, false>(parts);
  else if (tile == 4) blocks<4, 4, false>(parts);
  else blocks<8, 2, false>(parts);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = (ROOT / "csrc/cuda/logits.cu").read_text()
    kernel = source[
        source.index("namespace {") : source.index("template <int R, int W, bool CANDIDATES>\ncudaError_t launch")
    ]
    cuts = (
        ("__device__ __forceinline__ uint32_t product", "// Codes J and J"),
        ("// Named barriers", "// Queries of"),
    )
    for begin, end in cuts:
        assert kernel.count(begin) == 1
        kernel = kernel[: kernel.index(begin)] + kernel[kernel.index(end) :]
    kernel = kernel.replace("namespace {\n", "namespace {\n" + MMA, 1)
    for old, new in (
        ("extern __shared__ __align__(1024) uint8_t tile[];",
         "uint8_t* tile = reinterpret_cast<uint8_t*>(emu::dynamic[0].data());"),
        ("__cvta_generic_to_shared(p)", "(const char*)p - emu::dynamic[0].data()"),
    ):  # fmt: skip
        assert kernel.count(old) == 1
        kernel = kernel.replace(old, new)
    kernel = re.sub(r"asm volatile\([^\n]*\);\n", ";\n", kernel)
    assert "asm" not in kernel
    folder = tmp_path_factory.mktemp("logits")
    header = Path(__file__).parent / "cuda_emulation.h"
    (folder / "logits.cpp").write_text(f'#define __CUDA_ARCH_FEAT_SM90_ALL 1\n#include "{header}"\n{kernel}\n{DRIVER}')
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w"]
    subprocess.run([compiler, *flags, str(folder / "logits.cpp"), "-o", str(folder / "logits.so")], check=True)
    lib = ctypes.CDLL(str(folder / "logits.so"))
    i, p, wide = ctypes.c_int, ctypes.c_void_p, ctypes.c_longlong
    lib.run.argtypes = [*[p] * 8, wide, wide, *[i] * 8]
    return lib


def run(lib: ctypes.CDLL, x: tuple[Tensor, ...], out: Tensor, entries: int, free: int, tile: int, parts: int,
        blocks: Tensor | None = None, block: int = 1) -> Tensor:  # fmt: skip
    pool, table = x[2], x[3]
    lib.run(
        *(t.data_ptr() for t in x), None if blocks is None else blocks.data_ptr(), out.data_ptr(), pool.stride(0),
        out.stride(0), out.shape[0], table.shape[1], 0 if blocks is None else blocks.shape[1], block.bit_length() - 1,
        entries.bit_length() - 1, free, tile, parts,
    )  # fmt: skip
    return out


def example(slots: list[int], visible: list[int], entries: int, width: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(entries)
    pages = 3 * width + 2
    key = randn(g, pages, entries, 128)
    key *= torch.exp2(torch.randint(-3, 3, (pages, entries, 4), generator=g)).repeat_interleave(32, 2)
    rec = records.pack_index(key)
    pool = torch.cat((rec[..., :64].flatten(1), rec[..., 64:].flatten(1)), dim=1)
    table = torch.stack([torch.randperm(pages, generator=g)[:width] for _ in range(3)]).int()
    q = records.pack_index(randn(g, len(slots), 32, 128))
    weights = torch.randn((len(slots), 32), generator=g)
    return q, weights, pool, table, torch.tensor(slots).int(), torch.tensor(visible).int()


def exact(x: tuple[Tensor, ...], row: int, entries: int) -> Tensor:
    q, weights, pool, table, slots, visible = x
    keys = indexer._keys(pool, table[int(slots[row])], int(visible[row]), 1, entries, 128)
    return indexer._scores(records.unpack_index(q[row : row + 1], 128), weights[row : row + 1], keys)[0]


@pytest.mark.parametrize("entries, parts", [(64, 1), (128, 3)])
def test_logits(library: ctypes.CDLL, entries: int, parts: int) -> None:
    """Rows alone and in tiles with runs of several slots; the same bits either way."""
    slots, visible = [0, 0, 0, 0, 1, 2, 2, 1, 1, 1], [255, 5, 61, 1, 250, 33, 129, 7, 64, 65]
    x = example(slots, visible, entries, 256 // entries)
    outs = [run(library, x, torch.full((10, 256), float("nan")), entries, 5, tile, parts) for tile in (1, 4, 8)]
    for out in outs[1:]:
        assert torch.equal(outs[0].nan_to_num(7.5), out.nan_to_num(7.5))
    for i, n in enumerate(visible):
        n = n if n > 5 else 0
        assert outs[0][i, n:].isnan().all()
        if n:
            assert torch.allclose(outs[0][i, :n], exact(x, i, entries), rtol=1e-5, atol=1e-4)


def test_candidates(library: ctypes.CDLL) -> None:
    x = example([0, 2], [200, 90], 64, 4)
    blocks = torch.tensor([[0, 3, 4, 9, 24, -1, -1, 0, 31], [1, 2, 11, 12, 13, 14, -1, -1, -1]]).int()
    out = run(library, x, torch.full((2, 72), float("nan")), 64, 0, 1, 2, blocks, 8)
    for i in range(2):
        scores = exact(x, i, 64)
        e = (blocks[i, :, None] * 8 + torch.arange(8)).flatten()
        ok = (e >= 0) & (e < scores.numel())
        want = torch.where(ok, scores[e.clamp(0, scores.numel() - 1)], float("-inf"))
        assert torch.allclose(out[i], want, rtol=1e-5, atol=1e-4)
