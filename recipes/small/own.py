"""Texts that the target writes itself, through the engine: what the draft is trained on beside the corpus.

Belongs here: prompts like the held-out ones but of other seeds, their continuations, the file.
Does not belong here: the draft (draft.py), the loop over the engine's model (host.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch

from recipes.small.host import Host
from recipes.small.prepare import held_out_prompts

SLOTS, PREFILL = 256, 2048  # requests beside each other, rows of a prefill step
LIMIT = 128  # tokens of a continuation
COOL = 0.75  # of the texts are greedy; the rest is drawn at temperature 1, much as the corpus is


def continued(
    host: Host, prompts: Sequence[Sequence[int]], limit: int, temperature: float, generator: torch.Generator
) -> list[list[int]]:
    """Each prompt with what the target writes behind it, at most `limit` tokens, EOS included."""
    texts, n = [list(p) for p in prompts], len(prompts)
    state = host.state(n, max(map(len, texts)) + limit)
    active: list[int] = []
    rows: list[int] = []

    def step() -> None:
        logits, _ = host.forward(state, [(i + 1, at, texts[i][at:]) for i, at in zip(rows, starts, strict=True)], True)
        if temperature > 0:
            chosen = torch.multinomial(torch.softmax(logits / temperature, 1), 1, generator=generator)[:, 0]
        else:
            chosen = logits.argmax(1)
        for i, token in zip(rows, chosen.tolist(), strict=True):
            texts[i].append(token)
            if token != host.config.eos_token_id and len(texts[i]) - len(prompts[i]) < limit:
                active.append(i)

    todo = list(range(n))
    while todo:
        rows, size = [], 0
        while todo and (not rows or size + len(texts[todo[0]]) <= PREFILL):
            rows.append(todo.pop(0))
            size += len(texts[rows[-1]])
        starts = [0] * len(rows)
        step()
    while active:
        rows, active = active, []
        starts = [len(texts[i]) - 1 for i in rows]
        step()
    return texts


@torch.no_grad()
def stage(args: argparse.Namespace) -> None:
    """The command: --checkpoint (its draft may be untrained), --work gets own.bin, --steps prompts, --seed."""
    begin, host = time.monotonic(), Host(args.checkpoint)
    generator = torch.Generator().manual_seed(args.seed)
    prompts = [host.tokenizer.encode(r["prompt"]) for r in held_out_prompts(args.seed + 1, args.steps)]
    args.work.mkdir(parents=True, exist_ok=True)
    made = 0
    with (args.work / "own.bin").open("wb") as file:
        for at in range(0, len(prompts), SLOTS):
            part = prompts[at : at + SLOTS]
            temperature = 0.0 if at < COOL * len(prompts) else 1.0
            for prompt, text in zip(part, continued(host, part, LIMIT, temperature, generator), strict=True):
                made += len(text) - len(prompt)
                file.write(np.array(text, "<u2").tobytes())
            if at // SLOTS % 8 == 0:
                print(f"{time.monotonic() - begin:.0f} s: {at + len(part)} texts, {made:,} tokens", flush=True)
    print(f"{len(prompts)} texts, {made:,} tokens of the target's own after {time.monotonic() - begin:.0f} s")
