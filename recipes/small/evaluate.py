"""RESULTS.md of a trained checkpoint, measured through the engine wherever the engine is meant.

Belongs here: the measurements and their tables. Does not belong here: the loop over the engine's model (host.py).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.text.tokenizer import engram_token_map
from recipes.small import files
from recipes.small.data import Corpus
from recipes.small.host import Host, Run
from recipes.small.prepare import held_out_prompts
from recipes.small.twin import BF16, QUANTISED, Mode, Twin

BITS_TOKENS, BATCH_TOKENS = 16_000, 8_192
PROMPTS, OUTPUT = 200, 96  # requests and tokens of acceptance and margins
FIT_PROMPTS, FIT_SEED = 400, 1000  # requests that the calibration is fitted on
NEEDLE_CASES = 12  # per kind and length
MARGIN = 1e-3
TAUS = np.geomspace(0.1, 10, 41)
BINS = 15
SAMPLES = 4


# ---- bits per byte ----


def text_bytes(host: Host, ids: Sequence[int]) -> int:
    """UTF-8 bytes of the text of ids, control tokens left out."""
    special = host.tokenizer.special_ids
    return sum(len(host.tokenizer.token_bytes(int(i))) for i in ids if int(i) not in special)


def engine_loss(host: Host, documents: Sequence[np.ndarray]) -> float:
    """Bits of every id but the first of each document."""
    total = 0.0
    for doc in documents:
        ids = torch.from_numpy(doc.astype(np.int64))
        logits = host.prefill(host.state(1, len(ids)), 1, ids.tolist(), last_only=False)
        total += float(F.cross_entropy(logits[:-1], ids[1:], reduction="sum"))
    return total / math.log(2)


@torch.no_grad()
def twin_loss(model: Twin, documents: Sequence[np.ndarray], mode: Mode) -> float:
    """The same through the training twin."""
    total = 0.0
    order = sorted(documents, key=len)
    while order:
        t = len(order[-1]) + len(order[-1]) % 2
        rows = [order.pop() for _ in range(min(len(order), max(1, BATCH_TOKENS // t)))]
        ids = torch.full((len(rows), t + 1), -1)
        for i, doc in enumerate(rows):
            ids[i, : len(doc)] = torch.from_numpy(doc.astype(np.int64))
        ids = ids.to(model.device)
        out = model.forward(ids[:, :-1].clamp_min(0), mode)
        logits, targets = model.logits(out), ids[:, 1:].flatten()
        total += float(F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum"))
    return total / math.log(2)


@torch.no_grad()
def expert_load(model: Twin, corpus: Corpus, rows: int) -> Tensor:
    """Rows per expert over the even share [layers, experts], on sequences without padding."""
    loads = model.forward(corpus.batch(rows, 512)[:, :-1].to(model.device), QUANTISED).loads.cpu()
    return loads / loads.mean(1, keepdim=True)


# ---- draft ----


def acceptance(runs: Sequence[Run], g: int) -> dict[str, Any]:
    counts = np.array([b.accepted for r in runs for b in r.blocks])
    per = [float((counts > k).sum() / max(1, (counts >= k).sum())) for k in range(g)]
    return {"blocks": len(counts), "length": 1 + float(counts.mean()), "per position": per}


def _ece(predicted: np.ndarray, happened: np.ndarray) -> float:
    at = np.minimum((predicted * BINS).astype(int), BINS - 1)
    gaps = [abs(predicted[at == i].sum() - happened[at == i].sum()) for i in range(BINS)]
    return float(sum(gaps) / len(predicted))


def calibrate(fitted: Sequence[Run], judged: Sequence[Run]) -> list[tuple[float, float, float]]:
    """Sequential temperature scaling: (tau, error before, error after) per position, of P(at least i accepted).

    Fitted on some requests and judged on others (spec/dspark.md 6).
    """
    (fit_raw, fit_accepted), (raw, accepted) = (
        (torch.stack([b.raw for b in blocks]).double().numpy(), np.array([b.accepted for b in blocks]))
        for blocks in ([b for r in runs for b in r.blocks] for runs in (fitted, judged))
    )
    fit_survival, survival, plain = np.ones(len(fit_raw)), np.ones(len(raw)), np.ones(len(raw))
    rows = []
    for i in range(raw.shape[1]):
        candidates = [(_ece(fit_survival * _sigmoid(fit_raw[:, i] / t), fit_accepted > i), t) for t in TAUS]
        tau = float(min(candidates)[1])
        fit_survival = fit_survival * _sigmoid(fit_raw[:, i] / tau)
        survival, plain = survival * _sigmoid(raw[:, i] / tau), plain * _sigmoid(raw[:, i])
        rows.append((tau, _ece(plain, accepted > i), _ece(survival, accepted > i)))
    return rows


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


# ---- long prompts ----


def needles(host: Host, cases: Sequence[dict[str, Any]]) -> dict[tuple[str, int], tuple[int, int]]:
    """(kind, length class) -> (right, cases)."""
    result: dict[tuple[str, int], tuple[int, int]] = {}
    for case in cases:
        wanted = host.tokenizer.encode_ordinary(case["answer"])
        ids = host.greedy(host.tokenizer.encode(case["prompt"]), len(wanted) + 6)
        good = host.tokenizer.decode(ids).strip().startswith(case["answer"].strip())
        key = case["kind"], int(case["id"].split("-")[-2])
        right, count = result.get(key, (0, 0))
        result[key] = right + good, count + 1
    return result


@torch.no_grad()
def index_recall(model: Twin, corpus: Corpus, lengths: Sequence[int]) -> dict[int, list[tuple[float, float]]]:
    """Length -> per index source (share of the entries' attention mass selected, overlap with attention's top-k)."""
    result = {}
    for length in lengths:
        ids = corpus.batch(max(1, 8192 // length), length)[:, :-1].to(model.device)
        probe = torch.arange(length // 2, length, max(1, length // 64), device=model.device)
        groups = model.forward(ids, QUANTISED, probe).groups
        rows = []
        for group in groups:
            mass = torch.stack(group.wanted).mean(0)
            chosen = group.selected[:, probe]
            k = min(model.config.index_topk, mass.shape[2])
            best = torch.zeros_like(chosen).scatter(2, mass.topk(k, dim=2).indices, True)
            share = float((mass * chosen).sum() / mass.sum())
            rows.append((share, float((best & chosen).sum() / best.sum())))
        result[length] = rows
    return result


# ---- the report ----


def samples(host: Host, prompts: Sequence[str], temperature: float) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    encoded = [host.tokenizer.encode(p) for p in prompts]
    runs = host.speculate(encoded, 120, temperature, generator)
    return [host.tokenizer.decode(r.output) for r in runs]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(x) for x in line) + " |" for line in lines) + "\n"


def _percent(x: float) -> str:
    return f"{100 * x:.1f}%"


def stage(args: argparse.Namespace, device: str) -> None:
    """The command. --resume: training's folder (for the twin), --checkpoint: the shipped folder, --data: the corpus."""
    begin = time.monotonic()
    torch.manual_seed(args.seed)
    host = Host(args.checkpoint)
    params, state = files.load(args.resume, "target", device)
    biases = {n: v for n, v in params.items() if n.endswith("gate.bias")}
    token_map = engram_token_map(host.tokenizer, host.config.vocab_size)
    model = Twin(host.config, {n: v for n, v in params.items() if n not in biases}, biases, token_map)
    few = args.limit
    corpus = Corpus(args.data / "heldout.bin", host.config.vocab_size, args.seed)
    rows = [json.loads(line) for line in (args.data / "prompts.jsonl").read_text("utf-8").splitlines()]
    prompts = [r["prompt"] for r in rows[: few or PROMPTS]]
    size = sum(f.stat().st_size for f in args.checkpoint.iterdir())
    report: list[str] = ["# small: results\n", _origin(size, state, args.made)]

    def add(title: str, write: Callable[[], str]) -> None:
        report.append(f"## {title}\n\n{write()}")
        args.work.mkdir(parents=True, exist_ok=True)
        (args.work / "RESULTS.md").write_text("\n".join(report), "utf-8")
        print(f"{time.monotonic() - begin:6.0f} s: {title}", flush=True)

    documents = corpus.documents(few * 500 if few else BITS_TOKENS)
    add("Bits per byte, held-out", lambda: _bits(host, model, documents))
    add("Expert load", lambda: _load(expert_load(model, corpus, 4 if few else 64)))
    add("Index selection", lambda: _recall(model, corpus, [512] if few else [512, 2048, 4096]))
    add("Draft", lambda: _draft(host, prompts, few))
    add("Long prompts", lambda: _needles(host, args.data, few))
    add("Samples", lambda: _samples(host, prompts))
    print(args.work / "RESULTS.md")


