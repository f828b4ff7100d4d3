"""Attention kernels against their references on a GPU: `python tests/gpu/check_attention.py [seed [text]]`, text: part
of the names of cases to run.

Prints `ok|FAIL op case err=... limit=...` a case and one JSON line; a failing case does not stop the others. Fresh
random inputs each run. Needs about 12 GB.
"""

from __future__ import annotations

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
from deepinfer.ops.native import cuda
from deepinfer.ops.providers import flash_mla
from deepinfer.ops.triton import attention as family
from deepinfer.studies.kernels import attention as study

MATCH = sys.argv[2] if len(sys.argv) > 2 else ""  # only cases whose name contains it
SEED = int(sys.argv[1]) if len(sys.argv) > 1 else int(time.time()) % 100000
PER_ROW = (0, 3, 4, 5, 6, 7, 10)  # arguments of `attention` with one entry a query row
SHAPES: tuple[tuple[int, int, int], ...] = (  # requests, rows of each, context
    (1, 1, 1), (1, 1, 32768), (2, 1, 1024), (7, 1, 3000), (33, 1, 32768), (64, 1, 32768), (67, 1, 2048), (257, 1, 2048),
    (8, 6, 9000), (1, 300, 300), (1, 257, 5000),
)  # fmt: skip
SMALL = os.environ.get("DEEPINFER_CHECK_SMALL") == "1"  # for compute-sanitizer
if SMALL:
    SHAPES = ((1, 1, 1), (2, 1, 1024), (1, 7, 300))
RESULTS: list[dict[str, Any]] = []


