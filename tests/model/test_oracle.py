"""The engine's model against the float64 oracle over random small models, prompts and schedules.

Belongs here: whole steps of `Transformer` (chunks, batches, decode, rejected rows, images, decoder replay,
drafts), in exact numerics row by row and in quantised numerics by the share of equal rows.
Does not belong here: fixed arrays (the goldens), single ops (tests/ops), the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from oracle import Oracle, Trace
from oracle_numbers import Array
from random_model import file_form, random_config, random_token_map, random_weights

from deepinfer.model.checkpoint import allocate, fill
from deepinfer.model.config import ModelConfig
from deepinfer.model.state import ModelState, StepInputs
from deepinfer.model.transformer import Transformer

TOLERANCE = {
    "exact": 1e-4,  # relative, every row, when no score gap of the prompt is below "tie"
    "tie": 1e-5,  # FP32 noise on scores of order 1 may choose otherwise below this
    # Quantised rows are equal up to FP32 sums until a first one-ulp flip, which FP8 and FP4 codes amplify to
    # 1e-2 and more for the rows after it. A misplaced rounding flips every row. Observed share: 0.77.
    "quantised equal row": 1e-5,
    "quantised equal share": 0.5,
}
PAGE = 16
GRID = (4, 5)  # patches of the test image: a padded 3 x 3 merge in both directions
EXAMPLES = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
# Prompt lengths at the edges where off-by-one faults live, and plain ones; then a number of decoded tokens.
LENGTHS = st.one_of(
    st.tuples(st.sampled_from(["window", "page", "two pages"]), st.integers(-1, 1)),
    st.tuples(st.just("plain"), st.integers(1, 45)),
)
REQUESTS = st.lists(st.tuples(LENGTHS, st.integers(0, 6)), min_size=1, max_size=3)


def rows(values: list[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(values)).to(dtype)


def row_error(got: Array, want: Array) -> Array:
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def tied(t: Trace) -> bool:
    """Some choice of the prompt hangs on FP32 noise."""
    gaps = [*t.route_gap, *t.memory.gap.values(), t.memory.candidate_gap]
    return min(float(g.min()) for g in gaps) < TOLERANCE["tie"]


@dataclass
class Request:
    """One prompt and the tokens decoded after it. `done` counts positions whose KV is final."""

    slot: int
    ids: Array
    prompt: int
    span: slice  # image span, may be empty
    floor: int = 0
    done: int = 0


@dataclass
class Chunk:
    request: Request
    ids: Array  # of positions start, start + 1, ...; those after `valid` are rejected guesses
    start: int
    valid: int

    @property
    def positions(self) -> Array:
        return np.arange(self.start, self.start + len(self.ids))

    @property
    def shown(self) -> Array:
        """Rows of this chunk whose logits mean something: accepted, and not dropped by decoder replay."""
        p = self.positions
        return (p < self.start + self.valid) & (p >= self.request.floor)


class Bench:
    """One random model twice: as the engine's and as the oracle's, with requests to run."""

    def __init__(self, seed: int, lengths: list[Any], numerics: str = "exact", *, replay: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.config = random_config(self.rng)
        weights = random_weights(self.config, self.rng)
        token_map = random_token_map(self.config, self.rng)
        self.oracle = Oracle(self.config, weights, token_map, quant=numerics == "quantised")
        self.model_config = ModelConfig.from_dict(self.config)
        tensors = allocate(self.model_config)
        fill(tensors, self.model_config, file_form(weights).items())
        self.engine = Transformer(self.model_config, tensors, torch.from_numpy(token_map), numerics=numerics)
        self.numerics, self.embeds = numerics, None
        if self.config.get("vision_config"):
            self.patches = self.rng.uniform(-1, 1, (GRID[0] * GRID[1], 3, 14, 14)).astype(np.float32)
            _, self.embeds = self.oracle.encode_image(self.patches, *GRID)
        self.requests = [self._request(i + 1, *length) for i, length in enumerate(lengths)]
        if replay:
            window = self.config["text_config"]["sliding_window"]
            for r in self.requests:
                r.floor = max(0, r.prompt - window - int(self.rng.integers(0, 4)))

    def _request(self, slot: int, length: tuple[str, int], decoded: int) -> Request:
        base = {"window": self.config["text_config"]["sliding_window"], "page": PAGE, "two pages": 2 * PAGE}
        prompt = max(1, base.get(length[0], 0) + length[1])
        ids = self.rng.integers(0, self.config["image_token_id"], prompt + decoded)
        span = slice(0, 0)
        if self.embeds is not None and prompt > len(self.embeds):
            start = int(self.rng.integers(0, prompt - len(self.embeds)))
            span = slice(start, start + len(self.embeds))
            ids[span] = self.config["image_token_id"]
        return Request(slot, ids, prompt, span)

    def trace(self, r: Request) -> Trace:
        embeds = self.embeds if r.span.stop else None
        return self.oracle.prefill(r.ids, image_embeds=embeds, floor=r.floor)

    # ---- the engine's side

    def play(self, *, masked: bool = False) -> dict[int, Array]:
        """Run all requests in random chunks and batches; slot -> logits [len(ids), vocab], NaN: not asked."""
        vocab = self.config["text_config"]["vocab_size"]
        logits = {r.slot: np.full((len(r.ids), vocab), np.nan) for r in self.requests}
        self.state = self._state()
        while waiting := [r for r in self.requests if r.done < len(r.ids)]:
            picked = [r for r in waiting if self.rng.random() < 0.7] or waiting[:1]
            chunks = [self._chunk(r) for r in self.rng.permutation(np.array(picked, dtype=object))]
            out = self.engine.forward(self._step(chunks, masked), self.state)
            flat = iter(out.logits.double().numpy())
            for chunk in chunks:
                for p in chunk.positions[chunk.shown]:
                    logits[chunk.request.slot][p] = next(flat)
                chunk.request.done += chunk.valid
            if out.taps is not None:
                self._commit_taps(chunks, out.taps, masked)
        return logits

    def _commit_taps(self, chunks: list[Chunk], taps: torch.Tensor, masked: bool) -> None:
        """Accepted rows enter the draft windows; `taps` holds the rows the decoder half ran on."""
        kept = self._kept(chunks, masked)
        accepted = np.concatenate([c.shown for c in chunks])
        taps = taps[torch.from_numpy(accepted if kept is None else accepted[kept])]
        shown = [c for c in chunks if c.shown.any()]
        if shown:
            self.engine.draft.write_context(
                taps,
                slots=rows([np.full(c.shown.sum(), c.request.slot) for c in shown]),
                positions=rows([c.positions[c.shown] for c in shown]),
                run_last=rows([np.full(c.shown.sum(), c.positions[c.shown][-1]) for c in shown]),
                state=self.state,
            )

    def _kept(self, chunks: list[Chunk], masked: bool) -> Array | None:
        """Mask of the rows the decoder half runs on; None: all of them."""
        if masked or not any(c.request.floor for c in chunks):
            return None
        return np.concatenate([c.positions >= c.request.floor for c in chunks])

    def _state(self) -> ModelState:
        pages = [-(-(len(r.ids) + 8) // PAGE) for r in self.requests]
        state = ModelState.allocate(
            self.model_config,
            num_slots=len(pages) + 1,
            num_pages=sum(pages) + 1,
            max_pages=max(pages),
            page_size=PAGE,
            numerics=self.numerics,
        )
        free = list(self.rng.permutation(np.arange(1, sum(pages) + 1)))
        for r, count in zip(self.requests, pages, strict=True):
            state.page_table[r.slot, :count] = torch.tensor([int(free.pop()) for _ in range(count)])
        return state

    def _chunk(self, r: Request) -> Chunk:
        """Some prompt rows, or one decoded row; with drafts a verified block whose last rows are rejected."""
        rest = r.prompt - r.done
        if rest > 0:
            n = min(rest, int(self.rng.integers(1, 20)))
            return Chunk(r, r.ids[r.done : r.done + n], r.done, n)
        drafts = self.config["text_config"]["dspark_block_size"]
        valid = min(len(r.ids) - r.done, 1 + int(self.rng.integers(0, drafts + 1)))
        rejected = self.rng.integers(0, self.config["image_token_id"], 1 + drafts - valid) if drafts else []
        ids = np.concatenate([r.ids[r.done : r.done + valid], rejected]).astype(np.int64)
        return Chunk(r, ids, r.done, valid)

    def _step(self, chunks: list[Chunk], masked: bool) -> StepInputs:
        size = [len(c.ids) for c in chunks]
        start = np.cumsum([0, *size[:-1]])
        image = [self._is_image(c) for c in chunks]
        kept = self._kept(chunks, masked)
        at = [c.positions[i] - c.request.span.start for c, i in zip(chunks, image, strict=True)]
        embeds = [self.embeds[i] for i in at if len(i)]
        return StepInputs(
            ids=rows([c.ids for c in chunks]),
            positions=rows([c.positions for c in chunks]),
            slots=rows([np.full(n, c.request.slot) for c, n in zip(chunks, size, strict=True)]),
            run_start=rows([np.full(n, s) for n, s in zip(size, start, strict=True)]),
            is_image=rows(image, torch.bool),
            window_floor=rows([np.full(n, c.request.floor) for c, n in zip(chunks, size, strict=True)]),
            logit_rows=rows([c.shown for c in chunks], torch.bool).nonzero()[:, 0],
            kept=None if kept is None else torch.from_numpy(kept).nonzero()[:, 0],
            image_rows=rows(image, torch.bool).nonzero()[:, 0] if embeds else None,
            image_embeds=rows(embeds, torch.float32) if embeds else None,
        )

    def _is_image(self, c: Chunk) -> Array:
        p, span = c.positions, c.request.span
        return (p >= span.start) & (p < span.stop)

    # ---- comparison

    def compare_logits(self, logits: dict[int, Array], traces: dict[int, Trace]) -> float:
        """Worst row error; every row that should have logits has them, and no other."""
        worst = 0.0
        for slot, t in traces.items():
            has = ~np.isnan(logits[slot][:, 0])
            assert (np.flatnonzero(has) == t.positions).all()
            worst = max(worst, float(row_error(logits[slot][has], t.logits).max()))
        return worst

    def compare_drafts(self, traces: dict[int, Trace]) -> float:
        """Worst row error of the draft after the last row of each request, fed with the oracle's tokens."""
        anchors = self.rng.integers(0, self.config["image_token_id"], len(self.requests))
        drafts = [
            self.oracle.draft(traces[r.slot], len(r.ids) - 1, int(a))
            for r, a in zip(self.requests, anchors, strict=True)
        ]
        tokens = torch.from_numpy(np.stack([d.tokens for d in drafts]))
        out = self.engine.draft.propose(
            anchors=torch.from_numpy(anchors),
            start=rows([[len(r.ids)] for r in self.requests]),
            slots=rows([[r.slot] for r in self.requests]),
            floor=rows([[r.floor] for r in self.requests]),
            state=self.state,
            choose=lambda logits, k: tokens[:, k],
        )
        want = np.stack([np.column_stack([d.logits, d.confidence]) for d in drafts])
        got = torch.cat([out.logits, out.confidence[..., None]], -1).double().numpy()
        return float(row_error(got, want).max())


