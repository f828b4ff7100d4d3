"""The host's share of a step: planning and result processing without a model, and how much of it overlap hides.

Belongs here: an engine over a device that only takes time, its measurements. Does not belong here: speed of the model
(cpu.py). A step's host work is `Engine.step` in the serial loop with a device that answers at once; idle share is the
part of the wall time in which a device whose step takes a fixed time has nothing to do.
"""

from __future__ import annotations

import cProfile
import io
import itertools
import pstats
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.engine.core import Engine
from deepinfer.engine.plan import StepPlan
from deepinfer.engine.requests import Prompt
from deepinfer.engine.runner import Runner, StepResult
from deepinfer.model.synthetic import tiny
from deepinfer.params import SamplingParams
from deepinfer.studies import report

PROMPT, OUTPUT = 100, 400  # tokens; a request ends every OUTPUT / running steps and a new one takes its place
STEPS, WARM = 300, 50


class MockRunner(Runner):
    """Packs plans as the real one does; its device sleeps `step_s` and answers with one token for all rows."""

    step_s = 0.0
    busy_s = 0.0

    def _run(self, plan: StepPlan, *_: Any) -> StepResult:
        begin = time.perf_counter()
        if self.step_s:
            time.sleep(self.step_s)
        tokens = np.full(len(plan.sample_slots), 7, dtype=np.int64)
        self.busy_s += time.perf_counter() - begin
        return StepResult(tokens, {}, [])


