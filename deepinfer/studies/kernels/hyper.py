"""mHC boundary and its parts, norm, RoPE at the release's dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import hyper as references
from deepinfer.ops import registry
from deepinfer.studies.kernels.harness import Case, Make

H = 5120
ROWS = (1, 4, 8, 64, 512, 8192)
L2 = 120e6  # bytes of all buffer sets of a case: more than twice the L2


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def rotate(make_one: Callable[[], Callable[[], Any]], floor_bytes: float) -> Make:
    """Enough sets to leave the L2 cold; small ops get at most 24."""
    return lambda: [make_one() for _ in range(int(max(2, min(24, L2 // max(floor_bytes, 1)))))]


def boundary(t: int) -> tuple[Any, ...]:
    state = (torch.rand(t, 4, device="cuda"), torch.rand(t, 4, 4, device="cuda") / 2, torch.rand(t, 4, device="cuda"))
    weights = (
        randn(24, 4 * H, dtype=torch.float32) * H**-0.5,
        randn(24, dtype=torch.float32),
        torch.rand(3, device="cuda"),
        randn(H),
    )
    return (randn(t, H), randn(t, 4, H), *state, *weights, 20, 1e-6, 1e-20)


def inputs(op: str, t: int) -> tuple[Any, ...]:
    """Arguments of a single op."""
    if op == "hc_mix":
        return (randn(t, 4, H), *boundary(1)[5:8], 20, 1e-6, 1e-20)
    if op == "hc_write":
        return boundary(t)[:4]
    if op == "hc_collapse":
        return randn(t, 4, H), torch.rand(t, 4, device="cuda")
    if op == "rms_norm":
        return randn(t, H), randn(H), 1e-20
    return (randn(t, 64, 512), *(torch.rand(t, 32, device="cuda") for _ in range(2)), False)


def cases(device: str = "cuda") -> Iterator[Case]:
    from deepinfer.ops.triton import hyper, norm

    def fused(t: int) -> Callable[[], Any]:
        args = boundary(t)
        return lambda: hyper.hc_boundary(*args)

    def separate(t: int) -> Callable[[], Any]:
        y, streams, post, comb, pre, fn, base, scale, norm_weight, iters, hc_eps, eps = boundary(t)

        def call() -> Any:
            out = hyper.hc_write(y, streams, post, comb)
            mixed = hyper.hc_mix(out, fn, base, scale, iters, hc_eps, eps)
            x = norm.rms_norm(hyper.hc_collapse(out, pre), norm_weight, eps)
            return mixed, registry.OPS["quant_fp8"].overload(x)

        return call

    def torch_ops(t: int) -> Callable[[], Any]:
        args = boundary(t)
        return lambda: references.hc_boundary(*args)

    for t in ROWS:
        floor = 24 * 4 * H * 4 + t * (H * 2 * (1 + 4 + 4 + 1) + H * (1 + 1 / 32) + 192.0)
        others: dict[str, Make] = {"own separate ops": rotate(partial(separate, t), floor)}
        if t <= 64:
            others["torch (references)"] = rotate(partial(torch_ops, t), floor)
        yield Case(f"mhc/T{t}", rotate(partial(fused, t), floor), floor, baselines=others, more={"launches": 2})
    for t in (1, 64, 8192):
        for op in ("hc_mix", "hc_write", "hc_collapse", "rms_norm", "rope"):
            make = partial(inputs, op, t)
            floor = registry.OPS[op].cost(*make())[1]

            def one(op: str = op, make: Callable[[], tuple[Any, ...]] = make) -> Callable[[], Any]:
                held = make()
                return lambda: getattr(norm if op in ("rms_norm", "rope") else hyper, op)(*held)

            baselines: dict[str, Make] = {}
            if op == "rms_norm":

                def library(t: int = t) -> Callable[[], Any]:
                    x, w = randn(t, H), randn(H)
                    return lambda: torch.nn.functional.rms_norm(x, (H,), w, 1e-20)

                baselines["torch rms_norm"] = rotate(library, floor)
            yield Case(f"{op}/T{t}", rotate(one, floor), floor, baselines=baselines)
