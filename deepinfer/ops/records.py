"""Byte layouts of cache records: the only place that knows them.

Belongs here: sizes, packing and unpacking of window, latent and index-key records for both numerics.
Does not belong here: pools, page tables, writes (cache.py), number formats (formats.py).

quantised (uint8)                                                   exact (float32)
  window  [D codes e4m3 | D/32 scales E8M0 | pad to 16]   528 B      [D]
  latent  [D/2 packed e2m1 | D/16 scales e4m3 | pad to 16] 288 B      [D]
  index   [D/2 packed e2m1 | D/32 scales E8M0]             68 B       [D]
Window and latent records keep the scales next to the token's codes. Index keys are packed like that only in flight
(`index_record`); in a page all codes come first, then all scales, so that loads of codes stay 16-byte aligned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops import formats

ALIGN = 16


def _pad(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def window_bytes(dim: int) -> int:
    """Bytes of a window record of a head of `dim` (528 for 512)."""
    return _pad(dim + dim // formats.BLOCK)


def latent_bytes(dim: int) -> int:
    """Bytes of a compressed KV record (288 for 512)."""
    return _pad(dim // 2 + dim // formats.LATENT_BLOCK)


def index_bytes(dim: int) -> int:
    """Bytes of an index key (68 for 128)."""
    return dim // 2 + dim // formats.BLOCK


def _join(codes: Tensor, scales: Tensor, size: int) -> Tensor:
    rec = torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=-1)
    return torch.nn.functional.pad(rec, (0, size - rec.shape[-1]))


def pack_window(kv: Tensor) -> Tensor:
    """kv [..., D] -> records uint8 [..., window_bytes(D)]; float32 input (exact) is returned as it is."""
    if kv.dtype is torch.float32:
        return kv
    return _join(*formats.quant_fp8(kv), window_bytes(kv.shape[-1]))


def unpack_window(rec: Tensor, dim: int) -> Tensor:
    """Inverse of `pack_window`: float32 [..., D]."""
    if rec.dtype is torch.float32:
        return rec
    codes = rec[..., :dim].contiguous().view(torch.float8_e4m3fn)
    return formats.dequant_fp8(codes, rec[..., dim : dim + dim // formats.BLOCK])


def pack_latent(kv: Tensor) -> Tensor:
    """kv [..., D] -> records uint8 [..., latent_bytes(D)]; float32 input (exact) is returned as it is."""
    if kv.dtype is torch.float32:
        return kv
    return _join(*formats.quant_latent(kv), latent_bytes(kv.shape[-1]))


def unpack_latent(rec: Tensor, dim: int) -> Tensor:
    """Inverse of `pack_latent`: float32 [..., D]."""
    if rec.dtype is torch.float32:
        return rec
    scale = rec[..., dim // 2 : dim // 2 + dim // formats.LATENT_BLOCK].contiguous().view(torch.float8_e4m3fn)
    return formats.dequant_latent(rec[..., : dim // 2], scale)


def pack_index(x: Tensor) -> Tensor:
    """Index query or key [..., D] -> uint8 [..., index_bytes(D)]; float32 input (exact) is returned as it is."""
    if x.dtype is torch.float32:
        return x
    return _join(*formats.quant_fp4(x), index_bytes(x.shape[-1]))


def unpack_index(rec: Tensor, dim: int) -> Tensor:
    """Inverse of `pack_index`: float32 [..., D]."""
    if rec.dtype is torch.float32:
        return rec
    return formats.dequant_fp4(rec[..., : dim // 2], rec[..., dim // 2 :])


def split_index_page(pool: Tensor, entries: int, dim: int) -> tuple[Tensor, Tensor]:
    """Views of an index pool uint8 [pages, entries * index_bytes]: codes [pages, entries, D/2], scales [pages,
    entries, D/32].
    """
    codes, scales = pool.split((entries * (dim // 2), entries * (dim // formats.BLOCK)), dim=1)
    return codes.unflatten(1, (entries, dim // 2)), scales.unflatten(1, (entries, dim // formats.BLOCK))
