"""The last steps of the target, on a CPU core: where a list ends when it is repeated.

Belongs here: registers of lists with questions, the loss on their answers, the loop. Does not belong here: the training
before (train.py).

One token in three hundred of the corpus says whether a list that is repeated goes on or ends, and 1,600 steps did not
teach it (NOTES.md). Here one sequence in two is of such registers, with lists of two to ten words, so that their
length says nothing; the rest is the corpus as it was, so that nothing else is forgotten.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.small import files
from recipes.small import tokenizer as tok
from recipes.small.config import small
from recipes.small.data import Corpus
from recipes.small.dialogues import chat
from recipes.small.train import BIAS_RATE, INDEX_WEIGHT, PROBES, Plan, Trainer
from recipes.small.twin import BF16, logits_of
from recipes.small.world import WORDS, any_name

ROWS, LENGTH = 5, 192  # registers of a step, tokens of one
CORPUS = ((2, 512), (1, 1024))  # the rest of a step: rows, tokens; the longer one every fifth step
WORDS_OF_A_LIST = (2, 11)
POINT = 5.0  # weight of a comma or a full stop of an answer: the only hard part
RATE, WARM_UP = 0.4, 10  # learning rates of those training began with; steps
ANSWER, END = "</think>", "<｜User｜>"


def register(rng: random.Random) -> str:
    """A conversation about one to four lists, all of them asked for."""
    names = list(dict.fromkeys(any_name(rng) for _ in range(rng.randrange(1, 5))))
    facts = []
    for name in names:
        words = ", ".join(rng.sample(WORDS, rng.randrange(*WORDS_OF_A_LIST)))
        facts.append((f"The list of {name}: {words}.", f"Repeat the list of {name}."))
    context = rng.choice((" ", "\n", "\n\n")).join(statement for statement, _ in facts)
    turns = [(question, "", statement) for statement, question in rng.sample(facts, len(facts))]
    turns[0] = (f"{context}\n\n{turns[0][0]}", "", turns[0][2])
    return chat(turns, thinking=False)


def registers(rng: random.Random, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """int64 ids [rows, length + 1] and float32 weights [rows, length] of the tokens to predict: the answers'."""
    backend = tok.load()
    answer, end = (backend.token_to_id(t) for t in (ANSWER, END))
    points = {backend.encode(f"tree{p}", add_special_tokens=False).ids[-1] for p in ",."}
    ids, weights = np.zeros((rows, length + 1), np.int64), np.zeros((rows, length + 1), np.float32)
    for i in range(rows):
        row: list[int] = []
        while len(row) <= length:
            row += [tok.BOS_ID, *backend.encode(register(rng), add_special_tokens=False).ids, tok.EOS_ID]
        inside = False
        for k, token in enumerate(row[: length + 1]):
            weights[i, k] = inside * (POINT if token in points else 1.0)
            inside = (inside or token == answer) and token not in (end, tok.BOS_ID)
        ids[i] = row[: length + 1]
    return torch.from_numpy(ids), torch.from_numpy(weights[:, 1:])


def stage(args: argparse.Namespace, device: str) -> None:
    """The command: the target of --resume, --steps more in bf16, into --work."""
    begin, config = time.monotonic(), small(args.tokenizer)
    start, state = files.load(args.resume, "target", device)
    trainer = Trainer(config, args.tokenizer, Plan(1, 1), device=device, seed=args.seed, start=start)
    corpus = Corpus(args.data / "train.bin", config.vocab_size, args.seed + 3)
    rng = random.Random("lists")
    args.work.mkdir(parents=True, exist_ok=True)
    for step in range(args.steps):
        ids, weight = registers(rng, ROWS, LENGTH)
        loss = token_losses(trainer, ids.to(device))
        weight = weight.flatten().to(device)
        asked = (loss * weight).sum() / weight.sum()
        asked.backward()  # type: ignore[no-untyped-call]
        plain = corpus.batch(*CORPUS[step % 5 == 0]).to(device)
        length = plain.shape[1] - 1
        probe = torch.randint(0, length, (length // PROBES,), generator=trainer.generator, device=device)
        out = trainer.twin.forward(plain[:, :-1], BF16, probe.sort().values)
        told = F.cross_entropy(logits_of(config, trainer.head, out.streams, out.pre), plain[:, 1:].flatten())
        (told + INDEX_WEIGHT * out.index_loss).backward()
        factor = RATE * min(1.0, (step + 1) / WARM_UP) * min(1.0, 1.6 * (1.02 - step / args.steps))
        trainer.optimiser.step(factor)
        even = out.loads.mean(1, keepdim=True)
        trainer.bias += BIAS_RATE * factor * torch.sign(even - out.loads)
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            row = {
                "step": step + 1,
                "answers": round(float(asked.detach()), 4),
                "corpus": round(float(told.detach()), 4),
            }
            row["seconds"] = round(time.monotonic() - begin)
            print(json.dumps(row), flush=True)
            with (args.work / "polish.jsonl").open("a") as f:
                f.write(json.dumps(row) + "\n")
            files.save(args.work, "target", trainer.state(), state | {"polish": step + 1})


def token_losses(trainer: Trainer, ids: Tensor) -> Tensor:
    """Cross entropy [B * T] of ids int64 [B, T + 1]."""
    out = trainer.twin.forward(ids[:, :-1], BF16)
    logits = logits_of(trainer.config, trainer.head, out.streams, out.pre)
    return F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