def _origin(size: int, state: dict[str, Any], made: str) -> str:
    seen = state["step"] * state["batch_tokens"] / 1e6
    return (
        f"Written by `python -m recipes.small.run evaluate`. Checkpoint: {size:,} bytes with its tokenizer; "
        f"the target saw {seen:.0f}M tokens in {state['step']:,} steps (seed {state['seed']}). "
        f"Vision keeps its synthetic weights.{' ' * bool(made)}{made}\n"
    )


def _bits(host: Host, model: Twin, documents: Sequence[np.ndarray]) -> str:
    count = sum(text_bytes(host, d) for d in documents)
    bf16, fake = (twin_loss(model, documents, mode) for mode in (BF16, QUANTISED))
    shipped = engine_loss(host, documents)
    rows = [
        [name, f"{bits / count:.4f}", f"{100 * (bits / bf16 - 1):+.2f}%"]
        for name, bits in (("bf16 twin", bf16), ("fake-quantised twin", fake), ("shipped, through the engine", shipped))
    ]
    total = sum(map(len, documents))
    text = f"{total:,} tokens, {count:,} bytes of {len(documents)} documents, each from its own start.\n\n"
    return text + _table(["weights", "bits per byte", "against bf16"], rows)


def _load(share: Tensor) -> str:
    rows = [[i, f"{float(s.min()):.2f}", f"{float(s.max()):.2f}"] for i, s in enumerate(share)]
    return "Rows of an expert over the even share.\n\n" + _table(["layer", "least", "most"], rows)


