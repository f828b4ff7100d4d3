"""One command per stage: `python -m recipes.small.run STAGE --data DIR --work DIR`.

Belongs here: arguments and the order of stages. Does not belong here: what a stage does.

    python -m recipes.small.prepare --out DATA     the corpus (its own command)
    run bench     seconds per step of every length and mode, on random ids
    run train     the target, resumable
    run polish    the target's last steps, on lists, on a CPU core
    run quantise  the checkpoint folder; without a draft in --resume its draft is an untrained one
    run own       texts that the target of that folder writes
    run draft     the draft, on the corpus and the target's own texts
    run average   between two folders: what polish taught, and what it forgot
    run confide   the draft's confidence head again, on blocks of a checkpoint folder
    run evaluate  RESULTS.md, through the engine
"""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path
from typing import Any

import torch

from deepinfer.studies import report
from recipes.small import files
from recipes.small.config import small
from recipes.small.data import Corpus
from recipes.small.train import LENGTHS, Plan
from recipes.small.twin import BF16, QUANTISED, initialise

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

    params, state = files.load(args.resume, "target")
    config = small(args.tokenizer)
    about: dict[str, Any] = {"made_by": "recipes/small", "commit": report.commit().replace("-dirty", "+")}
    about |= {"seed": state["seed"], "steps": state["steps"], "polish_steps": state.get("polish", 0)}
    if (args.resume / "draft-0.safetensors").exists():
        drafts, state = files.load(args.resume, "draft")
        params |= drafts
        about |= {"draft_steps": state["steps"]}
    else:  # enough for texts of the target
        fresh = initialise(config, args.seed + 1)
        params |= {n: v for n, v in (fresh[0] | fresh[1]).items() if n.startswith("mtp.")}
    biases = {n: v for n, v in params.items() if n.endswith("gate.bias")}
    weights = {n: v for n, v in params.items() if n not in biases}
    about |= {"seconds": args.held, "device": args.made_on, "date": datetime.date.today().isoformat()}
    size = quantise.write(args.work, config, weights, biases, args.tokenizer, about)
    print(f"{args.work}: {size:,} bytes")


def own_stage(args: argparse.Namespace) -> None:
    from recipes.small import own

    own.stage(args)


def polish_stage(args: argparse.Namespace) -> None:
    from recipes.small import polish

    polish.stage(args, _device(args.device))


def average_stage(args: argparse.Namespace) -> None:
    """Between what --resume holds (share 1 - s) and what --other holds (share s), parameter by parameter."""
    for name in ("target", "draft"):
        (first, _), (second, state) = files.load(args.resume, name), files.load(args.other, name)
        mean = {n: torch.lerp(first[n].float(), second[n].float(), args.share) for n in second}
        files.save(args.work, name, mean, state)


def confide_stage(args: argparse.Namespace) -> None:
    from recipes.small import confide

    confide.stage(args)


def evaluate_stage(args: argparse.Namespace) -> None:
    from recipes.small import evaluate

    evaluate.stage(args, _device(args.device))


STAGES = {
    "bench": bench,
    "train": train_stage,
    "polish": polish_stage,
    "quantise": quantise_stage,
    "own": own_stage,
    "draft": draft_stage,
    "average": average_stage,
    "confide": confide_stage,
    "evaluate": evaluate_stage,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--data", type=Path, help="folder of prepare.py; without it random ids")
    parser.add_argument("--work", type=Path, required=True, help="folder the stage writes")
    parser.add_argument("--resume", type=Path, help="folder of an earlier stage")
    parser.add_argument("--other", type=Path, help="average: the folder of the other parameters")
    parser.add_argument("--share", type=float, default=0.65, help="average: how much of the other")
    parser.add_argument("--checkpoint", type=Path, help="evaluate: the folder that quantise wrote")
    parser.add_argument("--made", default="", help="evaluate: how the checkpoint was made, for RESULTS.md")
    parser.add_argument("--held", type=int, default=0, help="quantise: seconds of the device, for about.json")
    parser.add_argument("--made-on", default="H200", help="quantise: the device, for about.json")
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
    parser.add_argument("--wait", action="store_true", help="train, draft: wait for prepare.py to finish --data")
    parser.add_argument("--rate", type=float, default=1.0, help="draft: most of the learning rates, to go on from one")
    parser.add_argument("--own", type=Path, help="draft: folder of the target's own texts")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--every", type=int, default=50, help="steps between lines of the log")
    parser.add_argument("--limit", type=int, default=0, help="evaluate: fewer cases of everything, for a smoke test")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    STAGES[args.stage](args)


if __name__ == "__main__":
    main()
