"""Checkpoints that nobody has to download: named configs, and random weights for them in the real format.

Belongs here: the configs (spec/model.md sections 2 and 15) and the seeded generator of their tensors.
Does not belong here: the format itself (checkpoint.py).

Weights are drawn so that every linear keeps unit variance and activations stay O(1), with scales spread over
three powers of two. Router biases are near zero, so routing is nearly uniform, the worst case for the number
of experts that a step reads: a trained router is more skewed, and on random weights drafts are accepted by
chance.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.errors import ConfigError
from deepinfer.model.checkpoint import (
    SHARD_BYTES,
    TOKENIZER_FILES,
    TensorSpec,
    tensor_table,
    write_checkpoint,
)
from deepinfer.model.config import ModelConfig, VisionConfig, YarnConfig, consecutive_primes

logger = logging.getLogger(__name__)

TINY_TOKENIZER = Path(__file__).parent.parent / "data" / "tiny"  # byte-level BPE, 512 ids, 382 Engram classes

# ---- configs ----


@cache
def full() -> ModelConfig:
    """The released DeepSeek-V4.1-Flash."""
    return ModelConfig(
        vocab_size=129280,
        hidden_size=5120,
        num_hidden_layers=40,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1280,
        o_lora_rank=1024,
        o_groups=8,
        rms_norm_eps=1e-20,
        swiglu_limit=10.0,
        max_position_embeddings=1048576,
        rope_theta=10000,
        compress_rope_theta=160000,
        rope_scaling=YarnConfig(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536),
        n_routed_experts=384,
        n_shared_experts=1,
        num_experts_per_tok=6,
        moe_intermediate_size=2304,
        routed_scaling_factor=1.5,
        sliding_window=128,
        compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
        kv_source_layer_ids=(2, 8, 14, 20),
        index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
        index_n_heads=32,
        index_head_dim=128,
        index_topk=512,
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-06,
        engram_layer_ids=(1, 14),
        engram_num_embeddings=(384006168, 384016682),
        engram_max_ngram_size=4,
        engram_n_heads=8,
        engram_head_dim=256,
        engram_vocab_size=16000000,
        engram_compressed_vocab_size=99092,
        engram_pad_token_id=2,
        num_nextn_predict_layers=3,
        dspark_block_size=5,
        dspark_noise_token_id=128799,
        dspark_target_layer_ids=(37, 38, 39),
        dspark_markov_rank=256,
        dspark_n_routed_experts=128,
        dspark_num_experts_per_tok=3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=129264,
        vision=VisionConfig(
            num_hidden_layers=32,
            hidden_size=1024,
            num_attention_heads=16,
            intermediate_size=2816,
            patch_size=14,
            rope_theta=10000,
            downsample_ratio=3,
            max_image_tokens=1024,
            min_pixels=295936,
        ),
    )


def slice_12() -> ModelConfig:
    """Twelve layers of real dimensions, 105.5 GiB: one H200. Every layer kind; Engram tables 1/16 as long."""
    return with_engram(
        replace(
            full(),
            num_hidden_layers=12,
            compress_ratios=(0,) * 2 + (2,) * 4 + (1,) * 6 + (0,) * 3,
            kv_source_layer_ids=(2, 4, 6),
            index_source_layer_ids=(2, 4, 6, 8, 10),
            candidate_source_layer_id=6,
            dspark_target_layer_ids=(9, 10, 11),
            engram_layer_ids=(),
            engram_num_embeddings=(),
        ),
        layer_ids=(1, 4),
        vocab_size=1_000_000,
    )


def slice_12_e64() -> ModelConfig:
    """slice-12 with a sixth of the experts, 33.2 GiB: quick tuning of everything but the experts."""
    return replace(slice_12(), n_routed_experts=64, dspark_n_routed_experts=32)


def unit_4() -> ModelConfig:
    """Four layers of real dimensions with all experts, 30.9 GiB: expert kernels. No draft, no Engram."""
    return replace(
        full(),
        num_hidden_layers=4,
        compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
    )


def tiny() -> ModelConfig:
    """Every layer kind in 7 MB; the map and dimensions of the goldens' tiny checkpoint."""
    base = replace(
        full(),
        vocab_size=512,
        hidden_size=192,
        num_hidden_layers=9,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=2,
        max_position_embeddings=4096,
        rope_scaling=replace(full().rope_scaling, original_max_position_embeddings=64),
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        sliding_window=16,
        compress_ratios=(0,) * 2 + (2,) * 3 + (1,) * 4 + (0,) * 3,
        kv_source_layer_ids=(2, 4, 5),
        index_source_layer_ids=(2, 4, 5, 7),
        index_n_heads=16,
        index_head_dim=32,
        index_topk=16,
        candidate_source_layer_id=5,
        candidate_topk_blocks=6,
        candidate_block_size=4,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        engram_compressed_vocab_size=382,
        dspark_noise_token_id=511,
        dspark_target_layer_ids=(6, 7, 8),
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        image_token_id=510,
        vision=_TINY_VISION,
    )
    return with_engram(base, layer_ids=(1, 4), vocab_size=1000, n_heads=2, head_dim=32)


