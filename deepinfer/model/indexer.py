"""Top-k selection of compressed entries for the layers of one index source.

Belongs here: index queries and the two-level choice (spec/model.md 6 "Indexer"). Does not belong here: index keys
(compressor.py), attention over the selection (attention.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepinfer.model.config import ModelConfig
from deepinfer.model.state import LayerMemory, Rows
from deepinfer.model.weights import Activation, IndexerWeights, Ops, linear

if TYPE_CHECKING:
    from deepinfer.model.block import LayerKind


def select(
    ops: Ops,
    config: ModelConfig,
    kind: LayerKind,
    w: IndexerWeights,
    qr: Activation,
    x: Tensor,
    rows: Rows,
    memory: LayerMemory,
    blocks: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """(entries int32 [M, k], candidate blocks) of query rows: qr [M, q_lora] normed low-rank queries, x [M, H] input.

    blocks: what the candidate source published before, which its readers choose from.
    """
    h, d = config.index_n_heads, config.index_head_dim
    q = ops.pack_index(ops.rope(linear(ops, qr, w.wq_b).unflatten(1, (h, d)), *rows.yarn, False))
    weights = ops.linear(x, w.weights_proj, None, False).float() * (d**-0.5 * h**-0.5)
    visible = (rows.positions + 1) // kind.ratio  # entries whose whole group is at or before the row
    args = (
        *(q, weights, memory.index_key, memory.page_table, rows.slots, visible),
        *(kind.ratio, memory.page_size, config.index_topk),
    )
    if kind.candidate == "source":
        entries, blocks = ops.index_topk_publish(*args, config.candidate_topk_blocks, config.candidate_block_size)
    elif kind.candidate == "reader":
        entries = ops.index_topk_blocks(*args, blocks, config.candidate_block_size)
    else:
        entries = ops.index_topk(*args)
    return entries, blocks
