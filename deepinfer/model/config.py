"""What the checkpoint says the model is: config.json as one flat frozen dataclass, and the layer map in it.

Belongs here: reading and writing the nested Hugging Face form, every load-time check (spec/model.md section
2), `LayerSpec`, and the Engram hash constants that follow from the config (section 8).
Does not belong here: tensors (checkpoint.py), engine options (deepinfer/config.py), torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ConfigError, list_problems

logger = logging.getLogger(__name__)

ARCHITECTURE = "DeepseekV41ForCausalLM"
QUANT_BLOCK = 32  # elements that share a scale: every quantised dimension is a multiple of it

# Fields with one supported value: written by `to_dict`, and a config.json that says otherwise is refused.
_FIXED_TOP = {"architectures": [ARCHITECTURE], "model_type": "deepseek_v41", "dtype": "bfloat16"}
_FIXED_QUANT = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [QUANT_BLOCK, QUANT_BLOCK],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_FIXED_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
_FIXED_ROPE = {"rope_type": "yarn"}
_FIXED_VISION = {"model_type": "deepseek_v41_vision"}
# Not in the released file, but another value would be another model.
_FIXED_IF_PRESENT: dict[str, Any] = {
    "hc_pre_from_prev_sublayer": True,
    "q_head_norm": False,
    "num_hash_layers": 0,
    "gate_temp": 1.0,
}
_TRAINING_ONLY: dict[str, Any] = {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}

_TOP_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN stretch of the RoPE table of layers with ratio > 0 (spec section 6)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Vision tower and image budget (spec section 10). Sizes in pixels, patches or image tokens as named."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None


@dataclass(frozen=True)
class LayerSpec:
    """What one block is. `index` counts backbone layers, then draft stages; `name` prefixes its tensors."""

    index: int
    name: str
    ratio: int  # 0: window only; 1 or 2: tokens per compressed entry
    kv_source: int | None  # layer whose compressed KV it reads
    index_source: int | None  # layer whose top-k selection it reads
    owns_kv: bool
    owns_index: bool
    candidate: Literal["source", "reader"] | None
    engram: int | None  # position in engram_layer_ids
    yarn: bool  # RoPE table: compress_rope_theta with YaRN, else rope_theta
    tap: bool  # its input streams feed the draft
    n_experts: int
    top_k: int
    draft: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Every field of the released config.json that may vary, flat, by its Hugging Face name (spec section 2).

    Building one checks it: all violations come in one ConfigError, so an instance is always a model this
    engine can run.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    rms_norm_eps: float
    swiglu_limit: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnConfig
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]  # backbone layers, then draft stages
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]  # table rows, per Engram layer
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_compressed_vocab_size: int
    engram_pad_token_id: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _raise_if_any(_violations(self))

    @classmethod
    def from_dict(cls, hf: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read the nested form. ConfigError lists every violation, under the name `where`."""
        _check_architecture(hf, where)
        problems: list[str] = []
        quant = _section(hf, "quantization_config", problems)
        text = _section(hf, "text_config", problems)
        _raise_if_any(problems, where)  # without these two nothing else can be judged
        rope = _section(text, "rope_scaling", problems)
        vision = _section(hf, "vision_config", problems) if hf.get("vision_config") is not None else None
        unknown = sorted(set(text) - _FIELDS - set(_FIXED_TEXT | _FIXED_IF_PRESENT | _TRAINING_ONLY))
        if unknown:
            logger.warning("%s: fields this engine does not know are ignored: %s", where, ", ".join(unknown))

        fixed = _fixed(hf, _FIXED_TOP)
        fixed += _fixed(quant, _FIXED_QUANT, "quantization_config.")
        fixed += _fixed(text, _FIXED_TEXT | _FIXED_IF_PRESENT, "text_config.")
        fixed += _fixed(rope, _FIXED_ROPE, "rope_scaling.")
        fixed += _fixed(vision or {}, _FIXED_VISION, "vision_config.")
        values = _read_fields(cls, {**text, **{k: hf[k] for k in _TOP_KEYS if k in hf}}, "", problems)
        values["rope_scaling"] = _read_section(YarnConfig, rope, "rope_scaling.", problems)
        values["vision"] = None
        if vision is not None:
            values["vision"] = _read_section(VisionConfig, vision, "vision_config.", problems)
        if not problems:  # the checks between fields need every value
            problems = _violations(SimpleNamespace(**values))
        _raise_if_any(fixed + problems, where)
        return cls(**values)

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read `path`/config.json. ConfigError when it is absent, is no JSON, or is another model's."""
        file = Path(path) / "config.json"
        try:
            hf = json.loads(file.read_text(encoding="utf-8"))
        except OSError as e:
            raise ConfigError(
                f"{file} cannot be read ({e.strerror}): a checkpoint folder holds it next to its shards"
            ) from e
        except (json.JSONDecodeError, UnicodeDecodeError) as e:
            raise ConfigError(f"{file} is not valid JSON: {e}") from e
        return cls.from_dict(hf, str(file))

    def to_dict(self) -> dict[str, Any]:
        """The nested form of the released config.json; `from_dict` of it gives an equal config."""
        flat = {name: getattr(self, name) for name in _FIELDS - {"vision"}}
        top = {name: flat.pop(name) for name in _TOP_KEYS}
        flat["rope_scaling"] = _FIXED_ROPE | asdict(self.rope_scaling)
        hf = {
            **_FIXED_TOP,
            **top,
            "quantization_config": _FIXED_QUANT,
            "text_config": _FIXED_TEXT | _TRAINING_ONLY | dict(sorted(flat.items())),
        }
        if self.vision is not None:
            hf["vision_config"] = _FIXED_VISION | asdict(self.vision)
        return dict(json.loads(json.dumps(hf)))  # tuples become lists; a private copy, so callers may edit it

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The backbone blocks, in order."""
        return tuple(self._layer(i) for i in range(self.num_hidden_layers))

    @cached_property
    def draft_layers(self) -> tuple[LayerSpec, ...]:
        """The DSpark blocks (`mtp.*`), in order; empty when the checkpoint has none."""
        return tuple(self._layer(self.num_hidden_layers + i) for i in range(self.num_nextn_predict_layers))

    @property
    def decoder_start(self) -> int:
        """First layer of the decoder half: the last KV source, whose global KV the later layers read."""
        return self.kv_source_layer_ids[-1]

    @property
    def hc_mix_size(self) -> int:
        """Outputs of one mHC mix: pre, post and the comb matrix."""
        return self.hc_mult * (2 + self.hc_mult)

    @property
    def engram_columns(self) -> int:
        """Table rows gathered per token and Engram layer: n-gram orders 2..max, times hash heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def _layer(self, i: int) -> LayerSpec:
        draft = i >= self.num_hidden_layers
        ratio = self.compress_ratios[i]
        candidate: Literal["source", "reader"] | None = None
        if not draft and i in self.index_source_layer_ids and i >= self.candidate_source_layer_id:
            candidate = "source" if i == self.candidate_source_layer_id else "reader"
        return LayerSpec(
            index=i,
            name=f"mtp.{i - self.num_hidden_layers}" if draft else f"layers.{i}",
            ratio=ratio,
            kv_source=_last_at_or_before(self.kv_source_layer_ids, i) if ratio else None,
            index_source=_last_at_or_before(self.index_source_layer_ids, i) if ratio else None,
            owns_kv=i in self.kv_source_layer_ids,
            owns_index=i in self.index_source_layer_ids,
            candidate=candidate,
            engram=self.engram_layer_ids.index(i) if i in self.engram_layer_ids else None,
            yarn=ratio > 0,
            tap=bool(self.num_nextn_predict_layers) and i in self.dspark_target_layer_ids,
            n_experts=self.dspark_n_routed_experts if draft else self.n_routed_experts,
            top_k=self.dspark_num_experts_per_tok if draft else self.num_experts_per_tok,
            draft=draft,
        )


