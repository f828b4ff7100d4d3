"""The checkpoint on disk: what tensors there are, reading them into the form the model wants, writing them.

Belongs here: names, dtypes and shapes of every tensor (spec/model.md section 3), row fusions done at load,
validation of shards against the config, the streaming reader and writer.
Does not belong here: device layouts of kernels (weights.py), what the numbers mean (ops/formats.py), random
weights (synthetic.py).

Two forms of the weights:
- *file form*: one entry per tensor of the release, in its own dtype;
- *model form*: what `load_checkpoint` returns. Experts of a layer are stacked ([E, ...]) and rows that share
  an input are fused: `wq_a | wkv`, `w1 | w3`, compressor `wkv | wgate`. Packed FP4 and E8M0 scales are uint8
  views.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepinfer.errors import CheckpointError, list_problems
from deepinfer.model.config import QUANT_BLOCK, LayerSpec, ModelConfig

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SHARD_BYTES = 10 * 10**9  # about the release: 48 shards, 510 GB
MAX_LISTED = 200  # names per kind of problem; a lost shard alone can take ten thousand tensors with it

_FILE_DTYPE = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}
# Bit patterns, not numbers: a numeric cast would destroy them, so no other file sees their nominal dtype.
_MODEL_DTYPE = _FILE_DTYPE | {"F8_E8M0": torch.uint8, "I8": torch.uint8}

# Row fusions of the model form: the first part's rows come first, in the order of `tensor_table`.
_FUSED_ROWS = {
    ".attn.wq_a": ".attn.wqkv_a",
    ".attn.wkv": ".attn.wqkv_a",
    ".attn.compressor.wkv": ".attn.compressor.wkv_gate",
    ".attn.compressor.wgate": ".attn.compressor.wkv_gate",
    ".ffn.shared_experts.w1": ".ffn.shared_experts.w13",
    ".ffn.shared_experts.w3": ".ffn.shared_experts.w13",
    ".ffn.experts.w1": ".ffn.experts.w13",
    ".ffn.experts.w3": ".ffn.experts.w13",
}
_EXPERT = re.compile(r"(.+\.ffn\.experts)\.(\d+)(\.w[123])")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: `dtype` as a safetensors header spells it, `shape` as stored."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * _FILE_DTYPE[self.dtype].itemsize

    @property
    def parameters(self) -> int:
        """Logical parameters: a packed FP4 byte holds two, a scale is none."""
        return {"I8": 2, "F8_E8M0": 0}.get(self.dtype, 1) * self.numel


# ---- what there is ----


def tensor_table(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint of this config, in a fixed order (spec section 3).

    The released config gives 96,085 tensors, 510,286,023,000 bytes and 763,205,315,794 logical parameters.
    """
    c = config
    table: dict[str, TensorSpec] = {}
    table |= _bf16("embed.weight", c.vocab_size, c.hidden_size)
    for layer in c.layers:
        table |= _block(c, layer)
    table |= _bf16("norm.weight", c.hidden_size) | _bf16("head.weight", c.vocab_size, c.hidden_size)
    for layer in c.draft_layers:
        table |= _block(c, layer)
    if c.draft_layers:
        table |= _draft_heads(c, c.draft_layers[0].name, c.draft_layers[-1].name)
    if c.vision is not None:
        table |= _vision(c)
    return table


def _bf16(name: str, *shape: int) -> dict[str, TensorSpec]:
    return {name: TensorSpec("BF16", shape)}


def _f32(name: str, *shape: int) -> dict[str, TensorSpec]:
    return {name: TensorSpec("F32", shape)}


