"""Index scores and top-k selection against their references on a GPU: `python tests/gpu/check_indexer.py [seed]`.

Prints `ok|FAIL op case err=... limit=...` a case and one JSON line; a failing case does not stop the others. Fresh
random inputs each run. Selections are compared entry by entry; where they differ, the exact scores of the two sets must
agree to float32 rounding (err is the number of rows that differ by more).
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

from deepinfer.ops import indexer, records, registry
from deepinfer.ops.native import cuda as library
from deepinfer.ops.triton import indexer as kernels

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else int(time.time()) % 100000
RESULTS: list[dict[str, Any]] = []
HEADS, DIM, TOP, BLOCKS, BLOCK = 32, 128, 512, 2048, 8


def case(op: str, name: str, limit: float, measure: Callable[[], float]) -> None:
    try:
        value = measure()
        torch.cuda.synchronize()
        ok, note = value <= limit, ""
    except Exception as problem:
        value, ok, note = float("nan"), False, f"{type(problem).__name__}: {str(problem)[:300]}"
    RESULTS.append({"op": op, "case": name, "ok": ok, "err": value, "limit": limit, "note": note})
    print(f"{'ok' if ok else 'FAIL':4} {op} {name} err={value:.3g} limit={limit:.3g} {note}", flush=True)


def poison() -> None:
    """Fills freed memory, so that unwritten outputs show."""
    blocks = [
        torch.full((n,), -1234567, dtype=torch.int32, device="cuda") for n in (1 << 12, 1 << 16, 1 << 20, 1 << 24)
    ]
    del blocks


def op_inputs(op: str) -> None:
    definition = registry.OPS[op]
    for i, args in enumerate(definition.inputs(torch.Generator().manual_seed(SEED))):

        def measure(args: tuple[Any, ...] = args) -> float:
            poison()
            got = getattr(kernels, op)(*[a.cuda() if isinstance(a, Tensor) else a for a in args])
            want = definition.reference(*args)
            pairs = zip(*(o if isinstance(o, tuple) else (o,) for o in (got, want)), strict=True)
            return float(sum(not torch.equal(a.cpu(), b) for a, b in pairs))

        case(op, f"inputs/{i}", 0.0, measure)


class World:
    """A pool of random keys with guard pages of NaN-like scales around those in use, page tables at high page ids."""

    def __init__(self, rows: int, slots: int, entries: int, capacity: int) -> None:
        g = torch.Generator(device="cuda").manual_seed(SEED + rows + capacity)
        self.entries, self.g = entries, g
        width = capacity // entries
        pages = slots * width + 64
        pool = torch.full((pages, entries * 68), 255, dtype=torch.uint8, device="cuda")
        used = torch.randperm(pages, generator=g, device="cuda")[: slots * width]
        step = max(1, (1 << 22) // entries)
        for i in range(0, used.numel(), step):
            ids = used[i : i + step]
            key = torch.randn((ids.numel(), entries, DIM), generator=g, device="cuda")
            key = key * torch.exp2(torch.randint(-2, 3, (*key.shape[:2], 1), generator=g, device="cuda"))
            rec = records.pack_index(key.bfloat16())
            pool[ids] = torch.cat((rec[..., :64].flatten(1), rec[..., 64:].flatten(1)), 1)
        self.pool, self.table = pool, used.view(slots, width).int()
        q = torch.randn((rows, HEADS, DIM), generator=g, device="cuda")
        self.q = records.pack_index(q.bfloat16())
        self.weights = torch.randn((rows, HEADS), generator=g, device="cuda") * (DIM**-0.5 * HEADS**-0.5)

    def args(self, rows: slice, slots: Tensor, visible: Tensor) -> tuple[Any, ...]:
        ratio = 128 // self.entries
        return (self.q[rows], self.weights[rows], self.pool, self.table, slots[rows], visible[rows], ratio, 128)

    def scores(self, row: int, slots: Tensor, visible: Tensor, size: bool = False) -> Tensor:
        """Exact scores of one row's visible entries; size: sums of the magnitudes that they add."""
        n = int(visible[row])
        keys = indexer._keys(self.pool, self.table[int(slots[row])], n, 1, self.entries, DIM)
        q = records.unpack_index(self.q[row : row + 1], DIM)
        weights = self.weights[row : row + 1]
        return indexer._scores(q, weights.abs() if size else weights, keys)[0]


