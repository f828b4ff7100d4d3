"""Packing and writing cache records, pair pooling, at the release's dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from deepinfer.ops import registry
from deepinfer.studies.kernels.harness import Case
from deepinfer.studies.kernels.hyper import randn, rotate


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8, device="cuda")


def inputs(op: str, t: int) -> tuple[Any, ...]:
    """64 requests deep into their context, rows of this step adjacent."""
    slots = torch.arange(t, dtype=torch.int32, device="cuda") % 64
    pos = 4096 + torch.arange(t, dtype=torch.int32, device="cuda") // 64
    table = torch.randperm(64 * 64, device="cuda").int().view(64, 64)
    if op == "pack_index":
        return (randn(t, 32, 128),)
    if op in ("pack_window", "pack_latent"):
        return (randn(t, 512),)
    if op == "ring_write":
        return _bytes(64, 140, 528), _bytes(t, 528), slots, pos, pos
    if op == "page_write":
        return _bytes(4096, 64, 288), _bytes(t, 288), table, slots, pos, 2, 128
    if op == "index_page_write":
        return _bytes(4096, 64 * 68), _bytes(t, 68), table, slots, pos, 2, 128
    kv, ring = randn(t, 1024, dtype=torch.float32), randn(64, 8, 1024, dtype=torch.float32)
    return kv, ring, slots, pos, torch.zeros_like(pos), False


def entry(op: str, t: int) -> tuple[Any, ...]:
    """Arguments of a fused write."""
    dim = 512 if op == "kv_global_write" else 128
    pool, _, *where = inputs("page_write" if dim == 512 else "index_page_write", t)
    turn = (torch.rand(t, 32, device="cuda"), torch.rand(t, 32, device="cuda"))
    return (pool, randn(t, dim), randn(dim), *turn, 1e-20, *where)


OPS = ("pack_window", "pack_latent", "pack_index", "ring_write", "page_write", "index_page_write", "pair_pool")


def cases(device: str = "cuda") -> Iterator[Case]:
    from deepinfer.ops.triton import cache, norm, writes

    def one(op: str, t: int) -> Callable[[], Any]:
        held = inputs(op, t)
        return lambda: getattr(cache, op)(*held)

    for t in (1, 64, 512, 8192):
        for op in OPS:
            floor = registry.OPS[op].cost(*inputs(op, t))[1]
            yield Case(f"{op}/T{t}", rotate(partial(one, op, t), max(floor, 5e6)), floor)
        for op in ("kv_global_write", "index_key_write"):

            def fused(op: str = op, t: int = t) -> Callable[[], Any]:
                held = entry(op, t)
                return lambda: getattr(writes, op)(*held)

            def chain(op: str = op, t: int = t) -> Callable[[], Any]:
                pool, x, weight, cos, sin, eps, *where = entry(op, t)
                pack, write = (
                    (cache.pack_latent, cache.page_write)
                    if op == "kv_global_write"
                    else (cache.pack_index, cache.index_page_write)
                )
                return lambda: write(pool, pack(norm.rope(norm.rms_norm(x, weight, eps), cos, sin, False)), *where)

            floor = registry.OPS[op].cost(*entry(op, t))[1]
            others = {"four own launches": rotate(chain, max(floor, 5e6))}
            yield Case(f"{op}/T{t}", rotate(fused, max(floor, 5e6)), floor, baselines=others)
