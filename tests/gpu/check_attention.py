"""Attention kernels against their references on a GPU: `python tests/gpu/check_attention.py [seed]`.

Prints `ok|FAIL op case err=... limit=...` a case and one JSON line; a failing case does not stop the others. Fresh
random inputs each run. Needs about 12 GB.
"""

from __future__ import annotations

import json
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
from deepinfer.ops.triton import attention as family
from deepinfer.studies.kernels import attention as study

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else int(time.time()) % 100000
PER_ROW = (0, 3, 4, 5, 6, 7, 10)  # arguments of `attention` with one entry a query row
SHAPES = (  # requests, rows of each, context
    (1, 1, 1), (1, 1, 32768), (2, 1, 1024), (7, 1, 3000), (33, 1, 32768), (64, 1, 32768), (67, 1, 2048), (257, 1, 2048),
    (8, 6, 9000), (1, 300, 300), (1, 257, 5000),
)  # fmt: skip
RESULTS: list[dict[str, Any]] = []


def error(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius error; inf where a holds NaN."""
    if not a.numel():
        return 0.0
    if not bool(torch.isfinite(a.double()).all()):
        return float("inf")
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def case(op: str, name: str, limit: float, measure: Callable[[], float]) -> None:
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
    want = args if sample is None else only(args, sample)
    return error(got if sample is None else got[sample], registry.OPS[op].reference(*want))


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


def main() -> None:
    torch.manual_seed(SEED)
    print(f"seed {SEED} on {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for op in ("attention", "block_attention", "vision_attention"):
        for i, args in enumerate(registry.OPS[op].inputs(torch.Generator().manual_seed(SEED))):
            moved = tuple(a.cuda() if isinstance(a, Tensor) else a for a in args)
            case(op, f"example {i}", 5e-3, lambda op=op, moved=moved: against(op, moved))
    for requests, rows, context in SHAPES:
        name = f"{requests}x{rows} rows, context {context}"
        args = study.problem(requests, rows, context)
        case("attention", name, 4e-3, lambda args=args: against("attention", args))
        args = study.problem(requests, rows, context, 0)
        case("attention", f"{name}, window only", 4e-3, lambda args=args: against("attention", args))
    big = study.problem(1, 8192, 32768)
    case("attention", "8192 rows, 64 sampled", 4e-3, lambda: against("attention", big, list(range(0, 8192, 128))))
    case("attention", "pages above 2^31 bytes", 4e-3, lambda: against("attention", far_problem()))
    case("attention", "holes, floors, poison", 4e-3, lambda: against("attention", ragged()))
    for k in (16, 96, 511, 1024):
        case("attention", f"k {k}", 4e-3, lambda k=k: against("attention", study.problem(3, 2, 4000, k)))
    case("attention", "empty row is zero", 0, lambda: float(family.attention(*ragged())[4].abs().sum()))
    pieces = [slice(0, 1), slice(3, 5), slice(0, 33), slice(7, 73), slice(0, 140), slice(299, 300)]
    rows300 = study.problem(300, 1, 4096)
    case("attention", "bits of rows of 300 in 1, 2, 33, 66, 140", 0, lambda: changed(rows300, pieces))
    case("attention", "bits of rows of 8192", 0, lambda: changed(big, [*pieces, slice(8000, 8064)]))
    case("attention", "bits, window only", 0, lambda: changed(study.problem(300, 1, 4096, 0), pieces))
    again = study.problem(64, 1, 4096)
    case(
        "attention", "bits of 20 repeats", 0,
        lambda: float(sum(int((family.attention(*again) != family.attention(*again)).sum()) for _ in range(20))),
    )  # fmt: skip
    case("attention", "plain Triton kernel", 4e-3, lambda: plain_triton(study.problem(33, 1, 4096)))
    case("attention", "plain Triton kernel, 200 rows", 4e-3, lambda: plain_triton(study.problem(200, 1, 4096)))
    for b, g in ((1, 5), (2, 1), (7, 5), (64, 5), (3, 70)):
        case(
            "block_attention", f"{b} blocks of {g}", 4e-3, lambda b=b, g=g: against("block_attention", block_args(b, g))
        )
    for n, heads, d in ((1, 16, 64), (33, 16, 64), (1521, 16, 64), (4096, 16, 64), (50, 2, 16)):
        case("vision_attention", f"{n} patches, {heads} x {d}", 5e-3, lambda n=n, heads=heads, d=d: vision(n, heads, d))
    failed = [r for r in RESULTS if not r["ok"]]
    print(json.dumps({"family": "attention", "seed": SEED, "cases": len(RESULTS), "failed": failed}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