def _recall(model: Twin, corpus: Corpus, lengths: Sequence[int]) -> str:
    found = index_recall(model, corpus, lengths)
    sources = model.config.index_source_layer_ids
    rows = [
        [length, *(f"{_percent(share)} / {_percent(overlap)}" for share, overlap in values)]
        for length, values in found.items()
    ]
    text = (
        "Share of full attention's mass on entries that the top-k holds / overlap with full attention's own top-k.\n\n"
    )
    return text + _table(["tokens", *(f"source {s}" for s in sources)], rows)


def _draft(host: Host, prompts: Sequence[str], few: int) -> str:
    g, encoded = host.config.dspark_block_size, [host.tokenizer.encode(p) for p in prompts]
    others = [host.tokenizer.encode(r["prompt"]) for r in held_out_prompts(FIT_SEED, few or FIT_PROMPTS)]
    text, tokens = f"Calibration is fitted on {len(others)} other prompts.\n\n", 16 if few else OUTPUT
    for temperature in (0.0, 1.0):
        generator = torch.Generator().manual_seed(int(temperature))
        runs = host.speculate(encoded, tokens, temperature, generator)
        fitted = host.speculate(others, tokens, temperature, generator)
        a = acceptance(runs, g)
        per = ", ".join(f"{x:.3f}" for x in a["per position"])
        text += f"Temperature {temperature:g}: acceptance length {a['length']:.2f} over {a['blocks']} blocks of "
        text += f"{len(runs)} prompts; accepted at position 1 to {g}, given those before: {per}.\n\n"
        rows = [[i + 1, f"{t:.2f}", _percent(b), _percent(e)] for i, (t, b, e) in enumerate(calibrate(fitted, runs))]
        text += _table(["position", "tau", "calibration error before", "after"], rows) + "\n"
        if temperature == 0:
            gaps = [x for r in runs for x in r.gaps]
            close = sum(x < MARGIN for x in gaps)
            share = f"{close} of {len(gaps)} steps ({100 * close / len(gaps):.3f}%)"
            text += f"Greedy margins: {share} have a top-2 gap below {MARGIN}.\n\n"
    return text


def _needles(host: Host, data: Path, few: int) -> str:
    cases = [json.loads(line) for line in (data / "needle.jsonl").read_text("utf-8").splitlines()]
    kept = [c for c in cases if int(c["id"].split("-")[-1]) < (1 if few else NEEDLE_CASES)]
    found = needles(host, kept[:few] if few else kept)
    right, count = (sum(v[i] for v in found.values()) for i in (0, 1))
    rows = [[kind, length, f"{r} of {n}"] for (kind, length), (r, n) in found.items()]
    return f"Right: {right} of {count} ({_percent(right / count)}).\n\n" + _table(["kind", "tokens", "right"], rows)


def _samples(host: Host, prompts: Sequence[str]) -> str:
    text = ""
    for temperature in (0.0, 0.8):
        shown = prompts[:SAMPLES]
        for prompt, out in zip(shown, samples(host, shown, temperature), strict=True):
            text += f"Temperature {temperature:g}\n\n> {prompt[-300:].strip()} **{out.strip()}**\n\n".replace(
                "\n>", "\n\n>"
            )
    return text
