"""Engram hashes over steps: however a request is cut, its table rows equal those of the whole sequence (B61, B63).

Exact integers, no tolerance. The whole-sequence hash is checked against the goldens in test_goldens.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.model.checkpoint import load_checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.engram import hash_rows
from deepinfer.model.state import ModelState, StepInputs
from deepinfer.model.transformer import Transformer

TINY = Path(__file__).parents[1] / "data/tiny"
CONFIG = ModelConfig.from_dir(TINY)
GOLDEN = load_file(TINY / "golden.safetensors")
MODEL = Transformer(CONFIG, load_checkpoint(TINY, CONFIG), GOLDEN["token_map"])
IDS = GOLDEN["p1.ids"][:30].int()
IMAGE = torch.zeros(30, dtype=torch.bool)
IMAGE[12:17] = True  # n-grams break inside and behind an image span


def state() -> ModelState:
    return ModelState.allocate(CONFIG, num_slots=3, num_pages=2, max_pages=1)


def rows_of(runs: list[tuple[int, int, int]], memory: ModelState) -> list[Tensor]:
    """Table rows [T, layers, columns] of a step with runs (slot, first position, end), one tensor per run."""
    ids = torch.cat([IDS[a:b] for _, a, b in runs])
    positions = torch.cat([torch.arange(a, b) for _, a, b in runs]).int()
    slots = torch.cat([torch.full((b - a,), s) for s, a, b in runs]).int()
    counts = torch.tensor([b - a for _, a, b in runs])
    start = (counts.cumsum(0) - counts).repeat_interleave(counts).int()
    image = torch.cat([IMAGE[a:b] for _, a, b in runs])
    none = torch.zeros(0, dtype=torch.int64)
    step = StepInputs(ids, positions, slots, start, image, torch.zeros_like(ids), none)
    assert MODEL.engram is not None
    tables = hash_rows(MODEL.ops, CONFIG, MODEL.engram, ids, MODEL.prepare(step), memory.history)
    return list(torch.stack(tables, 1).split(counts.tolist()))


WHOLE = rows_of([(1, 0, 30)], state())[0]


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_request_split_at_any_position(cut: int) -> None:
    memory = state()
    first = rows_of([(1, 0, cut)], memory)
    second = rows_of([(1, cut, 30)], memory)
    assert torch.equal(torch.cat((*first, *second)), WHOLE)


def test_two_requests_that_take_turns() -> None:
    """Each step carries a row of one and three rows of the other, in changing order."""
    memory, a, b = state(), [], []
    for i in range(10):
        runs = [(1, i, i + 1), (2, 3 * i, 3 * i + 3)]
        parts = rows_of(runs if i % 2 else runs[::-1], memory)
        one, three = parts if i % 2 else parts[::-1]
        a.append(one)
        b.append(three)
    assert torch.equal(torch.cat(a), WHOLE[:10])
    assert torch.equal(torch.cat(b), WHOLE)


def test_rejected_drafts_leave_no_trace() -> None:
    """A verified block of other ids is overwritten by the committed ones, for every accepted length."""
    block = CONFIG.dspark_block_size
    for accepted in range(block + 1):
        memory = state()
        rows_of([(1, 0, 18)], memory)
        guesses = IDS.clone()
        IDS[18 + accepted : 18 + block + 1] = 7
        try:
            rows_of([(1, 18, 18 + block + 1)], memory)
        finally:
            IDS.copy_(guesses)
        again = rows_of([(1, 18 + accepted, 30)], memory)[0]
        assert torch.equal(again, WHOLE[18 + accepted :]), accepted


def test_a_padded_id_is_the_pad_id() -> None:
    """Rows of slot 0 with id -1 break the n-gram as an image does: no index from a table's end, nobody's history."""
    memory = state()
    first = rows_of([(1, 0, 9)], memory)
    ids, one = torch.tensor([-1, -1], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    step = StepInputs(
        ids, torch.arange(2, dtype=torch.int32), one, one, torch.zeros(2) > 0, one, torch.zeros(0, dtype=torch.int64)
    )
    assert MODEL.engram is not None
    tables = hash_rows(MODEL.ops, CONFIG, MODEL.engram, ids, MODEL.prepare(step), memory.history)
    sizes = torch.tensor(CONFIG.engram_num_embeddings)
    assert all(int(t.min()) >= 0 and int(t.max()) < n for t, n in zip(tables, sizes, strict=True))
    assert torch.equal(torch.cat((*first, *rows_of([(1, 9, 30)], memory))), WHOLE)
