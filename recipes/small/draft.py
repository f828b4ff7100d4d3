"""Train the DSpark draft on the frozen, fake-quantised target: its taps, its distributions, texts it wrote itself.

Belongs here: the draft's forward pass in training form, its loss (spec/dspark.md 3), sampling the target in parallel.
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
CE, TV, CONFIDENCE = 0.2, 0.8, 1.0
OWN_SHARE = 0.3  # of the steps on the target's own texts, of which a minute makes about half a million tokens
OWN_LENGTH, OWN_PROMPT = 128, 24  # a token of them costs a pass over the length
EOS = 1


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


@torch.no_grad()
def resample(
    model: Twin, ids: Tensor, prompt: int, temperature: float, generator: torch.Generator, deadline: float
) -> tuple[Tensor, Tensor]:
    """The target's own continuation of ids [B, T] after `prompt` tokens, and how many tokens of each row are settled.

    Jacobi iteration: with the noise of every position drawn beforehand, a sample is a fixed point of "predict all
    positions from the current text"; n rounds settle at least n tokens, on predictable text far more, without a cache.
    A settled token stays: on a GPU a round may differ from the one before by a rounding, and where that flips a token
    everything behind it would start again.
    """
    b, t = ids.shape
    noise: Tensor | float = 0.0
    if temperature > 0:
        u = torch.rand((b * t, model.config.vocab_size), generator=generator, device=ids.device)
        noise = -(-u.clamp_min(1e-20).log()).clamp_min(1e-20).log() * temperature
    place = torch.arange(t, device=ids.device)
    settled = torch.full((b,), prompt, device=ids.device)
    for i in range(t):
        choice = (model.logits(model.forward(ids, QUANTISED)) + noise).argmax(1).view(b, t)
        new = torch.cat((ids[:, :1], choice[:, :-1]), 1)
        fixed = place < settled.unsqueeze(1)
        agree = ((new == ids) | fixed).long().cumprod(1).sum(1)
        ids = torch.where(fixed, ids, new)
        settled = (agree + 1).clamp_max(t)  # the first token that differed was predicted from settled ones
        if i % 8 == 7 and (bool((settled == t).all()) or time.monotonic() > deadline):  # a sync, every eighth round
            break
    return ids, settled


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

    def step(self, ids: Tensor, settled: Tensor, factor: float) -> dict[str, Tensor]:
        """One update from ids int64 [B, T], of which `settled` [B] tokens a row count."""
        c, g, (b, t) = self.config, self.config.dspark_block_size, ids.shape
        with torch.no_grad():
            out = self.target.forward(ids, QUANTISED, want_taps=True)
            taps = torch.cat(out.taps, 1)
            cos, sin = self.target.rope_tables(b, t)[0]
            row, start = self._anchors(settled, b, t)
            at = (
                row.unsqueeze(1) * t + start.unsqueeze(1) + torch.arange(g, device=ids.device)
            )  # rows of the block's tokens
            wanted = twin.logits_of(c, self.target.params, out.streams[at.flatten()], out.pre[at.flatten()])
            previous = ids.flatten()[at]  # anchor and the tokens after it
            ended = (previous == EOS).long().cumsum(1) > 0
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

    def _anchors(self, settled: Tensor, b: int, t: int) -> tuple[Tensor, Tensor]:
        """(sequence, position) of the anchors of one step, inside what is settled."""
        per, g = max(1, t // ANCHOR_EVERY), self.config.dspark_block_size
        u = torch.rand((b, per), generator=self.generator, device=settled.device)
        room = (settled - g - 1).clamp_min(1).unsqueeze(1)
        start = 1 + (u * room).long()
        row = torch.arange(b, device=settled.device).unsqueeze(1).expand(-1, per)
        return row.flatten(), start.flatten().clamp_max(t - g)


def own_texts(trainer: DraftTrainer, corpus: Corpus, batch_tokens: int, seconds: float) -> list[tuple[Tensor, Tensor]]:
    """Texts by the target, prompted with the starts of documents: one batch at temperature 1, then two at 0."""
    pool: list[tuple[Tensor, Tensor]] = []
    first = corpus.batch(max(1, batch_tokens // OWN_LENGTH), OWN_LENGTH)[:, :-1]
    with torch.no_grad():  # compiles before the clock runs
        trainer.target.logits(trainer.target.forward(to_device(first, str(trainer.target.device)), QUANTISED))
    begin = time.monotonic()
    while not pool or time.monotonic() - begin < seconds:
        ids = corpus.batch(max(1, batch_tokens // OWN_LENGTH), OWN_LENGTH)[:, :-1]
        temperature = 0.0 if len(pool) % 3 else 1.0
        deadline = begin + seconds
        ids, settled = resample(
            trainer.target,
            to_device(ids, str(trainer.target.device)),
            OWN_PROMPT,
            temperature,
            trainer.generator,
            deadline,
        )
        pool.append((ids, settled))
        print(
            f"own texts: temperature {temperature:g}, {float(settled.float().mean()):.0f} of {OWN_LENGTH} settled",
            flush=True,
        )
    return pool


def run(
    trainer: DraftTrainer,
    corpus: Corpus,
    *,
    seed: int,
    steps: int,
    batch_tokens: int,
    seconds: float,
    sample_seconds: float,
    log: Path,
    every: int,
) -> int:
    """Sample, then train; the learning rate ends with the steps or with the seconds, whichever come first."""
    pool = own_texts(trainer, corpus, batch_tokens, sample_seconds)
    generator = torch.Generator().manual_seed(seed)
    meters: dict[str, list[Tensor]] = {}
    begin, step = time.monotonic(), 0
    while step < steps and time.monotonic() - begin < seconds:
        if float(torch.rand((), generator=generator)) < OWN_SHARE:
            ids, settled = pool[int(torch.randint(len(pool), (), generator=generator))]
        else:
            ids = to_device(corpus.batch(max(1, batch_tokens // 512), 512)[:, :-1], str(trainer.target.device))
            settled = torch.full((ids.shape[0],), ids.shape[1], device=ids.device)
        done = max(step / steps, (time.monotonic() - begin) / seconds)
        factor = min(1.0, (step + 1) / 100) * min(1.0, 0.03 + 1.4 * (1 - done))
        for name, value in trainer.step(ids, settled, factor).items():
            meters.setdefault(name, []).append(value)
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
    config = small(args.tokenizer)
    start, _ = files.load(args.resume, "target", device)
    plan = Plan(1, args.batch_tokens)
    whole = Trainer(config, args.tokenizer, plan, device=device, seed=args.seed, start=start)
    for p in whole.twin.params.values():
        p.requires_grad_(False)
    params, biases = twin.initialise(config, args.seed + 1, device)
    if (args.resume / "draft-0.safetensors").exists():
        earlier = files.load(args.resume, "draft", device)[0]
        params |= {n: v for n, v in earlier.items() if n in params}
        biases |= {n: v for n, v in earlier.items() if n in biases}
    trainer = DraftTrainer(whole.twin, params, biases, args.seed)
    if args.compile and device.startswith("cuda"):
        trainer.compile()
    corpus = Corpus(args.data / "train.bin" if args.data else None, config.vocab_size, args.seed + 1)
    args.work.mkdir(parents=True, exist_ok=True)
    steps = run(
        trainer,
        corpus,
        seed=args.seed,
        steps=args.steps,
        batch_tokens=args.batch_tokens,
        seconds=args.seconds,
        sample_seconds=args.sample_seconds,
        log=args.work / "draft.jsonl",
        every=args.every,
    )
    files.save(args.work, "draft", trainer.params | trainer.model.biases, {"steps": steps, "seed": args.seed})
    print(f"saved the draft after {steps} steps in {args.work}")
