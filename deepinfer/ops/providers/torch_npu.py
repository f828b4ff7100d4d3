"""torch-npu (BSD): stock operators of Ascend NPUs, where one computes exactly an op of ours. Nothing here was run.

Belongs here: calls of torch.ops.npu.*, refusals of what looks alike and is not. Does not belong here: the references,
which run on an NPU through aten and are the default there.
Schemas: read from libtorch_npu.so of torch_npu 2.13.0; semantics from CANN's documentation (spec/ascend.md 3).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from deepinfer.ops.providers import Binding, lacks_ops

MODULES = ("torch_npu",)
CLIPPED_SWIGLU = (
    "npu::npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, float limit=7.0,"
    " float bias=1.0, bool interleaved=True) -> Tensor"
)
RMS_NORM = "npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)"
ROTARY_MUL = (
    "npu::npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor"
)


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """x * sigmoid(alpha x) * (up + bias) with x clamped above and up on both sides: ours for alpha 1 and bias 0."""
    out: Tensor = torch.ops.npu.npu_clipped_swiglu(gate_up, dim=-1, alpha=1.0, limit=limit, bias=0.0, interleaved=False)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = torch.ops.npu.npu_rms_norm(x, weight.to(x.dtype), eps)[0]
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """input [1, T, h, D] with r1, r2 [1, T, 1, D] in interleaved mode: each coefficient twice, adjacent."""
    n = 2 * cos.shape[1]
    sin = -sin if inverse else sin
    r1, r2 = (c.repeat_interleave(2, dim=1)[None, :, None] for c in (cos, sin))
    tail = x[..., -n:].float().view(1, x.shape[0], x.shape[1] if x.dim() == 3 else 1, n)
    rotated = torch.ops.npu.npu_rotary_mul(tail, r1, r2, "interleave")
    return torch.cat((x[..., :-n], rotated.view(x[..., -n:].shape).to(x.dtype)), dim=-1)


def _binding(op: str, run: object, schema: str) -> Binding:
    probe = functools.partial(lacks_ops, schema, MODULES)
    return Binding(op, "torch_npu", run, device="npu", recorded=schema, why_not=probe)  # type: ignore[arg-type]


def _refusal(op: str, reason: str) -> Binding:
    return Binding(op, "torch_npu", device="npu", always=reason)


BINDINGS = (
    _binding("swiglu", swiglu, CLIPPED_SWIGLU),
    _binding("rms_norm", rms_norm, RMS_NORM),
    _binding("rope", rope, ROTARY_MUL),
    _refusal("attention", "npu_sparse_flash_attention reads one key store; ours is a window and compressed entries"),
    _refusal("experts", "npu_grouped_matmul in FP4 has operands and scales in layouts that nobody here has seen run"),
    _refusal("hc_mix", "npu_mhc_pre collapses with its own coefficients; V4.1 uses those of the sublayer before"),
    _refusal("hc_write", "npu_mhc_post does not document whether its h_res is ours or transposed"),
    _refusal("index_topk", "npu_quant_lightning_indexer takes int8 and fp8 keys, ours are FP4 with E8M0 scales"),
    _refusal("linear_fp8", "npu_quant_matmul in MXFP8 has scales in a layout that nobody here has seen run"),
    _refusal("quant_fp8", "npu_dynamic_mx_quant has no floor of 1e-4 under the block maximum"),
    _refusal("router", "npu_moe_gating_top_k knows softmax and sigmoid, not sqrt(softplus)"),
)
