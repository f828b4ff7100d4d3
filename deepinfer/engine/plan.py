"""A step as arrays, and the table of running sequences it is made from.

Belongs here: the layout of a step's rows (numpy). Does not belong here: what runs (scheduler.py), tensors (runner.py).
Legend: T rows, N runs (one sequence each, ascending positions), D decode rows (one run each, they come first),
S logit rows, R rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.requests import ImageSpan, Sequence
from deepinfer.engine.sampler import SamplingRow

Ints = NDArray[np.int64]


class SlotTable:
    """What a running sequence has planned, by slot; slot 0 is nobody's. One incarnation is one stay in a slot."""

    def __init__(self, size: int) -> None:
        def zeros() -> Ints:
            return np.zeros(size, dtype=np.int64)

        self.seqs: list[Sequence | None] = [None] * size
        self.outputs: list[list[int]] = [[] for _ in range(size)]  # their output_ids, to append to
        self.incarnation = zeros()
        self.planned = zeros()  # rows given to the device: the next row's position
        self.limit = zeros()  # the most rows it may have
        self.num_pages = zeros()
        self.floor = zeros()  # rows below are dropped by decoder replay
        self.ring_floor = zeros()  # no window key below exists (prefix hit)
        self.kv_floor = zeros()  # rows below were written by somebody else: they are run again without writing
        self.eos = zeros()
        self.decoding = np.zeros(size, dtype=np.bool_)  # its next input is the token it sampled last
        self.careful = np.zeros(size, dtype=np.bool_)  # every token needs a look

    def occupy(self, seq: Sequence, incarnation: int) -> None:
        slot = seq.slot
        self.seqs[slot], self.outputs[slot] = seq, seq.output_ids
        self.incarnation[slot], self.limit[slot], self.floor[slot] = incarnation, seq.max_rows, seq.floor
        self.planned[slot] = self.num_pages[slot] = self.ring_floor[slot] = self.kv_floor[slot] = 0
        self.eos[slot], self.careful[slot], self.decoding[slot] = seq.eos_id, seq.careful, False

    def vacate(self, slot: int) -> None:
        self.seqs[slot], self.outputs[slot] = None, []
        self.incarnation[slot] = self.limit[slot] = 0
        self.decoding[slot] = False

    def reset(self) -> None:
        for slot in range(len(self.seqs)):
            self.vacate(slot)

    def count_growing(self, page_size: int) -> int:
        """Sequences whose last possible row has no page yet."""
        return int(np.count_nonzero(self.limit > self.num_pages * page_size))

    def alive(self, plan: StepPlan) -> NDArray[np.bool_]:
        """[N] whether the run's sequence still holds the slot it had then."""
        same: NDArray[np.bool_] = self.incarnation[plan.run_slots] == plan.run_incarnations
        return same


@dataclass
class Chunk:
    """Rows [start, end) of a prompt (or of known tokens that are recomputed). Logits of rows from `logits_from` on.

    samplers: the sequence, and those that fork from it, where the last row gives their next token.
    """

    seq: Sequence
    slot: int
    start: int
    end: int
    logits_from: int
    samplers: list[Sequence] = field(default_factory=list)

    @property
    def num_logits(self) -> int:
        return self.end - self.logits_from


@dataclass(frozen=True)
class PromptLogprobs:
    """Rows [first, first + len(targets)) of a step's logits give the logprobs of the prompt tokens `targets`."""

    seq: Sequence
    run: int
    first: int
    targets: list[int]


@dataclass(frozen=True)
class ImageRows:
    """Rows [first, first + count) of a step show rows from `offset` on of an image."""

    first: int
    count: int
    span: ImageSpan
    offset: int


@dataclass(frozen=True)
class StepPlan:
    """One step. The device reads the arrays in the order of the fields of `arrays`; before the rows it writes the page
    table and look-back ids, after them it copies slots and pages of forks, then it samples.
    """

    step: int
    num_decode: int  # D: their ids are the tokens sampled last, which only the device knows
    run_slots: Ints  # [N]
    run_starts: Ints  # [N]
    run_counts: Ints  # [N]
    run_incarnations: Ints  # [N]
    sample_slots: Ints  # [R]
    sample_logits: Ints  # [R] index into the logit rows
    sample_incarnations: Ints  # [R]
    is_last: NDArray[np.bool_]  # [R] the sequence may not have more tokens
    arrays: dict[str, NDArray[np.int32]]  # by name of StepInputs' field, and page_updates [n, 3], remember [n, 3], ...
    samplers: list[tuple[int, SamplingRow]]  # by slot, of sequences whose first token of this stay is sampled
    prompt_logprobs: list[PromptLogprobs]
    images: list[ImageRows]
    admitted: list[Sequence]

    @property
    def num_rows(self) -> int:
        return len(self.arrays["ids"])


