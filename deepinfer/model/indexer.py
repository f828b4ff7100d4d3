"""Top-k selection of compressed entries for the layers of one index source.

Belongs here: index queries and the two-level choice (spec/model.md 6 "Indexer"). Does not belong here: index keys
(compressor.py), attention over the selection (attention.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.state import ModelState, Rows
from deepinfer.model.weights import Activation, IndexerWeights, Ops, linear


@dataclass
class Selection:
    """What the last index source chose for the current rows; later layers of the same source reuse it."""

    entries: Tensor | None = None  # int32 [M, index_topk], -1 unused
    blocks: Tensor | None = None  # int32 [M, candidate_topk_blocks], published by the candidate source


def select(
    ops: Ops,
    config: ModelConfig,
    spec: LayerSpec,
    w: IndexerWeights,
    qr: Activation,
    x: Tensor,
    rows: Rows,
    state: ModelState,
    selection: Selection,
) -> None:
    """Replace `selection` for query rows: qr [M, q_lora] normed low-rank queries, x [M, H] attention input."""
    assert spec.kv_source is not None
    h, d = config.index_n_heads, config.index_head_dim
    q = ops.pack_index(ops.rope(linear(ops, qr, w.wq_b).unflatten(1, (h, d)), *rows.yarn, False))
    weights = ops.linear(x, w.weights_proj, None, False).float() * (d**-0.5 * h**-0.5)
    visible = (rows.positions + 1) // spec.ratio  # entries whose whole group is at or before the row
    args = (
        *(q, weights, state.index_key[spec.kv_source], state.page_table, rows.slots, visible),
        *(spec.ratio, state.page_size, config.index_topk),
    )
    if spec.candidate == "source":
        selection.entries, selection.blocks = ops.index_topk_publish(
            *args, config.candidate_topk_blocks, config.candidate_block_size
        )
    elif spec.candidate == "reader":
        selection.entries = ops.index_topk_blocks(*args, selection.blocks, config.candidate_block_size)
    else:
        selection.entries = ops.index_topk(*args)
