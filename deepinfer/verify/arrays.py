"""Recomputing every golden array of a checkpoint folder.

Belongs here: which run and which intermediate value an array name stands for. Does not belong here: tolerances
(rules.toml). Intermediate values are read off the op calls of a run (`Recorder`), so the model has no hooks. Names:
goldens README. Legend: T prompt rows, L layers. One request in slot 1; pages as the allocator of a lone request would
give them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepinfer.model import engram, hyper_connections
from deepinfer.model.attention import attention
from deepinfer.model.block import LayerKind
from deepinfer.model.checkpoint import load_checkpoint
from deepinfer.model.config import ModelConfig, engram_multipliers, engram_primes
from deepinfer.model.moe import moe
from deepinfer.model.state import ModelState, Numerics, StepInputs
from deepinfer.model.transformer import Transformer

Arrays = Mapping[str, Tensor]
KINDS: dict[Numerics, tuple[str, ...]] = {
    "exact": ("exact", "official_fp32"),
    "quantised": ("quant", "official", "official_fixed"),
}


class Recorder:
    """Wraps the op namespace of a model and keeps the results of named ops, in call order."""

    def __init__(self, ops: SimpleNamespace, names: tuple[str, ...]) -> None:
        self._ops, self._names = ops, names
        self.calls: dict[str, list[Any]] = {n: [] for n in names}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        fn = getattr(self._ops, name)
        if name not in self._names:
            return fn

        def call(*args: Any) -> Any:
            result = fn(*args)
            self.calls[name].append(result)
            return result

        return call


@dataclass
class Bench:
    """A loaded checkpoint with one model per numerics mode."""

    path: Path
    config: ModelConfig
    golden: Arrays
    token_map: Tensor
    models: dict[Numerics, Transformer]

    @classmethod
    def load(cls, path: Path, golden: Arrays, token_map: Tensor, device: str) -> Bench:
        config = ModelConfig.from_dir(path)
        tensors = load_checkpoint(path, config, device=device)
        numerics: tuple[Numerics, ...] = ("exact", "quantised")
        models = {n: Transformer(config, tensors, token_map, numerics=n) for n in numerics}
        return cls(path, config, golden, token_map, models)

    @property
    def device(self) -> torch.device:
        return self.models["exact"].device

    def state(self, numerics: Numerics, positions: int) -> ModelState:
        page = 128
        pages = -(-positions // page)
        state = ModelState.allocate(
            self.config,
            num_slots=2,
            num_pages=pages + 1,
            max_pages=pages,
            page_size=page,
            numerics=numerics,
            device=self.device,
        )
        state.page_table[1] = torch.arange(1, pages + 1)
        return state

    def step(
        self, ids: Tensor, start: int, *, keep_from: int = 0, span: tuple[int, int, Tensor] | None = None
    ) -> StepInputs:
        """Rows of slot 1 at start..; rows below `keep_from` are left out of the decoder half. span: (first row, rows,
        embeddings).
        """
        t, dev = ids.shape[0], self.device
        full = lambda v: torch.full((t,), v, dtype=torch.int32, device=dev)  # noqa: E731
        kept = torch.arange(max(0, keep_from - start), t, device=dev)
        image = torch.zeros(t, dtype=torch.bool, device=dev)
        rows = None
        if span is not None:
            rows = torch.arange(span[0], span[0] + span[1], device=dev)
            image[rows] = True
        return StepInputs(
            ids=ids.to(dev, torch.int32),
            positions=torch.arange(start, start + t, dtype=torch.int32, device=dev),
            slots=full(1),
            run_start=full(0),
            is_image=image,
            window_floor=full(keep_from),
            logit_rows=kept,
            kept=kept if keep_from else None,
            image_rows=rows,
            image_embeds=None if span is None else span[2],
        )


def arrays(bench: Bench) -> Iterator[tuple[str, Tensor]]:
    """(name, recomputed value) for every array of the checkpoint that is not an input."""
    config = bench.config
    yield "engram_multipliers", torch.from_numpy(engram_multipliers(config))
    yield "engram_primes", torch.from_numpy(engram_primes(config))
    yield "token_map", bench.token_map.cpu()
    for numerics in KINDS:
        for prompt in ("p1", "p2", "p3"):
            if f"{prompt}.ids" in bench.golden:
                yield from _prompt(bench, numerics, prompt)
        yield from _replay(bench, numerics)
    yield from _chunked(bench)
    yield from _sublayers(bench)
    if "p3.rgb" in bench.golden:
        yield "p3.patches", _patches(bench)


def _named(bench: Bench, numerics: Numerics, stem: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The value under every stored ending of its numerics mode."""
    endings = KINDS[numerics] + (("via_prefill_official_fixed",) if stem.endswith("decode.logits") else ())
    for kind in endings:
        if f"{stem}_{kind}" in bench.golden:
            yield f"{stem}_{kind}", value


