"""The tolerance table and how an array is judged by it.

Belongs here: reading rules.toml, metrics, verdicts. Does not belong here: recomputing arrays (arrays.py).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """How arrays that match one of `patterns` are compared; `skip` gives a reason instead of a metric."""

    patterns: tuple[str, ...]
    metric: str = ""
    limit: float = 0.0
    gap: float = 0.0  # rows whose gaps are smaller are left out
    skip: str = ""


@dataclass(frozen=True)
class Check:
    """One line of the report. `value` and `limit` are in the metric's own unit."""

    name: str
    verdict: str  # "pass", "fail", "skip"
    metric: str
    value: float
    limit: float
    max_abs: float
    frobenius: float
    note: str


@cache
def rules(checkpoint: str) -> tuple[Rule, ...]:
    """The table, with the limits of `checkpoint` ("tiny", "lite", "units") where a rule names it."""
    data = tomllib.loads(files(__package__).joinpath("rules.toml").read_text(encoding="utf-8"))
    return tuple(
        Rule(
            tuple(r["pattern"]),
            r.get("metric", ""),
            float(r.get(checkpoint, r.get("limit", 0.0))),
            float(r.get("gap", 0.0)),
            r.get("skip", ""),
        )
        for r in data["rule"]
    )


def rule_for(checkpoint: str, name: str) -> Rule | None:
    """First rule whose pattern matches `name`; None for an array the table does not know (a failure)."""
    return next((r for r in rules(checkpoint) if any(fnmatchcase(name, p) for p in r.patterns)), None)


def judge(name: str, rule: Rule, got: Tensor, want: Tensor, noise: Tensor | float, clear: Tensor | None) -> Check:
    """Compare one array. noise: relative noise per row (or one number); clear: rows with no near-tie, or None."""
    if got.shape != want.shape:
        note = f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        return Check(name, "fail", rule.metric, float("nan"), rule.limit, float("nan"), float("nan"), note)
    if rule.metric == "equal":
        same = torch.equal(_bits(got), _bits(want))
        return Check(name, "pass" if same else "fail", "equal", float(same), 1.0, *_errors(got, want), "")
    if rule.metric in ("overlap", "rows_equal"):
        value = _overlap(got, want) if rule.metric == "overlap" else _rows_equal(got, want)
        return Check(name, _at_least(value, rule.limit), rule.metric, value, rule.limit, *_errors(got, want), "")
    note = ""
    if rule.gap and clear is not None and clear.shape[0] == want.shape[0] and not bool(clear.all()):
        note = f"{int((~clear).sum())} near-tie rows left out"
        got, want = got[clear], want[clear]
    errors = _errors(got, want)
    value = errors[1] if rule.metric == "frobenius" else _median_row(got, want, noise)
    verdict = "pass" if value <= rule.limit else "fail"  # NaN fails
    return Check(name, verdict, rule.metric, value, rule.limit, *errors, note)


def skipped(name: str, reason: str) -> Check:
    return Check(name, "skip", "", 0.0, 0.0, 0.0, 0.0, reason)


def failed(name: str, reason: str) -> Check:
    nan = float("nan")
    return Check(name, "fail", "", nan, nan, nan, nan, reason)


def _at_least(value: float, limit: float) -> str:
    return "pass" if value >= limit else "fail"


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8) if t.dtype.itemsize == 1 and t.dtype is not torch.bool else t


def _errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """(max abs, relative Frobenius) in float64."""
    if got.dtype is torch.float8_e8m0fnu or want.dtype is torch.float8_e8m0fnu:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    a, b = got.double(), want.double()
    if a.numel() == 0:
        return 0.0, 0.0
    d = a - b
    return float(d.abs().max()), float(d.norm() / b.norm().clamp_min(1e-30))


def _median_row(got: Tensor, want: Tensor, noise: Tensor | float) -> float:
    a, b = got.double(), want.double()
    error = (a - b).flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1)
    scale: Any = noise if not isinstance(noise, Tensor) or noise.shape[0] == error.shape[0] else float(noise.median())
    return float((error / scale).median())


def _overlap(got: Tensor, want: Tensor) -> float:
    """Mean of |A n B| / |B| over rows with a non-empty B; rows are id lists (-1 unused) or bool masks."""
    if want.dtype is not torch.bool:
        width = int(max(got.max(), want.max())) + 1
        got, want = _mask(got, width), _mask(want, width)
    size = want.sum(1)
    share = (got & want).sum(1)[size > 0].double() / size[size > 0]
    return float(share.mean()) if share.numel() else 1.0


def _mask(ids: Tensor, width: int) -> Tensor:
    out = torch.zeros((ids.shape[0], width + 1), dtype=torch.bool)
    out.scatter_(1, torch.where(ids < 0, width, ids).long(), True)
    return out[:, :width]


def _rows_equal(got: Tensor, want: Tensor) -> float:
    return float((got == want).view(want.shape[0], -1).all(1).double().mean())
