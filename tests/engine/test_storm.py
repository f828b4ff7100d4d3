"""Ten thousand small requests through a pool of a few pages: all end, answers are right, nothing grows.

Belongs here: what only many requests show. Does not belong here: one rule at a time (test_core.py, test_bugs.py).
The mock reads its whole history back from poisoned memory, so a page that was reused too early is NaN in its logits.
"""

from __future__ import annotations

import gc
import zlib
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine.mock_engine import CONFIG, EOS, IMAGE, VOCAB, MockModel, mock_engine
from torch import Tensor

from deepinfer.engine.core import Engine
from deepinfer.engine.requests import Prompt, Request
from deepinfer.engine.sampler import SamplingRow, sample
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams

REQUESTS = 10_000
TOLERANCE = {"objects kept by the second half": 500}  # a tenth of an object for each of 5,000 requests
NARROW = replace(CONFIG, sliding_window=4)  # short prompts can hit the prefix cache: KEEP = 4 < page of 8
ROWS = torch.randn((1 << 12, VOCAB), generator=torch.Generator().manual_seed(0))
ROWS[:, EOS] += 2.5  # ends about one sequence in four early
ROWS[:, IMAGE] += 9.0  # would win everywhere if it were not forbidden
BEST = ROWS.index_fill(1, torch.tensor([IMAGE]), -torch.inf).argmax(1).tolist()  # the greedy token of each
STARTS = [[(5 * i + 3 * j) % 250 + 3 for j in range(16)] for i in range(6)]  # prompts share these: hits


def place(history: list[int]) -> int:
    return zlib.crc32(np.array(history, np.int32).tobytes()) % len(ROWS)


def cheap(history: list[int]) -> Tensor:
    """A row of `ROWS` that only this history finds."""
    return ROWS[place(history)]


def draw(rng: np.random.Generator) -> tuple[Prompt, SamplingParams, int]:
    length = int(rng.integers(1, 21))
    start = STARTS[rng.integers(len(STARTS))] if rng.random() < 0.5 else []
    ids = [*start, *(int(i) for i in rng.integers(3, 250, 20))][:length]
    n = int(rng.choice([1, 1, 1, 1, 1, 2, 3]))
    options: dict[str, Any] = {
        "max_tokens": int(rng.integers(1, 9)),
        "temperature": float(n > 1 or rng.random() < 0.5),
        "seed": int(rng.integers(1 << 40)),
        "n": n,
        "ignore_eos": bool(rng.random() < 0.5),
    }
    if rng.random() < 0.1:
        options["stop"] = [chr(int(c)) for c in rng.integers(32, 120, 30)]
    if rng.random() < 0.05:
        options["logprobs"] = 1
    if rng.random() < 0.03:
        options["prompt_logprobs"] = 0
    return Prompt(ids), SamplingParams(**options), int(rng.integers(0, 3))


def check(request: Request, result: RequestOutput, aborted: bool) -> int:
    """That the answer is the one of this history, whatever ran beside it. Returns the number of tokens."""
    params, total = request.params, 0
    assert result.finished and result.error is None
    for output in result.outputs:
        ids = output.token_ids
        reason = output.finish_reason
        assert reason in ("stop", "length") or (aborted and reason == "abort")
        assert len(ids) <= params.max_tokens and IMAGE not in ids
        assert len(ids) == params.max_tokens or reason != "length"
        row = request.sequences[output.index].sampling_row()
        row.output_ids, row.position = [], len(result.prompt_token_ids)
        for token in ids:
            assert token == expected(row)
            row.append(token)
        total += len(ids)
    return total


def expected(row: SamplingRow) -> int:
    history = [*row.prompt_ids, *row.output_ids]
    if row.params.greedy:
        return int(BEST[place(history)])
    return sample(cheap(history).unsqueeze(0), [row])[0].token_id


