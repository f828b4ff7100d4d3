"""What a caller may ask of one request: `SamplingParams` and `StructuredOutput`.

Belongs here: fields, defaults, and every rule that can be checked without running the model; all broken rules
come in one `RequestError`. Does not belong here: applying them (engine/sampler.py, text/detokenizer.py).
Meanings and defaults are those users know from other offline engines (spec/engine.md 7.2).
No torch, no numpy.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from deepinfer.errors import CheckpointError, RequestError, UnsupportedError, list_problems, subjects

GREEDY_BELOW = 1e-5  # temperatures under this are greedy: logits / temperature would drown the noise in FP32
MAX_N = 4096
MAX_BIAS = 100.0  # beyond this a bias is a mask in disguise; the OpenAI API has the same limit

_KINDS = ("json_schema", "regex", "ebnf", "json_object", "choice", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """A constraint on the generated text: exactly one kind, and from where on it holds.

    json_schema: JSON Schema as a dict, its JSON text, or a pydantic model class (stored as a dict).
    regex / ebnf: pattern or grammar as text. json_object: True for any JSON object. choice: the texts to
    choose from. structural_tag: xgrammar's tag description, dict or JSON text (stored as a dict).
    after_reasoning: constrain only what follows the end of the reasoning block.
    Raises RequestError listing every broken rule.
    """

    json_schema: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_object: bool | None = None
    choice: Sequence[str] | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    after_reasoning: bool = False

    def __post_init__(self) -> None:
        problems: list[str] = []
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            problems.append(f"needs exactly one of {', '.join(_KINDS)}; got {', '.join(given) or 'none'}")
        for name in ("regex", "ebnf"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                problems.append(f"{name} is {value!r}; it must be a non-empty string")
        if self.json_object is not None and self.json_object is not True:
            problems.append(f"json_object is {self.json_object!r}; give True or leave it out")
        if self.choice is not None:
            if _is_strings(self.choice) and self.choice and len(set(self.choice)) == len(self.choice):
                object.__setattr__(self, "choice", tuple(self.choice))
            else:
                problems.append(f"choice is {self.choice!r}; it must be a list of different non-empty strings")
        for name in ("json_schema", "structural_tag"):
            try:
                object.__setattr__(self, name, _json_dict(getattr(self, name)))
            except (TypeError, ValueError) as error:
                problems.append(f"{name}: {error}")
        problems += _not_flags(self, ("after_reasoning",))
        if problems:
            raise RequestError(list_problems("StructuredOutput", problems))

    @property
    def kind(self) -> str:
        """The name of the one field that is set."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)


