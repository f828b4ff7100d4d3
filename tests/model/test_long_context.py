"""Positions up to 1,048,575 over a sparse cache: 8,192 logical pages on a few physical ones with high numbers.

Belongs here: whole steps whose page table, selection and byte offsets are those of a full context, against the float64
oracle (whose memory is gathered with int64 numpy indices) and between op providers. Does not belong here: real long
prompts.
The pools span more than 2^31 bytes and are never touched but for the mapped pages: the system backs nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from oracle import Memory, Oracle
from oracle_numbers import Array
from random_model import file_form, random_config, random_token_map, random_weights
from torch import Tensor

from deepinfer import ops
from deepinfer.model.checkpoint import allocate, fill
from deepinfer.model.config import ModelConfig
from deepinfer.model.state import ModelState, StepInputs
from deepinfer.model.transformer import Transformer
from deepinfer.ops import records

TOLERANCE = {
    "exact": 1e-4,  # relative, every row
    "attention": 1e-3,  # native against reference (tests/ops/test_native.py)
}
PAGE, CONTEXT = 128, 1 << 20
LOGICAL = CONTEXT // PAGE
SPAN = 2**31  # the mapped pages of ratio-1 pools lie beyond this many bytes
LOW = CONTEXT - 4  # the sequence's first row, as after a prefix hit: nothing older is in its rings
HIT = LOW + 2  # rows below write page 0
MARKED = (0, 1, 4097, LOGICAL - 2, LOGICAL - 1)  # logical pages with index keys; entries of all others score 0
BULK = 3  # physical pages that stand for all others


def draw(seed: int) -> dict[str, Any]:
    """A config with few layers, both ratios, a reader of candidate blocks and Engram; small heads and keys."""
    while True:
        config = random_config(np.random.default_rng(seed))
        t = config["text_config"]
        ratios = [t["compress_ratios"][i] for i in t["kv_source_layer_ids"]]
        readers = sum(i > t["candidate_source_layer_id"] for i in t["index_source_layer_ids"])
        if sorted(ratios) == [1, 2] and readers == 1 and t["num_hidden_layers"] <= 6 and t["engram_layer_ids"]:
            break
        seed += 1
    small = {"index_n_heads": 2, "index_head_dim": 32, "head_dim": 32, "qk_rope_head_dim": 16}
    t |= small | {"max_position_embeddings": CONTEXT}
    return config


class Case:
    """A random model over a cache whose pages hold random entries, and the same entries as the oracle's memory."""

    def __init__(self, numerics: str) -> None:
        rng = np.random.default_rng(0)
        raw = draw(0)
        weights, token_map = random_weights(raw, rng), random_token_map(raw, rng)
        self.quant = numerics == "quantised"
        self.oracle = Oracle(raw, weights, token_map)
        self.config = ModelConfig.from_dict(raw)
        tensors = allocate(self.config)
        fill(tensors, self.config, file_form(weights).items())
        self.model = Transformer(self.config, tensors, torch.from_numpy(token_map), numerics=numerics)
        self.ids = rng.integers(3, 50, CONTEXT)
        self.state = ModelState.allocate(
            self.config, num_slots=3, num_pages=1, max_pages=LOGICAL, page_size=PAGE, numerics=numerics
        )
        kind = np.arange(LOGICAL, dtype=np.int64) % BULK  # which of the mapped pages a logical page is
        kind[list(MARKED)] = BULK + np.arange(len(MARKED))
        page_bytes = min(p[0].numel() * p.element_size() for p in self._pools(1))
        physical = SPAN // page_bytes + 1 + rng.permutation(BULK + len(MARKED))
        for pools in (self.state.latent, self.state.index_key):
            for source, pool in pools.items():
                pools[source] = torch.empty((int(physical.max()) + 1, *pool.shape[1:]), dtype=pool.dtype)
        self.state.page_table[2] = torch.from_numpy(physical[kind])
        assert all(int(physical.min()) * p.stride(0) * p.element_size() > SPAN for p in self._pools(1))
        self.kind = kind
        self.entries = {source: self._fill(rng, source, physical) for source in self.state.latent}

    def _pools(self, ratio: int) -> list[Tensor]:
        sources = [s.index for s in self.config.layers if s.owns_kv and s.ratio == ratio]
        return [pools[i] for i in sources for pools in (self.state.latent, self.state.index_key)]

    def _fill(self, rng: np.random.Generator, source: int, physical: Array) -> tuple[Tensor, Tensor]:
        """Random latents and index keys [mapped pages, entries, D] of one source, written to its pools."""
        entries = PAGE // self.config.layers[source].ratio
        c, pages = self.config, torch.from_numpy(physical)
        latent = torch.from_numpy(rng.standard_normal((len(physical), entries, c.head_dim))).bfloat16()
        key = torch.from_numpy(rng.standard_normal((len(physical), entries, c.index_head_dim))).bfloat16()
        key[:BULK] = 0
        if self.quant:
            rec = records.pack_index(key)
            half = c.index_head_dim // 2
            self.state.latent[source][pages] = records.pack_latent(latent)
            self.state.index_key[source][pages] = torch.cat((rec[..., :half].flatten(1), rec[..., half:].flatten(1)), 1)
        else:
            self.state.latent[source][pages], self.state.index_key[source][pages] = latent.float(), key.float()
        return latent, key

    def past(self) -> Memory:
        """The cache as the oracle sees it (exact numerics): all entries by position."""
        dense = lambda t: t.flatten(1).double().numpy()[self.kind].reshape(-1, t.shape[2])  # noqa: E731
        latent, key = ({source: dense(e[i]) for source, e in self.entries.items()} for i in (0, 1))
        return Memory(CONTEXT, latent=latent, index_key=key)

    def remember(self) -> None:
        back = torch.arange(LOW - self.config.engram_max_ngram_size + 1, LOW)
        self.state.remember(torch.full_like(back, 2), back, self._ids(back))

    def _ids(self, positions: Tensor) -> Tensor:
        return torch.from_numpy(self.ids)[positions].int()

    def step(self, start: int, end: int) -> Tensor:
        """Logits of positions start..end-1."""
        p = torch.arange(start, end)
        same = lambda v: torch.full((len(p),), v, dtype=torch.int32)  # noqa: E731
        inputs = StepInputs(
            ids=self._ids(p),
            positions=p.int(),
            slots=same(2),
            run_start=same(0),
            is_image=torch.zeros(len(p), dtype=torch.bool),
            window_floor=same(0),
            logit_rows=torch.arange(len(p)),
            kv_slots=torch.where(p < HIT, 0, 2).int(),
            ring_floor=same(LOW),
        )
        return self.model.forward(inputs, self.state).logits

    def play(self) -> Array:
        """A chunk, then one decode row at the last position there is."""
        self.remember()
        return torch.cat((self.step(LOW, CONTEXT - 1), self.step(CONTEXT - 1, CONTEXT))).double().numpy()