def run_exact(seed: int, lengths: list[Any], *, replay: bool = False, masked: bool = False) -> None:
    bench = Bench(seed, lengths, replay=replay)
    traces = {r.slot: bench.trace(r) for r in bench.requests}
    assume(not any(map(tied, traces.values())))
    assert bench.compare_logits(bench.play(masked=masked), traces) < TOLERANCE["exact"]
    if bench.engine.draft is not None:
        assert bench.compare_drafts(traces) < TOLERANCE["exact"]


@EXAMPLES
@given(st.integers(0, 2**31), REQUESTS)
def test_chunks_batches_decode_and_drafts(seed: int, lengths: list[Any]) -> None:
    run_exact(seed, lengths)


@EXAMPLES
@given(st.integers(0, 2**31), REQUESTS, st.booleans())
# A block of 6 with 4-grams: 9 look-back ids must survive a rejected block (6 rejected rows, the row itself, 2 before).
@example(6, [(("window", 1), 6)], False)
def test_decoder_replay(seed: int, lengths: list[Any], masked: bool) -> None:
    run_exact(seed, lengths, replay=True, masked=masked)


def test_quantised_rows_are_equal_until_a_flip() -> None:
    errors = []
    for seed in range(16):
        bench = Bench(seed, [(("window", 1), 3), (("plain", 9), 2)], "quantised")
        logits = bench.play()
        errors += [row_error(logits[r.slot], bench.trace(r).logits) for r in bench.requests]
    assert np.mean(np.concatenate(errors) < TOLERANCE["quantised equal row"]) > TOLERANCE["quantised equal share"]


def test_vision_tower_and_span() -> None:
    for seed, grid in enumerate([(1, 1), (3, 6), (4, 5), (7, 2)]):
        bench = next(b for b in (Bench(100 * seed + i, []) for i in range(100)) if b.embeds is not None)
        patches = bench.rng.uniform(-1, 1, (grid[0] * grid[1], 3, 14, 14)).astype(np.float32)
        got = bench.engine.encode_image(torch.from_numpy(patches), *grid)
        _, want = bench.oracle.encode_image(patches, *grid)
        assert row_error(got.double().numpy(), want).max() < TOLERANCE["exact"]
