"""Cases of the experts family: routed experts at real dimensions, router, SwiGLU.

Weights are shared by the cases (7.2 GB prepared, 27 GB in bf16 for the baseline); buffer sets differ in their routing,
so few rows touch other experts each time. The floor counts the experts that a routing really uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.ops import formats
from deepinfer.ops.triton import experts as kernels
from deepinfer.ops.triton import experts_one_sm90 as one
from deepinfer.ops.triton import experts_sm90 as sm90
from deepinfer.studies.kernels.harness import Case

EXPERTS, HIDDEN, WIDTH, TOP = 384, 5120, 2304, 6
EXPERT_BYTES = 3 * HIDDEN * WIDTH * (1 / 2 + 1 / 32)
SETS = {1: 16, 8: 6, 64: 3, 512: 2, 2048: 1, 8192: 1}  # rows -> routings in a graph


@functools.cache
def _weights() -> tuple[Tensor, ...]:
    def rand8(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")

    return kernels.prepare_experts(
        rand8(0, 256, EXPERTS, 2 * WIDTH, HIDDEN // 2),
        rand8(115, 121, EXPERTS, 2 * WIDTH, HIDDEN // 32),
        rand8(0, 256, EXPERTS, HIDDEN, WIDTH // 2),
        rand8(115, 121, EXPERTS, HIDDEN, WIDTH // 32),
    )


@functools.cache
def _bf16_weights() -> tuple[Tensor, Tensor]:
    w13 = torch.empty((EXPERTS, HIDDEN, 2 * WIDTH), dtype=torch.bfloat16, device="cuda")
    w2 = torch.empty((EXPERTS, WIDTH, HIDDEN), dtype=torch.bfloat16, device="cuda")
    return w13.normal_(0, 0.02), w2.normal_(0, 0.02)


@functools.cache
def _routings(rows: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(x, scale, ids, weights) of every buffer set of a row count."""
    out = []
    for s in range(SETS[rows]):
        g = torch.Generator(device="cuda").manual_seed(1000 * rows + s)
        x = torch.randn((rows, HIDDEN), generator=g, device="cuda").bfloat16()
        ids = torch.rand((rows, EXPERTS), generator=g, device="cuda").topk(TOP).indices.sort(dim=1).values.int()
        weights = torch.rand((rows, TOP), generator=g, device="cuda")
        out.append((*formats.quant_fp8(x), ids, weights))
    return out


def _used(rows: int) -> float:
    """Mean number of distinct experts of the routings."""
    counts = [torch.unique(ids).numel() for _, _, ids, _ in _routings(rows)]
    return sum(counts) / len(counts)


def _make(rows: int) -> Callable[[], list[Callable[[], Any]]]:
    run: Callable[..., Any] = kernels.experts
    return lambda: [functools.partial(run, *r, *_weights(), 10.0) for r in _routings(rows)]


def _make_prefill(rows: int) -> list[Callable[[], Any]]:
    """Prefill's kernel whether or not the op takes it; rows of every pair, without their sum."""
    run: Callable[..., Any] = kernels._run_prefill
    return [functools.partial(run, *r, *_weights(), 10.0) for r in _routings(rows)]


def _make_part(rows: int, act: bool) -> list[Callable[[], Any]]:
    """One projection alone, by the kernel that the op takes; item lists are made outside."""
    w13, s13, w2, s2 = _weights()
    w, s = (w13, s13) if act else (w2, s2)
    pairs, xdiv = rows * TOP, TOP if act else 1
    calls: list[Callable[[], Any]] = []
    for x, scale, ids, weights in _routings(rows):
        if not act:
            x, scale = formats.quant_fp8(torch.randn((pairs, WIDTH), device="cuda").bfloat16())
        if rows == 1:
            call = functools.partial(one.project, x, scale, ids, weights, w, s, 10.0, act=act)
        else:
            nt = kernels.tokens_per_item(pairs, EXPERTS)
            lists = kernels._route(ids, EXPERTS, nt)
            call = functools.partial(sm90.project, x, scale, lists, weights, w, s, 10.0, nt, xdiv=xdiv, act=act)
        calls.append(call)
    return calls


