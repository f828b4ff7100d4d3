"""A differentiable twin of deepinfer/model for training: whole sequences, the checkpoint's names, the same numbers.

Belongs here: the target's forward pass in training form, its rounding (straight-through gradients), its losses.
Does not belong here: rounding itself (fakequant.py), the draft (draft.py), the optimiser and the data (train.py).

Parameters are the model form of checkpoint.py without the scales: float tensors, FP4 ones unpacked. Rows are flat
[N = B*T]; only selection and the attention core see [B, T], so the compiled parts do not depend on the sequence length.
Legend: B sequences, T tokens, N = B*T rows, C streams, H hidden, h heads, d head dim, E entries, S keys of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepinfer.model.checkpoint import plan
from deepinfer.model.config import (
    LayerSpec,
    ModelConfig,
    engram_multipliers,
    engram_offsets,
    engram_primes,
)
from deepinfer.model.rotary import cos_sin, inverse_frequencies
from recipes.small.fakequant import bf16, fp4, fp8, fp8_block, latent_fp4
from recipes.small.sinkhorn import sinkhorn

# Flash attention takes no mask, and cuDNN's plans are built per shape.
KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
Weights = dict[str, Tensor]
_FRONT = ("attn.", "attn_norm", "hc_attn_")
_BACK = ("attn.wo_", "hc_ffn_", "ffn_norm", "ffn.")  # what of a block comes after its attention core


class Mode(NamedTuple):
    """How the twin computes. `quant`: every rounding of spec section 4. `dense`: attend to all entries, select none."""

    dtype: torch.dtype
    quant: bool
    dense: bool = False


EXACT = Mode(torch.float32, False)
BF16 = Mode(torch.bfloat16, False)
QUANTISED = Mode(torch.bfloat16, True)


class Kind(NamedTuple):
    """What the compiled part before attention depends on: layers of one kind share one graph."""

    ratio: int
    owns_kv: bool
    owns_index: bool

    @classmethod
    def of(cls, spec: LayerSpec) -> Kind:
        return cls(spec.ratio if spec.owns_kv else 0, spec.owns_kv, spec.owns_index)


class Front(NamedTuple):
    """Inputs of the attention core of one layer, and the coefficients of its residual write."""

    q: Tensor  # [N, h, d]
    kv: Tensor  # [N, d]
    entries: Tensor | None  # [N / ratio, d]
    index_keys: Tensor | None  # [N / ratio, index dim]
    index_q: Tensor | None  # [N, index heads, index dim]
    index_w: Tensor | None  # float32 [N, index heads]
    pre: Tensor
    post: Tensor
    comb: Tensor


# ---- pieces: flat rows, no data-dependent shapes, each compiled once per kind and mode ----


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * bf16(weight, x).float()).to(x.dtype)


def act(x: Tensor, mode: Mode) -> Tensor:
    """The activation of an FP8 or FP4 linear."""
    return fp8(x) if mode.quant else x


def dense_weight(w: Tensor, mode: Mode) -> Tensor:
    """An FP8 matrix [N, K] in the compute dtype."""
    return (fp8_block(w) if mode.quant else w).to(mode.dtype)


def expert_weight(w: Tensor, mode: Mode) -> Tensor:
    """FP4 matrices [..., K] in the compute dtype."""
    return (fp4(w) if mode.quant else w).to(mode.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Interleaved pairs of the last dims; x [N, d] or [N, h, d], cos/sin float32 [N, R]."""
    n = 2 * cos.shape[1]
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if inverse:
        sin = -sin
    pairs = x[..., -n:].float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-n], turned.to(x.dtype)), dim=-1)


