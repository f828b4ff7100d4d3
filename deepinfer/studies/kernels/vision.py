"""The vision tower on one image of about 1,000 tokens: 93 x 93 patches of the released config, random weights.

The floor counts the FLOPs of its matrix products and of attention (two products of n x n for each head).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.model import synthetic
from deepinfer.model.checkpoint import tensor_table
from deepinfer.model.vision import Vision
from deepinfer.ops import QUANTISED
from deepinfer.studies.kernels.harness import Case

GRID = (93, 93)


@functools.cache
def _weights() -> dict[str, Tensor]:
    names = [n for n in tensor_table(synthetic.full()) if n.startswith(("vision.", "aligner.", "image_"))]
    return dict(synthetic.synthetic_weights(synthetic.full(), 0, "cuda", names))


def _flops() -> float:
    config = synthetic.full()
    assert config.vision is not None
    v, n = config.vision, GRID[0] * GRID[1]
    merged = -(-GRID[0] // v.downsample_ratio) * -(-GRID[1] // v.downsample_ratio)
    total = 0.0
    for name, tensor in _weights().items():
        if name.endswith(".weight") and tensor.dim() >= 2:
            total += 2.0 * tensor.numel() * (merged if name.startswith("aligner") else n)
    return total + v.num_hidden_layers * 4.0 * n * n * v.hidden_size


def _tower() -> tuple[Vision, Tensor]:
    config = synthetic.full()
    assert config.vision is not None
    p = config.vision.patch_size
    patches = torch.randn((GRID[0] * GRID[1], 3, p, p), device="cuda").bfloat16()
    return Vision(config, config.vision, _weights(), QUANTISED, torch.bfloat16), patches


def _make() -> list[Callable[[], Any]]:
    tower, patches = _tower()
    return [functools.partial(tower.span, patches, GRID)] * 2


def _cublas() -> list[Callable[[], Any]]:
    """The same tower with torch's linears."""
    tower, patches = _tower()
    w = _weights()

    def linear(x: Tensor, name: str, bias: bool = False) -> Tensor:
        return F.linear(x, w[name + ".weight"].flatten(1), w[name + ".bias"] if bias else None)

    tower._linear = linear  # type: ignore[method-assign]
    return [functools.partial(tower.span, patches, GRID)] * 2


def cases() -> Iterator[Case]:
    yield Case("vision_tower/tokens994", _make, 0.0, _flops(), baselines={"torch linears": _cublas})
