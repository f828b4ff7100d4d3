"""Manifold-constrained hyper-connections: four residual streams around every sublayer, with a lagged `pre`.

Belongs here: which coefficients are used when (spec/model.md 9). Does not belong here: their arithmetic (ops/hyper.py).
The `pre` that a sublayer computes is used by the next one; `post` and `comb` by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.model.config import ModelConfig
from deepinfer.model.weights import HyperWeights, Ops


def expand(config: ModelConfig, h: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings [T, H] -> (streams [T, C, H], first `pre` [T, C] = stream 0 alone)."""
    streams = h.unsqueeze(1).repeat(1, config.hc_mult, 1)
    pre = torch.zeros((h.shape[0], config.hc_mult), dtype=torch.float32, device=h.device)
    pre[:, 0] = 1.0
    return streams, pre


def mix(ops: Ops, config: ModelConfig, w: HyperWeights, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(pre, post, comb) of a sublayer from the streams entering it."""
    return ops.hc_mix(streams, w.fn, w.base, w.scale, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)


def read(ops: Ops, config: ModelConfig, streams: Tensor, pre: Tensor, norm: Tensor) -> Tensor:
    """Input of a sublayer [T, H]: streams collapsed with the previous sublayer's `pre`, then normed."""
    return ops.rms_norm(ops.hc_collapse(streams, pre), norm, config.rms_norm_eps)
