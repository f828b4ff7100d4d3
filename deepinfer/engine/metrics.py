"""What an engine counts: rows, tokens, steps, preemptions, requests, latencies; and how people read it.

Belongs here: counters, histograms, the snapshot of them, the Prometheus text. Does not belong here: per-request times
(outputs.RequestMetrics), progress bars (llm.py). Work is done per step and per finished request, never per token.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate

from deepinfer.outputs import RequestOutput

# Upper bounds of buckets in seconds: vLLM's, with finer ones below what a fast device reaches.
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
WHOLE_BOUNDS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class Usage:
    """What is queued and how full the cache is at this moment, and how the prefix cache did so far.

    `pages_used` belong to running requests; `pages_cached` are kept for prefix hits only and give way when pages are
    needed. `prefix_queried_tokens` are prompt tokens that were looked up, `prefix_hit_tokens` those that were found.
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    slots_used: int = 0
    slots_total: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observed seconds. `counts[i]` of them were above `bounds[i - 1]` and at most `bounds[i]`; the last count is
    what lay above all bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def quantile(self, part: float) -> float | None:
        """The bound below which `part` (0 to 1) of the observations lie: an upper estimate, inf above all bounds."""
        if not self.count:
            return None
        wanted, total = part * self.count, 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            total += count
            if total >= wanted:
                return bound
        return math.inf


