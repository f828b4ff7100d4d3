"""Engram: hashed n-gram memory added to the streams before a layer (spec/model.md 8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.model.config import ModelConfig, engram_multipliers, engram_offsets, engram_primes
from deepinfer.model.state import Rows
from deepinfer.model.weights import EngramWeights, Ops, linear, quantise


@dataclass(frozen=True)
class EngramTables:
    """Derived constants on the model's device: they are a function of the config and the tokenizer, never stored."""

    token_map: Tensor  # int32 [vocab], token id -> compressed id
    multipliers: Tensor  # int64 [layers, n]
    primes: Tensor  # int64 [layers, columns]
    offsets: Tensor  # int64 [layers, columns]
    pad_id: int  # raw id whose compressed form stands for "nothing there"

    @classmethod
    def build(cls, config: ModelConfig, token_map: Tensor) -> EngramTables:
        on = lambda a: torch.from_numpy(a).to(token_map.device)  # noqa: E731
        primes = engram_primes(config).reshape(len(config.engram_layer_ids), -1)
        return cls(
            token_map.to(torch.int32),
            on(engram_multipliers(config)),
            on(primes),
            on(engram_offsets(config)),
            config.engram_pad_token_id,
        )


def hash_rows(
    ops: Ops, config: ModelConfig, tables: EngramTables, ids: Tensor, rows: Rows, history: Tensor
) -> list[Tensor]:
    """Table rows int64 [T, columns] of each Engram layer, from ids int32 [T]; remembers the ids in `history`."""
    tokens = ops.engram_lookback(
        ids,
        rows.positions,
        rows.slots,
        rows.run_start,
        rows.is_image,
        tables.token_map,
        history,
        tables.pad_id,
        config.engram_max_ngram_size,
    )
    own = torch.where(rows.is_image, -1, ids).unsqueeze(1)
    ops.ring_write(history.unsqueeze(2), own, rows.slots, rows.positions, rows.run_last)
    return [
        ops.engram_rows(tokens, tables.multipliers[i], tables.primes[i], tables.offsets[i])
        for i in range(len(config.engram_layer_ids))
    ]


def inject(
    ops: Ops, config: ModelConfig, w: EngramWeights, streams: Tensor, table_rows: Tensor, is_image: Tensor
) -> Tensor:
    """streams [T, C, H] + gated memory; table_rows int64 [T, columns]."""
    memory = ops.engram_gather(table_rows, *w.table, streams.dtype is torch.float32)
    kv = linear(ops, quantise(ops, memory), w.wkv)
    return ops.engram_gate(streams, kv, w.q_weight, w.k_weight, is_image, config.rms_norm_eps)
