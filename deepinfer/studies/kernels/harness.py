"""Times kernels by CUDA graph replay over rotating buffers and reports percent of floor.

Belongs here: the ceilings of this machine, timing, rows of the report. Does not belong here: cases (family files).

A graph holds one launch per buffer set; buffer sets together exceed the L2 where an op streams weights, so each number
is of cold memory. Time of a launch includes one graph edge.
"""

from __future__ import annotations

import importlib
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepinfer.errors import ConfigError
from deepinfer.studies import report

FAMILIES = ("experts", "linear", "attention", "indexer", "hyper", "cache", "engram", "sampling", "vision", "tilelang")
REPLAYS, WARM = 9, 3
Make = Callable[[], list[Callable[[], Any]]]


@dataclass
class Case:
    """make(): allocates and returns one callable per buffer set. Baselines may raise: then they are left out.

    floor_bytes and floor_flops are of one call; `flop_rate` names the rate of the floor ("bf16" or "fp8").
    """

    name: str
    make: Make
    floor_bytes: float
    floor_flops: float = 0.0
    flop_rate: str = "bf16"
    provider: str = "triton"
    baselines: Mapping[str, Make] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


def graph_time_us(make: Make) -> float:
    """Median microseconds of one callable of `make()`, captured together in one graph."""
    calls = make()
    torch.cuda.synchronize()  # inputs were filled on this stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(WARM):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    graph.reset()
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """Copy bandwidth in GB/s and matmul rates in TFLOP/s, measured now; ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("this study needs an NVIDIA GPU and finds none; `deepinfer doctor --device cuda` says why")
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = _event_us(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    bf16 = _event_us(lambda: a @ b)
    a8, b8 = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    fp8 = _event_us(lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16))
    flops = 2 * 8192**3
    return {
        "bandwidth_gb_s": 2 * (1 << 30) / copy / 1e3,
        "matmul_tflop_s": flops / bf16 / 1e6,
        "fp8_tflop_s": flops / fp8 / 1e6,
    }


def _event_us(call: Callable[[], Any]) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def cases(families: tuple[str, ...] = FAMILIES) -> Iterator[Case]:
    for family in families:
        try:
            module = importlib.import_module(f"deepinfer.studies.kernels.{family}")
        except ModuleNotFoundError:
            continue
        yield from module.cases()


def measure(out: report.Report, rates: Mapping[str, float], case: Case) -> None:
    """Time a case and its baselines; append a row."""
    flop_rate = rates["fp8_tflop_s" if case.flop_rate == "fp8" else "matmul_tflop_s"]
    by_bytes = case.floor_bytes / rates["bandwidth_gb_s"] / 1e3
    by_flops = case.floor_flops / flop_rate / 1e6
    median = graph_time_us(case.make)
    baselines = {}
    for name, make in case.baselines.items():
        try:
            baselines[name] = graph_time_us(make)
        except Exception as error:  # a library that is not there, or not for this shape
            print(f"  {case.name}: no {name}: {type(error).__name__}: {str(error)[:120]}", flush=True)
        torch.cuda.empty_cache()
    bound = "bytes" if by_bytes >= by_flops else f"{case.flop_rate} flops"
    rate = {"tb_s": case.floor_bytes / median / 1e6} if by_bytes >= by_flops else {}
    if case.floor_flops:
        rate["tflop_s"] = case.floor_flops / median / 1e6
    floor = max(by_bytes, by_flops, 1e-3)
    out.add(
        case.name, median, floor_us=floor, provider=case.provider, baselines=baselines, bound=bound, **rate, **case.more
    )
    print(f"{case.name:32} {median:9.1f} us  {100 * floor / median:5.1f}% of {bound}  {baselines}", flush=True)


def profile(families: tuple[str, ...] = FAMILIES, match: str = "") -> None:
    """Call every case's callables twice without a graph or a timer: what a profiler is put around (`ncu ... python`).

    The second call is inside the NVTX range `case`: `ncu --nvtx --nvtx-include case/ ...` sees that one alone.
    """
    for case in cases(families):
        if match in case.name:
            calls = case.make()[:2]
            calls[0]()
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_push("case")
            calls[-1]()
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_pop()


def run(name: str, families: tuple[str, ...] = FAMILIES, match: str = "", results: Any = None) -> None:
    """Measure every case whose name contains `match` and write the report."""
    rates = ceilings()
    out = report.Report(
        name, kind="h200", device=torch.cuda.get_device_name(), flags={"replays": REPLAYS}, driver=None, **rates
    )
    try:
        for case in cases(families):
            if match not in case.name:
                continue
            try:
                measure(out, rates, case)
            except Exception as error:
                print(f"FAIL {case.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                traceback.print_exc(limit=3)
            torch.cuda.empty_cache()
    finally:  # what an interrupted run has measured is kept
        if out.rows:
            out.finish(results)
