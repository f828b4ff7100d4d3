"""Recomputing units.safetensors: single kernels on given inputs, through the registered ops where one takes such
inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from deepinfer.model.config import ModelConfig
from deepinfer.model.rotary import cos_sin, inverse_frequencies
from deepinfer.ops import EXACT, QUANTISED, formats


def units(u: Mapping[str, Tensor], config: ModelConfig, device: str) -> Iterator[tuple[str, Tensor]]:
    """(name, recomputed value). `config` supplies the released RoPE parameters (head rotation of 64 dims)."""
    x = u["act.x"].to(device)
    q, s = QUANTISED.quant_fp8(x)
    yield "act.q_official", q
    yield "act.scale_official", s
    yield "act.roundtrip_official", formats.dequant_fp8(q, s).bfloat16()
    rec = QUANTISED.pack_latent(x)
    codes, scale = rec[:, :256], rec[:, 256:288].contiguous().view(torch.float8_e4m3fn)
    yield "fp4_16.q_official", codes
    yield "fp4_16.scale_official", scale
    yield "fp4_16.roundtrip_official", formats.dequant_latent(codes, scale).bfloat16()
    rec = QUANTISED.pack_index(x)
    codes, scale = rec[:, :256], rec[:, 256:]
    yield "fp4_32.q_official", codes
    yield "fp4_32.scale_official", scale
    yield "fp4_32.roundtrip_official", formats.dequant_fp4(codes, scale).bfloat16()
    bits = lambda name: u[name].view(torch.uint8).to(device)  # noqa: E731
    yield "gemm.y8_official", QUANTISED.linear_fp8(q, s, u["gemm.w8"].to(device), bits("gemm.w8_scale"))
    yield "gemm.y4_official", _fp4_gemm(q, s, bits("gemm.w4"), bits("gemm.w4_scale"))
    yield from zip(("hc.pre_official", "hc.post_official", "hc.comb_official"), _hyper(u, device), strict=True)
    yield "attn.o_official", _attention(u, device)
    for name, yarn in (("theta1e4", False), ("yarn", True)):
        freq = inverse_frequencies(config, yarn)
        cos, sin = cos_sin(u["rope.positions"], freq)
        yield f"rope.{name}.inv_freq", freq
        yield f"rope.{name}.cos_official", cos
        yield f"rope.{name}.sin_official", sin


def _fp4_gemm(q: Tensor, s: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    return (formats.dequant_fp8(q, s) @ formats.dequant_fp4(w, ws).t()).bfloat16()


def _hyper(u: Mapping[str, Tensor], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Sinkhorn of given mixes: streams are built so that an identity `fn` and a unit RMS give exactly `hc.mix`."""
    mix = u["hc.mix"].to(device)
    streams = torch.zeros((mix.shape[0], 256), device=device)
    streams[:, :24] = mix
    streams[:, 24] = (256 - mix.square().sum(1)).sqrt()
    fn = torch.eye(24, 256, device=device)
    return EXACT.hc_mix(streams.view(-1, 4, 64), fn, u["hc.base"].to(device), u["hc.scale"].to(device), 20, 1e-6, 0.0)


def _attention(u: Mapping[str, Tensor], device: str) -> Tensor:
    """Attention over listed entries only: no window, one page that holds all keys."""
    q, kv, idx = (u[f"attn.{n}"].to(device) for n in ("q", "kv", "idx"))
    m = torch.zeros(q.shape[0], dtype=torch.int32, device=device)
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    none = torch.zeros((1, 1, 512), device=device)
    return EXACT.attention(
        q,
        none[0],
        none,
        m,
        m,
        m,
        m,
        m,
        u["attn.sink"].to(device),
        kv.float()[None],
        idx,
        table,
        512**-0.5,
        0,
        1,
        kv.shape[0],
    )
