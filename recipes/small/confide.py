"""The draft's confidence head again, on what the engine accepted: training knows teacher-forced blocks only.

Belongs here: the head's inputs and outcomes of real blocks, the fit.
Does not belong here: the draft (draft.py), the temperatures that evaluate.py fits per position.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.small import files
from recipes.small.host import Host
from recipes.small.prepare import held_out_prompts

PROMPTS, OUTPUT = 200, 96  # requests of a seed, tokens
TEMPERATURES = (0.0, 0.0, 1.0, 0.0, 0.0, 1.0)  # one a seed
RIDGE = 1e-3  # pull towards the trained head, in units of its inputs' spread
ROUNDS = 100


class _Watched:
    """The engine's operations, keeping the confidence head's inputs beside its outputs."""

    def __init__(self, ops: Any, weight: Tensor, block: int) -> None:
        self.ops, self.weight, self.block = ops, weight, block
        self.seen: dict[bytes, Tensor] = {}  # a block's inputs, by its outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def linear(self, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        out: Tensor = self.ops.linear(x, weight, *rest)
        if weight is self.weight:
            for inputs, raw in zip(x.split(self.block), out.view(-1, self.block), strict=True):
                self.seen[raw.numpy().tobytes()] = inputs.clone()
        return out


def gather(host: Host, seed: int, temperature: float, prompts: int = PROMPTS) -> tuple[Tensor, Tensor]:
    """Inputs [n, width] of every position that was reached, and whether its token was accepted [n]."""
    draft = host.model.draft
    assert draft is not None
    plain: Any = draft.ops
    watched: Any = _Watched(plain, draft.confidence, host.config.dspark_block_size)
    draft.ops = watched
    encoded = [host.tokenizer.encode(r["prompt"]) for r in held_out_prompts(seed, prompts)]
    try:
        runs = host.speculate(encoded, OUTPUT, temperature, torch.Generator().manual_seed(seed))
    finally:
        draft.ops = plain
    inputs, accepted = [], []
    for block in (b for r in runs for b in r.blocks):
        reached = min(block.accepted + 1, watched.block)
        inputs.append(watched.seen[block.raw.numpy().tobytes()][:reached])
        accepted.append(torch.arange(reached) < block.accepted)
    return torch.cat(inputs).float(), torch.cat(accepted).float()


def fit(weight: Tensor, inputs: Tensor, accepted: Tensor) -> Tensor:
    """Logistic regression from `weight` [width] on."""
    spread, start = inputs.std(0).clamp_min(1e-6), weight.clone()
    move = torch.zeros_like(weight, requires_grad=True)
    search = torch.optim.LBFGS([move], max_iter=ROUNDS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        raw = inputs @ (start + move / spread)
        value = F.binary_cross_entropy_with_logits(raw, accepted) + RIDGE * move.square().sum()
        value.backward()
        return value

    before = loss().item()
    search.step(loss)
    print(f"{len(inputs)} positions: cross entropy {before:.4f} before, {loss().item():.4f} after", flush=True)
    return (start + move / spread).detach()


def stage(args: argparse.Namespace) -> None:
    """The command: the draft of --resume with the head fitted on blocks of --checkpoint, into --work."""
    params, state = files.load(args.resume, "draft")
    host = Host(args.checkpoint)
    parts = [gather(host, args.seed + 2 + i, t) for i, t in enumerate(TEMPERATURES)]
    (name,) = (n for n in params if n.endswith("confidence_head.proj.weight"))
    inputs, accepted = (torch.cat(column) for column in zip(*parts, strict=True))
    params[name] = fit(params[name][0], inputs, accepted)[None]
    files.save(args.work, "draft", params, state | {"confidence": len(inputs)})
