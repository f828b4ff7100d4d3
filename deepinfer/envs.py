"""The one table of DEEPINFER_* environment variables, and the only way that Python code reads them.

Belongs here: name, type, default and help of every variable that does something. Does not belong here: what a
value means to the engine (config.py), variables of other programs.
docs/env.md is generated from this table: `python -m deepinfer.envs > docs/env.md`.
"""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import ConfigError

PREFIX = "DEEPINFER_"


@dataclass(frozen=True)
class Variable:
    """One variable. `parse` turns text into a value or raises ValueError; `accepts` says what it takes."""

    name: str
    parse: Callable[[str], Any]
    accepts: str
    default: Any
    help: str


def _flag(text: str) -> bool:
    values = {
        "1": True,
        "true": True,
        "on": True,
        "yes": True,
        "0": False,
        "false": False,
        "off": False,
        "no": False,
    }
    return values[text.lower()]


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError
        return text.lower()

    return parse


def _positive(text: str) -> int:
    if int(text) <= 0:
        raise ValueError
    return int(text)


def _path(text: str) -> str:
    return os.path.expanduser(text)


_LEVELS = ("debug", "info", "warning", "error")
_REPLAY = ("compact", "mask", "off")

VARIABLES: dict[str, Variable] = {
    variable.name: variable
    for variable in (
        Variable(
            "DEEPINFER_OPS",
            str,
            "op=provider, separated by commas; * for all ops",
            "",
            "Who implements an op, instead of the first usable provider: "
            "`DEEPINFER_OPS='*=reference'` runs the definitions.",
        ),
        Variable(
            "DEEPINFER_NATIVE",
            _flag,
            "0 or 1",
            True,
            "0 ignores the compiled C++ library, as if it had not been built.",
        ),
        Variable(
            "DEEPINFER_COMPILE",
            _one_of("eager", "layer", "model", "graph"),
            "eager, layer, model or graph",
            None,
            "How the model is compiled (docs/capture.md); unset: eager.",
        ),
        Variable(
            "DEEPINFER_BATCH_INVARIANT",
            _flag,
            "0 or 1",
            False,
            "1 uses one kernel with the same bits for every number of rows, also where another is faster.",
        ),
        Variable(
            "DEEPINFER_PASSES",
            str,
            "-pass, separated by commas, or none",
            "",
            "Compiler passes to leave out, e.g. `-boundary,-norm_quant`; `none` leaves out all (docs/capture.md).",
        ),
        Variable(
            "DEEPINFER_ASYNC_SCHEDULING",
            _flag,
            "0 or 1",
            True,
            "Plan the next step while one runs on the device. 0 is the strictly serial loop, with the same results.",
        ),
        Variable(
            "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
            _one_of(*_REPLAY),
            "compact, mask or off",
            "compact",
            "Decoder replay: which prompt rows the layers after the last KV source run on. `compact` gathers "
            "the kept rows, `mask` runs all rows with the same attention, `off` keeps everything.",
        ),
        Variable(
            "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
            _positive,
            "a positive integer",
            None,
            "Prompt rows kept by decoder replay; unset: window + 2 * (drafts + 1), 140 for the real model.",
        ),
        Variable(
            "DEEPINFER_LOG_LEVEL",
            _one_of(*_LEVELS),
            "debug, info, warning or error",
            "info",
            "What the `deepinfer` loggers print.",
        ),
        Variable(
            "DEEPINFER_CACHE_ROOT",
            _path,
            "a folder",
            "~/.cache/deepinfer",
            "Where files that can be made again are kept, such as synthetic checkpoints.",
        ),
        Variable(
            "DEEPINFER_GOLDENS",
            _path,
            "a folder",
            None,
            "The full set of goldens for the tests; without it they use the subset in tests/data.",
        ),
    )
}


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """The parsed value of a variable; its default when unset or empty. ConfigError names a bad value."""
    variable = VARIABLES[name]
    text = (os.environ if environ is None else environ).get(name, "").strip()
    if not text:
        return _path(variable.default) if variable.parse is _path and variable.default else variable.default
    try:
        return variable.parse(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} is {text!r}; it takes {variable.accepts} (default: {_shown(variable)})") from None


def problems(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for every variable of the table that is set to a value it does not take."""
    found = []
    for name in VARIABLES:
        try:
            get(name, environ)
        except ConfigError as error:
            found.append(str(error))
    return found


def unknown(environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """A sentence for every DEEPINFER_* variable that is set and unknown, with the nearest known name."""
    for name in sorted(os.environ if environ is None else environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else "; docs/env.md lists the variables of this version"
            yield f"{name} is set but has no effect{hint}"


def warn_unknown(environ: Mapping[str, str] | None = None) -> None:
    """Issue a RuntimeWarning for each unknown DEEPINFER_* variable."""
    for sentence in unknown(environ):
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)


def to_markdown() -> str:
    """The text of docs/env.md."""
    lines = [
        "# Environment variables",
        "",
        "Generated from `deepinfer/envs.py` by `python -m deepinfer.envs > docs/env.md`; do not edit.",
        "Options given in Python or on the command line win over these. An empty value counts as unset.",
        "Other `DEEPINFER_*` names have no effect, and the engine warns about them.",
        "",
        "| Variable | Takes | Default | What it does |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{v.name}` | {v.accepts} | {_shown(v)} | {v.help} |" for v in VARIABLES.values()]
    return "\n".join(lines) + "\n"


def _shown(variable: Variable) -> str:
    default = variable.default
    if default is None or default == "":
        return "unset"
    return str(int(default)) if isinstance(default, bool) else str(default)


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
