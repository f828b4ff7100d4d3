"""`deepinfer generate`: prompts in, texts or one JSON document out."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from deepinfer.cli import options
from deepinfer.cli.prompts import Prompt, as_llm_prompt, open_llm, read_prompts, shown, terminal_text
from deepinfer.errors import RequestError
from deepinfer.outputs import RequestOutput

if TYPE_CHECKING:
    from deepinfer.llm import LLM


@click.command(cls=options.Command, short_help="Continue prompts.")
@options.model_option_or_default
@click.option("--prompt", "-p", multiple=True, metavar="TEXT", help="a prompt (repeatable)")
@click.option(
    "--prompts-file",
    "-f",
    metavar="FILE",
    help=".jsonl: a text, ids or an object per line; .json: a list of them; else, and for -, a text per line",
)
@click.option("--json", "as_json", is_flag=True, help="print the list of outputs as one JSON document")
@options.sampling_options
@options.engine_options
def generate(model: str, prompt: tuple[str, ...], prompts_file: str | None, as_json: bool, **values: Any) -> int:
    """Continue prompts. Progress goes to stderr, results to stdout.

    Exit code 1 when a request failed while it ran.
    """
    config = options.engine_config(model, values)
    prompts: list[Prompt] = [{"prompt": text} for text in prompt]
    if prompts_file is not None:
        prompts += read_prompts(prompts_file)
    if not prompts:
        raise RequestError("no prompts: give --prompt TEXT or --prompts-file FILE")
    params = options.sampling_params(model, values)

    with open_llm(config) as llm:
        made = [_made(number, item, len(prompts), llm) for number, item in enumerate(prompts)]
        begin = time.monotonic()
        outputs = llm.generate([item for item, _ in made], params)
        seconds = time.monotonic() - begin
    for output, (_, text) in zip(outputs, made, strict=True):
        output.prompt = text if output.prompt is None else output.prompt
    if as_json:
        click.echo(json.dumps([output.to_dict() for output in outputs], ensure_ascii=False, allow_nan=False))
    else:
        for source, output in zip(prompts, outputs, strict=True):
            _print(source, output)
        tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        click.echo(f"{len(outputs)} prompts, {tokens} tokens in {seconds:.1f} s", err=True)
    return 1 if any(output.error for output in outputs) else 0


def _made(number: int, prompt: Prompt, count: int, llm: LLM) -> tuple[Prompt, str | None]:
    try:
        return as_llm_prompt(prompt, llm)
    except RequestError as error:
        raise RequestError(f"prompt {number} of {count}: {error}") from error


def _print(source: Prompt, output: RequestOutput) -> None:
    click.secho(f"> {shown(source)}", bold=True)
    if output.error:
        click.secho(f"error: {output.error}", fg="red")
    for one in output.outputs:
        text = one.text if one.text or not one.token_ids else f"token ids {one.token_ids}"
        click.echo(terminal_text(text))
        click.secho(f"  ({len(one.token_ids)} tokens, {one.finish_reason})", dim=True)
    click.echo()
