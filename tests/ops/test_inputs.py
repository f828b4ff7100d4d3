"""Every op is tried with the inputs that break kernels: no rows, one, two, an odd number, 64; far pages; rows without
keys; more than 256 experts; lengths 0 and 1. The example inputs of an op feed every test of every provider, on the CPU,
in Triton's interpreter and on a GPU, so what they cover is checked here once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.ops import registry

# op -> the argument whose first dimension counts rows, where it is not the first one
ROWS = {
    **dict.fromkeys(("ring_write", "page_write", "index_page_write", "kv_global_write", "index_key_write"), 1),
    **dict.fromkeys(("record_prompt", "record_output", "accept"), 1),
    "block_attention": 3,  # requests
}
MANY = {"block_attention": 13, "sample": 7, "survivors": 7, "accept": 7, "markov_step": 7}  # others 33 at least
FAR = 1 << 15  # page ids beyond int16


def examples(name: str) -> list[dict[str, Any]]:
    op = registry.OPS[name]
    names = [a.name for a in op.overload._schema.arguments]
    return [dict(zip(names, args, strict=True)) for args in op.inputs(torch.Generator().manual_seed(11))]


def with_argument(argument: str) -> Iterator[str]:
    for name, op in registry.OPS.items():
        if argument in [a.name for a in op.overload._schema.arguments]:
            yield name


@pytest.mark.parametrize("name", registry.names())
def test_numbers_of_rows(name: str) -> None:
    rows = {next(iter_at(e, ROWS.get(name, 0))).shape[0] for e in examples(name)}
    assert {0, 1, 2} <= rows, rows
    assert any(n % 2 and n > 2 for n in rows), rows
    assert max(rows) >= MANY.get(name, 33), rows
    if name in MAIN:
        assert max(rows) >= 64, rows


MAIN = (
    *("attention", "index_topk", "index_topk_publish", "index_topk_blocks", "linear", "linear_fp8", "linear_dequant"),
    *("experts", "router", "swiglu", "quant_fp8", "rms_norm", "rope", "hc_mix", "hc_write", "hc_collapse"),
    *("hc_boundary", "engram_lookback", "engram_rows", "engram_gather", "engram_gate", "vision_attention"),
    *("page_write", "index_page_write"),
)


def iter_at(example: dict[str, Any], index: int) -> Iterator[Tensor]:
    yield list(example.values())[index]


@pytest.mark.parametrize("name", list(with_argument("page_table")))
def test_far_pages(name: str) -> None:
    assert max(int(e["page_table"].max()) for e in examples(name)) >= FAR


def test_pages_are_used_once() -> None:
    """A page belongs to one slot, as the allocator gives them: writes of two slots never meet."""
    for name in ("page_write", "index_page_write"):
        for e in examples(name):
            used = e["page_table"][e["slots"].long(), e["positions"].long() // e["page_size"]]
            for page in used.unique():
                assert e["slots"][used == page].unique().numel() == 1


def test_rows_without_keys() -> None:
    """Attention: rows with no key, one window key, one selected entry. Indexer: rows that see 0 and 1 entries."""
    seen: set[tuple[int, int]] = set()
    for e in examples("attention"):
        window = (e["positions"] - torch.maximum(e["floor"], e["positions"] - e["window"] + 1) + 1).clamp_min(0)
        chosen = torch.zeros_like(window) if e["selected"] is None else (e["selected"] >= 0).sum(1)
        seen |= set(zip(window.tolist(), chosen.tolist(), strict=True))
    assert {(0, 0), (1, 0), (0, 1)} <= seen
    for name in ("index_topk", "index_topk_publish", "index_topk_blocks"):
        for e in examples(name):
            lengths = set(e["visible"].tolist())
        assert {0, 1, e["k"] - 1, e["k"], e["k"] + 1} <= lengths, name  # the last example has them all
    contexts = {int(n) for e in examples("block_attention") for n in e["start"] - e["floor"]}
    assert {0, 1} <= contexts


def test_more_experts_than_a_byte_counts() -> None:
    assert max(e["weight"].shape[0] for e in examples("router")) > 256
    (wide,) = [e for e in examples("experts") if e["w13"].shape[0] > 256]
    assert int(wide["ids"].max()) > 256
    few = [e["ids"] for e in examples("experts") if len(e["ids"]) > 2]
    assert any(ids.unique().numel() == ids.shape[1] for ids in few)  # all rows on the same experts
