"""One layer as a function of its inputs alone: what passes from layer to layer, and the two sublayers.

Belongs here: the order of things inside a layer (spec/model.md 5). Does not belong here: which layers there are
(transformer.py), a sublayer's maths (its own file).

Nothing that tells two layers of a kind apart is read but arguments, so layers of a kind can share one compiled
function (deepinfer/compile). A layer starts with the mHC write of the sublayer before it, so that what happens between
two sublayers (write, mix, collapse, norm, quantise) lies inside one function.
Legend: T rows of the step, C streams, H hidden, R table rows of an Engram lookup.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.model import engram, hyper_connections
from deepinfer.model.attention import attention
from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.moe import moe
from deepinfer.model.state import LayerMemory, Rows
from deepinfer.model.weights import LayerWeights, Ops


class LayerKind(NamedTuple):
    """All that the code of a layer depends on besides the shapes of its tensors."""

    ratio: int
    owns_kv: bool
    owns_index: bool
    reads_kv: bool
    candidate: str | None
    yarn: bool
    top_k: int
    engram: bool
    tap: bool  # its input streams are wanted
    late: bool  # after the last KV source: decoder replay leaves it fewer window keys
    trim: bool  # rows are dropped behind its attention

    @classmethod
    def of(cls, spec: LayerSpec, config: ModelConfig, *, want_taps: bool = False, trim: bool = False) -> LayerKind:
        return cls(
            spec.ratio,
            spec.owns_kv,
            spec.owns_index,
            spec.kv_source is not None,
            spec.candidate,
            spec.yarn,
            spec.top_k,
            spec.engram is not None,
            spec.tap and want_taps,
            spec.index > config.decoder_start,
            trim,
        )


class Carry(NamedTuple):
    """What a layer hands on. `y` is the last sublayer's output, not yet written to the streams."""

    streams: Tensor  # [T, C, H]
    y: Tensor  # [T, H]
    post: Tensor  # float32 [T, C]
    comb: Tensor  # float32 [T, C, C]
    pre: Tensor  # float32 [T, C], how the next sublayer collapses the streams

    @classmethod
    def start(cls, config: ModelConfig, h: Tensor) -> Carry:
        """Embeddings [T, H]: all streams alike, nothing to write, the first sublayer reads stream 0."""
        rows, c = h.shape[0], config.hc_mult
        eye = torch.eye(c, dtype=torch.float32, device=h.device)
        return cls(
            h.unsqueeze(1).expand(rows, c, h.shape[1]).contiguous(),
            torch.zeros_like(h),
            h.new_zeros((rows, c), dtype=torch.float32),
            eye.expand(rows, c, c).contiguous(),
            eye[:1].expand(rows, c).contiguous(),
        )

    def take(self, rows: Tensor) -> Carry:
        return Carry(*(t[rows] for t in self))

    def written(self, ops: Ops) -> Tensor:
        """The streams [T, C, H] with the pending write done."""
        streams: Tensor = ops.hc_write(self.y, self.streams, self.post, self.comb)
        return streams


class BlockOut(NamedTuple):
    carry: Carry
    entries: Tensor | None  # int32 [M, index_topk] that the last index source chose, -1 unused
    blocks: Tensor | None  # int32 [M, candidate blocks] that the candidate source published
    tap: Tensor | None  # [T, H]


def block(
    ops: Ops,
    config: ModelConfig,
    kind: LayerKind,
    w: LayerWeights,
    carry: Carry,
    rows: Rows,
    memory: LayerMemory,
    entries: Tensor | None,
    blocks: Tensor | None,
    table_rows: Tensor | None,
    kept: Tensor | None,
) -> BlockOut:
    """A layer on T rows; with `kind.trim` its output has the kept ones. Writes `memory`.

    table_rows int64 [T, R]: Engram rows, where the kind has Engram; kept int64 [Tk], ascending, where it trims.
    """
    streams, tap = carry.written(ops), None
    if kind.engram:
        assert w.engram is not None and table_rows is not None
        streams = engram.inject(ops, config, w.engram, streams, table_rows, rows.is_image)
    if kind.tap:
        tap = streams.float().mean(1).to(carry.y.dtype)
    a_pre, post, comb = hyper_connections.mix(ops, config, w.hc_attn, streams)
    x = hyper_connections.read(ops, config, streams, carry.pre, w.attn_norm)
    y, entries, blocks = attention(ops, config, kind, w.attn, x, rows, kept, memory, entries, blocks)
    is_image = rows.is_image
    if kept is not None:
        streams, a_pre, post, comb, is_image = (t[kept] for t in (streams, a_pre, post, comb, is_image))

    streams = ops.hc_write(y, streams, post, comb)
    f_pre, post, comb = hyper_connections.mix(ops, config, w.hc_ffn, streams)
    x = hyper_connections.read(ops, config, streams, a_pre, w.ffn_norm)
    y = moe(ops, config, kind.top_k, w.moe, x, is_image)
    return BlockOut(Carry(streams, y, post, comb, f_pre), entries, blocks, tap)
