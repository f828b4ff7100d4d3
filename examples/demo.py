"""The small trained model talks (`make demo`): stories continued and questions answered from a prompts file, then
a conversation, then what it took.

Belongs here: what a newcomer sees first, through the public API. Does not belong here: measurements (bench/).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.cache.groups import human
from deepinfer.cli.prompts import Prompt, as_llm_prompt, read_prompts, render, shown, terminal_text
from deepinfer.config import DEFAULT_MODEL
from deepinfer.engine.load import checkpoint_folder
from deepinfer.ops import registry

PROMPTS = Path(__file__).with_name("prompts.jsonl")
MESSAGES = ("Hello! My name is Mia.", "What is my name?", "What can you do?")
SAMPLED = 0.8  # temperature at which openings of stories are continued a second time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"a name or a checkpoint folder [{DEFAULT_MODEL}]")
    parser.add_argument("--prompts", default=str(PROMPTS), help="a prompts file as for `deepinfer generate`")
    parser.add_argument("--max-tokens", type=int, default=280)
    args = parser.parse_args()

    torch.set_num_threads(1)  # matrices too small to share: threads would only wait for each other
    greedy = SamplingParams(max_tokens=args.max_tokens, temperature=0)
    prompts = read_prompts(args.prompts)
    openings = [prompt for prompt in prompts if "messages" not in prompt]
    asked = [(prompt, greedy) for prompt in prompts]
    asked += [(prompt, greedy.replace(temperature=SAMPLED, seed=1)) for prompt in openings]
    with LLM(args.model, max_num_seqs=8) as llm:
        begin = time.monotonic()
        outputs = llm.generate(
            [as_llm_prompt(prompt, llm)[0] for prompt, _ in asked],
            [params.replace(skip_special_tokens="messages" not in prompt) for prompt, params in asked],
        )
        for (prompt, params), output in zip(asked, outputs, strict=True):
            show(prompt, params, output, llm)
        print(f"\nA conversation (temperature 0)\n{'-' * 30}")
        outputs += converse(llm, greedy)
        seconds = time.monotonic() - begin
        summarise(args.model, llm, outputs, seconds)


def show(prompt: Prompt, params: SamplingParams, output: RequestOutput, llm: LLM) -> None:
    """The prompt and what became of it; a reply's reasoning stands in brackets."""
    text = output.outputs[0].text
    if "messages" in prompt:
        reply = render(prompt, llm).parse(text)
        reasoning = reply.get("reasoning_content")
        text = (f"[{reasoning.strip()}]\n" if reasoning else "") + str(reply["content"])
    print(f"\n> {shown(prompt)}   (temperature {params.temperature:g})\n{terminal_text(text.strip())}")


def converse(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    """Turns of one conversation, each reply part of the next prompt."""
    messages: list[dict[str, str]] = []
    outputs = []
    for text in MESSAGES:
        messages.append({"role": "user", "content": text})
        (output,) = llm.chat(messages, params, thinking=False, use_tqdm=False)
        outputs.append(output)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        print(f"you:   {text}\nmodel: {terminal_text(output.outputs[0].text)}")
    return outputs


def summarise(model: str, llm: LLM, outputs: list[RequestOutput], seconds: float) -> None:
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    num_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    sizes, folder = llm.engine.sizes, checkpoint_folder(model)
    pages = f"{sizes.num_tokens} tokens at {sizes.page_bytes / sizes.page_size:.0f} B"
    windows = f"{sizes.num_slots} windows of {human(sizes.slot_bytes)}"
    providers = Counter(registry.chosen("cpu").values()).most_common()
    rows = {
        "model": origin(model, folder),
        "load": f"{llm.load_s:.1f} s from {folder}",
        "tokens": f"{num_in} in, {num_out} out, in {seconds:.1f} s",
        "speed": f"{(num_in + num_out) / seconds:.0f} tok/s, {num_out / seconds:.0f} of them new",
        "KV cache": f"{human(sizes.total_bytes)}: {pages}, {windows}",
        "ops (cpu)": ", ".join(f"{count} {name}" for name, count in providers) + " (deepinfer doctor --ops)",
    }
    print()
    for name, value in rows.items():
        print(f"{name:10}{value}")


def origin(model: str, folder: Path) -> str:
    """What the checkpoint is and how it was made, from the about.json that its recipe writes into it."""
    if not (folder / "about.json").exists():
        return model
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    recipe, effort = about["made_by"], f"{about['seconds']:.0f} s of one {about['device']}, {about['date']}"
    return f"{model}: trained by {recipe} on text it generates itself, {effort}; see {recipe}/RESULTS.md"


if __name__ == "__main__":
    main()
