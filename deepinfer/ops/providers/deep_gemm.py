"""DeepGEMM (MIT): FP8 and FP4 matrix products on SM100, BF16 ones on SM90 too.

Belongs here: calls of its functions in the layouts that they read. Does not belong here: our own GEMMs (ops/triton).
Two builds are known: one registers torch.ops.deep_gemm.* (sgl-deep-gemm 0.2.5), one has Python functions over tvm-ffi
(0.1.5); schemas were read there. Upstream's pybind functions do not tell their arguments and are refused. On SM90 the
library takes FP8 with one scale per 128 along K and no FP4, so it cannot read this model's weights.
"""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops import formats
from deepinfer.ops.providers import SM90, SM100, SM103, Binding, lacks_functions, lacks_ops

MODULE = "deep_gemm"
ALIGN = 128  # rows of an expert's share in the contiguous layout
PER_32 = [1, 32]  # one scale a row and 32 elements of K, both operands

_EPILOGUE = "int epilogue_kind, float? epilogue_scalar, Tensor(z!)? epilogue_sfd, Tensor(y!)? epilogue_count"
GEMM = (
    "deep_gemm::fp8_fp4_gemm_nt(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(a!) d, Tensor? c, int[]? recipe,"
    " int[]? recipe_a, int[]? recipe_b, str compiled_dims, bool disable_ue8m0_cast, float? alpha, "
    + _EPILOGUE
    + ") -> ()"
)
GROUPED = (
    "deep_gemm::m_grouped_fp8_fp4_gemm_nt_contiguous(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(a!) d,"
    " Tensor grouped_layout, int[]? recipe, int[]? recipe_a, int[]? recipe_b, str compiled_dims,"
    " bool disable_ue8m0_cast, bool use_psum_layout, bool ensure_zero_padding, int? expected_m_for_psum_layout, "
    + _EPILOGUE
    + ") -> ()"
)
BF16_GEMM = (
    "deep_gemm::bf16_gemm_nt(Tensor a, Tensor b, Tensor(a!) d, Tensor? c, str compiled_dims, float? alpha, "
    + _EPILOGUE
    + ") -> ()"
)
GEMM_PYTHON = "fp8_fp4_gemm_nt(a, b, d, recipe_a=None, recipe_b=None)"
GROUPED_PYTHON = "m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, grouped_layout, recipe_a=None, recipe_b=None)"
BF16_GEMM_PYTHON = "bf16_gemm_nt(a, b, d)"
NO_EPILOGUE = (0, None, None, None)


@functools.cache
def build(schema: str, python: str) -> str:
    """Which build has the function: "torch.ops", "python", else the reason why none has."""
    problem = lacks_ops(schema, (MODULE,))
    if problem is None:
        return "torch.ops"
    other = lacks_functions(python, MODULE)
    return "python" if other is None else f"{problem}; {other}"


def _why_not(schema: str, python: str) -> str | None:
    found = build(schema, python)
    return None if found in ("torch.ops", "python") else found


def packed_scales(scale: Tensor) -> Tensor:
    """E8M0 [..., M, K/32] as the library reads it: int32 [..., M, K/128], four codes each, M adjacent in memory and
    padded to 16 bytes.
    """
    m, k = scale.shape[-2:]
    rows = -(-m // 4) * 4
    words = F.pad(scale, (0, -k % 4, 0, rows - m)).contiguous().view(torch.int32)  # [..., rows, K/128]
    out = words.new_empty((*scale.shape[:-2], words.shape[-1], rows)).transpose(-1, -2)
    return out.copy_(words)[..., :m, :]


def linear_fp8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Scales of a 32x32 block are repeated for its rows."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=x.device)
    if out.numel():
        a = (x, packed_scales(x_scale))
        b = (weight, packed_scales(weight_scale.repeat_interleave(32, dim=0)))
        if build(GEMM, GEMM_PYTHON) == "torch.ops":
            torch.ops.deep_gemm.fp8_fp4_gemm_nt(*a, *b, out, None, None, PER_32, PER_32, "", False, None, *NO_EPILOGUE)
        else:
            importlib.import_module(MODULE).fp8_fp4_gemm_nt(a, b, out, recipe_a=PER_32, recipe_b=PER_32)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_f32: bool) -> Tensor:
    """bf16 only; float32 activations (exact numerics) go to torch."""
    if x.dtype is not torch.bfloat16 or bias is not None:
        from deepinfer.ops.providers import pytorch

        return pytorch.linear(x, weight, bias, out_f32)
    dtype = torch.float32 if out_f32 else torch.bfloat16
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    if not out.numel():
        return out
    if build(BF16_GEMM, BF16_GEMM_PYTHON) == "torch.ops":
        torch.ops.deep_gemm.bf16_gemm_nt(x, weight, out, None, "", None, *NO_EPILOGUE)
    else:
        importlib.import_module(MODULE).bf16_gemm_nt(x, weight, out)
    return out