def worse(got: Tensor, want: Tensor, exact: Tensor) -> bool:
    """Whether two selections of one row differ by more than rounding of the scores."""
    if torch.equal(got, want):
        return False
    a, b = got[got >= 0].long(), want[want >= 0].long()
    ordered = bool((a[1:] > a[:-1]).all()) and bool((got[a.numel() :] == -1).all())
    if a.numel() != b.numel() or not ordered:
        return True
    gap = (exact[a].sort().values - exact[b].sort().values).abs().max()
    return bool(gap > 2e-6 * exact[exact.isfinite()].abs().max())


def real(entries: int, capacity: int, rows: int, slots: Tensor, visible: Tensor, name: str) -> None:
    """All three ops on sampled rows, logits and bits."""
    world = World(rows, int(slots.max()) + 1, entries, capacity)
    sample = sorted({0, 1 % rows, rows // 2, rows - 1, int(visible.argmax()), int(visible.argmin())})
    every = world.args(slice(None), slots, visible)

    def logits() -> float:
        out = torch.full((rows, capacity), float("nan"), device="cuda")
        kernels.logits(*every[:6], entries, out, 0)
        worst = 0.0
        for row in sample:
            n = int(visible[row])
            if n > 0:
                want, size = world.scores(row, slots, visible), world.scores(row, slots, visible, size=True)
                worst = max(worst, float(((out[row, :n] - want).abs() / size).nan_to_num().max()))
            assert bool(out[row, max(n, 0) :].isnan().all()), "wrote beyond the visible entries"
            alone = torch.full((1, capacity), float("nan"), device="cuda")
            kernels.logits(*world.args(slice(row, row + 1), slots, visible)[:6], entries, alone, 0)
            assert torch.equal(alone[0, :n], out[row, :n]), f"bits of row {row} depend on the batch"
        return worst

    case("index_logits", name, 1e-6, logits)

    def full() -> float:
        poison()
        got = kernels.index_topk(*every, TOP)
        bad = 0
        for row in sample:
            want = indexer.index_topk(*world.args(slice(row, row + 1), slots, visible), TOP)
            exact = world.scores(row, slots, visible) if int(visible[row]) > 0 else world.weights[row]
            bad += worse(got[row], want[0], exact)
            alone = kernels.index_topk(*world.args(slice(row, row + 1), slots, visible), TOP)
            assert torch.equal(alone[0], got[row]), "row depends on the batch"
        return float(bad)

    case("index_topk", name, 0.0, full)

    def levels() -> float:
        poison()
        got, blocks = kernels.index_topk_publish(*every, TOP, BLOCKS, BLOCK)
        again = kernels.index_topk_blocks(*every, TOP, blocks, BLOCK)
        assert torch.equal(got, kernels.index_topk(*every, TOP)), "publish selects otherwise"
        bad = 0
        for row in sample:
            one = world.args(slice(row, row + 1), slots, visible)
            _, want = indexer.index_topk_publish(*one, TOP, BLOCKS, BLOCK)
            n = int(visible[row])
            exact = world.scores(row, slots, visible) if n > 0 else world.weights[row]
            best = torch.nn.functional.pad(exact, (0, -exact.numel() % BLOCK), value=float("-inf"))
            bad += worse(blocks[row], want[0], best.unflatten(0, (-1, BLOCK)).amax(1))
            read = indexer.index_topk_blocks(*one, TOP, blocks[row : row + 1], BLOCK)
            bad += worse(again[row], read[0], exact)
            # the whole of a row's best entries lies in its best blocks
            assert n <= 0 or torch.equal(again[row], got[row]), "two levels select otherwise than one"
        return float(bad)

    case("index_topk_publish+blocks", name, 0.0, levels)


def real_cases() -> None:
    def spread(rows: int, slots: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator(device="cuda").manual_seed(SEED + rows)
        slot = (torch.arange(rows, device="cuda") * slots // rows).int()
        return slot, torch.randint(low, high + 1, (rows,), generator=g, device="cuda").int()

    for rows, slots, entries, capacity in (
        (1, 1, 64, 4096), (2, 2, 128, 2048), (7, 3, 64, 8192), (33, 33, 64, 20480), (64, 64, 64, 16384),
        (65, 1, 128, 32768), (130, 40, 64, 16384), (257, 7, 128, 8192),
        (530, 400, 64, 4096),
    ):  # fmt: skip
        slot, visible = spread(rows, slots, -1 if rows > 1 else capacity, capacity)
        visible[-1] = capacity
        if rows > 6:
            visible[:6] = torch.tensor([0, 1, TOP, TOP + 1, capacity - 1, 4097 % capacity])
        real(entries, capacity, rows, slot, visible, f"M{rows}/slots{slots}/S{capacity}")
    # a prefill of one request: visible grows by row
    rows, capacity = 1100, 16384
    visible = (torch.arange(rows, device="cuda") + capacity - rows + 1).int()
    real(64, capacity, rows, torch.zeros(rows, dtype=torch.int32, device="cuda"), visible, f"prefill/M{rows}")
    hopper, kernels._hopper = kernels._hopper, lambda: None
    try:  # the portable kernel
        for rows, slots, entries, capacity in ((7, 3, 64, 4096), (130, 40, 64, 4096)):
            slot, visible = spread(rows, slots, -1, capacity)
            real(entries, capacity, rows, slot, visible, f"triton/M{rows}")
    finally:
        kernels._hopper = hopper
    bound, kernels.WORKSPACE = kernels.WORKSPACE, 4 * 131072 * 20
    try:
        rows, capacity = 72, 131072
        slot, visible = spread(rows, 1, capacity - 5000, capacity)
        real(128, capacity, rows, slot, visible, f"workspace-chunks/M{rows}/S{capacity}")
    finally:
        kernels.WORKSPACE = bound


def selection() -> None:
    """Both selections against a stable sort: ties, signs, infinities, short rows, many sizes."""
    g = torch.Generator(device="cuda").manual_seed(SEED)
    lib = library.library()
    print(f"CUDA library: {'loaded' if not isinstance(lib, str) else lib}", flush=True)

    def data(kind: str, rows: int, n: int) -> Tensor:
        x = torch.randn((rows, n), generator=g, device="cuda")
        if kind == "ties":
            x = (x * 2).round() / 2
        elif kind == "equal":
            x = torch.zeros_like(x)
            x[:, ::3] = -0.0
        elif kind == "holes":
            x = torch.where(torch.rand(x.shape, generator=g, device="cuda") < 0.9, float("-inf"), x)
        elif kind == "narrow":  # all keys share their high bits
            x = 1.0 + x.abs() * 1e-6
        elif kind == "rising":  # every step beats all before
            x = x.sort(dim=1).values
        return x

    def measure(kind: str, rows: int, n: int, k: int, triton: bool, mapped: bool) -> float:
        x = data(kind, rows, (n + 3) // 4 * 4)[:, :n]
        visible = torch.randint(0, n + 1, (rows,), generator=g, device="cuda").int()
        visible[0] = n
        blocks = None
        if mapped:
            visible = None
            blocks = torch.rand((rows, 2 * n // 8), generator=g, device="cuda").argsort(1)[:, : n // 8].sort(1).values
            blocks = blocks.int().contiguous()
        out = torch.full((rows, k), -77, dtype=torch.int32, device="cuda")
        if triton:
            kept, kernels.cuda.library = kernels.cuda.library, lambda: "off"
            try:
                kernels.select(x, out, visible, 1, blocks, 8)
            finally:
                kernels.cuda.library = kept
        else:
            assert not isinstance(lib, str), lib
            library.topk(lib, x, out, visible, 1, blocks, 8)
        bad = 0
        for r in range(0, rows, 1024):
            at = slice(r, r + 1024)
            s = x[at]
            if visible is not None:
                s = s.masked_fill(torch.arange(n, device="cuda") >= visible[at, None], float("-inf"))
            want = indexer._top(s, k)
            if visible is not None:  # short rows are taken whole
                ids = torch.arange(k, device="cuda").expand_as(want)
                short = torch.where(ids < visible[at, None], ids, -1).int()
                want = torch.where(visible[at, None] <= k, short, want)
            else:
                entry = blocks[at].gather(1, want.clamp_min(0).long() // 8) * 8 + want % 8
                want = torch.where(want < 0, want, entry)
            bad += int((out[at] != want).any(dim=1).sum())
        return float(bad)

    shapes = [(1, 512, 512), (3, 513, 512), (64, 16384, 512), (5, 1000, 7), (2, 131072, 512), (64, 131072, 512)]
    shapes += [
        (1, 1 << 20, 512),
        (300, 20000, 2048),
        (100, 40000, 512),
        (2, 200000, 2048),
        (1, 40001, 1),
        (8192, 2048, 512),
    ]
    for rows, n, k in shapes:
        for kind in ("normal", "ties", "equal", "holes", "narrow", "rising"):
            for mapped in (False, True):
                if mapped and n % 8:
                    continue
                name = f"{n}x{rows}/k{k}/{kind}{'/blocks' if mapped else ''}"
                case("topk", name, 0.0, lambda a=(kind, rows, n, k, False, mapped): measure(*a))
                if rows <= 64 and n <= 131072:
                    case("topk-triton", name, 0.0, lambda a=(kind, rows, n, k, True, mapped): measure(*a))


def graphs() -> None:
    """One capture serves other lengths, slots and pages."""
    world = World(64, 64, 64, 16384)
    slots, visible = torch.arange(64, device="cuda").int(), torch.full((64,), 9000, device="cuda").int()
    args = world.args(slice(None), slots, visible)

    def measure() -> float:
        kernels.index_topk_publish(*args, TOP, BLOCKS, BLOCK)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = kernels.index_topk_publish(*args, TOP, BLOCKS, BLOCK)
        bad = 0
        for n in (3, 700, 16384):
            visible.fill_(n)
            slots.copy_(slots.roll(1))
            graph.replay()
            want = kernels.index_topk_publish(*args, TOP, BLOCKS, BLOCK)
            bad += sum(not torch.equal(a, b) for a, b in zip(got, want, strict=True))
        return float(bad)

    case("index_topk_publish", "graph", 0.0, measure)


def main() -> int:
    print(f"indexer family, seed {SEED}, {torch.cuda.get_device_name()}", flush=True)
    torch.manual_seed(SEED)
    ops = ("index_topk", "index_topk_publish", "index_topk_blocks")
    parts: list[tuple[str, Callable[[], None]]] = [(op, lambda op=op: op_inputs(op)) for op in ops]
    for name, part in (*parts, ("selection", selection), ("real", real_cases), ("graphs", graphs)):
        try:
            part()
        except Exception as problem:
            traceback.print_exc(limit=6)
            RESULTS.append({"op": name, "case": "setup", "ok": False, "err": str(problem)[:200]})
            print(f"FAIL {name} setup {type(problem).__name__}: {str(problem)[:300]}", flush=True)
    failed = [r for r in RESULTS if not r["ok"]]
    print(json.dumps({"family": "indexer", "seed": SEED, "cases": len(RESULTS), "failed": failed}, default=str))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
