"""Which rows run in the next step: continuous batching over flat rows, page allocation, preemption, forks, hits.

Belongs here: policy, in plain Python and numpy. Does not belong here: arrays of a step (plan.py), tensors (runner.py),
tokens and stop rules (requests.py). It plans ahead of the device: its counters are of planned rows, `confirm` tells it
that a step has ended. One step mixes decode rows and prompt chunks, at most `max_num_batched_tokens` rows together.

Order is by rank (priority, then arrival), always. It gives progress without deadlock:
- A request is admitted when pages for all its known tokens are free, and one more for each running request that may
  still grow, so a prefill never stops halfway for lack of pages. A higher priority displaces a lower one for that.
- Decode rows that need a page preempt the last running request, then wait until the steps in flight have let go of
  its pages. The first in rank can take everything, and every accepted request fits into the whole pool.
- A preempted request gives up its memory and recomputes prompt and output later, from the same prefix hit or without
  one; its replay floor stays. So its text does, unless the pages of its hit are gone by then.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.pages import Pool, pages_for
from deepinfer.cache.prefix import PrefixCache, extend_keys
from deepinfer.engine.plan import Chunk, PlanBuilder, SlotTable, StepPlan, look_back
from deepinfer.engine.requests import Sequence

PROMPT_LOGPROB_ROWS = 512  # logit rows of a step that prompt logprobs may ask for: 252 MiB at 129,280 ids


_rank = attrgetter("rank")


class Scheduler:
    """Owns the queues and the page and slot numbers. `schedule` plans a step, `confirm` records that it ended."""

    def __init__(
        self,
        *,
        num_pages: int,
        num_slots: int,
        page_size: int,
        max_num_batched_tokens: int,
        compact: bool = True,
        prefix_keep: int | None = None,
        look_back: int = 3,
    ) -> None:
        """compact: drop rows below a replay floor from the decoder half. prefix_keep: rows that a prefix hit runs again
        to fill the windows; None: no prefix cache. look_back: ids before a row that Engram hashes with it."""
        self.pages = Pool("page", num_pages)
        self.slots = Pool("slot", num_slots)
        self.page_size = page_size
        self.max_rows = max_num_batched_tokens
        self.compact = compact
        self.prefix = None if prefix_keep is None else PrefixCache(self.pages, page_size)
        self.prefix_keep = 2 * pages_for(prefix_keep or 0, 2)  # even: pairs of a ratio-2 source are whole
        self.look_back = look_back
        self.table = SlotTable(num_slots + 1)
        self.waiting: list[Sequence] = []  # both sorted by rank
        self.running: list[Sequence] = []
        self.prefilling: list[Sequence] = []  # those of `running` with known tokens to run
        self.num_steps = 0
        self.num_preemptions = 0
        self._incarnations = itertools.count(1)
        self._order: NDArray[np.int64] | None = None  # slots of `running`
        self._promised = 0  # fenced pages that decode rows of this step wait for
        self._builder = PlanBuilder()

    # ---- queue ----

    def add(self, seq: Sequence, followers: Iterable[Sequence] = ()) -> None:
        """Queue a sequence; `followers` are samples of the same prompt, which share its prefill."""
        seq.followers = list(followers)
        insort(self.waiting, seq, key=_rank)

    def remove(self, seqs: Iterable[Sequence]) -> None:
        """Take sequences out (finished or aborted) and free what they hold. Unknown ones are ignored."""
        for seq in seqs:
            seq.followers = []
            if seq.slot:
                self._release(seq)
            elif (at := bisect_left(self.waiting, seq.rank, key=_rank)) < len(self.waiting) and self.waiting[at] is seq:
                del self.waiting[at]

    def restart(self) -> None:
        """A step broke off: forget what is in memory, every running sequence recomputes. Nothing may be in flight."""
        known = dict.fromkeys([*self.running, *self.waiting])
        for seq in known:
            seq.pages, seq.slot, seq.followers = [], 0, [f for f in seq.followers if f not in known]
        queue = [seq for seq in known if seq.finish_reason is None]
        self.waiting, self.running, self.prefilling = sorted(queue, key=_rank), [], []
        self.table.reset()
        self._order, self._builder = None, PlanBuilder()
        self.pages.reset()
        self.slots.reset()
        if self.prefix is not None:
            self.prefix.clear()

    # ---- steps ----

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a step in flight is confirmed, or nothing is queued."""
        self._promised = 0
        self._displace()
        decode = self._decode()
        budget = self.max_rows - len(decode)
        prefilling = self.prefilling[::-1]
        while budget and (seq := self._next(prefilling)):
            budget -= self._chunk(seq, budget)
        if not len(decode) and not self._builder.chunks:
            return None
        self.num_steps += 1
        plan = self._builder.build(self.num_steps, decode, self.table, self.compact)
        self._builder = PlanBuilder()
        self.pages.launched(plan.step)
        self.slots.launched(plan.step)
        return plan

    def confirm(self, plan: StepPlan) -> None:
        """The step and all before it have ended, and its tokens are in `output_ids`."""
        if self.prefix is not None:
            ends = plan.run_starts + plan.run_counts
            full = ends // self.page_size > plan.run_starts // self.page_size
            for i in np.flatnonzero(full & self.table.alive(plan)).tolist():
                self._register(self.table.seqs[plan.run_slots[i]], int(plan.run_starts[i]), int(ends[i]))
        self.pages.confirmed(plan.step)
        self.slots.confirmed(plan.step)

    def _register(self, seq: Sequence | None, start: int, end: int) -> None:
        assert seq is not None and self.prefix is not None
        prompt = seq.prompt
        extend_keys(seq.keys, seq.tokens, end, self.page_size, prompt.images, prompt.namespace)
        for index in range(start // self.page_size, end // self.page_size):
            self.prefix.insert(seq.keys[index], seq.pages[index])

    def _decode(self) -> NDArray[np.int64]:
        """Slots that decode in this step, their pages made sure of."""
        table = self.table
        if self._order is None:
            self._order = np.fromiter((seq.slot for seq in self.running), np.int64, len(self.running))
        slots = self._order
        slots = slots[table.decoding[slots] & (table.planned[slots] < table.limit[slots])][: self.max_rows]
        needy = slots[table.planned[slots] >= table.num_pages[slots] * self.page_size]
        if len(needy):
            held = [slot for slot in needy.tolist() if not self._grow(slot)]
            slots = slots[table.decoding[slots] & ~np.isin(slots, held)]
        return slots

    def _grow(self, slot: int) -> bool:
        """Whether the next row of `slot` has a page: preempts for it, which may take the sequence itself."""
        seq = self.table.seqs[slot]
        if seq is None:
            return False
        while not self.pages.num_free:
            if self.pages.num_fenced > self._promised:
                self._promised += 1
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        self._extend(seq, self.pages.take(1))
        return True

    def _next(self, prefilling: list[Sequence]) -> Sequence | None:
        """Who gets rows next, by rank: the last of `prefilling`, or the first in the queue if there is room for it."""
        first = self.waiting[0] if self.waiting else None
        if first and (not prefilling or first.rank < prefilling[-1].rank) and self._fits(first):
            return self._admit()
        return prefilling.pop() if prefilling else None

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """Plan the next rows of a sequence that has known tokens to run; returns their number."""
        table, slot, builder = self.table, seq.slot, self._builder
        start = int(table.planned[slot])
        if seq.wants_prompt_logprobs:
            budget = min(budget, max(1, PROMPT_LOGPROB_ROWS - builder.num_logits))
        end = min(seq.num_known, start + budget)
        samples = end == seq.num_known
        logits_from = end - samples
        if seq.wants_prompt_logprobs:  # row p gives the logprob of prompt token p + 1
            logits_from = min(logits_from, max(start, seq.prompt_logprobs_planned - 1))
            seq.prompt_logprobs_planned = max(seq.prompt_logprobs_planned, min(end + 1, seq.num_prompt))
        chunk = Chunk(seq, slot, start, end, logits_from)
        builder.chunks.append(chunk)
        builder.num_logits += end - logits_from
        table.planned[slot] = end
        if samples:
            self.prefilling.remove(seq)
            table.decoding[slot] = True
            chunk.samplers.append(seq)
            self._fork(seq, chunk)
        return end - start

    # ---- memory ----

    def _fits(self, seq: Sequence) -> bool:
        if not self.slots.num_free:
            return False
        hit = self._hit(seq)  # those that are idle count as free, but are not to be taken for others
        need = pages_for(seq.num_tokens, self.page_size) - len(hit) + sum(map(self.pages.is_idle, hit))
        return need + self.table.count_growing(self.page_size) <= self.pages.num_free

    def _hit(self, seq: Sequence) -> list[int]:
        """Pages that hold the beginning of its prompt, if worth it. A sequence that ran before (or whose leader did)
        gets those it had, or none: its text stays what it was."""
        if self.prefix is None or seq.request.prompt_logprobs is not None:
            return []
        end, prompt = seq.num_prompt - 1, seq.prompt  # the last token must run: its logits are wanted
        extend_keys(seq.keys, seq.tokens, end, self.page_size, prompt.images, prompt.namespace)
        pages = self.prefix.lookup(seq.keys[: (end if seq.hit is None else seq.hit) // self.page_size])
        found = len(pages) * self.page_size
        return pages if found > self.prefix_keep and seq.hit in (None, found) else []

    def _admit(self) -> Sequence:
        seq, hit = self.waiting[0], self._hit(self.waiting[0])
        insort(self.running, seq, key=_rank)  # first in, then out: an interrupt in between loses nothing (`restart`)
        del self.waiting[0]
        self._occupy(seq, hit, pages_for(seq.num_tokens, self.page_size))
        insort(self.prefilling, seq, key=_rank)
        cached = len(hit) * self.page_size
        if self.prefix is not None and not seq.num_preemptions:
            self.prefix.queries, self.prefix.hits = self.prefix.queries + seq.num_prompt, self.prefix.hits + cached
            seq.request.num_cached_tokens = seq.request.num_cached_tokens if seq.index else cached
        seq.hit = cached
        if hit:
            start, table = cached - self.prefix_keep, self.table
            table.planned[seq.slot] = table.ring_floor[seq.slot] = start
            table.kv_floor[seq.slot] = cached
            table.floor[seq.slot] = max(start, seq.floor)
            self._builder.remember += look_back(seq, start, self.look_back)
        return seq

    def _fork(self, leader: Sequence, chunk: Chunk) -> None:
        """Samples of the same prompt go on from a copy of its memory; those that find no room queue by themselves."""
        for seq in leader.followers:
            full, rest = divmod(chunk.end, self.page_size)
            need = bool(rest) + self.table.count_growing(self.page_size) + 1
            if not self.slots.num_free or need > self.pages.num_free:
                seq.hit = leader.hit
                insort(self.waiting, seq, key=_rank)
                continue
            insort(self.running, seq, key=_rank)
            self._occupy(seq, leader.pages[:full], full + bool(rest))
            for name in ("planned", "floor", "ring_floor", "kv_floor", "decoding"):
                column = getattr(self.table, name)
                column[seq.slot] = column[leader.slot]
            self._builder.slot_copies.append((leader.slot, seq.slot))
            if rest:
                self._builder.page_copies.append((leader.pages[full], seq.pages[full]))
            chunk.samplers.append(seq)
        leader.followers = []

    def _occupy(self, seq: Sequence, shared: list[int], num_pages: int) -> None:
        """Give a sequence a slot and `num_pages` pages, the first of them `shared`."""
        (seq.slot,) = self.slots.take(1)
        seq.num_known = seq.num_tokens
        if seq.request.prompt_logprobs is not None:
            seq.prompt_logprobs_planned = len(seq.request.prompt_logprobs)
        self.table.occupy(seq, next(self._incarnations))
        self._order = None
        self.pages.share(shared)
        self._extend(seq, shared)
        self._extend(seq, self.pages.take(num_pages - len(shared)))
        self._builder.admitted.append(seq)

    def _extend(self, seq: Sequence, pages: list[int]) -> None:
        first = len(seq.pages)
        self._builder.page_updates += [(seq.slot, first + i, page) for i, page in enumerate(pages)]
        seq.pages += pages
        self.table.num_pages[seq.slot] = len(seq.pages)

    def _displace(self) -> None:
        """Make room for the first in the queue at the cost of running sequences of lower priority."""
        while self.waiting and self.running and not self._fits(self.waiting[0]):
            victim = self.running[-1]
            fenced = self.pages.num_fenced or self.slots.num_fenced  # perhaps enough already
            if victim.request.priority <= self.waiting[0].request.priority or fenced:
                return
            self._preempt(victim)

    def _preempt(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_rank)
        self._release(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _release(self, seq: Sequence) -> None:
        for queue in (self.running, self.prefilling):
            if seq in queue:  # not if an interrupt ended the first try here: abort comes again, then restart
                queue.remove(seq)
        pages, slot = seq.pages, seq.slot
        seq.pages, seq.slot, self._order = [], 0, None
        self.table.vacate(slot)
        self.pages.give_back(pages[::-1])  # the end of a prefix is the first to be forgotten
        self.slots.give_back([slot])
