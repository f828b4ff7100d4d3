"""One answer, however it is scheduled: real models over chunks, batches, overlap, arrivals, preemption and forks.

Belongs here: whole requests through the engine over `tiny`, `tiny-realdims` and `small`. Does not belong here:
schedules drawn at random (test_core.py and test_storm.py, over the mock), rows of the model (tests/model), prefix hits,
which are approximations (test_prefix_engine.py).
`exact` is float32; `references` are quantised numerics through the batch-invariant reference ops: both give a row the
same bits in any batch, so log-probabilities are compared as well, bit for bit. `chosen` is what people run: quantised,
through the kernels that the registry chose; where those sum in another order, the margins of a trained model hold the
ids. All memory holds NaN (0xFF in records) at the start and whenever it is given up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from engine.mock_engine import poison_freed, run

from deepinfer import ops
from deepinfer.config import EngineConfig
from deepinfer.engine.core import Engine
from deepinfer.engine.load import checkpoint_folder
from deepinfer.engine.requests import Prompt
from deepinfer.engine.scheduler import Scheduler
from deepinfer.model import checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import CompletionOutput, RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.text.tokenizer import Tokenizer, engram_token_map

Answers = dict[str, list[CompletionOutput]]
Requests = dict[str, tuple[list[int], SamplingParams]]

BIT_EQUAL = ("exact", "references")
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
DRAWN = SamplingParams(top_p=0.9, max_tokens=4, ignore_eos=True)
# Around the window (16), KEEP (28), pages (8) and their ends.
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 20, 28, 29, 33, 58)


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint: many engines run over it."""

    config: ModelConfig
    tokenizer: Tokenizer
    transformer: Transformer

    def engine(self, **options: Any) -> Engine:
        chosen = {"num_pages": 300, "page_size": 8, "max_num_seqs": 16, "replay": "off", **options}
        config = EngineConfig(
            "any", numerics=self.transformer.numerics, enable_prefix_caching=False, max_model_len=400, **chosen
        )
        engine = Engine(config, self.config, self.transformer, self.tokenizer)
        poison_freed(engine)
        for pool in (engine.scheduler.pages, engine.scheduler.slots):
            for number in range(pool.total + 1):
                pool.on_reuse(number)
        return engine

    def ids(self, seed: int, length: int) -> list[int]:
        return [int(i) for i in np.random.default_rng(seed).integers(3, self.config.vocab_size - 60, length)]


@cache
def load(name: str, kind: str) -> Model:
    folder = checkpoint_folder(name)
    config, tokenizer = ModelConfig.from_dir(folder), Tokenizer(folder)
    weights = checkpoint.load_checkpoint(folder, config, device="cpu")
    token_map = engram_token_map(tokenizer, config.vocab_size, num_classes=config.engram_compressed_vocab_size)
    numerics = "exact" if kind == "exact" else "quantised"
    transformer = Transformer(config, weights, torch.from_numpy(token_map), numerics=numerics)  # type: ignore[arg-type]
    if kind == "references":
        transformer.ops = ops.EXACT
    return Model(config, tokenizer, transformer)


def answer(
    engine: Engine, requests: Requests, between: Callable[[Engine], list[RequestOutput]] | None = None
) -> Answers:
    """Outputs by name. `between` runs whenever a request was added, and returns what ended."""
    ended: list[RequestOutput] = []
    for name, (ids, params) in requests.items():
        engine.add_request(Prompt(list(ids)), params.replace(detokenize=False), name)
        ended += [] if between is None else between(engine)
    done = {result.request_id: result for result in ended} | run(engine)
    engine.close()
    assert done.keys() == requests.keys()
    assert all(result.error is None for result in done.values())
    return {name: result.outputs for name, result in done.items()}


def alone(model: Model, requests: Requests, **options: Any) -> Answers:
    """The reference: one at a time, in one piece, strictly serial."""
    found: Answers = {}
    for name, request in requests.items():
        found |= answer(model.engine(max_num_seqs=1, async_scheduling=False, **options), {name: request})
    return found


def mixed(model: Model, lengths: tuple[int, ...] = LENGTHS) -> Requests:
    """Greedy with logprobs and drawn ones in turn."""
    params = [GREEDY if i % 2 else DRAWN.replace(seed=i) for i in range(len(lengths))]
    return {f"{i}": (model.ids(i, n), params[i]) for i, n in enumerate(lengths)}


@cache
def tiny_alone(kind: str, replay: str) -> Answers:
    model = load("tiny", kind)
    requests = mixed(model)
    if replay != "off":  # only these have rows that replay drops
        requests = {name: request for name, request in requests.items() if len(request[0]) > 28}
    return alone(model, requests, replay=replay)