def tiny_realdims() -> ModelConfig:
    """Real head, window, index and expert counts on a small hidden size, 17 MB: what `tiny` cannot show."""
    base = replace(
        tiny(),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        head_dim=512,
        qk_rope_head_dim=64,
        o_groups=8,
        rope_scaling=full().rope_scaling,
        n_routed_experts=384,
        num_experts_per_tok=6,
        moe_intermediate_size=32,
        sliding_window=128,
        compress_ratios=(2, 1, 1) + (0,) * 3,
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1, 2),
        index_n_heads=32,
        index_head_dim=128,
        index_topk=512,
        candidate_source_layer_id=1,
        candidate_topk_blocks=96,
        candidate_block_size=8,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        dspark_target_layer_ids=(1, 2),
        dspark_n_routed_experts=128,
        dspark_num_experts_per_tok=3,
    )
    return with_engram(base, layer_ids=(0,), vocab_size=256, n_heads=8, head_dim=32)


_TINY_VISION = VisionConfig(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    intermediate_size=128,
    patch_size=14,
    rope_theta=10000,
    downsample_ratio=3,
    max_image_tokens=64,
    min_pixels=7056,
)

CONFIGS: dict[str, Callable[[], ModelConfig]] = {
    "tiny": tiny,
    "tiny-realdims": tiny_realdims,
    "slice-12": slice_12,
    "slice-12-e64": slice_12_e64,
    "unit-4": unit_4,
    "full": full,
}


def named_config(name: str) -> ModelConfig:
    """The config called `name`; ConfigError lists the names there are."""
    if name not in CONFIGS:
        raise ConfigError(f"no synthetic config is called {name!r}; there are {', '.join(CONFIGS)}")
    return CONFIGS[name]()


def with_engram(
    config: ModelConfig,
    *,
    layer_ids: tuple[int, ...],
    vocab_size: int,
    n_heads: int | None = None,
    head_dim: int | None = None,
) -> ModelConfig:
    """`config` with Engram tables of these sizes; the row counts follow from the primes (spec section 8)."""
    heads = n_heads or config.engram_n_heads
    columns = (config.engram_max_ngram_size - 1) * heads
    primes = consecutive_primes(vocab_size, columns * len(layer_ids))
    return replace(
        config,
        engram_layer_ids=layer_ids,
        engram_num_embeddings=tuple(sum(primes[i * columns : (i + 1) * columns]) for i in range(len(layer_ids))),
        engram_vocab_size=vocab_size,
        engram_n_heads=heads,
        engram_head_dim=head_dim or config.engram_head_dim,
    )


# ---- weights ----

FP8_RMS = 100.0  # spread of e4m3 codes: a trained block reaches up to 448 at 3 to 4 sigma
FP4_RMS = 2.93  # of sixteen equally likely e2m1 codes
SCALE_RMS = math.sqrt((0.25 + 1 + 4) / 3)  # of a scale drawn from 1/2, 1, 2
CHUNK = 1 << 24  # elements drawn at a time: bounds the index temporaries


