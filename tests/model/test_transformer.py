"""Properties of the whole model that hold bit by bit: chunks, batches, replay, page layout, image rows, drafts.

The numbers themselves are checked in test_goldens.py and test_oracle.py. Every comparison here is exact (tolerance 0),
in both numerics: a row's bits may not depend on how its request was cut into steps or on what ran beside it.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.errors import ConfigError
from deepinfer.model.checkpoint import load_checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.state import ModelState, StepInputs
from deepinfer.model.transformer import Transformer

TINY = Path(__file__).parents[1] / "data/tiny"
PAGE = 32  # small pages: edges are met often
CONFIG = ModelConfig.from_dir(TINY)
GOLDEN = load_file(TINY / "golden.safetensors")
TENSORS = load_checkpoint(TINY, CONFIG)
MODELS = {n: Transformer(CONFIG, TENSORS, GOLDEN["token_map"], numerics=n) for n in ("exact", "quantised")}
BOTH = pytest.mark.parametrize("numerics", ["exact", "quantised"])
IDS = GOLDEN["p1.ids"].int()


def new_state(numerics: str, slots: int = 3, poison: bool = True) -> ModelState:
    """Memory full of NaN or 0xFF, so that a read of something never written shows."""
    state = ModelState.allocate(CONFIG, num_slots=slots, num_pages=64, max_pages=8, page_size=PAGE, numerics=numerics)
    for s in range(1, slots):
        state.page_table[s] = torch.randperm(63, generator=torch.Generator().manual_seed(s))[:8].sort().values + 1
    taken = torch.randperm(63)[: 8 * (slots - 1)] + 1
    state.page_table[1:] = taken.view(slots - 1, 8)
    if poison:
        for pool in (*state.window, *state.draft_window, *state.latent.values(), *state.index_key.values()):
            pool.fill_(float("nan") if pool.dtype.is_floating_point else 0xFF)
        for ring in state.open_pair.values():
            ring.fill_(float("nan"))
    return state


def step(runs: list[tuple[int, int, Tensor]], floor: int = 0, keep: bool = False) -> StepInputs:
    """runs: (slot, first position, ids). `keep` drops rows below `floor` from the decoder half."""
    ids = torch.cat([r[2] for r in runs]).int()
    positions = torch.cat([torch.arange(p, p + len(t)) for _, p, t in runs]).int()
    slots = torch.cat([torch.full((len(t),), s) for s, _, t in runs]).int()
    lengths = torch.tensor([len(t) for _, _, t in runs])
    start = (lengths.cumsum(0) - lengths).repeat_interleave(lengths).int()
    kept = (positions >= floor).nonzero().squeeze(1)
    no = torch.zeros(len(ids), dtype=torch.bool)
    return StepInputs(ids, positions, slots, start, no, torch.full_like(ids, floor), kept, kept if keep else None)


def whole(numerics: str, ids: Tensor) -> Tensor:
    return MODELS[numerics].forward(step([(1, 0, ids)]), new_state(numerics)).logits


@BOTH
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_chunks_equal_the_whole(numerics: str, data: st.DataObject) -> None:
    """Any cut of a prompt, token by token included (decode is a chunk of one), gives the same logits bit by bit."""
    n = data.draw(st.integers(1, 90), label="length")
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, n - 1)), max_size=6), label="cuts") | {0, n})
    state = new_state(numerics)
    model = MODELS[numerics]
    parts = [model.forward(step([(1, a, IDS[a:b])]), state).logits for a, b in pairwise(cuts) if a < b]
    assert torch.equal(torch.cat(parts), whole(numerics, IDS[:n]))


@BOTH
def test_token_by_token(numerics: str) -> None:
    state = new_state(numerics)
    rows = [MODELS[numerics].forward(step([(1, p, IDS[p : p + 1])]), state).logits for p in range(40)]
    assert torch.equal(torch.cat(rows), whole(numerics, IDS[:40]))


@BOTH
def test_batch_neighbours_do_not_matter(numerics: str) -> None:
    """A decode row, a prefill and a second chunk in one step: each equals its run alone."""
    a, b = IDS[:70], IDS[20:100]
    state = new_state(numerics)
    model = MODELS[numerics]
    first = model.forward(step([(1, 0, a[:69]), (2, 0, b[:33])]), state).logits
    second = model.forward(step([(2, 33, b[33:]), (1, 69, a[69:])]), state).logits
    assert torch.equal(torch.cat((first[:69], second[-1:])), whole(numerics, a))
    assert torch.equal(torch.cat((first[69:], second[:-1])), whole(numerics, b))


@BOTH
@pytest.mark.parametrize("keep", [16, 17, 28, 99, 100])
def test_replay_compact_equals_mask(numerics: str, keep: int) -> None:
    """Dropping rows equals computing and ignoring them, whole or in chunks, prefill and the decode after it."""
    floor = len(IDS) - keep
    model = MODELS[numerics]
    outs = []
    for trim, cuts in (
        (True, [0, 100]),
        (False, [0, 100]),
        (True, [0, 3, floor + 5, 97, 100]),
        (True, [0, 40, 86, 100]),
    ):
        state = new_state(numerics)
        cuts = sorted({min(100, c) for c in cuts})
        parts = [model.forward(step([(1, a, IDS[a:b])], floor, trim), state).logits for a, b in pairwise(cuts)]
        parts.append(model.forward(step([(1, 100, IDS[:1])], floor), state).logits)
        outs.append(torch.cat(parts))
    assert outs[0].shape[0] == keep + 1
    for other in outs[1:]:
        assert torch.equal(outs[0], other)
    if floor == 0:
        assert torch.equal(outs[0][:-1], whole(numerics, IDS))


@BOTH
def test_short_prompt_replay_is_exact(numerics: str) -> None:
    """A prompt no longer than the window loses nothing to replay: its floor is 0."""
    ids = IDS[: CONFIG.sliding_window]
    out = MODELS[numerics].forward(step([(1, 0, ids)], 0, True), new_state(numerics))
    assert torch.equal(out.logits, whole(numerics, ids))


def test_image_rows_differ_from_text_rows() -> None:
    """Span rows take their embeddings, the image router bias and no Engram; rows before the span do not notice."""
    model = MODELS["exact"]
    ids = GOLDEN["p3.ids"].int()
    gh, gw, _, _, start, length = GOLDEN["p3.grid"].tolist()
    span = model.encode_image(GOLDEN["p3.patches"], gh, gw)
    s = step([(1, 0, ids)])
    as_text = model.forward(s, new_state("exact")).logits
    s.image_rows = torch.arange(start, start + length)
    s.is_image[s.image_rows] = True
    s.image_embeds = span
    as_image = model.forward(s, new_state("exact")).logits
    assert torch.equal(as_text[:start], as_image[:start])
    assert (as_text[start:] - as_image[start:]).abs().amax(1).min() > 1e-3
    state, parts = new_state("exact"), []  # the span may be cut anywhere
    for a, b in ((0, start + 3), (start + 3, len(ids))):
        c = step([(1, a, ids[a:b])])
        c.image_rows = torch.arange(max(a, start), min(b, start + length)) - a
        c.is_image[c.image_rows] = True
        c.image_embeds = span[max(a, start) - start : min(b, start + length) - start]
        parts.append(model.forward(c, state).logits)
    assert torch.equal(torch.cat(parts), as_image)


@BOTH
def test_drafts_of_a_batch_equal_drafts_alone(numerics: str) -> None:
    model = MODELS[numerics]
    assert model.draft is not None
    state = new_state(numerics)
    out = model.forward(step([(1, 0, IDS[:50]), (2, 0, IDS[50:63])]), state)
    i32 = lambda *v: torch.tensor(v, dtype=torch.int32)  # noqa: E731
    s = step([(1, 0, IDS[:50]), (2, 0, IDS[50:63])])
    last = torch.where(s.slots == 1, 49, 12).int()
    model.draft.write_context(out.taps, s.slots, s.positions, last, state)
    both = model.draft.propose(torch.tensor([7, 9]), i32(50, 13), i32(1, 2), i32(0, 0), state)
    for i, (anchor, pos) in enumerate(((7, 50), (9, 13))):
        alone = model.draft.propose(torch.tensor([anchor]), i32(pos), i32(i + 1), i32(0), state)
        assert torch.equal(alone.tokens[0], both.tokens[i])
        assert torch.equal(alone.logits[0], both.logits[i])
        assert torch.equal(alone.confidence[0], both.confidence[i])
    assert both.tokens.shape == (2, CONFIG.dspark_block_size)


def test_draft_choice_is_the_callers() -> None:
    model = MODELS["exact"]
    assert model.draft is not None
    state = new_state("exact")
    out = model.forward(step([(1, 0, IDS[:20])]), state)
    pos = torch.arange(20, dtype=torch.int32)
    model.draft.write_context(out.taps, torch.ones_like(pos), pos, torch.full_like(pos, 19), state)
    one = lambda v: torch.tensor([v], dtype=torch.int32)  # noqa: E731
    fixed = model.draft.propose(
        torch.tensor([5]), one(20), one(1), one(0), state, lambda logits, k: torch.tensor([k + 30])
    )
    assert fixed.tokens.tolist() == [[30, 31, 32, 33, 34]]


def test_padding_rows_touch_only_slot_and_page_zero() -> None:
    """Rows of slot 0 may run beside real ones; nothing but slot 0 and page 0 changes (B13)."""
    model = MODELS["quantised"]
    state, clean = new_state("quantised"), None
    state.page_table[0] = 0
    model.forward(step([(1, 0, IDS[:30])]), state)
    clean = [p.clone() for p in (*state.window, *state.latent.values(), *state.index_key.values())]
    model.forward(step([(0, 0, IDS[:5])]), state)
    for before, after in zip(clean, (*state.window, *state.latent.values(), *state.index_key.values()), strict=True):
        assert torch.equal(before[1:], after[1:])


def test_token_map_is_required() -> None:
    with pytest.raises(ConfigError, match="token map"):
        Transformer(CONFIG, TENSORS, None)
    with pytest.raises(ConfigError, match="512"):
        Transformer(CONFIG, TENSORS, torch.zeros(3, dtype=torch.int32))


def test_bytes_per_token_of_the_release() -> None:
    """890 B a token over all sources, 528-byte window records, 140 ring rows (spec/model.md 12, design 4)."""
    from deepinfer.model.state import ring_rows
    from deepinfer.model.synthetic import named_config

    full = named_config("full")
    assert ModelState.bytes_per_page(full) == 890 * 128 == 113_920
    assert ring_rows(full) == 140
    windows = 43 * 140 * 528
    assert ModelState.bytes_per_slot(full) == windows + 3 * 8 * 2 * 512 * 4 + 8 * 4
    tiny = ModelState.allocate(CONFIG, num_slots=2, num_pages=3, max_pages=2)
    assert sum(tiny.groups().values()) == (
        3 * ModelState.bytes_per_page(CONFIG) + 2 * ModelState.bytes_per_slot(CONFIG) + 2 * 2 * 4
    )
