"""A device of dictionaries and the smallest host loop around a scheduler: what a plan would do, checked cell by cell.

The device knows nothing but the plan's arrays. Every cell of its memory holds a mark that names all tokens (and image
rows) up to its position; it makes a row's mark from the mark that it reads at the position before and the row's id. The
truth is known beforehand, so a wrong page, slot, row, id, order or a use of memory that was given up shows at once.
Memory that is given up is emptied. The host loop applies results as engine/core.py does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.cache.pages import Pool, pages_for
from deepinfer.engine.plan import StepPlan
from deepinfer.engine.requests import ImageSpan, Prompt, Request, Sequence
from deepinfer.engine.sampler import SamplingRow
from deepinfer.engine.scheduler import Scheduler
from deepinfer.params import SamplingParams

EOS, IMAGE, FIRST_ID = 1, 2, 10
WINDOW = 5  # positions a row sees in its rings, its own included
KEEP = 6  # rows that a hit runs again, and that decoder replay keeps; at least WINDOW
LOOK_BACK = 2  # ids before a row that it looks at

Mark = int
Name = tuple[str, int]  # request, sample


@dataclass(eq=False)
class Picture(ImageSpan):
    """An image by name, without pixels."""

    name: str = "a"

    @property
    def digest(self) -> bytes:  # type: ignore[override]
        return self.name.encode().ljust(16)


def picture(start: int, length: int, name: str = "a") -> Picture:
    return Picture(start, length, None, None, name)


def make_request(
    name: str | int,
    prompt: int | list[int],
    new: int,
    *,
    floor: int = 0,
    images: tuple[ImageSpan, ...] = (),
    namespace: str = "",
    priority: int = 0,
    arrival: int | None = None,
    **params: Any,
) -> Request:
    """A request as the engine makes it; arrives in the order of its name where that is a number."""
    ids = [FIRST_ID + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    if arrival is None:
        arrival = int(name) if str(name).isdigit() else 0
    return Request(
        request_id=str(name),
        prompt=Prompt(ids, None, images, namespace),
        params=SamplingParams(detokenize=False, max_tokens=new, **params),
        seed=arrival,
        max_tokens=new,
        floor=floor,
        eos_token_id=EOS,
        forbidden_ids=(),
        bad_word_ids=(),
        tokenizer=None,  # type: ignore[arg-type]  # not used without text
        priority=priority,
        arrival=arrival,
    )


@dataclass
class Truth:
    """All tokens that a sequence may come to have, the mark of each position, and which output fails (if any)."""

    tokens: list[int]
    marks: list[Mark]
    fails: int | None

    @classmethod
    def of(cls, seq: Sequence, eos: int | None, fails: int | None) -> Truth:
        """eos: the output token that is EOS. What a sequence of another sample says differs from its first token on."""
        prompt, new = seq.prompt, seq.request.max_tokens
        said = [FIRST_ID + 40 * (1 + seq.index) + (7 * seq.request.seed + 3 * j) % 40 for j in range(new + 4)]
        if eos is not None and eos < len(said):
            said[eos] = EOS
        if fails is not None and fails < len(said):
            said[fails] = 0  # the device goes on with some valid id
        tokens = [*prompt.token_ids, *said]
        shown = {s.start + i: (s.digest, i) for s in prompt.images for i in range(s.length)}
        marks: list[Mark] = []
        for p, token in enumerate(tokens):
            marks.append(make_mark(marks[-1] if p else hash(prompt.namespace), token, shown.get(p)))
        return cls(tokens, marks, fails)


def make_mark(before: Mark, token: int, shown: tuple[bytes, int] | None) -> Mark:
    return hash((before, token, shown))


@dataclass
class Flight:
    """A plan with the sequences that it was made for."""

    plan: StepPlan
    owners: list[Sequence]  # of the runs
    samplers: list[Sequence]
    touched: set[int]  # pages
    slots: set[int]
    tokens: list[int] | None = None  # when it has run
    prompt_logprobs: list[list[dict[int, Any]]] = field(default_factory=list)

    @property
    def runs(self) -> list[tuple[str, int, int]]:
        """(request, first position, end)"""
        plan = self.plan
        each = zip(self.owners, plan.run_starts.tolist(), plan.run_counts.tolist(), strict=True)
        return [(seq.request.request_id, start, start + count) for seq, start, count in each]

    def positions(self, name: str) -> list[int]:
        """Positions of the rows that the array `name` selects."""
        rows = self.plan.arrays["positions"][self.plan.arrays[name]]
        return [int(p) for p in rows]


class Device:
    """Memory by page and by slot. `run` executes a flight."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.truth: dict[Name, Truth] = {}
        self.clear()

    def clear(self) -> None:
        """As after a step that broke off: nothing is left."""
        self.table: dict[tuple[int, int], int] = {}
        self.pages: dict[int, list[Mark | None]] = {}
        self.rings: dict[tuple[int, str], dict[int, Any]] = {}  # by slot and kind: encoder, decoder, look-back
        self.last: dict[int, int] = {}
        self.rows: dict[int, SamplingRow] = {}

    def page(self, number: int) -> list[Mark | None]:
        assert number > 0, "page 0 is padding"
        return self.pages.setdefault(number, [None] * self.page_size)

    def forget_page(self, number: int) -> None:
        self.pages.pop(number, None)

    def forget_slot(self, slot: int) -> None:
        for kind in ("encoder", "decoder", "ids"):
            self.rings.pop((slot, kind), None)
        self.last.pop(slot, None)

    def ring(self, slot: int, kind: str) -> dict[int, Any]:
        return self.rings.setdefault((slot, kind), {})

    def truth_of(self, seq: Sequence) -> Truth:
        return self.truth[seq.request.request_id, seq.index]

    def run(self, flight: Flight) -> None:
        plan, a = flight.plan, flight.plan.arrays
        for slot, index, page in a.get("page_updates", np.empty((3, 0))).T.tolist():
            assert slot > 0 and page > 0
            self.table[slot, index] = page
        for slot, p, token in a.get("remember", np.empty((3, 0))).T.tolist():
            assert slot > 0
            self.ring(slot, "ids")[p] = token
        row = 0
        for i, seq in enumerate(flight.owners):
            self._run(flight, i, seq, row)
            row += int(plan.run_counts[i])
        for source, target in a.get("slot_copies", np.empty((2, 0))).T.tolist():
            assert source > 0 and target > 0
            for kind in ("encoder", "decoder", "ids"):
                self.rings[target, kind] = dict(self.ring(source, kind))
        for source, target in a.get("page_copies", np.empty((2, 0))).T.tolist():
            assert all(mark is None for mark in self.page(target)), "a copy over something"
            self.pages[target] = list(self.page(source))
        self._sample(flight)

    def _run(self, flight: Flight, i: int, seq: Sequence, row: int) -> None:
        """One run: its rows write, then every cell that they may read is compared with the truth."""
        plan, a, size = flight.plan, flight.plan.arrays, self.page_size
        slot, start, count = int(plan.run_slots[i]), int(plan.run_starts[i]), int(plan.run_counts[i])
        truth, rows, end = self.truth_of(seq), slice(row, row + count), start + count
        assert end <= seq.max_rows, "a row beyond the last"
        ids = a["ids"][rows].tolist()
        if i < plan.num_decode:
            assert count == 1
            ids = [self.last[slot]]
        assert ids == truth.tokens[start:end]
        kv_slots = a.get("kv_slots", a["slots"])[rows].tolist()
        ring_floor = set(a["ring_floor"][rows].tolist() if "ring_floor" in a else [0])
        floor = set(a["window_floor"][rows].tolist())
        assert len(ring_floor) == len(floor) == 1
        self._check_rings(slot, start, *ring_floor, *floor, truth, self._kept(plan, rows))
        shown = {im.first + k: (im.span.digest, im.offset + k) for im in plan.images for k in range(im.count)}
        before = hash(seq.prompt.namespace)
        if start:
            before = self._read(slot, start - 1)
        encoder, decoder, looks = (self.ring(slot, kind) for kind in ("encoder", "decoder", "ids"))
        kept = self._kept(plan, rows)
        for p, token, kv_slot in zip(range(start, end), ids, kv_slots, strict=True):
            at = row + p - start
            before = make_mark(before, token, shown.get(at))
            assert kv_slot in (0, slot)
            if kv_slot:
                cells = self.page(self.table[slot, p // size])
                assert cells[p % size] is None, "written twice, or while somebody else's"
                cells[p % size] = before
            encoder[p] = before
            if at in kept:
                decoder[p] = before
            looks[p] = -1 if at in shown else token
        for first in range(0, end, size):
            stop = min(end, first + size)
            cells = self.page(self.table[slot, first // size])
            assert cells[: stop - first] == truth.marks[first:stop], "a page of somebody else"

    def _read(self, slot: int, p: int) -> Mark:
        mark = self.page(self.table[slot, p // self.page_size])[p % self.page_size]
        assert mark is not None, "a read of nothing"
        return mark

    @staticmethod
    def _kept(plan: StepPlan, rows: slice) -> set[int]:
        every = set(range(rows.start, rows.stop))
        return every & set(plan.arrays["kept"].tolist()) if "kept" in plan.arrays else every

    def _check_rings(self, slot: int, start: int, ring_floor: int, floor: int, truth: Truth, kept: set[int]) -> None:
        for kind, lowest in (("encoder", ring_floor), ("decoder", max(ring_floor, floor))):
            if kind == "encoder" or kept:
                ring = self.ring(slot, kind)
                for p in range(max(lowest, start - WINDOW + 1), start):
                    assert ring.get(p) == truth.marks[p], f"{kind} ring at {p}"
        looks = self.ring(slot, "ids")
        for p in range(max(0, start - LOOK_BACK), start):
            assert looks[p] in (truth.tokens[p], -1) and (looks[p] == -1) == (truth.tokens[p] == IMAGE)

    def _sample(self, flight: Flight) -> None:
        plan, a = flight.plan, flight.plan.arrays
        for slot, sampling in plan.samplers:
            self.rows[slot] = sampling
        flight.tokens = []
        for slot, at, seq in zip(plan.sample_slots.tolist(), plan.sample_logits.tolist(), flight.samplers, strict=True):
            sampling, position = self.rows[slot], int(a["positions"][a["logit_rows"][at]])
            assert (sampling.seed, sampling.sample_index) == (seq.request.seed, seq.index), "somebody else's parameters"
            assert sampling.position == position + 1, "drawn for another position"
            token = self.truth_of(seq).tokens[position + 1]
            sampling.append(token)
            self.last[slot] = token
            flight.tokens.append(token)
        for wanted in plan.prompt_logprobs:
            entries = []
            for j, target in enumerate(wanted.targets):
                p = int(a["positions"][a["logit_rows"][wanted.first + j]])
                assert wanted.seq.prompt.token_ids[p + 1] == target
                entries.append({p + 1: target})
            flight.prompt_logprobs.append(entries)


class Host:
    """Submits, steps, aborts; keeps `depth` steps in flight. eager: the device runs a step at once, not when it is
    waited for. After every call all that should always hold is checked.
    """

    def __init__(self, sched: Scheduler, depth: int = 1, eager: bool = False) -> None:
        self.sched, self.depth, self.eager = sched, depth, eager
        self.device = Device(sched.page_size)
        self.requests: dict[str, Request] = {}
        self.done: dict[str, Request] = {}
        self.in_flight: deque[Flight] = deque()
        self.confirmed: Counter[int] = Counter()  # rows, by incarnation
        self.key_marks: dict[bytes, Mark] = {}
        sched.pages.on_reuse = self.device.forget_page
        sched.slots.on_reuse = self.device.forget_slot
        self._watch(sched.pages, lambda flight: flight.touched)
        self._watch(sched.slots, lambda flight: flight.slots)

    def _watch(self, pool: Pool, touched: Any) -> None:
        take = pool.take

        def watched(count: int) -> list[int]:
            taken = take(count)
            for flight in self.in_flight:
                assert not touched(flight) & set(taken), f"a {pool.kind} that a step in flight may touch is handed out"
            return taken

        pool.take = watched  # type: ignore[method-assign]

    def submit(self, request: Request, eos: list[int | None] | None = None, fails: int | None = None) -> Request:
        """eos: by sample, the output that is EOS. fails: the output of the first sample that cannot be sampled."""
        for seq in request.sequences:
            end = eos[seq.index] if eos else None
            self.device.truth[request.request_id, seq.index] = Truth.of(seq, end, None if seq.index else fails)
        self.requests[request.request_id] = request
        self.sched.add(request.sequences[0], request.sequences[1:])
        return request

    def abort(self, name: str | int) -> None:
        """As Engine.abort."""
        if request := self.requests.get(str(name)):
            self._end(request)
            self.check()

    def _end(self, request: Request) -> None:
        live = [seq for seq in request.sequences if seq.finish_reason is None]
        self.sched.remove(live)
        for seq in live:
            seq.finish("abort")
        self.done[request.request_id] = self.requests.pop(request.request_id)

    def break_off(self) -> None:
        """As Engine._recover: the steps in flight count for nothing, memory is lost."""
        self.in_flight.clear()
        self.device.clear()
        self.sched.restart()
        for request in [r for r in self.requests.values() if r.finished]:  # its last token was applied before
            self.done[request.request_id] = self.requests.pop(request.request_id)
        self.check()

    def step(self) -> Flight | None:
        """As Engine.step; returns what was launched."""
        flight = None
        plan = self.sched.schedule()
        self._check_progress(plan)
        if plan is not None:
            flight = self.launch(plan)
        if self.in_flight and (plan is None or len(self.in_flight) >= self.depth):
            self.apply()
        self.check()
        return flight

    def next(self) -> Flight:
        """A step that must run something."""
        flight = self.step()
        assert flight is not None
        return flight

    def finish(self, limit: int = 3000) -> None:
        """Step until nothing is left, and check that nothing is."""
        for _ in range(limit):
            if not self.requests:
                break
            before = len(self.in_flight)
            assert self.step() is not None or before, "deadlock"
        assert not self.requests, "no end"
        while self.in_flight:
            self.apply()
            self.check()
        assert self.sched.schedule() is None
        self.check_idle()

    def launch(self, plan: StepPlan) -> Flight:
        table = self.sched.table
        owners = [table.seqs[slot] for slot in plan.run_slots.tolist()]
        samplers = [table.seqs[slot] for slot in plan.sample_slots.tolist()]
        copies = plan.arrays.get("page_copies", np.empty((2, 0))).ravel().tolist()
        touched = {page for seq in owners if seq is not None for page in seq.pages} | set(copies)
        slots = {*plan.run_slots.tolist(), *plan.arrays.get("slot_copies", np.empty((2, 0))).ravel().tolist()}
        flight = Flight(plan, [s for s in owners if s], [s for s in samplers if s], touched, slots)
        self._check_plan(flight)
        self.in_flight.append(flight)
        if self.eager:
            self.device.run(flight)
        return flight

    def apply(self) -> None:
        """As Engine._apply."""
        flight, table = self.in_flight[0], self.sched.table
        if flight.tokens is None:
            self.device.run(flight)
        self.in_flight.popleft()
        plan, tokens = flight.plan, flight.tokens
        assert tokens is not None
        live = (table.incarnation[plan.sample_slots] == plan.sample_incarnations).tolist()
        ended, failed = [], []
        for i, (slot, token, counts) in enumerate(zip(plan.sample_slots.tolist(), tokens, live, strict=True)):
            seq = table.seqs[slot]
            if not counts or seq is None:
                continue
            assert seq is flight.samplers[i]
            if self.device.truth_of(seq).fails == len(seq.output_ids):
                failed.append(seq.request)
            elif plan.is_last[i] or table.careful[slot] or token == table.eos[slot] or i >= plan.num_decode:
                seq.accept(token, None, None)
                if seq.finish_reason is not None:
                    ended.append(seq)
            else:
                seq.output_ids.append(token)
        alive = table.alive(plan)
        for wanted, entries in zip(plan.prompt_logprobs, flight.prompt_logprobs, strict=True):
            if alive[wanted.run]:
                assert wanted.seq is flight.owners[wanted.run]
                wanted.seq.request.prompt_logprobs.extend(entries)  # type: ignore[union-attr, arg-type]
        for incarnation, start, count in zip(plan.run_incarnations, plan.run_starts, plan.run_counts, strict=True):
            self.confirmed[int(incarnation)] = int(start + count)
        self.sched.confirm(plan)
        self.sched.remove(ended)
        for request in dict.fromkeys(failed):
            self._end(request)
        for request in dict.fromkeys(seq.request for seq in ended):
            if request.finished and request.request_id in self.requests:
                self.done[request.request_id] = self.requests.pop(request.request_id)

    # ---- what always holds ----

    def _check_progress(self, plan: StepPlan | None) -> None:
        """The best-ranked sequence has rows in the step that was planned, or a reason not to."""
        sched, table = self.sched, self.sched.table
        if sched.pages.num_fenced or sched.slots.num_fenced:
            return  # it may wait for a step in flight to let go of them
        if not sched.running:
            assert not sched.waiting, "nobody runs, everything is free, and yet somebody waits"
            return
        if plan is not None and plan.num_decode == sched.max_rows:
            return  # only with a budget below the running
        best = sched.running[0]
        if sched.waiting and sched.waiting[0].rank < best.rank:
            # it came later than its equals, or what runs has grown since room was made for it
            assert sched.waiting[0].request.priority == best.request.priority or not sched._fits(sched.waiting[0])
        all_planned = table.planned[best.slot] == table.limit[best.slot]
        assert all_planned or (plan is not None and best.slot in plan.run_slots), "no progress"

    def _check_plan(self, flight: Flight) -> None:
        sched, plan, a = self.sched, flight.plan, flight.plan.arrays
        size = sched.page_size
        assert 0 < plan.num_rows <= sched.max_rows, "budget"
        assert len(flight.owners) == len(plan.run_slots) == len(set(flight.owners)), "a run of nobody, or two of one"
        assert len(flight.samplers) == len(plan.sample_slots) == len(set(flight.samplers))
        assert (a["slots"] > 0).all() and len(a["ids"]) == int(plan.run_counts.sum())
        first, updates = 0, a.get("page_updates", np.empty((3, 0))).T.tolist()
        assert len({(slot, index) for slot, index, _ in updates}) == len(updates), "an entry is written twice"
        kept = a["kept"].tolist() if "kept" in a else list(range(plan.num_rows))
        assert kept == sorted(set(kept)) and set(a["logit_rows"].tolist()) <= set(kept)
        for i, seq in enumerate(flight.owners):
            slot, start, count = int(plan.run_slots[i]), int(plan.run_starts[i]), int(plan.run_counts[i])
            rows = slice(first, first + count)
            assert slot == seq.slot and a["positions"][rows].tolist() == list(range(start, start + count))
            assert set(a["slots"][rows].tolist()) == {slot} and set(a["run_start"][rows].tolist()) == {first}
            assert sched.table.planned[slot] == start + count <= len(seq.pages) * size
            for p, kv in zip(range(start, start + count), a.get("kv_slots", a["slots"])[rows].tolist(), strict=True):
                assert kv == (0 if p < sched.table.kv_floor[slot] else slot)
            first += count
        ranks = [seq.rank for seq in flight.owners]
        assert ranks[: plan.num_decode] == sorted(ranks[: plan.num_decode])
        assert ranks[plan.num_decode :] == sorted(ranks[plan.num_decode :])

    def check(self) -> None:
        sched, table = self.sched, self.sched.table
        size, running = sched.page_size, sched.running
        for queue in (sched.running, sched.waiting, sched.prefilling):
            ranks = [seq.rank for seq in queue]
            assert ranks == sorted(set(ranks)), "order, or somebody twice"
        assert not set(running) & set(sched.waiting) and set(sched.prefilling) <= set(running)
        assert all(not seq.slot and not seq.pages for seq in sched.waiting)
        queued = {*running, *sched.waiting, *(f for s in (*running, *sched.waiting) for f in s.followers)}
        unfinished = {s for r in self.requests.values() for s in r.sequences if s.finish_reason is None}
        assert queued == unfinished, "somebody is lost"
        assert sched.pages._refs == Counter(page for seq in running for page in seq.pages)
        assert sched.slots._refs == Counter(seq.slot for seq in running)
        for pool in (sched.pages, sched.slots):
            numbers = [*pool._free, *pool._idle, *pool._fenced, *pool._refs]
            assert sorted(numbers) == list(range(1, pool.total + 1)), "lost or in two places"
            assert pool.num_free + pool.num_used + pool.num_fenced == pool.total
            assert self.in_flight or not pool._fenced
        for seq in running:
            slot, pages = seq.slot, seq.pages
            planned, confirmed = int(table.planned[slot]), self.confirmed[int(table.incarnation[slot])]
            assert table.seqs[slot] is seq and table.num_pages[slot] == len(pages) == len(set(pages))
            assert planned >= confirmed >= 0 and planned <= table.limit[slot]
            if table.decoding[slot]:
                assert seq not in sched.prefilling
                assert 0 <= planned - (seq.num_tokens - 1) <= len(self.in_flight)
            else:
                assert seq in sched.prefilling and planned < seq.num_known == seq.num_tokens
            for index, page in enumerate(pages):
                if sched.pages._refs[page] > 1:
                    assert (index + 1) * size <= max(planned, table.kv_floor[slot]), (
                        "a shared page that somebody still writes"
                    )
        if sched.prefix is not None:
            self._check_prefix(sched)

    def _check_prefix(self, sched: Scheduler) -> None:
        assert sched.prefix is not None
        assert {page: key for key, page in sched.prefix._page_of.items()} == sched.prefix._key_of
        assert set(sched.pages._idle) <= set(sched.prefix._key_of)
        for page, key in sched.prefix._key_of.items():
            mark = self.device.page(page)[-1]
            assert mark is not None and None not in self.device.page(page), "cached before it was confirmed"
            assert self.key_marks.setdefault(key, mark) == mark, "one key, two contents"

    def check_idle(self) -> None:
        sched = self.sched
        assert not (sched.running or sched.waiting or sched.prefilling)
        sched.pages.check_idle()
        sched.slots.check_idle()
        assert sched.pages.num_idle == (0 if sched.prefix is None else len(sched.prefix))

    def check_answers(self, names: Iterable[str | int]) -> None:
        """Those that were neither aborted nor failed said all they had to say, and nothing more."""
        for name in names:
            request = self.done[str(name)]
            for seq in request.sequences:
                truth = self.device.truth_of(seq).tokens[seq.num_prompt :][: request.max_tokens]
                said = truth[: truth.index(EOS) + 1] if EOS in truth else truth
                assert seq.output_ids == said
                assert seq.finish_reason == ("stop" if said[-1] == EOS else "length")
            if request.params.prompt_logprobs is not None:
                ids = request.prompt.token_ids
                assert request.prompt_logprobs == [None, *({p: ids[p]} for p in range(1, len(ids)))]


def make_scheduler(
    pages: int = 8, slots: int = 4, budget: int = 16, *, page: int = 8, compact: bool = True, prefix: bool = False
) -> Scheduler:
    return Scheduler(
        num_pages=pages,
        num_slots=slots,
        page_size=page,
        max_num_batched_tokens=budget,
        compact=compact,
        prefix_keep=KEEP if prefix else None,
    )


def fits(request: Request, sched: Scheduler) -> bool:
    """What the engine accepts."""
    return pages_for(request.sequences[0].max_rows, sched.page_size) <= sched.pages.total