def synthetic_weights(
    config: ModelConfig, seed: int = 0, device: str = "cpu", names: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) in file form, in table order; packed FP4 and E8M0 as uint8.

    A tensor's bits depend on (config, seed, name, device type) alone, so any subset (`names`) or order gives
    the same tensors. CUDA and CPU generators differ.
    """
    table = tensor_table(config)
    for name in table if names is None else names:
        generator = torch.Generator(device).manual_seed(_seed_of(seed, name))
        yield name, _draw(name, table, generator)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def _draw(name: str, table: dict[str, TensorSpec], g: torch.Generator) -> Tensor:
    spec = table[name]
    if spec.dtype == "I8":
        return _random_bytes(spec.numel, g).view(spec.shape)  # every byte is a pair of e2m1 codes
    if spec.dtype == "F8_E4M3":
        return _fp8_codes(spec.numel, g).view(spec.shape)
    if spec.dtype == "F8_E8M0":
        exponent = 127 + _scale_exponent(name, table[name.removesuffix("scale") + "weight"])
        return torch.randint(exponent - 1, exponent + 2, spec.shape, generator=g, device=g.device, dtype=torch.uint8)
    mean, std = _distribution(name, spec)
    values = torch.randn(spec.shape, generator=g, device=g.device).mul_(std).add_(mean)
    return values.bfloat16() if spec.dtype == "BF16" else values


def _scale_exponent(name: str, weight: TensorSpec) -> int:
    """Power of two giving a linear unit gain, a table unit entries; about 2^-8 for FP4 at the real width."""
    rms, fan_in = (FP4_RMS, 2 * weight.shape[-1]) if weight.dtype == "I8" else (FP8_RMS, weight.shape[-1])
    gain = 1.0 if name.endswith(".embed.scale") else math.sqrt(fan_in)
    return round(-math.log2(rms * SCALE_RMS * gain))


def _distribution(name: str, spec: TensorSpec) -> tuple[float, float]:
    """(mean, standard deviation) of an unquantised tensor."""
    for ending, pair in _DISTRIBUTIONS.items():
        if name.endswith(ending):
            return pair
    if "norm" in name:
        return 1.0, 0.1
    return 0.0, 1 / math.sqrt(spec.shape[-1])  # a linear: unit gain


_DISTRIBUTIONS = {
    "embed.weight": (0.0, 1.0),
    "image_start": (0.0, 1.0),
    "image_end": (0.0, 1.0),
    "image_newline": (0.0, 1.0),
    "_base": (0.0, 0.5),  # mHC
    "_scale": (1.0, 0.2),
    "attn_sink": (0.0, 0.5),
    "q_weight": (1.0, 0.1),  # Engram gate
    "k_weight": (1.0, 0.1),
    "gate.bias": (0.0, 0.02),
    "gate.bias_vl": (0.0, 0.02),
    ".bias": (0.0, 0.1),  # vision
}


def _random_bytes(count: int, g: torch.Generator) -> Tensor:
    """uint8 [count], eight to a draw."""
    words = torch.randint(-(2**63), 2**63 - 1, ((count + 7) // 8,), generator=g, device=g.device, dtype=torch.int64)
    return words.view(torch.uint8)[:count]


def _fp8_codes(count: int, g: torch.Generator) -> Tensor:
    """float8_e4m3fn [count], normal with deviation FP8_RMS: a random byte picks one of 256 quantiles."""
    quantiles = torch.special.ndtri((torch.arange(256, device=g.device, dtype=torch.float64) + 0.5) / 256)
    codes = (quantiles * FP8_RMS).to(torch.float8_e4m3fn).view(torch.uint8)
    out = torch.empty(count, dtype=torch.uint8, device=g.device)
    for start in range(0, count, CHUNK):
        part = out[start : start + CHUNK]
        part.copy_(codes.index_select(0, _random_bytes(len(part), g).int()))
    return out.view(torch.float8_e4m3fn)


def make_checkpoint(
    name: str,
    path: str | Path,
    seed: int = 0,
    *,
    tokenizer: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ModelConfig:
    """Write the named config with random weights as a checkpoint folder; returns the config.

    Tensors are drawn and written one at a time; at most one shard is in memory. The tiny configs bring their
    tokenizer. The real-dimension ones take `tokenizer`, a folder with the release's tokenizer.json; without
    it none is written, and the folder then serves token ids only. ConfigError for an unknown name and for
    `full`.
    """
    config = named_config(name)
    if name == "full":
        raise ConfigError(
            "full is 475 GiB and is built on a device, not written to a disk; slice-12 has its dimensions"
        )
    if tokenizer is None and config.vocab_size == tiny().vocab_size:
        tokenizer = TINY_TOKENIZER
    if tokenizer is None:
        logger.warning(
            "%s: no tokenizer written (its vocabulary is the release's); pass tokenizer=FOLDER to add it",
            path,
        )
    elif not (Path(tokenizer) / TOKENIZER_FILES[0]).is_file():
        raise ConfigError(f"{tokenizer} holds no {TOKENIZER_FILES[0]}; name the folder of a tokenizer")
    write_checkpoint(path, config, synthetic_weights(config, seed), shard_bytes=shard_bytes, tokenizer=tokenizer)
    return config
