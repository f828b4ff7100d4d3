"""Which rows run in the next step: continuous batching over flat rows, page allocation, preemption.

Belongs here: policy, in plain Python and numpy. Does not belong here: tensors (runner.py), tokens and stop
rules (requests.py). One step mixes decode rows and prompt chunks, at most `max_num_batched_tokens` rows
together.

Order is by arrival, always: `running` followed by `waiting` is sorted. It gives progress without deadlock:
- A request is admitted when pages for all its known tokens are free, and one more for each running request
  that may still grow, so a prefill never stops halfway for lack of pages.
- Decode rows that need a page preempt the newest running request. The oldest can take everything, and every
  accepted request fits into the whole pool, so at least the oldest gets its rows in every step.
- A preempted request gives up its memory and recomputes prompt and output later; its replay floor stays, so
  its text does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.pages import Pool, pages_for
from deepinfer.engine.requests import Sequence

PROMPT_LOGPROB_ROWS = 512  # logit rows of a step that prompt logprobs may ask for: 252 MiB at 129,280 ids


@dataclass(frozen=True)
class Run:
    """Rows [start, end) of one sequence in one step. Logits are wanted of its rows from `logits_from` on."""

    seq: Sequence
    start: int
    end: int
    logits_from: int

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def samples(self) -> bool:
        """Whether the last row is the newest token, so that its logits give the next one."""
        return self.end == self.seq.num_tokens


@dataclass(frozen=True)
class StepPlan:
    """One step as arrays; T rows in runs, each run one sequence with ascending positions.

    Page-table updates come before the rows. `kept` is None when the decoder half runs on every row.
    `logit_rows` follow the order of the runs.
    """

    step: int
    runs: list[Run]
    ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    slots: NDArray[np.int32]  # [T]
    run_start: NDArray[np.int32]  # [T] row index of the run's first row
    is_image: NDArray[np.bool_]  # [T]
    window_floor: NDArray[np.int32]  # [T]
    kept: NDArray[np.int64] | None  # [Tk]
    logit_rows: NDArray[np.int64]  # [S]
    page_updates: NDArray[np.int64]  # [n, 3]: slot, index in its page table, page

    @property
    def num_rows(self) -> int:
        return len(self.ids)


class Scheduler:
    """Owns the queues and the page and slot numbers. `schedule` plans a step, `commit` records that it
    ran.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        num_slots: int,
        page_size: int,
        max_num_batched_tokens: int,
        compact: bool = True,
    ) -> None:
        """compact: drop the rows below a sequence's replay floor from the decoder half."""
        self.pages = Pool("page", num_pages)
        self.slots = Pool("slot", num_slots)
        self.page_size = page_size
        self.max_rows = max_num_batched_tokens
        self.compact = compact
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_steps = 0
        self.num_preemptions = 0
        self._page_updates: list[tuple[int, int, int]] = []

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seqs: Iterable[Sequence]) -> None:
        """Take sequences out (finished or aborted) and free what they hold. Unknown ones are ignored."""
        gone = set(seqs)
        if not gone:
            return
        self.running = [seq for seq in self.running if seq not in gone]
        self.waiting = deque(seq for seq in self.waiting if seq not in gone)
        for seq in gone:
            self._release(seq)

    def restart(self) -> None:
        """Forget what is in memory: every running sequence recomputes. For a step that broke off in the
        middle.
        """
        queue = [s for s in dict.fromkeys([*self.running, *self.waiting]) if s.finish_reason is None]
        for seq in queue:
            seq.pages, seq.slot, seq.num_computed = [], 0, 0
        self.running, self.waiting = [], deque(queue)
        self._page_updates = []
        self.pages.reset()
        self.slots.reset()

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing is queued."""
        runs: list[Run] = []
        budget = self._decode(runs, self.max_rows)
        budget = self._prefill(runs, budget)
        self._admit(runs, budget)
        if not runs:
            return None
        self.num_steps += 1
        plan = _plan(self.num_steps, runs, self.compact, self._page_updates)
        self._page_updates = []
        return plan

    def commit(self, plan: StepPlan) -> None:
        """The step ran: its rows are computed."""
        for run in plan.runs:
            run.seq.num_computed = run.end

    def _decode(self, runs: list[Run], budget: int) -> int:
        index = 0
        while index < len(self.running) and budget:
            seq = self.running[index]
            if seq.num_left == 1 and self._grow(seq):
                runs.append(_run(seq, 1))
                budget -= 1
            index += 1
        return budget

    def _prefill(self, runs: list[Run], budget: int) -> int:
        for seq in self.running:
            if seq.num_left > 1 and budget:
                budget -= self._chunk(seq, runs, budget)
        return budget

    def _admit(self, runs: list[Run], budget: int) -> None:
        while self.waiting and budget and self.slots.num_free:
            seq = self.waiting[0]
            need = pages_for(seq.num_tokens, self.page_size)
            growing = sum(len(r.pages) < pages_for(r.max_rows, self.page_size) for r in self.running)
            if need + growing > self.pages.num_free:
                return
            self.running.append(seq)  # first in, then out: an interrupt in between loses nothing (`restart`)
            self.waiting.popleft()
            (seq.slot,) = self.slots.take(1)
            self._extend(seq, need)
            budget -= self._chunk(seq, runs, budget)

    def _chunk(self, seq: Sequence, runs: list[Run], budget: int) -> int:
        if seq.wants_prompt_logprobs:
            logits = sum(run.end - run.logits_from for run in runs)
            budget = min(budget, max(1, PROMPT_LOGPROB_ROWS - logits))
        runs.append(_run(seq, min(budget, seq.num_left)))
        return runs[-1].count

    def _grow(self, seq: Sequence) -> bool:
        """Make sure that the page of the newest token exists; False when `seq` itself had to be preempted for
        it.
        """
        if seq.num_tokens <= len(seq.pages) * self.page_size:
            return True
        while not self.pages.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        self._extend(seq, 1)
        return True

    def _extend(self, seq: Sequence, count: int) -> None:
        for page in self.pages.take(count):
            self._page_updates.append((seq.slot, len(seq.pages), page))
            seq.pages.append(page)

    def _preempt(self, seq: Sequence) -> None:
        self.waiting.appendleft(seq)
        self.running.remove(seq)
        self._release(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _release(self, seq: Sequence) -> None:
        if not seq.slot:
            return
        pages, slot = seq.pages, seq.slot
        seq.pages, seq.slot, seq.num_computed = [], 0, 0
        self.pages.give_back(pages)
        self.slots.give_back([slot])


def _run(seq: Sequence, count: int) -> Run:
    start, end = seq.num_computed, seq.num_computed + count
    logits_from = end - 1 if end == seq.num_tokens else end
    if (
        seq.wants_prompt_logprobs
    ):  # row p gives the logprob of prompt token p + 1; rows before were done before a preemption
        logits_from = min(logits_from, max(start, seq.next_prompt_logprob - 1))
    return Run(seq, start, end, logits_from)


def _ranges(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """begin, begin + 1, ..., `count` numbers of each, joined: one array operation for all runs."""
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def _plan(step: int, runs: list[Run], compact: bool, page_updates: list[tuple[int, int, int]]) -> StepPlan:
    facts = [(run.start, run.count, run.end - run.logits_from, run.seq.slot, run.seq.floor) for run in runs]
    starts, counts, logits, slots, floors = np.array(facts, dtype=np.int64).T
    firsts = np.cumsum(counts) - counts
    tokens = chain.from_iterable(run.seq.tokens(run.start, run.end) for run in runs)
    ids = np.fromiter(tokens, np.int32, counts.sum())
    positions = _ranges(starts, counts).astype(np.int32)
    is_image = np.zeros(len(ids), dtype=np.bool_)
    for run, first in zip(runs, firsts, strict=True):
        for span in run.seq.prompt.images:
            begin, end = max(span.start, run.start), min(span.start + span.length, run.end)
            is_image[first + begin - run.start : first + max(begin, end) - run.start] = True
    floor = np.repeat(floors.astype(np.int32), counts)
    kept = np.flatnonzero(positions >= floor) if compact else None
    if kept is not None and len(kept) == len(ids):
        kept = None
    return StepPlan(
        step=step,
        runs=runs,
        ids=ids,
        positions=positions,
        slots=np.repeat(slots.astype(np.int32), counts),
        run_start=np.repeat(firsts.astype(np.int32), counts),
        is_image=is_image,
        window_floor=floor,
        kept=kept,
        logit_rows=_ranges(firsts + counts - logits, logits),
        page_updates=np.array(page_updates, dtype=np.int64).reshape(-1, 3),
    )
