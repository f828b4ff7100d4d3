"""Router, SwiGLU and experts in Triton's interpreter; the Hopper layout by a torch emulation of its arithmetic."""

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

from deepinfer.ops import formats, moe, registry
from deepinfer.ops.common import fp4_weight, randn
from deepinfer.ops.triton import experts as kernels


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def example(g: torch.Generator, t: int, e: int, h: int, i: int, k: int) -> tuple:
    weights = (*fp4_weight(g, e, 2 * i, h), *fp4_weight(g, e, h, i))
    ids = torch.stack([torch.randperm(e, generator=g)[:k].sort().values for _ in range(t)]).int()
    return (*formats.quant_fp8(randn(g, t, h)), ids, torch.rand((t, k), generator=g), *weights, 10.0)


@pytest.mark.parametrize("name", ["experts", "router", "swiglu"])
def test_op_inputs(name: str) -> None:
    """Every example of the op against its reference; a row alone has the bits of the row in its batch."""
    op = registry.OPS[name]
    for args in op.inputs(torch.Generator().manual_seed(3)):
        got, want = getattr(kernels, name)(*args), op.reference(*args)
        for a, b in zip(*(o if isinstance(o, tuple) else (o,) for o in (got, want)), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            if a.dtype is torch.int32:
                assert torch.equal(a, b)
            else:
                assert relative(a, b) <= op.tolerance, (name, args[0].shape)


def test_experts_rows_are_independent() -> None:
    args = example(torch.Generator().manual_seed(0), 9, 8, 192, 96, 3)
    full = kernels.experts(*args)
    assert relative(full, moe.experts(*args)) < 5e-3
    one = kernels.experts(*(a[4:5] for a in args[:4]), *args[4:])
    assert torch.equal(one[0], full[4])


@pytest.mark.parametrize(
    "pairs_per_row, rows, experts, nt", [(6, 20, 384, 8), (2, 100, 4, 16), (6, 9, 8, 8), (3, 400, 8, 64)]
)
def test_items_cover_every_pair_once(pairs_per_row: int, rows: int, experts: int, nt: int) -> None:
    g = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(experts, generator=g)[:pairs_per_row] for _ in range(rows)]).int()
    ids[3, 1] = -1  # an expert of another rank: nobody's pair
    items, pairs = kernels._route(ids, experts, nt)
    flat, seen = ids.flatten(), []
    for word, start in items.tolist():
        if word < 0:
            continue
        e, count = word & 0xFFFF, word >> 16
        assert 1 <= count <= nt
        mine = pairs[start : start + count].tolist()
        assert all(flat[p] == e for p in mine)
        seen += mine
    assert sorted(seen) == [p for p in range(flat.numel()) if flat[p] >= 0]


def test_router_ties_and_images() -> None:
    g = torch.Generator().manual_seed(1)
    x, w = randn(g, 5, 64), torch.zeros(300, 64).bfloat16()
    w[200:] = randn(g, 100, 64)
    bias, bias_vl = torch.zeros(300), torch.randn(300, generator=g)
    args = (x, w, bias, bias_vl, torch.tensor([True, False, True, False, False]), 6, 2.5)
    got, want = kernels.router(*args), moe.router(*args)
    assert torch.equal(got[0], want[0]) and relative(got[1], want[1]) < 1e-5


def test_fragment_order_keeps_the_values() -> None:
    """pack, then the kernel's decoding (words -> PRMT bytes -> e4m3 -> row scale) gives the stored weights, exactly."""
    from deepinfer.ops.triton import experts_sm90 as hopper

    g = torch.Generator().manual_seed(2)
    code, scale = fp4_weight(g, 2, 128, 512)
    scale = (scale.int() + torch.randint(-4, 5, scale.shape, generator=g)).to(torch.uint8)
    want = formats.dequant_fp4(code, scale)
    packed = hopper.pack(code, scale)
    assert packed[0].shape == code.shape and packed[1].shape == scale.shape
    assert torch.equal(hopper.unpack(*packed), want)
    # wide rows: groups far below the largest are rounded on its grid, empty groups do not count
    scale[0, :, 3] -= 14
    code[1, :, :16], scale[1, :, 0] = 0, 255
    want = formats.dequant_fp4(code, scale).nan_to_num(0.0)
    got = hopper.unpack(*hopper.pack(code, scale))
    largest = want.abs().amax(-1, keepdim=True)
    assert ((got - want).abs() <= 1.3e-4 * largest).all() and torch.equal(got[1], want[1])


