"""The FlashMLA adapter with a double of the library: bf16 keys and indices as documented, computed in float32."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.ops import providers, registry
from deepinfer.ops.providers import flash_mla

SEEN: list[tuple[int, ...]] = []


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None, use_legacy: bool = False, return_log2_lse: bool | None = None,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """Invalid indices are -1; the output is scaled by exp(lse) / (exp(lse) + exp(sink)); a row without keys is 0."""
    assert kv.dtype is torch.bfloat16 and indices.dtype is torch.int32 and attn_sink is not None
    assert indices.shape[1] == 1 and indices.shape[2] % flash_mla.TOPK_STEP == 0 and int(indices.max()) < kv.shape[0]
    SEEN.append(tuple(kv.shape))
    at = indices[:, 0].long()
    keys = kv[at.clamp_min(0), 0].float()
    s = torch.einsum("mhd,mjd->mhj", q.float(), keys) * sm_scale
    s = s.masked_fill((at < 0).unsqueeze(1), float("-inf"))
    lse = s.logsumexp(2, keepdim=True)
    p = torch.exp(s - torch.logaddexp(lse, attn_sink.view(1, -1, 1)))
    return torch.einsum("mhj,mjd->mhd", p, keys).to(q.dtype), None, None


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_mla")
    module.flash_mla_sparse_fwd = flash_mla_sparse_fwd  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    monkeypatch.setattr(providers, "_imported", lambda name: name in sys.modules)


def test_it_is_found() -> None:
    assert flash_mla.why_not() is None


def close(args: tuple[Any, ...]) -> bool:
    got, want = flash_mla.attention(*args), registry.OPS["attention"].reference(*args)
    return bool((got.double() - want.double()).norm() <= 4e-3 * want.double().norm())


def test_every_example() -> None:
    for args in registry.OPS["attention"].inputs(torch.Generator().manual_seed(1)):
        assert close(args)


def test_the_smaller_of_page_table_and_selection_is_expanded() -> None:
    examples = list(registry.OPS["attention"].inputs(torch.Generator().manual_seed(2)))
    args = list(examples[-1])  # 19 rows of 6 entries, 3 x 2 pages of 8
    assert args[10] is not None
    for copies in (1, 30):
        per_row = [args[i].repeat(copies, *([1] * (args[i].dim() - 1))) for i in (3, 4, 5, 6, 7, 10)]
        many = list(args)
        many[0] = args[0].repeat(copies, 1, 1)
        for i, value in zip((3, 4, 5, 6, 7, 10), per_row, strict=True):
            many[i] = value
        SEEN.clear()
        assert close(tuple(many))
        window = args[1].shape[0] + args[2].shape[0] * args[2].shape[1]
        assert SEEN[0][0] == window + min(args[11].numel() * 8, many[10].numel())