class Both:
    """Ops of a model: every one that computes with pages also runs on the other provider, on the same inputs."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second
        self.chosen: list[Tensor] = []  # what every selection returned

    def __getattr__(self, name: str) -> Any:
        if name in ("index_topk", "index_topk_publish", "index_topk_blocks"):
            return lambda *args: self._select(name, args)
        if name in ("page_write", "index_page_write"):
            return lambda *args: self._write(name, args)
        return self._attend if name == "attention" else getattr(self.first, name)

    def _select(self, name: str, args: Any) -> Any:
        got, other = getattr(self.first, name)(*args), getattr(self.second, name)(*args)
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, other)), strict=True):
            assert torch.equal(a, b), name
            self.chosen.append(a)
        return got

    def _write(self, name: str, args: Any) -> None:
        """The second writer must find every byte as the first one left it, and the first must have written some."""
        pool, _, table, slots, positions, *_ = args
        pages = table[slots.long(), positions.long() // PAGE].long()
        before = pool[pages].clone()
        getattr(self.first, name)(*args)
        after = pool[pages].clone()
        assert not torch.equal(before, after), name
        pool[pages] = before
        getattr(self.second, name)(*args)
        assert torch.equal(pool[pages], after), name

    def _attend(self, *args: Any) -> Tensor:
        got, other = self.first.attention(*args), self.second.attention(*args)
        error = (got.float() - other.float()).norm() / other.float().norm()
        assert float(error) < TOLERANCE["attention"]
        return got


def row_error(got: Array, want: Array) -> Array:
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def reach(case: Case) -> None:
    """Selections lie in both halves of the context: nothing is compared that only looks at small positions."""
    chosen = torch.cat([t.flatten() for t in case.model.ops.chosen])
    assert int(chosen.max()) >= CONTEXT - 2 * PAGE and int(chosen[chosen >= 0].min()) < 2 * PAGE


def test_the_last_positions_in_exact_numerics() -> None:
    case = Case("exact")
    case.model.ops = Both(ops.EXACT, ops.QUANTISED)
    got = case.play()
    want = case.oracle.prefill(case.ids, start=LOW, hit=HIT, past=case.past())
    assert row_error(got, want.logits).max() < TOLERANCE["exact"]
    reach(case)


def test_the_last_positions_in_quantised_numerics() -> None:
    """The steps run, every op against its reference on the same inputs; flips make whole rows no measure."""
    case = Case("quantised")
    case.model.ops = Both(ops.QUANTISED, ops.EXACT)
    assert np.isfinite(case.play()).all()
    reach(case)
