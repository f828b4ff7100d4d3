"""One command per stage: `python -m recipes.small.run STAGE --data DIR --work DIR`.

Belongs here: arguments and the order of stages. Does not belong here: what a stage does.

    python -m recipes.small.prepare --out DATA     the corpus (its own command)
    run bench     seconds per step of every length and mode, on random ids
    run train     the target, resumable
    run draft     the draft, on the target's own samples
    run quantise  the checkpoint folder
    run evaluate  RESULTS.md, through the engine
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from recipes.small import files
from recipes.small.config import small
from recipes.small.data import Corpus
from recipes.small.train import LENGTHS, Plan
from recipes.small.twin import BF16, QUANTISED

HERE = Path(__file__).parent


def _device(asked: str) -> str:
    device = asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # the float32 products are sums of bf16 values or mHC mixes
    return device


def bench(args: argparse.Namespace) -> None:
    from recipes.small import train

    device = _device(args.device)
    trainer = train.Trainer(small(args.tokenizer), args.tokenizer, _plan(args, 1000), device=device, seed=args.seed)
    _compile(trainer, args, device)
    corpus = Corpus(None, trainer.config.vocab_size, args.seed)
    for mode in (BF16, QUANTISED):
        train.ready(trainer, corpus, mode)
        train.measure(trainer, corpus, mode)


def _plan(args: argparse.Namespace, steps: int) -> Plan:
    return Plan(steps, args.batch_tokens, tuple((n, s) for n, s in LENGTHS if n <= args.max_length))


def _compile(trainer: Any, args: argparse.Namespace, device: str) -> None:
    if args.compile and device.startswith("cuda"):
        trainer.compile()


def train_stage(args: argparse.Namespace) -> None:
    from recipes.small import train

    begin, device = time.monotonic(), _device(args.device)
    start, step, steps = None, 0, args.steps
    if args.resume is not None:
        start, state = files.load(args.resume, "target", device)
        step, steps, args.batch_tokens = state["step"], steps or state["steps"], state["batch_tokens"]
    trainer = train.Trainer(
        small(args.tokenizer), args.tokenizer, _plan(args, steps or 1000), device=device, seed=args.seed, start=start
    )
    _compile(trainer, args, device)
    random = Corpus(None, trainer.config.vocab_size, args.seed)
    mode = trainer.plan.mode(step)
    train.ready(trainer, random, mode)
    if not steps:  # a plan as long as --budget seconds of bf16 steps; RESULTS.md tells the number, to repeat the run
        trainer.plan.steps = max(100, int(args.budget / train.measure(trainer, random, BF16)))
        trainer.optimiser = trainer.new_optimiser()
    elif args.fit:
        left = args.seconds - (time.monotonic() - begin)
        fitting = step + int(0.93 * left / train.measure(trainer, random, mode))
        trainer.plan.steps = min(trainer.plan.steps, max(fitting, step + 1))
        trainer.optimiser = trainer.new_optimiser()
    print(f"plan: {trainer.plan.steps} steps of {trainer.plan.batch_tokens} tokens, from step {step}", flush=True)
    while args.data and args.wait and not (args.data / "meta.json").exists():  # written last by prepare.py
        time.sleep(0.5)
    corpus = Corpus(args.data / "train.bin" if args.data else None, trainer.config.vocab_size, args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    seconds = args.seconds - (time.monotonic() - begin)
    log, trainer.at = args.work / "train.jsonl", step
    try:
        train.run(
            trainer, corpus, seed=args.seed, first=step, until=args.until, seconds=seconds, log=log, every=args.every
        )
    finally:  # whatever happened, keep what was learnt
        train.save(args.work, trainer, args.seed)
        print(f"saved step {trainer.at} of {trainer.plan.steps} in {args.work} after {time.monotonic() - begin:.0f} s")


def draft_stage(args: argparse.Namespace) -> None:
    from recipes.small import draft

    draft.stage(args, _device(args.device))


def quantise_stage(args: argparse.Namespace) -> None:
    from recipes.small import quantise

    params, _ = files.load(args.resume, "target")
    params |= files.load(args.resume, "draft")[0]
    config = small(args.tokenizer)
    biases = {n: v for n, v in params.items() if n.endswith("gate.bias")}
    weights = {n: v for n, v in params.items() if n not in biases}
    size = quantise.write(args.work, config, weights, biases, args.tokenizer)
    print(f"{args.work}: {size:,} bytes")


def evaluate_stage(args: argparse.Namespace) -> None:
    from recipes.small import evaluate

    evaluate.stage(args, _device(args.device))


STAGES = {
    "bench": bench,
    "train": train_stage,
    "draft": draft_stage,
    "quantise": quantise_stage,
    "evaluate": evaluate_stage,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--data", type=Path, help="folder of prepare.py; without it random ids")
    parser.add_argument("--work", type=Path, required=True, help="folder the stage writes")
    parser.add_argument("--resume", type=Path, help="folder of an earlier stage")
    parser.add_argument("--checkpoint", type=Path, help="evaluate: the folder that quantise wrote")
    parser.add_argument("--tokenizer", type=Path, default=HERE, help="folder with tokenizer.json")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument(
        "--budget", type=float, default=600, help="train without --steps: seconds of bf16 steps to plan"
    )
    parser.add_argument("--until", type=float, default=1.0, help="train: stop at this share of the plan")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop and save so long after the start")
    parser.add_argument("--fit", action="store_true", help="train --resume: shorten the plan to what --seconds allow")
    parser.add_argument("--wait", action="store_true", help="train: wait for prepare.py to finish --data")
    parser.add_argument("--sample-seconds", type=float, default=40, help="draft: time for the target's own samples")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--every", type=int, default=50, help="steps between lines of the log")
    parser.add_argument("--limit", type=int, default=0, help="evaluate: fewer cases of everything, for a smoke test")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    STAGES[args.stage](args)


if __name__ == "__main__":
    main()
