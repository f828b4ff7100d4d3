"""Attention of one layer: window plus selected global entries, one shared KV head.

Belongs here: spec/model.md 6. Does not belong here: compression and selection (compressor.py, indexer.py).
Legend: T rows of the step, M query rows (M = T unless decoder replay trims this layer), h heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepinfer.model.compressor import write_global_kv
from deepinfer.model.config import ModelConfig
from deepinfer.model.indexer import select
from deepinfer.model.state import LayerMemory, Rows
from deepinfer.model.weights import AttentionWeights, Ops, linear, quantise

if TYPE_CHECKING:
    from deepinfer.model.block import LayerKind


def attention(
    ops: Ops,
    config: ModelConfig,
    kind: LayerKind,
    w: AttentionWeights,
    x: Tensor,
    rows: Rows,
    kept: Tensor | None,
    memory: LayerMemory,
    entries: Tensor | None,
    blocks: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x [T, H] -> ([M, H], selected entries [M, k], candidate blocks). Writes keys and global KV of all T rows.

    Queries are the kept rows; `entries` and `blocks` are what the last index source chose for them.
    """
    eps = config.rms_norm_eps
    xq = quantise(ops, x)
    if kept is None:
        qr, kv = linear(ops, xq, w.wqkv_a).split((config.q_lora_rank, config.head_dim), dim=1)
        queries, xk = rows, x
    else:
        kv = linear(ops, xq, w.wkv)
        xk, queries = x[kept], rows.select(kept)
        qr = linear(ops, quantise(ops, xk), w.wq_a)
    cos_sin = queries.yarn if kind.yarn else queries.rope

    kv = ops.rope(ops.rms_norm(kv, w.kv_norm, eps), *(rows.yarn if kind.yarn else rows.rope), False)
    new = ops.pack_window(kv)  # [T, 528]
    if w.compressor is not None:
        write_global_kv(ops, config, kind.ratio, w.compressor, x, rows, memory)

    qr = quantise(ops, ops.rms_norm(qr, w.q_norm, eps))  # [M, q_lora]
    if w.indexer is not None:
        entries, blocks = select(ops, config, kind, w.indexer, qr, xk, queries, memory, blocks)
    q = linear(ops, qr, w.wq_b).unflatten(1, (config.num_attention_heads, config.head_dim))
    q = ops.rope(q, *cos_sin, False)

    o = ops.attention(
        q,
        new,
        memory.window,
        queries.slots,
        queries.positions,
        queries.row,
        queries.first,
        queries.floor if kind.late else queries.ring_floor,
        w.sink,
        memory.latent,
        entries if kind.reads_kv else None,
        memory.page_table,
        config.head_dim**-0.5,
        config.sliding_window,
        kind.ratio,
        memory.page_size,
    )
    ops.ring_write(memory.window, new, rows.slots, rows.positions, rows.run_last)
    return output_projection(ops, config, w, ops.rope(o, *cos_sin, True)), entries, blocks


def output_projection(ops: Ops, config: ModelConfig, w: AttentionWeights, o: Tensor) -> Tensor:
    """o [M, h, D], rotated back -> [M, H]: groups of heads to a low rank, then to the hidden size."""
    z = ops.linear_dequant(o.flatten(1), w.wo_a.weight, w.wo_a.scale, config.o_groups)
    return linear(ops, quantise(ops, z), w.wo_b)
