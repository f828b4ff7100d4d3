"""Fused writes of compressed entries in Triton's interpreter: what the single kernels give in a row."""

# ruff: noqa: E402
from __future__ import annotations

import copy
import os
import sys

WITHOUT = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if WITHOUT:
    pytest.skip("triton was imported without its interpreter", allow_module_level=True)

from deepinfer.ops import registry
from deepinfer.ops.common import randn
from deepinfer.ops.triton import cache, norm, writes

NAMES = ["kv_global_write", "index_key_write"]


def chain(name: str, pool: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *where: object):
    """The same by single kernels."""
    normed = norm.rms_norm(x, weight, eps)
    turned = norm.rope(normed, cos, sin, False)
    if name == "kv_global_write":
        cache.page_write(pool, cache.pack_latent(turned), *where)
        return normed
    return cache.index_page_write(pool, cache.pack_index(turned), *where)


def check(name: str, args: tuple) -> None:
    """The returned rows and the pool."""
    mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
    got, want = getattr(writes, name)(*mine), chain(name, *theirs)
    assert (got is None) == (want is None)
    if got is not None:
        assert got.dtype == want.dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(mine[0].view(torch.uint8), theirs[0].view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_chain(name: str) -> None:
    for args in registry.OPS[name].inputs(torch.Generator().manual_seed(3)):
        check(name, args)


@pytest.mark.parametrize("name, dim, width", [("kv_global_write", 512, 288), ("index_key_write", 128, 68)])
def test_pages_of_the_release(name: str, dim: int, width: int) -> None:
    """High page ids, rows that complete nothing, zeros of both signs, a strided row."""
    g = torch.Generator().manual_seed(6)
    t = 9
    x = randn(g, t, 2 * dim)[:, dim:]
    x[2], x[3] = 0.0, -0.0
    angle = torch.rand((t, 32), generator=g) * 6.0
    pos = torch.arange(120, 120 + t, dtype=torch.int32)
    table = torch.randperm(9, generator=g)[:6].view(3, 2).int()
    for ratio in (1, 2):
        shape = (9, 128 // ratio, width) if name == "kv_global_write" else (9, 128 // ratio * width)
        where = (table, torch.full_like(pos, 2), pos, ratio, 128)
        check(name, (torch.zeros(shape, dtype=torch.uint8), x, randn(g, dim), angle.cos(), angle.sin(), 1e-20, *where))