def _prompt(bench: Bench, numerics: Numerics, p: str) -> Iterator[tuple[str, Tensor]]:
    """One prefill, then the stored decode steps with a draft after each of the first ones."""
    g, model = bench.golden, bench.models[numerics]
    ids = g[f"{p}.ids"]
    tokens = g.get(f"{p}.decode.tokens", torch.zeros(0, dtype=torch.int32))
    rows = g.get(f"{p}.rows", torch.arange(ids.shape[0])).long()
    state = bench.state(numerics, ids.shape[0] + tokens.shape[0])
    span = None
    if f"{p}.grid" in g and model.vision is not None:
        gh, gw, _, _, start, length = g[f"{p}.grid"].tolist()
        vit = model.vision.encode(g[f"{p}.patches"].to(bench.device), (gh, gw))
        embeds = model.encode_image(g[f"{p}.patches"], gh, gw)
        span = (start, length, embeds)
        yield from _named(bench, numerics, f"{p}.vit", vit.float())
        yield from _named(bench, numerics, f"{p}.span", embeds.float())
    out, calls = _recorded(model, bench.step(ids, 0, span=span), state)
    yield from _named(bench, numerics, f"{p}.logits", out.logits[rows])
    if numerics == "exact" and f"{p}.engram_official" in g:
        yield f"{p}.engram_official", torch.stack(calls["engram_rows"], 1).int()
    # recorded-input comparisons serve the *_official selections and routes of p1; see _sublayers
    kinds = [k for k in KINDS[numerics] if not (k == "official" and p == "p1")]
    yield from _choices(bench, p, rows, calls, kinds)
    if numerics == "exact" and "p1.cap_rows" in g and p == "p1":
        # a layer's last write is the first of the next one (or of the head), and the first of all writes nothing
        for layer in range(bench.config.num_hidden_layers):
            yield f"p1.res.{layer}_exact", calls["hc_write"][2 * layer + 2][g["p1.cap_rows"].long()]
    if out.taps is not None:
        _commit(model, out.taps, 0, state)
    if tokens.numel():
        yield from _decode(bench, numerics, p, state, ids.shape[0], tokens)


def _recorded(model: Transformer, step: StepInputs, state: ModelState) -> tuple[Any, dict[str, list[Any]]]:
    names = ("router", "index_topk", "index_topk_publish", "index_topk_blocks", "hc_write", "engram_rows")
    plain, recorder = model.ops, Recorder(model.ops, names)
    model.ops = recorder  # type: ignore[assignment]
    try:
        return model.forward(step, state), recorder.calls
    finally:
        model.ops = plain


