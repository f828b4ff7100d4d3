"""Linears and the quantiser in Triton's interpreter; what the Hopper kernels assume about layouts, by emulation."""

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
from deepinfer.ops import linear as reference
from deepinfer.ops.common import fp8_weight, randn
from deepinfer.ops.triton import linear as kernels


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", ["quant_fp8", "linear_fp8", "linear_dequant", "linear"])
def test_op_inputs(name: str) -> None:
    op = registry.OPS[name]
    for args in op.inputs(generator(3)):
        got, want = getattr(kernels, name)(*args), op.reference(*args)
        for a, b in zip(*(o if isinstance(o, tuple) else (o,) for o in (got, want)), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            if name == "quant_fp8":
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            else:
                assert relative(a, b) <= op.tolerance


def test_quant_fp8_at_powers_of_two() -> None:
    """Scales step exactly where the reference's do: amax at, just below and just above 448 * 2^k, and at the floor."""
    top = torch.tensor([448.0, 446.0, 450.0, 0.875, 0.87, 0.88, 1e-5, 0.0, 3e38, 1e-4])
    x = (torch.rand((10, 32), generator=generator()) * top[:, None] * 0.9).bfloat16()
    x[:, 7] = -top.bfloat16()
    got, want = kernels.quant_fp8(x), formats.quant_fp8(x)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))


@pytest.mark.parametrize("chunks", [1, 4])
def test_fp8_rows_are_independent(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    monkeypatch.setattr(kernels, "fp8_chunks", lambda n, k: chunks)
    g = generator(1)
    x, w = formats.quant_fp8(randn(g, 70, 256)), fp8_weight(g, 160, 256)
    full = kernels.linear_fp8(*x, *w)
    assert relative(full, reference.linear_fp8(*x, *w)) < 1e-3
    for row in (0, 69):
        assert torch.equal(kernels.linear_fp8(x[0][row : row + 1], x[1][row : row + 1], *w)[0], full[row])


@pytest.mark.parametrize("bias, out_f32", [(False, True), (True, False)])
def test_linear_chunks(bias: bool, out_f32: bool) -> None:
    """Small N: chunks over programs, and chunks in one program, give the same bits."""
    g = generator(2)
    w = randn(g, 40, 2048)
    b = randn(g, 40) if bias else None
    x = randn(g, 70, 2048)
    assert kernels.bf16_chunks(40, 2048) == 8
    full = kernels.linear(x, w, b, out_f32)
    assert relative(full, reference.linear(x, w, b, out_f32)) < 1e-3
    for row in (0, 69):
        assert relative(kernels.linear(x[row : row + 1], w, b, out_f32)[0], full[row]) < 1e-3  # numpy's dots: not bits


def test_linear_dequant_many_rows_by_groups() -> None:
    g = generator(4)
    x, w = randn(g, 66, 2 * 64), fp8_weight(g, 2 * 256, 64)
    want = reference.linear_dequant(x, *w, 2)
    assert relative(kernels.linear_dequant(x, *w, 2), want) < 1e-3
    assert relative(kernels.linear_dequant(x[:5], *w, 2), want[:5]) < 1e-3


def test_row_views_of_a_fused_weight() -> None:
    g = generator(5)
    x, (w, s) = formats.quant_fp8(randn(g, 3, 96)), fp8_weight(g, 192, 96)
    full = kernels.linear_fp8(*x, w, s)
    assert torch.equal(kernels.linear_fp8(*x, w[128:], s[4:]), full[:, 128:])
    assert torch.equal(kernels.linear_fp8(*x, w[:128], s[:4]), full[:, :128])


def test_chunks_agree_between_fused_and_sliced_weights() -> None:
    for n, k in ((1792, 5120), (1280, 5120), (512, 5120)):
        assert kernels.fp8_chunks(n, k) == 4
    for n, k in ((32768, 1280), (4096, 1280), (25600, 6144)):
        assert kernels.fp8_chunks(n, k) == 1
    assert kernels.fp8_chunks(5120, 2304) == 2 and kernels.fp8_chunks(5120, 8192) == 4


def test_every_plan_promotes_with_64_rows_on_the_m_side() -> None:
    """Narrower fp8 tiles have other bits (h200_facts.md 5); tiles must divide the weights."""
    for n, k in ((1792, 5120), (512, 5120), (32768, 1280), (4096, 1280), (5120, 8192), (4608, 5120), (5120, 2304)):
        for m in (1, 8, 9, 16, 17, 32, 33, 64, 65, 200, 512, 8192, 100_000):
            plan = kernels._fp8_plan(m, n, k)
            assert (plan["BN"] if plan["FLIP"] else plan["BM"]) >= 64
            assert n % plan["BN"] == 0
            assert not plan["SPLIT"] or kernels.fp8_chunks(n, k) > 1
            per = k // 128 // kernels.fp8_chunks(n, k)
            assert per * 128 * kernels.fp8_chunks(n, k) == k


def test_parts_of_k_cover_k() -> None:
    """The last part of a split is never empty, and few tiles are split to about a block an SM."""
    for n, k in ((1792, 5120), (5120, 8192), (4608, 5120), (5120, 2304), (25600, 6144), (4096, 1280)):
        for m in (33, 64, 65, 200, 511):
            chunks, words = kernels.many_chunks(m, n, k), k // 128
            per = -(-words // chunks)
            assert (chunks - 1) * per < words <= chunks * per
            assert chunks == 1 or chunks * -(-m // 64) * (n // 128) <= 132


@pytest.mark.parametrize("rows", [1, 32])
def test_widened_codes_keep_their_value(rows: int) -> None:
    g = generator(6)
    if rows == 1:
        code, scale = formats.quant_fp8(randn(g, 37, 96))
        want = formats.dequant_fp8(code, scale)
    else:
        code, scale = fp8_weight(g, 64, 96)
        want = formats.dequant_fp8_block(code, scale)
    assert torch.equal(kernels.widen(code, scale, rows).float(), want)


def widen(code: Tensor) -> Tensor:
    """The bit placement of linear_sm90: e4m3 byte -> bf16 bits of value * 2^-120."""
    pair = code.to(torch.int32) << 8  # PRMT puts a byte above a zero byte
    bits = ((pair >> 4) & 0x07F0) | (pair & 0x8000)
    return (bits - ((bits & 0x8000) << 1)).to(torch.int16).view(torch.bfloat16)


def test_widened_codes_are_exact() -> None:
    code = torch.arange(256, dtype=torch.uint8)
    code = code[(code & 0x7F) != 0x7F]
    scale = torch.arange(80, 127, dtype=torch.int32)  # E8M0 codes of weights
    power = ((scale + 120) << 7).to(torch.int16).view(torch.bfloat16)
    got = (widen(code)[:, None] * power[None, :]).float()
    want = code.view(torch.float8_e4m3fn).float()[:, None] * formats.e8m0_value(scale.to(torch.uint8))[None, :]
    assert torch.equal(got, want)


def test_scale_words_hold_their_codes() -> None:
    """_power: 2^(code - 127) of byte i of an int32 word, without a sign from the top byte."""
    codes = torch.randint(1, 255, (64, 4), generator=generator(), dtype=torch.uint8)
    word = codes.view(torch.int32)[:, 0]
    for i in range(4):
        bits = ((word << (23 - 8 * i)) if i < 3 else (word >> 1)) & 0x7F800000
        assert torch.equal(bits.view(torch.float32), formats.e8m0_value(codes[:, i]))
