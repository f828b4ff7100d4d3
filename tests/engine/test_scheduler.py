"""The scheduler against its promises, on a simulated device: budget, order, whose memory is read and written, progress,
nothing leaked, and the same answers whatever happens in between.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from engine.simulated import (
    FIRST_ID,
    IMAGE,
    KEEP,
    Host,
    fits,
    make_request,
    make_scheduler,
    picture,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine import scheduler as module
from deepinfer.engine.requests import Request, Sequence
from deepinfer.engine.scheduler import PROMPT_LOGPROB_ROWS, Scheduler

PAGE = 8

# ---- anything at any time ----


@dataclass(frozen=True)
class Job:
    """A request of the property tests. arrive, abort: steps; eos, fails: outputs."""

    shared: int
    own: int
    new: int
    n: int
    eos: list[int | None]
    fails: int | None
    priority: int
    arrive: int
    abort: int | None
    prompt_logprobs: bool
    namespace: str
    image: str | None

    def request(self, number: int, late: bool, replay: bool) -> Request:
        """late: ranks do not follow arrivals."""
        ids = [FIRST_ID + i for i in range(self.shared)] + [150 + (5 * number + i) % 11 for i in range(self.own)]
        images: tuple[Any, ...] = ()
        if self.image is not None and len(ids) > 4:
            ids[2:5] = [IMAGE] * 3
            images = (picture(2, 3, self.image),)
        wants = self.prompt_logprobs
        return make_request(
            number,
            ids,
            self.new,
            floor=max(0, len(ids) - KEEP) if replay and not wants else 0,
            images=images,
            namespace=self.namespace,
            priority=self.priority,
            arrival=100 - number if late else number,
            n=self.n,
            prompt_logprobs=1 if wants else None,
        )


def rarely(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), st.none(), st.none(), values)


jobs = st.lists(
    st.builds(
        Job,
        shared=st.integers(0, 30),
        own=st.integers(1, 14),
        new=st.integers(1, 20),
        n=st.sampled_from([1, 1, 2, 3]),
        eos=st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=3, max_size=3),
        fails=rarely(st.integers(0, 12)),
        priority=st.integers(0, 2),
        arrive=st.integers(0, 40),
        abort=rarely(st.integers(0, 60)),
        prompt_logprobs=rarely(st.just(True)).map(bool),
        namespace=st.sampled_from(["", "", "x"]),
        image=rarely(st.sampled_from("ab")),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=120, deadline=None)
@given(
    jobs=jobs,
    pages=st.integers(2, 26),
    slots=st.integers(1, 5),
    budget=st.integers(1, 40),
    page=st.sampled_from([4, 8]),
    depth=st.integers(1, 3),
    eager=st.booleans(),
    late=st.booleans(),
    replay=st.sampled_from(["compact", "mask", "off"]),
    prefix=st.booleans(),
    logprob_rows=st.integers(1, 12),
    breaks=st.lists(st.integers(1, 80), max_size=2),
)
def test_whatever_happens_memory_is_right_and_everything_ends(
    jobs: list[Job],
    pages: int,
    slots: int,
    budget: int,
    page: int,
    depth: int,
    eager: bool,
    late: bool,
    replay: str,
    prefix: bool,
    logprob_rows: int,
    breaks: list[int],
) -> None:
    sched = make_scheduler(pages, slots, budget, page=page, compact=replay == "compact", prefix=prefix)
    host = Host(sched, depth, eager)
    requests = {i: job.request(i, late, replay != "off") for i, job in enumerate(jobs)}
    accepted = {i: job for i, job in enumerate(jobs) if fits(requests[i], sched)}
    with mock.patch.object(module, "PROMPT_LOGPROB_ROWS", logprob_rows):
        for step in itertools.count():
            assert step < 3000, "no end"
            for i, job in accepted.items():
                if job.arrive == step:
                    host.submit(requests[i], job.eos, job.fails)
                if job.abort == step:
                    host.abort(i)
            if step in breaks:
                host.break_off()
            if step > 60 and not host.requests:
                break
            before = len(host.in_flight)
            flight = host.step()
            assert flight is not None or before or not host.requests, "deadlock"
        host.finish()
    failed = {i for i, job in accepted.items() if job.fails is not None or job.abort is not None}
    host.check_answers(accepted.keys() - failed)


class Interrupt:
    """Raises KeyboardInterrupt before the `at`-th line that runs in the scheduler's own files."""

    FILES = ("engine/scheduler.py", "engine/plan.py", "cache/pages.py", "cache/prefix.py")

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> None:
        self.before = sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before)

    def _call(self, frame: FrameType, what: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename.endswith(self.FILES) else None

    def _line(self, frame: FrameType, what: str, arg: object) -> Any:
        self.left -= what == "line"
        if not self.left:
            raise KeyboardInterrupt
        return self._line


@settings(max_examples=40, deadline=None)
@given(
    calm=st.integers(0, 14),
    at=st.integers(1, 700),
    n=st.integers(1, 3),
    pages=st.integers(5, 9),
    depth=st.integers(1, 2),
)
def test_an_interrupt_at_any_line_loses_nobody(calm: int, at: int, n: int, pages: int, depth: int) -> None:
    host = Host(make_scheduler(pages, 3, 24, prefix=True), depth)
    for i in range(4):
        host.submit(make_request(i, 12 + i, 9, n=n if i % 2 else 1), eos=[5, None, 2])
    for _ in range(calm):
        host.step()
    interrupt = Interrupt(at)
    try:
        with interrupt:
            while host.requests:
                host.step()
    except KeyboardInterrupt:
        host.break_off()
    host.finish()
    host.check_answers(range(4))


@pytest.mark.parametrize("what", ["fork", "preempt"])
def test_an_interrupt_at_each_line_of_a_fork_or_preemption(what: str) -> None:
    def before(calm: int) -> Host:
        host = host_of(*((12, 4, 64) if what == "fork" else (4, 4, 64)))
        for i in range(1 if what == "fork" else 2):
            host.submit(make_request(i, 7, 12, n=3 if what == "fork" else 1))
        for _ in range(calm):
            host.next()
        return host

    probe, calm = before(0), 0
    if what == "preempt":
        while not probe.sched.num_preemptions:
            probe.next()
            calm += 1
        calm -= 1
    for at in range(1, 1000):
        host = before(calm)
        try:
            with Interrupt(at):
                host.step()
            break
        except KeyboardInterrupt:
            host.break_off()
        host.finish()
        host.check_answers(host.done)
    assert 50 < at < 999


# ---- what runs in a step ----


def host_of(*sizes: int, depth: int = 1, **options: Any) -> Host:
    return Host(make_scheduler(*sizes, **options), depth)


def only(request: Request) -> Sequence:
    (seq,) = request.sequences
    return seq


def test_decode_rows_come_first_and_prompts_are_chunked() -> None:
    host = host_of(8, 4, 10)
    host.submit(make_request(0, 6, 5))
    host.next()
    host.submit(make_request(1, 25, 1))
    assert [host.next().runs for _ in range(3)] == [
        [("0", 6, 7), ("1", 0, 9)],
        [("0", 7, 8), ("1", 9, 18)],
        [("0", 8, 9), ("1", 18, 25)],
    ]
    host.finish()


def test_rows_are_planned_before_the_last_token_is_known() -> None:
    host = host_of(depth=2)
    seq = only(host.submit(make_request(0, 6, 3)))
    assert (host.next().runs, seq.output_ids) == ([("0", 0, 6)], [])
    second = host.next()
    assert (second.runs, second.plan.num_decode, len(seq.output_ids)) == ([("0", 6, 7)], 1, 1)
    third = host.next()
    assert (third.runs, len(seq.output_ids)) == ([("0", 7, 8)], 2)
    assert third.plan.is_last.tolist() == [True] and second.plan.is_last.tolist() == [False]
    assert host.step() is None and not host.requests  # no row beyond max_tokens was planned
    host.finish()


def test_a_stop_that_is_found_late_drops_the_extra_row() -> None:
    host = host_of(depth=2)
    seq = only(host.submit(make_request(0, 6, 9), eos=[1]))
    while host.requests:
        last = host.next()
    assert len(seq.output_ids) == 2 and last.runs == [("0", 7, 8)] and len(host.in_flight) == 1
    assert host.sched.pages.num_fenced == host.sched.slots.num_fenced == 1  # until that row has run
    host.finish()


def test_newest_is_preempted_and_recomputes_its_output() -> None:
    host = host_of(4, 4, 64)
    old, new = only(host.submit(make_request(0, 7, 20))), only(host.submit(make_request(1, 7, 20)))
    said = 0
    while not host.sched.num_preemptions:
        said = len(new.output_ids)
        host.next()
    assert new.slot == 0 and not new.pages and new.num_preemptions == 1 and old.slot
    while "0" in host.requests:
        host.next()
    assert host.next().runs == [("1", 0, 7 + said)]  # prompt and what it had said
    host.finish()
    host.check_answers("01")


def test_what_was_in_flight_for_a_preempted_sequence_does_not_count() -> None:
    host = host_of(4, 4, 64, depth=2)
    host.submit(make_request(0, 7, 20))
    new = only(host.submit(make_request(1, 7, 20)))
    while not host.sched.num_preemptions:
        flight = host.step()
    said = len(new.output_ids)
    assert flight is None or "1" not in [name for name, _, _ in flight.runs]
    while host.sched.pages.num_fenced:
        assert new in host.sched.waiting
        host.step()
    assert len(new.output_ids) == said
    host.finish()
    host.check_answers("01")


def test_those_who_wait_for_a_step_in_flight_get_a_page_each() -> None:
    host = host_of(8, 4, 64, depth=5)
    seqs = [only(host.submit(make_request(i, 7, 18))) for i in range(4)]
    while not host.sched.num_preemptions:
        host.step()
    # all want a third page: the last gives up two, which the first two wait for, and so the third gives up its own
    assert [seq.num_preemptions for seq in seqs] == [0, 0, 1, 1]
    while host.sched.pages.num_fenced:
        flight = host.step()
    flight = flight or host.next()
    assert flight.runs[:2] == [("0", 16, 17), ("1", 16, 17)]
    assert [seq.num_preemptions for seq in seqs] == [0, 0, 1, 1]
    host.finish()
    host.check_answers("0123")


def test_a_resumed_sequence_keeps_its_replay_floor() -> None:
    host = host_of(8, 4, 64)
    host.submit(make_request(0, 30, 9, floor=18))
    assert host.next().positions("kept") == list(range(18, 30))
    for _ in range(4):
        arrays = host.next().plan.arrays
        assert "kept" not in arrays and arrays["window_floor"].tolist() == [18]
    host.break_off()
    flight = host.next()
    assert flight.positions("kept") == list(range(18, 35)) and set(flight.plan.arrays["window_floor"].tolist()) == {18}
    host.finish()


def test_a_chunk_below_the_floor_keeps_no_row() -> None:
    host = host_of(8, 4, 16)
    host.submit(make_request(0, 40, 1, floor=28))
    first, second, third = (host.next() for _ in range(3))
    assert first.positions("kept") == [] and second.positions("kept") == [28, 29, 30, 31]
    assert "kept" not in third.plan.arrays


def test_mask_mode_runs_all_rows_with_the_same_floor() -> None:
    host = host_of(compact=False)
    host.submit(make_request(0, 16, 1, floor=4))
    arrays = host.next().plan.arrays
    assert "kept" not in arrays and set(arrays["window_floor"].tolist()) == {4}


def test_prompt_logprobs_ask_for_every_row_in_bounded_chunks() -> None:
    length = PROMPT_LOGPROB_ROWS + 100
    host = host_of(200, 4, 4096)
    host.submit(make_request(0, length, 3, prompt_logprobs=1))
    for count in (PROMPT_LOGPROB_ROWS, 100):
        arrays = host.next().plan.arrays
        assert len(arrays["logit_rows"]) == len(arrays["ids"]) == count
    host.break_off()
    assert host.next().plan.arrays["logit_rows"].tolist() == [length]  # done before: only the row that samples
    host.finish()
    host.check_answers("0")


def test_prompt_logprobs_of_several_requests_share_the_bound() -> None:
    host = host_of(400, 4, 4096)
    for i in range(2):
        host.submit(make_request(i, PROMPT_LOGPROB_ROWS - 12, 1, prompt_logprobs=1))
    assert host.next().plan.run_counts.tolist() == [PROMPT_LOGPROB_ROWS - 12, 12]
    host.finish()
    host.check_answers("01")


def test_image_rows_follow_the_span_over_chunks() -> None:
    host = host_of(8, 4, 10)
    ids = [FIRST_ID] * 7 + [IMAGE] * 12 + [FIRST_ID] * 5
    host.submit(make_request(0, ids, 1, images=(picture(7, 12),)))
    rows = []
    for _ in range(3):
        flight = host.next()
        for image in flight.plan.images:
            at = flight.plan.arrays["positions"][image.first : image.first + image.count].tolist()
            assert [p - 7 for p in at] == list(range(image.offset, image.offset + image.count))
            rows += at
    assert rows == list(range(7, 19))


def test_restart_frees_everything_and_keeps_the_order() -> None:
    host = host_of(16, 2)
    seqs = [only(host.submit(make_request(i, 5, 4))) for i in range(3)]
    host.next()
    host.sched.pages.take(2)  # as if an interrupt had hit between taking and recording
    host.break_off()
    host.sched.pages.check_idle()
    host.sched.slots.check_idle()
    assert host.sched.waiting == seqs and not host.sched.running
    host.finish()
    host.check_answers("012")


def test_plan_arrays_have_the_types_of_the_model() -> None:
    host = host_of(prefix=True)
    for name in "01":  # the second hits the first and forks
        host.submit(make_request(name, 20, 2, floor=12, n=1 + int(name)))
        arrays = host.next().plan.arrays
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays.values())
        host.finish()
    rows = len(arrays["ids"])
    assert {name for name, array in arrays.items() if array.shape == (rows,)} == {
        *("ids", "positions", "slots", "run_start", "window_floor", "ring_floor", "kv_slots")
    }
    assert {name: array.shape for name, array in arrays.items() if array.shape != (rows,)} == {
        "logit_rows": (1,),
        "kept": (8,),
        "page_updates": (3, 6),
        "slot_copies": (2, 1),
        "page_copies": (2, 1),
        "remember": (3, 3),
    }


