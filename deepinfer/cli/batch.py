"""`deepinfer run-batch`: an OpenAI batch file through the engine.

Belongs here: keeping a bounded number of requests in flight and writing results in order. Does not belong
here: the file formats (text/batch_file.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from deepinfer.cli import options
from deepinfer.cli.prompts import open_llm, render
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.params import SamplingParams
from deepinfer.text.batch_file import BatchRequest, ResultFile, error_line, read_batch, result_line

if TYPE_CHECKING:
    from deepinfer.engine.requests import Request
    from deepinfer.llm import LLM


@click.command(cls=options.Command, name="run-batch", short_help="Run an OpenAI batch file.")
@options.model_option
@click.option("--input", "-i", "source", required=True, metavar="FILE", help="requests, one JSON object per line")
@click.option("--output", "-o", "target", required=True, metavar="FILE", help="results, in the order of the requests")
@click.option(
    "--max-inflight",
    type=click.IntRange(min=1),
    metavar="N",
    help="most requests queued or waiting to be written; default: 1024 or twice --max-num-seqs",
)
@options.engine_options
def run_batch(model: str, source: str, target: str, max_inflight: int | None, **values: Any) -> int:
    """Run a batch file (/v1/chat/completions and /v1/completions).

    The whole file is checked before the model is loaded. Results are written as they come, in order; run the
    same command again after a kill, a full disk or Ctrl-C, and it goes on behind the last complete result.
    Exit code 1 when a result is an error.
    """
    config = options.engine_config(model, values)
    synthetic = options.is_synthetic(model)  # its folder is made for a good file only
    requests = read_batch(source, SamplingParams() if synthetic else options.generation_defaults(model))
    if synthetic:
        requests = read_batch(source, options.generation_defaults(model))
    results = ResultFile(target, {request.custom_id for request in requests})
    num_errors = 0
    try:
        todo = [request for request in requests if request.custom_id not in results.done]
        if len(todo) < len(requests):
            click.echo(f"{len(requests) - len(todo)} of {len(requests)} results are in {target} already", err=True)
        if todo:
            limit = max_inflight or max(1024, 2 * config.max_num_seqs)
            with open_llm(config) as llm, tqdm(total=len(todo), desc="Requests", unit="request") as bar:
                for line in run(llm, todo, limit):
                    _write(results, line, len(requests))
                    num_errors += line["error"] is not None
                    bar.update(1)
    except KeyboardInterrupt:
        click.echo(_progress(results, len(requests)), err=True)
        raise
    finally:
        results.close()
    click.echo(f"{len(requests)} results in {target}, {num_errors} new ones are errors", err=True)
    return 1 if num_errors else 0


def _write(results: ResultFile, line: dict[str, Any], total: int) -> None:
    try:
        results.write(line)
    except OSError as error:
        raise RequestError(f"cannot write {results.path}: {error.strerror}; {_progress(results, total)}") from error


def _progress(results: ResultFile, total: int) -> str:
    return f"{len(results.done)} of {total} results are written, the same command goes on from there"


@dataclass
class _InFlight:
    """A request of the file with its requests to the engine (one per prompt), or why there are none."""

    batch: BatchRequest
    parse: Any = None
    parts: list[Request] = field(default_factory=list)
    error: str | None = None

    @property
    def finished(self) -> bool:
        return all(part.finished or part.error is not None for part in self.parts)

    def line(self, llm: LLM) -> dict[str, Any]:
        if self.error is not None:
            return error_line(self.batch, self.error)
        outputs = [part.output() for part in self.parts]
        return result_line(self.batch, outputs, self.parse, llm.engine.tokenizer.token_bytes)


def run(llm: LLM, requests: list[BatchRequest], limit: int) -> Iterator[dict[str, Any]]:
    """Result lines in the order of `requests`; at most `limit` are queued or held back at any time."""
    todo, window = deque(requests), deque[_InFlight]()
    while todo or window:
        while todo and len(window) < limit:
            window.append(_submit(llm, todo.popleft()))
        if not window[0].finished:
            llm.engine.step()
        while window and window[0].finished:
            yield window.popleft().line(llm)


def _submit(llm: LLM, request: BatchRequest) -> _InFlight:
    """Queue a request; one that this engine cannot serve becomes an error result, the others go on."""
    entry = _InFlight(request)
    try:
        params = request.params
        prompts: list[Any] = list(request.prompts)
        if request.kind == "chat":
            rendered = render({"messages": request.messages, **request.chat_options}, llm)
            entry.parse = rendered.parse
            prompts = [{"prompt_token_ids": rendered.token_ids, "multi_modal_data": {"image": rendered.images}}]
            params = params.replace(skip_special_tokens=False)  # `parse` reads the control tokens
        parts = [llm.make_request(prompt, params) for prompt in prompts]
    except DeepInferError as error:
        entry.error = str(error)
        return entry
    for part in parts:
        llm.engine.submit(part)
    entry.parts = parts
    return entry
