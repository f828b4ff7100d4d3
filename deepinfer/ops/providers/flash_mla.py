"""FlashMLA (MIT): sparse attention over bf16 keys.

Belongs here: calls of its functions in the layouts that they read. Does not belong here: our own kernels (ops/triton).
The sparse prefill of sgl-flash-mla serves any number of rows: SM90 by kernels that upstream dropped (`use_legacy`),
SM100 by upstream's. It reads bf16, so records are expanded before each call. Upstream's decode reads the same 528 B and
288 B records as we do, page by page and on SM100 only; it is not bound.
"""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from deepinfer.ops import records
from deepinfer.ops.providers import SM90, SM100, SM103, Binding, lacks_functions

MODULE = "flash_mla"
PREFILL = "flash_mla_sparse_fwd(q, kv, indices, sm_scale, attn_sink=None, use_legacy=False, return_log2_lse=None)"
TOPK_STEP = 128  # keys of a row come in multiples of it


def _legacy(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == SM90


def keys(
    new: Tensor, ring: Tensor, slots: Tensor, positions: Tensor, rows: Tensor, first: Tensor, floor: Tensor,
    pool: Tensor | None, selected: Tensor | None, page_table: Tensor, window: int, ratio: int, page_size: int, dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(bf16 keys [n, dim], int32 [M, window + k] which of them a row sees, -1: none). No host sync.

    Records of the step, all rings, then entries: those that the page table names, or those that the rows select where
    these are fewer.
    """
    kv = [records.unpack_window(r, dim).bfloat16() for r in (new, ring.flatten(0, 1))]
    back = torch.arange(window - 1, -1, -1, device=new.device)
    slot, at = slots.long().unsqueeze(1), positions.long().unsqueeze(1) - back
    old = new.shape[0] + slot * ring.shape[1] + at % ring.shape[1]
    seen = torch.where(at >= first.unsqueeze(1), rows.long().unsqueeze(1) - back, old)
    seen = torch.where(at >= floor.clamp_min(0).unsqueeze(1), seen, -1)
    if pool is None or selected is None or not selected.shape[1]:
        return torch.cat(kv), seen.int()
    per_page, entry = page_size // ratio, selected.long()
    begin = sum(k.shape[0] for k in kv)
    if page_table.numel() * per_page <= entry.numel():
        latent = pool[page_table.clamp_min(0).long()].flatten(0, 2)
        index = slot * (page_table.shape[1] * per_page) + entry
    else:
        some = entry.clamp_min(0)
        page = page_table[slot, some // per_page].clamp_min(0).long()
        latent = pool[page, some % per_page].flatten(0, 1)
        index = torch.arange(entry.numel(), device=new.device).view(entry.shape)
    kv.append(records.unpack_latent(latent, dim).bfloat16())
    return torch.cat(kv), torch.cat((seen, torch.where(entry >= 0, index + begin, -1)), dim=1).int()


def attention(
    q: Tensor, new: Tensor, ring: Tensor, slots: Tensor, positions: Tensor, rows: Tensor, first: Tensor,
    floor: Tensor, sink: Tensor, pool: Tensor | None, selected: Tensor | None, page_table: Tensor, scale: float,
    window: int, ratio: int, page_size: int,
) -> Tensor:  # fmt: skip
    """Expansion in torch, then the library's sparse prefill."""
    if not q.shape[0]:
        return torch.empty_like(q)
    per_row = (slots, positions, rows, first, floor)
    kv, index = keys(new, ring, *per_row, pool, selected, page_table, window, ratio, page_size, q.shape[2])
    index = torch.nn.functional.pad(index, (0, -index.shape[1] % TOPK_STEP), value=-1)
    out: Tensor = importlib.import_module(MODULE).flash_mla_sparse_fwd(
        q.contiguous(), kv.unsqueeze(1), index.unsqueeze(1), scale, attn_sink=sink, use_legacy=_legacy(q.device),
        return_log2_lse=False,
    )[0]  # fmt: skip
    return out


why_not = functools.partial(lacks_functions, PREFILL, MODULE)
BINDINGS = (
    Binding(
        "attention",
        "flash_mla",
        attention,
        archs=(SM90, SM100, SM103),
        recorded=PREFILL,
        why_not=why_not,
        measured={
            SM90: "right (error 2.2e-3), not timed with its expansion; its kernel alone takes 1207 us for 8192 rows of"
            " bf16 keys, triton 1680 us from records"
        },
        invariant=True,
    ),
    Binding("block_attention", "flash_mla", always="its sparse prefill would expand every block's keys once a row"),
)
