"""Global KV of a source layer: compressed latents and index keys, written for every row of the step.

Belongs here: spec/model.md 6 "Compressor" and the owner half of "Indexer". Does not belong here: selection
(indexer.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.model.config import ModelConfig
from deepinfer.model.state import LayerMemory, Rows
from deepinfer.model.weights import CompressorWeights, Ops


def write_global_kv(
    ops: Ops,
    config: ModelConfig,
    ratio: int,
    w: CompressorWeights,
    x: Tensor,
    rows: Rows,
    memory: LayerMemory,
) -> None:
    """x [T, H] (the attention input) -> one latent and one index key per completed group of `ratio` tokens."""
    assert memory.latent is not None and memory.index_key is not None
    exact = x.dtype is torch.float32
    if ratio == 1:
        latent = ops.linear(x, w.wkv_gate, None, exact)
        cos, sin = rows.yarn
    else:
        kv_gate = ops.linear(x, w.wkv_gate, None, True)  # [T, 2D] values | scores
        ring = memory.open_pair
        assert ring is not None
        latent = ops.pair_pool(kv_gate, ring, rows.slots, rows.positions, rows.run_start, exact)
        ops.ring_write(ring, kv_gate, rows.slots, rows.positions, rows.run_last)
        cos, sin = rows.pair
    latent = ops.rms_norm(latent, w.norm, config.rms_norm_eps)  # [T, D]
    key = ops.rms_norm(ops.linear(latent, w.wk, None, exact), w.k_norm, config.rms_norm_eps)  # before RoPE and rounding
    where = (memory.page_table, rows.kv_slots, rows.positions, ratio, memory.page_size)
    ops.page_write(memory.latent, ops.pack_latent(ops.rope(latent, cos, sin, False)), *where)
    ops.index_page_write(memory.index_key, ops.pack_index(ops.rope(key, cos, sin, False)), *where)
