"""TileLang, Triton and TileKernels on the same inputs in the same run: which provider is the default rests on this.

Belongs here: the ops that have a TileLang kernel. Does not belong here: why one of them is faster (docs, notes).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from deepinfer.ops import registry
from deepinfer.studies.kernels.harness import Case, Make
from deepinfer.studies.kernels.hyper import H, boundary, randn, rotate

SIZES = (1, 64, 512, 8192)


def inputs(op: str, t: int) -> tuple[Any, ...]:
    if op == "hc_boundary":
        return boundary(t)
    if op == "hc_mix":
        return (randn(t, 4, H), *boundary(1)[5:8], 20, 1e-6, 1e-20)
    if op == "hc_write":
        return boundary(t)[:4]
    if op == "hc_collapse":
        return randn(t, 4, H), torch.rand(t, 4, device="cuda")
    if op == "rms_norm":
        return randn(t, H), randn(H), 1e-20
    if op == "rope":
        return (randn(t, 64, 512), *(torch.rand(t, 32, device="cuda") for _ in range(2)), False)
    if op == "quant_fp8":
        return (randn(t, H),)
    if op == "pack_window":
        return (randn(t, 512),)
    image = torch.zeros(t, dtype=torch.bool, device="cuda")
    return randn(t, 4, H), randn(t, 5 * H), randn(4, H), randn(4, H), image, 1e-20


def libraries(op: str) -> dict[str, Callable[..., Any]]:
    """TileKernels' function for the op as the adapter calls it, and bare where the adapter adds launches."""
    from deepinfer.ops.providers import tile_kernels

    bound = (binding.run for binding in tile_kernels.BINDINGS if binding.op == op and binding.run)
    found: dict[str, Callable[..., Any]] = {"tile_kernels": run for run in bound}  # noqa: B035 - one at most
    if op == "quant_fp8":
        cast = partial(tile_kernels.library, "quant")
        found["tile_kernels, float32 scales"] = lambda x: cast().per_token_cast(x, "e4m3", 32, round_sf=True)
    if op == "hc_boundary":
        found["tile_kernels + deep_gemm, chain"] = chain
    return found


def chain(*args: Any) -> Any:
    """Post, split-K GEMM, mix with collapse, norm with cast: the nearest library calls, of another collapse."""
    import deep_gemm

    from deepinfer.ops.providers.tile_kernels import hc_write, library

    y, streams, post, comb, _, fn, base, scale, norm, iters, hc_eps, eps = args
    t = y.shape[0]
    out = hc_write(y, streams, post, comb)
    d, squares = (torch.empty(shape, dtype=torch.float32, device=y.device) for shape in ((16, t, 24), (16, t)))
    deep_gemm.tf32_hc_prenorm_gemm(out.view(t, -1), fn, d, squares, 16)
    new_post, new_comb = (torch.empty_like(post), torch.empty((t, 16), dtype=torch.float32, device=y.device))
    x = torch.empty_like(y)
    library("mhc").mhc_pre_big_fuse_fwd(
        d, squares, scale, base, out, new_post, new_comb, x, eps, hc_eps, hc_eps, 2.0, iters, 16
    )
    return library("quant").norm_forward_and_per_token_cast(x, norm, eps, "e4m3", 32, round_sf=True, with_out_bf16=True)


def bind(function: Callable[..., Any], op: str, t: int) -> Callable[[], Any]:
    return partial(function, *inputs(op, t))


def late(implementation: Callable[[str], Callable[..., Any]], op: str, t: int) -> Callable[[], Any]:
    """A provider that may be absent: looked up when its turn comes."""
    return bind(implementation(op), op, t)


def cases(device: str = "cuda") -> Iterator[Case]:
    if importlib.util.find_spec("tilelang") is None:
        return
    from deepinfer.ops import tilelang, triton
    from deepinfer.ops.tilelang import compile

    compile.build_all(compile.variants())
    for op in tilelang.KERNELS:
        for t in SIZES:
            floor = registry.OPS[op].cost(*inputs(op, t))[1]
            held = max(floor, 5e6)
            others: dict[str, Make] = {"triton": rotate(partial(late, triton.implementation, op, t), held)}
            for name, function in libraries(op).items():
                others[name] = rotate(partial(bind, function, op, t), held)
            yield Case(
                f"tilelang/{op}/T{t}",
                rotate(partial(late, tilelang.implementation, op, t), held),
                floor,
                provider="tilelang",
                baselines=others,
            )
