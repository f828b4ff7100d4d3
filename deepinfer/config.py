"""The options of an engine: one frozen dataclass, resolved once, every unmet requirement in one ConfigError.

Belongs here: options, defaults, environment overrides, rules between options, limits that come from the
model's config. Does not belong here: options of one request (params.py), the model's dimensions
(model/config.py), and torch, which is imported only by `check_device`.
"""

from __future__ import annotations

import os
import re
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from deepinfer import envs
from deepinfer.errors import ConfigError, list_problems, subjects

Numerics = Literal["quantised", "exact"]
Replay = Literal["compact", "mask", "off"]

IN_FLIGHT_STEPS = 2  # steps that a replay bound leaves room for: one runs, one is planned (spec/dspark.md 1)
COMPILE_MODES = ("eager", "layer", "model", "graph")

SHIPPED = {"small": Path(__file__).parent / "data" / "small"}  # checkpoints inside the package, by name
DEFAULT_MODEL = "small"  # of the commands for people: generate, chat, examples/demo.py


class ModelLimits(Protocol):
    """What the options are checked against; `model.config.ModelConfig` provides it."""

    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def sliding_window(self) -> int: ...
    @property
    def num_nextn_predict_layers(self) -> int: ...
    @property
    def dspark_block_size(self) -> int: ...


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. Raises ConfigError listing every unmet requirement.

    Fields left at None are resolved later: `replay` and `replay_keep_tokens` from the environment on
    construction, `max_model_len` and `replay_keep_tokens` by `resolve_for(model)`, the pool size by the
    engine from free memory. Each field's `metadata["help"]` is its documentation; the command line shows the
    same text.
    """

    model: str = field(metadata=_help("checkpoint folder, or a name: small, or a synthetic one such as tiny"))
    _: KW_ONLY
    tokenizer: str | None = field(
        default=None, metadata=_help("folder of the tokenizer files; default: the checkpoint")
    )
    device: str = field(default="cpu", metadata=_help("cpu, cuda, cuda:N, npu or npu:N"))
    numerics: Numerics = field(
        default="quantised",
        metadata=_help("quantised: the model's number formats; exact: no rounding of activations or cache"),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=_help("most tokens of prompt and output together; default: what the model allows"),
    )
    max_num_seqs: int = field(default=32, metadata=_help("most sequences that run at the same time"))
    max_num_batched_tokens: int = field(
        default=2048, metadata=_help("most rows of one step; longer prompts are prefilled in chunks")
    )
    kv_cache_memory_bytes: int | None = field(
        default=None, metadata=_help("bytes for the paged cache; default: chosen from free memory")
    )
    num_pages: int | None = field(default=None, metadata=_help("pages of the cache, instead of bytes"))
    page_size: int = field(default=128, metadata=_help("tokens of a page"))
    seed: int | None = field(
        default=None,
        metadata=_help("makes the seeds of unseeded requests repeatable; default: fresh ones each run"),
    )
    max_logprobs: int = field(default=20, metadata=_help("most logprobs per token that a request may ask for"))
    compile: str | None = field(
        default=None,
        metadata=_help(
            "eager, layer (each kind of layer once), model (halves of the model) or graph (ops as they are, in CUDA "
            "graphs); default: DEEPINFER_COMPILE, else eager"
        ),
    )
    replay: Replay | None = field(
        default=None,
        metadata=_help("decoder replay: compact, mask or off; default: DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE"),
    )
    replay_keep_tokens: int | None = field(
        default=None,
        metadata=_help(
            "prompt rows kept by decoder replay; default: DEEPINFER_YOCO_PREFILL_KEEP_TOKENS, "
            "else window + 2 * (drafts + 1)"
        ),
    )

    async_scheduling: bool | None = field(
        default=None,
        metadata=_help(
            "plan the next step while one runs; false: strictly one after the other. Default: "
            "DEEPINFER_ASYNC_SCHEDULING, on"
        ),
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata=_help(
            "reuse the cache of a prompt's beginning that an earlier prompt had too; its last rows are run again "
            "without what came before them, so a hit is an approximation, as decoder replay is"
        ),
    )

    def __post_init__(self) -> None:
        problems = self._read_environment()
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, str) or not self.model:
            problems.append(f"model is {self.model!r}; give a checkpoint folder or a name such as 'small'")
        for name, (lowest, optional) in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                problems.append(f"{name} is {value!r}; it must be an integer from {lowest} on")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                problems.append(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(map(str, choices))}")
        if not re.fullmatch(r"cpu|(cuda|npu)(:\d+)?", str(self.device)):
            problems.append(f"device is {self.device!r}; it must be cpu, cuda, cuda:N, npu or npu:N")
        if self.compile is None:  # not `layer` yet: on a CPU it is not faster, on a GPU it has not run
            object.__setattr__(self, "compile", "eager")
        elif self.compile not in COMPILE_MODES:
            problems.append(f"compile is {self.compile!r}; it must be one of {', '.join(COMPILE_MODES)}")
        elif self.numerics == "exact" and self.compile != "eager":
            problems.append(
                f"compile is {self.compile!r} with numerics 'exact', which runs the definitions one by one; use 'eager'"
            )
        problems += self._conflicts(subjects(problems))
        if problems:
            raise ConfigError(list_problems("EngineConfig", problems))

    def _read_environment(self) -> list[str]:
        problems = envs.problems()
        for name, variable in _FROM_ENVIRONMENT.items():
            if getattr(self, name) is None:
                value = envs.VARIABLES[variable].default if problems else envs.get(variable)
                object.__setattr__(self, name, value)
        return problems

    def _conflicts(self, bad: set[str]) -> list[str]:
        """Rules beyond one option's range, for options that are not `bad` by themselves."""
        problems = []
        sound = bad.isdisjoint
        if sound(("page_size",)) and self.page_size % 8:
            problems.append(
                f"page_size is {self.page_size}; it must be a multiple of 8, so that all records stay aligned"
            )
        steps = ("max_num_batched_tokens", "max_num_seqs")
        if sound(steps) and self.max_num_batched_tokens < self.max_num_seqs:
            problems.append(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below the {self.max_num_seqs} of "
                "max_num_seqs: a step must hold a row of every sequence; raise the first or lower the second"
            )
        if self.num_pages is not None and self.kv_cache_memory_bytes is not None:
            problems.append("num_pages and kv_cache_memory_bytes both size the cache; give one of them")
        return problems

    def check_device(self) -> None:
        """Raise ConfigError when torch cannot use the device here. Imports torch."""
        import torch

        kind, _, index = self.device.partition(":")
        if kind == "cpu":
            return
        backend = getattr(torch, kind, None)
        if backend is None or not backend.is_available():
            raise ConfigError(
                f"device is {self.device!r}, but torch {torch.__version__} sees no {kind} device here; "
                "use device='cpu', or run `deepinfer doctor` to see what is missing"
            )
        if int(index or 0) >= backend.device_count():
            raise ConfigError(
                f"device is {self.device!r}, but torch sees {backend.device_count()} {kind} devices, "
                "numbered from 0; use one of these"
            )

    def resolve_for(self, model: ModelLimits) -> EngineConfig:
        """A copy with `max_model_len` and `replay_keep_tokens` filled in from the model's config.

        Raises ConfigError listing every option beyond what the model allows.
        """
        problems = []
        longest = model.max_position_embeddings
        if self.max_model_len is not None and self.max_model_len > longest:
            problems.append(f"max_model_len is {self.max_model_len}; the model has {longest} positions")
        drafts = model.dspark_block_size if model.num_nextn_predict_layers else 0
        keep = self.replay_keep_tokens or model.sliding_window + IN_FLIGHT_STEPS * (drafts + 1)
        if self.replay != "off" and keep < model.sliding_window:
            problems.append(
                f"replay_keep_tokens is {keep}, below the model's window of {model.sliding_window}; "
                "raise it, or switch replay off"
            )
        if problems:
            raise ConfigError(list_problems("EngineConfig", problems))
        return replace(self, max_model_len=min(self.max_model_len or longest, longest), replay_keep_tokens=keep)

    @classmethod
    def from_options(cls, model: Any, **options: Any) -> EngineConfig:
        """Like the constructor, but an unknown option is a ConfigError that lists the known ones."""
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(options) - set(known)):
            raise ConfigError(f"unknown options of the engine: {', '.join(unknown)}; known are {', '.join(known)}")
        return cls(model, **options)


_INTEGERS = {  # name: (lowest value, None allowed)
    "max_model_len": (2, True),
    "max_num_seqs": (1, False),
    "max_num_batched_tokens": (1, False),
    "kv_cache_memory_bytes": (1, True),
    "num_pages": (1, True),  # the reserved page 0 comes on top
    "page_size": (8, False),
    "seed": (0, True),
    "max_logprobs": (0, False),
    "replay_keep_tokens": (1, True),
}
_CHOICES = {
    "numerics": ("quantised", "exact"),
    "replay": ("compact", "mask", "off"),
    "async_scheduling": (True, False),
    "enable_prefix_caching": (True, False),
}
_FROM_ENVIRONMENT = {
    "async_scheduling": "DEEPINFER_ASYNC_SCHEDULING",
    "compile": "DEEPINFER_COMPILE",
    "replay": "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
    "replay_keep_tokens": "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
}
