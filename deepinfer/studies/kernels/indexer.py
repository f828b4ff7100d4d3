"""Cases of the indexer family: logits over all entries and over candidate blocks, top-k selection, whole ops.

Floors: logits move the keys of every slot once (68 B an entry), queries, and float32 results; FLOPs are those of the
dots. A selection reads its float32 scores once.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import records
from deepinfer.ops.native import cuda as library
from deepinfer.ops.triton import indexer as kernels
from deepinfer.studies.kernels.harness import Case, Make

HEADS, DIM, TOP, RECORD = 32, 128, 512, 68
BLOCKS, BLOCK = 2048, 8
logits: Callable[..., Any] = kernels.logits
ENTRIES = 64
Calls = list[Callable[[], Any]]


@functools.cache
def _inputs(rows: int, slots: int, n: int, sets: int) -> list[tuple[Tensor, ...]]:
    """Per buffer set (q, weights, pool, table, slots, visible); every row sees all n entries of its slot."""
    out: list[tuple[Tensor, ...]] = []
    pages = slots * n // ENTRIES
    for _ in range(sets):
        q = records.pack_index(torch.randn((rows, HEADS, DIM), device="cuda").bfloat16())
        codes = torch.randint(0, 256, (pages, ENTRIES * 64), dtype=torch.uint8, device="cuda")
        scales = torch.randint(124, 128, (pages, ENTRIES * 4), dtype=torch.uint8, device="cuda")
        table = torch.randperm(pages, device="cuda").view(slots, -1).int()
        slot = (torch.arange(rows, device="cuda") * slots // rows).int()
        visible = torch.full((rows,), n, dtype=torch.int32, device="cuda")
        weights = torch.randn((rows, HEADS), device="cuda") / 64
        out.append((q, weights, torch.cat((codes, scales), 1), table, slot, visible))
    torch.cuda.synchronize()  # calls run on another stream
    return out


def _sets(moved: float) -> int:
    return max(1, min(12, int((200 << 20) // moved)))


def _logits_case(rows: int, slots: int, n: int) -> Case:
    flops = 2.0 * rows * n * HEADS * DIM
    moved = slots * n * RECORD + rows * (HEADS * RECORD + 4.0 * n)
    sets = _sets(moved)

    def make() -> Calls:
        _inputs.cache_clear()
        outs = torch.empty((min(sets, 2), rows, n), device="cuda")
        return [
            functools.partial(logits, *x, ENTRIES, outs[i % len(outs)], 0)
            for i, x in enumerate(_inputs(rows, slots, n, sets))
        ]

    def deep_gemm() -> Calls:
        """One slot only; FP8 keys with one scale each."""
        if slots > 1:
            raise RuntimeError("one slot only")
        dg: Any = importlib.import_module("deep_gemm")
        q = torch.randn((rows, HEADS, DIM), device="cuda").to(torch.float8_e4m3fn)
        k = torch.randn((n, DIM), device="cuda").to(torch.float8_e4m3fn)
        scale, weights = torch.rand(n, device="cuda"), torch.randn((rows, HEADS), device="cuda")
        first = torch.zeros(rows, dtype=torch.int32, device="cuda")
        last = torch.full((rows,), n, dtype=torch.int32, device="cuda")
        return [lambda: dg.fp8_mqa_logits(q, (k, scale), weights, first, last)]

    return Case(f"index_logits/T{rows}/slots{slots}/{n}", make, moved, flops, baselines={"deep_gemm fp8": deep_gemm})


def _blocks_case(rows: int, slots: int, n: int) -> Case:
    seen = BLOCKS * BLOCK
    flops = 2.0 * rows * seen * HEADS * DIM
    moved = min(slots * n, rows * seen) * RECORD + rows * (HEADS * RECORD + 4.0 * seen)
    sets = max(1, min(4, _sets(moved)))

    def make() -> Calls:
        _inputs.cache_clear()
        out = torch.empty((rows, seen), device="cuda")
        calls: Calls = []
        for x in _inputs(rows, slots, n, sets):
            blocks = torch.rand((rows, n // BLOCK), device="cuda").argsort(1)[:, :BLOCKS].sort(1).values.int()
            calls.append(functools.partial(logits, *x, ENTRIES, out, 0, blocks.contiguous(), BLOCK))
        return calls

    return Case(f"index_logits_blocks/T{rows}/slots{slots}/{n}", make, moved, flops)


def _topk_case(n: int, rows: int, kind: str = "") -> Case:
    moved = 4.0 * rows * n + 4.0 * rows * TOP
    sets = _sets(moved)

    def scores() -> list[Tensor]:
        x = [torch.randn((rows, n), device="cuda") for _ in range(sets)]
        x = [s.sort(1).values if kind == "rising" else s for s in x]
        torch.cuda.synchronize()  # calls run on another stream
        return x

    def outputs() -> tuple[Tensor, Tensor]:
        full = torch.full((rows,), n, dtype=torch.int32, device="cuda")
        return torch.empty((rows, TOP), dtype=torch.int32, device="cuda"), full

    def make() -> Calls:
        lib = library.library()
        if isinstance(lib, str):
            raise RuntimeError(lib)
        out, full = outputs()
        return [functools.partial(library.topk, lib, x, out, full, 1, None, 1) for x in scores()]

    def portable() -> Calls:
        out, full = outputs()
        options: dict[str, Any] = {"LENGTHS": True, "MAPPED": False, "N": 4096, "num_warps": 8}

        def call(x: Tensor) -> None:
            kernels._select[(rows,)](x, full, out, out, n, n, 1, 0, 1, TOP, **options)

        return [functools.partial(call, x) for x in scores()]

    def torch_topk(dtype: torch.dtype) -> Calls:
        return [functools.partial(torch.topk, x.to(dtype), TOP, dim=1, sorted=False) for x in scores()]

    baselines: dict[str, Make] = {
        "torch.topk bf16": functools.partial(torch_topk, torch.bfloat16),
        "torch.topk fp32": functools.partial(torch_topk, torch.float32),
        "triton select": portable,
    }
    name = f"topk{kind and '_'}{kind}/{n}/T{rows}"
    return Case(name, make, moved, provider="cuda", baselines={} if kind else baselines)


def _op_case(rows: int, slots: int, n: int, publish: bool) -> Case:
    flops = 2.0 * rows * n * HEADS * DIM
    moved = slots * n * RECORD + rows * (HEADS * RECORD + 4.0 * TOP)
    sets = max(1, min(4, _sets(moved)))

    def make() -> Calls:
        _inputs.cache_clear()
        run: Any = kernels.index_topk_publish if publish else kernels.index_topk
        more = (BLOCKS, BLOCK) if publish else ()
        return [functools.partial(run, *x, 2, 2 * ENTRIES, TOP, *more) for x in _inputs(rows, slots, n, sets)]

    return Case(f"index_topk{'_publish' if publish else ''}/T{rows}/slots{slots}/{n}", make, moved, flops)


def cases() -> Iterator[Case]:
    for rows, slots, n in ((1, 1, 16384), (1, 1, 131072), (8, 8, 16384), (64, 64, 16384), (64, 1, 16384),
                           (256, 256, 16384), (512, 1, 16384), (4096, 1, 16384), (8192, 1, 16384)):  # fmt: skip
        yield _logits_case(rows, slots, n)
    for rows, slots in ((1, 1), (64, 64), (512, 1)):
        yield _blocks_case(rows, slots, 32768)
    for n, rows in ((16384, 1), (16384, 64), (131072, 1), (131072, 64), (131072, 8), (1 << 20, 1), (16384, 8192)):
        yield _topk_case(n, rows)
    yield _topk_case(131072, 64, "rising")
    for rows, slots, n, publish in ((1, 1, 16384, False), (64, 64, 16384, False), (4096, 1, 16384, False),
                                    (64, 64, 32768, True)):  # fmt: skip
        yield _op_case(rows, slots, n, publish)
