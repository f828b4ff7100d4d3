"""Train the DSpark draft on the frozen, fake-quantised target: its taps, its distributions, texts it wrote itself.

Belongs here: the draft's forward pass in training form, its loss (spec/dspark.md 3), which blocks it learns from.
Does not belong here: the target (twin.py), acceptance and calibration through the engine (evaluate.py).
Legend: A blocks, g block size, N rows of the target's pass, H hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.model.rotary import cos_sin
from recipes.small import files, twin
from recipes.small.config import small
from recipes.small.data import Corpus
from recipes.small.optim import Optimiser
from recipes.small.train import BIAS_RATE, Plan, Trainer, to_device
from recipes.small.twin import QUANTISED, Kind, Mode, Twin, Weights

PLAIN = Kind(0, False, False)
ANCHOR_EVERY = 4  # rows of a sequence per block that is drafted from it
POSITION_DECAY = 2.0  # weight of position k: exp(-k / 2), about what it adds to the length when 0.6 are accepted
CE, TV, CONFIDENCE = 0.3, 0.7, 1.0
OWN_SHARE = 0.4  # of the steps on the target's own texts
LENGTH, OWN_LENGTH = 512, 256  # tokens of a sequence; own texts have about 170, prompt included
BOS, EOS = 0, 1


def block_core(q: Tensor, context: Tensor, block: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
    """q [A, g, h, d], context [A, W, d] with valid [A, W], block [A, g, d] -> [A, g, h, d], both directions."""
    allowed = F.pad(valid, (0, block.shape[1]), value=True).unsqueeze(1).expand(-1, block.shape[1], -1)
    bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill_(~allowed, float("-inf"))
    return twin.attention_core(q, torch.cat((context, block), 1), twin.pad_bias(bias), sink)


class DraftTwin:
    """The draft stages of `target.config` with float parameters (`mtp.*`); embedding and head are the target's."""

    def __init__(self, target: Twin, params: Weights, biases: Weights) -> None:
        self.target, self.params, self.biases, self.config = target, params, biases, target.config
        self.specs = target.config.draft_layers
        self.own = Twin.parts(params, [s.name for s in self.specs])
        self.front, self.back, self.heads = twin.front, twin.back, heads

    def compile(self) -> None:
        self.front, self.back, self.heads = (torch.compile(f) for f in (twin.front, twin.back, heads))

    def context(self, taps: Tensor, cos: Tensor, sin: Tensor, mode: Mode) -> list[Tensor]:
        """taps [N, taps * H], angles of the rows' positions -> window keys [N, d] of every stage."""
        c, p = self.config, self.params
        first = self.specs[0].name
        main = F.linear(twin.act(taps, mode), twin.dense_weight(p[f"{first}.main_proj.weight"], mode))
        main = twin.act(twin.rms_norm(main, p[f"{first}.main_norm.weight"], c.rms_norm_eps), mode)
        keys = []
        for spec in self.specs:
            wkv = twin.dense_weight(p[f"{spec.name}.attn.wqkv_a.weight"], mode)[c.q_lora_rank :]
            kv = twin.rms_norm(F.linear(main, wkv), p[f"{spec.name}.attn.kv_norm.weight"], c.rms_norm_eps)
            keys.append(twin.act(twin.rope(kv, cos, sin), mode))
        return keys

    def forward(
        self, anchors: Tensor, start: Tensor, context: list[Tensor], valid: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        """anchors int64 [A] at positions start [A]; per stage context keys [A, W, d], valid [A, W].

        Returns streams' collapse x [A, g, H], base logits float32 [A, g, V], expert loads [stages, experts].
        """
        c, g = self.config, self.config.dspark_block_size
        ids = torch.full((anchors.shape[0], g), c.dspark_noise_token_id, device=anchors.device)
        ids[:, 0] = anchors
        positions = (start.unsqueeze(1) + torch.arange(g, device=start.device)).flatten()
        cos, sin = cos_sin(positions, self.target.inv_freq[0])
        streams = self.target.params["embed.weight"].to(mode.dtype)[ids.flatten()]
        streams = streams.unsqueeze(1).expand(-1, c.hc_mult, -1).contiguous()
        pre = torch.zeros((ids.numel(), c.hc_mult), device=ids.device)
        pre[:, 0] = 1.0
        streams.requires_grad_(torch.is_grad_enabled())  # as in later stages: one graph for all
        pre.requires_grad_(torch.is_grad_enabled())
        loads = []
        for spec, keys in zip(self.specs, context, strict=True):
            w, w_back, _ = self.own[spec.name]
            f = self.front(c, PLAIN, mode, w, streams, pre, cos, sin)
            q, kv = f.q.unflatten(0, (-1, g)), f.kv.unflatten(0, (-1, g))
            o = block_core(q, keys, kv, valid, w["attn.attn_sink"]).flatten(0, 1)
            bias = self.biases[f"{spec.name}.ffn.gate.bias"]
            streams, pre, load = self.back(
                c, mode, spec.top_k, w_back, bias, streams, o, (f.pre, f.post, f.comb), cos, sin
            )
            loads.append(load)
        x = twin.collapse(streams, pre)
        norm = self.params[f"{self.specs[-1].name}.norm.weight"]
        base = F.linear(twin.rms_norm(x, norm, c.rms_norm_eps), self.target.params["head.weight"].to(mode.dtype))
        return x.unflatten(0, (-1, g)), base.float().unflatten(0, (-1, g)), torch.stack(loads)

    @property
    def head_weights(self) -> Weights:
        last = self.specs[-1].name + "."
        names = ("markov_head.embed.weight", "markov_head.head.weight", "confidence_head.proj.weight")
        return {n: self.params[last + n] for n in names}


def heads(w: Weights, x: Tensor, base: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Markov logits [A, g, V] and raw confidences [A, g], given the token before each position [A, g]."""
    memory = w["markov_head.embed.weight"].to(x.dtype)[previous]
    logits = base + F.linear(memory, w["markov_head.head.weight"].to(x.dtype)).float()
    joint = torch.cat((x, memory), 2).float()
    return logits, F.linear(joint, w["confidence_head.proj.weight"].to(x.dtype).float()).squeeze(2)


def loss_of(logits: Tensor, confidence: Tensor, wanted: Tensor, real: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """logits, wanted (the target's) float32 [A, g, V], real bool [A, g] (positions before the text ends)."""
    log_q, log_p = torch.log_softmax(logits, 2), torch.log_softmax(wanted, 2)
    q, p = log_q.exp(), log_p.exp()
    cross = -(p * log_q).sum(2)
    variation = 0.5 * (p - q).abs().sum(2)
    accepted = (1 - variation).detach()
    sure = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    position = torch.arange(logits.shape[1], device=logits.device)
    weight = real * torch.exp(-position / POSITION_DECAY)
    total = weight.sum()
    loss = ((CE * cross + TV * variation + CONFIDENCE * sure) * weight).sum() / total
    same = (logits.argmax(2) == wanted.argmax(2)) & real
    rows = real.sum(0).clamp_min(1)
    return loss, {
        "loss": loss.detach(),
        "cross entropy": ((cross * weight).sum() / total).detach(),
        "accept": (accepted * real).sum(0) / rows,  # per position, rejection sampling at temperature 1
        "greedy": same.sum(0) / rows,  # per position, argmax equal, on teacher-forced tokens
        "length T1": 1 + (accepted * real).cumprod(1).sum(1).mean(),
        "length T0": 1 + same.float().cumprod(1).sum(1).mean(),
    }


class DraftTrainer:
    def __init__(self, target: Twin, params: Weights, biases: Weights, seed: int) -> None:
        self.target, self.config = target, target.config
        self.params = {n: p.requires_grad_() for n, p in params.items() if n.startswith("mtp.")}
        names = [f"{s.name}.ffn.gate.bias" for s in self.config.draft_layers]
        self.bias = torch.stack([biases[n] for n in names])
        self.model = DraftTwin(target, self.params, dict(zip(names, self.bias, strict=True)))
        self.optimiser = Optimiser(self.params, self.config.o_groups, 0.02, 3e-3)
        self.generator = torch.Generator(target.device).manual_seed(seed)
        self.loss = loss_of

    def compile(self) -> None:
        torch._dynamo.config.recompile_limit = 64
        self.target.compile()
        self.model.compile()
        self.loss = torch.compile(loss_of)

    def step(self, ids: Tensor, factor: float) -> dict[str, Tensor]:
        """One update from ids int64 [B, T], which start at the start of a document."""
        c, g, (b, t) = self.config, self.config.dspark_block_size, ids.shape
        with torch.no_grad():
            out = self.target.forward(ids, QUANTISED, want_taps=True)
            taps = torch.cat(out.taps, 1)
            cos, sin = self.target.rope_tables(b, t)[0]
            row, start = self.anchors(ids)
            at = (
                row.unsqueeze(1) * t + start.unsqueeze(1) + torch.arange(g, device=ids.device)
            )  # rows of the block's tokens
            wanted = twin.logits_of(c, self.target.params, out.streams[at.flatten()], out.pre[at.flatten()])
            previous = ids.flatten()[at]  # anchor and the tokens after it
            ended = ((previous == EOS) | (previous == BOS)).long().cumsum(1) > 0
        keys = self.model.context(taps, cos, sin, QUANTISED)
        near = start.unsqueeze(1) - torch.arange(c.sliding_window, 0, -1, device=ids.device)  # [A, W]
        rows = row.unsqueeze(1) * t + near.clamp_min(0)
        context = [k[rows] for k in keys]
        x, base, loads = self.model.forward(previous[:, 0], start, context, near >= 0, QUANTISED)
        logits, confidence = self.model.heads(self.model.head_weights, x, base, previous)
        loss, values = self.loss(logits, confidence, wanted.unflatten(0, (-1, g)), ~ended)
        loss.backward()
        self.optimiser.step(factor)
        self.bias += BIAS_RATE * factor * torch.sign(loads.mean(1, keepdim=True) - loads)
        return values

    def anchors(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(sequence, position) of the anchors of one step: any place whose block is inside the sequence."""
        (b, t), g = ids.shape, self.config.dspark_block_size
        u = torch.rand((b, max(1, t // ANCHOR_EVERY)), generator=self.generator, device=ids.device)
        row = torch.arange(b, device=ids.device).unsqueeze(1).expand_as(u)
        return row.flatten(), (1 + u * (t - g)).long().flatten().clamp_max(t - g)


def run(
    trainer: DraftTrainer,
    corpus: Corpus,
    own: Corpus | None,
    *,
    seed: int,
    steps: int,
    batch_tokens: int,
    seconds: float,
    rate: float,
    log: Path,
    every: int,
) -> int:
    """Train on the corpus and on the target's own texts; the learning rate ends with the steps or with the seconds,
    whichever come first."""
    generator = torch.Generator().manual_seed(seed)
    meters: dict[str, list[Tensor]] = {}
    begin, step = time.monotonic(), 0
    while step < steps and time.monotonic() - begin < seconds:
        source, length = corpus, LENGTH
        if own is not None and float(torch.rand((), generator=generator)) < OWN_SHARE:
            source, length = own, OWN_LENGTH
        ids = to_device(source.batch(max(1, batch_tokens // length), length)[:, :-1], str(trainer.target.device))
        done = max(step / steps, (time.monotonic() - begin) / seconds)
        factor = min(rate, (step + 1) / 100) * min(1.0, 0.03 + 1.4 * (1 - done))
        for name, value in trainer.step(ids, factor).items():
            meters.setdefault(name, []).append(value)
            if source is own and name in ("greedy", "length T0"):
                meters.setdefault(f"own {name}", []).append(value)
        step += 1
        if step % every == 0 or step == steps:
            means = {k: torch.stack(v).mean(0).cpu() for k, v in meters.items()}
            row: dict[str, Any] = {"step": step, "seconds": round(time.monotonic() - begin, 1)}
            row |= {k: [round(x, 3) for x in v.tolist()] if v.dim() else round(float(v), 4) for k, v in means.items()}
            print(json.dumps(row), flush=True)
            with log.open("a") as f:
                f.write(json.dumps(row) + "\n")
            meters = {}
    return step


def stage(args: argparse.Namespace, device: str) -> None:
    """The command: read the target (and an earlier draft to go on from, if any) from --resume, write into --work."""
    begin = time.monotonic()
    config = small(args.tokenizer)
    start, _ = files.load(args.resume, "target", device)
    plan = Plan(1, args.batch_tokens)
    whole = Trainer(config, args.tokenizer, plan, device=device, seed=args.seed, start=start)
    for p in whole.twin.params.values():
        p.requires_grad_(False)
    params, biases = twin.initialise(config, args.seed + 1, device)
    before = 0
    if (args.resume / "draft-0.safetensors").exists():
        earlier, state = files.load(args.resume, "draft", device)
        before = state["steps"]
        params |= {n: v for n, v in earlier.items() if n in params}
        biases |= {n: v for n, v in earlier.items() if n in biases}
    trainer = DraftTrainer(whole.twin, params, biases, args.seed)
    if args.compile and device.startswith("cuda"):
        trainer.compile()
    while args.data and args.wait and not (args.data / "meta.json").exists():  # written last by prepare.py
        time.sleep(0.5)
    corpus = Corpus(args.data / "train.bin" if args.data else None, config.vocab_size, args.seed + 1)
    own = Corpus(args.own / "own.bin", config.vocab_size, args.seed + 2) if args.own else None
    args.work.mkdir(parents=True, exist_ok=True)
    steps = run(
        trainer,
        corpus,
        own,
        seed=args.seed,
        steps=args.steps,
        batch_tokens=args.batch_tokens,
        rate=args.rate,
        seconds=args.seconds - (time.monotonic() - begin),
        log=args.work / "draft.jsonl",
        every=args.every,
    )
    files.save(args.work, "draft", trainer.params | trainer.model.biases, {"steps": before + steps, "seed": args.seed})
    print(f"saved the draft after {steps} steps in {args.work}")
