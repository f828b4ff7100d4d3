"""Attention of one layer: window plus selected global entries, one shared KV head.

Belongs here: spec/model.md 6. Does not belong here: compression and selection (compressor.py, indexer.py).
Legend: T rows of the step, M query rows (M = T unless decoder replay trims this layer), h heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.model.compressor import write_global_kv
from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.indexer import Selection, select
from deepinfer.model.state import ModelState, Rows, layer_window
from deepinfer.model.weights import AttentionWeights, Ops, linear, quantise


def attention(
    ops: Ops,
    config: ModelConfig,
    spec: LayerSpec,
    w: AttentionWeights,
    x: Tensor,
    rows: Rows,
    kept: Tensor | None,
    state: ModelState,
    selection: Selection,
) -> Tensor:
    """x [T, H] -> [M, H]. Keys and global KV are written for all T rows; queries are the kept ones."""
    eps = config.rms_norm_eps
    xq = quantise(ops, x)
    if kept is None:
        qr, kv = linear(ops, xq, w.wqkv_a).split((config.q_lora_rank, config.head_dim), dim=1)
        queries, xk = rows, x
    else:
        kv = linear(ops, xq, w.wkv)
        xk, queries = x[kept], rows.select(kept)
        qr = linear(ops, quantise(ops, xk), w.wq_a)
    cos_sin = queries.yarn if spec.yarn else queries.rope

    kv = ops.rope(ops.rms_norm(kv, w.kv_norm, eps), *(rows.yarn if spec.yarn else rows.rope), False)
    new = ops.pack_window(kv)  # [T, 528]
    if w.compressor is not None:
        write_global_kv(ops, config, spec, w.compressor, x, rows, state)

    qr = quantise(ops, ops.rms_norm(qr, w.q_norm, eps))  # [M, q_lora]
    if w.indexer is not None:
        select(ops, config, spec, w.indexer, qr, xk, queries, state, selection)
    q = linear(ops, qr, w.wq_b).unflatten(1, (config.num_attention_heads, config.head_dim))
    q = ops.rope(q, *cos_sin, False)

    source = spec.kv_source
    o = ops.attention(
        q,
        new,
        state.window[spec.index],
        queries.slots,
        queries.positions,
        queries.row,
        queries.first,
        layer_window(spec, config, queries),
        w.sink,
        None if source is None else state.latent[source],
        None if source is None else selection.entries,
        state.page_table,
        config.head_dim**-0.5,
        config.sliding_window,
        spec.ratio,
        state.page_size,
    )
    ops.ring_write(state.window[spec.index], new, rows.slots, rows.positions, rows.run_last)
    return output_projection(ops, config, w, ops.rope(o, *cos_sin, True))


def output_projection(ops: Ops, config: ModelConfig, w: AttentionWeights, o: Tensor) -> Tensor:
    """o [M, h, D], rotated back -> [M, H]: groups of heads to a low rank, then to the hidden size."""
    z = ops.linear_dequant(o.flatten(1), w.wo_a.weight, w.wo_a.scale, config.o_groups)
    return linear(ops, quantise(ops, z), w.wo_b)
