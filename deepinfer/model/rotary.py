"""RoPE angles: frequencies of the two tables and cos/sin of a step's rows (spec/model.md 6).

Belongs here: frequencies and angles. Does not belong here: the rotation (ops/hyper.py).
Angles are position times frequency in float32, as the published table is built: against float64 they drift with the
position (1.4e-4 rad at 4095), and a checkpoint is trained with that drift.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.model.config import ModelConfig


def inverse_frequencies(config: ModelConfig, yarn: bool) -> Tensor:
    """float32 [qk_rope_head_dim / 2]; with `yarn` the stretched table of layers with ratio > 0."""
    n, base = config.qk_rope_head_dim, config.compress_rope_theta if yarn else config.rope_theta
    freq = 1.0 / (base ** (torch.arange(0, n, 2, dtype=torch.float32) / n))
    if not yarn:
        return freq
    y = config.rope_scaling

    def dim(rotations: float) -> float:
        return n * math.log(y.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dim(y.beta_fast)), 0), min(math.ceil(dim(y.beta_slow)), n - 1)
    ramp = ((torch.arange(n // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return freq / y.factor * ramp + freq * (1 - ramp)


def cos_sin(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """positions int [T], inv_freq float32 [R] -> cos, sin float32 [T, R]."""
    angle = positions.float().unsqueeze(1) * inv_freq
    angle = angle.double()  # float32 cos differs by its place in the tensor (ops/common.py smooth)
    return angle.cos().float(), angle.sin().float()
