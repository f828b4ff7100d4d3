"""What the scripts check_<family>.py share: seeds, poison, guard pages, comparison, one line a case, a JSON summary.

Belongs here: what two families need. Does not belong here: cases (check_<family>.py), running all of them (run.py).

A script prints `ok|FAIL op case err=... limit=...` a case and one JSON line {"family", "passed", "failed", ...} last,
and exits 1 when a case failed. A failing case does not stop the others; a CUDA error that sticks ends the family.
`DEEPINFER_CHECK_SMALL=1` asks for small sizes (`run.py --sanitize`: compute-sanitizer slows kernels 10 to 100 times):
no real dimensions, few rows, no long loops, about two seconds of ordinary run time.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from deepinfer.ops import registry

Args = tuple[Any, ...]
SMALL = os.environ.get("DEEPINFER_CHECK_SMALL") == "1"
GUARD = 64 << 10  # bytes before and after a guarded tensor
FILL = 0xFF  # NaN in e4m3, bf16, float32; -1 in integers


def tensors(x: Any) -> list[Tensor]:
    """The tensors of a result or of arguments, in order."""
    return [x] if isinstance(x, Tensor) else [t for t in (x or ()) if isinstance(t, Tensor)]


def raw(x: Tensor) -> Tensor:
    """Bytes of a tensor: equality without NaN or float8 trouble."""
    return x.detach().contiguous().view(torch.uint8)


def relative(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius error of a against b; inf for another shape, another dtype or NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    error = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) if a.numel() else 0.0
    return error if error == error else float("inf")


def poison() -> None:
    """Fill the allocator's free memory with NaN patterns, so that an unwritten output shows."""
    sizes = [512, 4096, 65536, 1 << 19] * 8 + ([1 << 22] if SMALL else [1 << 20, 1 << 24, 1 << 28])
    kept = [torch.full((n,), FILL, dtype=torch.uint8, device="cuda") for n in sizes]
    del kept


class Guarded:
    """Copies of tensors on the GPU, each between two guard pages: a read beyond one yields NaN, a write is found."""

    def __init__(self) -> None:
        self._pages: list[tuple[Tensor, int]] = []

    def to(self, x: Tensor) -> Tensor:
        """x on the GPU with the same strides (contiguous if x is a view with holes)."""
        x = x if x.is_contiguous() else x.contiguous()
        size = x.numel() * x.element_size()
        page = torch.full((GUARD + size + GUARD,), FILL, dtype=torch.uint8, device="cuda")
        self._pages.append((page, size))
        out = page[GUARD : GUARD + size].view(x.dtype).view(x.shape)
        out.copy_(x)
        return out

    def args(self, args: Args) -> Args:
        return tuple(self.to(a) if isinstance(a, Tensor) else a for a in args)

    def touched(self) -> int:
        """Guard bytes that were overwritten."""
        return sum(
            int((page[:GUARD] != FILL).sum()) + int((page[GUARD + size :] != FILL).sum()) for page, size in self._pages
        )


class Checks:
    """Runs the cases of a family, prints a line each, survives errors. Seed: first argument, else the clock."""

    def __init__(self, family: str) -> None:
        self.family, self.passed, self.start = family, 0, time.time()
        self.failed: list[str] = []
        self.worst: dict[str, float] = {}
        given = [a for a in sys.argv[1:] if a.isdigit()]
        self.seed = int(given[0]) if given else time.time_ns() % (1 << 31)
        self._drawn = 0
        print(f"{family}: {torch.cuda.get_device_name()}, torch {torch.__version__}, seed {self.seed}", flush=True)

    def generator(self) -> torch.Generator:
        """A fresh one each call, all derived from the printed seed."""
        self._drawn += 1
        return torch.Generator().manual_seed(self.seed + self._drawn)

    def say(self, op: str, case: str, error: float, limit: float) -> None:
        good = error <= limit
        print(f"{'ok  ' if good else 'FAIL'} {op} {case} err={error:.2e} limit={limit:.1e}", flush=True)
        self.worst[op] = max(self.worst.get(op, 0.0), error)
        if good:
            self.passed += 1
        else:
            self.failed.append(f"{op} {case}")

    def attempt(self, op: str, case: str, step: Callable[[], None]) -> None:
        try:
            step()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"FAIL {op} {case} {type(error).__name__}: {str(error)[:300]}", flush=True)
            traceback.print_exc(limit=-2)
            self.failed.append(f"{op} {case}: {type(error).__name__}")
            if "CUDA error" in str(error) or "illegal" in str(error):
                self.finish()

    def case(self, op: str, name: str, limit: float, measure: Callable[[], float]) -> None:
        """One case whose error `measure` returns."""
        self.attempt(op, name, lambda: self.say(op, name, measure(), limit))

    def compare(
        self,
        op: str,
        case: str,
        args: Args,
        *,
        run: Callable[..., Any] | None = None,
        limits: dict[int, float] | None = None,
        rows: tuple[int, ...] = (),
    ) -> None:
        """Kernel against the reference on the CPU: guarded inputs, poisoned outputs, bits of a row alone.

        run: default: provider `triton`; limits: output number -> tolerance in place of the op's; rows: positions of
        arguments that have one row per result row.
        """

        def step() -> None:
            from deepinfer.ops.triton import implementation

            call = run or implementation(op)
            entry, guard = registry.OPS[op], Guarded()
            mine, theirs = guard.args(copy.deepcopy(args)), copy.deepcopy(args)
            poison()
            done = tensors(call(*mine))
            got, want = done or tensors(mine), tensors(entry.reference(*theirs)) or tensors(theirs)
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                limit = (limits or {}).get(i, entry.tolerance)
                if b.dtype.is_floating_point and limit:
                    self.say(op, f"{case}[{i}]", relative(a.cpu().float(), b.float()), limit)
                else:
                    same = a.shape == b.shape and a.dtype == b.dtype
                    wrong = float((raw(a.cpu()) != raw(b)).sum()) if same else float("inf")
                    self.say(op, f"{case}[{i}] exact", wrong, 0.0)
            for r in sorted({0, len(done[0]) // 2, len(done[0]) - 1}) if rows and done and len(done[0]) else ():
                one = [a[r : r + 1].clone() if j in rows and isinstance(a, Tensor) else a for j, a in enumerate(mine)]
                pairs = zip(tensors(call(*one)), got, strict=True)
                self.say(
                    op, f"{case} row {r} alone", sum(float((raw(x) != raw(y[r : r + 1])).sum()) for x, y in pairs), 0.0
                )
            if beyond := guard.touched():
                self.say(op, f"{case} guard bytes overwritten", float(beyond), 0.0)

        self.attempt(op, case, step)

    def examples(self, *ops: str, **more: Any) -> None:
        """Every example input of the ops; `more` goes to `compare`."""
        for op in ops:
            for i, args in enumerate(registry.OPS[op].inputs(self.generator())):
                self.compare(op, f"example{i}/{tuple(args[0].shape)}", args, **more)

    def finish(self) -> None:
        """Print the summary and exit."""
        summary = {
            "family": self.family,
            "seed": self.seed,
            "passed": self.passed,
            "failed": self.failed[:40],
            "worst": {k: float(f"{v:.3g}") for k, v in self.worst.items()},
            "seconds": round(time.time() - self.start, 1),
        }
        print(json.dumps(summary), flush=True)
        sys.exit(1 if self.failed else 0)
