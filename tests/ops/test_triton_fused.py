"""The fused kernels in Triton's interpreter: bit for bit the references of their chains, where the norm's sum is exact.

The interpreter sums like numpy, another order than the reference's, so a code next to a rounding boundary may differ:
at most one in a thousand bytes does here.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

pytest.importorskip("triton")

from deepinfer.ops import registry
from deepinfer.ops.triton import fused
from deepinfer.ops.triton.support import INTERPRET

pytestmark = pytest.mark.skipif(not INTERPRET.value, reason="triton was imported without its interpreter")
DIFFERING = {"rms_norm_quant": 1e-3, "swiglu_quant": 1e-3, "norm_rope_pack_window": 1e-3}  # share of bytes


@pytest.mark.parametrize("name", sorted(DIFFERING))
def test_equals_the_chain(name: str) -> None:
    op = registry.OPS[name]
    for seed in (1, 2):
        for args in op.inputs(torch.Generator().manual_seed(seed)):
            want, got = (
                r if isinstance(r, tuple) else (r,) for r in (op.reference(*args), getattr(fused, name)(*args))
            )
            for a, b in zip(want, got, strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
                bits = a.view(torch.uint8) != b.view(torch.uint8)
                assert bits.sum() <= DIFFERING[name] * max(bits.numel(), 1), f"{name}: {int(bits.sum())} bytes differ"
