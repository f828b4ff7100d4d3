"""The scheduler against its promises: budget, order, exclusive memory, progress, nothing leaked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cache.pages import pages_for
from deepinfer.engine.requests import ImageSpan, Prompt, Request, Sequence
from deepinfer.engine.scheduler import PROMPT_LOGPROB_ROWS, Scheduler, StepPlan
from deepinfer.params import SamplingParams

PAGE = 8


def make_request(
    name: str, prompt: int, new: int, *, floor: int = 0, images: tuple[ImageSpan, ...] = (), **params: Any
) -> Request:
    return Request(
        request_id=name,
        prompt=Prompt(list(range(prompt)), None, images),
        params=SamplingParams(detokenize=False, max_tokens=new, **params),
        seed=0,
        max_tokens=new,
        floor=floor,
        eos_token_id=1,
        forbidden_ids=(),
        bad_word_ids=(),
        tokenizer=None,  # type: ignore[arg-type]  # not used without text
    )


def scheduler(pages: int = 8, slots: int = 4, budget: int = 16, compact: bool = True) -> Scheduler:
    return Scheduler(num_pages=pages, num_slots=slots, page_size=PAGE, max_num_batched_tokens=budget, compact=compact)


def advance(sched: Scheduler, plan: StepPlan) -> list[Sequence]:
    """The step ran and every sampling row gave a token; returns what ended."""
    sched.commit(plan)
    ended = []
    for run in plan.runs:
        if run.samples:
            run.seq.output_ids.append(7)
            if len(run.seq.output_ids) == run.seq.request.max_tokens:
                ended.append(run.seq)
    sched.remove(ended)
    return ended


class Checker:
    """A page table as the device sees it; checks each plan against it."""

    def __init__(self, sched: Scheduler) -> None:
        self.sched = sched
        self.table: dict[tuple[int, int], int] = {}

    def check(self, plan: StepPlan) -> None:
        sched = self.sched
        updates = {(slot, index): page for slot, index, page in plan.page_updates.tolist()}
        assert len(updates) == len(plan.page_updates), "a page-table entry is written twice"
        self.table.update(updates)
        assert 0 < plan.num_rows <= sched.max_rows
        assert len({run.seq for run in plan.runs}) == len(plan.runs)
        used = [page for seq in sched.running for page in seq.pages]
        assert len(set(used)) == len(used) and 0 not in used
        assert sched.pages.num_free + len(used) == sched.pages.total
        assert sched.slots.num_free + len(sched.running) == sched.slots.total
        assert len({seq.slot for seq in sched.running} | {0}) == len(sched.running) + 1
        row = 0
        for run in plan.runs:
            seq = run.seq
            assert run.start == seq.num_computed < run.end <= seq.num_tokens
            rows = slice(row, row + run.count)
            assert plan.positions[rows].tolist() == list(range(run.start, run.end))
            assert plan.ids[rows].tolist() == seq.tokens(run.start, run.end)
            assert set(plan.slots[rows].tolist()) == {seq.slot}
            assert set(plan.run_start[rows].tolist()) == {row}
            for position in range(run.end):
                assert self.table[seq.slot, position // PAGE] == seq.pages[position // PAGE]
            if run.samples:
                assert row + run.count - 1 in plan.logit_rows
            row += run.count
        arrivals = [int(seq.request.request_id) for seq in [*sched.running, *sched.waiting]]
        assert arrivals == sorted(arrivals), "order of arrival"


requests = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    sizes=requests,
    pages=st.integers(1, 12),
    slots=st.integers(1, 4),
    budget=st.integers(4, 40),
    compact=st.booleans(),
    aborts=st.dictionaries(st.integers(1, 60), st.integers(0, 7), max_size=3),
)
def test_every_request_finishes_and_nothing_leaks(
    sizes: list[tuple[int, int]],
    pages: int,
    slots: int,
    budget: int,
    compact: bool,
    aborts: dict[int, int],
) -> None:
    sched = scheduler(pages, slots, budget, compact)
    checker = Checker(sched)
    live: dict[int, Sequence] = {}
    for number, (prompt, new) in enumerate(sizes):
        if pages_for(prompt + new - 1, PAGE) <= pages:  # what the engine accepts
            request = make_request(str(number), prompt, new, floor=max(0, prompt - 12))
            live[number] = request.sequences[0]
            sched.add(live[number])
    step = 0
    while live:
        step += 1
        assert step < 10_000, "no progress"
        if aborts.get(step) in live:
            sched.remove([live.pop(aborts[step])])
            continue
        oldest = live[min(live)]
        left = oldest.num_left
        plan = sched.schedule()
        assert plan is not None
        checker.check(plan)
        decoding = sum(run.seq.num_left == 1 for run in plan.runs)
        assert any(run.seq is oldest for run in plan.runs) or (left > 1 and decoding == budget)
        for seq in advance(sched, plan):
            del live[int(seq.request.request_id)]
    assert sched.schedule() is None
    sched.pages.check_idle()
    sched.slots.check_idle()


def test_decode_rows_come_first_and_prompts_are_chunked() -> None:
    sched = scheduler(budget=10)
    sched.add(make_request("0", 6, 5).sequences[0])
    advance(sched, sched.schedule())  # type: ignore[arg-type]
    sched.add(make_request("1", 25, 1).sequences[0])
    counts = []
    for _ in range(3):
        plan = sched.schedule()
        assert plan is not None
        counts.append([(run.seq.request.request_id, run.count) for run in plan.runs])
        advance(sched, plan)
    assert counts == [[("0", 1), ("1", 9)], [("0", 1), ("1", 9)], [("0", 1), ("1", 7)]]


def test_newest_is_preempted_and_recomputes_its_output() -> None:
    sched = scheduler(pages=4, budget=64)
    old, new = make_request("0", 7, 20).sequences[0], make_request("1", 7, 20).sequences[0]
    sched.add(old)
    sched.add(new)
    preempted_at = None
    while not sched.num_preemptions:
        plan = sched.schedule()
        assert plan is not None
        preempted_at = len(new.output_ids)
        advance(sched, plan)
    assert new.slot == 0 and not new.pages and new.num_preemptions == 1 and old.slot
    while old in sched.running:
        advance(sched, sched.schedule())  # type: ignore[arg-type]
    plan = sched.schedule()
    assert plan is not None
    (run,) = plan.runs
    assert (run.seq, run.start, run.end) == (new, 0, 7 + preempted_at)  # prompt and what it had said


def test_a_resumed_sequence_keeps_its_replay_floor() -> None:
    sched = scheduler(pages=8, budget=64)
    seq = make_request("0", 30, 9, floor=18).sequences[0]
    sched.add(seq)
    plan = sched.schedule()
    assert plan is not None and plan.kept is not None
    assert plan.kept.tolist() == list(range(18, 30))
    for _ in range(4):
        advance(sched, plan)
        plan = sched.schedule()
        assert plan is not None and plan.kept is None and plan.window_floor.tolist() == [18]
    sched.restart()
    plan = sched.schedule()
    assert plan is not None and plan.kept is not None
    assert plan.kept.tolist() == list(range(18, 34)) and set(plan.window_floor.tolist()) == {18}


def test_a_chunk_below_the_floor_keeps_no_row() -> None:
    sched = scheduler(budget=16)
    sched.add(make_request("0", 40, 1, floor=28).sequences[0])
    kept = []
    for _ in range(3):
        plan = sched.schedule()
        assert plan is not None
        kept.append(None if plan.kept is None else plan.positions[plan.kept].tolist())
        advance(sched, plan)
    assert kept == [[], [28, 29, 30, 31], None]


def test_mask_mode_runs_all_rows_with_the_same_floor() -> None:
    sched = scheduler(compact=False)
    sched.add(make_request("0", 16, 1, floor=4).sequences[0])
    plan = sched.schedule()
    assert plan is not None and plan.kept is None and set(plan.window_floor.tolist()) == {4}


def test_prompt_logprobs_ask_for_every_row_in_bounded_chunks() -> None:
    length = PROMPT_LOGPROB_ROWS + 100
    sched = scheduler(pages=200, budget=4096)
    seq = make_request("0", length, 3, prompt_logprobs=1).sequences[0]
    sched.add(seq)
    seen = 0
    for count in (PROMPT_LOGPROB_ROWS, 100):
        plan = sched.schedule()
        assert plan is not None and len(plan.logit_rows) == plan.num_rows == count
        seen += count
        seq.request.prompt_logprobs += [None] * (min(seen, length - 1) - (seen - count))  # type: ignore[operator]
        advance(sched, plan)
    sched.restart()
    plan = sched.schedule()
    assert plan is not None
    assert plan.logit_rows.tolist() == [length]  # done before: only the row that samples


def test_prompt_logprobs_of_several_requests_share_the_bound() -> None:
    sched = scheduler(pages=400, budget=4096)
    for name in "01":
        sched.add(make_request(name, PROMPT_LOGPROB_ROWS - 12, 1, prompt_logprobs=1).sequences[0])
    plan = sched.schedule()
    assert plan is not None
    assert [run.count for run in plan.runs] == [PROMPT_LOGPROB_ROWS - 12, 12]


def test_image_rows_follow_the_span_over_chunks() -> None:
    sched = scheduler(budget=10)
    span = ImageSpan(start=7, length=12, patches=None)
    sched.add(make_request("0", 24, 1, images=(span,)).sequences[0])
    rows = []
    for _ in range(3):
        plan = sched.schedule()
        assert plan is not None
        rows += plan.positions[plan.is_image].tolist()
        advance(sched, plan)
    assert rows == list(range(7, 19))


def test_restart_frees_everything_and_keeps_the_order() -> None:
    sched = scheduler(pages=16, slots=2)
    seqs = [make_request(str(i), 5, 4).sequences[0] for i in range(3)]
    for seq in seqs:
        sched.add(seq)
    advance(sched, sched.schedule())  # type: ignore[arg-type]
    sched.pages.take(2)  # as if an interrupt had hit between taking and recording
    sched.restart()
    sched.pages.check_idle()
    sched.slots.check_idle()
    assert list(sched.waiting) == seqs and all(seq.num_computed == 0 for seq in seqs)


def test_plan_arrays_have_the_types_of_the_model() -> None:
    sched = scheduler()
    sched.add(make_request("0", 5, 1).sequences[0])
    plan = sched.schedule()
    assert plan is not None
    for name in ("ids", "positions", "slots", "run_start", "window_floor"):
        assert getattr(plan, name).dtype == np.int32, name
    assert plan.logit_rows.dtype == np.int64 and plan.is_image.dtype == np.bool_


@pytest.mark.parametrize("budget", [1, 3])
def test_budget_below_the_running_requests_still_serves_all(budget: int) -> None:
    sched = scheduler(pages=12, budget=budget)
    for i in range(4):
        sched.add(make_request(str(i), 2, 3).sequences[0])
    ended = 0
    for _ in range(100):
        plan = sched.schedule()
        if plan is None:
            break
        ended += len(advance(sched, plan))
    assert ended == 4
