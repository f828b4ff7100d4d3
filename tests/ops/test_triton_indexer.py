"""Index scores and selection in Triton's interpreter; instructions of the decoder by emulation."""

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

from deepinfer.ops import formats, indexer, records, registry
from deepinfer.ops.common import randn
from deepinfer.ops.triton import indexer as kernels


def example(
    g: torch.Generator, slots: list[int], visible: list[int], heads: int, dim: int, entries: int, width: int
) -> tuple:
    pages = 3 * width + 2
    rec = records.pack_index(randn(g, pages, entries, dim))
    pool = torch.cat((rec[..., : dim // 2].flatten(1), rec[..., dim // 2 :].flatten(1)), dim=1)
    table = torch.stack([torch.randperm(pages, generator=g)[:width] for _ in range(3)]).int()
    q = records.pack_index(randn(g, len(slots), heads, dim))
    weights = torch.randn((len(slots), heads), generator=g)
    return (q, weights, pool, table, torch.tensor(slots).int(), torch.tensor(visible).int(), 2, 2 * entries)


@pytest.mark.parametrize("name", ["index_topk", "index_topk_publish", "index_topk_blocks"])
def test_op_inputs(name: str) -> None:
    op = registry.OPS[name]
    for args in op.inputs(torch.Generator().manual_seed(3)):
        got, want = getattr(kernels, name)(*args), op.reference(*args)
        for a, b in zip(*(o if isinstance(o, tuple) else (o,) for o in (got, want)), strict=True):
            assert a.dtype is torch.int32 and torch.equal(a, b)


@pytest.mark.parametrize("few", [64, 0])
@pytest.mark.parametrize("heads, dim, entries", [(3, 128, 16), (2, 64, 12)])
def test_logits(few: int, heads: int, dim: int, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both record forms, rows alone and in tiles with runs of several slots, against exact scores."""
    monkeypatch.setattr(kernels, "FEW_ROWS", few)
    slots, visible = [0, 0, 0, 1, 2, 2, 1, 1, 1, 1, 2], [5, 61, 62, 0, 33, 1, 7, 50, 51, 52, 70]
    args = example(torch.Generator().manual_seed(1), slots, visible, heads, dim, entries, 6)
    q, weights, pool, table, s, v = args[:6]
    out = torch.full((len(slots), 6 * entries), float("nan"))
    kernels.logits(q, weights, pool, table, s, v, entries, out, 1)
    for i, (slot, n) in enumerate(zip(slots, visible, strict=True)):
        if n <= 1:
            continue  # not needed
        keys = indexer._keys(pool, table[slot], n, 2, 2 * entries, dim)
        want = indexer._scores(records.unpack_index(q[i : i + 1], dim), weights[i : i + 1], keys)[0]
        assert torch.allclose(out[i, :n], want, rtol=1e-5, atol=1e-5) and out[i, n:].isnan().all()
        alone = torch.empty((1, 6 * entries))
        kernels.logits(q[i : i + 1], weights[i : i + 1], pool, table, s[i : i + 1], v[i : i + 1], entries, alone, 1)
        assert torch.equal(alone[0, :n], out[i, :n])


def test_two_levels_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three ops at D = 128 with a workspace of a few rows."""
    monkeypatch.setattr(kernels, "WORKSPACE", 4 * 96 * 8)
    monkeypatch.setattr(kernels, "FEW_ROWS", 0)
    slots, visible = [1] * 9 + [2, 0, 2], [40, 41, 42, 43, 44, 45, 46, 47, 48, 96, 3, 0]
    args = example(torch.Generator().manual_seed(2), slots, visible, 4, 128, 16, 6)
    assert torch.equal(kernels.index_topk(*args, 9), indexer.index_topk(*args, 9))
    got, want = kernels.index_topk_publish(*args, 9, 5, 4), indexer.index_topk_publish(*args, 9, 5, 4)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    read = kernels.index_topk_blocks(*args, 9, want[1], 4), indexer.index_topk_blocks(*args, 9, want[1], 4)
    assert torch.equal(*read)


def test_select_ties_and_ends() -> None:
    g = torch.Generator().manual_seed(4)
    scores = torch.randint(-3, 4, (7, 700), generator=g).float() / 2
    scores[1], scores[2] = 0.0, -0.0
    scores[3, 5:] = float("-inf")
    scores[4, ::2] = float("-inf")
    scores[5] = torch.randn(700, generator=g)
    scores[6, 300] = float("inf")
    lengths = torch.tensor([700, 650, 700, 700, 700, 333, 301]).int()
    for k in (1, 64, 400):
        out = torch.full((7, k), 12345, dtype=torch.int32)
        kernels.select(scores, out, lengths, 1, None, 1)
        hidden = torch.arange(700) >= lengths.unsqueeze(1)
        want = indexer._top(scores.masked_fill(hidden, float("-inf")), k)
        for row in range(7):
            n = int(lengths[row])
            assert torch.equal(out[row], want[row]) or n <= k, (row, k)
            if n <= k:  # everything is chosen without a look at the scores
                assert out[row].tolist() == [*range(n)] + [-1] * (k - n)


def run_ptx(text: str, regs: dict[str, int]) -> dict[str, int]:
    """Executes the decoder; bf16x2 products through torch."""

    def halves(x: int) -> Tensor:
        return torch.tensor([x & 0xFFFF, x >> 16], dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).double()

    for line in filter(None, (p.strip() for p in text.split("m, s;", 1)[1].rstrip("} ").split(";"))):
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
            case "prmt":
                table = [(x >> (8 * b)) & 255 for x in v[:2] for b in range(4)]
                out = sum(table[(v[2] >> (4 * b)) & 7] << (8 * b) for b in range(4))
            case "mul":
                low, high = (halves(v[0]) * halves(v[1])).bfloat16().view(torch.int16).tolist()
                out = (low & 0xFFFF) | (high & 0xFFFF) << 16
            case _:
                raise AssertionError(line)
        regs[to] = out & 0xFFFFFFFF
    return regs


def test_decoder_assembly() -> None:
    """Code i of both words, times their scales, in register i; every code occurs."""
    words, scales = (0x76543210, 0x89ABCDEF), (126, 113)  # exponents of the scales
    factor = (scales[0] + 127) << 7 | (scales[1] + 127) << 23
    regs = run_ptx(kernels.DECODE_ASM.value, {"$8": words[0], "$9": words[1], "$10": factor})
    for i in range(8):
        for half, (word, scale) in enumerate(zip(words, scales, strict=True)):
            bits = torch.tensor((regs[f"${i}"] >> (16 * half)) & 0xFFFF, dtype=torch.int32).to(torch.uint16)
            value = float(bits.view(torch.bfloat16))
            assert value == formats.E2M1_VALUES[(word >> (4 * i)) & 15] * 2.0 ** (scale - 126)