def _choices(
    bench: Bench, p: str, rows: Tensor, calls: dict[str, list[Any]], kinds: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Selected entries, candidate blocks, routed experts and weights, per layer, under each ending."""
    c = bench.config
    single = iter(calls["index_topk"])
    readers = iter(calls["index_topk_blocks"])
    for spec in c.layers:
        if spec.owns_index:
            if spec.candidate == "source":
                selected, blocks = calls["index_topk_publish"][0]
                for kind in kinds:
                    yield f"{p}.cand.{spec.index}_{kind}", _block_mask(bench, p, spec.index, blocks[rows])
            else:
                selected = next(readers) if spec.candidate == "reader" else next(single)
            for kind in kinds:
                yield f"{p}.sel.{spec.index}_{kind}", selected[rows].to(torch.int16)
    for layer, (ids, weights) in enumerate(calls["router"]):
        for kind in kinds:
            yield f"{p}.route.{layer}_{kind}", ids[rows].to(torch.int16)
            yield f"{p}.rw.{layer}_{kind}", weights[rows]


def _block_mask(bench: Bench, p: str, layer: int, blocks: Tensor) -> Tensor:
    """Candidate block ids [M, b] as the goldens' bool mask [M, blocks of the prompt]."""
    stored = bench.golden.get(f"{p}.cand.{layer}_exact")
    width = stored.shape[1] if stored is not None else int(blocks.max()) + 1
    out = torch.zeros((blocks.shape[0], width + 1), dtype=torch.bool, device=blocks.device)
    out.scatter_(1, torch.where(blocks < 0, width, blocks).long(), True)
    return out[:, :width]


def _commit(model: Transformer, taps: Tensor, start: int, state: ModelState) -> None:
    """Give the draft its context rows start..start+n-1."""
    assert model.draft is not None
    n = taps.shape[0]
    pos = torch.arange(start, start + n, dtype=torch.int32, device=taps.device)
    model.draft.write_context(taps, torch.ones_like(pos), pos, torch.full_like(pos, start + n - 1), state)


def _decode(
    bench: Bench, numerics: Numerics, p: str, state: ModelState, start: int, tokens: Tensor, floor: int = 0
) -> Iterator[tuple[str, Tensor]]:
    g, model = bench.golden, bench.models[numerics]
    logits, drafts = [], []
    anchors = g.get(f"{p}.draft.tokens_" + ("exact" if numerics == "exact" else "official_fixed"))
    for k in range(tokens.shape[0]):
        out = model.forward(bench.step(tokens[k : k + 1], start + k, keep_from=floor), state)
        logits.append(out.logits[0])
        if model.draft is not None and out.taps is not None:
            _commit(model, out.taps, start + k, state)
            if anchors is not None and k < anchors.shape[0]:
                drafts.append(propose(model, anchors[k, 0], start + k + 1, floor, state))
    yield from _named(bench, numerics, f"{p}.decode.logits", torch.stack(logits))
    if drafts:
        yield from _draft(bench, numerics, f"{p}.draft", drafts)


def propose(
    model: Transformer, anchor: Tensor, start: int, floor: int, state: ModelState
) -> tuple[Tensor, Tensor, Tensor]:
    """One greedy draft of slot 1: (anchor and proposals [g+1], logits [g, V], confidence [g])."""
    assert model.draft is not None
    one = lambda v: torch.tensor([v], dtype=torch.int32, device=model.device)  # noqa: E731
    out = model.draft.propose(anchor.long().view(1).to(model.device), one(start), one(1), one(floor), state)
    tokens = torch.cat((anchor.long().view(1), out.tokens[0].cpu())).to(torch.int32)
    return tokens, out.logits[0], out.confidence[0]


def _draft(bench: Bench, numerics: Numerics, stem: str, drafts: list[Any]) -> Iterator[tuple[str, Tensor]]:
    tokens, logits, confidence = (torch.stack(t) for t in zip(*drafts, strict=True))
    yield from _named(bench, numerics, f"{stem}.tokens", tokens)
    yield from _named(bench, numerics, f"{stem}.logits", logits)
    yield from _named(bench, numerics, f"{stem}.conf", confidence)


def _replay(bench: Bench, numerics: Numerics) -> Iterator[tuple[str, Tensor]]:
    """Prefill with decoder replay (keep = window), 8 decode steps, one draft."""
    g, model = bench.golden, bench.models[numerics]
    if "p1.replay.rows" not in g:
        return
    ids, tokens = g["p1.ids"], g["p1.decode.tokens"]
    floor = ids.shape[0] - bench.config.sliding_window
    state = bench.state(numerics, ids.shape[0] + 8)
    out = model.forward(bench.step(ids, 0, keep_from=floor), state)
    yield from _named(bench, numerics, "p1.replay.logits", out.logits)
    if model.draft is not None and out.taps is not None:
        _commit(model, out.taps, floor, state)
    for name, value in _decode(bench, numerics, "p1", state, ids.shape[0], tokens[:8], floor):
        if name.startswith("p1.decode.logits_") and not name.endswith("fixed"):
            stem = name.replace("p1.decode.logits", "p1.replay.decode_logits")
            if stem in g:
                yield stem, value
    if model.draft is not None and tokens.shape[0] > 8:
        ids8, logits, _ = propose(model, tokens[8], ids.shape[0] + 8, floor, state)
        yield from _named(bench, numerics, "p1.replay.draft_tokens", ids8)
        yield from _named(bench, numerics, "p1.replay.draft_logits", logits)


def _chunked(bench: Bench) -> Iterator[tuple[str, Tensor]]:
    g = bench.golden
    if "p1.chunk_logits_quant" not in g:
        return
    ids, cuts = g["p1.ids"], g["p1.chunks"].tolist()
    state = bench.state("quantised", ids.shape[0])
    logits = [bench.models["quantised"].forward(bench.step(ids[a:b], a), state).logits for a, b in pairwise(cuts)]
    yield "p1.chunk_logits_quant", torch.cat(logits)[g["p1.rows"].long()]


def _sublayers(bench: Bench) -> Iterator[tuple[str, Tensor]]:
    """Quantised sublayers fed with recorded inputs: attention over all positions, all else on the recorded rows."""
    g, model, c = bench.golden, bench.models["quantised"], bench.config
    if "p1.t.attn_in.0_official" not in g:
        return
    dev = bench.device
    full = "p1.t.attn_out.0_official" in g  # tiny records all positions, lite only p1.rows
    prefix, rows = ("p1.t", torch.arange(g["p1.ids"].shape[0])) if full else ("p1.tr", g["p1.rows"].long())
    rec = lambda name: g[f"{prefix}.{name}_official"].to(dev)  # noqa: E731
    listed = g["p1.rows"].long()
    recorder = Recorder(model.ops, ("router", "index_topk", "index_topk_publish", "index_topk_blocks"))
    step, state = bench.step(g["p1.ids"], 0), bench.state("quantised", g["p1.ids"].shape[0])
    entries = blocks = None
    all_rows = model.prepare(step)
    hashes = []
    if model.engram is not None:
        hashes = engram.hash_rows(model.ops, c, model.engram, step.ids, all_rows, state.history)
    streams, pre = hyper_connections.expand(c, model.embed[step.ids.long()[rows]].to(model.dtype))
    text = torch.zeros(rows.shape[0], dtype=torch.bool, device=dev)
    for spec, w in model.layers:
        if spec.engram is not None and w.engram is not None:
            streams = engram.inject(model.ops, c, w.engram, streams, hashes[spec.engram][rows], text)
        yield f"{prefix}.X.{spec.index}_official", streams
        yield f"{prefix}.pm.{spec.index}_official", pre
        if f"{prefix}.X.{spec.index}_official" in g:
            streams = rec(f"X.{spec.index}")
        x = g[f"p1.t.attn_in.{spec.index}_official"].to(dev)
        kind, memory = LayerKind.of(spec, c), state.layer(spec)
        y, entries, blocks = attention(recorder, c, kind, w.attn, x, all_rows, None, memory, entries, blocks)  # type: ignore[arg-type]
        yield f"{prefix}.attn_out.{spec.index}_official", y[rows]
        a_pre, post, comb = hyper_connections.mix(model.ops, c, w.hc_attn, streams)
        streams = model.ops.hc_write(rec(f"attn_out.{spec.index}"), streams, post, comb)
        yield f"{prefix}.mid.{spec.index}_official", streams
        ffn_in = rec(f"ffn_in.{spec.index}")
        yield f"{prefix}.ffn_in.{spec.index}_official", hyper_connections.read(model.ops, c, streams, a_pre, w.ffn_norm)
        y = moe(recorder, c, spec.top_k, w.moe, ffn_in, text)  # type: ignore[arg-type]
        yield f"{prefix}.ffn_out.{spec.index}_official", y
        pre, post, comb = hyper_connections.mix(model.ops, c, w.hc_ffn, streams)
        streams = model.ops.hc_write(rec(f"ffn_out.{spec.index}"), streams, post, comb)
    yield f"{prefix}.X_final_official", streams
    yield f"{prefix}.pm_final_official", pre
    calls = recorder.calls
    routes, calls["router"] = calls["router"], []
    yield from ((n, v) for n, v in _choices(bench, "p1", listed, calls, ["official"]) if not n.startswith("p1.cand"))
    for layer, (ids, weights) in enumerate(routes):
        yield f"p1.route.{layer}_official", ids.to(torch.int16)
        yield f"p1.rw.{layer}_official", weights


def _patches(bench: Bench) -> Tensor:
    from PIL import Image

    from deepinfer.text.images import preprocess

    assert bench.config.vision is not None
    image = Image.fromarray(bench.golden["p3.rgb"].numpy())
    return preprocess(image, bench.config.vision).patches.to(torch.bfloat16)
