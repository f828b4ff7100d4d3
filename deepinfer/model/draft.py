"""DSpark draft: context rows from the target's taps, one non-causal block, a sequential Markov head (spec/model.md 11).

Belongs here: the draft as a function of the model. Does not belong here: acceptance, planning (deepinfer/speculative).
Legend: B requests, g block size, N context rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.model import hyper_connections
from deepinfer.model.attention import output_projection
from deepinfer.model.config import LayerSpec
from deepinfer.model.moe import moe
from deepinfer.model.rotary import cos_sin
from deepinfer.model.state import ModelState
from deepinfer.model.weights import LayerWeights, Source, layer_weights, linear, quantise

if TYPE_CHECKING:
    from deepinfer.model.transformer import Transformer


@dataclass
class DraftOutputs:
    tokens: Tensor  # int64 [B, g]
    logits: Tensor  # float32 [B, g, V], after the Markov bias
    confidence: Tensor  # float32 [B, g], raw: sigmoid gives P(accepted | all before accepted)


class Draft:
    """The draft stages of a checkpoint; embedding, head and norms' eps are the target's."""

    def __init__(self, target: Transformer, tensors: Mapping[str, Tensor], donate: bool = False) -> None:
        config = target.config
        self.config, self.ops, self.target = config, target.ops, target
        self.stages = [
            (spec, layer_weights(config, spec, tensors, target.numerics, donate)) for spec in config.draft_layers
        ]
        first, last = (
            Source(tensors, self.stages[0][0].name + "."),
            Source(tensors, self.stages[-1][0].name + "."),
        )
        self.main_proj, self.main_norm = first.fp8("main_proj"), first["main_norm.weight"]
        self.norm = last["norm.weight"]
        self.markov_embed, self.markov_head = (
            last["markov_head.embed.weight"],
            last["markov_head.head.weight"],
        )
        self.confidence = last["confidence_head.proj.weight"]

    @torch.inference_mode()
    def write_context(
        self, taps: Tensor, slots: Tensor, positions: Tensor, run_last: Tensor, state: ModelState
    ) -> None:
        """Append committed rows to the context rings: taps [N, taps*H], slots/positions/run_last int32 [N]."""
        eps = self.config.rms_norm_eps
        main = self.ops.rms_norm(linear(self.ops, quantise(self.ops, taps), self.main_proj), self.main_norm, eps)
        x = quantise(self.ops, main)
        angles = cos_sin(positions, self.target.inv_freq[0])
        for (_, w), ring in zip(self.stages, state.draft_window, strict=True):
            kv = self.ops.rms_norm(linear(self.ops, x, w.attn.wkv), w.attn.kv_norm, eps)
            self.ops.ring_write(
                ring, self.ops.pack_window(self.ops.rope(kv, *angles, False)), slots, positions, run_last
            )

    @torch.inference_mode()
    def propose(
        self,
        anchors: Tensor,
        start: Tensor,
        slots: Tensor,
        floor: Tensor,
        state: ModelState,
        choose: Callable[[Tensor, int], Tensor] | None = None,
    ) -> DraftOutputs:
        """Draft the g tokens after each anchor.

        anchors int64 [B]: the last committed token; start int32 [B]: its position (its target KV is not computed yet);
        slots int32 [B]; floor int32 [B]: oldest context row that exists. `choose(logits [B, V], k) -> ids [B]` picks
        token k of the block, default argmax.
        """
        c, g = self.config, self.config.dspark_block_size
        ids = torch.full((anchors.shape[0], g), c.dspark_noise_token_id, dtype=torch.int64, device=anchors.device)
        ids[:, 0] = anchors
        positions = (start.unsqueeze(1) + torch.arange(g, dtype=start.dtype, device=start.device)).flatten()
        angles = cos_sin(positions, self.target.inv_freq[0])
        streams, pre = hyper_connections.expand(c, self.target.embed[ids.flatten()].to(self.target.dtype))
        for (spec, w), ring in zip(self.stages, state.draft_window, strict=True):
            streams, pre = self._stage(spec, w, streams, pre, angles, (ring, slots, start, floor))
        x = self.ops.hc_collapse(streams, pre)  # un-normed: feeds the confidence head
        h = self.ops.rms_norm(x, self.norm, c.rms_norm_eps)
        base = self.ops.linear(h, self.target.head, None, True).unflatten(0, (-1, g))  # [B, g, V]
        return self._markov(x.unflatten(0, (-1, g)), base, anchors, choose)

    def _stage(
        self,
        spec: LayerSpec,
        w: LayerWeights,
        streams: Tensor,
        pre: Tensor,
        angles: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """An ordinary block whose attention sees the context ring and all g block rows, in both directions."""
        o, c = self.ops, self.config
        a_pre, post, comb = hyper_connections.mix(o, c, w.hc_attn, streams)
        x = quantise(o, hyper_connections.read(o, c, streams, pre, w.attn_norm))
        qr, kv = linear(o, x, w.attn.wqkv_a).split((c.q_lora_rank, c.head_dim), dim=1)
        block = o.pack_window(o.rope(o.rms_norm(kv, w.attn.kv_norm, c.rms_norm_eps), *angles, False))
        qr = quantise(o, o.rms_norm(qr, w.attn.q_norm, c.rms_norm_eps))
        q = o.rope(linear(o, qr, w.attn.wq_b).unflatten(1, (c.num_attention_heads, c.head_dim)), *angles, False)
        a = o.block_attention(q, block, *context, w.attn.sink, c.head_dim**-0.5, c.sliding_window)
        y = output_projection(o, c, w.attn, o.rope(a, *angles, True))
        streams = o.hc_write(y, streams, post, comb)

        f_pre, post, comb = hyper_connections.mix(o, c, w.hc_ffn, streams)
        h = hyper_connections.read(o, c, streams, a_pre, w.ffn_norm)
        text = torch.zeros(h.shape[0], dtype=torch.bool, device=h.device)
        return o.hc_write(moe(o, c, spec.top_k, w.moe, h, text), streams, post, comb), f_pre

    def _markov(
        self, x: Tensor, base: Tensor, anchors: Tensor, choose: Callable[[Tensor, int], Tensor] | None
    ) -> DraftOutputs:
        """Rank-r correction by the token before: x [B, g, H], base [B, g, V]."""
        tokens, logits, memory = [], [], []
        previous = anchors
        for k in range(base.shape[1]):
            m = self.markov_embed[previous].to(x.dtype)  # [B, r]
            step = base[:, k] + self.ops.linear(m, self.markov_head, None, True)
            previous = step.argmax(-1) if choose is None else choose(step, k)
            tokens.append(previous)
            logits.append(step)
            memory.append(m)
        joint = torch.cat((x.float(), torch.stack(memory, 1).float()), dim=2)  # [B, g, H + r]
        confidence = self.ops.linear(joint.flatten(0, 1), self.confidence, None, True).view(x.shape[:2])
        return DraftOutputs(torch.stack(tokens, 1), torch.stack(logits, 1), confidence)