_FIELDS = frozenset(f.name for f in fields(ModelConfig))
_POSITIVE = [
    f.name
    for f in fields(ModelConfig)
    if f.type in ("int", "float")
    and not f.name.startswith(("engram_", "dspark_", "num_nextn"))  # checked where there are any
    and not f.name.endswith(("_id", "_eps"))
]


# ---- Engram constants (spec section 8) ----


def engram_multipliers(config: ModelConfig) -> NDArray[np.int64]:
    """Hash multipliers [Engram layers, max_ngram_size]: odd, and id * multiplier fits 63 bits."""
    bound = ((2**63 - 1) // config.engram_compressed_vocab_size) // 2
    draws = [
        np.random.default_rng(10007 * layer).integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
        for layer in config.engram_layer_ids
    ]
    return np.stack(draws) * 2 + 1 if draws else np.zeros((0, config.engram_max_ngram_size), np.int64)


def engram_primes(config: ModelConfig) -> NDArray[np.int64]:
    """Hash buckets [Engram layers, max_ngram_size - 1, heads]: consecutive primes >= engram_vocab_size."""
    shape = (len(config.engram_layer_ids), config.engram_max_ngram_size - 1, config.engram_n_heads)
    primes = consecutive_primes(config.engram_vocab_size, int(np.prod(shape)))
    return np.array(primes, np.int64).reshape(shape)


def engram_offsets(config: ModelConfig) -> NDArray[np.int64]:
    """First table row of every column, [Engram layers, columns]: the sum of the layer's earlier primes."""
    primes = engram_primes(config).reshape(len(config.engram_layer_ids), config.engram_columns)
    return np.cumsum(primes, axis=1) - primes


@lru_cache
def consecutive_primes(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes >= start, by trial division (48 of them near 16,000,000 take about 10 ms)."""
    found: list[int] = []
    n = max(start, 2)
    while len(found) < count:
        if n == 2 or (n % 2 and all(n % d for d in range(3, int(n**0.5) + 1, 2))):
            found.append(n)
        n += 1
    return tuple(found)


# ---- reading ----


def _check_architecture(hf: Mapping[str, Any], where: str) -> None:
    """Another model's config would only produce noise in the other checks, so this one stands alone."""
    if not isinstance(hf, Mapping):
        raise ConfigError(f"{where}: must hold a JSON object, found {type(hf).__name__}")
    found = hf.get("architectures")
    if found != [ARCHITECTURE]:
        name = ", ".join(map(str, found)) if isinstance(found, list) and found else repr(found)
        raise ConfigError(
            f"{where}: this engine runs DeepSeek-V4.1 only, found {name} "
            f"(model_type {hf.get('model_type')!r}); its architectures field must be [{ARCHITECTURE!r}]"
        )


def _section(source: Mapping[str, Any], name: str, problems: list[str]) -> Mapping[str, Any]:
    found = source.get(name)
    if isinstance(found, Mapping):
        return found
    problems.append(f"{name} must be an object, found {found!r} (the released config.json is nested)")
    return {}


def _fixed(source: Mapping[str, Any], expected: Mapping[str, Any], prefix: str = "") -> list[str]:
    return [
        f"{prefix}{key} must be {value!r}, found {source[key]!r}"
        for key, value in expected.items()
        if key in source and source[key] != value
    ]


def _read_section(cls: type, source: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    before = len(problems)
    values = _read_fields(cls, source, prefix, problems)
    return cls(**values) if len(problems) == before else None


def _read_fields(cls: type, source: Mapping[str, Any], prefix: str, problems: list[str]) -> dict[str, Any]:
    """Values of the plain fields of `cls`, checked; numbers stay as written (16 does not become 16.0)."""
    values: dict[str, Any] = {}
    for f in fields(cls):
        kind = str(f.type)
        if kind not in _READERS:
            continue  # a section of its own
        if f.name not in source:
            if f.default is MISSING:
                problems.append(f"{prefix}{f.name} is missing")
            continue
        value = source[f.name]
        accepts, noun = _READERS[kind]
        if not accepts(value):
            problems.append(f"{prefix}{f.name} must be {noun}, found {value!r}")
        values[f.name] = tuple(value) if isinstance(value, list) else value
    return values


def _is_int(v: Any) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and v >= 0


def _is_number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v < float("inf")


_READERS = {
    "int": (_is_int, "an integer >= 0"),
    "float": (_is_number, "a finite number >= 0"),
    "float | None": (lambda v: v is None or _is_number(v), "a finite number >= 0, or null"),
    "tuple[int, ...]": (
        lambda v: isinstance(v, list | tuple) and all(map(_is_int, v)),
        "a list of integers >= 0",
    ),
}


# ---- checks ----


def _raise_if_any(problems: list[str], where: str = "ModelConfig") -> None:
    if problems:
        raise ConfigError(list_problems(f"{where}: not a model this engine can run", problems))


def _last_at_or_before(ids: tuple[int, ...], layer: int) -> int | None:
    return max((i for i in ids if i <= layer), default=None)


def _violations(c: Any) -> list[str]:
    """Every broken rule of spec section 2, and what the formats of section 4 need. c: like a ModelConfig."""
    vision = _check_vision(c.vision) if c.vision else []
    return _check_numbers(c) + _check_layer_map(c) + _check_engram(c) + _check_draft(c) + vision


def _check_numbers(c: Any) -> list[str]:
    values = {name: getattr(c, name) for name in _POSITIVE}
    bad = [f"{name} must be positive, found {v}" for name, v in values.items() if v <= 0]
    blocks = {
        n: getattr(c, n)
        for n in (
            "hidden_size",
            "moe_intermediate_size",
            "head_dim",
            "q_lora_rank",
            "o_lora_rank",
            "index_head_dim",
        )
    }
    if c.o_groups and c.num_attention_heads % c.o_groups:
        bad.append(f"num_attention_heads {c.num_attention_heads} must be a multiple of o_groups {c.o_groups}")
    bad += [
        f"{name} must be a multiple of {QUANT_BLOCK} (scale blocks), found {v}"
        for name, v in blocks.items()
        if v % QUANT_BLOCK
    ]
    limit = min(c.head_dim, c.index_head_dim)
    if c.qk_rope_head_dim % 2 or not 0 < c.qk_rope_head_dim <= limit:
        bad.append(
            f"qk_rope_head_dim must be even and at most {limit} (head_dim, index_head_dim), found {c.qk_rope_head_dim}"
        )
    if c.n_shared_experts != 1:
        bad.append(f"n_shared_experts must be 1, found {c.n_shared_experts}")
    if c.hc_mult > 4:
        bad.append(f"hc_mult must be 1 to 4 (the release has 4; the Sinkhorn kernels hold no more), found {c.hc_mult}")
    reach = c.candidate_topk_blocks * c.candidate_block_size - (c.candidate_block_size - 1)
    if 0 < reach < c.index_topk:
        bad.append(
            f"candidate_topk_blocks {c.candidate_topk_blocks} x candidate_block_size {c.candidate_block_size} may "
            f"leave only {reach} candidates, fewer than index_topk {c.index_topk}"
        )
    if c.num_experts_per_tok > c.n_routed_experts:
        bad.append(f"num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts {c.n_routed_experts}")
    for name in (*_TOP_KEYS, "engram_pad_token_id"):
        if getattr(c, name) >= c.vocab_size:
            bad.append(f"{name} {getattr(c, name)} is outside the vocabulary of {c.vocab_size}")
    return bad


def _check_layer_map(c: Any) -> list[str]:
    ratios, kv, index = c.compress_ratios, c.kv_source_layer_ids, c.index_source_layer_ids
    n = c.num_hidden_layers
    bad = [f"compress_ratios[{i}] must be 0, 1 or 2, found {r}" for i, r in enumerate(ratios) if r not in (0, 1, 2)]
    if len(ratios) != n + c.num_nextn_predict_layers:
        bad.append(
            f"compress_ratios must have {n + c.num_nextn_predict_layers} entries "
            f"({n} layers + {c.num_nextn_predict_layers} draft stages), found {len(ratios)}"
        )
    for name in (
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "engram_layer_ids",
        "dspark_target_layer_ids",
    ):
        ids = getattr(c, name)
        if list(ids) != sorted(set(ids)) or any(i >= n for i in ids):
            bad.append(f"{name} must be ascending layer numbers below {n}, found {list(ids)}")
    if not kv:
        bad.append("kv_source_layer_ids must name at least one layer")
    if bad:
        return bad  # the map below needs a sound frame
    bad += [f"draft stage {i} must have ratio 0, found {r}" for i, r in enumerate(ratios[n:]) if r]
    for i in range(n):
        source = _last_at_or_before(kv, i)
        if ratios[i] and (source is None or ratios[source] != ratios[i]):
            found = "none" if source is None else f"layer {source} with ratio {ratios[source]}"
            bad.append(
                f"layer {i} has ratio {ratios[i]} and needs a kv source of that ratio at or before it, found {found}"
            )
        if not ratios[i] and (i in kv or i in index):
            bad.append(f"layer {i} has ratio 0 and cannot be a kv or index source")
        if i in kv and i not in index:
            bad.append(f"kv source {i} must also be an index source")
    last = kv[-1]
    if ratios[last] > 1:
        bad.append(f"the last kv source {last} must have ratio 1, found {ratios[last]}")
    if c.candidate_source_layer_id != last:
        bad.append(f"candidate_source_layer_id must be the last kv source {last}, found {c.candidate_source_layer_id}")
    late = [i for i in c.engram_layer_ids if i >= last]
    if late:
        bad.append(f"Engram layers must come before the last kv source {last} (decoder replay), found {late}")
    return bad


def _check_engram(c: Any) -> list[str]:
    count = len(c.engram_layer_ids)
    if len(c.engram_num_embeddings) != count:
        return [
            f"engram_num_embeddings must have one entry per Engram layer ({count}), "
            f"found {len(c.engram_num_embeddings)}"
        ]
    if not count:
        return []
    names = ("engram_n_heads", "engram_head_dim", "engram_vocab_size", "engram_compressed_vocab_size")
    bad = [f"{name} must be at least 1, found {getattr(c, name)}" for name in names if getattr(c, name) < 1]
    if c.engram_max_ngram_size < 2:
        bad.append(f"engram_max_ngram_size must be at least 2, found {c.engram_max_ngram_size}")
    if c.engram_head_dim % QUANT_BLOCK:
        bad.append(f"engram_head_dim must be a multiple of {QUANT_BLOCK} (scale blocks), found {c.engram_head_dim}")
    if c.engram_compressed_vocab_size > c.vocab_size:
        bad.append(f"engram_compressed_vocab_size {c.engram_compressed_vocab_size} exceeds vocab_size {c.vocab_size}")
    if not bad:
        rows = engram_primes(c).sum((1, 2)).tolist()
        if rows != list(c.engram_num_embeddings):
            bad.append(
                f"engram_num_embeddings must be {rows}, the sums of the primes derived from "
                f"engram_vocab_size {c.engram_vocab_size}, found {list(c.engram_num_embeddings)}"
            )
    return bad


def _check_draft(c: Any) -> list[str]:
    if not c.num_nextn_predict_layers:
        return []
    names = (
        "dspark_block_size",
        "dspark_markov_rank",
        "dspark_n_routed_experts",
        "dspark_num_experts_per_tok",
    )
    bad = [f"{name} must be at least 1, found {getattr(c, name)}" for name in names if getattr(c, name) < 1]
    if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
        bad.append(
            f"dspark_num_experts_per_tok {c.dspark_num_experts_per_tok} exceeds "
            f"dspark_n_routed_experts {c.dspark_n_routed_experts}"
        )
    if c.dspark_noise_token_id >= c.vocab_size:
        bad.append(f"dspark_noise_token_id {c.dspark_noise_token_id} is outside the vocabulary of {c.vocab_size}")
    if not c.dspark_target_layer_ids:
        bad.append("dspark_target_layer_ids must name at least one layer when there are draft stages")
    return bad


def _check_vision(v: VisionConfig) -> list[str]:
    names = tuple(f.name for f in fields(VisionConfig) if f.name not in ("max_wh_ratio", "min_pixels"))
    bad = [
        f"vision_config.{name} must be at least 1, found {getattr(v, name)}" for name in names if getattr(v, name) < 1
    ]
    if not bad and v.hidden_size % (4 * v.num_attention_heads):
        bad.append(
            f"vision_config.hidden_size {v.hidden_size} must give each of {v.num_attention_heads} heads "
            "a multiple of 4 dimensions (two RoPE axes, rotated in pairs)"
        )
    return bad