KINDS = pytest.mark.parametrize("kind", BIT_EQUAL)

# ---- tiny ----


@KINDS
@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 128},
        {"max_num_batched_tokens": 37},
    ],
    ids=["whole", "serial", "128", "37"],
)
def test_sixteen_at_once_are_like_each_alone(kind: str, options: dict[str, Any]) -> None:
    model = load("tiny", kind)
    assert answer(model.engine(**options), mixed(model)) == tiny_alone(kind, "off")


@KINDS
@pytest.mark.parametrize("replay", ["compact", "mask"])
def test_replay_does_not_make_an_answer_depend_on_the_schedule(kind: str, replay: str) -> None:
    """Those longer than KEEP against themselves alone, in chunks beside the others. `mask` equals `compact`."""
    model = load("tiny", kind)
    want = tiny_alone(kind, "compact")
    got = answer(model.engine(replay=replay, max_num_batched_tokens=37), mixed(model))
    assert {name: got[name] for name in want} == want
    assert {name: got[name] for name in got.keys() - want} == {
        name: outputs for name, outputs in tiny_alone(kind, "off").items() if name not in want
    }
    if kind == "exact":  # and it does change what a long prompt gives: the comparison is not empty
        assert [o[0].logprobs for o in want.values()] != [tiny_alone(kind, "off")[name][0].logprobs for name in want]


@KINDS
@pytest.mark.parametrize("replay", ["off", "compact"])
def test_arrivals_between_steps_change_nothing(kind: str, replay: str) -> None:
    model = load("tiny", kind)
    requests = {name: request for name, request in mixed(model).items() if len(request[0]) > 12}
    got = answer(model.engine(replay=replay), dict(reversed(requests.items())), between=Engine.step)
    want = tiny_alone(kind, "off") | tiny_alone(kind, replay)
    assert got == {name: want[name] for name in requests}


@KINDS
def test_a_prompt_row_by_row(kind: str) -> None:
    """Chunks of one row need one slot."""
    model = load("tiny", kind)
    requests = {name: request for name, request in mixed(model).items() if len(request[0]) in (17, 20)}
    got = answer(model.engine(max_num_seqs=1, max_num_batched_tokens=1), requests)
    assert got == {name: tiny_alone(kind, "off")[name] for name in requests}


LONGER = (15, 9, 36)  # the last in rank is preempted: replay drops 8 of its rows


def longer(model: Model) -> Requests:
    params = (GREEDY.replace(logprobs=None), DRAWN.replace(seed=5), GREEDY)
    return {
        str(i): (model.ids(50 + i, n), p.replace(max_tokens=14))
        for i, (n, p) in enumerate(zip(LONGER, params, strict=True))
    }


@cache
def longer_roomy(kind: str, replay: str) -> Answers:
    model = load("tiny", kind)
    return answer(model.engine(replay=replay, async_scheduling=False), longer(model))


@pytest.mark.parametrize(
    ("kind", "replay", "overlap"),
    [
        ("exact", "off", True),
        ("exact", "compact", True),
        ("exact", "compact", False),
        ("exact", "mask", True),
        ("references", "compact", True),
    ],
)
def test_preempted_requests_answer_like_others(kind: str, replay: str, overlap: bool) -> None:
    """A pool of eleven pages, where 14 are wanted; what is recomputed keeps its replay floor."""
    model = load("tiny", kind)
    engine = model.engine(num_pages=11, replay=replay, async_scheduling=overlap)
    preempted = count_preemptions(engine.scheduler)
    assert answer(engine, longer(model)) == longer_roomy(kind, "off" if replay == "off" else "compact")
    assert "2" in preempted


def count_preemptions(scheduler: Scheduler) -> list[str]:
    """Names of requests that will have been preempted with output."""
    names: list[str] = []
    true_preempt = scheduler._preempt

    def preempt(seq: Any) -> None:
        if seq.output_ids:
            names.append(seq.request.request_id)
        true_preempt(seq)

    scheduler._preempt = preempt  # type: ignore[method-assign]
    return names


@KINDS
def test_forks_answer_like_samples_with_a_prefill_of_their_own(kind: str) -> None:
    """n = 4 in 16 slots share the prompt's pages and copy the rest; in one slot each sample runs the prompt itself.
    Prompts end inside a page, at its end, and at an odd row (an open pair of the ratio-2 sources).
    """
    model = load("tiny", kind)
    requests = {str(n): (model.ids(n, n), DRAWN.replace(seed=n, n=4, logprobs=1)) for n in (21, 24)}
    engine = model.engine(replay="compact")
    got = answer(engine, requests)
    assert engine.metrics.prompt_rows == 21 + 24
    own = model.engine(replay="compact", max_num_seqs=1)
    assert answer(own, requests) == got
    assert own.metrics.prompt_rows == 4 * (21 + 24)
    assert all(len({tuple(output.token_ids) for output in outputs}) > 1 for outputs in got.values())


