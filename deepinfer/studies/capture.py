"""What each capture mode costs and gives: start with an empty and with a kept cache, step time, host time, kernels.

Belongs here: one process for each mode and start, the table. Does not belong here: capture itself (compile/), steps
against their floor (step.py).

A mode's numbers come from two child processes over one cache folder: the first finds it empty (cold), the second full
(warm). Step times of all modes are taken in the second, one after the other, so they are comparable as far as the
machine is quiet; the report gives their ratio to `eager`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from deepinfer.compile.modes import MODES
from deepinfer.errors import ConfigError
from deepinfer.model.synthetic import named_config
from deepinfer.studies import report

STEPS, WARM, ROUNDS = 40, 10, 7
CONTEXT = 64


def run(model: str, device: str, modes: tuple[str, ...] | None, rows: int, results: Path | None = None) -> None:
    """Measure `modes` of a synthetic model and print the table and the JSON document."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; the study runs on cpu or cuda")
    if rows < 1:
        raise ConfigError(f"rows is {rows}; a step has at least one")
    named_config(model)  # unknown names are told before a process starts
    if unknown := set(modes or ()) - set(MODES):
        raise ConfigError(f"mode {', '.join(sorted(unknown))} is none of {', '.join(MODES)}")
    modes = modes or (("eager", "layer", "model") if device == "cpu" else ("eager", "layer", "model", "graph"))
    out = report.Report(
        "capture",
        kind="cpu" if device == "cpu" else "h200",
        device=_device_name(device),
        flags={"model": model, "rows": rows, "steps": STEPS, "rounds": ROUNDS},
    )
    found = {}
    for mode in modes:
        with tempfile.TemporaryDirectory() as folder:  # the second process finds what the first one left
            found[mode] = [_child(folder, model, device, mode, rows) for _ in range(2)]
    for mode, (cold, warm) in found.items():
        others = {other: pair[1]["step_us"] for other, pair in found.items() if other != mode}
        out.add(
            f"capture/{model}/{device}/rows{rows}/{mode}",
            warm["step_us"],
            baselines=others,
            mode=mode,
            cold_s=round(cold["start_s"], 2),
            warm_s=round(warm["start_s"], 2),
            compiled=cold["compiled"],
            generated=cold["generated"],
            generated_warm=warm["generated"],
            capture_s=round(warm["capture_s"], 2),
            host_us=round(warm["host_us"], 1),
            **{name: warm[name] for name in ("captured", "capture_bytes", "ops", "kernels", "passes")},
        )
        row = out.rows[-1]
        print(f"{mode:6} start {row['cold_s']:6.2f} s cold, {row['warm_s']:6.2f} s warm; ", end="")
        print(f"step {row['median_us']:9.1f} us, host {row['host_us']:8.1f} us; ", end="")
        print(f"{row['captured']} graphs, {row['kernels']} kernels, passes {row['passes']}", flush=True)
    out.finish(results)


def _child(folder: str, model: str, device: str, mode: str, rows: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer.studies.capture", model, device, mode, str(rows)],
        env={**os.environ, "DEEPINFER_CACHE_ROOT": folder},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ConfigError(
            f"mode {mode} of {model} on {device} failed: {(done.stderr.strip().splitlines() or [''])[-1]}"
        )
    return cast(dict[str, Any], json.loads(done.stdout.splitlines()[-1]))


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {len(os.sched_getaffinity(0))} cores"


def one(model_name: str, device: str, mode: str, rows: int) -> dict[str, Any]:
    """One mode in this process: start-up, then decode steps of `rows` rows."""
    import torch

    from deepinfer.compile import counters
    from deepinfer.model import synthetic
    from deepinfer.studies import step as steps

    model = steps.random_model(synthetic.named_config(model_name), device)
    bench = steps.Bench(model, rows, CONTEXT, cast(Any, mode))
    counts, compiled = counters.snapshot(), bench.runner.compiled
    inputs = bench._decode_step(rows, CONTEXT)
    kernels = 0
    captured = bench.runner.decode
    if captured is not None:
        bucket = bench.decode_inputs(rows, CONTEXT)
    with torch.inference_mode():

        def work() -> None:
            if captured is not None:
                captured.replay(bucket)
            else:
                model.forward(inputs, bench.state)

        median, host = _time(work, device)
        if device == "cuda":
            kernels = sum(n for _, n, _ in steps.kernel_times(work))
    functions = [] if compiled is None else [c.lowered for c in compiled.captured.values() if c.lowered is not None]
    return {
        "start_s": bench.start_s,
        "step_us": median,
        "host_us": host,
        "compiled": counts["compiled"],
        "generated": counts["generated"],
        "captured": counts["captured"],
        "capture_s": captured.cost.seconds if captured else 0.0,
        "capture_bytes": captured.cost.bytes if captured else 0,
        "ops": sum(f.num_ops for f in functions),
        "kernels": kernels,
        "passes": {} if compiled is None else compiled.matches,
    }


def _time(work: Any, device: str) -> tuple[float, float]:
    """(microseconds of a step, of which the host is busy): medians over rounds of STEPS steps back to back."""
    import torch

    for _ in range(WARM):
        work()
    whole, host = [], []
    for _ in range(ROUNDS):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            work()
        launched = time.perf_counter()
        if device == "cuda":
            torch.cuda.synchronize()
        whole.append((time.perf_counter() - begin) / STEPS * 1e6)
        host.append((launched - begin) / STEPS * 1e6)
    return statistics.median(whole), statistics.median(host)


if __name__ == "__main__":
    name, where, how, n = sys.argv[1:]
    print(json.dumps(one(name, where, how, int(n))))