def _json_dict(value: Any) -> Mapping[str, Any] | None:
    if value is not None and hasattr(value, "model_json_schema"):  # a pydantic model class, without importing pydantic
        value = value.model_json_schema()
    if isinstance(value, str):
        value = json.loads(value)
    if value is None or (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        return value
    raise TypeError(f"expected a JSON object as dict or text, got {value!r}")


def _is_strings(value: Any) -> bool:
    """Whether `value` is a collection (not a str) of non-empty strings."""
    return (
        isinstance(value, Collection)
        and not isinstance(value, (str, bytes))
        and all(isinstance(item, str) and item for item in value)
    )


def _not_flags(params: object, names: Iterable[str]) -> list[str]:
    values = {name: getattr(params, name) for name in names}
    return [f"{name} is {v!r}; it must be True or False" for name, v in values.items() if not isinstance(v, bool)]


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. Immutable; raises RequestError listing every broken rule.

    Order of work on a row of logits (engine/sampler.py): forbidden and allowed ids, bad words, min_tokens,
    logit_bias, repetition / frequency / presence penalty, temperature, min_p, top_k, top_p, draw.
    Each field's `metadata["help"]` is its documentation; the command line shows the same text.
    After construction `stop`, `stop_token_ids`, `bad_words`, `allowed_token_ids` are tuples, `logit_bias` is
    a dict of int to float, `so_args` is a `StructuredOutput` or None, and `seed == seq_seed`.
    """

    n: int = field(default=1, metadata=_help("sequences to sample from the prompt"))
    temperature: float = field(
        default=1.0, metadata=_help("divides the logits before the draw; 0 takes the most probable token")
    )
    top_p: float = field(
        default=1.0,
        metadata=_help("keep the most probable tokens until their probabilities sum to this; 1 = all"),
    )
    top_k: int = field(default=0, metadata=_help("keep this many most probable tokens; 0 or -1 = all"))
    min_p: float = field(
        default=0.0,
        metadata=_help("drop tokens less probable than this share of the most probable one; 0 = none"),
    )
    presence_penalty: float = field(default=0.0, metadata=_help("subtracted from logits of tokens generated before"))
    frequency_penalty: float = field(default=0.0, metadata=_help("the same, times how often each was generated"))
    repetition_penalty: float = field(
        default=1.0,
        metadata=_help("divides positive, multiplies negative logits of tokens in the prompt or output"),
    )
    seed: int | None = field(default=None, metadata=_help("alias of seq_seed"))
    seq_seed: int | None = field(
        default=None,
        metadata=_help("64-bit seed of this request's draws; without one the engine draws a seed"),
    )
    stop: str | Sequence[str] = field(default=(), metadata=_help("text that ends the output (one string or a list)"))
    stop_token_ids: Sequence[int] = field(default=(), metadata=_help("token ids that end the output, besides EOS"))
    include_stop_str_in_output: bool = field(
        default=False, metadata=_help("keep the stop string at the end of the text")
    )
    ignore_eos: bool = field(default=False, metadata=_help("go on after EOS"))
    max_tokens: int | None = field(
        default=16, metadata=_help("most tokens to generate; None = as many as the context holds")
    )
    min_tokens: int = field(default=0, metadata=_help("no EOS, stop token or stop string before this many tokens"))
    logprobs: int | None = field(
        default=None,
        metadata=_help("logprobs per output token: the sampled one and this many most probable ones"),
    )
    prompt_logprobs: int | None = field(default=None, metadata=_help("the same for prompt tokens"))
    logit_bias: Mapping[int, float] | None = field(
        default=None, metadata=_help("added to the logits of these token ids, -100 to 100")
    )
    allowed_token_ids: Sequence[int] | None = field(
        default=None, metadata=_help("only these token ids may be generated")
    )
    bad_words: Sequence[str] = field(default=(), metadata=_help("texts whose token sequences are never completed"))
    detokenize: bool = field(default=True, metadata=_help("return text; False returns token ids only"))
    skip_special_tokens: bool = field(default=True, metadata=_help("leave special tokens out of the text"))
    so_args: StructuredOutput | Mapping[str, Any] | None = field(
        default=None, metadata=_help("structured output: one kind of constraint")
    )

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name, (rule, text) in _NUMBER_RULES.items():
            self._set_number(name, rule, text, problems)
        problems += _not_flags(self, _FLAGS)
        self._set_collections(problems)
        self._set_so_args(problems)
        problems += self._conflicts(subjects(problems))
        if problems:
            raise RequestError(list_problems("SamplingParams", problems))
        seed = self.seed if self.seq_seed is None else self.seq_seed
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "seq_seed", seed)

    def _set_number(self, name: str, rule: Callable[[Any], bool], text: str, problems: list[str]) -> None:
        value = getattr(self, name)
        if value is None and name in _NONE_ALLOWED:
            return
        try:
            number = _real(value) if name in _REALS else _integer(value)
            valid = rule(number)
        except (TypeError, ValueError, OverflowError):
            valid = False
        if valid:
            object.__setattr__(self, name, number)
        else:
            kind = "a finite number" if name in _REALS else "an integer"
            problems.append(f"{name} is {value!r}; it must be {kind} {text}")

    def _set_collections(self, problems: list[str]) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, strings in (("stop", stop), ("bad_words", self.bad_words)):
            if strings is None or _is_strings(strings):
                object.__setattr__(self, name, tuple(strings or ()))
            else:
                problems.append(f"{name} is {getattr(self, name)!r}; it must hold non-empty strings only")
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            try:
                ids = None if value is None else _token_ids(value)
            except (TypeError, ValueError):
                problems.append(f"{name} is {value!r}; it must be a list of token ids (integers from 0)")
                continue
            object.__setattr__(self, name, () if ids is None and name == "stop_token_ids" else ids)
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            problems.append("allowed_token_ids is empty, so that no token could be generated; use None to allow all")
        if self.logit_bias is not None:
            try:
                bias = {_token_ids([key])[0]: _real(value) for key, value in self.logit_bias.items()}
            except (AttributeError, TypeError, ValueError, OverflowError):
                problems.append(f"logit_bias is {self.logit_bias!r}; it must map token ids to finite numbers")
                return
            object.__setattr__(self, "logit_bias", bias)
            problems += [
                f"logit_bias of token {key} is {value:g}; biases lie in [-{MAX_BIAS:g}, {MAX_BIAS:g}] "
                "(allowed_token_ids and bad_words force and forbid)"
                for key, value in bias.items()
                if abs(value) > MAX_BIAS
            ]

    def _set_so_args(self, problems: list[str]) -> None:
        value: Any = self.so_args
        if value is None or isinstance(value, StructuredOutput):
            return
        if not isinstance(value, Mapping):
            problems.append(f"so_args is {value!r}; it must be a StructuredOutput or a dict of its fields")
            return
        known = [f.name for f in fields(StructuredOutput)]
        if unknown := [key for key in value if key not in known]:
            problems.append(f"so_args has unknown keys {unknown}; known are {', '.join(known)}")
            return
        try:
            object.__setattr__(self, "so_args", StructuredOutput(**value))
        except RequestError as error:
            problems.append(f"so_args: {error}")

    def _conflicts(self, bad: set[str]) -> list[str]:
        """Rules between fields, for those that are not `bad` by themselves."""
        problems = []
        sound = bad.isdisjoint
        if sound(("seed", "seq_seed")) and len({self.seed, self.seq_seed} - {None}) > 1:
            problems.append(
                f"seed is {self.seed} and seq_seed is {self.seq_seed}; they are one value, give one of them"
            )
        most = self.max_tokens
        if sound(("max_tokens", "min_tokens")) and most is not None and self.min_tokens > most:
            problems.append(f"min_tokens is {self.min_tokens}, above max_tokens = {most}")
        if sound(("n", "temperature")) and self.n > 1 and self.greedy:
            problems.append(
                f"n is {self.n} at temperature {self.temperature:g}, where all samples are equal; "
                "use n=1 or a higher temperature"
            )
        if sound(("stop", "detokenize")) and self.stop and not self.detokenize:
            problems.append("stop strings need text: set detokenize=True or use stop_token_ids")
        return problems

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, without a draw."""
        return self.temperature < GREEDY_BELOW

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed; changing one of seed and seq_seed changes both."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if "seed" in changes or "seq_seed" in changes:
            values["seed"] = values["seq_seed"] = None
        return SamplingParams(**{**values, **changes})

    @classmethod
    def defaults_from(cls, generation_config: Mapping[str, Any]) -> SamplingParams:
        """What a request without parameters uses: the checkpoint's own recommendations.

        generation_config: the content of generation_config.json.
        Reads temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens and do_sample (an explicit
        false means greedy); other keys and nulls are ignored. Raises CheckpointError naming every unusable
        value.
        """
        names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
        names["max_new_tokens"] = "max_tokens"
        values = {
            ours: generation_config[theirs]
            for theirs, ours in names.items()
            if generation_config.get(theirs) is not None
        }
        if generation_config.get("do_sample") is False:
            values["temperature"] = 0.0
        try:
            return cls(**values)
        except RequestError as error:
            raise CheckpointError(f"generation_config.json: {error}") from error

    @classmethod
    def defaults_of(cls, folder: str | Path) -> SamplingParams:
        """`defaults_from` the generation_config.json of a checkpoint folder; the plain defaults where it has none."""
        file = Path(folder, "generation_config.json")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{file} must hold a JSON object, found {type(content).__name__}")
        return cls.defaults_from(content)

    def bad_word_ids(self, encode: Callable[[str], Iterable[int]]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of `bad_words`: each word as it begins a text and as it follows a space.

        `encode` maps text to ids and adds no special token. A sequence's last id is forbidden when the ids
        before it have just been generated; other ways to spell the same text stay possible.
        """
        spellings = (spelling for word in self.bad_words for spelling in (word.lstrip() or word, " " + word.lstrip()))
        return tuple(dict.fromkeys(tuple(encode(spelling)) for spelling in spellings))

    def validate_for(
        self,
        vocab_size: int,
        *,
        max_logprobs: int | None = None,
        forbidden_ids: Collection[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """Check what depends on the model; the engine calls this before it queues a request.

        forbidden_ids: ids that this model never generates. bad_word_ids: what `bad_word_ids()` returned.
        Raises RequestError listing every broken rule; UnsupportedError when `so_args` is set, because this
        version does not enforce a grammar and must not run without it.
        """
        if self.so_args is not None:
            raise UnsupportedError(
                "structured output (so_args) is checked but not enforced in this version; leave so_args out "
                "and validate the text after generation"
            )
        problems = []
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if beyond := [i for i in getattr(self, name) or () if i >= vocab_size]:
                problems.append(f"{name} holds {_some(beyond)}; this vocabulary has the ids 0 to {vocab_size - 1}")
        most = vocab_size if max_logprobs is None else min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            if (wanted := getattr(self, name)) is not None and wanted > most:
                problems.append(f"{name} is {wanted}; this engine gives at most {most} (option max_logprobs)")
        if self.bad_words and not bad_word_ids:
            problems.append("bad_words need a tokenizer; use logit_bias or allowed_token_ids with ids")
        if any(not ids for ids in bad_word_ids):
            problems.append("a bad word has no token in this vocabulary; remove it")
        never = {*forbidden_ids, *(ids[0] for ids in bad_word_ids if len(ids) == 1)}
        if self.allowed_token_ids is not None and never.issuperset(self.allowed_token_ids):
            problems.append(
                f"allowed_token_ids {_some(self.allowed_token_ids)} are all forbidden, by bad_words or by "
                "the model; allow another id"
            )
        if problems:
            raise RequestError(list_problems("SamplingParams", problems))


def _real(value: Any) -> float:
    if isinstance(value, (bool, str, bytes)) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _token_ids(values: Iterable[Any]) -> tuple[int, ...]:
    ids = tuple(_integer(value) for value in values)
    if any(i < 0 for i in ids):
        raise ValueError
    return ids


def _some(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:5])) + (f" and {len(values) - 5} more" if len(values) > 5 else "")


_REALS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
_NONE_ALLOWED = ("seed", "seq_seed", "max_tokens", "logprobs", "prompt_logprobs")
_SEED_RULE: tuple[Callable[[Any], bool], str] = (lambda x: 0 <= x < 2**64, "from 0 to 2**64 - 1")
_NUMBER_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda x: 1 <= x <= MAX_N, f"from 1 to {MAX_N}"),
    "temperature": (lambda x: x >= 0, "from 0 (greedy) on"),
    "top_p": (lambda x: 0 < x <= 1, "above 0, at most 1 (all)"),
    "top_k": (lambda x: x >= -1, "from 1 on, or 0 or -1 for all"),
    "min_p": (lambda x: 0 <= x <= 1, "from 0 (none) to 1"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "from -2 to 2"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "from -2 to 2"),
    "repetition_penalty": (lambda x: x > 0, "above 0 (1 = none)"),
    "seed": _SEED_RULE,
    "seq_seed": _SEED_RULE,
    "max_tokens": (lambda x: x >= 1, "from 1 on, or None for as many as the context holds"),
    "min_tokens": (lambda x: x >= 0, "from 0 on"),
    "logprobs": (lambda x: x >= 0, "from 0 on, or None"),
    "prompt_logprobs": (lambda x: x >= 0, "from 0 on, or None"),
}
