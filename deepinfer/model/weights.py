"""The parameters, grouped as the maths uses them.

Belongs here: frozen groups of tensors built from the flat dict of checkpoint.py, and the two-line linear helpers.
Does not belong here: reading files, arithmetic. Groups are plain inputs of the layer functions, so that layers of one
kind can share one compiled function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.ops import registry

Ops = SimpleNamespace  # deepinfer.ops.QUANTISED or deepinfer.ops.EXACT
Activation = tuple[Tensor, Tensor | None]  # (e4m3, E8M0) or, in exact numerics, (float32, None)


class Fp8Linear(NamedTuple):
    weight: Tensor  # e4m3 [N, K]
    scale: Tensor  # E8M0 uint8 [N/32, K/32]


def quantise(ops: Ops, x: Tensor) -> Activation:
    """Activation of quantised linears; computed once, shared by every linear that reads x."""
    return (x, None) if x.dtype is torch.float32 else ops.quant_fp8(x)


def linear(ops: Ops, x: Activation, w: Fp8Linear) -> Tensor:
    """[T, K] -> [T, N], bf16 (exact: float32)."""
    codes, scale = x
    if scale is None:
        return ops.linear_dequant(codes, w.weight, w.scale, 1)
    return ops.linear_fp8(codes, scale, w.weight, w.scale)


@dataclass(frozen=True)
class HyperWeights:
    fn: Tensor  # float32 [C*(C+2), C*H]
    base: Tensor  # float32 [C*(C+2)]
    scale: Tensor  # float32 [3]


@dataclass(frozen=True)
class CompressorWeights:
    wkv_gate: Tensor  # bf16 [2D, H] (ratio 1: [D, H])
    norm: Tensor  # bf16 [D]
    wk: Tensor  # bf16 [index dim, D]
    k_norm: Tensor  # bf16 [index dim]


@dataclass(frozen=True)
class IndexerWeights:
    wq_b: Fp8Linear  # [heads * dim, q_lora]
    weights_proj: Tensor  # bf16 [heads, H]


@dataclass(frozen=True)
class AttentionWeights:
    wqkv_a: Fp8Linear  # [q_lora + D, H]
    wq_a: Fp8Linear  # its first rows
    wkv: Fp8Linear  # its last D rows
    q_norm: Tensor
    wq_b: Fp8Linear  # [heads * D, q_lora]
    kv_norm: Tensor
    wo_a: Fp8Linear  # [groups * o_lora, heads / groups * D]
    wo_b: Fp8Linear  # [H, groups * o_lora]
    sink: Tensor  # float32 [heads]
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MoEWeights:
    gate: Tensor  # bf16 [E, H]
    bias: Tensor  # float32 [E]
    bias_vl: Tensor  # float32 [E]; the plain bias in draft stages
    w13: Fp8Linear  # packed e2m1 [E, 2I, H/2]
    w2: Fp8Linear  # packed e2m1 [E, H, I/2]
    shared_w13: Fp8Linear  # e4m3 [2I, H]
    shared_w2: Fp8Linear  # e4m3 [H, I]


@dataclass(frozen=True)
class EngramWeights:
    table: Fp8Linear  # e4m3 [rows, d], scale [rows, d/32]
    wkv: Fp8Linear  # [(C+1) * H, columns * d]
    q_weight: Tensor  # bf16 [C, H]
    k_weight: Tensor


@dataclass(frozen=True)
class LayerWeights:
    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HyperWeights
    hc_ffn: HyperWeights
    attn: AttentionWeights
    moe: MoEWeights
    engram: EngramWeights | None


class Source:
    """Lookup in the flat dict under one prefix."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def fp8(self, name: str) -> Fp8Linear:
        return Fp8Linear(self[name + ".weight"], self[name + ".scale"])

    def hyper(self, name: str) -> HyperWeights:
        return HyperWeights(self[f"hc_{name}_fn"], self[f"hc_{name}_base"], self[f"hc_{name}_scale"])


def layer_weights(
    config: ModelConfig, spec: LayerSpec, tensors: Mapping[str, Tensor], numerics: str = "exact", donate: bool = False
) -> LayerWeights:
    """The parameters of one block or draft stage; in quantised numerics in the layout that the device's ops read.

    donate: rearrange `tensors` in place. Experts are nine tenths of the model: there is no room for two layouts.
    """
    s = Source(tensors, spec.name + ".")
    bias = s["ffn.gate.bias"]
    experts = (*s.fp8("ffn.experts.w13"), *s.fp8("ffn.experts.w2"))
    if numerics == "quantised":
        prepared = registry.prepare("experts", experts[0].device.type, *experts)
        if donate:
            for own, new in zip(experts, prepared, strict=True):
                own.copy_(new)
        else:
            experts = prepared
    return LayerWeights(
        attn_norm=s["attn_norm.weight"],
        ffn_norm=s["ffn_norm.weight"],
        hc_attn=s.hyper("attn"),
        hc_ffn=s.hyper("ffn"),
        attn=_attention(config, spec, Source(tensors, spec.name + ".attn.")),
        moe=MoEWeights(
            gate=s["ffn.gate.weight"],
            bias=bias,
            bias_vl=bias if spec.draft or config.vision is None else s["ffn.gate.bias_vl"],
            w13=Fp8Linear(*experts[:2]),
            w2=Fp8Linear(*experts[2:]),
            shared_w13=s.fp8("ffn.shared_experts.w13"),
            shared_w2=s.fp8("ffn.shared_experts.w2"),
        ),
        engram=None
        if spec.engram is None
        else EngramWeights(s.fp8("engram.embed"), s.fp8("engram.wkv"), s["engram.q_weight"], s["engram.k_weight"]),
    )


def _attention(config: ModelConfig, spec: LayerSpec, s: Source) -> AttentionWeights:
    fused = s.fp8("wqkv_a")
    rank, block = config.q_lora_rank, fused.weight.shape[0] // fused.scale.shape[0]
    return AttentionWeights(
        wqkv_a=fused,
        wq_a=Fp8Linear(fused.weight[:rank], fused.scale[: rank // block]),
        wkv=Fp8Linear(fused.weight[rank:], fused.scale[rank // block :]),
        q_norm=s["q_norm.weight"],
        wq_b=s.fp8("wq_b"),
        kv_norm=s["kv_norm.weight"],
        wo_a=s.fp8("wo_a"),
        wo_b=s.fp8("wo_b"),
        sink=s["attn_sink"],
        compressor=None
        if not spec.owns_kv
        else CompressorWeights(
            s["compressor.wkv_gate.weight"],
            s["compressor.norm.weight"],
            s["indexer.wk.weight"],
            s["indexer.k_norm.weight"],
        ),
        indexer=None
        if not spec.owns_index
        else IndexerWeights(s.fp8("indexer.wq_b"), s["indexer.weights_proj.weight"]),
    )
