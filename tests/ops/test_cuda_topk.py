"""csrc/cuda/topk.cu without a GPU: the kernel in an emulation of a cluster, against a stable sort."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.ops import indexer

ROOT = Path(__file__).parents[2]
DRIVER = """
static Args args;
template <int C> void entry() { topk_kernel<C, 256>(args); }
template <int C> void rows(int m) {
  size_t held = std::max(C * args.few, args.many + 256 * 4 * kLoads);
  for (int r = 0; r < m; r++) emu::run_cluster(r * C, C, 256, sizeof(Shared), held * sizeof(Entry), entry<C>);
}
}  // namespace
extern "C" void run(int c, int few, int many, const float* scores, long long stride, int m, int width,
                    const int32_t* visible, int unit, const int32_t* blocks, int num_blocks, int block, int32_t* out,
                    int k) {
  args = Args{scores, visible, blocks, out, stride, width, unit, num_blocks, block, k, few, many};
  if (c == 1) rows<1>(m);
  else if (c == 2) rows<2>(m);
  else if (c == 4) rows<4>(m);
  else rows<8>(m);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = (ROOT / "csrc/cuda/topk.cu").read_text()
    # append is in assembly
    put = "Entry e = {__float_as_uint(v), at}; memcpy(emu::dynamic[emu::me().block].data() + to, &e, 8), to += 8;"
    source = re.sub(
        r'asm volatile\(\s*"{ .reg .pred p; setp.gt.*?"memory"\);', f"if (v > bound) {{ {put} }}", source, flags=re.S
    )
    kernel = source[source.index("namespace cg") : source.index("template <int C, int T>\ncudaError_t launch")]
    for old, new in (
        ('asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));', "t = threadIdx.x;"),
        ("__cvta_generic_to_shared(p)", "(const char*)p - emu::dynamic[emu::me().block].data()"),
        ("extern __shared__ __align__(16) uint8_t memory[];",
         "char* memory = emu::dynamic[emu::me().block].data();"),
        ("__shared__ __align__(16) Shared s;",
         "Shared& s = *reinterpret_cast<Shared*>(emu::shared[emu::me().block].data());"),
        ('asm volatile("griddepcontrol.launch_dependents;\\n griddepcontrol.wait;" ::: "memory");', ""),
    ):  # fmt: skip
        assert kernel.count(old) == 1
        kernel = kernel.replace(old, new)
    folder = tmp_path_factory.mktemp("topk")
    header = Path(__file__).parent / "cuda_emulation.h"
    (folder / "topk.cpp").write_text(f'#include "{header}"\n{kernel}\n{DRIVER}')
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w"]
    subprocess.run([compiler, *flags, str(folder / "topk.cpp"), "-o", str(folder / "topk.so")], check=True)
    lib = ctypes.CDLL(str(folder / "topk.so"))
    i, p = ctypes.c_int, ctypes.c_void_p
    lib.run.argtypes = [i, i, i, p, ctypes.c_longlong, i, i, p, i, p, i, i, p, i]
    return lib


def run(
    lib: ctypes.CDLL, c: int, x: Tensor, k: int, visible: Tensor | None, unit: int, blocks: Tensor | None, spare: int
) -> Tensor:
    out = torch.full((x.shape[0] + 2, k), -77, dtype=torch.int32)
    lib.run(
        c, k + spare // 2, k + spare, x.data_ptr(), x.stride(0), x.shape[0], x.shape[1],
        None if visible is None else visible.data_ptr(), unit,
        None if blocks is None else blocks.data_ptr(), 0 if blocks is None else blocks.shape[1], 8,
        out[1:].data_ptr(), k,
    )  # fmt: skip
    assert (out[0] == -77).all() and (out[-1] == -77).all()
    return out[1:-1]


def data(g: torch.Generator, kind: str, m: int, n: int) -> Tensor:
    x = torch.randn((m, -(-n // 4) * 4), generator=g)[:, :n]
    match kind:
        case "ties":
            return x.mul_(2).round_().div_(2)
        case "equal":
            x.zero_()[:, ::3] = -0.0
        case "holes":
            x[torch.rand(x.shape, generator=g) < 0.9] = float("-inf")
        case "narrow":
            x.abs_().mul_(1e-6).add_(1)
        case "ends":
            x[:, 5], x[:, 6] = float("inf"), -3e38
            x[:, 8] = float("-inf")
        case "rising":  # every step beats all before
            x.copy_(x.sort(dim=1).values)
        case "zeros":  # the k-th score is -0 or 0 or just below
            x.clamp_(max=0).mul_(1e-45)
    return x


@pytest.mark.parametrize("c", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "holes", "narrow", "ends", "rising", "zeros"])
def test_against_stable_sort(library: ctypes.CDLL, c: int, kind: str) -> None:
    g = torch.Generator().manual_seed(c)
    # steps are 4096 scores; small buffers are cut often
    for m, n, k, unit, spare in ((2, 2990, 512, 1, 2000), (2, 4100 * min(c, 2) + 4201, 33, 1, 60), (2, 200, 7, 8, 0)):
        x = data(g, kind, m, n)
        visible = torch.tensor([n * unit, n * unit * 2 // 3, n * unit // 2 + 1][:m]).int()
        got = run(library, c, x, k, visible, unit, None, spare)
        lengths = (visible + unit - 1) // unit
        want = indexer._top(x.masked_fill(torch.arange(n) >= lengths.unsqueeze(1), float("-inf")), k)
        assert torch.equal(got, want), (m, n, k)
    x = data(g, kind, 2, 1600)
    blocks = torch.stack([torch.randperm(999, generator=g)[:200].sort().values for _ in range(2)]).int()
    got, want = run(library, c, x, 64, None, 1, blocks, 100), indexer._top(x, 64)
    entries = blocks.gather(1, want.clamp_min(0).long() // 8) * 8 + want % 8
    assert torch.equal(got, torch.where(want < 0, want, entries))


def test_short_rows(library: ctypes.CDLL) -> None:
    """Rows of at most k scores are chosen without a look at the scores."""
    x, visible = torch.full((5, 64), float("nan")), torch.tensor([0, -1, 1, 9, 10]).int()
    for c in (1, 4):
        got = run(library, c, x, 10, visible, 1, None, 128)
        assert got.tolist() == [[*range(max(n, 0))] + [-1] * (10 - max(n, 0)) for n in visible.tolist()]
