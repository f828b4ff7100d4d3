"""Command-line options made from dataclasses: a field of SamplingParams or EngineConfig is an option, with
its own help.

Belongs here: turning fields into options and text into field values. Does not belong here: rules about
values; the dataclass checks them on construction.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from deepinfer.config import DEFAULT_MODEL, SHIPPED, EngineConfig
from deepinfer.params import SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])
FROM_ARGUMENTS = ("model",)  # fields that commands take in their own way
OTHER_NAMES = {(EngineConfig, "seed"): "engine_seed"}  # the request's --seed is the one people mean


class Option(click.Option):
    """An option that `--help` lists under the heading `section`."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Command(click.Command):
    """A command whose `--help` lists options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for heading in sorted(sections, key=lambda name: name != "Options"):
            with formatter.section(heading):
                formatter.write_dl(sections[heading], col_max=34)


class Value(click.ParamType[Any]):
    """Text of one option to the value of a field whose type is `hint` (None allowed: the word `none`)."""

    def __init__(self, name: str, parse: Callable[[str], Any], optional: bool) -> None:
        self.name, self.parse, self.optional = name, parse, optional

    def metavar(self, default: Any) -> str:
        """What `--help` shows for it: `none` too where leaving the option out means something else."""
        return f"{self.name}|none" if self.optional and default is not None else self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if self.optional and value.lower() == "none":
            return None
        try:
            return self.parse(value)
        except ValueError:
            self.fail(f"{value!r} is not {self.name}", param, ctx)


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _biases(text: str) -> dict[int, float]:
    pairs = [part.split("=", 1) for part in text.split(",")]
    return {int(key): float(value) for key, value in pairs}


def _json(text: str) -> Any:
    return json.loads(text)


def _value_type(hint: Any) -> tuple[Value | click.Choice[str] | None, bool]:
    """(click type, repeatable) of a field type; click type None = an on/off switch."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    optional = types.NoneType in options
    kinds = [option for option in options if option is not types.NoneType]
    origins = [typing.get_origin(kind) or kind for kind in kinds]
    if kinds == [bool]:
        return None, False
    if origins[0] is typing.Literal:
        return click.Choice(typing.get_args(kinds[0])), False
    if Sequence in origins:
        (item,) = typing.get_args(kinds[origins.index(Sequence)])
        return (Value("ID[,ID...]", _ids, optional), False) if item is int else (Value("TEXT", str, False), True)
    if Mapping in origins:
        of_ids = typing.get_args(kinds[origins.index(Mapping)])[0] is int
        return Value("ID=BIAS[,...]", _biases, optional) if of_ids else Value("JSON", _json, optional), False
    return Value({int: "INTEGER", float: "NUMBER", str: "TEXT"}[kinds[0]], kinds[0], optional), False


def _parameter(cls: Any, field: str) -> str:
    return OTHER_NAMES.get((cls, field), field)


def options_of(cls: Any, section: str, skip: Collection[str] = ()) -> Callable[[Function], Function]:
    """A decorator that adds one option per field of dataclass `cls`; read the given ones with `given`."""

    def decorate(function: Function) -> Function:
        hints = typing.get_type_hints(cls)
        for field in reversed([field for field in fields(cls) if field.name not in skip]):
            kind, repeatable = _value_type(hints[field.name])
            parameter = _parameter(cls, field.name)
            flag = parameter.replace("_", "-")
            text = field.metadata["help"]
            if field.default not in (MISSING, None, ()):
                text += f" [{str(field.default).lower() if isinstance(field.default, bool) else field.default}]"
            settings: dict[str, Any] = {"default": None, "help": text + " (repeatable)" * repeatable}
            if kind is None:
                flag += f"/--no-{flag}"
            else:
                metavar = None if isinstance(kind, click.Choice) else kind.metavar(field.default)
                settings |= {"type": kind, "multiple": repeatable, "metavar": metavar}
            function = click.option(f"--{flag}", parameter, cls=Option, section=section, **settings)(function)
        return function

    return decorate


def given(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `cls` that were on the command line, out of a command's keyword arguments `values`."""
    context = click.get_current_context()
    parameters = {field.name: _parameter(cls, field.name) for field in fields(cls)}
    return {
        field: values[parameter]
        for field, parameter in parameters.items()
        if parameter in values and context.get_parameter_source(parameter) is ParameterSource.COMMANDLINE
    }


_MODEL_HELP = {field.name: field.metadata["help"] for field in fields(EngineConfig)}["model"]
model_option = click.option("--model", "-m", required=True, metavar="MODEL", help=_MODEL_HELP)
model_option_or_default = click.option(
    "--model", "-m", default=DEFAULT_MODEL, metavar="MODEL", help=f"{_MODEL_HELP} [{DEFAULT_MODEL}]"
)
sampling_options = options_of(
    SamplingParams, "Sampling, per prompt (defaults: the checkpoint's generation_config.json)"
)
engine_options = options_of(EngineConfig, "Engine", skip=FROM_ARGUMENTS)


def generation_defaults(model: str) -> SamplingParams:
    """What the checkpoint recommends. A synthetic name is written to the cache first, as by LLM; needs torch."""
    if is_synthetic(model):
        from deepinfer.engine.load import checkpoint_folder

        return SamplingParams.defaults_of(checkpoint_folder(model))
    return SamplingParams.defaults_of(SHIPPED.get(model, Path(model)))


def is_synthetic(model: str) -> bool:
    """Whether `model` can only be the name of a synthetic checkpoint, which may have to be written first."""
    return model not in SHIPPED and not Path(model).is_dir()


def sampling_params(model: str, values: Mapping[str, Any]) -> SamplingParams:
    """The checkpoint's generation defaults with the given options over them.

    Raises RequestError for the options, CheckpointError for an unreadable generation_config.json.
    """
    changes = given(SamplingParams, values)
    SamplingParams(**changes)  # the options by themselves first: their errors should not depend on the checkpoint
    return generation_defaults(model).replace(**changes)


def engine_config(model: str, values: Mapping[str, Any]) -> EngineConfig:
    """The engine options of the command line, validated before torch is imported. Raises ConfigError."""
    return EngineConfig.from_options(model, **given(EngineConfig, values))