def prepare_experts(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> tuple[Tensor, ...]:
    """Scales [E, N, K/32] in the order of `packed_scales`; same bytes, same shape (K a multiple of 128, N of 4)."""

    def reorder(s: Tensor) -> Tensor:
        e, n, k = s.shape
        return s.view(e, n, k // 4, 4).transpose(1, 2).contiguous().view(e, n, k)

    return w13, reorder(w13_scale), w2, reorder(w2_scale)


def _prepared_scales(s: Tensor) -> Tensor:
    e, n, k = s.shape
    return s.view(e, k // 4, n, 4).view(torch.int32).squeeze(-1).transpose(1, 2)  # int32 [E, N, K/128], N adjacent


def experts(
    x: Tensor,
    x_scale: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    limit: float,
) -> Tensor:
    """Rows sorted by expert, every expert's share padded to ALIGN rows, two grouped products. No host sync: the
    padded size is the largest that T x K rows can need. Weights as `prepare_experts` left them.
    """
    assert x_scale is not None, "exact numerics runs the reference"
    (t, h), k, e = x.shape, ids.shape[1], w13.shape[0]
    if not t:
        return torch.zeros((0, h), dtype=torch.float32, device=x.device)
    flat = ids.flatten().long()
    here = (flat >= 0) & (flat < e)
    bucket = torch.where(here, flat, e)  # the last one is for experts of other ranks; nothing computes it
    counts = torch.zeros(e + 1, dtype=torch.int64, device=x.device).scatter_add_(0, bucket, torch.ones_like(bucket))
    padded = (counts + ALIGN - 1) // ALIGN * ALIGN
    order = torch.argsort(bucket, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(t * k, device=x.device))
    at = (padded.cumsum(0) - padded)[bucket] + rank - (counts.cumsum(0) - counts)[bucket]  # row of (token, slot)
    rows = -(-(t * k + min(t * k, e + 1) * (ALIGN - 1)) // ALIGN) * ALIGN
    layout = torch.full((rows,), -1, dtype=torch.int32, device=x.device)
    layout[at] = torch.where(here, flat, -1).int()

    def spread(values: Tensor) -> Tensor:
        out = torch.zeros((rows, *values.shape[1:]), dtype=values.dtype, device=x.device)
        out[at] = values
        return out

    codes = spread(x.view(torch.uint8).repeat_interleave(k, dim=0)).view(x.dtype)
    gate_up = _grouped(codes, spread(x_scale.repeat_interleave(k, dim=0)), w13, w13_scale, layout)
    gate, up = gate_up.float().chunk(2, dim=1)
    act = F.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit) * spread(weights.flatten().unsqueeze(1))
    y = _grouped(*formats.quant_fp8(act.bfloat16()), w2, w2_scale, layout)
    parts = torch.where(here.unsqueeze(1), y[at].float(), 0.0).view(t, k, h)
    out = parts[:, 0]
    for slot in range(1, k):
        out = out + parts[:, slot]
    return out


def _grouped(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, layout: Tensor) -> Tensor:
    d = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.bfloat16, device=a.device)  # padding rows stay finite
    left, right = (a, packed_scales(a_scale)), (b.view(torch.int8), _prepared_scales(b_scale))
    if build(GROUPED, GROUPED_PYTHON) == "torch.ops":
        torch.ops.deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(
            *left, *right, d, layout, None, PER_32, PER_32, "nk", False, False, False, None, *NO_EPILOGUE
        )
    else:
        function = importlib.import_module(MODULE).m_grouped_fp8_fp4_gemm_nt_contiguous
        function(left, right, d, layout, recipe_a=PER_32, recipe_b=PER_32)
    return d


BLACKWELL = (SM100, SM103)
NO_FP4 = "on SM90 it takes neither 32x32 scales nor FP4"
BINDINGS = (
    Binding(
        "linear_fp8",
        "deep_gemm",
        linear_fp8,
        archs=BLACKWELL,
        refused={SM90: NO_FP4},
        recorded=GEMM,
        why_not=functools.partial(_why_not, GEMM, GEMM_PYTHON),
    ),
    Binding(
        "experts",
        "deep_gemm",
        experts,
        archs=BLACKWELL,
        refused={SM90: NO_FP4},
        recorded=GROUPED,
        why_not=functools.partial(_why_not, GROUPED, GROUPED_PYTHON),
        prepare=prepare_experts,
    ),
    Binding(
        "linear",
        "deep_gemm",
        linear,
        archs=(SM90, *BLACKWELL),
        recorded=BF16_GEMM,
        why_not=functools.partial(_why_not, BF16_GEMM, BF16_GEMM_PYTHON),
    ),
    Binding("linear_dequant", "deep_gemm", always="fp8_einsum takes quantised activations; those of wo_a are bf16"),
    Binding(
        "index_topk",
        "deep_gemm",
        always="mqa_logits has bf16 weights and logits (SM90: no FP4 keys); ours are float32 and select other entries",
    ),
    Binding("hc_mix", "deep_gemm", always="tf32_hc_prenorm_gemm is the product alone, in TF32; ours is one kernel"),
)