class PlanBuilder:
    """Collects what the scheduler decides for one step."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.num_logits = 0
        self.page_updates: list[tuple[int, int, int]] = []  # slot, index in its page table, page
        self.slot_copies: list[tuple[int, int]] = []  # from, to
        self.page_copies: list[tuple[int, int]] = []
        self.remember: list[tuple[int, int, int]] = []  # slot, position, id
        self.admitted: list[Sequence] = []

    def build(self, step: int, decode: Ints, table: SlotTable, compact: bool) -> StepPlan:
        """decode: slots of the decode rows. Advances their planned rows."""
        chunks, d = self.chunks, len(decode)
        starts, counts, logits = (np.empty(d + len(chunks), np.int64) for _ in range(3))
        slots = np.concatenate((decode, [c.slot for c in chunks])).astype(np.int64)
        starts[:d], counts[:d], logits[:d] = table.planned[decode], 1, 1
        table.planned[decode] += 1
        for i, c in enumerate(chunks, d):
            starts[i], counts[i], logits[i] = c.start, c.end - c.start, c.num_logits
        firsts = np.cumsum(counts) - counts
        positions = _ranges(starts, counts)
        row_slots = np.repeat(slots, counts)
        floor, ring_floor = table.floor[row_slots], table.ring_floor[row_slots]
        kept = np.flatnonzero(positions >= floor) if compact else None
        ids = np.zeros(len(positions), np.int32)
        for c, first in zip(chunks, firsts[d:].tolist(), strict=True):
            ids[first : first + c.end - c.start] = c.seq.tokens(c.start, c.end)
        arrays = {
            "ids": ids,
            "positions": positions,
            "slots": row_slots,
            "run_start": np.repeat(firsts, counts),
            "window_floor": floor,
            "logit_rows": _ranges(firsts + counts - logits, logits),
        }
        if kept is not None and len(kept) < len(ids):
            arrays["kept"] = kept
        if ring_floor.any():
            arrays["ring_floor"] = ring_floor
            arrays["kv_slots"] = np.where(positions < table.kv_floor[row_slots], 0, row_slots)
        for name in ("page_updates", "remember", "slot_copies", "page_copies"):
            if found := getattr(self, name):
                arrays[name] = np.array(found).T
        last_logit = np.cumsum(logits) - 1
        sampling = [(s, int(last_logit[i])) for i, c in enumerate(chunks, d) for s in c.samplers]
        sample_slots = np.concatenate((decode, [s.slot for s, _ in sampling])).astype(np.int64)
        return StepPlan(
            step=step,
            num_decode=d,
            run_slots=slots,
            run_starts=starts,
            run_counts=counts,
            run_incarnations=table.incarnation[slots],
            sample_slots=sample_slots,
            sample_logits=np.concatenate((last_logit[:d], [at for _, at in sampling])).astype(np.int64),
            sample_incarnations=table.incarnation[sample_slots],
            is_last=table.planned[sample_slots] >= table.limit[sample_slots],
            arrays={name: np.ascontiguousarray(array, dtype=np.int32) for name, array in arrays.items()},
            samplers=[(s.slot, s.sampling_row()) for s, _ in sampling],
            prompt_logprobs=list(self._prompt_logprobs(d, last_logit - logits + 1)),
            images=[rows for c, first in zip(chunks, firsts[d:].tolist(), strict=True) for rows in _images(c, first)],
            admitted=self.admitted,
        )

    def _prompt_logprobs(self, d: int, first_logit: Ints) -> list[PromptLogprobs]:
        found = []
        for i, c in enumerate(self.chunks, d):
            if c.seq.index == 0 and c.seq.request.prompt_logprobs is not None:
                targets = c.seq.prompt.token_ids[c.logits_from + 1 : c.end + 1]
                if targets:
                    found.append(PromptLogprobs(c.seq, i, int(first_logit[i]), targets))
        return found


def _ranges(begins: Ints, counts: Ints) -> Ints:
    """begin, begin + 1, ..., `count` numbers of each, joined: one array operation for all runs."""
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def look_back(seq: Sequence, start: int, count: int) -> list[tuple[int, int, int]]:
    """(slot, position, id) of the `count` positions before the first row of a prefix hit; -1 for rows of images."""
    begin = max(0, start - count)
    ids = seq.tokens(begin, start)
    for span in seq.prompt.images:
        for p in range(max(begin, span.start), min(start, span.start + span.length)):
            ids[p - begin] = -1
    return [(seq.slot, begin + i, token) for i, token in enumerate(ids)]


def _images(chunk: Chunk, first: int) -> list[ImageRows]:
    found = []
    for span in chunk.seq.prompt.images:
        begin, end = max(span.start, chunk.start), min(span.start + span.length, chunk.end)
        if begin < end:
            found.append(ImageRows(first + begin - chunk.start, end - begin, span, begin - span.start))
    return found