def error(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius error; inf where a holds NaN."""
    if not a.numel():
        return 0.0
    if not bool(torch.isfinite(a.double()).all()):
        return float("inf")
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def case(op: str, name: str, limit: float, measure: Callable[[], float]) -> None:
    if MATCH not in name:
        return
    try:
        value = measure()
        torch.cuda.synchronize()
        ok, note = value <= limit, ""
    except Exception as problem:
        value, ok, note = float("nan"), False, f"{type(problem).__name__}: {str(problem)[:300]}"
        traceback.print_exc(limit=4)
    RESULTS.append({"op": op, "case": name, "ok": ok, "err": value, "limit": limit})
    print(f"{'ok  ' if ok else 'FAIL'} {op} {name} err={value:.3g} limit={limit:.3g} {note}", flush=True)


def poison() -> None:
    """Fill the allocator's free memory with NaN patterns, so that an unwritten output shows."""
    blocks = [torch.full((n,), 0xFF, dtype=torch.uint8, device="cuda") for n in (1 << 20, 16 << 20, 256 << 20) * 2]
    blocks += [torch.full((1 << n,), 0xFF, dtype=torch.uint8, device="cuda") for n in range(9, 20)]
    del blocks


def only(args: tuple[Any, ...], rows: slice | list[int]) -> list[Any]:
    """The same problem for some of its query rows."""
    return [a[rows].contiguous() if i in PER_ROW and a is not None else a for i, a in enumerate(args)]


def against(op: str, args: Any, sample: list[int] | None = None) -> float:
    poison()
    got = getattr(family, op)(*args)
    want = registry.OPS[op].reference(*(args if sample is None else only(args, sample)))
    got = got if sample is None else got[sample]
    value = error(got, want)
    if not value <= 5e-3 and got.dim() == 3 and got.shape[1:] == (64, 512):  # where it is wrong
        rows = [f"{error(got[i], want[i]):.2g}" for i in range(min(8, got.shape[0]))]
        dims = [f"{error(got[..., i : i + 32], want[..., i : i + 32]):.2g}" for i in range(0, 512, 32)]
        heads = [f"{error(got[:, i : i + 8], want[:, i : i + 8]):.2g}" for i in range(0, 64, 8)]
        print(f"  rows {' '.join(rows)} | dims by 32 {' '.join(dims)} | heads by 8 {' '.join(heads)}")
    return value


def split(parts: int, args: tuple[Any, ...], op: str = "attention") -> float:
    """With a fixed number of blocks a row."""
    chosen, family._split = family._split, lambda rows, tiles, sms: parts
    try:
        return against(op, args)
    finally:
        family._split = chosen


def without_library(args: tuple[Any, ...]) -> float:
    """The Gluon kernel that runs where csrc/cuda was not built."""
    library, cuda.library = cuda.library, lambda: "off"
    try:
        return against("attention", args)
    finally:
        cuda.library = library


def changed(args: tuple[Any, ...], pieces: list[slice]) -> float:
    """Elements whose bits differ between the whole batch and rows taken alone."""
    whole, bad = family.attention(*args), 0
    for rows in pieces:
        poison()
        bad += int((family.attention(*only(args, rows)) != whole[rows]).sum())
    return float(bad)


def far_pool(pages: int) -> Tensor:
    """A pool of 0xFF whose last 600 pages hold records: byte offsets above 2^31."""
    pool = torch.full((pages, study.PER_PAGE, 288), 0xFF, dtype=torch.uint8, device="cuda")
    pool[-600:] = study.latents(256)[torch.randint(0, 256, (600,), device="cuda")]
    return pool


def far_problem() -> tuple[Any, ...]:
    args = list(study.problem(2, 5, 30000))
    args[9] = far_pool(130_000)
    args[11] = (129_400 + torch.randperm(600, device="cuda")[: args[11].numel()]).view(args[11].shape).int()
    return tuple(args)


def ragged() -> tuple[Any, ...]:
    """Lists with holes, poisoned unused records, a floor above some windows, a row without any key."""
    args = list(study.problem(3, 11, 700, 512, None, 640))
    args[10] = torch.where(torch.rand(args[10].shape, device="cuda") < 0.3, -1, args[10])
    args[10][4] = -1
    args[7][4] = args[4][4] + 1
    args[2] = args[2].clone()
    args[2][0] = 0xFF  # ring of slot 0: below its floor only
    args[7][:11] = torch.maximum(args[7][:11], args[6][:11])
    return tuple(args)


def block_args(b: int, g: int) -> tuple[Any, ...]:
    slots = torch.randperm(b + 3, device="cuda")[:b].int()
    start = torch.randint(1, 4000, (b,), device="cuda").int()
    floor = torch.where(torch.rand(b, device="cuda") < 0.3, start - 20, 0).int()
    q = torch.randn((b * g, study.HEADS, study.DIM), device="cuda").bfloat16()
    ring = study.random_window(b + 3, study.RING)
    sink = torch.randn(study.HEADS, device="cuda")
    return q, study.random_window(b * g), ring, slots, start, floor, sink, study.SCALE, study.WINDOW


def library() -> float:
    """The FlashMLA adapter; 0 where the library is absent."""
    if flash_mla.why_not():
        return 0.0
    problems = (study.problem(2, 33, 4096), study.problem(1, 300, 5000, 0), study.problem(33, 1, 32768), ragged())
    return max(error(flash_mla.attention(*a), registry.OPS["attention"].reference(*a)) for a in problems)


def plain_triton(args: tuple[Any, ...]) -> float:
    """The Triton kernel of other archs on this GPU, real shape."""
    hopper, family._hopper = family._hopper, lambda device: False
    try:
        return against("attention", args)
    finally:
        family._hopper = hopper


def vision(n: int, heads: int, d: int) -> float:
    qkv = torch.randn((n, 3 * heads * d), device="cuda").bfloat16()
    angle = torch.rand((n, d // 2), device="cuda") * 6
    return against("vision_attention", (qkv, angle.cos(), angle.sin(), heads))


def finish() -> None:
    failed = [r for r in RESULTS if not r["ok"]]
    print(json.dumps({"family": "attention", "seed": SEED, "cases": len(RESULTS), "failed": failed}))
    sys.exit(1 if failed else 0)


def main() -> None:
    torch.manual_seed(SEED)
    print(f"seed {SEED} on {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for op in ("attention", "block_attention", "vision_attention"):
        for i, args in enumerate(registry.OPS[op].inputs(torch.Generator().manual_seed(SEED))):
            moved = tuple(a.cuda() if isinstance(a, Tensor) else a for a in args)
            case(op, f"example {i}", 5e-3, lambda op=op, moved=moved: against(op, moved))
    print(f"library: {cuda.library()}, batch invariant: {family.INVARIANT}", flush=True)
    for parts in (1, 2, 4, 8):
        for requests, k in ((1, 512), (3, 512), (1, 0), (3, 96), (140, 512)):
            if parts * 64 > 128 + k:
                continue
            args = study.problem(requests, 1, 3000, k)
            case(
                "attention",
                f"{parts} blocks a row, {requests} rows, k {k}",
                4e-3,
                lambda parts=parts, args=args: split(parts, args),
            )
    for requests, rows, context in SHAPES:
        name = f"{requests}x{rows} rows, context {context}"
        args = study.problem(requests, rows, context)
        case("attention", name, 4e-3, lambda args=args: against("attention", args))
        args = study.problem(requests, rows, context, 0)
        case("attention", f"{name}, window only", 4e-3, lambda args=args: against("attention", args))
    if SMALL:
        finish()
    big = study.problem(1, 8192, 32768)
    case("attention", "8192 rows, 64 sampled", 4e-3, lambda: against("attention", big, list(range(0, 8192, 128))))
    case("attention", "pages above 2^31 bytes", 4e-3, lambda: against("attention", far_problem()))
    case("attention", "holes, floors, poison", 4e-3, lambda: against("attention", ragged()))
    for k in (16, 96, 511, 1024):
        case("attention", f"k {k}", 4e-3, lambda k=k: against("attention", study.problem(3, 2, 4000, k)))
    case("attention", "empty row is zero", 0, lambda: float(family.attention(*ragged())[4].abs().sum()))
    pieces = [slice(0, 1), slice(3, 5), slice(0, 33), slice(7, 73), slice(0, 140), slice(299, 300)]
    rows300 = study.problem(300, 1, 4096)
    if not family.INVARIANT:  # the number of blocks a row follows the batch
        pieces = [slice(7, 140), slice(0, 140), slice(3, 299)]
    case("attention", "bits of rows of 300 in smaller batches", 0, lambda: changed(rows300, pieces))
    case("attention", "bits of rows of 8192", 0, lambda: changed(big, pieces))
    case("attention", "bits, window only", 0, lambda: changed(study.problem(300, 1, 4096, 0), pieces))
    again = study.problem(64, 1, 4096)
    case(
        "attention", "bits of 20 repeats", 0,
        lambda: float(sum(int((family.attention(*again) != family.attention(*again)).sum()) for _ in range(20))),
    )  # fmt: skip
    case("attention", "without the library", 4e-3, lambda: without_library(study.problem(33, 1, 4096)))
    case("attention", f"flash_mla ({flash_mla.why_not() or 'found'})", 5e-3, library)
    case("attention", "plain Triton kernel", 4e-3, lambda: plain_triton(study.problem(33, 1, 4096)))
    case("attention", "plain Triton kernel, 200 rows", 4e-3, lambda: plain_triton(study.problem(200, 1, 4096)))
    for b, g in ((1, 5), (2, 1), (7, 5), (64, 5), (3, 70)):
        case(
            "block_attention", f"{b} blocks of {g}", 4e-3, lambda b=b, g=g: against("block_attention", block_args(b, g))
        )
    for n, heads, d in ((1, 16, 64), (33, 16, 64), (1521, 16, 64), (4096, 16, 64), (50, 2, 16)):
        case("vision_attention", f"{n} patches, {heads} x {d}", 5e-3, lambda n=n, heads=heads, d=d: vision(n, heads, d))
    finish()


if __name__ == "__main__":
    main()