def hc_mix(c: ModelConfig, fn: Tensor, base: Tensor, scale: Tensor, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(pre, post, comb) in float32 from streams [N, C, H]. spec/model.md 9."""
    n = c.hc_mult
    u = streams.float().flatten(1)
    m = F.linear(u, fn) * torch.rsqrt(u.square().mean(-1, keepdim=True) + c.rms_norm_eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + c.hc_eps
    post = 2.0 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n))
    comb = sinkhorn(torch.softmax(logits, dim=2) + c.hc_eps, c.hc_sinkhorn_iters, c.hc_eps)
    return pre, post, comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return (streams.float() * pre.unsqueeze(2)).sum(1).to(streams.dtype)


def hc_write(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """R'_i = post_i * y + sum_j comb[j][i] * R_j."""
    f = streams.float()
    out = post.unsqueeze(2) * y.float().unsqueeze(1)
    for j in range(f.shape[1]):
        out = out + comb[:, j].unsqueeze(2) * f[:, j].unsqueeze(1)
    return out.to(streams.dtype)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """float32 in and out."""
    return F.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)


def moe(c: ModelConfig, w: Weights, x: Tensor, bias: Tensor, top_k: int, mode: Mode) -> tuple[Tensor, Tensor]:
    """x [N, H] -> ([N, H], rows per expert float32 [experts]). Every expert runs on every row: here the products
    cost less than sorting rows, and nothing depends on the routing but a factor that is zero for the others."""
    experts, width = w["ffn.gate.weight"].shape[0], c.moe_intermediate_size
    scores = torch.sqrt(F.softplus(F.linear(x.float(), bf16(w["ffn.gate.weight"], x).float())))
    chosen = (scores + bias).detach().topk(top_k, dim=1).indices
    picked = torch.zeros_like(scores).scatter(1, chosen, 1.0)
    share = scores * picked
    share = share / (share.sum(1, keepdim=True) + 1e-20) * c.routed_scaling_factor

    xq = act(x, mode)
    w13 = expert_weight(w["ffn.experts.w13.weight"], mode).flatten(0, 1)
    gate, up = F.linear(xq, w13).float().view(-1, experts, 2, width).unbind(2)
    hidden = (swiglu(gate, up, c.swiglu_limit) * share.unsqueeze(2)).to(x.dtype)
    w2 = expert_weight(w["ffn.experts.w2.weight"], mode).transpose(0, 1).flatten(1)  # [H, experts * width]
    routed = F.linear(act(hidden, mode).flatten(1), w2)

    gate, up = F.linear(xq, dense_weight(w["ffn.shared_experts.w13.weight"], mode)).float().chunk(2, dim=1)
    hidden = act(swiglu(gate, up, c.swiglu_limit).to(x.dtype), mode)
    shared = F.linear(hidden, dense_weight(w["ffn.shared_experts.w2.weight"], mode))
    return (routed.float() + shared.float()).to(x.dtype), picked.sum(0)


def front(
    c: ModelConfig, kind: Kind, mode: Mode, w: Weights, streams: Tensor, pre: Tensor, cos: Tensor, sin: Tensor
) -> Front:
    """Everything of a block before its attention core. cos/sin [N, R]: the layer's table at each row's position."""
    a_pre, post, comb = hc_mix(c, w["hc_attn_fn"], w["hc_attn_base"], w["hc_attn_scale"], streams)
    x = rms_norm(collapse(streams, pre), w["attn_norm.weight"], c.rms_norm_eps)
    low = F.linear(act(x, mode), dense_weight(w["attn.wqkv_a.weight"], mode))
    qr, kv = low.split((c.q_lora_rank, c.head_dim), dim=1)
    qr = act(rms_norm(qr, w["attn.q_norm.weight"], c.rms_norm_eps), mode)
    q = F.linear(qr, dense_weight(w["attn.wq_b.weight"], mode)).unflatten(1, (c.num_attention_heads, c.head_dim))
    kv = rope(rms_norm(kv, w["attn.kv_norm.weight"], c.rms_norm_eps), cos, sin)

    entries = keys = index_q = index_w = None
    if kind.owns_kv:
        entries, keys = compress(c, kind.ratio, mode, w, x, cos, sin)
    if kind.owns_index:  # learns from its own loss only: nothing flows back into the layer
        iq = F.linear(qr.detach(), dense_weight(w["attn.indexer.wq_b.weight"], mode))
        iq = rope(iq.unflatten(1, (c.index_n_heads, c.index_head_dim)), cos, sin)
        index_q = fp4(iq) if mode.quant else iq
        weights = F.linear(x.detach(), bf16(w["attn.indexer.weights_proj.weight"], x))
        index_w = weights.float() * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
    return Front(rope(q, cos, sin), act(kv, mode), entries, keys, index_q, index_w, a_pre, post, comb)