class _Tally:
    """A histogram that still grows."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, seconds: float | None) -> None:
        if seconds is not None:
            self.counts[bisect_left(self.bounds, seconds)] += 1
            self.sum += seconds

    def read(self) -> Histogram:
        return Histogram(self.bounds, tuple(self.counts), self.sum)


def _about(kind: str, name: str, text: str, label: str = "") -> dict[str, str]:
    """Prometheus type, name after `deepinfer_` and help; `label` names the keys of a mapping."""
    return {"kind": kind, "name": name, "help": text, "label": label}


def _gauge(name: str, text: str) -> dict[str, str]:
    return _about("gauge", name, text)


def _counter(name: str, text: str, label: str = "") -> dict[str, str]:
    return _about("counter", f"{name}_total", text, label)


def _seconds(name: str, text: str) -> dict[str, str]:
    return _about("histogram", f"{name}_seconds", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """All metrics at one moment: `LLM.get_metrics()`. Counters run since the engine was made."""

    running: int = field(metadata=_gauge("sequences_running", "Sequences that hold cache memory."))
    waiting: int = field(metadata=_gauge("sequences_waiting", "Sequences that wait for memory, new or preempted."))
    pages_used: int = field(metadata=_gauge("kv_pages_used", "Pages of the KV cache that running requests hold."))
    pages_cached: int = field(metadata=_gauge("kv_pages_cached", "Pages kept for prefix hits only, free when needed."))
    pages_total: int = field(metadata=_gauge("kv_pages", "Pages of the KV cache."))
    kv_usage: float = field(
        metadata=_gauge("kv_usage_ratio", "Part of the KV cache that running requests hold, 0 to 1.")
    )
    slots_used: int = field(metadata=_gauge("slots_used", "Sequence slots in use."))
    slots_total: int = field(metadata=_gauge("slots", "Sequence slots."))
    max_step_rows: int = field(metadata=_gauge("step_rows_max", "Rows of the largest step so far."))
    steps: int = field(metadata=_counter("steps", "Steps of the model."))
    busy_s: float = field(metadata=_counter("busy_seconds", "Seconds spent inside steps."))
    prompt_tokens: int = field(metadata=_counter("prompt_tokens", "Prompt rows computed, recomputed ones included."))
    output_tokens: int = field(metadata=_counter("output_tokens", "Tokens sampled."))
    preemptions: int = field(metadata=_counter("preemptions", "Times that a sequence gave up its memory to others."))
    prefix_queried_tokens: int = field(
        metadata=_counter("prefix_queried_tokens", "Prompt tokens looked up in the prefix cache.")
    )
    prefix_hit_tokens: int = field(metadata=_counter("prefix_hit_tokens", "Prompt tokens found in the prefix cache."))
    finished: Mapping[str, int] = field(
        metadata=_counter("requests_finished", "Requests that ended, by reason.", label="reason")
    )
    queue: Histogram = field(metadata=_seconds("queue", "From arrival to the first scheduled row."))
    ttft: Histogram = field(metadata=_seconds("time_to_first_token", "From arrival to the first output token."))
    tpot: Histogram = field(metadata=_seconds("time_per_output_token", "Per output token after the first."))
    e2e: Histogram = field(metadata=_seconds("request", "From arrival to the end."))

    def to_text(self, labels: Mapping[str, str] | None = None) -> str:
        """The Prometheus text format; `labels` are put on every sample."""
        return "".join(line + "\n" for line in self._lines(labels or {}))

    def _lines(self, labels: Mapping[str, str]) -> Iterator[str]:
        for item in fields(self):
            value, about = getattr(self, item.name), item.metadata
            name = f"deepinfer_{about['name']}"
            yield f"# HELP {name} {_escape(about['help'])}"
            yield f"# TYPE {name} {about['kind']}"
            if isinstance(value, Histogram):
                bounds = (*map(repr, value.bounds), "+Inf")
                for bound, count in zip(bounds, accumulate(value.counts), strict=True):
                    yield f"{name}_bucket{_labels({**labels, 'le': bound})} {count}"
                yield f"{name}_sum{_labels(labels)} {value.sum!r}"
                yield f"{name}_count{_labels(labels)} {value.count}"
            elif isinstance(value, Mapping):
                for key, count in value.items():
                    yield f"{name}{_labels({**labels, about['label']: key})} {count}"
            else:
                yield f"{name}{_labels(labels)} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (name + '="' + _escape(value).replace('"', '\\"') + '"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


@dataclass
class EngineMetrics:
    """Totals since the engine was made. Times are seconds of wall clock inside `step`."""

    read_usage: Callable[[], Usage] = Usage  # asked for a snapshot only; reads lengths and integers, on any thread
    steps: int = 0
    prompt_rows: int = 0  # rows of prompt chunks, recomputed ones included
    decode_rows: int = 0
    output_tokens: int = 0
    finished_requests: int = 0  # those that ended by themselves, with errors too
    preemptions: int = 0
    max_step_rows: int = 0  # the largest step: the effective max_num_batched_tokens
    busy_s: float = 0.0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    _queue: _Tally = field(default_factory=lambda: _Tally(FIRST_TOKEN_BOUNDS), repr=False)
    _ttft: _Tally = field(default_factory=lambda: _Tally(FIRST_TOKEN_BOUNDS), repr=False)
    _tpot: _Tally = field(default_factory=lambda: _Tally(PER_TOKEN_BOUNDS), repr=False)
    _e2e: _Tally = field(default_factory=lambda: _Tally(WHOLE_BOUNDS), repr=False)

    def count_step(self, rows: int, sampled: int, decode_rows: int, seconds: float) -> None:
        self.steps += 1
        self.prompt_rows += rows - decode_rows
        self.decode_rows += decode_rows
        self.output_tokens += sampled
        self.max_step_rows = max(self.max_step_rows, rows)
        self.busy_s += seconds

    def observe(self, output: RequestOutput) -> None:
        """Count a request that ended, once. Aborted ones are counted and left out of the histograms."""
        reason = _reason(output)
        self.finished[reason] += 1
        times = output.metrics
        if times is not None:
            times.num_output_tokens = max((len(one.token_ids) for one in output.outputs), default=0)
        if reason == "abort":
            return
        self.finished_requests += 1
        if times is None:
            return
        self._queue.add(times.queue_s)
        self._ttft.add(times.ttft_s)
        self._tpot.add(times.tpot_s)
        self._e2e.add(times.e2e_s)

    def read(self) -> Metrics:
        """Everything at this moment."""
        usage = self.read_usage()
        return Metrics(
            **{item.name: getattr(usage, item.name) for item in fields(usage)},
            kv_usage=usage.pages_used / usage.pages_total if usage.pages_total else 0.0,
            max_step_rows=self.max_step_rows,
            steps=self.steps,
            busy_s=self.busy_s,
            prompt_tokens=self.prompt_rows,
            output_tokens=self.output_tokens,
            preemptions=self.preemptions,
            finished=dict(self.finished),
            queue=self._queue.read(),
            ttft=self._ttft.read(),
            tpot=self._tpot.read(),
            e2e=self._e2e.read(),
        )

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.busy_s if self.busy_s else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.prompt_rows / self.busy_s if self.busy_s else 0.0


def _reason(output: RequestOutput) -> str:
    """One reason for a request of several sequences: the one that a person has to look at first."""
    if output.error is not None:
        return "error"
    reasons = {one.finish_reason for one in output.outputs}
    return next(reason for reason in ("abort", "length", "stop") if reason in reasons)
