"""Kernels that pack and write cache records, in Triton's interpreter."""

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

from deepinfer.ops import formats, records, registry
from deepinfer.ops.common import randn
from deepinfer.ops.triton import cache as kernels

NAMES = ["pack_window", "pack_latent", "pack_index", "ring_write", "page_write", "index_page_write", "pair_pool"]


def both(name: str, args: tuple) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernel and the reference return, or wrote."""
    out = []
    for fn in (getattr(kernels, name), registry.OPS[name].reference):
        mine = copy.deepcopy(args)
        done = fn(*mine)
        out.append([done] if isinstance(done, Tensor) else [a for a in mine if isinstance(a, Tensor)])
    return out[0], out[1]


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_op_inputs(name: str) -> None:
    for args in registry.OPS[name].inputs(torch.Generator().manual_seed(3)):
        for a, b in zip(*both(name, args), strict=True):
            if name == "pair_pool":
                assert a.dtype == b.dtype and (a.double() - b.double()).norm() <= 2e-3 * b.double().norm()
            else:
                assert same(a, b), (name, args[0].shape)


@pytest.mark.parametrize("name, dim", [("pack_window", 512), ("pack_latent", 512), ("pack_index", 128)])
def test_records_of_every_magnitude(name: str, dim: int) -> None:
    """Tiny and huge blocks, ties between codes, zeros of both signs, saturated blocks.

    Normal numbers: the interpreter reads subnormal bf16 wrongly; tests/gpu/check_cache.py has them.
    """
    g = torch.Generator().manual_seed(5)
    x = randn(g, 9, dim).float()
    x[1] *= 2.0 ** torch.randint(-120, 120, (dim,), generator=g).float()
    x[2] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(dim // 8)
    x[3], x[4] = 0.0, -0.0
    x[5] = 448.0 * (1 + torch.randint(0, 2, (dim,), generator=g).float() / 128)
    x[6] = 3.0e38
    x[7] = (x[7] + x[7].sign()) * 2.0**-126
    x[8] *= 1e-5
    for a, b in zip(*both(name, (x.bfloat16(),)), strict=True):
        assert same(a, b)


def test_codes_come_from_bits() -> None:
    """support.fp8_scale, fp4_scale and cache.fp4_words, run by hand for every bf16, against the divisions."""
    v = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    for floor, top, carry, shift in ((1e-4, 448.0, 0x1FFFFF, 8), (6 * 2.0**-126, 6.0, 0x3FFFFF, 2)):
        amax = v.clamp_min(floor)
        assert torch.equal(((amax.view(torch.int32) + carry) >> 23) - shift, formats.e8m0_ceil(amax / top).int())
    q = torch.cat((v[v <= 6], torch.linspace(0, 6, 100_001)))
    bits = (q * 2.0**-126).view(torch.int32)
    assert torch.equal((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22, formats.e2m1_code(q).int())


def test_quotients_by_a_latent_scale() -> None:
    """cache.divided gives the code of a true division for every bf16 and every scale that it can meet."""
    v = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    for code in range(1, 127):
        s = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        near = v[v <= 8 * s]
        r = 1.0 / s
        q = near * r
        rest = (near.double() - q.double() * s.double()).float()
        q = (rest.double() * r.double() + q.double()).float()
        assert torch.equal(formats.e2m1_code(q), formats.e2m1_code(near / s)), code


def test_records_and_pools_of_the_release() -> None:
    """Real widths: 528 and 288 B records, 68 B keys with their scales behind the codes; high page ids; a long run."""
    g = torch.Generator().manual_seed(6)
    t = 21
    pos = torch.arange(120, 120 + t, dtype=torch.int32)
    slots = torch.full_like(pos, 2)
    table = torch.randperm(9, generator=g)[:6].view(3, 2).int()
    window = torch.randint(0, 255, (t, records.window_bytes(512)), generator=g, dtype=torch.uint8)
    cases = [
        ("ring_write", (torch.zeros((3, 8, 528), dtype=torch.uint8), window, slots, pos, torch.full_like(pos, 140)))
    ]
    for ratio in (1, 2):
        entries = 128 // ratio
        latent = torch.randint(0, 255, (t, 288), generator=g, dtype=torch.uint8)
        key = torch.randint(0, 255, (t, 68), generator=g, dtype=torch.uint8)
        meta = (table, slots, pos, ratio, 128)
        cases.append(("page_write", (torch.zeros((9, entries, 288), dtype=torch.uint8), latent, *meta)))
        cases.append(("index_page_write", (torch.zeros((9, entries * 68), dtype=torch.uint8), key, *meta)))
        exact = torch.randn((t, 128), generator=g)
        cases.append(("index_page_write", (torch.zeros((9, entries, 128)), exact, *meta)))
    for name, args in cases:
        for a, b in zip(*both(name, args), strict=True):
            assert same(a, b), name
