"""Cases of the linear family: every dense linear of the model at real dimensions, the LM head, the quantiser.

Weights of a shape are made once and rotate through its cases: together larger than the L2. Small linears are compared
with a kernel that only reads as many bytes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.ops import formats
from deepinfer.ops.triton import linear as kernels
from deepinfer.studies.kernels.harness import Case, Make

# name -> N, K of the FP8 linears with quantised input
FP8 = {
    "wq_b": (32768, 1280),
    "wo_b": (5120, 8192),
    "engram_wkv": (25600, 6144),
    "shared_w13": (4608, 5120),
    "shared_w2": (5120, 2304),
    "wqkv_a": (1792, 5120),
    "index_wq_b": (4096, 1280),
}
BF16 = {"lm_head": (129280, 5120), "compressor": (1024, 5120), "index_weights": (32, 5120)}
GROUPS, WO_A = 8, (8192, 4096)
ROWS = (1, 8, 64, 512, 8192)
ROTATE = 160_000_000  # bytes of weights in a graph, three times the L2
BASELINE_FROM = 40_000_000  # bytes of a weight from which libraries are timed too


def _sets(size: float) -> int:
    return min(max(int(-(-ROTATE // size)), 2), 12)


@functools.lru_cache(maxsize=1)  # one shape at a time stays in memory
def _fp8_weights(n: int, k: int) -> list[tuple[Tensor, Tensor]]:
    return [
        (
            torch.randn((n, k), device="cuda").to(torch.float8_e4m3fn),
            torch.randint(115, 121, (n // 32, k // 32), dtype=torch.uint8, device="cuda"),
        )
        for _ in range(_sets(n * k))
    ]


@functools.lru_cache(maxsize=1)
def _bf16_weights(n: int, k: int) -> list[Tensor]:
    return [torch.randn((n, k), dtype=torch.bfloat16, device="cuda") for _ in range(_sets(2 * n * k))]


def _x(rows: int, k: int) -> Tensor:
    return torch.randn((rows, k), dtype=torch.bfloat16, device="cuda")


def _calls(call: Callable[..., Any], weights: list[Any], inputs: list[Any]) -> list[Callable[[], Any]]:
    return [functools.partial(call, x, w) for x, w in zip(inputs, weights, strict=True)]


def _fp8(n: int, k: int, rows: int) -> list[Callable[[], Any]]:
    weights = _fp8_weights(n, k)
    inputs = [formats.quant_fp8(_x(rows, k)) for _ in weights]
    return _calls(lambda x, w: kernels.linear_fp8(*x, *w), weights, inputs)


def _cublas_bf16(n: int, k: int, rows: int) -> list[Callable[[], Any]]:
    weights = [formats.dequant_fp8_block(*w).bfloat16() for w in _fp8_weights(n, k)]
    return _calls(lambda x, w: x @ w.t(), weights, [_x(rows, k) for _ in weights])


def _scaled_mm(n: int, k: int, rows: int) -> list[Callable[[], Any]]:
    """cuBLAS FP8, one scale a tensor: 16 rows at least."""
    one = torch.ones((), device="cuda")
    weights = [w for w, _ in _fp8_weights(n, k)]
    inputs = [_x(max(rows, 16), k).to(torch.float8_e4m3fn) for _ in weights]
    return _calls(
        lambda x, w: torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16), weights, inputs
    )


def _deep_gemm(n: int, k: int, rows: int) -> list[Callable[[], Any]]:
    """DeepGEMM, scales 1 x 128 and 128 x 128."""
    deep_gemm: Any = importlib.import_module("deep_gemm")
    align = deep_gemm.utils.layout.get_mn_major_tma_aligned_tensor
    scale = torch.ones((n // 128, k // 128), device="cuda")
    weights = [(w, scale) for w, _ in _fp8_weights(n, k)]
    inputs = [
        (_x(rows, k).to(torch.float8_e4m3fn), align(torch.ones((rows, k // 128), device="cuda"))) for _ in weights
    ]
    out = torch.empty((rows, n), dtype=torch.bfloat16, device="cuda")
    return _calls(lambda x, w: deep_gemm.fp8_gemm_nt(x, w, out), weights, inputs)


@triton.jit  # type: ignore[untyped-decorator]
def _read(source, sink, COUNT, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(source + at, mask=at < COUNT, other=0)
    gdc_wait()
    tl.store(sink + tl.program_id(0), tl.max(v))


def _read_calls(weights: list[Tensor]) -> list[Callable[[], Any]]:
    """What a kernel needs that only reads the weights, with programmatic launch."""
    count = weights[0].numel() * weights[0].element_size() // 4
    block = 4096 if count >= 1 << 21 else 1024
    blocks = -(-count // block)
    sink = torch.empty(blocks, dtype=torch.int32, device="cuda")

    def call(_: None, w: Tensor) -> None:
        _read[(blocks,)](w.view(torch.int32), sink, count, BLOCK=block, num_warps=block // 512, launch_pdl=True)

    return _calls(call, weights, [None] * len(weights))


def _read_only(n: int, k: int, rows: int) -> list[Callable[[], Any]]:
    return _read_calls([w for w, _ in _fp8_weights(n, k)])


def _read_dense(n: int, k: int) -> list[Callable[[], Any]]:
    return _read_calls(_bf16_weights(n, k))


def _dequant(rows: int) -> list[Callable[[], Any]]:
    weights = _fp8_weights(*WO_A)
    inputs = [_x(rows, GROUPS * WO_A[1]) for _ in weights]
    return _calls(lambda x, w: kernels.linear_dequant(x, w[0], w[1], GROUPS), weights, inputs)


def _bmm(rows: int) -> list[Callable[[], Any]]:
    n, k = WO_A
    weights = [formats.dequant_fp8_block(*w).bfloat16().view(GROUPS, n // GROUPS, k) for w in _fp8_weights(n, k)]
    inputs = [_x(rows, GROUPS * k).view(rows, GROUPS, k).transpose(0, 1) for _ in weights]
    return _calls(lambda x, w: torch.bmm(x, w.transpose(1, 2)), weights, inputs)


def _linear(n: int, k: int, rows: int, out_f32: bool) -> list[Callable[[], Any]]:
    weights = _bf16_weights(n, k)
    return _calls(lambda x, w: kernels.linear(x, w, None, out_f32), weights, [_x(rows, k) for _ in weights])


def _cublas_linear(n: int, k: int, rows: int) -> list[Callable[[], Any]]:
    weights = _bf16_weights(n, k)
    return _calls(lambda x, w: x @ w.t(), weights, [_x(rows, k) for _ in weights])


def _quant(k: int, rows: int) -> list[Callable[[], Any]]:
    return [functools.partial(kernels.quant_fp8, _x(rows, k)) for _ in range(_sets(2 * rows * k))]


def cases() -> Iterator[Case]:
    part = functools.partial
    for name, (n, k) in FP8.items():
        for t in ROWS:
            baselines: dict[str, Make] = {"cublas_bf16": part(_cublas_bf16, n, k, t)}
            if n * k >= BASELINE_FROM:
                baselines["cublas_fp8_tensor_scale"] = part(_scaled_mm, n, k, t)
            if name in ("wq_b", "wo_b") and t != 512:  # its first call of a shape compiles for 3 to 6 s
                baselines["deep_gemm_128"] = part(_deep_gemm, n, k, t)
            if t == 1:
                baselines["read_only"] = part(_read_only, n, k, t)
            size = n * k * (1 + 1 / 1024) + t * (k * (1 + 1 / 32) + 2 * n)
            yield Case(f"linear/{name}/T{t}", part(_fp8, n, k, t), size, 2.0 * t * n * k, baselines=baselines)
    n, k = WO_A
    for t in ROWS:
        size = n * k * (1 + 1 / 1024) + t * (2 * GROUPS * k + 2 * n)
        baselines = {"cublas_bf16_bmm": part(_bmm, t)} | ({"read_only": part(_read_only, n, k, t)} if t == 1 else {})
        yield Case(f"linear/wo_a/T{t}", part(_dequant, t), size, 2.0 * t * n * k, baselines=baselines)
    for name, (n, k) in BF16.items():
        head = name == "lm_head"
        for t in (1, 8, 64) if head else ROWS:
            size = 2.0 * n * k + t * (2 * k + (4 if head else 2) * n)
            make = part(_linear, n, k, t, head)
            baselines = {"cublas_bf16": part(_cublas_linear, n, k, t)}
            if t == 1:
                baselines["read_only"] = part(_read_dense, n, k)
            yield Case(f"linear/{name}/T{t}", make, size, 2.0 * t * n * k, baselines=baselines)
        _bf16_weights.cache_clear()
    for t in ROWS:
        yield Case(f"quant_fp8/T{t}", part(_quant, 5120, t), t * 5120 * (3 + 1 / 32))
