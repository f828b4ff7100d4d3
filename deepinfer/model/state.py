"""What a step reads and writes: the model's memory, the rows of a step, and its results.

Belongs here: plain containers of tensors and their sizes. Does not belong here: who owns a page or a slot
(deepinfer/cache, deepinfer/engine), byte layouts (deepinfer/ops/records.py).
Legend: T rows of a step, S slots, P pages, L layers. Slot 0 and page 0 are padding and are never handed out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.ops import records

Numerics = Literal["quantised", "exact"]
PAGE_SIZE = 128  # tokens of a logical page, for all KV sources together


def ring_rows(config: ModelConfig, in_flight: int = 2) -> int:
    """Window ring rows: the window and the rows that `in_flight` unconfirmed steps may add (140 for the release)."""
    return config.sliding_window + in_flight * (config.dspark_block_size + 1)


def lookback_rows(config: ModelConfig) -> int:
    """Open pairs and Engram ids kept per slot: a verified block and the look-back before it (8 for the release).

    A rejected draft leaves its row behind, up to a block past the next position; that must not be the row of an id
    that is still looked back at. A power of two, so that position % rows is a mask.
    """
    look_back = max(2, config.engram_max_ngram_size)
    return 1 << (config.dspark_block_size + look_back - 2).bit_length()


@dataclass
class ModelState:
    """Every tensor of the model's memory. uint8 pools hold records; in exact numerics they hold float32 vectors."""

    page_size: int
    window: list[Tensor]  # per layer [S, ring, 528] (exact: [S, ring, head_dim])
    draft_window: list[Tensor]  # per draft stage, the same
    latent: dict[int, Tensor]  # kv source -> [P, page_size / ratio, 288]
    index_key: dict[int, Tensor]  # kv source -> [P, page_size / ratio * 68] (exact: [P, entries, index dim])
    open_pair: dict[int, Tensor]  # ratio-2 source -> float32 [S, lookback_rows, 2 * head_dim] by position
    history: Tensor  # int32 [S, lookback_rows] token ids by position, -1 for image tokens
    page_table: Tensor  # int32 [S, pages of a slot]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        num_slots: int,
        num_pages: int,
        max_pages: int,
        page_size: int = PAGE_SIZE,
        ring: int | None = None,
        numerics: Numerics = "quantised",
        device: str | torch.device = "cpu",
    ) -> ModelState:
        """Zeroed memory for `num_slots` requests (slot 0 included) and `num_pages` pages (page 0 included)."""
        make = _shapes(config, page_size, ring or ring_rows(config), numerics)
        new = lambda shape, n: torch.zeros((n, *shape[0]), dtype=shape[1], device=device)  # noqa: E731
        return cls(
            page_size=page_size,
            window=[new(make["window"], num_slots) for _ in config.layers],
            draft_window=[new(make["window"], num_slots) for _ in config.draft_layers],
            latent={s.index: new(make[f"latent/{s.ratio}"], num_pages) for s in config.layers if s.owns_kv},
            index_key={s.index: new(make[f"index/{s.ratio}"], num_pages) for s in config.layers if s.owns_kv},
            open_pair={s.index: new(make["pair"], num_slots) for s in config.layers if s.owns_kv and s.ratio == 2},
            history=torch.full((num_slots, lookback_rows(config)), -1, dtype=torch.int32, device=device),
            page_table=torch.zeros((num_slots, max_pages), dtype=torch.int32, device=device),
        )

    @staticmethod
    def bytes_per_page(config: ModelConfig, page_size: int = PAGE_SIZE, numerics: Numerics = "quantised") -> int:
        """Bytes of one logical page over all sources (890 B a token for the release)."""
        make = _shapes(config, page_size, ring_rows(config), numerics)
        owners = [s for s in config.layers if s.owns_kv]
        return sum(_nbytes(make[f"latent/{s.ratio}"]) + _nbytes(make[f"index/{s.ratio}"]) for s in owners)

    @staticmethod
    def bytes_per_slot(config: ModelConfig, ring: int | None = None, numerics: Numerics = "quantised") -> int:
        """Bytes of windows, open pairs and look-back ids of one request slot (the page table row is not counted)."""
        make = _shapes(config, PAGE_SIZE, ring or ring_rows(config), numerics)
        pairs = sum(s.owns_kv and s.ratio == 2 for s in config.layers)
        windows = len(config.layers) + len(config.draft_layers)
        return windows * _nbytes(make["window"]) + pairs * _nbytes(make["pair"]) + 4 * lookback_rows(config)

    @property
    def ring(self) -> int:
        return self.window[0].shape[1]

    def layer(self, spec: LayerSpec) -> LayerMemory:
        """What one layer of the backbone sees of it."""
        source = -1 if spec.kv_source is None else spec.kv_source
        return LayerMemory(
            self.window[spec.index],
            self.latent.get(source),
            self.index_key.get(source),
            self.open_pair.get(spec.index),
            self.page_table,
            self.page_size,
        )

    def copy_slots(self, src: Tensor, dst: Tensor) -> None:
        """Fork: windows, open pairs and look-back ids of slots `src` to `dst`, int64 [n], `dst` distinct.

        The rows of the page table are the caller's.
        """
        for group in (*self.window, *self.draft_window, *self.open_pair.values(), self.history):
            group[dst] = group[src]

    def copy_pages(self, src: Tensor, dst: Tensor) -> None:
        """Latents and index keys of pages `src` to `dst`, int64 [n], `dst` distinct."""
        for group in (*self.latent.values(), *self.index_key.values()):
            group[dst] = group[src]

    def remember(self, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        """Write look-back ids of rows that do not run: slots, positions int64 [n], ids int32 [n] (-1: image).

        A sequence that starts at position p reads those of [p - engram_max_ngram_size + 1, p).
        """
        self.history[slots, positions % self.history.shape[1]] = ids

    def groups(self) -> Mapping[str, int]:
        """Bytes held per group, for the start-up log."""
        size = lambda ts: sum(t.numel() * t.element_size() for t in ts)  # noqa: E731
        return {
            "window rings": size(self.window),
            "draft rings": size(self.draft_window),
            "compressed KV pages": size(self.latent.values()),
            "index key pages": size(self.index_key.values()),
            "open pairs": size(self.open_pair.values()),
            "page table and look-back": size((self.page_table, self.history)),
        }


def _shapes(
    config: ModelConfig, page_size: int, ring: int, numerics: Numerics
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    exact = numerics == "exact"
    dtype = torch.float32 if exact else torch.uint8
    d, i = config.head_dim, config.index_head_dim
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "window": ((ring, d if exact else records.window_bytes(d)), dtype),
        "pair": ((lookback_rows(config), 2 * d), torch.float32),
    }
    for ratio in (1, 2):
        n = page_size // ratio
        shapes[f"latent/{ratio}"] = ((n, d if exact else records.latent_bytes(d)), dtype)
        shapes[f"index/{ratio}"] = ((n, i) if exact else (n * records.index_bytes(i),), dtype)
    return shapes


def _nbytes(shape: tuple[tuple[int, ...], torch.dtype]) -> int:
    return int(torch.Size(shape[0]).numel()) * shape[1].itemsize


class LayerMemory(NamedTuple):
    """One layer's part of the memory; shapes as in ModelState."""

    window: Tensor
    latent: Tensor | None  # of the KV source that it reads, which may be itself
    index_key: Tensor | None
    open_pair: Tensor | None
    page_table: Tensor
    page_size: int


@dataclass
class StepInputs:
    """T flat rows. Rows of one request are adjacent, positions ascending by one (a "run"). All on one device."""

    ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    slots: Tensor  # int32 [T]
    run_start: Tensor  # int32 [T], index of the run's first row
    is_image: Tensor  # bool [T], the row lies inside an image span
    window_floor: Tensor  # int32 [T], oldest window key that exists for the layers after the last KV source
    logit_rows: Tensor | None  # int64 [S], rows whose logits are wanted, ascending, may repeat (each kept); None: all
    kept: Tensor | None = None  # int64 [Tk], rows the decoder half runs on, ascending; None: all
    image_rows: Tensor | None = None  # int64 [N], rows whose embedding is replaced
    image_embeds: Tensor | None = None  # [N, hidden]
    want_taps: bool = True  # False: no draft reads them
    # For sequences that start at a prefix hit (an even position). Rows run again below the hit must not rewrite the
    # shared pages: their slot here is 0, whose page table row points at page 0. Reads always go through `slots`.
    kv_slots: Tensor | None = None  # int32 [T], slot whose page table row global KV is written through; None: `slots`
    ring_floor: Tensor | None = None  # int32 [T], oldest window key that exists in every layer; None: 0


@dataclass
class StepOutputs:
    logits: Tensor  # float32 [S, vocab]
    taps: Tensor | None  # [Tk, taps * hidden], what the draft context is made of; None if not wanted


@dataclass(frozen=True)
class Rows:
    """Per-row metadata of one half of the model, derived once per step. `first`: position of the run's first row."""

    positions: Tensor  # int32 [T]
    slots: Tensor  # int32 [T]
    kv_slots: Tensor  # int32 [T], where global KV goes
    run_start: Tensor  # int32 [T]
    run_last: Tensor  # int32 [T], position of the run's last row
    first: Tensor  # int32 [T]
    ring_floor: Tensor  # int32 [T], oldest window key of layers up to the last KV source
    floor: Tensor  # int32 [T], the same of later layers
    is_image: Tensor  # bool [T]
    row: Tensor  # int32 [T], the row's index in this step's window records
    rope: tuple[Tensor, Tensor]  # cos, sin float32 [T, R] of ratio-0 layers
    yarn: tuple[Tensor, Tensor]  # of layers with ratio > 0, at the row's position
    pair: tuple[Tensor, Tensor]  # the same at the first position of the row's pair

    def select(self, kept: Tensor) -> Rows:
        """The kept rows as queries into the same step buffer (`row`, `first` and `run_start` unchanged)."""
        take = lambda t: t[kept]  # noqa: E731
        pick = lambda cs: (cs[0][kept], cs[1][kept])  # noqa: E731
        return Rows(
            *(take(t) for t in (self.positions, self.slots, self.kv_slots, self.run_start, self.run_last)),
            *(take(t) for t in (self.first, self.ring_floor, self.floor, self.is_image, self.row)),
            *(pick(cs) for cs in (self.rope, self.yarn, self.pair)),
        )

    def restart(self) -> Rows:
        """Kept rows as a step of their own: runs are renumbered, older keys come from the ring only."""
        n = self.positions.shape[0]
        row = torch.arange(n, dtype=torch.int32, device=self.positions.device)
        if n == 0:
            return replace(self, row=row)
        new_run = torch.ones(n, dtype=torch.bool, device=row.device)
        new_run[1:] = self.run_start[1:] != self.run_start[:-1]
        run_start = torch.where(new_run, row, 0).cummax(0).values.to(torch.int32)
        return replace(self, run_start=run_start, first=self.positions[run_start.long()], row=row)
