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
        got, want = outputs(getattr(kernels, name)(*args)), outputs(op.reference(*args))
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
            assert relative(a, b) <= op.tolerance, (name, args[0].shape)


@pytest.mark.parametrize("h, few", [(96, 128), (352, 0)])
def test_boundary_slices(h: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths that end inside a tile and inside a slice; many launches with shared scratch; rows alone keep their bits.

    Codes follow from the kernel's own x exactly; x itself may differ from the reference by the order of a sum.
    """
    monkeypatch.setattr(kernels, "FEW_ROWS", few)
    args = boundary(torch.Generator().manual_seed(h), 35, h)
    got, want = kernels.hc_boundary(*args, block_rows=16), registry.OPS["hc_boundary"].reference(*args)
    for a, b, limit in zip(got[:5], want[:5], (1e-3, 1e-5, 1e-5, 1e-5, 5e-3), strict=True):
        assert relative(a, b) <= limit
    codes, scales = formats.quant_fp8(got[4])
    assert torch.equal(codes.view(torch.uint8), got[5].view(torch.uint8)) and torch.equal(scales, got[6])
    for i in (0, 34):
        monkeypatch.setattr(kernels, "FEW_ROWS", 128)
        one = kernels.hc_boundary(*(a[i : i + 1] if j < 5 else a for j, a in enumerate(args)))
        # numpy's matmul follows the place of a row in its last bit; tests/gpu/check_hyper.py compares bits
        for j, (a, b) in enumerate(zip(one, got, strict=True)):
            assert relative(a[0].float(), b[i].float()) <= (1e-6 if 1 <= j <= 3 else 0.0)
        mixed = kernels.hc_mix(got[0][i : i + 1], *args[5:8], *args[9:])
        assert all(relative(a[0], b[i]) <= 1e-6 for a, b in zip(mixed, got[1:4], strict=True))


def test_fn_is_three_bf16() -> None:
    """The split that tensor cores get is exact: top 16 bits, top 16 bits of the rest, the rest."""
    w = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 0.05

    def top(x: Tensor) -> Tensor:
        return (x.view(torch.int32) & -65536).view(torch.float32)

    high = top(w)
    middle = top(w - high)
    low = w - high - middle
    assert torch.equal(low.bfloat16().float(), low) and torch.equal(
        high.double() + middle.double() + low.double(), w.double()
    )


def test_norm_of_a_slice() -> None:
    g = torch.Generator().manual_seed(1)
    fused, w = randn(g, 5, 160), randn(g, 96)
    got = kernels.rms_norm(fused[:, 64:], w, 1e-6)
    assert relative(got, registry.OPS["rms_norm"].reference(fused[:, 64:], w, 1e-6)) < 5e-3


def test_other_stream_counts_take_the_reference() -> None:
    g = torch.Generator().manual_seed(2)
    streams, pre = randn(g, 3, 2, 64), torch.rand((3, 2), generator=g)
    assert relative(kernels.hc_collapse(streams, pre), registry.OPS["hc_collapse"].reference(streams, pre)) < 1e-3
    args = (randn(g, 3, 64), streams, pre, torch.rand((3, 2, 2), generator=g))
    assert torch.equal(kernels.hc_write(*args), registry.OPS["hc_write"].reference(*args))
