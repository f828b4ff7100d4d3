"""The model once more, as slowly and plainly as possible: a float64 numpy oracle for the tests.

Written from the specification's text (spec/model.md, spec/dspark.md 2) and sharing no code with `deepinfer`,
so that one misreading cannot hide in both. There is no cache: attention is a dense [rows, keys] product under
a boolean mask, and decoding is the whole prefill again. `quant=False` is the definition (numerics "exact": no
rounding of any activation or cache entry). `quant=True` adds the roundings of section 4, with float64 sums
and unrounded scores.

Belongs here: the maths. Number formats are in `oracle_numbers.py`, random configs and weights in
`random_model.py`, assertions in `model/test_oracle*.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from oracle_numbers import (
    E4M3_VALUES,
    Array,
    dequantise,
    fake_fp4_index,
    fake_fp4_latent,
    fake_fp8,
    round_bf16,
    unpack_e2m1,
)

# ---------------------------------------------------------------- small functions


def unrounded(x: Array) -> Array:
    return x


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softmax(x: Array, axis: int = -1) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def one_hot_first(rows: int, size: int) -> Array:
    pre = np.zeros((rows, size))
    pre[:, 0] = 1
    return pre


def best(scores: Array, count: int) -> tuple[Array, Array]:
    """(mask of each row's `count` largest finite scores, ties to the lowest index; gap to the next score)."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    mask, gap = np.zeros(scores.shape, bool), np.full(len(scores), np.inf)
    for row, ranked in enumerate(order):
        mask[row, ranked[:count]] = scores[row, ranked[:count]] > -np.inf
        if scores.shape[1] > count and scores[row, ranked[count]] > -np.inf:
            gap[row] = scores[row, ranked[count - 1]] - scores[row, ranked[count]]
    return mask, gap


def attend(q: Array, keys: Array, visible: Array, sink: Array) -> Array:
    """q [R, H, D], keys = values [K, D], visible [R, K], sink [H] -> [R, H, D] (section 6, step 5)."""
    out = np.zeros_like(q)
    for h in range(q.shape[1]):
        scores = q[:, h] @ keys.T * q.shape[-1] ** -0.5
        scores[~visible] = -np.inf
        top = np.maximum(scores.max(-1, keepdims=True), sink[h])
        p = np.exp(scores - top)
        out[:, h] = p @ keys / (p.sum(-1, keepdims=True) + np.exp(sink[h] - top))
    return out


def primes_from(start: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        if start > 1 and all(start % d for d in range(2, math.isqrt(start) + 1)):
            found.append(start)
        start += 1
    return found


# ---------------------------------------------------------------- the model


Routing = tuple[Array, Array, Array]


@dataclass
class Memory:
    """What later layers read of earlier ones, for one prompt of `length` positions whose rows run from `start` on."""

    length: int
    start: int = 0
    past: Memory | None = None  # gives the entries of positions below `hit`, whatever this run makes of them
    hit: int = 0
    latent: dict[int, Array] = field(default_factory=dict)  # kv source -> [entries, head_dim]
    index_key: dict[int, Array] = field(default_factory=dict)  # kv source -> [entries, index_head_dim]
    selected: dict[int, Array] = field(default_factory=dict)  # index source -> bool [rows, entries]
    gap: dict[int, Array] = field(default_factory=dict)  # index source -> [rows]; inf: nothing was left out
    candidates: Array | None = None  # bool [rows, blocks]
    candidate_gap: Array | None = None  # [rows]

    def entries(self, made: Array, past: dict[int, Array], layer: int, ratio: int) -> Array:
        """All entries of a kv source: below the hit those of the past, then those that this run made."""
        if self.past is None:
            return made
        return np.concatenate([past[layer][: self.hit // ratio], made[(self.hit - self.start) // ratio :]])


@dataclass
class Trace:
    """Everything seen in one run. Layers up to the last kv source hold all rows, later ones `positions`."""

    positions: Array  # [R] positions that have logits and taps
    logits: Array  # [R, vocab]
    taps: Array  # [R, n_taps * hidden]
    streams: list[Array]  # after each layer [rows, hc_mult, hidden]
    routed: list[Array]  # per layer [rows, top_k], ascending expert ids
    route_weights: list[Array]  # per layer [rows, top_k], in the order of `routed`
    route_gap: list[Array]  # per layer [rows]
    engram_rows: Array  # [rows that ran, engram layers, columns]
    memory: Memory


@dataclass
class Draft:
    tokens: Array  # [block]
    logits: Array  # [block, vocab], Markov term included
    confidence: Array  # [block], before the sigmoid


class Oracle:
    """config: the config.json dict; weights: as `read_checkpoint` gives them; token_map [vocab]: Engram."""

    def __init__(
        self,
        config: dict[str, Any],
        weights: dict[str, Array],
        token_map: Array | None = None,
        *,
        quant: bool = False,
    ):
        self.c = {**config["text_config"], "image_token_id": config.get("image_token_id")}
        self.vision = config.get("vision_config")
        self.raw, self.decoded = weights, {}
        self.token_map = token_map
        self.quant = quant
        self.bf16 = round_bf16 if quant else unrounded
        self.fp8 = fake_fp8 if quant else unrounded
        self.fp4_latent = fake_fp4_latent if quant else unrounded
        self.fp4_index = fake_fp4_index if quant else unrounded

    # ---- weights

    def w(self, name: str) -> Array:
        """A weight as float64; `name` is the checkpoint's name, `.weight` left out."""
        if name not in self.decoded:
            stored = self.raw.get(name + ".weight", self.raw.get(name))
            if name + ".scale" in self.raw:
                values = unpack_e2m1(stored) if ".experts." in name else E4M3_VALUES[stored]
                stored = dequantise(values, self.raw[name + ".scale"])
            self.decoded[name] = stored.astype(np.float64)
        return self.decoded[name]

    def linear8(self, x: Array, name: str) -> Array:
        """A linear with FP8 or FP4 weights: FP8 activations in, BF16 out."""
        return self.bf16(self.fp8(x) @ self.w(name).T)

    def linear16(self, x: Array, name: str) -> Array:
        """A BF16 linear (bias where the checkpoint has one)."""
        bias = self.w(name + ".bias") if name + ".bias" in self.raw else 0.0
        return self.bf16(x @ self.w(name).T + bias)

    def norm(self, x: Array, name: str, eps: float | None = None) -> Array:
        eps = self.c["rms_norm_eps"] if eps is None else eps
        return self.bf16(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.w(name))

    # ---- the layer map (section 1)

    def ratio(self, layer: int) -> int:
        return self.c["compress_ratios"][layer]

    def kv_source(self, layer: int) -> int:
        return max(s for s in self.c["kv_source_layer_ids"] if s <= layer)

    def index_source(self, layer: int) -> int:
        return max(s for s in self.c["index_source_layer_ids"] if s <= layer)

    @property
    def decoder_start(self) -> int:
        return max(self.c["kv_source_layer_ids"])

    # ---- RoPE (section 6)

    def frequencies(self, yarn: bool) -> Array:
        dim = self.c["qk_rope_head_dim"]
        base = self.c["compress_rope_theta"] if yarn else self.c["rope_theta"]
        f = np.array([base ** (-2 * i / dim) for i in range(dim // 2)])
        if yarn:
            s = self.c["rope_scaling"]
            length = s["original_max_position_embeddings"]

            def dim_of(rotations: float) -> float:
                return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

            low = max(math.floor(dim_of(s["beta_fast"])), 0)
            high = min(math.ceil(dim_of(s["beta_slow"])), dim - 1)
            ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
            f = f / s["factor"] * ramp + f * (1 - ramp)
        return f

    def rope(self, x: Array, positions: Array, yarn: bool, *, inverse: bool = False) -> Array:
        """Rotate the last qk_rope_head_dim of x [rows, ..., D]. Angles are FP32 products, as published."""
        dim = self.c["qk_rope_head_dim"]
        angle = positions.astype(np.float32)[:, None] * self.frequencies(yarn).astype(np.float32)
        angle = angle.astype(np.float64).reshape(len(x), *[1] * (x.ndim - 2), dim // 2)
        cos, sin = np.cos(angle), np.sin(-angle if inverse else angle)
        even, odd = x[..., -dim::2], x[..., -dim + 1 :: 2]
        out = x.copy()
        out[..., -dim::2], out[..., -dim + 1 :: 2] = even * cos - odd * sin, even * sin + odd * cos
        return self.bf16(out)

    # ---- attention (section 6)

    def query(self, name: str, x: Array, positions: Array, yarn: bool) -> tuple[Array, Array]:
        """(low-rank query [R, q_lora], rotated query [R, heads, head_dim])."""
        low = self.norm(self.linear8(x, f"{name}.wq_a"), f"{name}.q_norm")
        q = self.linear8(low, f"{name}.wq_b").reshape(len(x), -1, self.c["head_dim"])
        return low, self.rope(q, positions, yarn)

    def window_kv(self, name: str, x: Array, positions: Array, yarn: bool) -> Array:
        kv = self.norm(self.linear8(x, f"{name}.wkv"), f"{name}.kv_norm")
        return self.fp8(self.rope(kv, positions, yarn))

    def output(self, name: str, o: Array, positions: Array, yarn: bool) -> Array:
        o = self.rope(self.bf16(o), positions, yarn, inverse=True)
        groups = self.c["o_groups"]
        o = o.reshape(len(o), groups, -1)
        wo_a = self.w(f"{name}.wo_a").reshape(groups, self.c["o_lora_rank"], -1)
        z = np.concatenate([o[:, g] @ wo_a[g].T for g in range(groups)], axis=-1)
        return self.linear8(self.bf16(z), f"{name}.wo_b")

    def compress(self, layer: int, x: Array, memory: Memory) -> None:
        """Write the global KV and index keys of a kv source; x holds every position from memory.start (even)."""
        name, ratio = f"layers.{layer}.attn", self.ratio(layer)
        if ratio == 1:
            pooled = self.linear16(x, f"{name}.compressor.wkv")
        else:
            pairs = len(x) // 2  # a trailing open pair has no entry
            kv = (x @ self.w(f"{name}.compressor.wkv").T)[: 2 * pairs].reshape(pairs, 2, self.c["head_dim"])
            gate = (x @ self.w(f"{name}.compressor.wgate").T)[: 2 * pairs].reshape(pairs, 2, self.c["head_dim"])
            pooled = self.bf16((softmax(gate, axis=1) * kv).sum(1))
        latent = self.norm(pooled, f"{name}.compressor.norm")
        first = memory.start + np.arange(len(latent)) * ratio  # an entry sits at its group's first position
        key = self.norm(self.linear16(latent, f"{name}.indexer.wk"), f"{name}.indexer.k_norm")
        key, latent = self.fp4_index(self.rope(key, first, True)), self.fp4_latent(self.rope(latent, first, True))
        past = memory.past or memory
        memory.index_key[layer] = memory.entries(key, past.index_key, layer, ratio)
        memory.latent[layer] = memory.entries(latent, past.latent, layer, ratio)

    def select(self, layer: int, x: Array, low: Array, positions: Array, memory: Memory) -> None:
        """Choose each row's compressed entries (index sources only)."""
        c, name = self.c, f"layers.{layer}.attn.indexer"
        heads, dim, block = c["index_n_heads"], c["index_head_dim"], c["candidate_block_size"]
        keys = memory.index_key[self.kv_source(layer)]
        q = self.linear8(low, f"{name}.wq_b").reshape(len(x), heads, dim)
        q = self.fp4_index(self.rope(q, positions, True))
        head_weight = self.linear16(x, f"{name}.weights_proj") * (dim**-0.5 * heads**-0.5)
        score = np.zeros((len(x), len(keys)))
        for h in range(heads):
            score += head_weight[:, h, None] * np.maximum(q[:, h] @ keys.T, 0)
        count = (positions + 1) // self.ratio(layer)
        score[np.arange(len(keys)) >= count[:, None]] = -np.inf

        if layer == c["candidate_source_layer_id"]:
            blocks = -(-len(keys) // block)
            padded = np.full((len(x), blocks * block), -np.inf)
            padded[:, : len(keys)] = score
            block_score = padded.reshape(len(x), blocks, block).max(-1)
            some = count > 0
            block_score[some, (count[some] - 1) // block] = np.inf  # the newest block is always kept
            # The candidate source holds every position from the start.
            memory.candidates, memory.candidate_gap = best(block_score, c["candidate_topk_blocks"])
        elif layer > c["candidate_source_layer_id"]:
            allowed = memory.candidates[positions - memory.start].repeat(block, axis=1)[:, : len(keys)]
            score[~allowed] = -np.inf

        rows, row = memory.length - memory.start, positions - memory.start
        memory.selected[layer], memory.gap[layer] = np.zeros((rows, len(keys)), bool), np.full(rows, np.inf)
        memory.selected[layer][row], memory.gap[layer][row] = best(score, c["index_topk"])

    def attention(self, layer: int, x: Array, positions: Array, memory: Memory) -> Array:
        """x [R, hidden], normed; the rows given are all the window ever sees."""
        name, yarn = f"layers.{layer}.attn", self.ratio(layer) > 0
        low, q = self.query(name, x, positions, yarn)
        keys = self.window_kv(name, x, positions, yarn)
        age = positions[:, None] - positions[None, :]
        visible = (age >= 0) & (age < self.c["sliding_window"])
        if self.ratio(layer) > 0:
            if layer in self.c["kv_source_layer_ids"]:
                self.compress(layer, x, memory)
            if layer in self.c["index_source_layer_ids"]:
                self.select(layer, x, low, positions, memory)
            selected = memory.selected[self.index_source(layer)][positions - memory.start]
            used = selected.any(0)  # the rest of a long context weighs nothing
            keys = np.concatenate([keys, memory.latent[self.kv_source(layer)][used]])
            visible = np.concatenate([visible, selected[:, used]], axis=1)
        return self.output(name, attend(q, keys, visible, self.w(f"{name}.attn_sink")), positions, yarn)

    # ---- MoE (section 7)

    def route(self, name: str, x: Array, is_image: Array, top_k: int) -> Routing:
        """(ascending expert ids [R, top_k], their weights, gap between last chosen and first rejected)."""
        logits = x @ self.w(f"{name}.gate").T
        s = np.sqrt(np.logaddexp(0, logits))
        choice = s + self.w(f"{name}.gate.bias")
        if is_image.any():
            choice[is_image] = s[is_image] + self.w(f"{name}.gate.bias_vl")
        mask, gap = best(choice, top_k)
        ids = np.array([np.flatnonzero(row) for row in mask]).reshape(len(x), top_k)
        weights = np.take_along_axis(s, ids, 1)
        return ids, weights / (weights.sum(-1, keepdims=True) + 1e-20) * self.c["routed_scaling_factor"], gap

    def expert(self, name: str, x: Array, row_weight: Array | float) -> Array:
        limit = self.c["swiglu_limit"]
        gate = np.minimum(self.linear8(x, f"{name}.w1"), limit)
        up = np.clip(self.linear8(x, f"{name}.w3"), -limit, limit)
        return self.linear8(self.bf16(silu(gate) * up * row_weight), f"{name}.w2")

    def moe(self, name: str, x: Array, is_image: Array, top_k: int) -> tuple[Array, Routing]:
        ids, weights, gap = self.route(name, x, is_image, top_k)
        y = np.zeros_like(x)
        for e in np.unique(ids):
            rows, slot = np.nonzero(ids == e)
            y[rows] += self.expert(f"{name}.experts.{e}", x[rows], weights[rows, slot][:, None])
        y += self.expert(f"{name}.shared_experts", x, 1.0)
        return self.bf16(y), (ids, weights, gap)

    # ---- Engram (section 8)

    def engram_tables(self) -> tuple[list[list[int]], list[list[list[int]]]]:
        """(multipliers [layer][look-back], primes [layer][order - 2][head])."""
        c = self.c
        orders, heads = c["engram_max_ngram_size"] - 1, c["engram_n_heads"]
        bound = ((2**63 - 1) // c["engram_compressed_vocab_size"]) // 2
        multipliers, primes = [], []
        drawn = iter(primes_from(c["engram_vocab_size"], len(c["engram_layer_ids"]) * orders * heads))
        for layer in c["engram_layer_ids"]:
            draw = np.random.default_rng(10007 * layer).integers(0, bound, size=orders + 1, dtype=np.int64)
            multipliers.append([int(m) * 2 + 1 for m in draw])
            primes.append([[next(drawn) for _ in range(heads)] for _ in range(orders)])
        return multipliers, primes

    def engram_ids(self, ids: Array, is_image: Array, start: int = 0) -> Array:
        """Table rows [T - start, engram layers, columns], in plain Python integers."""
        multipliers, primes = self.engram_tables()
        columns = (self.c["engram_max_ngram_size"] - 1) * self.c["engram_n_heads"]
        out = np.zeros((len(ids) - start, len(multipliers), columns), np.int64)
        pad = int(self.token_map[self.c["engram_pad_token_id"]]) if len(multipliers) else 0
        for p in range(start, len(ids)):
            for i, m in enumerate(multipliers):
                values, blocked = [], False
                for back in range(len(m)):
                    blocked = blocked or p - back < 0 or bool(is_image[p - back])
                    values.append(pad if blocked else int(self.token_map[ids[p - back]]))
                running, offset, column = values[0] * m[0], 0, 0
                for back in range(1, len(m)):
                    running ^= values[back] * m[back]
                    for prime in primes[i][back - 1]:
                        out[p - start, i, column] = running % prime + offset
                        offset, column = offset + prime, column + 1
        return out

    def engram(self, layer: int, streams: Array, rows: Array, is_image: Array) -> Array:
        name, hidden, eps = f"layers.{layer}.engram", self.c["hidden_size"], self.c["rms_norm_eps"]
        embedded = self.bf16(self.w(f"{name}.embed")[rows]).reshape(len(rows), -1)
        kv = self.linear8(embedded, f"{name}.wkv").reshape(len(rows), -1, hidden)
        keys, value = kv[:, :-1], kv[:, -1:]
        r = 1 / np.sqrt((streams**2).mean(-1) + eps) / np.sqrt((keys**2).mean(-1) + eps)
        weight = self.w(f"{name}.q_weight") * self.w(f"{name}.k_weight")
        d = (streams * weight * keys).sum(-1) * r * hidden**-0.5
        g = sigmoid(np.sign(d) * np.sqrt(np.maximum(np.abs(d), 1e-6)))
        g[is_image] = 0
        return self.bf16(streams + g[..., None] * value)

    # ---- mHC (section 9)

    def mix(self, name: str, streams: Array) -> tuple[Array, Array, Array]:
        """(pre [R, n], post [R, n], comb [R, n, n]); name is e.g. `layers.0.hc_attn`."""
        n, eps = self.c["hc_mult"], self.c["hc_eps"]
        u = streams.reshape(len(streams), -1)
        m = u @ self.w(f"{name}_fn").T / np.sqrt((u * u).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        scale, base = self.w(f"{name}_scale"), self.w(f"{name}_base")
        pre = sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = softmax((m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)) + eps
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        for _ in range(self.c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdims=True) + eps)
            comb = comb / (comb.sum(1, keepdims=True) + eps)
        return pre, post, comb

    def collapse(self, streams: Array, pre: Array) -> Array:
        return self.bf16((pre[:, :, None] * streams).sum(1))

    def write(self, streams: Array, y: Array, post: Array, comb: Array) -> Array:
        """R'_i = post_i y + sum_j comb[j][i] R_j"""
        return self.bf16(post[:, :, None] * y[:, None, :] + np.einsum("rji,rjd->rid", comb, streams))

    def block(
        self,
        name: str,
        streams: Array,
        pre: Array,
        attention: Callable[[Array], Array],
        is_image: Array,
        top_k: int,
    ) -> tuple[Array, Array, Routing]:
        """One layer: (streams, next layer's `pre`, routing). Each half collapses with the `pre` before it."""
        a_pre, a_post, a_comb = self.mix(f"{name}.hc_attn", streams)
        y = attention(self.norm(self.collapse(streams, pre), f"{name}.attn_norm"))
        streams = self.write(streams, y, a_post, a_comb)
        f_pre, f_post, f_comb = self.mix(f"{name}.hc_ffn", streams)
        x = self.norm(self.collapse(streams, a_pre), f"{name}.ffn_norm")
        y, routing = self.moe(f"{name}.ffn", x, is_image, top_k)
        return self.write(streams, y, f_post, f_comb), f_pre, routing

    # ---- whole forward (section 5)

    def prefill(
        self,
        ids: Any,
        *,
        image_mask: Array | None = None,
        image_embeds: Array | None = None,
        floor: int = 0,
        start: int = 0,
        hit: int = 0,
        past: Memory | None = None,
    ) -> Trace:
        """Run ids at positions 0..T-1. image_mask [T] marks image spans (default: by id); image_embeds are
        their embeddings. floor > 0 is replay: layers after the last kv source see only positions >= floor.
        `past` is a prefix hit: only positions >= start run, no window reaches below it, and the global entries
        of positions below `hit` are those of `past`."""
        c, ids, floor = self.c, np.asarray(ids), max(floor, start)
        total, positions = len(ids), np.arange(start, len(ids))
        is_image = ids == c["image_token_id"] if image_mask is None else np.asarray(image_mask)
        memory, engram_rows = Memory(total, start, past, hit), self.engram_ids(ids, is_image, start)
        h = self.w("embed")[ids[start:]]
        if image_embeds is not None:
            h[is_image[start:]] = self.bf16(image_embeds)[is_image[:start].sum() :]
        streams = np.repeat(h[:, None, :], c["hc_mult"], axis=1)
        pre = one_hot_first(len(h), c["hc_mult"])
        taps, streams_after, routing = [np.zeros((total - floor, 0))], [], []

        for layer in range(c["num_hidden_layers"]):
            if layer in c["engram_layer_ids"]:
                rows = engram_rows[:, c["engram_layer_ids"].index(layer)]
                streams = self.engram(layer, streams, rows, is_image[start:])
            if layer in c["dspark_target_layer_ids"]:
                taps.append(self.bf16(streams.mean(1))[floor - total :])
            attention = partial(self.attention, layer, positions=positions, memory=memory)
            seen = is_image[positions]
            streams, pre, routed = self.block(
                f"layers.{layer}", streams, pre, attention, seen, c["num_experts_per_tok"]
            )
            streams_after.append(streams)
            routing.append(routed)
            if layer == self.decoder_start:
                positions, streams, pre = (a[floor - start :] for a in (positions, streams, pre))

        logits = self.norm(self.collapse(streams, pre), "norm") @ self.w("head").T
        routed, weights, gaps = (list(column) for column in zip(*routing, strict=True))
        context = np.concatenate(taps, axis=-1)
        return Trace(positions, logits, context, streams_after, routed, weights, gaps, engram_rows, memory)

    # ---- DSpark (section 11, dspark.md section 2)

    def draft_attention(self, name: str, x: Array, positions: Array, main: Array, main_positions: Array) -> Array:
        """Every block row sees all context rows (from the target's taps) and the whole block."""
        _, q = self.query(name, x, positions, False)
        context = self.window_kv(name, main, main_positions, False)
        keys = np.concatenate([context, self.window_kv(name, x, positions, False)])
        o = attend(q, keys, np.ones((len(x), len(keys)), bool), self.w(f"{name}.attn_sink"))
        return self.output(name, o, positions, False)

    def draft(self, trace: Trace, newest: int, anchor: int) -> Draft:
        """Greedy draft after position `newest` was processed and `anchor` chosen for position newest + 1."""
        c, block, stages = self.c, self.c["dspark_block_size"], self.c["num_nextn_predict_layers"]
        inside = (trace.positions <= newest) & (trace.positions > newest - c["sliding_window"])
        main = self.norm(self.linear8(trace.taps[inside], "mtp.0.main_proj"), "mtp.0.main_norm")
        ids = np.array([anchor] + [c["dspark_noise_token_id"]] * (block - 1))
        positions, text = newest + 1 + np.arange(block), np.zeros(block, bool)
        streams = np.repeat(self.w("embed")[ids][:, None, :], c["hc_mult"], axis=1)
        pre = one_hot_first(block, c["hc_mult"])
        for stage in range(stages):
            attention = partial(
                self.draft_attention,
                f"mtp.{stage}.attn",
                positions=positions,
                main=main,
                main_positions=trace.positions[inside],
            )
            top_k = c["dspark_num_experts_per_tok"]
            streams, pre, _ = self.block(f"mtp.{stage}", streams, pre, attention, text, top_k)

        last = f"mtp.{stages - 1}"
        x = self.collapse(streams, pre)
        base = self.norm(x, f"{last}.norm") @ self.w("head").T
        previous, tokens, logits, confidence = anchor, [], [], []
        for k in range(block):
            markov = self.w(f"{last}.markov_head.embed")[previous]
            logits.append(base[k] + self.w(f"{last}.markov_head.head") @ markov)
            confidence.append(self.w(f"{last}.confidence_head.proj")[0] @ np.concatenate([x[k], markov]))
            previous = int(logits[-1].argmax())
            tokens.append(previous)
        return Draft(np.array(tokens), np.array(logits), np.array(confidence))

    # ---- vision (section 10)

    def vision_tower(self, patches: Array, grid_h: int, grid_w: int) -> Array:
        """patches [grid_h * grid_w, 3, 14, 14] -> [patches, vision hidden]."""
        v = self.vision
        heads, width = v["num_attention_heads"], v["hidden_size"] // v["num_attention_heads"]
        count = len(patches)
        x = self.linear16(patches.reshape(count, -1).astype(np.float64), "vision.patch_embed.proj")
        inv = np.array([v["rope_theta"] ** (-2 * k / (width // 2)) for k in range(width // 4)])
        row, col = np.repeat(np.arange(grid_h), grid_w), np.tile(np.arange(grid_w), grid_h)
        angle = np.concatenate([row[:, None] * inv, col[:, None] * inv], axis=1)[:, None, :]

        def rotate(t: Array) -> Array:
            a, b = t[..., : width // 2], t[..., width // 2 :]
            cos, sin = np.cos(angle), np.sin(angle)
            return self.bf16(np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))

        for block in range(v["num_hidden_layers"]):
            name = f"vision.blocks.{block}"
            qkv = self.linear16(self.norm(x, f"{name}.norm1", 1e-6), f"{name}.attn.wqkv")
            q, k, value = qkv.reshape(count, 3, heads, width).transpose(1, 0, 2, 3)
            q, k = rotate(q), rotate(k)
            mixed = [softmax(q[:, h] @ k[:, h].T * width**-0.5) @ value[:, h] for h in range(heads)]
            x = self.bf16(x + self.linear16(self.bf16(np.concatenate(mixed, axis=-1)), f"{name}.attn.wo"))
            hidden = self.linear16(self.norm(x, f"{name}.norm2", 1e-6), f"{name}.mlp.w1")
            gate, up = np.split(hidden, 2, axis=-1)
            x = self.bf16(x + self.linear16(self.bf16(self.bf16(silu(gate)) * up), f"{name}.mlp.w2"))
        return self.norm(x, "vision.norm", 1e-6)

    def encode_image(self, patches: Array, grid_h: int, grid_w: int) -> tuple[Array, Array]:
        """(vision tower output, span embeddings: START, rows of IMAGE and NEWLINE, END)."""
        r, features = self.vision["downsample_ratio"], self.vision_tower(patches, grid_h, grid_w)
        rows, cols, width = -(-grid_h // r), -(-grid_w // r), features.shape[-1]
        grid = np.zeros((rows * r, cols * r, width))
        grid[:grid_h, :grid_w] = features.reshape(grid_h, grid_w, width)
        span = [self.w("image_start")]
        for i in range(rows):
            for j in range(cols):
                cell = grid[i * r : (i + 1) * r, j * r : (j + 1) * r]  # [r, r, width] -> channel-major
                hidden = self.linear16(cell.transpose(2, 0, 1).reshape(1, -1), "aligner.w1")
                gelu = np.array([[0.5 * t * (1 + math.erf(t / math.sqrt(2))) for t in hidden[0]]])
                span.append(self.linear16(self.bf16(gelu), "aligner.w2")[0])
            span.append(self.w("image_newline"))
        span.append(self.w("image_end"))
        return features, np.stack(span)