def storm(engine: Engine, requests: int, seed: int, sampled_share: float) -> dict[str, int]:
    """Keep up to 40 requests queued until all were served; some are aborted. Answers of a share of them are checked."""
    rng = np.random.default_rng(seed)
    live: dict[str, Request] = {}
    aborted: set[str] = set()
    done = dict.fromkeys(("finished", "aborted", "tokens"), 0)

    def end(result: RequestOutput) -> None:
        request = live.pop(result.request_id)
        if rng.random() < sampled_share:
            done["tokens"] += check(request, result, result.request_id in aborted)

    made = 0
    while made < requests or live:
        while made < requests and len(live) < 40 and rng.random() < 0.9:
            prompt, params, priority = draw(rng)
            request = engine.add_request(prompt, params, f"r{made}", priority=priority)
            live[request.request_id] = request
            made += 1
        if live and rng.random() < 0.02:
            victim = list(live.values())[rng.integers(len(live))]
            engine.abort([victim])
            aborted.add(victim.request_id)
            done["aborted"] += 1
            end(victim.output())
        for result in engine.step():
            done["finished"] += 1
            end(result)
    engine.check_idle()
    return done


def count_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def assert_empty(engine: Engine) -> None:
    scheduler, runner = engine.scheduler, engine.runner
    assert not (engine.requests or engine._in_flight)
    assert not (scheduler.waiting or scheduler.running or scheduler.prefilling)
    assert not any(scheduler.table.seqs) and not scheduler.table.decoding.any()
    builder = scheduler._builder
    assert not (builder.chunks or builder.page_updates or builder.slot_copies or builder.page_copies)
    assert not (builder.admitted or builder.remember)
    assert scheduler.pages.num_free == scheduler.pages.total and scheduler.slots.num_free == scheduler.slots.total
    assert scheduler.prefix is None or len(scheduler.prefix) == scheduler.pages.num_idle
    assert all(buffer.numel() <= 1 << 15 for buffer in runner._buffers)


def small_pool(**options: Any) -> Engine:
    model = MockModel(cheap)
    model.steps = deque(maxlen=2)  # type: ignore[assignment]
    chosen = {"num_pages": 12, "max_num_seqs": 10, "max_num_batched_tokens": 40, "replay_keep_tokens": 4, **options}
    return mock_engine(model, model_config=NARROW, **chosen)


def test_ten_thousand_requests_through_twelve_pages() -> None:
    engine, objects = small_pool(), []
    for half in range(2):
        done = storm(engine, REQUESTS // 2, seed=half, sampled_share=0.2)
        assert done["finished"] + done["aborted"] == REQUESTS // 2
        assert done["finished"] > 4 * done["aborted"] > 200 and done["tokens"] > REQUESTS / 5
        objects.append(count_objects())
        assert_empty(engine)
    assert engine.metrics.preemptions > 100  # the pool was too small, as it should be
    assert engine.scheduler.prefix is not None and engine.scheduler.prefix.hits > 1000
    assert objects[1] - objects[0] < TOLERANCE["objects kept by the second half"]
    engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 4, "max_num_seqs": 16},  # the largest request takes the whole pool
        {"max_num_seqs": 1, "max_num_batched_tokens": 3},
        {"async_scheduling": False},
        {"replay": "mask"},
        {"replay": "off", "enable_prefix_caching": False, "max_num_batched_tokens": 512, "num_pages": 400},
    ],
    ids=["one request fills it", "one slot", "serial", "mask", "plenty"],
)
def test_a_shorter_storm_answers_all_rightly(options: dict[str, Any]) -> None:
    engine = small_pool(**options)
    done = storm(engine, 300, seed=2, sampled_share=1.0)
    assert done["finished"] + done["aborted"] == 300
    assert_empty(engine)
    engine.close()


def test_the_poison_reaches_logits_of_an_engine_that_frees_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storm's own check: without fences it fails."""
    engine = small_pool(num_pages=6)
    pages = engine.scheduler.pages
    monkeypatch.setattr(pages, "launched", lambda step: None)  # nothing is ever fenced
    with pytest.raises(AssertionError, match="read of freed memory"):
        storm(engine, 2000, seed=3, sampled_share=1.0)
    engine.close()
