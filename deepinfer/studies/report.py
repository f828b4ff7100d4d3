"""The one writer of results: rows, how they were measured, and where both end up (design section 8).

Belongs here: the format, its checks, the table for people. Does not belong here: measuring. Imports no torch.

A document is {"meta": {...}, "rows": [...]}. Times are medians in microseconds. Only numbers of one run are
comparable, so a row brings what it is compared with: `baselines`, or `floor_us`, the time that its bytes and
FLOPs need at the bandwidth and the matmul rate that the same run measured.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.errors import DeepInferError, list_problems

META = ("date", "commit", "device", "driver", "torch", "triton", "python", "flags")
RATES = ("bandwidth_gb_s", "matmul_tflop_s")  # of meta, where rows have a floor
DERIVED = ("percent_of_floor", "ratio")  # of rows, computed here from the medians
CASE = re.compile(r"[\w.+-]+(/[\w.+-]+)*")
DIGITS = 4  # significant ones
ROUNDING = 2e-3  # relative: what DIGITS allow a derived value to be off


class ReportError(DeepInferError, ValueError):
    """Results that break the format; lists every rule that they break."""


class Report:
    """The rows of one run.

    >>> report = Report("cpu", device="AMD EPYC, 2 cores", flags={"repeats": 5})
    >>> report.add("decode/tiny", 2000.0, provider="native", baselines={"transformers": 13000.0})
    >>> report.rows[0]["ratio"]
    {'transformers': 6.5}
    """

    def __init__(self, name: str, *, device: str, flags: Mapping[str, Any], kind: str = "cpu", **meta: Any) -> None:
        """name: of the file. kind: its folder. device: the hardware in words. flags: options that the numbers
        depend on. meta: more that they depend on; `driver` and RATES where they exist.
        """
        self.name, self.kind = name, kind
        self.meta: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "device": device,
            "driver": None,
            "torch": version("torch"),
            "triton": version("triton"),
            "python": platform.python_version(),
            "flags": dict(flags),
            **meta,
        }
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        case: str,
        median_us: float,
        *,
        floor_us: float | None = None,
        baselines: Mapping[str, float] | None = None,
        **more: Any,
    ) -> None:
        """Append a row; ReportError when it breaks the format.

        case: words separated by slashes, unique. baselines: name -> median in the same run. more: `provider`
        or `mode`, one of which is needed, and what else the bench is about.
        """
        if given := [name for name in DERIVED if name in more]:
            raise ReportError(f"row {case!r}: {', '.join(given)} follow from the medians; do not pass them")
        row: dict[str, Any] = {"case": case, "median_us": median_us}
        if floor_us is not None:
            row |= {"floor_us": floor_us, "percent_of_floor": 100 * floor_us / median_us}
        if baselines:
            ratio = {name: value / median_us for name, value in baselines.items()}
            row |= {"baselines": dict(baselines), "ratio": ratio}
        row = _rounded({**row, **more})
        _raise([f"row {case!r}: {line}" for line in _row_problems(row, self.meta)])
        self.rows.append(row)

    def finish(self, results: Path | None) -> None:
        """Print the table, write <results>/<kind>/<name>.json if `results` is given, end with a line of JSON."""
        document = {"meta": self.meta, "rows": self.rows}
        check(document)
        print(table(self.rows))
        if results is not None:
            path = results / self.kind / f"{self.name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_one_row_a_line(document), encoding="utf-8")
            print(f"written to {path}")
        print(json.dumps(document, ensure_ascii=False), flush=True)


# ---- rules ----


def check(document: Any) -> None:
    """ReportError listing everything that is wrong with a results document."""
    if not isinstance(document, dict) or set(document) != {"meta", "rows"}:
        raise ReportError("results: a document has exactly the keys meta and rows")
    meta, rows = document["meta"], document["rows"]
    found = [f"meta lacks {name!r}" for name in META if name not in meta]
    if not rows:
        found.append("there are no rows")
    cases = [row.get("case") for row in rows]
    found += [f"row {case!r} is there twice" for case in dict.fromkeys(cases) if cases.count(case) > 1]
    for case, row in zip(cases, rows, strict=True):
        found += [f"row {case!r}: {line}" for line in _row_problems(row, meta)]
    try:
        json.dumps(document, allow_nan=False)
    except (TypeError, ValueError) as error:
        found.append(str(error))
    _raise(found)


def _row_problems(row: Mapping[str, Any], meta: Mapping[str, Any]) -> Iterator[str]:
    case, baselines, ratio = row.get("case"), row.get("baselines", {}), row.get("ratio", {})
    if not isinstance(case, str) or not CASE.fullmatch(case):
        yield "case must be words separated by slashes"
    if "provider" not in row and "mode" not in row:
        yield "provider or mode must say who gave the number"
    if not baselines and "floor_us" not in row:
        yield "needs baselines of the same run or floor_us: a time alone says nothing"
    if "floor_us" in row and (missing := [name for name in RATES if name not in meta]):
        yield f"floor_us needs the measured {' and '.join(missing)} in meta"
    times = {"median_us": row.get("median_us")} | {f"baselines.{name}": t for name, t in baselines.items()}
    if "floor_us" in row:
        times["floor_us"] = row["floor_us"]
    if bad := [f"{name} is {value!r}" for name, value in times.items() if not _is_time(value)]:
        yield f"{', '.join(bad)}: not a positive number of microseconds"
        return
    if set(ratio) != set(baselines):
        yield f"baselines are {sorted(baselines)} but ratios are of {sorted(ratio)}"
        return
    derived = {f"ratio.{name}": (ratio[name], t / row["median_us"]) for name, t in baselines.items()}
    if "floor_us" in row:
        derived["percent_of_floor"] = (row.get("percent_of_floor"), 100 * row["floor_us"] / row["median_us"])
    for name, (value, right) in derived.items():
        if not _is_time(value) or not math.isclose(value, right, rel_tol=ROUNDING):
            yield f"{name} is {value!r}; the medians give {right:.{DIGITS}g}"


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _raise(found: Sequence[str]) -> None:
    if found:
        raise ReportError(list_problems("results", found))


def _rounded(value: Any) -> Any:
    """Floats to DIGITS significant digits, in nested objects too."""
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


# ---- for people ----


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Aligned text; a column for each field, each baseline and each ratio that any row has."""
    cells = [_cells(row) for row in rows]
    names = list(dict.fromkeys(name for row in cells for name in row))
    columns = [[name, *(row.get(name, "") for row in cells)] for name in names]
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(re.fullmatch(r"[\d,.]*x?", cell) for cell in column[1:]) for column in columns]
    pads = [str.rjust if right else str.ljust for right in numeric]
    lines = (zip(pads, line, widths, strict=True) for line in zip(*columns, strict=True))
    return "\n".join("  ".join(pad(cell, width) for pad, cell, width in line).rstrip() for line in lines)


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    plain = {name: _cell(value) for name, value in row.items() if not isinstance(value, dict | list)}
    baselines = {f"{name}_us": _cell(value) for name, value in row.get("baselines", {}).items()}
    return plain | baselines | {f"/{name}": f"{value:.2f}x" for name, value in row.get("ratio", {}).items()}


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    places = DIGITS - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, places)}f}"


def _one_row_a_line(document: Mapping[str, Any]) -> str:
    """JSON that makes a readable diff from run to run."""
    meta = json.dumps(document["meta"], ensure_ascii=False, indent=2)
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in document["rows"])
    return f'{{"meta": {meta},\n"rows": [\n{rows}\n]}}\n'


# ---- where it ran ----


def version(package: str) -> str | None:
    """Version of an installed package, None when it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Commit of this source tree, "-dirty" behind it when tracked files differ; "unknown" outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return (_git(root, "rev-parse", "--short=12", "HEAD") or "unknown") + ("-dirty" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu() -> str:
    """The CPU in words."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8"), re.MULTILINE)
        name = models[0] if models else name
    return f"{name}, {cores()} cores"
