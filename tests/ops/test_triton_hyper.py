"""Norm, RoPE and hyper-connection kernels in Triton's interpreter."""

# ruff: noqa: E402
from __future__ import annotations

import os
import sys

WITHOUT = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if WITHOUT:
    pytest.skip("triton was imported without its interpreter", allow_module_level=True)

from deepinfer.ops import formats, registry
from deepinfer.ops.common import randn
from deepinfer.ops.triton import hyper as kernels
from deepinfer.ops.triton import hyper_sm90, norm

NAMES = ["rms_norm", "rope", "hc_mix", "hc_collapse", "hc_write", "hc_boundary"]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def outputs(x: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


def boundary(g: torch.Generator, t: int, h: int) -> tuple:
    state = (torch.rand((t, 4), generator=g), torch.rand((t, 4, 4), generator=g), torch.rand((t, 4), generator=g))
    fn = torch.randn((24, 4 * h), generator=g) * h**-0.5
    weights = (fn, torch.randn(24, generator=g), torch.rand(3, generator=g), randn(g, h))
    return (randn(g, t, h), randn(g, t, 4, h), *state, *weights, 20, 1e-6, 1e-20)


@pytest.mark.parametrize("name", NAMES)
def test_op_inputs(name: str) -> None:
    op = registry.OPS[name]
    for args in op.inputs(torch.Generator().manual_seed(3)):
        got, want = (
            outputs(getattr(norm if name in ("rms_norm", "rope") else kernels, name)(*args)),
            outputs(op.reference(*args)),
        )
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
            assert relative(a, b) <= op.tolerance, (name, args[0].shape)


@pytest.mark.parametrize("plan", [None, kernels.Plan("few", 32, 1, 1, 32), kernels.Plan("any", 32, 1, 4, 2)])
def test_boundary_forms(plan: kernels.Plan | None) -> None:
    """A width that ends inside a tile; every form of the first half. Codes follow from the kernel's own x exactly; x
    itself may differ from the reference by the order of a sum, coefficients by a rounding of a stream.
    """
    args = boundary(torch.Generator().manual_seed(5), 7, 352)
    got, want = kernels.hc_boundary(*args, plan=plan), registry.OPS["hc_boundary"].reference(*args)
    for a, b, limit in zip(got[:5], want[:5], (1e-3, 1e-4, 1e-4, 1e-4, 5e-3), strict=True):
        assert relative(a, b) <= limit
    mixed = registry.OPS["hc_mix"].reference(got[0], *args[5:8], *args[9:])
    assert all(relative(a, b) <= 1e-5 for a, b in zip(got[1:4], mixed, strict=True))
    codes, scales = formats.quant_fp8(got[4])
    assert torch.equal(codes.view(torch.uint8), got[5].view(torch.uint8)) and torch.equal(scales, got[6])
    for i in (0, 6):
        one = kernels.hc_boundary(*(a[i : i + 1] if j < 5 else a for j, a in enumerate(args)), plan=plan)
        # numpy's matmul follows the place of a row in its last bit; tests/gpu/check_hyper.py compares bits
        for j, (a, b) in enumerate(zip(one, got, strict=True)):
            assert relative(a[0].float(), b[i].float()) <= (1e-6 if 1 <= j <= 3 else 0.0)


def bf16(x: float) -> int:
    return int(torch.tensor(x).bfloat16().view(torch.int16)) & 0xFFFF


def test_operands_of_the_hopper_block() -> None:
    """The PTX of two columns, run by hand: operand numbers, order of the halves, rounding."""
    g = torch.Generator().manual_seed(4)
    y, s = randn(g, 2), randn(g, 4, 2)
    post, comb, pre = torch.rand(4, generator=g), torch.rand((4, 4), generator=g), torch.rand(4, generator=g)
    words = [bf16(float(p[0])) | bf16(float(p[1])) << 16 for p in (y, *s)]
    numbers = [float(v) for v in (*post, *comb.flatten(), *pre) for _ in range(2)]
    held: dict[str, float] = {f"${i + 7}": v for i, v in enumerate(words + numbers)}
    text, operands = hyper_sm90._pair()
    assert len(operands.split(",")) == 7 + len(words) + len(numbers)

    def value(word: float) -> float:
        return float(torch.tensor(int(word), dtype=torch.int64).int().view(torch.float32))

    def single(x: float) -> float:
        return float(torch.tensor(x, dtype=torch.float64).float())

    for line in text.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        a = [held.get(x, x) for x in rest.split(", ")[1:]] if name and name[0] != "." else []
        to = rest.split(",")[0]
        if name == "shl.b32":
            held[to] = value((int(a[0]) << 16) & 0xFFFFFFFF)
        elif name == "and.b32":
            held[to] = value(int(a[0]) & 0xFFFF0000)
        elif name == "mul.rn.f32":
            held[to] = single(a[0] * a[1])
        elif name == "fma.rn.f32":
            held[to] = single(a[0] * a[1] + a[2])
        elif name == "cvt.rn.bf16x2.f32":
            held[to] = bf16(a[1]) | bf16(a[0]) << 16
        elif name == "mov.b32":
            held[to] = a[0]
    streams = (post[:, None] * y.float() + comb.t() @ s.float()).bfloat16()
    row = (pre @ streams.float()).bfloat16()
    for e in range(2):
        for i in range(4):
            got = value(((int(held[f"${i}"]) >> 16 * e) & 0xFFFF) << 16)
            assert abs(got - float(streams[i, e])) <= 2**-7 * abs(got)
        got = value(((int(held["$4"]) >> 16 * e) & 0xFFFF) << 16)
        assert abs(got - float(row[e])) <= 2**-7 * abs(got)
        assert abs(held[f"${5 + e}"] - float(streams[:, e].float().square().sum())) < 0.05


def test_columns_meet_their_weights() -> None:
    """The order of k that `project` gives streams and fn: the same column of the same stream, each once."""
    _, s, c = torch.meshgrid(torch.arange(8), torch.arange(2), torch.arange(32), indexing="ij")
    name = (s * 32 + c).permute(0, 2, 1)  # [row, column, stream]
    low = torch.stack((name, name + 1000), dim=3)
    rows = low.reshape(8, 4, 2, 2, 2, 2, 2).permute(3, 1, 5, 2, 4, 6, 0).reshape(64, 16)
    fn = torch.arange(64).expand(32, 64).reshape(32, 2, 4, 2, 2, 2).permute(0, 4, 2, 1, 3, 5).reshape(32, 64)
    assert torch.equal(rows[:, :8], fn[0].unsqueeze(1).expand(64, 8)) and torch.equal(rows[:, 8:], rows[:, :8] + 1000)
    # the two registers of a product, k and k + 32, are neighbours in a 16-byte load
    assert torch.equal(fn[0, 32:], fn[0, :32] + 2) and sorted(fn[0].tolist()) == list(range(64))


def test_norm_of_a_slice() -> None:
    g = torch.Generator().manual_seed(1)
    fused, w = randn(g, 5, 160), randn(g, 96)
    got = norm.rms_norm(fused[:, 64:], w, 1e-6)
    assert relative(got, registry.OPS["rms_norm"].reference(fused[:, 64:], w, 1e-6)) < 5e-3


def test_other_stream_counts_take_the_reference() -> None:
    g = torch.Generator().manual_seed(2)
    streams, pre = randn(g, 3, 2, 64), torch.rand((3, 2), generator=g)
    assert relative(kernels.hc_collapse(streams, pre), registry.OPS["hc_collapse"].reference(streams, pre)) < 1e-3
    args = (randn(g, 3, 64), streams, pre, torch.rand((3, 2, 2), generator=g))
    assert torch.equal(kernels.hc_write(*args), registry.OPS["hc_write"].reference(*args))