def _grouped_mm(rows: int) -> list[Callable[[], Any]]:
    """bf16 weights, rows sorted by expert beforehand, torch grouped_mm twice and SwiGLU; no gather, no combine."""
    w13, w2 = _bf16_weights()
    calls: list[Callable[[], Any]] = []
    for _, _, ids, _ in _routings(rows):
        counts = torch.bincount(ids.flatten().long(), minlength=EXPERTS)
        ends = counts.cumsum(0).int()
        x = torch.randn((ids.numel(), HIDDEN), device="cuda").bfloat16()

        def call(x: Tensor, ends: Tensor) -> Tensor:
            gate, up = F.grouped_mm(x, w13, offs=ends).chunk(2, dim=1)
            return F.grouped_mm(F.silu(gate) * up, w2, offs=ends)

        calls.append(functools.partial(call, x, ends))
    return calls


def _router_case(rows: int) -> Case:
    sets = 16 if rows <= 512 else 2
    flops = 2.0 * rows * EXPERTS * HIDDEN
    moved = 2.0 * EXPERTS * HIDDEN + 2.0 * rows * HIDDEN + 8.0 * rows * TOP

    def buffers() -> list[tuple[Tensor, Tensor]]:
        def bf16(n: int, scale: float) -> Tensor:
            return (torch.randn((n, HIDDEN), device="cuda") * scale).bfloat16()

        return [(bf16(rows, 1.0), bf16(EXPERTS, 0.02)) for _ in range(sets)]

    def make() -> list[Callable[[], Any]]:
        bias, image = torch.zeros(EXPERTS, device="cuda"), torch.zeros(rows, dtype=torch.bool, device="cuda")
        return [functools.partial(kernels.router, x, w, bias, bias, image, TOP, 1.5) for x, w in buffers()]

    def library() -> list[Callable[[], Any]]:
        bias = torch.zeros(EXPERTS, device="cuda")

        def call(x: Tensor, w: Tensor) -> Tensor:
            score = F.softplus((x @ w.t()).float()).sqrt()
            ids = (score + bias).topk(TOP, dim=1).indices.sort(dim=1).values
            weights = score.gather(1, ids)
            return weights / weights.sum(1, keepdim=True) * 1.5

        return [functools.partial(call, x, w) for x, w in buffers()]

    return Case(f"router/T{rows}", make, moved, flops, baselines={"torch": library})


def _swiglu_case(rows: int) -> Case:
    def buffers() -> list[Tensor]:
        sets = max(1, min(32, (128 << 20) // (rows * WIDTH * 4)))
        return [torch.randn((rows, 2 * WIDTH), device="cuda").bfloat16() for _ in range(sets)]

    def make() -> list[Callable[[], Any]]:
        return [functools.partial(kernels.swiglu, x, 10.0) for x in buffers()]

    def library() -> list[Callable[[], Any]]:
        def call(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, dim=1)
            return F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)

        return [functools.partial(call, x) for x in buffers()]

    return Case(f"swiglu/T{rows}", make, 6.0 * rows * WIDTH, baselines={"torch": library})


def cases() -> Iterator[Case]:
    for rows in SETS:
        used = _used(rows)
        moved = used * EXPERT_BYTES + rows * HIDDEN * (1 + 1 / 32 + 4)
        flops = 6.0 * rows * TOP * HIDDEN * WIDTH
        nt = 1 if rows == 1 else kernels.tokens_per_item(rows * TOP, EXPERTS)
        more = {"experts_used": used, "tokens_per_item": nt}
        baselines = {"grouped_mm bf16": functools.partial(_grouped_mm, rows)}
        yield Case(f"experts/T{rows}", _make(rows), moved, flops, baselines=baselines, more=more)
        for name, act, share in (("gate_up", True, 2 / 3), ("down", False, 1 / 3)):
            yield Case(
                f"experts_{name}/T{rows}",
                functools.partial(_make_part, rows, act),
                used * EXPERT_BYTES * share,
                flops * share,
            )
        if rows > 512:
            yield Case(f"experts_expanded/T{rows}", functools.partial(_make_prefill, rows), moved, flops)
    for rows in (1, 64, 512, 8192):
        yield _router_case(rows)
    for rows in (64, 8192):
        yield _swiglu_case(rows)
