"""Train the target: bf16 with dense attention first, then with selected entries, at last with every rounding.

Belongs here: the loop, its schedule, its log. Does not belong here: the model (twin.py), the draft (draft.py).

The schedule counts steps, so a run is a function of the seed and `--steps` (but for the order of GPU atomics).
`--seconds` is a fuse: at its end the state is saved and `--resume` goes on at the same step.
"""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.model.config import ModelConfig
from deepinfer.text.tokenizer import Tokenizer, engram_token_map
from recipes.small import files
from recipes.small.data import Corpus
from recipes.small.optim import Optimiser
from recipes.small.twin import BF16, QUANTISED, Mode, Twin, Weights, initialise, logits_of

# Shares of the steps. The rounding costs little without training and only comes at the small steps of the end: earlier
# the loss doubled (NOTES.md).
DENSE_UNTIL, QUANT_FROM, DECAY_FROM = 0.08, 0.96, 0.55
WARM_UP, RESUME_WARM_UP = 100, 40  # steps
LENGTHS = ((512, 0.66), (2048, 0.20), (4096, 0.11), (8192, 0.03))  # (tokens, share of the steps)
BIAS_RATE = 2e-3  # step of a router bias towards an even load (noaux_tc)
INDEX_WEIGHT = 0.2
PROBES = 16  # one row in so many trains the indexer


@dataclass
class Plan:
    steps: int
    batch_tokens: int
    lengths: tuple[tuple[int, float], ...] = LENGTHS
    lr_matrix: float = 0.02
    lr: float = 3e-3

    def mode(self, step: int) -> Mode:
        at = step / self.steps
        return (QUANTISED if at >= QUANT_FROM else BF16)._replace(dense=at < DENSE_UNTIL)

    def factor(self, step: int, since_resume: int, resumed: bool) -> float:
        """Learning rate: warm-up, constant, linear to a twentieth; after a resume a short warm-up again."""
        at = step / self.steps
        decay = 1.0 - 0.95 * max(0.0, (at - DECAY_FROM) / (1 - DECAY_FROM))
        warm = min(1.0, (step + 1) / WARM_UP)
        return decay * (min(warm, (since_resume + 1) / RESUME_WARM_UP) if resumed else warm)


def loss_of(c: ModelConfig, w: Weights, streams: Tensor, pre: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(c, w, streams, pre), targets)


