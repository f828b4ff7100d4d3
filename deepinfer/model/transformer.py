"""The whole model: embedding, encoder half, decoder half, head; plus the entries to vision and draft.

Belongs here: the order of things (spec/model.md 5) and decoder replay (12). Does not belong here: the maths of a
sublayer (its own file), scheduling, device names, cache policy.
Legend: T rows of the step, Tk kept rows, C streams, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer import ops
from deepinfer.errors import ConfigError
from deepinfer.model import engram, hyper_connections
from deepinfer.model.block import BlockOut, Carry, LayerKind, block
from deepinfer.model.config import ModelConfig
from deepinfer.model.draft import Draft
from deepinfer.model.rotary import cos_sin, inverse_frequencies
from deepinfer.model.state import LayerMemory, ModelState, Numerics, Rows, StepInputs, StepOutputs
from deepinfer.model.vision import Vision
from deepinfer.model.weights import LayerWeights, layer_weights


class Transformer:
    """DeepSeek-V4.1 over `deepinfer.ops`.

    tensors: the flat dict of checkpoint.load_checkpoint; token_map: int32 [vocab] (text.tokenizer.engram_token_map),
    needed when the config has Engram layers. numerics "quantised" computes in bf16 and the formats of spec/model.md 4,
    "exact" in float32 without any activation or cache rounding, through the reference ops.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        token_map: Tensor | None = None,
        *,
        numerics: Numerics = "quantised",
        donate: bool = False,
    ) -> None:
        """donate: `tensors` are this model's alone; their layout may change in place."""
        self.config, self.numerics = config, numerics
        self.ops = ops.EXACT if numerics == "exact" else ops.QUANTISED
        self.dtype = torch.float32 if numerics == "exact" else torch.bfloat16
        self.embed, self.head, self.norm = (
            tensors["embed.weight"],
            tensors["head.weight"],
            tensors["norm.weight"],
        )
        self.device = self.embed.device
        self.layers = [(spec, layer_weights(config, spec, tensors, numerics, donate)) for spec in config.layers]
        self.inv_freq = [inverse_frequencies(config, yarn).to(self.device) for yarn in (False, True)]
        self.engram: engram.EngramTables | None = None
        if config.engram_layer_ids:
            if token_map is None or token_map.shape != (config.vocab_size,):
                found = "none" if token_map is None else f"{tuple(token_map.shape)}"
                raise ConfigError(
                    f"Engram layers {config.engram_layer_ids} need the tokenizer's compressed token map of shape "
                    f"({config.vocab_size},), found {found}; build it with text.tokenizer.engram_token_map"
                )
            self.engram = engram.EngramTables.build(config, token_map.to(self.device))
        self.draft = Draft(self, tensors, donate) if config.draft_layers else None
        self.vision = Vision(config, config.vision, tensors, self.ops, self.dtype) if config.vision else None

    @torch.inference_mode()
    def forward(self, step: StepInputs, state: ModelState) -> StepOutputs:
        """One step over flat rows; writes `state`. Pages of every position of the step must be in the page table."""
        rows, carry, hashes = self.front(step, state.history)
        kept, want_taps = step.kept, step.want_taps and self.draft is not None
        cut = self.config.decoder_start + 1
        entries = blocks = None
        taps: list[Tensor] = []
        for part, layers in enumerate((self.layers[:cut], self.layers[cut:])):
            trims = [kept is not None and spec.index == self.config.decoder_start for spec, _ in layers]
            kinds = [
                LayerKind.of(spec, self.config, want_taps=want_taps, trim=trim)
                for (spec, _), trim in zip(layers, trims, strict=True)
            ]
            table_rows = [None if spec.engram is None else hashes[spec.engram] for spec, _ in layers]
            memory = [state.layer(spec) for spec, _ in layers]
            weights = [w for _, w in layers]
            trim = kept if any(trims) else None
            carry, entries, blocks, found = self.run_layers(
                part, kinds, weights, carry, rows, memory, entries, blocks, table_rows, trim
            )
            taps += found
            if trim is not None:
                rows = rows.select(trim).restart()
        picked = step.logit_rows
        if picked is not None and kept is not None:
            picked = torch.searchsorted(kept, picked)
        logits = self.read_out(carry, picked)
        if not want_taps:
            return StepOutputs(logits, None)
        if kept is not None:  # taps before the trim hold all rows
            taps = [t if t.shape[0] == kept.shape[0] else t[kept] for t in taps]
        return StepOutputs(logits, torch.cat(taps, dim=1))

    # The parts of a step, each a function of tensors: deepinfer/compile puts compiled functions in their place.

    def front(self, step: StepInputs, history: Tensor) -> tuple[Rows, Carry, list[Tensor]]:
        """Row metadata, what the first layer starts from, and Engram table rows by Engram layer."""
        rows = self.prepare(step)
        hashes = []
        if self.engram is not None:
            hashes = engram.hash_rows(self.ops, self.config, self.engram, step.ids, rows, history)
        return rows, Carry.start(self.config, self._embed(step)), hashes

    def run_layers(
        self,
        part: int,
        kinds: Sequence[LayerKind],
        weights: Sequence[LayerWeights],
        carry: Carry,
        rows: Rows,
        memory: Sequence[LayerMemory],
        entries: Tensor | None,
        blocks: Tensor | None,
        table_rows: Sequence[Tensor | None],
        kept: Tensor | None,
    ) -> tuple[Carry, Tensor | None, Tensor | None, list[Tensor]]:
        """Consecutive layers: the encoder half with the last KV source (part 0), or those after it (part 1).

        Lists have an item a layer. Returns what the last one hands on, its selection, and the taps.
        """
        taps = []
        for kind, w, own, found in zip(kinds, weights, memory, table_rows, strict=True):
            carry, entries, blocks, tap = self.block(
                kind, w, carry, rows, own, entries, blocks, found, kept if kind.trim else None
            )
            if tap is not None:
                taps.append(tap)
        return carry, entries, blocks, taps

    def block(self, kind: LayerKind, w: LayerWeights, *inputs: Any) -> BlockOut:
        """A layer, as `model.block.block`."""
        return block(self.ops, self.config, kind, w, *inputs)

    def read_out(self, carry: Carry, picked: Tensor | None) -> Tensor:
        """Logits float32 [S, vocab] of the picked rows (int64 [S]; None: all) of `carry`."""
        if picked is not None:
            carry = carry.take(picked)
        h = hyper_connections.read(self.ops, self.config, carry.written(self.ops), carry.pre, self.norm)
        logits: Tensor = self.ops.linear(h, self.head, None, True)
        return logits

    def prepare(self, step: StepInputs) -> Rows:
        """Row metadata of a step: run ends, floors, RoPE angles."""
        row = torch.arange(step.ids.shape[0], dtype=torch.int32, device=step.ids.device)
        start = step.run_start.long()
        last_row = torch.zeros_like(start).scatter_reduce(0, start, row.long(), "amax")[start]
        pair = step.positions - step.positions % 2
        low, floor = step.ring_floor, step.window_floor
        return Rows(
            positions=step.positions,
            slots=step.slots,
            kv_slots=step.slots if step.kv_slots is None else step.kv_slots,
            run_start=step.run_start,
            run_last=step.positions[last_row],
            first=step.positions[start],
            ring_floor=torch.zeros_like(floor) if low is None else low,
            floor=floor if low is None else torch.maximum(floor, low),
            is_image=step.is_image,
            row=row,
            rope=cos_sin(step.positions, self.inv_freq[0]),
            yarn=cos_sin(step.positions, self.inv_freq[1]),
            pair=cos_sin(pair, self.inv_freq[1]),
        )

    @torch.inference_mode()
    def encode_image(self, patches: Tensor, grid_h: int, grid_w: int) -> Tensor:
        """Embedding rows [span tokens, H] of one image: patches [grid_h*grid_w, 3, p, p]."""
        if self.vision is None:
            raise ConfigError("this checkpoint has no vision tower (vision_config is absent): send text prompts only")
        return self.vision.span(patches.to(self.device), (grid_h, grid_w))

    def _embed(self, step: StepInputs) -> Tensor:
        h = self.embed[step.ids.long()].to(self.dtype)
        if step.image_rows is not None and step.image_embeds is not None:
            h = h.index_copy(0, step.image_rows, step.image_embeds.to(self.dtype))
        return h
