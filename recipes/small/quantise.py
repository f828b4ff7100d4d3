"""From training's float parameters to the real checkpoint, and back.

Belongs here: which format each tensor takes (deepinfer/ops/formats.py rounds), the vision tower's synthetic weights.
Does not belong here: the file format (deepinfer/model/checkpoint.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.model.checkpoint import plan, tensor_table, write_checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.synthetic import synthetic_weights
from deepinfer.ops import formats
from recipes.small.twin import Weights, shapes

VISION = ("vision.", "aligner.", "image_")
VISION_SEED = 0


def to_float(tensors: Mapping[str, Tensor], config: ModelConfig) -> tuple[Weights, Weights]:
    """(parameters, router biases) of a loaded checkpoint (model form): what training would hold."""
    params: Weights = {}
    for name in shapes(config):
        weight, scale = tensors[name], tensors.get(name.removesuffix("weight") + "scale")
        if scale is None:
            params[name] = weight.float()
        elif name.endswith("engram.embed.weight"):
            params[name] = formats.dequant_fp8(weight, scale)
        elif weight.dtype is torch.uint8:
            params[name] = formats.dequant_fp4(weight, scale)
        else:
            params[name] = formats.dequant_fp8_block(weight, scale)
    names = (f"{s.name}.ffn.gate.bias" for s in (*config.layers, *config.draft_layers))
    return params, {n: tensors[n].float() for n in names}


def model_form(params: Weights, biases: Weights, config: ModelConfig) -> Weights:
    """The model form of checkpoint.py (without vision): every parameter rounded to its stored format."""
    specs = plan(config)[0]
    tensors: Weights = {}
    for name, value in params.items():
        value, scale = value.detach().float().cpu(), name.removesuffix("weight") + "scale"
        if specs[name].dtype == "I8":
            tensors[name], tensors[scale] = formats.quant_fp4(value)
        elif name.endswith("engram.embed.weight"):
            tensors[name], tensors[scale] = formats.quant_fp8(value)
        elif specs[name].dtype == "F8_E4M3":
            tensors[name], tensors[scale] = formats.quant_fp8_block(value)
        else:
            tensors[name] = value.bfloat16() if specs[name].dtype == "BF16" else value
    for name, value in biases.items():
        tensors[name] = value.detach().float().cpu()
        tensors[name + "_vl"] = tensors[name].clone()  # image rows route as text does: vision was not trained
    return tensors


def file_tensors(params: Weights, biases: Weights, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the whole checkpoint in file form."""
    places, tensors = plan(config)[1], model_form(params, biases, config)
    vision = [n for n in tensor_table(config) if n.startswith(VISION)]
    for name, place in places.items():
        if name not in vision:
            yield name, place.of(tensors).contiguous()
    yield from synthetic_weights(config, VISION_SEED, names=vision)


def write(
    path: str | Path,
    config: ModelConfig,
    params: Weights,
    biases: Weights,
    tokenizer: str | Path,
    about: dict[str, Any] | None = None,
) -> int:
    """Write the checkpoint folder, and `about` (how it was made) as about.json; returns its size in bytes."""
    write_checkpoint(path, config, file_tensors(params, biases, config), tokenizer=tokenizer)
    if about is not None:
        (Path(path) / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return sum(f.stat().st_size for f in Path(path).iterdir())