def _fp8(name: str, n: int, k: int) -> dict[str, TensorSpec]:
    return {
        f"{name}.weight": TensorSpec("F8_E4M3", (n, k)),
        f"{name}.scale": TensorSpec("F8_E8M0", (n // QUANT_BLOCK, k // QUANT_BLOCK)),
    }


def _fp4(name: str, n: int, k: int) -> dict[str, TensorSpec]:
    return {
        f"{name}.weight": TensorSpec("I8", (n, k // 2)),
        f"{name}.scale": TensorSpec("F8_E8M0", (n, k // QUANT_BLOCK)),
    }


def _block(c: ModelConfig, layer: LayerSpec) -> dict[str, TensorSpec]:
    p, h = layer.name, c.hidden_size
    t = _bf16(f"{p}.attn_norm.weight", h) | _bf16(f"{p}.ffn_norm.weight", h)
    for sub in ("attn", "ffn"):
        t |= _f32(f"{p}.hc_{sub}_fn", c.hc_mix_size, c.hc_mult * h)
        t |= _f32(f"{p}.hc_{sub}_base", c.hc_mix_size) | _f32(f"{p}.hc_{sub}_scale", 3)
    t |= _attention(c, layer)
    if layer.engram is not None:
        rows, dim = c.engram_num_embeddings[layer.engram], c.engram_head_dim
        t[f"{p}.engram.embed.weight"] = TensorSpec("F8_E4M3", (rows, dim))
        t[f"{p}.engram.embed.scale"] = TensorSpec("F8_E8M0", (rows, dim // QUANT_BLOCK))
        t |= _fp8(f"{p}.engram.wkv", (c.hc_mult + 1) * h, c.engram_columns * dim)
        t |= _bf16(f"{p}.engram.q_weight", c.hc_mult, h) | _bf16(f"{p}.engram.k_weight", c.hc_mult, h)
    return t | _ffn(c, layer)


def _attention(c: ModelConfig, layer: LayerSpec) -> dict[str, TensorSpec]:
    p, h, d = f"{layer.name}.attn", c.hidden_size, c.head_dim
    group_in = c.num_attention_heads * d // c.o_groups
    t = _fp8(f"{p}.wq_a", c.q_lora_rank, h) | _fp8(f"{p}.wkv", d, h)
    t |= _bf16(f"{p}.q_norm.weight", c.q_lora_rank) | _bf16(f"{p}.kv_norm.weight", d)
    t |= _fp8(f"{p}.wq_b", c.num_attention_heads * d, c.q_lora_rank)
    t |= _fp8(f"{p}.wo_a", c.o_groups * c.o_lora_rank, group_in) | _fp8(f"{p}.wo_b", h, c.o_groups * c.o_lora_rank)
    t |= _f32(f"{p}.attn_sink", c.num_attention_heads)
    if layer.owns_kv:
        t |= _bf16(f"{p}.compressor.wkv.weight", d, h)
        if layer.ratio == 2:
            t |= _bf16(f"{p}.compressor.wgate.weight", d, h)
        t |= _bf16(f"{p}.compressor.norm.weight", d)
        t |= _bf16(f"{p}.indexer.wk.weight", c.index_head_dim, d)
        t |= _bf16(f"{p}.indexer.k_norm.weight", c.index_head_dim)
    if layer.owns_index:
        t |= _fp8(f"{p}.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        t |= _bf16(f"{p}.indexer.weights_proj.weight", c.index_n_heads, h)
    return t


def _ffn(c: ModelConfig, layer: LayerSpec) -> dict[str, TensorSpec]:
    p, h, inter = f"{layer.name}.ffn", c.hidden_size, c.moe_intermediate_size
    t = _bf16(f"{p}.gate.weight", layer.n_experts, h)
    t |= _f32(f"{p}.gate.bias", layer.n_experts) | _f32(f"{p}.gate.bias_vl", layer.n_experts)
    for w, n, k in (("w1", inter, h), ("w3", inter, h), ("w2", h, inter)):
        t |= _fp8(f"{p}.shared_experts.{w}", n, k)
        for e in range(layer.n_experts):
            t |= _fp4(f"{p}.experts.{e}.{w}", n, k)
    return t


def _draft_heads(c: ModelConfig, first: str, last: str) -> dict[str, TensorSpec]:
    h, rank = c.hidden_size, c.dspark_markov_rank
    return {
        **_fp8(f"{first}.main_proj", h, len(c.dspark_target_layer_ids) * h),
        **_bf16(f"{first}.main_norm.weight", h),
        **_bf16(f"{last}.norm.weight", h),
        **_bf16(f"{last}.markov_head.embed.weight", c.vocab_size, rank),
        **_bf16(f"{last}.markov_head.head.weight", c.vocab_size, rank),
        **_bf16(f"{last}.confidence_head.proj.weight", 1, h + rank),
    }


def _vision(c: ModelConfig) -> dict[str, TensorSpec]:
    v, h = c.vision, c.hidden_size
    assert v is not None
    d = v.hidden_size
    t = _bf16("image_start", h) | _bf16("image_end", h) | _bf16("image_newline", h)
    t |= _biased("vision.patch_embed.proj", d, 3 * v.patch_size**2)
    for b in range(v.num_hidden_layers):
        p = f"vision.blocks.{b}"
        t |= _bf16(f"{p}.norm1.weight", d) | _bf16(f"{p}.norm2.weight", d)
        t |= _biased(f"{p}.attn.wqkv", 3 * d, d) | _biased(f"{p}.attn.wo", d, d)
        t |= _bf16(f"{p}.mlp.w1.weight", 2 * v.intermediate_size, d)
        t |= _bf16(f"{p}.mlp.w2.weight", d, v.intermediate_size)
    t |= _bf16("vision.norm.weight", d)
    return t | _biased("aligner.w1", h, v.downsample_ratio**2 * d) | _biased("aligner.w2", h, h)


def _biased(name: str, n: int, k: int) -> dict[str, TensorSpec]:
    return _bf16(f"{name}.weight", n, k) | _bf16(f"{name}.bias", n)


# ---- the model form ----


@dataclass(frozen=True)
class Placement:
    """Where a file tensor lies in the model form: rows `start:stop` of `target`, or of one expert of it."""

    target: str
    start: int
    stop: int
    expert: int | None

    def of(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The view of the file tensor's place inside the allocated model form."""
        whole = weights[self.target]
        return (whole if self.expert is None else whole[self.expert])[self.start : self.stop]


def plan(config: ModelConfig) -> tuple[dict[str, TensorSpec], dict[str, Placement]]:
    """(model form: name -> spec, file form: name -> place in it)."""
    rows: dict[tuple[str, int | None], int] = {}
    experts: dict[str, int] = {}
    first: dict[str, TensorSpec] = {}
    places: dict[str, Placement] = {}
    for name, spec in tensor_table(config).items():
        target, expert = _fused_name(name)
        start = rows.get((target, expert), 0)
        rows[target, expert] = start + spec.shape[0]
        places[name] = Placement(target, start, start + spec.shape[0], expert)
        first.setdefault(target, spec)
        if expert is not None:
            experts[target] = max(experts.get(target, 0), expert + 1)
    model = {}
    for target, spec in first.items():
        stacked = (experts[target],) if target in experts else ()
        total = rows[target, 0 if stacked else None]
        model[target] = TensorSpec(spec.dtype, (*stacked, total, *spec.shape[1:]))
    return model, places


def _fused_name(name: str) -> tuple[str, int | None]:
    stem, _, leaf = name.rpartition(".")
    expert = None
    if m := _EXPERT.fullmatch(stem):
        stem, expert = m[1] + m[3], int(m[2])
    for part, whole in _FUSED_ROWS.items():
        if stem.endswith(part):
            stem = stem.removesuffix(part) + whole
            break
    return f"{stem}.{leaf}" if stem else leaf, expert


def allocate(config: ModelConfig, device: str = "cpu") -> dict[str, Tensor]:
    """The model form with undefined contents. `device="meta"` allocates nothing and suits every config."""
    return _empty(plan(config)[0], device)


def _empty(specs: Mapping[str, TensorSpec], device: str) -> dict[str, Tensor]:
    return {n: torch.empty(s.shape, dtype=_MODEL_DTYPE[s.dtype], device=device) for n, s in specs.items()}


def fill(weights: Mapping[str, Tensor], config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy file-form `tensors` into their places in `weights` (from `allocate`), one at a time."""
    _, places = plan(config)
    for name, tensor in tensors:
        place = places[name].of(weights)
        place.copy_(tensor.view(place.dtype))


def file_form(weights: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The inverse of loading: (name, view) of every tensor of the release, in table order."""
    for name, place in plan(config)[1].items():
        yield name, place.of(weights)


# ---- reading ----


def load_checkpoint(path: str | Path, config: ModelConfig, *, device: str = "cpu") -> dict[str, Tensor]:
    """Read every tensor of a checkpoint folder into the model form on `device`.

    Headers are checked against the config before a byte of weights is read: every missing, unused, misshapen
    or mistyped tensor and every missing or truncated shard comes in one CheckpointError. Shards are
    memory-mapped and copied tensor by tensor into their final place, so the peak is the result itself.
    """
    root = Path(path)
    shards = _checked_shards(root, config)
    specs, places = plan(config)
    weights = _empty(specs, device)
    for shard, names in shards.items():
        try:
            with safe_open(root / shard, framework="pt") as f:
                for name in names:
                    place = places[name].of(weights)
                    place.copy_(f.get_tensor(name).view(place.dtype))
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{root / shard} cannot be read: {e}; copy the shard again") from e
    return weights


def _checked_shards(root: Path, config: ModelConfig) -> dict[str, list[str]]:
    """Shard -> tensor names, after checking index and headers against the config."""
    weight_map = _read_index(root)
    table = tensor_table(config)
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        shards.setdefault(shard, []).append(name)

    problems: list[str] = []
    found: dict[str, TensorSpec] = {}  # what the index names and its shard holds
    unused = set(weight_map) - set(table)
    for shard, names in sorted(shards.items()):
        try:
            header = _read_header(root / shard)
        except CheckpointError as e:
            problems.append(f"{e} (tensors in it: {len(names)})")
            continue
        found |= {n: header[n] for n in names if n in header}
        absent = [f"{n}: {INDEX} places it in {shard}, which lacks it" for n in names if n not in header]
        problems += _listed("missing tensor", absent)
        unused |= {n for n in header if weight_map.get(n) != shard}
    problems += _listed("missing tensor", [n for n in table if n not in weight_map])
    problems += _listed("unused tensor", sorted(unused))
    both = [(n, found[n], s) for n, s in table.items() if n in found]
    problems += _listed(
        "wrong dtype", [f"{n}: {f.dtype}, expected {s.dtype}" for n, f, s in both if f.dtype != s.dtype]
    )
    problems += _listed(
        "wrong shape",
        [f"{n}: {list(f.shape)}, expected {list(s.shape)}" for n, f, s in both if f.shape != s.shape],
    )
    if problems:
        raise CheckpointError(list_problems(f"{root} does not hold the tensors its config.json describes", problems))
    return shards


def _listed(kind: str, items: list[str]) -> list[str]:
    more = [f"{kind}: and {len(items) - MAX_LISTED} more"] if len(items) > MAX_LISTED else []
    return [f"{kind} {item}" for item in items[:MAX_LISTED]] + more


def _read_index(root: Path) -> dict[str, str]:
    file = root / INDEX
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist: {root} is no checkpoint folder, or was not written to its end"
        ) from None
    except (ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{file} is not an index with a weight_map: {e!r}; copy it again") from e
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{file}: weight_map must map tensor names to shard names; copy it again")
    return weight_map


def _read_header(file: Path) -> dict[str, TensorSpec]:
    """Names, dtypes and shapes in a shard. CheckpointError when it is absent, cut short or another format."""
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            prefix = f.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            raw = f.read(length) if length <= size else b""
    except OSError as e:
        raise CheckpointError(f"missing shard {file.name}: {e.strerror}") from e
    if 8 + length > size:
        raise CheckpointError(f"truncated shard {file.name}: {size} bytes end inside its header; copy it again")
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        specs = {n: TensorSpec(t["dtype"], tuple(t["shape"])) for n, t in header.items()}
        end = 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"damaged shard {file.name}: unreadable header ({e!r}); copy it again") from e
    if end > size:
        raise CheckpointError(f"truncated shard {file.name}: {size} bytes of {end}; copy it again")
    return specs


# ---- writing ----


def write_checkpoint(
    path: str | Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: str | Path | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Write file-form `tensors` as a checkpoint folder in the format of the release.

    At most one shard (`shard_bytes`, or one larger tensor) is held in memory. E8M0 and packed FP4 may come
    as uint8. The tensors may come in any order; each of `tensor_table(config)` exactly once, else
    CheckpointError. The index is written last, so an interrupted folder is never mistaken for a whole one.
    `tokenizer`: a folder whose tokenizer files are copied.
    """
    root = Path(path)
    if (root / INDEX).exists():
        raise CheckpointError(f"{root} already holds a checkpoint: remove it or choose another folder")
    table = tensor_table(config)
    total = sum(s.nbytes for s in table.values())
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
        if total > free:
            raise CheckpointError(f"{root} needs {total:,} bytes and its disk has {free:,} free")
        shards = _write_shards(root, table, tensors, shard_bytes)
        _write_json(root / "config.json", config.to_dict())
        _write_json(root / "generation_config.json", generation_config or default_generation_config(config))
        for source in (Path(tokenizer) / file for file in TOKENIZER_FILES) if tokenizer is not None else ():
            if source.exists():
                shutil.copyfile(source, root / source.name)
        weight_map: dict[str, str] = {}
        mode = (root / "config.json").stat().st_mode  # safetensors leaves its files readable by their owner only
        for i, names in enumerate(shards):
            final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            (root / _partial(i)).rename(root / final).chmod(mode)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(root / INDEX, index)
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{root} cannot be written: {e}") from e
    finally:
        for left in root.glob(_partial("*")):  # after a failure: give the disk back
            left.unlink()


def _write_shards(
    root: Path, table: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> list[list[str]]:
    """Write the shards under provisional names (their number is not known yet); returns the names in each."""
    missing = dict(table)
    shards: list[list[str]] = []
    batch: dict[str, Tensor] = {}
    batched = 0

    def flush() -> None:
        save_file(batch, root / _partial(len(shards)), metadata={"format": "pt"})
        shards.append(list(batch))
        batch.clear()

    for name, tensor in tensors:
        spec = missing.pop(name, None)
        stored = _as_stored(name, tensor, spec)
        if batch and batched + stored.nbytes > shard_bytes:
            flush()
            batched = 0
        batch[name] = stored
        batched += stored.nbytes
    if missing:
        raise CheckpointError(list_problems("not every tensor was given", _listed("missing tensor", [*missing])))
    flush()
    return shards


def _partial(i: int | str) -> str:
    return f"model-{i}.safetensors.partial"


def default_generation_config(config: ModelConfig) -> dict[str, Any]:
    """Sampling defaults of the model card (spec section 13)."""
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
    }


def _as_stored(name: str, tensor: Tensor, spec: TensorSpec | None) -> Tensor:
    if spec is None:
        raise CheckpointError(f"{name} was given twice or is no tensor of this config")
    dtypes = (_FILE_DTYPE[spec.dtype], _MODEL_DTYPE[spec.dtype])
    if tensor.dtype not in dtypes or tuple(tensor.shape) != spec.shape:
        raise CheckpointError(
            f"{name}: expected {spec.dtype} {list(spec.shape)}, given {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.contiguous().view(dtypes[0])


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