def compress(
    c: ModelConfig, ratio: int, mode: Mode, w: Weights, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """x [N, H] -> (entries [N / ratio, d], index keys [N / ratio, index dim])."""
    weight = bf16(w["attn.compressor.wkv_gate.weight"], x)
    if ratio == 1:
        latent = F.linear(x, weight)
    else:
        pairs = F.linear(x.float(), weight.float()).view(-1, 2, 2, c.head_dim)  # [pair, token, value | score, d]
        second = torch.sigmoid(pairs[:, 1, 1] - pairs[:, 0, 1])
        latent = (pairs[:, 0, 0] * (1 - second) + pairs[:, 1, 0] * second).to(x.dtype)
        cos, sin = cos[::2], sin[::2]
    latent = rms_norm(latent, w["attn.compressor.norm.weight"], c.rms_norm_eps)
    key = F.linear(latent.detach(), bf16(w["attn.indexer.wk.weight"], x))
    key = rope(rms_norm(key, w["attn.indexer.k_norm.weight"], c.rms_norm_eps), cos, sin)
    latent = rope(latent, cos, sin)
    return (latent_fp4(latent), fp4(key)) if mode.quant else (latent, key)


def output_projection(c: ModelConfig, mode: Mode, w: Weights, o: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """o [N, h, d], still rotated -> [N, H]."""
    wo_a = dense_weight(w["attn.wo_a.weight"], mode).unflatten(0, (c.o_groups, -1))  # [g, r, heads of g * d]
    grouped = rope(o, cos, sin, inverse=True).flatten(1).unflatten(1, (c.o_groups, -1))
    z = torch.einsum("ngk,grk->ngr", grouped, wo_a).flatten(1)
    return F.linear(act(z, mode), dense_weight(w["attn.wo_b.weight"], mode))


def back(
    c: ModelConfig,
    mode: Mode,
    top_k: int,
    w: Weights,
    bias: Tensor,
    streams: Tensor,
    o: Tensor,
    coefficients: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rest of a block after its attention core: (streams, pre of the next sublayer, expert load)."""
    pre, post, comb = coefficients
    streams = hc_write(output_projection(c, mode, w, o, cos, sin), streams, post, comb)
    f_pre, post, comb = hc_mix(c, w["hc_ffn_fn"], w["hc_ffn_base"], w["hc_ffn_scale"], streams)
    y, load = moe(c, w, rms_norm(collapse(streams, pre), w["ffn_norm.weight"], c.rms_norm_eps), bias, top_k, mode)
    return hc_write(y, streams, post, comb), f_pre, load


def inject(c: ModelConfig, mode: Mode, w: Weights, streams: Tensor, rows: Tensor) -> Tensor:
    """Engram: rows int64 [N, columns] of the table, gated into every stream. spec/model.md 8."""
    memory = F.embedding(rows, w["engram.embed.weight"])
    memory = act(fp8(memory) if mode.quant else memory, mode).to(mode.dtype).flatten(1)
    kv = (
        F.linear(act(memory, mode), dense_weight(w["engram.wkv.weight"], mode))
        .float()
        .unflatten(1, (c.hc_mult + 1, -1))
    )
    keys, value = kv[:, :-1], kv[:, -1:]
    r = streams.float()
    norm = torch.rsqrt(r.square().mean(-1) + c.rms_norm_eps) * torch.rsqrt(keys.square().mean(-1) + c.rms_norm_eps)
    weight = bf16(w["engram.q_weight"], streams).float() * bf16(w["engram.k_weight"], streams).float()
    dot = (r * weight * keys).sum(-1) * norm * c.hidden_size**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return (r + gate.unsqueeze(2) * value).to(streams.dtype)


def logits_of(c: ModelConfig, w: Weights, streams: Tensor, pre: Tensor) -> Tensor:
    """float32 [N, V]."""
    h = rms_norm(collapse(streams, pre), w["norm.weight"], c.rms_norm_eps)
    return F.linear(h, bf16(w["head.weight"], h)).float()


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q [B, Q, heads, D], weights [B, Q, heads], keys [B, E, D] -> float32 [B, Q, E]."""
    dots = torch.matmul(q.flatten(1, 2), keys.transpose(1, 2)).unflatten(1, q.shape[1:3])
    return (torch.relu(dots.float()) * weights.unsqueeze(3)).sum(2)


# ---- selection and the attention core: [B, T] ----


def pad_bias(bias: Tensor) -> Tensor:
    """A column for the sink, and masked ones up to a multiple of 16 (the kernel's alignment)."""
    keys = bias.shape[-1] + 1
    return F.pad(F.pad(bias, (0, 1)), (0, -keys % 16), value=float("-inf"))


def attention_core(q: Tensor, keys: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
    """q [G, Q, h, d], keys [G, S, d] (also the values), bias [G, Q, >S] from `pad_bias`, sink [h] -> [G, Q, h, d].

    The sink is one more key: zero in the head's dims (so it adds no value) and one in two extra dims, where the query
    carries the sink's logit as a sum of two parts (a single bf16 would round it).
    """
    d, h, real = q.shape[3], q.shape[2], keys.shape[1]
    keys = F.pad(keys, (0, 8, 0, bias.shape[-1] - real))
    keys = keys + F.pad(keys.new_ones(1, 2), (d, 6, real, keys.shape[1] - real - 1))
    logit = (sink.float() * math.sqrt(d)).view(1, 1, h, 1).expand(*q.shape[:3], 1)
    high = logit.to(q.dtype)
    q = F.pad(torch.cat((q, high, (logit - high.float()).to(q.dtype)), 3), (0, 6)).transpose(1, 2)
    keys = keys.unsqueeze(1).expand(-1, h, -1, -1)
    with sdpa_kernel(KERNELS):
        o = F.scaled_dot_product_attention(q, keys, keys, bias.unsqueeze(1).expand(-1, h, -1, -1), scale=d**-0.5)
    return o[..., :d].transpose(1, 2)


def _top(scores: Tensor, k: int) -> Tensor:
    """bool, the k best finite scores of the last axis."""
    if scores.shape[-1] <= k:
        return scores > float("-inf")
    best = scores.topk(k, dim=-1, sorted=False)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > float("-inf"))


@dataclass
class Group:
    """What an index source chose, and what its layers attend to: they share one selection."""

    ratio: int
    index_q: Tensor  # [B, T, heads, D]
    index_w: Tensor
    keys: Tensor  # [B, E, D]
    visible: Tensor  # bool [T, E]
    selected: Tensor  # bool [B, T, E]
    blocks: Tensor | None  # bool [B, T, E], what the candidate source published
    bias: Tensor  # additive mask of the attention core
    wanted: list[Tensor] = field(default_factory=list)  # per layer: attention mass over all entries, at the probe rows
    readers: list[Tensor] = field(default_factory=list)  # the same of the layers that choose among its candidates


@dataclass
class TwinOutputs:
    streams: Tensor  # [N, C, H] after the last block
    pre: Tensor
    loads: Tensor  # float32 [layers, experts] rows per expert
    index_loss: Tensor
    recall: Tensor  # [index sources] share of the entries' attention mass that was selected
    taps: list[Tensor]
    groups: list[Group]  # one per index source


class Twin:
    """The target of a config with float parameters `params` (model-form names)."""

    def __init__(self, config: ModelConfig, params: Weights, biases: Weights, token_map: np.ndarray | Tensor) -> None:
        self.config, self.params, self.biases = config, params, biases
        self.device = params["embed.weight"].device
        on = lambda a: torch.as_tensor(a).to(self.device)  # noqa: E731
        self.token_map = on(token_map).long()
        self.multipliers, self.offsets = on(engram_multipliers(config)), on(engram_offsets(config))
        self.primes = on(engram_primes(config).reshape(len(config.engram_layer_ids), -1))
        self.inv_freq = [inverse_frequencies(config, yarn).to(self.device) for yarn in (False, True)]
        self.chunk = 2 * config.sliding_window  # queries that share one block of window keys
        self.front, self.back, self.inject, self.scores = front, back, inject, index_scores
        self.layers = self.parts(params, [s.name for s in config.layers])

    def compile(self, on: bool = True) -> None:
        """Compile the flat pieces (or go back to eager). Lengths only change `scores`, which is compiled for any."""
        wrap: Callable[..., Any] = torch.compile if on else lambda f, **kw: f
        self.front, self.back, self.inject = wrap(front), wrap(back), wrap(inject)
        self.scores = wrap(index_scores, dynamic=True)

    @staticmethod
    def parts(params: Weights, names: list[str]) -> dict[str, tuple[Weights, Weights, Weights]]:
        """Per block: what `front`, `back` and `inject` read, without its prefix. Separate, since a compiled function
        is bound to the keys of its dict and would be compiled again for every set of keys."""
        result = {}
        for name in names:
            own = {k[len(name) + 1 :]: v for k, v in params.items() if k.startswith(name + ".")}
            after = {k: v for k, v in own.items() if k.startswith(_BACK)}
            table = {k: v for k, v in own.items() if k.startswith("engram.")}
            before = {k: v for k, v in own.items() if k not in after and k not in table and k.startswith(_FRONT)}
            result[name] = (before, after, table)
        return result

    def rope_tables(self, b: int, t: int, first: Tensor | int = 0) -> list[tuple[Tensor, Tensor]]:
        """[plain, YaRN] cos/sin float32 [N, R] of positions first..first+t-1."""
        positions = torch.arange(t, device=self.device) + first
        tables = (cos_sin(positions, f) for f in self.inv_freq)
        return [(cos.repeat(b, 1), sin.repeat(b, 1)) for cos, sin in tables]

    def hash(self, ids: Tensor) -> list[Tensor]:
        """Table rows int64 [N, columns] of each Engram layer from ids [B, T]."""
        c = self.config
        pad = torch.full_like(ids[:, :1], c.engram_pad_token_id)
        back = [
            torch.cat((pad.expand(-1, min(s, ids.shape[1])), ids[:, : ids.shape[1] - s]), 1)
            for s in range(c.engram_max_ngram_size)
        ]
        tokens = self.token_map[torch.stack(back, 2)].flatten(0, 1)  # [N, n]
        result = []
        for i in range(len(c.engram_layer_ids)):
            products = tokens * self.multipliers[i]
            running, columns = products[:, 0], []
            for s in range(1, c.engram_max_ngram_size):
                running = running ^ products[:, s]
                at = slice((s - 1) * c.engram_n_heads, s * c.engram_n_heads)
                columns.append(running.unsqueeze(1) % self.primes[i, at] + self.offsets[i, at])
            result.append(torch.cat(columns, 1))
        return result

    def forward(self, ids: Tensor, mode: Mode, probe: Tensor | None = None, want_taps: bool = False) -> TwinOutputs:
        """ids int64 [B, T] from position 0, T even. probe int64 [P]: positions whose indexer is compared."""
        c, (b, t) = self.config, ids.shape
        tables = self.rope_tables(b, t)
        hashes = self.hash(ids)
        h = bf16(self.params["embed.weight"], torch.empty((), dtype=mode.dtype))[ids.flatten()]
        streams = h.unsqueeze(1).expand(-1, c.hc_mult, -1).contiguous()
        pre = torch.zeros((b * t, c.hc_mult), device=h.device)
        pre[:, 0] = 1.0
        pre.requires_grad_(torch.is_grad_enabled())  # as in every later layer: one compiled graph fits all
        window = self.window_bias(t, mode.dtype)
        groups: dict[int, Group] = {}
        entries: dict[int, tuple[Tensor, Tensor]] = {}
        loads, taps = [], []
        for spec in c.layers:
            w, w_back, w_engram = self.layers[spec.name]
            if spec.engram is not None:
                streams = self.inject(c, mode, w_engram, streams, hashes[spec.engram])
            if spec.tap and want_taps:
                taps.append(streams.float().mean(1).to(mode.dtype))
            cos, sin = tables[spec.yarn]
            f = self.front(c, Kind.of(spec), mode, w, streams, pre, cos, sin)
            if f.entries is not None and f.index_keys is not None:
                entries[spec.index] = (f.entries.view(b, -1, c.head_dim), f.index_keys.view(b, -1, c.index_head_dim))
            group, latents = None, None
            if spec.kv_source is not None and spec.index_source is not None:
                latents, keys = entries[spec.kv_source]
                if spec.owns_index:
                    groups[spec.index] = self.select(
                        spec, mode, f, keys, groups.get(c.candidate_source_layer_id), window, t
                    )
                group = groups[spec.index_source]
            sink = w["attn.attn_sink"]
            o = self.attend(f.q, f.kv, latents, group.bias if group else window, sink, b)
            if group is not None and latents is not None and probe is not None:
                group.wanted.append(self.attention_mass(f.q, f.kv, latents, group.visible, sink, probe, b))
                source = groups.get(c.candidate_source_layer_id)
                if source is not None and source is not group:
                    source.readers.append(group.wanted[-1])
            streams, pre, load = self.back(
                c,
                mode,
                spec.top_k,
                w_back,
                self.biases[f"{spec.name}.ffn.gate.bias"],
                streams,
                o,
                (f.pre, f.post, f.comb),
                cos,
                sin,
            )
            loads.append(load)
        index_loss, recall = self.index_loss(groups, probe)
        return TwinOutputs(streams, pre, torch.stack(loads), index_loss, recall, taps, [*groups.values()])

    def window_bias(self, t: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [chunks, chunk, window + chunk] of the window keys of a chunk of queries."""
        n, size, w = -(-t // self.chunk), self.chunk, self.config.sliding_window
        query = torch.arange(size, device=self.device).unsqueeze(1)
        key = torch.arange(-w, size, device=self.device)
        band = (key <= query) & (key > query - w)
        real = torch.arange(n, device=self.device).view(n, 1, 1) * size + key >= 0
        return pad_bias(_additive(band & real, dtype))

    def select(
        self, spec: LayerSpec, mode: Mode, f: Front, keys: Tensor, source: Group | None, window: Tensor, t: int
    ) -> Group:
        """Top-k entries of every query; no gradient passes."""
        c, (b, e) = self.config, keys.shape[:2]
        position = torch.arange(t, device=self.device).unsqueeze(1)
        visible = torch.arange(e, device=self.device) < (position + 1) // spec.ratio  # [T, E]
        assert f.index_q is not None and f.index_w is not None
        q, w = f.index_q.unflatten(0, (b, t)), f.index_w.unflatten(0, (b, t))
        blocks = None
        with torch.no_grad():
            if mode.dense or e <= c.index_topk:
                selected = visible.expand(b, t, e)
            else:
                scores = self.scores(q.detach(), w.detach(), keys.detach()).masked_fill(~visible, float("-inf"))
                if spec.candidate == "source":
                    blocks = self._candidates(scores, visible)
                elif spec.candidate == "reader" and source is not None and source.blocks is not None:
                    scores = scores.masked_fill(~source.blocks, float("-inf"))
                selected = _top(scores, c.index_topk)
            n, size = window.shape[0], self.chunk
            chosen = F.pad(selected, (0, 0, 0, n * size - t)).view(b, n, size, e)
            width = c.sliding_window + size
            bias = torch.cat((window[None, ..., :width].expand(b, -1, -1, -1), _additive(chosen, mode.dtype)), 3)
            return Group(spec.ratio, q, w, keys, visible, selected, blocks, pad_bias(bias.flatten(0, 1)))

    def _candidates(self, scores: Tensor, visible: Tensor) -> Tensor | None:
        """Entries [B, T, E] of the best blocks; None while every block is a candidate."""
        c, e = self.config, scores.shape[2]
        size = c.candidate_block_size
        count = -(-e // size)
        if count <= c.candidate_topk_blocks:
            return None
        best = F.pad(scores, (0, count * size - e), value=float("-inf")).unflatten(2, (count, size)).amax(3)
        newest = (visible.sum(1) - 1).div(size, rounding_mode="floor")  # [T]; -1 before the first entry
        at = torch.arange(count, device=scores.device) == newest.unsqueeze(1)
        keep = _top(best.masked_fill(at, float("inf")), c.candidate_topk_blocks)
        return keep.repeat_interleave(size, dim=2)[..., :e]

    def attend(self, q: Tensor, kv: Tensor, latents: Tensor | None, bias: Tensor, sink: Tensor, b: int) -> Tensor:
        """q [N, h, d], kv [N, d], latents [B, E, d] -> [N, h, d]: one softmax over window, entries and sink."""
        c, size = self.config, self.chunk
        t, d, h, w = q.shape[0] // b, c.head_dim, c.num_attention_heads, c.sliding_window
        n = -(-t // size)
        kv = F.pad(kv.view(b, t, d), (0, 0, 0, n * size - t)).view(b, n, size, d)
        tail = F.pad(kv[:, :-1, size - w :], (0, 0, 0, 0, 1, 0))  # the last keys of the chunk before
        parts = [tail, kv] if latents is None else [tail, kv, latents.unsqueeze(1).expand(b, n, -1, d)]
        q = F.pad(q.unflatten(0, (b, t)), (0, 0, 0, 0, 0, n * size - t)).reshape(b * n, size, h, d)
        if bias.shape[0] != b * n:
            bias = bias.repeat(b, 1, 1)
        o = attention_core(q, torch.cat(parts, 2).flatten(0, 1), bias, sink)
        return o.reshape(b, n * size, h, d)[:, :t].flatten(0, 1)

    @torch.no_grad()
    def attention_mass(
        self, q: Tensor, kv: Tensor, latents: Tensor, visible: Tensor, sink: Tensor, probe: Tensor, b: int
    ) -> Tensor:
        """Attention over all visible entries at the probe rows, none left out: float32 [B, P, E], heads' mean."""
        c, w = self.config, self.config.sliding_window
        q = q.unflatten(0, (b, -1))[:, probe].transpose(1, 2) * c.head_dim**-0.5  # [B, h, P, d]
        back = probe.unsqueeze(1) - torch.arange(w, device=probe.device)  # [P, w]
        near = kv.unflatten(0, (b, -1))[:, back.clamp_min(0)]  # [B, P, w, d]
        s_near = torch.einsum("bhpd,bpwd->bhpw", q, near).float().masked_fill(back < 0, float("-inf"))
        s_far = (q @ latents.transpose(1, 2).unsqueeze(1)).float().masked_fill(~visible[probe], float("-inf"))
        top = torch.maximum(s_near.amax(-1), s_far.amax(-1)).maximum(sink.view(1, -1, 1)).unsqueeze(-1)
        far = (s_far - top).exp()
        total = (
            far.sum(-1, keepdim=True)
            + (s_near - top).exp().sum(-1, keepdim=True)
            + (sink.view(1, -1, 1, 1) - top).exp()
        )
        return (far / total).mean(1)

    def index_loss(self, groups: dict[int, Group], probe: Tensor | None) -> tuple[Tensor, Tensor]:
        """KL from the attention over entries to the indexer's softmax, weighted by the entries' mass; recall of it.

        The candidate source also learns what the readers of its candidates attend to: what it leaves out they miss.
        """
        losses, recalls = [], []
        for g in groups.values() if probe is not None else ():
            own = torch.stack(g.wanted).mean(0)  # [B, P, E]
            mass = (own + torch.stack(g.readers).mean(0)) / 2 if g.readers else own
            total = mass.sum(-1)
            wanted = mass / total.unsqueeze(-1).clamp_min(1e-9)
            scores = index_scores(g.index_q[:, probe], g.index_w[:, probe], g.keys)
            guess = torch.log_softmax(scores.masked_fill(~g.visible[probe], -1e9), -1)
            kl = (wanted * (wanted.clamp_min(1e-9).log() - guess)).sum(-1)
            losses.append((kl * total).sum() / total.sum().clamp_min(1e-9))
            recalls.append((own * g.selected[:, probe]).sum() / own.sum().clamp_min(1e-9))
        if not losses:
            zero = torch.zeros((), device=self.device)
            return zero, zero
        return torch.stack(losses).mean(), torch.stack(recalls).detach()

    def logits(self, out: TwinOutputs) -> Tensor:
        return logits_of(self.config, self.params, out.streams, out.pre)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


# ---- parameters ----


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Model-form name -> shape of every float parameter: FP4 unpacked, no scales, no router biases, no vision."""
    skip = (".scale", "ffn.gate.bias", "ffn.gate.bias_vl")
    kept = {
        n: s
        for n, s in plan(config)[0].items()
        if (not n.endswith(skip) or ".hc_" in n or n.endswith("_scale"))
        and not n.startswith(("vision.", "aligner.", "image_"))
    }
    return {n: (*s.shape[:-1], 2 * s.shape[-1]) if s.dtype == "I8" else s.shape for n, s in kept.items()}


def initialise(config: ModelConfig, seed: int, device: str | torch.device = "cpu") -> tuple[Weights, Weights]:
    """(parameters, router biases) to start training from; drawn on the CPU, so every device starts alike."""
    g = torch.Generator().manual_seed(seed)
    params = {n: _first_value(config, n, s, g).to(device) for n, s in shapes(config).items()}
    specs = (*config.layers, *config.draft_layers)
    return params, {f"{s.name}.ffn.gate.bias": torch.zeros(s.n_experts, device=device) for s in specs}


def _first_value(c: ModelConfig, name: str, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=g)
    if name.endswith("_base"):  # read one stream more than the others, write all alike, keep them apart
        n, layer = c.hc_mult, int(name.split(".")[1])
        base = torch.zeros(shape)
        base[:n] = -1.5
        base[(2 * layer + ("_ffn_" in name)) % n] = 0.0
        base[2 * n :] = 4.0 * torch.eye(n).flatten()
        return base
    if name.endswith("_scale"):
        return torch.full(shape, 0.1)
    if name.endswith("_fn"):
        return noise * 0.02
    if name.endswith("attn_sink"):
        return torch.zeros(shape)
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return torch.ones(shape)
    if name == "embed.weight":
        return noise * 0.5
    gain = 1.0
    if name.endswith(("wo_b.weight", "w2.weight")):
        gain = 0.2  # sublayers start as small corrections
    elif name.endswith("engram.wkv.weight"):
        gain = torch.ones(shape[0], 1)
        gain[-c.hidden_size :] = 0.2
    elif name.endswith(("head.weight", "confidence_head.proj.weight")):
        gain = 0.3
    return noise * gain * (1.0 if name.endswith("embed.weight") else shape[-1] ** -0.5)