# ---- tiny-realdims: real head, window, index and expert counts; rows are dear here ----


@KINDS
def test_real_dimensions_answer_alike(kind: str) -> None:
    """Everything at once: arrivals between steps, chunks of 13, overlap, one preemption, against alone."""
    model = load("tiny-realdims", kind)
    requests = {
        name: (ids, params.replace(max_tokens=3)) for name, (ids, params) in mixed(model, lengths=(3, 20, 9)).items()
    }

    def between(engine: Engine) -> list[RequestOutput]:
        ended = engine.step()
        if len(engine.requests) == 2:
            engine.scheduler._preempt(engine.scheduler.running[-1])
        return ended

    engine = model.engine(max_num_batched_tokens=16, replay="compact")
    got = answer(engine, requests, between)
    assert engine.metrics.preemptions == 1
    assert got == alone(model, requests)


def test_real_dimensions_beyond_the_window() -> None:
    """145 rows, 140 of them kept, in one piece and in chunks."""
    model = load("tiny-realdims", "exact")
    requests = {"long": (model.ids(1, 145), GREEDY.replace(max_tokens=2))}
    whole = answer(model.engine(replay="compact", async_scheduling=False), requests)
    assert answer(model.engine(replay="compact", max_num_batched_tokens=37), requests) == whole


# ---- small: what people run ----

TEXTS = (
    "Once upon a time",
    "One day, a girl named Mia went to the park with her mom.",
    "The fox saw a big red ball. He wanted to play, but",
    "Tom and his dog",
)


def stories(model: Model) -> Requests:
    """16 prompts of 5 to 161 tokens, the longest last."""
    found: Requests = {}
    for i in range(16):
        text = " ".join([*(TEXTS[(i + j) % 4] + "." for j in range(i)), TEXTS[i % 4]])
        params = SamplingParams(temperature=0) if i % 2 else SamplingParams(top_p=0.9, seed=i)
        found[str(i)] = (model.tokenizer.encode(text), params.replace(max_tokens=24, ignore_eos=True))
    return found


def ids_of(answers: Answers) -> dict[str, list[list[int]]]:
    return {name: [output.token_ids for output in outputs] for name, outputs in answers.items()}


@cache
def small_alone(replay: str) -> Answers:
    model = load("small", "chosen")
    return alone(model, stories(model), replay=replay)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 128},
        {"max_num_batched_tokens": 37},
        {"num_pages": 64},
        {"replay": "compact"},
        {"replay": "compact", "num_pages": 64},
        {"replay": "mask", "num_pages": 64, "max_num_batched_tokens": 37},
    ],
    ids=lambda options: ", ".join(f"{k} {v}" for k, v in options.items()) or "whole",
)
def test_small_says_the_same_however_it_is_scheduled(options: dict[str, Any]) -> None:
    model = load("small", "chosen")
    engine, requests = model.engine(**options), stories(model)
    preempted = count_preemptions(engine.scheduler)
    got = ids_of(answer(engine, requests))
    assert got == ids_of(small_alone("compact" if "replay" in options else "off"))
    if "num_pages" in options:  # also one that has rows below its replay floor
        assert max(len(requests[name][0]) for name in preempted) > 1.2 * (engine.config.replay_keep_tokens or 0)


def test_small_row_by_row() -> None:
    model = load("small", "chosen")
    requests = dict(list(stories(model).items())[:4])
    got = answer(model.engine(max_num_seqs=1, max_num_batched_tokens=1), requests)
    assert ids_of(got) == {name: ids_of(small_alone("off"))[name] for name in requests}


def test_small_forks_and_arrivals() -> None:
    model = load("small", "chosen")
    requests = stories(model)
    for name, (ids, params) in requests.items():
        requests[name] = (ids, params.replace(n=1 if params.greedy else 3))
    together = answer(model.engine(max_num_seqs=24), requests, between=Engine.step)
    for name, outputs in small_alone("off").items():
        assert together[name][0].token_ids == outputs[0].token_ids
    own = answer(model.engine(max_num_seqs=1), {name: requests[name] for name in ("0", "6")})
    assert ids_of(own) == {name: ids_of(together)[name] for name in own}