class Tokens:
    """A tokenizer for an engine whose text nobody reads."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int) -> bytes:
        return b"x "

    def decode(self, ids: list[int], **_: Any) -> str:
        return "x " * len(ids)


def mock_engine(running: int, *, step_s: float = 0.0, overlap: bool = False, prefix: bool = True) -> Engine:
    """An engine that has `running` slots and room for all of them."""
    config = EngineConfig(
        "mock",
        max_num_seqs=running,
        max_num_batched_tokens=max(2048, running),
        num_pages=running * ((PROMPT + OUTPUT) // 128 + 2),
        async_scheduling=overlap,
        enable_prefix_caching=prefix,
    )
    engine = Engine(config, replace(tiny(), vocab_size=512), None, Tokens())  # type: ignore[arg-type]
    engine.runner.__class__ = MockRunner
    engine.runner.step_s = step_s  # type: ignore[attr-defined]
    return engine


class Load:
    """Keeps `running` requests in the engine; their ages differ, so that they end one by one."""

    def __init__(self, engine: Engine, running: int, **params: Any) -> None:
        self.engine, self.running, self.params = engine, running, params
        self._numbers = itertools.count()
        for number in range(running):
            self._add(1 + (OUTPUT - 1) * (number + 1) // running)

    def _add(self, output: int) -> None:
        number = next(self._numbers)
        ids = [3 + (number + i) % 400 for i in range(PROMPT)]
        chosen = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0, **self.params)
        self.engine.add_request(Prompt(ids), chosen, str(number))

    def step(self) -> None:
        """One step; as many requests as ended arrive (their validation is not the step's)."""
        for _ in self.engine.step():
            self._add(OUTPUT)

    def warm_up(self) -> None:
        while self.engine.scheduler.prefilling or self.engine.scheduler.waiting or self.engine.metrics.steps < WARM:
            self.step()


def python_loop() -> float:
    """Seconds of 10,000 rounds of a plain Python loop: what a row of results is compared with on any machine."""
    begin = time.perf_counter()
    total = 0
    for i in range(10_000):
        total += i
    return time.perf_counter() - begin


def time_steps(running: int, **params: Any) -> list[float]:
    """Seconds of host work of STEPS steps at `running` requests."""
    engine = mock_engine(running)
    load = Load(engine, running, **params)
    load.warm_up()
    seconds = []
    for _ in range(STEPS):
        begin = time.thread_time()
        finished = engine.step()
        seconds.append(time.thread_time() - begin)
        for _ in finished:
            load._add(OUTPUT)
    engine.close()
    return seconds


def profile(running: int, lines: int = 18) -> str:
    """Where the host's time goes, as cProfile's table."""
    engine = mock_engine(running)
    load = Load(engine, running)
    load.warm_up()
    profiler = cProfile.Profile()
    for _ in range(STEPS):
        profiler.enable()
        finished = engine.step()
        profiler.disable()
        for _ in finished:
            load._add(OUTPUT)
    engine.close()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(lines)
    return text.getvalue()


def scheduler_main(running: int, results: Path | None) -> None:
    """Table and JSON of host time per step; the profile of the largest case before it."""
    print(profile(running))
    out = report.Report("scheduler", device=report.cpu(), flags={"prompt": PROMPT, "output": OUTPUT, "steps": STEPS})
    for count in sorted({max(1, running // 8), max(1, running // 4), max(1, running // 2), running, 2 * running}):
        loop = statistics.median(python_loop() for _ in range(21))
        for name, params in (("step", {}), ("step-stop-strings", {"stop": "never"})):
            seconds = time_steps(count, **params)
            out.add(
                f"{name}/R{count}",
                1e6 * statistics.median(seconds),
                mode="serial, mock device, CPU time of the planning thread",
                baselines={"python_loop_10k": 1e6 * loop},
                p90_us=1e6 * sorted(seconds)[int(0.9 * len(seconds))],
                us_per_row=1e6 * statistics.median(seconds) / count,
            )
    out.finish(results)


def overlap_main(running: int, step_s: float, results: Path | None) -> None:
    """Idle share of a device whose step takes `step_s`, async and serial in turn."""
    out = report.Report("overlap", device=report.cpu(), flags={"requests": running, "steps": STEPS, "step_s": step_s})
    walls: dict[str, float] = {}
    rows = {}
    for name, overlap in (("serial", False), ("async", True)):
        engine = mock_engine(running, step_s=step_s, overlap=overlap)
        load = Load(engine, running)
        load.warm_up()
        runner: Any = engine.runner
        steps, busy, tokens = engine.metrics.steps, runner.busy_s, engine.metrics.output_tokens
        begin = time.perf_counter()
        for _ in range(STEPS):
            load.step()
        wall = time.perf_counter() - begin
        count = engine.metrics.steps - steps
        walls[name] = wall / count
        rows[name] = {
            "idle_share": 1 - (runner.busy_s - busy) / wall,
            "tok_per_s": (engine.metrics.output_tokens - tokens) / wall,
        }
        engine.close()
    for name, other in (("async", "serial"), ("serial", "async")):
        mine = {"baselines": {other: 1e6 * walls[other]}, **rows[name]}
        out.add(f"overlap/R{running}/{name}", 1e6 * walls[name], mode=name, **mine)
    tokens, seconds = time_tiny()
    mine = {"baselines": {"serial": 1e6 * statistics.median(seconds[False])}}
    out.add("overlap/tiny/async", 1e6 * statistics.median(seconds[True]), mode="async", tokens=tokens, **mine)
    out.finish(results)


def time_tiny(rounds: int = 31, batch: int = 16, new: int = 60) -> tuple[int, dict[bool, list[float]]]:
    """Seconds of `rounds` batches on the real model `tiny`, overlapped and serial in turn, and tokens of a batch."""
    from deepinfer.llm import LLM

    prompts = [[3 + (7 * i + 3 * j) % 490 for j in range(30)] for i in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    llms = {on: LLM("tiny", async_scheduling=on, enable_prefix_caching=False, max_num_seqs=batch) for on in seconds}
    for round_ in range(-1, rounds):
        for on in (True, False) if round_ % 2 else (False, True):
            begin = time.perf_counter()
            llms[on].generate(prompts, params, use_tqdm=False)
            if round_ >= 0:
                seconds[on].append(time.perf_counter() - begin)
    for llm in llms.values():
        llm.close()
    return batch * new, seconds
