"""Every GPU test in one command: `python tests/gpu/run.py` (`make gpu-test`); needs no pytest.

    python tests/gpu/run.py [family ...] [--limit SECONDS] [--out FOLDER] [--sanitize [--tool memcheck]]

Each script runs in a process of its own with a time limit, four at a time: an error that kills a CUDA context ends one
family. Prints a line a script and one JSON summary last; exit code 1 when anything failed. `--sanitize` runs the
check scripts at small sizes (DEEPINFER_CHECK_SMALL=1) under compute-sanitizer: once without it, so that every kernel is
in Triton's cache, then once per tool. A sanitizer error fails the script.

References run on the CPU, so every process gets its share of the cores: twelve processes of sixteen threads each on
sixteen cores ran into their limits, nearly all of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WHOLE_MODEL = ("test_cuda", "test_engine")
TOOLS = ("memcheck", "racecheck")


def scripts(families: list[str]) -> list[Path]:
    """check_*.py in alphabetical order, then the whole-model tests; `families` picks some."""
    found = [*sorted(HERE.glob("check_*.py")), *(HERE / f"{name}.py" for name in WHOLE_MODEL)]
    names = {path.stem.removeprefix("check_"): path for path in found}
    if unknown := set(families) - set(names):
        sys.exit(f"run.py: no {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    return [path for name, path in names.items() if not families or name in families]


def summary_of(text: str) -> dict[str, Any]:
    """The last line that is a JSON object, else {}."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return {}


def sanitizer(tool: str) -> list[str]:
    """Command line in front of python. Errors of the tool give exit code 86."""
    found = shutil.which("compute-sanitizer") or "compute-sanitizer"
    return [found, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20"]


def start(path: Path, prefix: list[str], limit: float, environment: dict[str, str]) -> tuple[int, str, float]:
    """(exit code, output, seconds); code 124 when it ran past its limit."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [*prefix, sys.executable, str(path)],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the sanitizer's child too
            process.wait()
            code = 124
        log.seek(0)
        return code, log.read(), time.perf_counter() - begin


def result(path: Path, tool: str, code: int, text: str, seconds: float) -> dict[str, Any]:
    found = summary_of(text)
    failed = [str(f) for f in found.get("failed", [])]
    out: dict[str, Any] = {"name": path.stem, "ok": code == 0, "code": code, "seconds": round(seconds, 1)}
    if tool:
        errors = re.findall(r"ERROR SUMMARY: (\d+)|RACECHECK SUMMARY: (\d+)", text)
        out |= {"tool": tool, "errors": sum(int(a or b) for a, b in errors) if errors else None}
        out["ok"] = code == 0 and bool(errors) and not out["errors"]
    if "passed" in found or "cases" in found:
        out["cases"] = found["cases"] if "cases" in found else found["passed"] + len(failed)
    if failed:
        out["failed"] = failed[:20]
    if not out["ok"]:
        out["tail"] = text[-1500:]
    return out


def run_script(
    path: Path, *, tools: list[str], limit: float, environment: dict[str, str], out: Path | None
) -> list[dict[str, Any]]:
    """One script, once per tool; prints its line and what failed."""
    results = []
    for tool in tools:
        code, text, seconds = start(path, sanitizer(tool) if tool else [], limit, environment)
        last = result(path, tool, code, text, seconds)
        results.append(last)
        mark = "ok  " if last["ok"] else "FAIL"
        lines = [f"{mark} {path.stem:18} {tool or 'plain':10} {seconds:6.1f} s  cases {last.get('cases', '-')}"]
        lines[0] += f"  errors {last['errors']}" if tool else ""
        lines += [f"       {line}" for line in last.get("failed", [])]
        lines += [f"     | {line}" for line in last.get("tail", "").splitlines()[-12:]]
        print("\n".join(lines), flush=True)
        if out:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{path.stem}{'.' + tool if tool else ''}.log").write_text(text)
        if code != 0 and not tool:
            break  # what fails without a sanitizer is not worth the time with it
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="experts, linear, ..., test_cuda, test_engine; default all")
    parser.add_argument("--limit", type=float, default=180, help="seconds a script (and a tool) may take")
    parser.add_argument("--jobs", type=int, default=4, help="scripts at a time; compiling kernels takes most of it")
    parser.add_argument("--out", type=Path, help="write the summary and every log into this folder")
    parser.add_argument("--sanitize", action="store_true", help="under compute-sanitizer, at small sizes")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="of --sanitize; default both")
    args = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // args.jobs)))
    tools = [""]
    paths = scripts(args.families)
    if args.sanitize:
        if shutil.which("compute-sanitizer") is None:
            sys.exit("run.py: no compute-sanitizer on PATH; it comes with the CUDA toolkit")
        environment |= {"DEEPINFER_CHECK_SMALL": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        tools, paths = ["", *(args.tool or TOOLS)], [p for p in paths if p.stem.startswith("check_")]
    begin = time.perf_counter()
    with ThreadPoolExecutor(args.jobs) as pool:
        run_one = functools.partial(run_script, tools=tools, limit=args.limit, environment=environment, out=args.out)
        results = [found for several in pool.map(run_one, paths) for found in several]
    summary = {
        "ok": all(r["ok"] for r in results),
        "seconds": round(time.perf_counter() - begin, 1),
        "scripts": [{k: v for k, v in r.items() if k != "tail"} for r in results],
    }
    if args.out:
        (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary), flush=True)
    sys.exit(0 if summary["ok"] else 1)


if __name__ == "__main__":
    main()
