"""Builds an engine from what a user names: checkpoint folder, memory sizes, model, tokenizer.

Belongs here: names of known checkpoints, the order of start-up, its log. Does not belong here: the loop (core.py),
reading tensors (model/checkpoint.py).
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from pathlib import Path

import torch

from deepinfer import envs
from deepinfer.cache.groups import human
from deepinfer.config import SHIPPED, EngineConfig
from deepinfer.engine.core import Engine
from deepinfer.errors import ConfigError
from deepinfer.model import checkpoint, synthetic
from deepinfer.model.config import ModelConfig
from deepinfer.model.transformer import Transformer
from deepinfer.params import SamplingParams
from deepinfer.text.tokenizer import Tokenizer, engram_token_map

logger = logging.getLogger(__name__)


def load_engine(config: EngineConfig) -> Engine:
    """Read the checkpoint that `config.model` names and build an engine for it."""
    begin = time.monotonic()
    envs.warn_unknown()
    config.check_device()
    folder = checkpoint_folder(config.model)
    model_config = ModelConfig.from_dir(folder)
    config.resolve_for(model_config)  # an option beyond the model's limits is told before the weights are read
    tokenizer = Tokenizer(config.tokenizer or folder)
    weights = checkpoint.load_checkpoint(folder, model_config, device=config.device)
    token_map = None
    if model_config.engram_layer_ids:
        classes = model_config.engram_compressed_vocab_size
        token_map = torch.from_numpy(engram_token_map(tokenizer, model_config.vocab_size, num_classes=classes))
    model = Transformer(model_config, weights, token_map, numerics=config.numerics, donate=True)
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    engine = Engine(config, model_config, model, tokenizer, SamplingParams.defaults_of(folder))
    seconds = time.monotonic() - begin
    logger.info("%s: %d tensors, %s of weights, ready in %.1f s", folder, len(weights), human(size), seconds)
    return engine


def checkpoint_folder(model: str) -> Path:
    """The folder of `model`: the one in the package for a shipped name (whatever lies in the working directory:
    `./small` is a folder there), a folder as it is, or a synthetic name's, written below DEEPINFER_CACHE_ROOT
    at first use.

    Written aside and renamed, so that several processes may start together on an empty cache.
    """
    if model in SHIPPED:
        return _shipped_folder(model)
    if Path(model).is_dir():
        return Path(model)
    if model not in synthetic.CONFIGS:
        names, others = ", ".join(SHIPPED), ", ".join(synthetic.CONFIGS)
        raise ConfigError(
            f"model {model!r} is neither a folder nor a known name: {names} (trained), {others} (random weights)"
        )
    root = Path(envs.get("DEEPINFER_CACHE_ROOT")) / "checkpoints"
    final = root / f"{model}-{_generator_digest()}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    logger.info("writing the synthetic checkpoint %s to %s", model, final)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{model}-") as scratch:
        synthetic.make_checkpoint(model, Path(scratch) / "new")
        try:
            os.rename(Path(scratch) / "new", final)
        except OSError:
            if not final.is_dir():  # otherwise another process was faster
                raise
    return final


def _shipped_folder(name: str) -> Path:
    folder = SHIPPED[name]
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model {name!r} comes with the package, but its files are not in {folder}: install deepinfer again, "
            "make them with recipes/small (docs/small.md), or name another model"
        )
    return folder


def _generator_digest() -> str:
    """Names the code that writes synthetic checkpoints: a newer version never meets an older folder."""
    sources = (Path(str(module.__file__)).read_bytes() for module in (synthetic, checkpoint))
    return hashlib.blake2b(b"".join(sources), digest_size=4).hexdigest()
