"""Mixture of experts of one layer: routed FP4 experts plus one shared FP8 expert (spec/model.md 7)."""

from __future__ import annotations

from torch import Tensor

from deepinfer.model.config import ModelConfig
from deepinfer.model.weights import MoEWeights, Ops, linear, quantise


def moe(ops: Ops, config: ModelConfig, top_k: int, w: MoEWeights, x: Tensor, is_image: Tensor) -> Tensor:
    """x [T, H], is_image bool [T] (router bias of image spans) -> [T, H]."""
    ids, weights = ops.router(x, w.gate, w.bias, w.bias_vl, is_image, top_k, config.routed_scaling_factor)
    xq = quantise(ops, x)
    routed = ops.experts(*xq, ids, weights, *w.w13, *w.w2, config.swiglu_limit)  # float32
    hidden = ops.swiglu(linear(ops, xq, w.shared_w13), config.swiglu_limit)
    shared = linear(ops, quantise(ops, hidden), w.shared_w2)
    return (routed + shared.float()).to(x.dtype)