class Trainer:
    """Parameters, optimiser and the step; `device` is where everything lives."""

    def __init__(
        self, config: ModelConfig, tokenizer: Path, plan: Plan, *, device: str, seed: int, start: Weights | None = None
    ) -> None:
        self.config, self.plan, self.device = config, plan, device
        params, biases = initialise(config, seed, device)
        if start is not None:
            params |= {n: v for n, v in start.items() if n in params}
            biases |= {n: v for n, v in start.items() if n in biases}
        params = {n: p.requires_grad_() for n, p in params.items() if not n.startswith("mtp.")}
        names = [f"{s.name}.ffn.gate.bias" for s in config.layers]
        self.bias = torch.stack([biases[n] for n in names])  # the dict holds its rows
        token_map = engram_token_map(Tokenizer(tokenizer), config.vocab_size)
        self.twin = Twin(config, params, dict(zip(names, self.bias, strict=True)), token_map)
        self.head = {n: params[n] for n in ("norm.weight", "head.weight")}
        self.optimiser = self.new_optimiser()
        self.loss = loss_of
        self.at = 0  # the next step
        self.generator = torch.Generator(device).manual_seed(seed)

    def new_optimiser(self) -> Optimiser:
        return Optimiser(self.twin.params, self.config.o_groups, self.plan.lr_matrix, self.plan.lr)

    def compile(self) -> None:
        torch._dynamo.config.recompile_limit = 64
        self.twin.compile()
        self.loss = torch.compile(loss_of)

    def eager(self) -> None:
        self.twin.compile(False)
        self.loss = loss_of

    def step(self, ids: Tensor, mode: Mode, factor: float) -> dict[str, Tensor]:
        """ids int64 [B, T + 1] on the device. Nothing is read back: the values returned are for the log."""
        values, loads = self.gradients(ids, mode)
        self.optimiser.step(factor)
        even = loads.mean(1, keepdim=True)
        self.bias += BIAS_RATE * factor * torch.sign(even - loads)
        return values | {
            "crowding": (loads.amax(1) / even.squeeze(1)).amax()
        }  # busiest expert over the mean, worst layer

    def gradients(self, ids: Tensor, mode: Mode) -> tuple[dict[str, Tensor], Tensor]:
        c, t = self.config, ids.shape[1] - 1
        probe = torch.randint(0, t, (max(1, t // PROBES),), generator=self.generator, device=self.device).sort().values
        out = self.twin.forward(ids[:, :-1], mode, probe)
        loss = self.loss(c, self.head, out.streams, out.pre, ids[:, 1:].flatten())
        (loss + INDEX_WEIGHT * out.index_loss).backward()
        return {"loss": loss.detach(), "index": out.index_loss.detach(), "recall": out.recall.mean()}, out.loads

    def state(self) -> Weights:
        return self.twin.params | self.twin.biases


def length_of(plan: Plan, step: int, seed: int) -> int:
    """The sequence length of a step, a pure function."""
    g = torch.Generator().manual_seed(seed * 1_000_003 + step)
    at = float(torch.rand((), generator=g)) * sum(share for _, share in plan.lengths)
    for length, share in plan.lengths:
        at -= share
        if at < 0:
            return length
    return plan.lengths[0][0]


def to_device(ids: Tensor, device: str) -> Tensor:
    return ids.to(device, non_blocking=True)


def run(
    trainer: Trainer, corpus: Corpus, *, seed: int, first: int, until: float, seconds: float, log: Path, every: int = 50
) -> int:
    """Train from step `first` until share `until` of the plan or the seconds end; returns the next step."""
    plan, begin = trainer.plan, time.monotonic()
    end = round(until * plan.steps)
    corpus.rng = np.random.default_rng([seed, first])
    meters: dict[str, list[Tensor]] = {}
    last, tokens, step, mode = begin, 0, first, plan.mode(first)
    while step < end and time.monotonic() - begin < seconds:
        length = length_of(plan, step, seed)
        ids = to_device(corpus.batch(max(1, plan.batch_tokens // length), length), trainer.device)
        if plan.mode(step).quant != mode.quant:
            ready(trainer, corpus, plan.mode(step))
        mode = plan.mode(step)
        values = trainer.step(ids, mode, plan.factor(step, step - first, first > 0))
        for name, value in values.items():
            meters.setdefault(name, []).append(value)
        meters.setdefault(f"loss{length}", []).append(values["loss"])
        tokens += ids.shape[0] * length
        step += 1
        trainer.at = step
        if step % every == 0 or step == end:
            row: dict[str, Any] = {"step": step, "quant": mode.quant, "dense": mode.dense}
            row |= {k: round(float(torch.stack(v).mean()), 4) for k, v in meters.items()}  # the one sync
            now = time.monotonic()
            row |= {"tok/s": round(tokens / (now - last)), "seconds": round(now - begin, 1)}
            print(json.dumps(row), flush=True)
            with log.open("a") as f:
                f.write(json.dumps(row) + "\n")
            meters, last, tokens = {}, now, 0
    return step


def save(folder: Path, trainer: Trainer, seed: int) -> None:
    state = {"step": trainer.at, "steps": trainer.plan.steps, "batch_tokens": trainer.plan.batch_tokens, "seed": seed}
    files.save(folder, "target", trainer.state(), state)


def ready(trainer: Trainer, corpus: Corpus, mode: Mode) -> None:
    """Compile for a mode; where that fails, train eagerly: slower, but the rented minutes are not lost."""
    begin = time.monotonic()
    ids = to_device(corpus.batch(max(1, trainer.plan.batch_tokens // 512), 512), trainer.device)
    try:
        trainer.gradients(ids, mode)
    except Exception:  # whatever the compiler raised
        traceback.print_exc()
        print("compilation failed: running eagerly", flush=True)
        trainer.eager()
        trainer.gradients(ids, mode)
    trainer.optimiser.drop()
    print(f"{'quant' if mode.quant else 'bf16'} ready after {time.monotonic() - begin:.1f} s", flush=True)


def measure(trainer: Trainer, corpus: Corpus, mode: Mode, repeat: int = 4) -> float:
    """Mean seconds of a step of the mixture of lengths; prints each length's."""
    total, shares = 0.0, sum(share for _, share in trainer.plan.lengths)
    cuda = trainer.device.startswith("cuda")
    for length, share in trainer.plan.lengths:
        ids = to_device(corpus.batch(max(1, trainer.plan.batch_tokens // length), length), trainer.device)
        for i in range(repeat + 1):
            if i == 1:  # after a warm-up
                _wait(cuda)
                begin = time.monotonic()
            trainer.step(ids, mode, 0.0)
        _wait(cuda)
        seconds = (time.monotonic() - begin) / repeat
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        print(f"{mode.quant=} {length}: {seconds * 1e3:.1f} ms a step, peak {peak:.1f} GiB", flush=True)
        total += seconds * share / shares
    print(f"mixture: {total * 1e3:.1f} ms a step, {trainer.plan.batch_tokens / total / 1e3:.0f}k tokens/s", flush=True)
    return total


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
