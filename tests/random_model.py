"""Small random models for the oracle tests: a valid config.json of any shape the spec allows, and weights.

Belongs here: drawing configs, weights and token maps from a numpy generator, in the checkpoint's own names
and formats. Shares no code with `deepinfer`: a tensor that the loader expects and the spec lacks shows up.
Does not belong here: assertions, and anything the size of a real model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from oracle import primes_from
from oracle_numbers import E2M1_VALUES, E4M3_VALUES, Array, pow2ceil, round_bf16, round_e2m1, round_e4m3

# ---------------------------------------------------------------- configs


def _subset(rng: np.random.Generator, items: Any, most: int) -> list[int]:
    items = list(items)
    count = int(rng.integers(0, min(most, len(items)) + 1))
    return sorted(int(i) for i in rng.choice(items, count, replace=False)) if count else []


def _layer_map(rng: np.random.Generator) -> dict[str, Any]:
    """Ratio-0 layers, then segments that start at a kv source, the last of ratio 1; ratio 0 also between."""
    ratios, kv, index = [0] * int(rng.integers(0, 3)), [], []
    for ratio in [int(r) for r in rng.integers(1, 3, size=rng.integers(0, 3))] + [1]:
        kv.append(len(ratios))
        index.append(len(ratios))
        ratios.append(ratio)
        for _ in range(int(rng.integers(0, 3))):
            kind = rng.choice(["reuse", "reindex", "window only"], p=[0.5, 0.35, 0.15])
            if kind == "reindex":
                index.append(len(ratios))
            ratios.append(0 if kind == "window only" else ratio)
    return {
        "num_hidden_layers": len(ratios),
        "compress_ratios": ratios,
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": index,
        "candidate_source_layer_id": kv[-1],
        "engram_layer_ids": _subset(rng, range(kv[-1]), 2),
    }


def _index_sizes(rng: np.random.Generator) -> dict[str, int]:
    block, top_k = int(rng.integers(1, 7)), int(rng.integers(1, 14))
    enough = -(-(top_k + block - 1) // block)  # blocks that always hold top_k visible entries (section 6)
    return {
        "index_n_heads": int(rng.integers(8, 14)),  # few heads: many scores are exactly zero
        "index_head_dim": int(rng.choice([32, 64])),
        "index_topk": top_k,
        "candidate_topk_blocks": enough + int(rng.integers(0, 3)),
        "candidate_block_size": block,
    }


def _engram(rng: np.random.Generator, layers: int, vocab: int) -> dict[str, Any]:
    order, heads, start = int(rng.integers(2, 5)), int(rng.integers(1, 4)), int(rng.integers(40, 90))
    columns = (order - 1) * heads
    primes = np.array(primes_from(start, layers * columns), np.int64).reshape(layers, columns)
    return {
        "engram_num_embeddings": [int(n) for n in primes.sum(1)],
        "engram_max_ngram_size": order,
        "engram_vocab_size": start,
        "engram_n_heads": heads,
        "engram_head_dim": int(rng.choice([32, 64])),
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": int(rng.integers(vocab // 2, vocab + 1)),
    }


def _draft(rng: np.random.Generator, layers: int, vocab: int) -> dict[str, Any]:
    stages = int(rng.integers(0, 4))
    taps = sorted(int(i) for i in rng.choice(layers, rng.integers(1, min(3, layers) + 1), replace=False))
    experts = int(rng.integers(2, 6))
    return {
        "num_nextn_predict_layers": stages,
        "dspark_block_size": int(rng.integers(1, 7)) if stages else 0,
        "dspark_noise_token_id": vocab - 1,
        "dspark_target_layer_ids": taps if stages else [],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": experts if stages else 0,
        "dspark_num_experts_per_tok": int(rng.integers(1, experts + 1)) if stages else 0,
    }


def _vision() -> dict[str, Any]:
    return {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 64,
        "min_pixels": 7056,
        "max_wh_ratio": None,
    }


def random_config(rng: np.random.Generator) -> dict[str, Any]:
    """A valid config.json dict; every structural choice is drawn: layers, window, heads, experts, draft."""
    vocab, layer_map = int(rng.integers(60, 120)), _layer_map(rng)
    groups, experts = int(rng.integers(1, 4)), int(rng.integers(3, 10))
    draft = _draft(rng, layer_map["num_hidden_layers"], vocab)
    layer_map["compress_ratios"] += [0] * draft["num_nextn_predict_layers"]
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": vocab,
        "hidden_size": int(rng.choice([64, 96])),
        "moe_intermediate_size": int(rng.choice([32, 64])),
        "num_attention_heads": groups * int(rng.integers(1, 3)),
        "num_key_value_heads": 1,
        "head_dim": int(rng.choice([32, 64, 96])),
        "qk_rope_head_dim": int(rng.choice([8, 16, 32])),
        "q_lora_rank": int(rng.choice([32, 64])),
        "o_lora_rank": 32,
        "o_groups": groups,
        "hidden_act": "silu",
        "swiglu_limit": float(rng.choice([1.0, 10.0])),
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": int(rng.choice([4, 16])),
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": int(rng.choice([64, 1024, 65536])),
        },
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": int(rng.integers(1, min(experts, 4) + 1)),
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": int(rng.integers(2, 20)),
        "compress_rope_theta": 160000,
        "hc_mult": int(rng.choice([2, 4])),
        "hc_sinkhorn_iters": int(rng.choice([1, 3, 20])),
        "hc_eps": 1e-6,
        **layer_map,
        **_index_sizes(rng),
        **_engram(rng, len(layer_map["engram_layer_ids"]), vocab),
        **draft,
    }
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": vocab - 2,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }
    return {**config, "vision_config": _vision()} if rng.random() < 0.5 else config


def random_token_map(config: dict[str, Any], rng: np.random.Generator) -> Array:
    """int32 [vocab]: token id -> compressed id, onto all engram_compressed_vocab_size classes."""
    vocab, classes = (config["text_config"][k] for k in ("vocab_size", "engram_compressed_vocab_size"))
    drawn = np.concatenate([np.arange(classes), rng.integers(0, classes, vocab - classes)])
    return rng.permutation(drawn).astype(np.int32)


# ---------------------------------------------------------------- weights


class _Maker:
    """Collects tensors by name: BF16 (exact in float32) and F32 as float32 arrays, codes as uint8."""

    def __init__(self, rng: np.random.Generator):
        self.rng, self.tensors = rng, {}

    def f32(self, name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> None:
        self.tensors[name] = (mean + std * self.rng.standard_normal(shape)).astype(np.float32)

    def bf16(self, name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> None:
        self.tensors[name] = round_bf16(mean + std * self.rng.standard_normal(shape)).astype(np.float32)

    def norm(self, name: str, *shape: int) -> None:
        self.bf16(name, *shape, std=0.1, mean=1.0)

    def dense(self, name: str, n: int, k: int, gain: float = 1.0, *, bias: bool = False) -> None:
        self.bf16(f"{name}.weight", n, k, std=gain * k**-0.5)
        if bias:
            self.bf16(f"{name}.bias", n, std=0.1)

    def fp8(self, name: str, n: int, k: int, gain: float = 1.0, *, rows: int = 32) -> None:
        """e4m3 codes with an E8M0 scale per `rows` x 32 block."""
        w = self.rng.standard_normal((n // rows, rows, k // 32, 32)) * gain * k**-0.5
        scale = pow2ceil(np.abs(w).max((1, 3), keepdims=True) / 448)
        codes = _codes(round_e4m3(w / scale), E4M3_VALUES[:127], sign_bit=0x80)
        self.tensors[f"{name}.weight"] = codes.reshape(n, k)
        self.tensors[f"{name}.scale"] = _e8m0_codes(scale).reshape(n // rows, k // 32)

    def fp4(self, name: str, n: int, k: int) -> None:
        """e2m1 codes, two per byte (even column low), with an E8M0 scale per 32 along k."""
        w = self.rng.standard_normal((n, k // 32, 32)) * k**-0.5
        scale = pow2ceil(np.abs(w).max(-1, keepdims=True) / 6)
        codes = _codes(round_e2m1(w / scale), E2M1_VALUES[:8], sign_bit=0x8).reshape(n, k)
        self.tensors[f"{name}.weight"] = codes[:, 0::2] | codes[:, 1::2] << 4
        self.tensors[f"{name}.scale"] = _e8m0_codes(scale).reshape(n, k // 32)


def _codes(values: Array, magnitudes: Array, sign_bit: int) -> Array:
    signs = np.where(np.signbit(values), sign_bit, 0)
    return (np.searchsorted(magnitudes, np.abs(values)) | signs).astype(np.uint8)


def _e8m0_codes(scale: Array) -> Array:
    return (np.log2(scale) + 127).astype(np.uint8)


def _attention(m: _Maker, c: dict[str, Any], name: str, layer: int) -> None:
    hidden, dim, heads, low, groups = (
        c[k] for k in ("hidden_size", "head_dim", "num_attention_heads", "q_lora_rank", "o_groups")
    )
    m.fp8(f"{name}.wq_a", low, hidden)
    m.norm(f"{name}.q_norm.weight", low)
    m.fp8(f"{name}.wq_b", heads * dim, low, gain=2.0)
    m.fp8(f"{name}.wkv", dim, hidden)
    m.norm(f"{name}.kv_norm.weight", dim)
    m.fp8(f"{name}.wo_a", groups * c["o_lora_rank"], heads * dim // groups, gain=2.0)
    m.fp8(f"{name}.wo_b", hidden, groups * c["o_lora_rank"])
    m.f32(f"{name}.attn_sink", heads)
    if layer in c["kv_source_layer_ids"]:
        m.dense(f"{name}.compressor.wkv", dim, hidden)
        if c["compress_ratios"][layer] == 2:
            m.dense(f"{name}.compressor.wgate", dim, hidden, gain=1.5)
        m.norm(f"{name}.compressor.norm.weight", dim)
        m.dense(f"{name}.indexer.wk", c["index_head_dim"], dim)
        m.norm(f"{name}.indexer.k_norm.weight", c["index_head_dim"])
    if layer in c["index_source_layer_ids"]:
        m.fp8(f"{name}.indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], low)
        m.dense(f"{name}.indexer.weights_proj", c["index_n_heads"], hidden)


def _block(m: _Maker, c: dict[str, Any], name: str, layer: int, experts: int) -> None:
    """One backbone layer or draft stage (then `layer` is past every source)."""
    hidden, inter, hc = c["hidden_size"], c["moe_intermediate_size"], c["hc_mult"]
    mixes = hc * (2 + hc)
    for kind in ("attn", "ffn"):
        m.norm(f"{name}.{kind}_norm.weight", hidden)
        m.f32(f"{name}.hc_{kind}_fn", mixes, hc * hidden, std=(hc * hidden) ** -0.5)
        m.f32(f"{name}.hc_{kind}_base", mixes, std=0.5)
        m.f32(f"{name}.hc_{kind}_scale", 3, std=0.15, mean=1.0)
    _attention(m, c, f"{name}.attn", layer)
    m.dense(f"{name}.ffn.gate", experts, hidden, gain=1.5)
    m.f32(f"{name}.ffn.gate.bias", experts, std=0.2)
    m.f32(f"{name}.ffn.gate.bias_vl", experts, std=0.5)
    for w, n, k in (("w1", inter, hidden), ("w3", inter, hidden), ("w2", hidden, inter)):
        m.fp8(f"{name}.ffn.shared_experts.{w}", n, k)
        for e in range(experts):
            m.fp4(f"{name}.ffn.experts.{e}.{w}", n, k)


def _engram_tensors(m: _Maker, c: dict[str, Any], layer: int, rows: int) -> None:
    name, hidden, hc, dim = f"layers.{layer}.engram", c["hidden_size"], c["hc_mult"], c["engram_head_dim"]
    columns = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"]
    m.fp8(f"{name}.embed", rows, dim, gain=dim**0.5, rows=1)
    m.fp8(f"{name}.wkv", (hc + 1) * hidden, columns * dim)
    m.norm(f"{name}.q_weight", hc, hidden)
    m.norm(f"{name}.k_weight", hc, hidden)


def _vision_tensors(m: _Maker, v: dict[str, Any], hidden: int) -> None:
    width, inter = v["hidden_size"], v["intermediate_size"]
    for name in ("image_start", "image_end", "image_newline"):
        m.bf16(name, hidden)
    m.dense("vision.patch_embed.proj", width, 3 * v["patch_size"] ** 2, bias=True)
    for b in range(v["num_hidden_layers"]):
        name = f"vision.blocks.{b}"
        m.norm(f"{name}.norm1.weight", width)
        m.norm(f"{name}.norm2.weight", width)
        m.dense(f"{name}.attn.wqkv", 3 * width, width, bias=True)
        m.dense(f"{name}.attn.wo", width, width, bias=True)
        m.dense(f"{name}.mlp.w1", 2 * inter, width)
        m.dense(f"{name}.mlp.w2", width, inter)
    m.norm("vision.norm.weight", width)
    m.dense("aligner.w1", hidden, width * v["downsample_ratio"] ** 2, bias=True)
    m.dense("aligner.w2", hidden, hidden, bias=True)


def random_weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, Array]:
    """Every tensor of spec section 3 for this config, by checkpoint name, in the form the oracle reads."""
    c, m = config["text_config"], _Maker(rng)
    hidden, vocab, stages = c["hidden_size"], c["vocab_size"], c["num_nextn_predict_layers"]
    m.bf16("embed.weight", vocab, hidden)
    m.dense("head", vocab, hidden, gain=2.0)
    m.norm("norm.weight", hidden)
    for layer in range(c["num_hidden_layers"]):
        _block(m, c, f"layers.{layer}", layer, c["n_routed_experts"])
    for layer, rows in zip(c["engram_layer_ids"], c["engram_num_embeddings"], strict=True):
        _engram_tensors(m, c, layer, rows)
    for stage in range(stages):
        _block(m, c, f"mtp.{stage}", c["num_hidden_layers"] + stage, c["dspark_n_routed_experts"])
    if stages:
        last, rank = f"mtp.{stages - 1}", c["dspark_markov_rank"]
        m.fp8("mtp.0.main_proj", hidden, hidden * len(c["dspark_target_layer_ids"]))
        m.norm("mtp.0.main_norm.weight", hidden)
        m.norm(f"{last}.norm.weight", hidden)
        m.bf16(f"{last}.markov_head.embed.weight", vocab, rank)
        m.dense(f"{last}.markov_head.head", vocab, rank, gain=1.5)
        m.dense(f"{last}.confidence_head.proj", 1, hidden + rank, gain=2.0)
    if config.get("vision_config"):
        _vision_tensors(m, config["vision_config"], hidden)
    return m.tensors


def file_form(weights: dict[str, Array]) -> dict[str, Any]:
    """The same tensors as torch tensors in the dtypes of a checkpoint file."""
    import torch

    bits = {"fp8": torch.float8_e4m3fn, "scale": torch.float8_e8m0fnu, "fp4": torch.int8}
    out = {}
    for name, array in weights.items():
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if array.dtype == np.uint8:
            kind = "scale" if name.endswith(".scale") else "fp4" if ".experts." in name else "fp8"
            out[name] = tensor.view(bits[kind])
        else:
            # The only F32 tensors are the mHC parameters, the sinks and the router biases.
            is_f32 = ".hc_" in name or name.endswith((".attn_sink", ".gate.bias", ".gate.bias_vl"))
            out[name] = tensor if is_f32 else tensor.to(torch.bfloat16)
    return out