@pytest.mark.parametrize("budget", [1, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_budget_below_the_running_requests_still_serves_all(budget: int, depth: int) -> None:
    host = host_of(12, 4, budget, depth=depth)
    for i in range(4):
        host.submit(make_request(i, 2, 3))
    host.finish(100)
    host.check_answers("0123")


# ---- who comes first ----


def test_priority_then_arrival_decide_who_is_admitted() -> None:
    host = host_of(8, 1)
    for i, priority in enumerate([1, 0, 2, 0]):
        host.submit(make_request(i, 3, 1, priority=priority))
    order = []
    while host.requests:
        order += [name for name, _, _ in host.next().runs]
    assert order == ["1", "3", "0", "2"]
    host.finish()


def test_a_long_prompt_of_lower_priority_does_not_hold_up_an_urgent_one() -> None:
    host = host_of(20, 4, 8)
    host.submit(make_request(0, 60, 1, priority=1))
    host.next()
    host.submit(make_request(1, 12, 1))
    assert [host.next().runs for _ in range(2)] == [[("1", 0, 8)], [("1", 8, 12), ("0", 8, 12)]]
    host.finish()


def test_an_urgent_request_displaces_the_last_of_lower_priority_only() -> None:
    host = host_of(6, 4, 64)
    seqs = [only(host.submit(make_request(i, 9, 4, priority=p))) for i, p in enumerate([0, 1, 1])]
    host.next()
    host.submit(make_request(3, 9, 4))
    assert host.next().runs == [("0", 9, 10), ("1", 9, 10), ("3", 0, 9)]
    assert [seq.num_preemptions for seq in seqs] == [0, 0, 1] and host.sched.waiting == [seqs[2]]
    host.finish()
    host.check_answers("0123")


def test_equals_do_not_displace_each_other() -> None:
    host = host_of(4, 4, 64)
    for i in range(2):
        host.submit(make_request(i, 9, 4, arrival=5 + i))
    host.next()
    host.submit(make_request(2, 9, 4, arrival=0))  # made first, submitted last
    assert host.next().runs == [("0", 9, 10), ("1", 9, 10)]
    host.finish()
    assert not host.sched.num_preemptions


def test_displacement_waits_for_the_steps_in_flight() -> None:
    host = host_of(4, 4, 64, depth=2)
    victims = [only(host.submit(make_request(i, 9, 4, priority=1))) for i in range(2)]
    host.next()
    host.next()
    host.submit(make_request(2, 9, 4))
    assert host.next().runs == [("0", 10, 11)]  # a victim is gone, what it touches in flight is not free yet
    assert [seq.num_preemptions for seq in victims] == [0, 1]
    assert ("2", 0, 9) in host.next().runs
    assert [seq.num_preemptions for seq in victims] == [0, 1]
    host.finish()
    host.check_answers("012")


def test_displacement_for_a_slot_takes_one_victim() -> None:
    host = host_of(12, 3, 64, depth=2)
    (request,) = [host.submit(make_request(0, 8, 6, n=3, priority=1))]  # one page, which the three samples share
    host.next()
    host.submit(make_request(1, 8, 2))
    host.next()
    assert [seq.num_preemptions for seq in request.sequences] == [0, 0, 1]
    host.finish()
    host.check_answers("01")


# ---- samples of one prompt ----


def test_samples_fork_in_the_step_that_ends_the_prompt() -> None:
    host = host_of(12, 4, 10)
    request = host.submit(make_request(0, 19, 4, n=3))
    first, second, third = request.sequences
    assert host.next().runs == [("0", 0, 10)] and host.sched.running == [first]
    flight = host.next()
    plan = flight.plan
    assert flight.runs == [("0", 10, 19)] and flight.positions("logit_rows") == [18]
    assert plan.sample_slots.tolist() == [s.slot for s in request.sequences]
    assert plan.sample_logits.tolist() == [0, 0, 0] and not plan.is_last.any()
    assert plan.arrays["slot_copies"].T.tolist() == [[first.slot, s.slot] for s in (second, third)]
    assert plan.arrays["page_copies"].T.tolist() == [[first.pages[2], s.pages[2]] for s in (second, third)]
    assert first.pages[:2] == second.pages[:2] == third.pages[:2]
    assert len({s.pages[2] for s in request.sequences}) == 3 and host.sched.pages.num_used == 5
    assert [seq.output_ids for seq in request.sequences] == [
        host.device.truth_of(s).tokens[19:20] for s in flight.samplers
    ]
    assert host.next().plan.num_decode == 3
    host.finish()
    host.check_answers("0")


def test_a_fork_at_a_page_boundary_copies_no_page() -> None:
    host = host_of(12, 4, 64)
    request = host.submit(make_request(0, 16, 4, n=2))
    arrays = host.next().plan.arrays
    assert "page_copies" not in arrays and "slot_copies" in arrays and host.sched.pages.num_used == 2
    host.next()
    assert [len(seq.pages) for seq in request.sequences] == [3, 3] and host.sched.pages.num_used == 4
    host.finish()
    host.check_answers("0")


@pytest.mark.parametrize(("pages", "slots"), [(5, 8), (40, 2)])
@pytest.mark.parametrize("depth", [1, 2])
def test_samples_without_room_queue_by_themselves(pages: int, slots: int, depth: int) -> None:
    host = host_of(pages, slots, 64, depth=depth)
    request = host.submit(make_request(0, 13, 8, n=4))
    assert len(host.next().samplers) == 2
    assert host.sched.waiting == request.sequences[2:]
    host.finish()
    host.check_answers("0")


def test_one_token_for_each_sample() -> None:
    host = host_of(12, 4, 64, depth=2)
    request = host.submit(make_request(0, 13, 1, n=3))
    assert host.next().plan.is_last.tolist() == [True] * 3
    assert host.step() is None and request.finished
    host.finish()
    host.check_answers("0")


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_samples_of_an_aborted_leader_go_with_it(steps: int) -> None:
    host = host_of(12, 4, 10, depth=2)
    host.submit(make_request(0, 19, 4, n=3))
    host.submit(make_request(1, 5, 4))
    for _ in range(steps):
        host.next()
    host.abort(0)
    host.finish()
    host.check_answers("1")


@pytest.mark.parametrize("slots", [2, 4])
def test_samples_of_a_leader_that_fails_go_with_it(slots: int) -> None:
    host = host_of(12, slots, 64, depth=2)
    request = host.submit(make_request(0, 19, 8, n=3), fails=0)
    host.submit(make_request(1, 5, 4))
    host.finish()
    assert [seq.finish_reason for seq in request.sequences] == ["abort"] * 3
    host.check_answers("1")


def test_samples_of_a_leader_that_was_preempted_wait_on() -> None:
    host = host_of(7, 4, 16)
    host.submit(make_request(0, 9, 12))
    request = host.submit(make_request(1, 30, 2, n=2, priority=1))
    host.next()
    assert only(host.requests["0"]).slot and request.sequences[0].slot
    host.submit(make_request(2, 17, 2))
    host.next()
    assert request.sequences[0].num_preemptions == 1 and request.sequences[0].followers == request.sequences[1:]
    host.finish()
    host.check_answers("012")


# ---- prefix hits ----


def cached(prompt: int | list[int] = 30, *, depth: int = 1, pages: int = 20, **options: Any) -> Host:
    """A host whose cache holds the full pages of a prompt that was served."""
    host = Host(make_scheduler(pages, 4, 64, prefix=True), depth)
    host.submit(make_request("first", prompt, 1, arrival=100, **options))
    host.finish()
    return host


def test_a_hit_runs_the_last_rows_before_it_again_without_writing() -> None:
    host = cached()
    request = host.submit(make_request(0, 30, 3, floor=24))
    arrays, slot = host.next().plan.arrays, only(request).slot
    assert arrays["positions"].tolist() == list(range(24 - KEEP, 30))
    assert arrays["kv_slots"].tolist() == [0] * KEEP + [slot] * 6
    assert set(arrays["ring_floor"].tolist()) == {24 - KEEP} and set(arrays["window_floor"].tolist()) == {24}
    assert arrays["remember"].T.tolist() == [[slot, p, FIRST_ID + p] for p in range(15, 18)]
    assert request.num_cached_tokens == 24
    assert host.sched.prefix is not None and (host.sched.prefix.queries, host.sched.prefix.hits) == (60, 24)
    decode = host.next().plan.arrays
    assert decode["kv_slots"].tolist() == [slot] and decode["ring_floor"].tolist() == [24 - KEEP]
    host.finish()
    host.check_answers("0")


def test_image_rows_before_a_hit_are_remembered_as_such() -> None:
    ids = [FIRST_ID] * 12 + [IMAGE] * 5 + [FIRST_ID] * 13
    host = cached(ids, images=(picture(12, 5),))
    host.submit(make_request(0, ids, 3, images=(picture(12, 5),)))
    remembered = {p: token for _, p, token in host.next().plan.arrays["remember"].T.tolist()}
    assert remembered == {p: -1 if 12 <= p < 17 else FIRST_ID for p in range(15, 18)}
    host.finish()
    host.check_answers("0")


def test_without_replay_the_floor_of_a_hit_is_its_first_row() -> None:
    host = cached()
    host.submit(make_request(0, 30, 1))
    arrays = host.next().plan.arrays
    assert set(arrays["window_floor"].tolist()) == {24 - KEEP} and "kept" not in arrays
    host.finish()


@pytest.mark.parametrize(("keep", "page", "prompt", "hit"), [(8, 8, 16, 0), (8, 8, 17, 16), (7, 8, 9, 0), (5, 8, 9, 8)])
def test_a_hit_must_be_longer_than_what_it_runs_again(keep: int, page: int, prompt: int, hit: int) -> None:
    sched = Scheduler(num_pages=9, num_slots=1, page_size=page, max_num_batched_tokens=99, prefix_keep=keep)
    host = Host(sched)
    for name in "01":
        request = host.submit(make_request(name, prompt, 1))
        start = int(host.next().plan.run_starts[0])
        host.finish()
    assert request.num_cached_tokens == hit
    assert start == (hit - keep - keep % 2 if hit else 0)


def test_the_last_token_always_runs() -> None:
    host = cached(24)
    request = host.submit(make_request(0, 24, 1))
    assert host.next().runs == [("0", 16 - KEEP, 24)] and request.num_cached_tokens == 16
    host.finish()


def test_what_was_said_is_hit_by_the_next_turn() -> None:
    host = Host(make_scheduler(20, 4, 64, prefix=True), 2)
    first = only(host.submit(make_request(0, 20, 14)))
    host.finish()
    turn = [*first.prompt.token_ids, *first.output_ids, 99, 98]
    request = host.submit(make_request(1, turn, 3))
    host.finish()
    assert request.num_cached_tokens == 32  # 33 of 34 rows ran: the last token was never an input
    host.check_answers("01")


def image_prompt(name: str, start: int = 3) -> dict[str, Any]:
    ids = [FIRST_ID] * start + [IMAGE] * 12 + [FIRST_ID] * 20
    return {"prompt": ids[:30], "images": (picture(start, 12, name),)}


@pytest.mark.parametrize(
    ("first", "second", "hit"),
    [
        ({"prompt": 30}, {"prompt": 30}, 24),
        ({"prompt": 30}, {"prompt": 30, "namespace": "x"}, 0),
        ({"prompt": 30, "namespace": "x"}, {"prompt": 30, "namespace": "x"}, 24),
        ({"prompt": 30}, {"prompt": [*range(FIRST_ID, FIRST_ID + 19), *[99] * 9]}, 16),
        ({"prompt": 30}, {"prompt": [99, *range(FIRST_ID + 1, FIRST_ID + 30)]}, 0),
        (image_prompt("a"), image_prompt("a"), 24),
        (image_prompt("a"), image_prompt("b"), 0),
        (image_prompt("a", 9), image_prompt("b", 9), 8),
        ({"prompt": 30}, {"prompt": 30, "prompt_logprobs": 0}, 0),  # every row's logits are wanted
    ],
)
def test_what_a_key_names(first: dict[str, Any], second: dict[str, Any], hit: int) -> None:
    host = cached(**first)
    request = host.submit(make_request(0, new=2, **second))
    host.finish()
    assert request.num_cached_tokens == hit
    host.check_answers("0")


def test_pages_are_found_only_after_their_step_was_confirmed() -> None:
    host = Host(make_scheduler(20, 4, 64, prefix=True), 2)
    host.submit(make_request(0, 30, 9))
    host.next()
    host.submit(make_request(1, 30, 9))
    assert ("1", 0, 30) in host.next().runs  # the first step is in flight
    host.submit(make_request(2, 30, 9))
    assert ("2", 24 - KEEP, 30) in host.next().runs
    host.finish()
    host.check_answers("012")
    assert [host.done[name].num_cached_tokens for name in "012"] == [0, 0, 24]


def test_a_preempted_sequence_takes_the_hit_it_had_and_no_other() -> None:
    host = Host(make_scheduler(5, 4, 64, prefix=True))
    host.submit(make_request(0, 20, 20))
    request = host.submit(make_request(1, 17, 14))
    while not host.sched.num_preemptions:
        host.next()
    while only(request) in host.sched.waiting:
        flight = host.next()
    assert ("1", 16 - KEEP, only(request).num_known) in flight.runs
    host.finish()
    assert request.num_cached_tokens == 16
    host.check_answers("01")


def test_a_preempted_sequence_whose_hit_is_gone_runs_everything() -> None:
    host = Host(make_scheduler(5, 4, 64, prefix=True))
    host.submit(make_request(0, 20, 20))
    request = host.submit(make_request(1, 17, 14))
    while not host.sched.num_preemptions:
        host.next()
    host.sched.prefix.clear()  # type: ignore[union-attr]
    while only(request) in host.sched.waiting:
        flight = host.next()
    assert ("1", 0, only(request).num_known) in flight.runs and only(request).hit == 0
    host.finish()
    host.check_answers("01")


def test_a_sequence_that_was_preempted_within_its_prompt_takes_no_hit() -> None:
    host = Host(make_scheduler(6, 4, 16, prefix=True))
    request = host.submit(make_request(0, 40, 2, priority=1))
    host.next()
    host.submit(make_request(1, 20, 1))
    assert host.next().runs == [("1", 16 - KEEP, 20)]  # the other's beginning
    assert only(request).num_preemptions == 1 and not only(request).output_ids
    assert host.sched.pages.num_idle == 2 and host.next().runs == [("0", 0, 16)]
    host.finish()
    host.check_answers("01")


def test_pages_in_use_and_fenced_pages_are_hit() -> None:
    host = Host(make_scheduler(20, 4, 64, prefix=True), 2)
    host.submit(make_request(0, 17, 9), eos=[1])
    while "0" in host.requests:
        host.next()
    assert host.sched.pages.num_fenced == 3
    host.submit(make_request(1, 17, 9))
    assert host.next().runs == [("1", 16 - KEEP, 17)] and host.sched.pages.num_fenced == 0
    host.submit(make_request(2, 17, 9))
    assert ("2", 16 - KEEP, 17) in host.next().runs
    assert [host.sched.pages._refs[page] for page in only(host.requests["2"]).pages] == [2, 2, 1]
    host.finish()
    host.check_answers("012")


def test_the_oldest_page_without_a_user_is_forgotten_first_from_its_end() -> None:
    host = Host(make_scheduler(6, 4, 64, prefix=True))
    for name, base in (("0", 20), ("1", 60)):
        host.submit(make_request(name, [base + i for i in range(17)], 1))
        host.finish()
    assert (host.sched.pages.num_free, host.sched.pages.num_idle) == (6, 4)
    host.submit(make_request(2, [100 + i for i in range(17)], 1))
    host.finish()  # three pages: two free ones, and the second of the first request
    request = host.submit(make_request(3, [20 + i for i in range(17)], 1))
    host.finish()
    assert request.num_cached_tokens == 8
    request = host.submit(make_request(4, [100 + i for i in range(17)], 1))
    host.finish()
    assert request.num_cached_tokens == 16


def test_a_hit_does_not_count_its_idle_pages_as_free() -> None:
    host = Host(make_scheduler(5, 4, 64, prefix=True))
    host.submit(make_request(0, 31, 2))
    host.finish()
    assert host.sched.pages.num_idle == 4  # of 5: one is free
    host.submit(make_request(1, [99] * 9, 9))
    host.next()
    request = host.submit(make_request(2, 26, 2))  # hits three idle pages and wants a fourth
    host.finish()
    assert request.num_cached_tokens in (16, 24)
    host.check_answers("012")


def test_clear_forgets_prefixes_and_harms_nobody() -> None:
    host = cached()
    running = host.submit(make_request(0, 30, 9))
    host.next()
    assert host.sched.prefix is not None
    host.sched.prefix.clear()
    assert host.sched.pages.num_idle == 0
    request = host.submit(make_request(1, 30, 2))
    host.finish()
    assert (running.num_cached_tokens, request.num_cached_tokens) == (24, 0)
    host.check_answers("01")


def test_samples_share_a_hit() -> None:
    host = cached()
    request = host.submit(make_request(0, 30, 9, n=3))
    plan = host.next().plan
    assert len(plan.sample_slots) == 3 and plan.arrays["remember"].shape == (3, 3)
    assert set(host.next().plan.arrays["ring_floor"].tolist()) == {24 - KEEP}
    host.finish()
    host.check_answers("0")
    assert request.num_cached_tokens == 24


def test_a_sample_that_queues_does_not_change_what_the_request_reports() -> None:
    host = Host(make_scheduler(20, 1, 64, prefix=True))
    request = host.submit(make_request(0, 30, 2, n=2))
    host.finish()
    assert request.num_cached_tokens == 0
    host.check_answers("0")
