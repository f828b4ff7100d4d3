"""Engram kernels in Triton's interpreter."""

# ruff: noqa: E402
from __future__ import annotations

import os
import sys

WITHOUT = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

pytest.importorskip("triton")
if WITHOUT:
    pytest.skip("triton was imported without its interpreter", allow_module_level=True)

from deepinfer.ops import formats, registry
from deepinfer.ops.common import randn
from deepinfer.ops.triton import engram as kernels

NAMES = ["engram_lookback", "engram_rows", "engram_gather", "engram_gate"]


@pytest.mark.parametrize("name", NAMES)
def test_op_inputs(name: str) -> None:
    op = registry.OPS[name]
    for args in op.inputs(torch.Generator().manual_seed(3)):
        a, b = getattr(kernels, name)(*args), op.reference(*args)
        assert a.shape == b.shape and a.dtype == b.dtype
        if name == "engram_gate":
            assert (a.double() - b.double()).norm() <= op.tolerance * b.double().norm()
        else:
            assert torch.equal(a, b)


def test_hashes_of_the_release() -> None:
    """24 columns, 63-bit products, primes above 16 million."""
    g = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 99092, (11, 4), generator=g, dtype=torch.int32)
    multipliers = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
    primes = 16_000_057 + 2 * torch.arange(24)
    args = (tokens, multipliers, primes, torch.cat((torch.zeros(1, dtype=torch.int64), primes.cumsum(0)[:-1])))
    assert torch.equal(kernels.engram_rows(*args), registry.OPS["engram_rows"].reference(*args))


def test_gather_is_exact() -> None:
    """Every finite e4m3 code times every scale that keeps it a normal bf16."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(7, 1)
    codes[codes & 0x7F == 0x7F] = 0
    scale = torch.tensor([20, 64, 110, 127, 140, 200, 240], dtype=torch.uint8).unsqueeze(1).repeat(1, 8)
    rows = torch.tensor([[0, 6, 3], [5, 2, 1], [4, 4, 0]])
    for wide in (True, False):
        args = (rows, codes.view(torch.float8_e4m3fn), scale, wide)
        got, want = kernels.engram_gather(*args), registry.OPS["engram_gather"].reference(*args)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))  # negative zeros too


def test_tables_that_a_kernel_cannot_read_are_refused() -> None:
    table, _ = formats.quant_fp8(randn(torch.Generator(), 4, 32))
    with pytest.raises(ValueError, match="pin it"):
        kernels.visible(table, torch.device("cuda:0"))


def test_gate_rows_are_independent() -> None:
    """Few rows take one a program, many take four: the same bits."""
    g = torch.Generator().manual_seed(8)
    t, h = 66, 64
    args = (randn(g, t, 4, h), randn(g, t, 5 * h), randn(g, 4, h), randn(g, 4, h), torch.arange(t) % 5 == 0, 1e-20)
    full = kernels.engram_gate(*args)
    for i in (0, 63, 65):
        one = kernels.engram_gate(args[0][i : i + 1], args[1][i : i + 1], *args[2:4], args[4][i : i + 1], 1e-20)
        assert torch.equal(one[0], full[i])
