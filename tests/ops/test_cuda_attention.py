"""csrc/cuda/attention.cu without a GPU: its source in an emulation of barriers, clusters and wgmma, against the
reference. Under several schedules, so that a tile read too early or overwritten too soon shows.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.ops import records, registry

ROOT = Path(__file__).parents[2]
DRIVER = """
static Args args;
template <int SPLIT> void entry() { attention_kernel<SPLIT>(args); }
template <int SPLIT> void blocks(int sms) {
  emu::grid.x = SPLIT == 1 ? min(args.count, sms) : args.count * SPLIT;
  for (unsigned i = 0; i < emu::grid.x; i += SPLIT)
    emu::run_cluster_sm90(i, SPLIT, kThreads, sizeof(Shared), entry<SPLIT>);
}
}  // namespace
extern "C" void run(const void* q, const uint8_t* fresh, const uint8_t* ring, const int32_t* slots,
                    const int32_t* positions, const int32_t* rows, const int32_t* first, const int32_t* floor,
                    const float* sink, const uint8_t* pool, const int32_t* selected, const int32_t* table, void* out,
                    float scale2, int count, int ring_rows, int table_width, int entries, int window, int block,
                    int page_shift, int split, int sms, int eager, int slow) {
  args = Args{(const __nv_bfloat16*)q, fresh, ring, slots, positions, rows, first, floor, sink, pool, selected, table,
              (__nv_bfloat16*)out, scale2, count, ring_rows, table_width, entries, window, block, page_shift};
  emu::eager = eager, emu::slow = slow;
  if (split == 1) blocks<1>(sms);
  else if (split == 2) blocks<2>(sms);
  else if (split == 4) blocks<4>(sms);
  else blocks<8>(sms);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = (ROOT / "csrc/cuda/attention.cu").read_text()
    kernel = source[source.index("namespace {") : source.index("template <int SPLIT>\ncudaError_t launch")]
    shared = "extern __shared__ uint8_t memory[];"
    assert kernel.count(shared) == 1
    kernel = kernel.replace(shared, "char* memory = emu::memory(emu::me().block);")
    folder = tmp_path_factory.mktemp("attention")
    header = Path(__file__).parent / "sm90_emulation.h"
    (folder / "attention.cpp").write_text(f'#include "{header}"\n{kernel}\n{DRIVER}')
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-w"]
    subprocess.run([compiler, *flags, str(folder / "attention.cpp"), "-o", str(folder / "attention.so")], check=True)
    lib = ctypes.CDLL(str(folder / "attention.so"))
    i, p = ctypes.c_int, ctypes.c_void_p
    lib.run.argtypes = [*[p] * 13, ctypes.c_float, *[i] * 11]
    return lib


def emulate(
    lib: ctypes.CDLL, args: tuple[Any, ...], split: int, sms: int = 4, eager: int = 0, slow: int = -1
) -> Tensor:
    q, new, ring, *per_row, sink, pool, selected, table, scale, window, ratio, page = args
    out = torch.full_like(q, float("nan"))
    k = 0 if selected is None else selected.shape[1]
    tensors = [q, new, ring, *per_row, sink, ring if pool is None else pool, table if selected is None else selected]
    numbers = (q.shape[0], ring.shape[1], table.stride(0), k, window, 0, (page // ratio).bit_length() - 1)
    scale2 = scale / math.log(2) * 2.0**64
    lib.run(*(t.data_ptr() for t in (*tensors, table, out)), scale2, *numbers, split, sms, eager, slow)
    return out


def problem(seed: int, t: int, k: int, first: int) -> tuple[Any, ...]:
    """Pages at scattered ids, unused entries between used ones, unwritten memory of 0xFF, a floor inside the window."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.arange(t, dtype=torch.int32)
    pos, slot, pages = rows + first, 2, 40
    table = torch.full((3, 30), -1, dtype=torch.int32)
    table[slot] = torch.randperm(pages, generator=g)[:30].to(torch.int32)
    pool = torch.full((pages, 64, 288), 255, dtype=torch.uint8)
    pool[table[slot].long()] = records.pack_latent(torch.randn(30, 64, 512, generator=g).bfloat16())
    selected = torch.full((t, k), -1, dtype=torch.int32)
    for i in range(t):
        seen = min(max(k - 3 * i, 0), int(pos[i] + 1) // 2)
        selected[i, torch.randperm(k, generator=g)[:seen]] = torch.randperm(int(pos[i] + 1) // 2, generator=g)[
            :seen
        ].int()
    return (
        torch.randn(t, 64, 512, generator=g).bfloat16(),
        records.pack_window(torch.randn(t, 512, generator=g).bfloat16()),
        records.pack_window(torch.randn(3, 140, 512, generator=g).bfloat16()),
        torch.full_like(rows, slot), pos, rows, torch.full_like(rows, first), torch.full_like(rows, first - 40),
        torch.randn(64, generator=g), pool if k else None, selected if k else None, table, 512**-0.5, 128, 2, 128,
    )  # fmt: skip


def close(got: Tensor, want: Tensor) -> bool:
    return float((got.float() - want.float()).norm() / want.float().norm()) < 4e-3


def test_rows_of_one_block_under_every_schedule(library: ctypes.CDLL) -> None:
    args = problem(1, 2, 130, 1500)
    want = registry.OPS["attention"].reference(*args)
    first = emulate(library, args, 1, sms=1)
    assert close(first, want)
    for eager, slow in ((1, -1), (0, 0), (1, 1), (0, 2)):
        assert torch.equal(emulate(library, args, 1, 1, eager, slow), first)


@pytest.mark.parametrize("split", [2, 4, 8])
def test_a_row_over_a_cluster(library: ctypes.CDLL, split: int) -> None:
    args = problem(2, 1, 512, 1500)
    assert close(emulate(library, args, split, slow=split % 3), registry.OPS["attention"].reference(*args))


def test_window_layers_and_rows_without_keys(library: ctypes.CDLL) -> None:
    args = list(problem(3, 2, 0, 90))
    assert close(emulate(library, tuple(args), 2), registry.OPS["attention"].reference(*args))
    args[7] = args[4] + 1  # floor above the row itself
    assert (emulate(library, tuple(args), 1) == 0).all()


def test_draft_blocks(library: ctypes.CDLL) -> None:
    g = torch.Generator().manual_seed(4)
    block = records.pack_window(torch.randn(6, 512, generator=g).bfloat16())
    ring = records.pack_window(torch.randn(3, 140, 512, generator=g).bfloat16())
    slots, start, floor = (torch.tensor(x, dtype=torch.int32) for x in ([1, 2], [200, 9], [120, 0]))
    q, sink = torch.randn(6, 64, 512, generator=g).bfloat16(), torch.randn(64, generator=g)
    want = registry.OPS["block_attention"].reference(q, block, ring, slots, start, floor, sink, 512**-0.5, 128)
    tensors = (q, block, ring, slots, start, slots, slots, floor, sink, ring, slots, slots)
    out = torch.full_like(q, float("nan"))
    numbers = (6, 140, 1, 0, 128, 3, 0)
    scale2 = 512**-0.5 / math.log(2) * 2.0**64
    library.run(*(t.data_ptr() for t in (*tensors, out)), scale2, *numbers, 1, 3, 0, -1)
    assert close(out, want)
