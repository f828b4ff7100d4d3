"""Metrics: what is counted, the buckets, and a text that a Prometheus parser accepts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
from engine.mock_engine import CONFIG, TOKENIZER, MockModel

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineConfig
from deepinfer.engine.core import Engine
from deepinfer.engine.metrics import EngineMetrics, Histogram, Metrics, Usage
from deepinfer.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput

Sample = tuple[str, tuple[tuple[str, str], ...]]
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
SERIES = r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)'


def parse(text: str) -> tuple[dict[str, str], dict[Sample, float]]:
    """Types by family and values by (name, labels); a strict reading of the text format, version 0.0.4."""
    assert text.endswith("\n")
    types: dict[str, str] = {}
    helps: dict[str, str] = {}
    samples: dict[Sample, float] = {}
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            _, _, name, text_of_it = line.split(" ", 3)
            assert name not in helps and text_of_it and not re.search(r"\\[^\\n]", text_of_it)
            helps[name] = text_of_it
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types and kind in ("counter", "gauge", "histogram") and name in helps
            types[name] = kind
        else:
            found = re.fullmatch(SERIES, line)
            assert found, line
            name, inside, value = found.groups()
            family = name if name in types else re.sub(r"_(bucket|sum|count)$", "", name)
            assert family == list(types)[-1], f"{name} is outside its family"
            assert (family != name) == (types[family] == "histogram")
            pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', inside or "")
            labels = tuple((key, re.sub(r"\\.", lambda m: ESCAPES[m[0]], raw)) for key, raw in pairs)
            assert (name, labels) not in samples
            samples[name, labels] = float(value)
    return types, samples


def ended(
    times: RequestMetrics, reasons: tuple[FinishReason, ...] = ("stop",), tokens: int = 3, error: str | None = None
) -> RequestOutput:
    outputs = [CompletionOutput(i, "", [7] * (tokens - i), finish_reason=reason) for i, reason in enumerate(reasons)]
    return RequestOutput("r", None, [1, 2], outputs=outputs, finished=True, metrics=times, error=error)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    def load(config: EngineConfig) -> Engine:
        return Engine(config, CONFIG, MockModel(), TOKENIZER)

    monkeypatch.setattr("deepinfer.llm.load_engine", load)
    with LLM("mock", numerics="exact", num_pages=40, page_size=8, max_num_seqs=4) as made:
        yield made
        made.engine.check_idle()


# ---- histograms ----


def test_a_bound_belongs_to_its_bucket() -> None:
    metrics = EngineMetrics()
    for seconds in (0.001, 0.0010001, 0.0, 3000.0):
        metrics.observe(ended(RequestMetrics(0.0, 0.0, seconds, 4000.0)))
    ttft = metrics.read().ttft
    assert ttft.counts[:2] == (2, 1) and ttft.counts[-1] == 1 and ttft.count == 4
    assert ttft.sum == pytest.approx(3000.0020001) and ttft.mean == pytest.approx(750.0005)


def test_quantiles_are_upper_bounds() -> None:
    histogram = Histogram((1.0, 2.0, 4.0), (5, 4, 0, 1), 20.0)
    assert [histogram.quantile(q) for q in (0.0, 0.5, 0.51, 0.9, 0.91)] == [1.0, 1.0, 2.0, 2.0, math.inf]
    empty = Histogram((1.0,), (0, 0), 0.0)
    assert empty.quantile(0.5) is None and empty.mean is None


def test_bounds_ascend() -> None:
    for histogram in (h for h in vars_of(EngineMetrics().read()) if isinstance(h, Histogram)):
        assert all(a < b for a, b in pairwise(histogram.bounds)) and len(histogram.counts) == len(histogram.bounds) + 1


def vars_of(metrics: Metrics) -> list[Any]:
    return [getattr(metrics, item.name) for item in fields(metrics)]


# ---- requests ----


def test_a_finished_request_is_observed_once_in_each_histogram() -> None:
    metrics, times = EngineMetrics(), RequestMetrics(10.0, 10.5, 11.0, 13.0)
    metrics.observe(ended(times, ("length", "stop"), tokens=5))
    assert times.num_output_tokens == 5 and times.tpot_s == 0.5
    read = metrics.read()
    assert [(h.count, h.sum) for h in (read.queue, read.ttft, read.tpot, read.e2e)] == [
        (1, 0.5),
        (1, 1.0),
        (1, 0.5),
        (1, 3.0),
    ]
    assert metrics.finished_requests == 1


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    metrics = EngineMetrics()
    metrics.observe(ended(RequestMetrics(0.0, 0.0, 1.0, 1.0), tokens=1))
    assert metrics.read().tpot.count == 0 and metrics.read().e2e.count == 1


def test_one_reason_for_each_request() -> None:
    metrics, times = EngineMetrics(), RequestMetrics(0.0, 0.0, 1.0, 2.0)
    for reasons in (("stop",), ("stop", "stop"), ("stop", "length"), ("stop", "abort", "length")):
        metrics.observe(ended(times, reasons))  # type: ignore[arg-type]
    metrics.observe(ended(times, ("abort",), error="NaN"))
    assert metrics.read().finished == {"stop": 2, "length": 1, "abort": 1, "error": 1}
    assert metrics.finished_requests == 4 and metrics.read().e2e.count == 4  # the aborted one says nothing of speed


def test_an_engine_counts_what_it_did(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, n=2)
    results = llm.generate(["one", "two two", "three"], params, use_tqdm=False)
    metrics = llm.get_metrics()
    assert metrics.finished == {"stop": 0, "length": 3, "abort": 0, "error": 0}
    assert metrics.output_tokens == 3 * 2 * 6
    assert metrics.prompt_tokens >= sum(len(r.prompt_token_ids) for r in results)
    assert metrics.steps == llm.engine.metrics.steps > 5 and metrics.busy_s > 0
    assert metrics.queue.count == metrics.ttft.count == metrics.tpot.count == metrics.e2e.count == 3
    assert (metrics.running, metrics.waiting, metrics.pages_used, metrics.slots_used) == (0, 0, 0, 0)
    assert (metrics.pages_total, metrics.slots_total, metrics.kv_usage) == (40, 4, 0.0)
    for result in results:
        times = result.metrics
        assert times is not None and times.num_output_tokens == 6
        assert times.queue_s is not None and times.ttft_s is not None
        assert times.tpot_s is not None and times.e2e_s is not None
        assert 0 <= times.queue_s <= times.ttft_s <= times.e2e_s
        assert times.ttft_s + 5 * times.tpot_s == pytest.approx(times.e2e_s)


def test_gauges_show_what_runs_and_waits(llm: LLM) -> None:
    ids = llm.enqueue(["a"] * 6, SamplingParams(max_tokens=20, ignore_eos=True))
    stream = llm.stream("b", SamplingParams(max_tokens=20, ignore_eos=True), priority=-1)
    next(stream)
    metrics = llm.get_metrics()
    assert (metrics.running, metrics.waiting) == (4, 3)
    assert metrics.slots_used == 4 and 0 < metrics.pages_used < 40
    assert metrics.kv_usage == metrics.pages_used / 40
    stream.close()
    llm.abort(ids)
    assert [r.outputs[0].finish_reason for r in llm.wait(use_tqdm=False)] == ["abort"] * 6
    assert llm.get_metrics().finished["abort"] == 7
    assert (llm.get_metrics().running, llm.get_metrics().waiting) == (0, 0)


def test_prefix_hits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = EngineMetrics(lambda: Usage(prefix_queried_tokens=100, prefix_hit_tokens=64, pages_cached=8))
    read = metrics.read()
    assert (read.prefix_queried_tokens, read.prefix_hit_tokens, read.pages_cached) == (100, 64, 8)
    assert read.kv_usage == 0.0  # no pool, no division by it


# ---- the text ----


def test_the_text_parses_and_says_what_the_snapshot_says(llm: LLM) -> None:
    llm.generate(["one", "two"], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    metrics = llm.get_metrics()
    types, samples = parse(llm.metrics_text())
    model = ("model", "mock")
    assert all(name.startswith("deepinfer_") and model in labels for name, labels in samples)
    for name, kind in types.items():
        assert name.endswith("_total") == (kind == "counter")
    assert len(types) == len(fields(metrics))
    assert samples["deepinfer_output_tokens_total", (model,)] == 12
    assert samples["deepinfer_kv_pages", (model,)] == 40
    assert samples["deepinfer_requests_finished_total", (model, ("reason", "length"))] == 2
    for family in (name for name, kind in types.items() if kind == "histogram"):
        buckets = [(dict(labels)["le"], v) for (name, labels), v in samples.items() if name == f"{family}_bucket"]
        assert buckets[-1] == ("+Inf", samples[f"{family}_count", (model,)]) == ("+Inf", 2)
        assert all(a[1] <= b[1] and float(a[0]) < float(b[0]) for a, b in pairwise(buckets))
    assert samples["deepinfer_request_seconds_sum", (model,)] == pytest.approx(metrics.e2e.sum)


def test_labels_are_escaped() -> None:
    awkward = 'a\\b"c\nd,e="f"} 1'
    _, samples = parse(EngineMetrics().read().to_text({"model": awkward, "other": "x"}))
    assert {labels[:2] for _, labels in samples} == {(("model", awkward), ("other", "x"))}
    _, samples = parse(EngineMetrics().read().to_text())
    assert samples["deepinfer_steps_total", ()] == 0


def test_every_name_is_in_the_documents() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    types, _ = parse(EngineMetrics().read().to_text())
    table = dict(re.findall(r"^\| `(deepinfer_\w+)` \| (\w+) \|", page, re.M))
    assert table == types