def test_prepared_w13_pairs_gate_and_up() -> None:
    """A tile of 64 rows is 32 channels, gate and up 8 rows apart; scales follow their rows."""
    from deepinfer.ops.triton import experts_sm90 as hopper

    g = torch.Generator().manual_seed(4)
    i, h = 256, 256
    weights = (*fp4_weight(g, 3, 2 * i, h), *fp4_weight(g, 3, h, i))
    prepared = kernels.fragment_order(*weights, batch=2)
    assert [(p.shape, p.dtype) for p in prepared] == [(w.shape, w.dtype) for w in weights]
    rows = hopper.unpack(*prepared[:2]).view(3, i // 32, 4, 2, 8, h)
    gate_up = formats.dequant_fp4(*weights[:2])
    assert torch.equal(rows[:, :, :, 0].reshape(3, i, h), gate_up[:, :i])
    assert torch.equal(rows[:, :, :, 1].reshape(3, i, h), gate_up[:, i:])
    assert torch.equal(hopper.unpack(*prepared[2:]), formats.dequant_fp4(*weights[2:]))


def test_hopper_constants() -> None:
    """The exponent trick: byte + 8 r of the table is value * 2^(r - 6) in e4m3, for every r the layout uses."""
    values = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    for r in range(1, 13):
        low, high = (r * 0x08080800 + 0x0C080000) & 0xFFFFFFFF, (r * 0x08080808 + 0x1C181410) & 0xFFFFFFFF
        table = torch.tensor([(w >> (8 * b)) & 255 for w in (low, high) for b in range(4)], dtype=torch.uint8)
        assert torch.equal(table.view(torch.float8_e4m3fn).float(), values * 2.0 ** (r - 6))


def run_ptx(text: str, inputs: dict[str, int], outputs: int) -> list[int]:
    """The instructions of a decoder, executed on its input registers -> $0..$(outputs - 1)."""
    regs = dict(inputs)
    body = text[text.index(";") + 1 :].rstrip(" }")  # after the declaration
    for line in filter(None, (part.strip() for part in body.split(";"))):
        name, operands = line.split(" ", 1)
        to, *rest = (o.strip() for o in operands.split(","))
        v = [regs[o] if o in regs else int(o, 0) for o in rest]
        match name.split(".")[0]:
            case "and":
                out = v[0] & v[1]
            case "or":
                out = v[0] | v[1]
            case "shl":
                out = v[0] << v[1]
            case "shr":
                out = v[0] >> v[1]
            case "mad":
                out = v[0] * v[1] + v[2]
            case "prmt":
                table = [(x >> (8 * b)) & 255 for x in v[:2] for b in range(4)]
                assert v[2] & 0x8888 == 0  # sign replication is not wanted
                out = sum(table[(v[2] >> (4 * b)) & 7] << (8 * b) for b in range(4))
            case _:
                raise AssertionError(line)
        regs[to] = out & 0xFFFFFFFF
    return [regs[f"${i}"] for i in range(outputs)]


def test_decoder_assembly() -> None:
    """Instructions of one lane against the stored weights, for the three decoders.

    e4m3: registers are (kh, r8) words of group 0, then of group 1; of one row without scales. f16: (group, kh, h, r8)
    pairs of k, where the expanded activations are in the same order.
    """
    from deepinfer.ops.triton import experts_one_sm90 as one
    from deepinfer.ops.triton import experts_prefill_sm90 as prefill
    from deepinfer.ops.triton import experts_sm90 as hopper

    g = torch.Generator().manual_seed(6)
    code, scale = fp4_weight(g, 1, 64, 256)
    scale = (scale.int() + torch.randint(-4, 5, scale.shape, generator=g)).to(torch.uint8)
    want = formats.dequant_fp4(code, scale)[0]
    words = hopper.pack(code, scale)[0].view(torch.int32).view(4, 4, 8, 4, 4)  # step, w, g, q, word
    scales = hopper.pack(code, scale)[1].view(torch.int32).view(4, 8, 4)  # w, g, step
    for step, w, lane in ((0, 0, 0), (1, 2, 13), (3, 3, 31), (2, 1, 22)):
        row, q = lane // 4, lane % 4
        first, mine = int(scales[w, row, 0]), int(scales[w, row, step]) & 0xFFFFFFFF
        base = [((first >> (8 * r8 + 4)) & 15) | (((first >> (8 * r8 + 20)) & 15) << 4) for r8 in range(2)]
        code_words = [int(x) & 0xFFFFFFFF for x in words[step, w, row, q]]
        inputs = {f"${8 + i}": v for i, v in enumerate(code_words)}
        for text, last in ((hopper._decode_asm(), mine), (one._decode_asm(), 0x0C080400)):
            for i, register in enumerate(run_ptx(text, {**inputs, "$12": last}, 8)):
                group, kh, r8 = i // 4, (i // 2) % 2, i % 2
                exponent = (mine >> (16 * group + 8 * r8)) & 15 if text == one._decode_asm() else 0
                bytes_ = torch.tensor([(register >> (8 * b)) & 255 for b in range(4)], dtype=torch.uint8)
                values = bytes_.view(torch.float8_e4m3fn).float() * 2.0 ** (base[r8] + exponent + 6 - 127)
                k = 64 * step + 32 * group + 16 * kh + 4 * q
                assert torch.equal(values, want[16 * w + 8 * r8 + row, k : k + 4])
        inputs = {f"${16 + i}": v for i, v in enumerate(code_words)} | {"$20": mine}
        for i, register in enumerate(run_ptx(prefill._decode_asm(), inputs, 16)):
            group, kh, h, r8 = i // 8, (i // 4) % 2, (i // 2) % 2, i % 2
            halves = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.int16)
            values = halves.view(torch.float16).float() * 2.0 ** (base[r8] + 14 - 127)
            place = 8 * h + 2 * q  # of the fragment, in 16 k
            k = 64 * step + 32 * group + 16 * kh + torch.tensor([order(place), order(place + 1)])
            assert torch.equal(values, want[16 * w + 8 * r8 + row, k])


def order(place: int) -> int:
    """k of a place in the 16 k of a fragment, as `expand` writes activations."""
    h, q, j = place // 8, place // 2 % 4, place % 2
    return 4 * q + 2 * h + j


def test_expanded_activations() -> None:
    """f16 times the row's factor is the activation, exactly, in the fragment's order of k."""
    from deepinfer.ops.triton import experts_prefill_sm90 as prefill

    g = torch.Generator().manual_seed(7)
    x, scale = formats.quant_fp8(randn(g, 5, 96) * torch.exp2(torch.arange(96) // 32 * -4.0))
    out, base = torch.empty((5, 96), dtype=torch.float16), torch.empty(5)
    prefill.expand[(5,)](x, scale.view(torch.uint8), out, base, 96, 128, False)
    permutation = torch.tensor([16 * i + order(p) for i in range(6) for p in range(16)])
    assert torch.equal(out.float() * base[:, None], formats.dequant_fp8(x, scale)[:, permutation])
