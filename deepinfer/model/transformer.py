"""The whole model: embedding, encoder half, decoder half, head; plus the entries to vision and draft.

Belongs here: the order of things (spec/model.md 5) and decoder replay (12). Does not belong here: the maths of a
sublayer (its own file), scheduling, device names, cache policy.
Legend: T rows of the step, Tk kept rows, C streams, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from deepinfer.model.state import ModelState, Numerics, Rows, StepInputs, StepOutputs
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
    ) -> None:
        self.config, self.numerics = config, numerics
        self.ops = ops.EXACT if numerics == "exact" else ops.QUANTISED
        self.dtype = torch.float32 if numerics == "exact" else torch.bfloat16
        self.embed, self.head, self.norm = (
            tensors["embed.weight"],
            tensors["head.weight"],
            tensors["norm.weight"],
        )
        self.device = self.embed.device
        self.layers = [(spec, layer_weights(config, spec, tensors, numerics)) for spec in config.layers]
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
        self.draft = Draft(self, tensors) if config.draft_layers else None
        self.vision = Vision(config, config.vision, tensors, self.ops, self.dtype) if config.vision else None

    @torch.inference_mode()
    def forward(self, step: StepInputs, state: ModelState) -> StepOutputs:
        """One step over flat rows; writes `state`. Pages of every position of the step must be in the page table."""
        rows = self.prepare(step)
        hashes = self._hash(step, rows, state)
        carry, kept = Carry.start(self.config, self._embed(step)), step.kept
        entries = blocks = None
        taps = []
        want_taps = step.want_taps and self.draft is not None
        for spec, w in self.layers:
            trim = kept if spec.index == self.config.decoder_start else None
            kind = LayerKind.of(spec, self.config, want_taps=want_taps, trim=trim is not None)
            table_rows = None if spec.engram is None else hashes[spec.engram]
            out = self.block(kind, w, carry, rows, state.layer(spec), entries, blocks, table_rows, trim)
            carry, entries, blocks, tap = out
            if tap is not None:
                taps.append(tap)
            if trim is not None:
                rows = rows.select(trim).restart()
        picked = step.logit_rows if kept is None else torch.searchsorted(kept, step.logit_rows)
        logits = self.read_out(carry.take(picked))
        if not want_taps:
            return StepOutputs(logits, None)
        if kept is not None:  # taps before the trim hold all rows
            taps = [t if t.shape[0] == kept.shape[0] else t[kept] for t in taps]
        return StepOutputs(logits, torch.cat(taps, dim=1))

    def block(self, kind: LayerKind, w: LayerWeights, *inputs: Any) -> BlockOut:
        """A layer, as `model.block.block`; deepinfer/compile puts a compiled function in its place."""
        return block(self.ops, self.config, kind, w, *inputs)

    def read_out(self, carry: Carry) -> Tensor:
        """Logits float32 [S, vocab] of the rows of `carry`."""
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

    def _hash(self, step: StepInputs, rows: Rows, state: ModelState) -> list[Tensor]:
        if self.engram is None:
            return []
        return engram.hash_rows(self.ops, self.config, self.engram, step.ids, rows, state)
