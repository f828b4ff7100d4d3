"""Prefix hits from request to answer: when they are taken, what runs again, whose memory is left alone.

Belongs here: hits as the engine takes them, over the mock (which reads its whole history from the pages) and over the
tiny model. Does not belong here: keys and page states (tests/cache), rows that run again inside the model
(tests/model/test_prefix.py).
A hit at H runs the last KEEP rows below H again, so it is an approximation of a cold run wherever the model looks
further back than KEEP through its windows, and exact where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine.mock_engine import CONFIG, IMAGE, TOKENIZER, MockModel, mock_engine, poison_freed, run, text_prompt
from numpy.typing import NDArray

from deepinfer.config import EngineConfig
from deepinfer.engine.core import Engine
from deepinfer.engine.load import load_engine
from deepinfer.engine.requests import ImageSpan, Prompt
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.text.images import ImagePatches

# |difference| / |cold| of the first token's log-probabilities, centred, on `tiny` (16 of window, 9 layers). Random
# weights look back as far as they can, so this is the worst case: measured 0.10 to 0.49 (median 0.19) over twelve
# prompts with KEEP = 28, 0.012 to 0.024 with KEEP = 100, exactly 0 with KEEP = 144, which is more than 9 windows reach.
# Other kernels round elsewhere, hence the room above. Prompts that differ in the last token are 1.3 to 1.5 apart.
TOLERANCE = {28: 0.8, 100: 0.08, 144: 0.0, "unrelated": 1.0}
PAGE = 8
NARROW = replace(CONFIG, sliding_window=4)
KEEP = 6
SYSTEM = "You answer in short words and you never, ever tell a lie. Be kind.!"  # with BOS 8 pages and 4 tokens
FULL = len(TOKENIZER.encode(SYSTEM)) // PAGE * PAGE


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    """Engines over the mock with a narrow window; they must end idle."""
    made: list[Engine] = []

    def new(model: MockModel | None = None, **options: Any) -> Engine:
        chosen = {"replay_keep_tokens": KEEP, **options}
        made.append(mock_engine(model, model_config=NARROW, **chosen))
        return made[-1]

    yield new
    for engine in made:
        engine.check_idle()
        engine.close()


def ask(engine: Engine, prompt: Prompt | str, **params: Any) -> RequestOutput:
    chosen = SamplingParams(**{"max_tokens": 6, "seed": 3, "ignore_eos": True, **params})
    engine.add_request(text_prompt(prompt) if isinstance(prompt, str) else prompt, chosen, "only")
    result: RequestOutput = run(engine)["only"]
    return result


def hits(engine: Engine) -> tuple[int, int]:
    """Prompt tokens that were looked up, and found."""
    metrics = engine.metrics.read()
    return metrics.prefix_queried_tokens, metrics.prefix_hit_tokens


def pages_of(engine: Engine) -> list[torch.Tensor]:
    state = engine.runner.state
    return [t.view(torch.uint8).clone() for t in (*state.latent.values(), *state.index_key.values())]


# ---- that there are hits ----


def test_B17_a_shared_system_prompt_is_found(make: Callable[..., Engine]) -> None:
    engine, cold = make(), make(enable_prefix_caching=False)
    for i in range(4):
        prompt = f"{SYSTEM}{i} is my question"
        got, want = ask(engine, prompt), ask(cold, prompt)
        assert got.num_cached_tokens == (FULL if i else 0) and want.num_cached_tokens == 0
        assert got.outputs == want.outputs
    length = len(TOKENIZER.encode(f"{SYSTEM}0 is my question"))
    assert hits(engine) == (4 * length, 3 * FULL)
    assert engine.metrics.read().pages_cached > 0
    assert hits(cold) == (0, 0)


def test_B17_the_second_turn_finds_the_first_and_its_answer(make: Callable[..., Engine]) -> None:
    engine, cold = make(), make(enable_prefix_caching=False)
    ids = TOKENIZER.encode("User: what is a fox? Pip:")
    known = 0
    for _ in range(3):
        got, want = ask(engine, Prompt(list(ids)), max_tokens=20), ask(cold, Prompt(list(ids)), max_tokens=20)
        assert got.outputs == want.outputs
        assert got.num_cached_tokens == known // PAGE * PAGE
        known = len(ids) + 20 - 1  # the last token of an answer is never an input
        ids += [*got.outputs[0].token_ids, *TOKENIZER.encode_ordinary(" User: and why? Pip:")]
    assert hits(engine)[1] > 0


@pytest.mark.parametrize(
    ("change", "cached"), [(None, 24), (31, 24), (24, 24), (23, 16), (16, 16), (15, 8), (7, 0), (0, 0)]
)
def test_B17_one_changed_token_costs_the_pages_from_there(
    make: Callable[..., Engine], change: int | None, cached: int
) -> None:
    """32 tokens are 4 pages; the last token must run, so 3 of them can be found."""
    engine, cold = make(), make(enable_prefix_caching=False)
    ids = list(range(10, 42))
    ask(engine, Prompt(list(ids)))
    if change is not None:
        ids[change] = 200
    got = ask(engine, Prompt(ids))
    assert got.num_cached_tokens == cached
    assert got.outputs == ask(cold, Prompt(ids)).outputs


@pytest.mark.parametrize(("keep", "cached"), [(4, 8), (7, 0), (8, 0)])
def test_a_hit_that_saves_nothing_is_not_taken(make: Callable[..., Engine], keep: int, cached: int) -> None:
    """KEEP is rounded up to even: 7 runs 8 rows again, which is all that a page of 8 holds."""
    engine = make(replay_keep_tokens=keep)
    ask(engine, Prompt([5] * 9))
    assert ask(engine, Prompt([5] * 9)).num_cached_tokens == cached


# ---- what runs ----


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 5}, {"replay": "mask"}, {"async_scheduling": False}]
)
def test_the_last_keep_rows_run_again_and_write_nowhere(make: Callable[..., Engine], options: dict[str, Any]) -> None:
    model = MockModel()
    engine = make(model, **options)
    prompt = Prompt(list(range(10, 50)))
    first = ask(engine, prompt, max_tokens=2)
    before, done = pages_of(engine), len(model.steps)
    again = ask(engine, Prompt(list(prompt.token_ids)), max_tokens=2)
    assert again.num_cached_tokens == 32 and again.outputs == first.outputs
    steps = model.steps[done:]
    low, slot = 32 - KEEP, int(steps[0].slots[0])
    assert torch.cat([step.positions for step in steps]).tolist() == list(range(low, 41))
    for step in steps:
        assert step.ring_floor is not None and (step.ring_floor == low).all()
        assert step.kv_slots is not None
        assert step.kv_slots.tolist() == [0 if p < 32 else slot for p in step.positions.tolist()]
        assert (step.window_floor == max(low, 40 - KEEP)).all()
    shared = engine.runner.state.page_table[slot, :4].long()
    for was, now in zip(before, pages_of(engine), strict=True):
        assert torch.equal(was[shared], now[shared])


def test_look_back_ids_before_a_hit_are_remembered(make: Callable[..., Engine]) -> None:
    model = MockModel()
    engine = make(model)
    prompt = Prompt(list(range(10, 50)))
    ask(engine, prompt)
    engine.runner.state.history.fill_(77)
    ask(engine, Prompt(list(prompt.token_ids)), max_tokens=1)
    row = engine.runner.state.history[model.steps[-1].slots[0]].tolist()  # the mock writes none itself
    low = 32 - KEEP
    count = CONFIG.engram_max_ngram_size - 1
    assert [row[p % len(row)] for p in range(low - count, low)] == prompt.token_ids[low - count : low]


# ---- beside others ----


def test_concurrent_requests_hit_what_was_confirmed(make: Callable[..., Engine]) -> None:
    """The donor still runs; hits share its pages while it goes on writing its own."""
    engine, cold = make(num_pages=60, max_num_seqs=6), make(enable_prefix_caching=False)
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    engine.add_request(text_prompt(SYSTEM + "donor"), params, "donor")
    for _ in range(3):
        engine.step()
    used = engine.scheduler.pages.num_used
    for i in range(4):
        engine.add_request(text_prompt(f"{SYSTEM}{i}"), params, str(i))
    engine.step()
    assert engine.scheduler.pages.num_used <= used + 4 * 1 + 1  # one page each for what differs
    results = run(engine)
    for name in ("donor", *"0123"):
        assert results[name].num_cached_tokens == (0 if name == "donor" else FULL)
        cold.add_request(text_prompt(SYSTEM + name), params, "x")
        assert run(cold)["x"].outputs == results[name].outputs


def test_a_hit_saves_pages_from_a_donor_that_is_gone_while_its_step_runs(make: Callable[..., Engine]) -> None:
    """Pages of an aborted donor are fenced: a hit takes them back, nobody else gets them."""
    engine, cold = make(num_pages=12), make(enable_prefix_caching=False)
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    donor = engine.add_request(text_prompt(SYSTEM + "donor"), params, "donor")
    for _ in range(3):
        engine.step()
    engine.abort([donor])
    assert engine.scheduler.pages.num_fenced >= FULL // PAGE
    got = ask(engine, SYSTEM + "next")
    assert got.num_cached_tokens == FULL and got.outputs == ask(cold, SYSTEM + "next").outputs


def test_samples_of_a_hit_share_its_pages(make: Callable[..., Engine]) -> None:
    engine, cold = make(), make(enable_prefix_caching=False)
    ask(engine, SYSTEM + "one")
    got, want = ask(engine, SYSTEM + "more", n=4), ask(cold, SYSTEM + "more", n=4)
    assert got.num_cached_tokens == FULL and got.outputs == want.outputs
    assert len({tuple(output.token_ids) for output in got.outputs}) == 4


def test_preempted_requests_recompute_from_the_hit_they_had_or_from_the_start(make: Callable[..., Engine]) -> None:
    model = MockModel()
    engine, cold = make(model, num_pages=24), make(enable_prefix_caching=False)
    params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    ask(engine, SYSTEM)
    done = len(model.steps)
    for i in range(4):
        engine.add_request(text_prompt(f"{SYSTEM}{i}"), params, str(i))
    results = run(engine)
    assert engine.metrics.preemptions > 0
    first = [int((step.positions == place).sum()) for step in model.steps[done:] for place in (0, FULL - KEEP)]
    assert sum(first) == 4 + engine.metrics.preemptions
    for name, result in results.items():
        cold.add_request(text_prompt(SYSTEM + name), params, "x")
        assert run(cold)["x"].outputs == result.outputs


def test_pressure_evicts_the_oldest_and_the_ends_first(make: Callable[..., Engine]) -> None:
    engine, cold = make(num_pages=14), make(enable_prefix_caching=False)
    ask(engine, SYSTEM)  # leaves 8 pages and the one that its answer filled
    old = engine.scheduler.pages.num_idle
    assert old >= FULL // PAGE
    ask(engine, Prompt([300 + i for i in range(8 * 8 - 6)]))  # takes all others, and some of these
    got = ask(engine, SYSTEM)
    assert 0 < got.num_cached_tokens < FULL
    assert got.outputs == ask(cold, SYSTEM).outputs
    ask(engine, Prompt([400 + i % 90 for i in range(14 * 8 - 6)]))  # takes everything
    assert ask(engine, SYSTEM).num_cached_tokens == 0
    assert engine.scheduler.pages.num_free == 14


# ---- what must not be found ----


def image_prompt(pixel: float, grid: tuple[int, int] = (1, 1)) -> Prompt:
    patches = torch.full((grid[0] * grid[1], 3, 14, 14), pixel, dtype=torch.bfloat16)
    span = ImageSpan(12, 10, ImagePatches(patches, *grid, 1, 1, 10))
    return Prompt([*range(20, 32), *[IMAGE] * 10, *range(40, 60)], None, (span,))


@pytest.mark.parametrize(
    ("other", "cached"), [(image_prompt(0.5), 40), (image_prompt(0.25), 8), (image_prompt(0.5, (1, 2)), 8)]
)
def test_another_image_with_the_same_placeholders_is_another_prompt(
    make: Callable[..., Engine], other: Prompt, cached: int
) -> None:
    """Rows 12 to 22 show the image: the page before them is found, the pages from there on only for the same pixels."""
    engine = make()
    ask(engine, image_prompt(0.5))
    assert ask(engine, other).num_cached_tokens == cached


def test_image_rows_that_run_again_meet_their_embeddings(make: Callable[..., Engine]) -> None:
    """The hit is at 24, its first row at 18: in the middle of the image."""
    model = MockModel()
    engine = make(model)
    prompt = image_prompt(0.5)
    ask(engine, prompt)
    cut = Prompt([*prompt.token_ids[:28], 99], None, image_prompt(0.5).images)
    done = len(model.steps)
    engine.runner.state.history.fill_(77)
    assert ask(engine, cut, max_tokens=1).num_cached_tokens == 24
    (step,) = model.steps[done:]
    assert step.image_rows is not None and step.image_embeds is not None
    assert step.positions[step.image_rows].tolist() == [18, 19, 20, 21]
    assert step.image_embeds[:, 0].tolist() == [7.0, 8.0, 9.0, 10.0]
    row = engine.runner.state.history[step.slots[0]].tolist()
    assert [row[p % len(row)] for p in range(19 - CONFIG.engram_max_ngram_size, 18)] == [-1] * (
        CONFIG.engram_max_ngram_size - 1
    )


def test_hits_stay_within_a_namespace(make: Callable[..., Engine]) -> None:
    engine = make()
    ids = list(range(10, 50))
    for name, cached in (("a", 0), ("b", 0), ("a", 32), ("", 0)):
        assert ask(engine, Prompt(list(ids), namespace=name)).num_cached_tokens == cached


def test_prompt_logprobs_need_every_row_and_leave_pages_for_others(make: Callable[..., Engine]) -> None:
    engine = make()
    for logprobs, cached in ((0, 0), (0, 0), (None, FULL)):
        got = ask(engine, SYSTEM, prompt_logprobs=logprobs)
        assert got.num_cached_tokens == cached
        assert got.prompt_logprobs is None or len(got.prompt_logprobs) == len(TOKENIZER.encode(SYSTEM))


def test_the_cache_can_be_off_and_emptied(make: Callable[..., Engine]) -> None:
    off, engine = make(enable_prefix_caching=False), make()
    assert [ask(off, SYSTEM).num_cached_tokens for _ in range(2)] == [0, 0]
    assert off.reset_prefix_cache() is False
    assert [ask(engine, SYSTEM).num_cached_tokens for _ in range(2)] == [0, FULL]
    running = engine.add_request(text_prompt(SYSTEM), SamplingParams(max_tokens=30, seed=1, ignore_eos=True), "runs")
    for _ in range(4):
        engine.step()
    assert running.num_cached_tokens == FULL
    assert engine.reset_prefix_cache() is True
    assert engine.metrics.read().pages_cached == 0
    assert len(run(engine)["runs"].outputs[0].token_ids) == 30
    assert [ask(engine, SYSTEM).num_cached_tokens for _ in range(2)] == [0, FULL]


def test_a_step_that_broke_off_leaves_no_pages_to_find(make: Callable[..., Engine]) -> None:
    """Their content is undefined; the request that was running ends rightly."""
    model = MockModel()
    engine, cold = make(model), make(enable_prefix_caching=False)
    ask(engine, SYSTEM)

    def fail(step: object) -> None:
        model.before_step = lambda step: None
        raise RuntimeError("in the middle")

    model.before_step = fail
    engine.add_request(text_prompt(SYSTEM), SamplingParams(max_tokens=6, seed=3, ignore_eos=True), "x")
    with pytest.raises(RuntimeError):
        run(engine)
    result = run(engine)["x"]
    assert result.outputs == ask(cold, SYSTEM).outputs
    assert ask(engine, SYSTEM).num_cached_tokens == FULL


# ---- the model ----


def logprobs(result: RequestOutput, token: int = 0) -> NDArray[np.float64]:
    """Centred log-probabilities of the whole vocabulary."""
    at = (result.outputs[0].logprobs or [])[token]
    values = np.array([at[i].logprob for i in range(CONFIG.vocab_size)])
    return values - values.mean()


def error(got: NDArray[np.float64], want: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def tiny(**options: Any) -> Engine:
    chosen = {"page_size": 16, "num_pages": 60, "max_num_seqs": 4, "max_logprobs": CONFIG.vocab_size, **options}
    engine = load_engine(EngineConfig("tiny", **chosen))
    poison_freed(engine)
    return engine


@pytest.mark.parametrize("keep", [28, 100, 144])
def test_B17_logits_after_a_hit_are_those_of_a_cold_run_within_the_tolerance(keep: int) -> None:
    """Quantised numerics as people run them; a cold run, a hit, one changed token at the end."""
    errors = []
    for seed in range(4):
        engine = tiny(replay_keep_tokens=keep)
        ids = [int(i) for i in np.random.default_rng(seed).integers(3, 450, 169)]
        params = {"temperature": 0, "logprobs": CONFIG.vocab_size, "detokenize": False, "max_tokens": 8}
        cold = ask(engine, Prompt(list(ids)), **params)
        hit = ask(engine, Prompt(list(ids)), **params)
        ids[-1] = 460
        changed = ask(engine, Prompt(list(ids)), **params)
        assert [r.num_cached_tokens for r in (cold, hit, changed)] == [0, 160, 160]
        engine.reset_prefix_cache()
        changed_cold = ask(engine, Prompt(list(ids)), **params)
        errors += [error(logprobs(hit), logprobs(cold)), error(logprobs(changed), logprobs(changed_cold))]
        assert error(logprobs(changed_cold), logprobs(cold)) > TOLERANCE["unrelated"]
        assert all(np.isfinite(logprobs(r, 7)).all() for r in (hit, changed))
        if not TOLERANCE[keep]:
            assert hit.outputs == cold.outputs and changed.outputs == changed_cold.outputs
        engine.close()
    assert max(errors) <= TOLERANCE[keep], errors
    assert max(errors) > 0 or not TOLERANCE[keep]  # it is an approximation: an engine that ran everything shows up


def test_shared_pages_of_the_model_keep_their_bytes_and_answers_repeat() -> None:
    """Hits of several at once, in chunks, beside decode rows, with samples that fork."""
    engine = tiny(max_num_batched_tokens=40)
    ids = [int(i) for i in np.random.default_rng(9).integers(3, 450, 100)]
    ask(engine, Prompt(list(ids)), temperature=0)
    shared = torch.tensor(engine.scheduler.prefix.lookup(_keys(engine, ids)))  # type: ignore[union-attr]
    assert len(shared) == 6
    before = [pool[shared] for pool in pages_of(engine)]
    seen = []
    for _ in range(2):
        for i in range(4):
            params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=12, ignore_eos=True, n=1 + i % 2)
            engine.add_request(Prompt([*ids, 460 + i, *range(3, 3 + 3 * i)]), params, str(i))
        results = run(engine)
        assert [results[str(i)].num_cached_tokens for i in range(4)] == [96] * 4
        assert all(torch.equal(b, pool[shared]) for b, pool in zip(before, pages_of(engine), strict=True))
        seen.append({name: result.outputs for name, result in results.items()})
    assert seen[0] == seen[1]
    engine.close()


def _keys(engine: Engine, ids: list[int]) -> list[bytes]:
    from deepinfer.cache.prefix import extend_keys

    return extend_keys([], lambda a, b: ids[a:b], len(ids), engine.config.page_size)


def test_a_hit_reruns_a_window_at_least_where_replay_is_off_too(make: Callable[..., Engine]) -> None:
    assert make(replay="off", replay_keep_tokens=1).scheduler.prefix_keep == NARROW.sliding_window
