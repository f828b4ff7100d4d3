"""The whole path once: write a checkpoint in the released format, load it, generate, sum up (`make demo`).

The weights are random, so the text is too; everything else is what the released model goes through: English,
Chinese, code, a chat with reasoning, and a picture.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections import Counter
from pathlib import Path

import torch

from deepinfer import LLM, SamplingParams
from deepinfer.cache.groups import human
from deepinfer.cli.prompts import as_llm_prompt, read_prompts, shown
from deepinfer.model.synthetic import make_checkpoint
from deepinfer.ops import registry

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="tiny or tiny-realdims")
    parser.add_argument("--folder", type=Path, default=HERE.parent / "build" / "demo", help="for checkpoints")
    parser.add_argument("--prompts", default=str(HERE / "prompts.jsonl"))
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()

    checkpoint = args.folder / args.model
    if not (checkpoint / "config.json").exists():
        print(f"Writing the synthetic checkpoint {args.model} to {checkpoint}")
        shutil.rmtree(checkpoint, ignore_errors=True)
        make_checkpoint(args.model, checkpoint)
    prompts = read_prompts(args.prompts)
    if args.model == "tiny":  # matrices too small to share: threads would only wait for each other
        torch.set_num_threads(1)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.8)
    with LLM(checkpoint, max_num_seqs=8, seed=0) as llm:
        begin = time.monotonic()
        outputs = llm.generate([as_llm_prompt(prompt, llm)[0] for prompt in prompts], params)
        seconds = time.monotonic() - begin
        sizes, load_s = llm.engine.sizes, llm.load_s

    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\n> {shown(prompt)}\n{output.outputs[0].text!r}")
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    num_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    providers = Counter(registry.chosen("cpu").values()).most_common()
    pages = f"{sizes.num_tokens} tokens at {sizes.page_bytes / sizes.page_size:.0f} B"
    windows = f"{sizes.num_slots} windows of {human(sizes.slot_bytes)}"
    rows = {
        "load": f"{load_s:.1f} s from {checkpoint}",
        "tokens": f"{num_in} in, {num_out} out, in {seconds:.1f} s",
        "speed": f"{(num_in + num_out) / seconds:.0f} tok/s, {num_out / seconds:.0f} of them new",
        "KV cache": f"{human(sizes.total_bytes)}: {pages}, {windows}",
        "ops (cpu)": ", ".join(f"{count} {name}" for name, count in providers) + " (deepinfer doctor --ops)",
    }
    print()
    for name, value in rows.items():
        print(f"{name:10}{value}")


if __name__ == "__main__":
    main()
