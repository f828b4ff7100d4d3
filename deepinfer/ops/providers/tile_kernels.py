"""TileKernels 2.x (TileLang kernels of the original's authors), where a function computes exactly an op of ours.

Belongs here: calls of the library's Python functions. Does not belong here: our own TileLang kernels (ops/tilelang).
`mhc_pre_big_fuse_fwd` collapses with the coefficients that it has just made, the model with those of the sublayer
before, so it serves no op here; the study times it in a chain all the same.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.providers import SM90, Binding, lacks_functions

MHC = "mhc_post_fwd(x, residual, post_layer_mix, comb_res_mix, out=None)"
ENGRAM = """
engram_gate_fwd(hidden_states, kv, weight_fused, eps, clamp_value, save_for_backward=True, image_token_mask=None)
fused_weight(weight_hidden, weight_embed)
"""
NORM = "norm_forward(x, weight, eps)"
CAST = "per_token_cast(x, fmt, num_per_channels, round_sf=False, use_packed_ue8m0=False)"
SWIGLU = "swiglu_forward(x, fmt, clamp_value=None)"
GATE = (
    "moe_topk_gate_forward(logits, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, ep_rank,"
    " bias=None, image_bias=None, image_token_mask=None)"
)


@functools.cache
def library(part: str) -> Any:
    """tile_kernels.<part>, with programmatic dependent launch switched on."""
    importlib.import_module("tile_kernels.config").set_pdl(True)
    return importlib.import_module(f"tile_kernels.{part}")


def hc_write(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    args = (y.contiguous(), streams.contiguous(), post.contiguous().unsqueeze(2), comb.contiguous())
    return library("mhc").mhc_post_fwd(*(a.unsqueeze(0) for a in args)).squeeze(0)


def engram_gate(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, is_image: Tensor, eps: float
) -> Tensor:
    c, h = streams.shape[1:]
    fused = library("engram").fused_weight(q_weight, k_weight)
    out = library("engram").engram_gate_fwd(
        streams.contiguous(), kv.contiguous().view(-1, c + 1, h), fused, eps, 1e-6, save_for_backward=False,
        image_token_mask=is_image,
    )  # fmt: skip
    return out[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    flat = x.contiguous().view(-1, x.shape[-1])
    return library("quant").norm_forward(flat, weight, eps)[0].view(x.shape)


def quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales come as float32 powers of two; their exponent is the E8M0 code."""
    flat = x.contiguous().view(-1, x.shape[-1])
    codes, scale = library("quant").per_token_cast(flat, "e4m3", 32, round_sf=True)
    return codes.view(x.shape), (scale.view(torch.int32) >> 23).to(torch.uint8).view(*x.shape[:-1], x.shape[-1] // 32)


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    return library("quant").swiglu_forward(gate_up.contiguous(), "bf16", clamp_value=limit)


def router(
    x: Tensor, weight: Tensor, bias: Tensor, bias_vl: Tensor, is_image: Tensor, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """cuBLAS logits, the library's choice, ids put in ascending order."""
    logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
    ids, w = library("moe").moe_topk_gate_forward(
        logits, k, False, 0, scale, 0, bias=bias, image_bias=bias_vl, image_token_mask=is_image
    )
    ids, order = ids.sort(dim=1)
    return ids.to(torch.int32), w.gather(1, order)


SEEN = "equals the reference on an H200"  # tests/gpu/check_tilelang.py


def _binding(op: str, run: Any, recorded: str, part: str, timed: str = "not timed there") -> Binding:
    probe = functools.partial(lacks_functions, recorded, f"tile_kernels.{part}")
    return Binding(
        op, "tile_kernels", run, archs=(SM90,), recorded=recorded, why_not=probe, measured={SM90: f"{SEEN}, {timed}"}
    )


BINDINGS = (
    _binding("hc_write", hc_write, MHC, "mhc"),
    _binding(
        "engram_gate", engram_gate, ENGRAM, "engram",
        "5.2 / 8.1 / 26.5 / 347 us at 1 / 64 / 512 / 8192 rows, triton 2.1 / 4.3 / 23.2 / 264",
    ),
    _binding("rms_norm", rms_norm, NORM, "quant"),
    _binding("quant_fp8", quant_fp8, CAST, "quant"),
    _binding("swiglu", swiglu, SWIGLU, "quant"),
    _binding("router", router, GATE, "moe"),
)  # fmt: skip
