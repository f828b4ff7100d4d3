"""`deepinfer chat`: a conversation in the terminal, reply by reply as it is generated.

Belongs here: the prompt, the commands, showing a reply. Does not belong here: the chat format (text/chat.py).
"""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import click

from deepinfer.cli import options
from deepinfer.cli.prompts import as_llm_prompt, open_llm, render, terminal_text
from deepinfer.errors import RequestError
from deepinfer.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.llm import LLM

END_OF_THINKING = "</think>"
NOT_IN_A_CHAT = ("n", "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens", "so_args")
HELP = """\
/reset        forget the conversation
/image FILE   show a picture with the next message
/think on     think before answering (off: answer at once)
/history      the conversation so far
/exit         leave (also Ctrl-D); Ctrl-C stops a reply"""


@click.command(cls=options.Command, short_help="Talk with the model in the terminal.")
@options.model_option_or_default
@click.option("--system", metavar="TEXT", help="system message")
@click.option("--thinking/--no-thinking", default=None, help="think before answering")
@click.option("--reasoning-effort", metavar="LEVEL", help="none, minimal, low, medium, high, xhigh, max, or 1 to 100")
@options.options_of(SamplingParams, "Sampling", skip=NOT_IN_A_CHAT)
@options.engine_options
def chat(model: str, system: str | None, thinking: bool | None, reasoning_effort: str | None, **values: Any) -> None:
    """Talk with the model. A reply is as long as the context allows unless --max-tokens or EOS ends it."""
    params = options.sampling_params(model, values)
    if "max_tokens" not in options.given(SamplingParams, values):
        params = params.replace(max_tokens=None)
    config = options.engine_config(model, values)
    effort: str | int | None = reasoning_effort
    if reasoning_effort is not None and reasoning_effort.isdecimal():
        effort = int(reasoning_effort)
    with open_llm(config) as llm:
        # Control tokens stay in the text, so that the reply can be split into reasoning, answer and calls.
        session = Session(llm, params.replace(skip_special_tokens=False), system, thinking, effort)
        session.run()


class Session:
    """One conversation: its messages and the settings of the next turn."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        thinking: bool | None,
        effort: str | int | None,
    ) -> None:
        self.llm, self.params, self.thinking, self.effort = llm, params, thinking, effort
        self.start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.start)
        self.images: list[str] = []

    def run(self) -> None:
        """Read lines until /exit or the end of the input."""
        interactive = sys.stdin.isatty()
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for input())
            click.echo("Type a message, or /help.", err=True)
        while True:
            try:
                line = input("you> " if interactive else "").strip()
            except EOFError:
                return
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.turn(line)

    def command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        match name, argument.strip():
            case "/reset", "":
                self.messages, self.images = list(self.start), []
            case "/image", path if path:
                self.images.append(path)
            case "/think", ("on" | "off") as switch:
                self.thinking = switch == "on"
            case "/history", "":
                for message in self.messages:
                    click.echo(f"{message['role']}: {_plain(message['content'])}")
            case _:
                click.echo(HELP)

    def turn(self, text: str) -> None:
        """Answer one message; a turn that fails or is interrupted leaves the conversation as it was."""
        content: Any = text
        if self.images:
            content = [
                *({"type": "image", "image": path} for path in self.images),
                {"type": "text", "text": text},
            ]
        messages = [*self.messages, {"role": "user", "content": content}]
        self.images = []
        prompt = {"messages": messages, "thinking": self.thinking, "reasoning_effort": self.effort}
        try:
            rendered = render(prompt, self.llm)
            reply = self._show(as_llm_prompt(prompt, self.llm)[0], rendered.thinking)
        except RequestError as error:
            click.secho(f"error: {error}", fg="red", err=True)
            return
        except KeyboardInterrupt:
            click.secho("\n(stopped; this turn is forgotten)", dim=True)
            return
        self.messages = [*messages, rendered.parse(reply)]

    def _show(self, prompt: dict[str, Any], thinking: bool) -> str:
        """Print a reply while it is generated, reasoning dimmed; returns its text."""
        pieces: list[str] = []
        with closing(self.llm.stream(prompt, self.params)) as deltas:
            for delta in deltas:
                if delta.error:
                    raise RequestError(delta.error)
                piece = delta.outputs[0].text
                pieces.append(piece)
                before, mark, after = piece.partition(END_OF_THINKING) if thinking else (piece, "", "")
                click.secho(terminal_text(before), nl=bool(mark), dim=thinking)
                if mark:
                    thinking = False
                    click.echo(terminal_text(after.lstrip("\n")), nl=False)
        click.echo()
        return "".join(pieces)


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(part.get("text") or f"[image {part.get('image')}]" for part in content)
    return str(content)
