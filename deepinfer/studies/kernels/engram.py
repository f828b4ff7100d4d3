"""Engram: gather from device and pinned host tables, hashing, gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import registry
from deepinfer.studies.kernels.harness import Case, Make
from deepinfer.studies.kernels.hyper import H, randn, rotate

LINES = {"cuda": 24_000_000, "cpu": 4_000_000}  # 6.3 GB on the device, 1.06 GB pinned: far above every cache
COLS, WIDTH = 24, 256
SETS = 6  # other random rows of the same table


def _table(place: str) -> tuple[Tensor, Tensor]:
    """Codes without NaN and scales near 1."""
    n = LINES[place]
    pin = place == "cpu"
    codes = torch.empty((n, WIDTH), dtype=torch.uint8, device=place, pin_memory=pin)
    scale = torch.empty((n, WIDTH // 32), dtype=torch.uint8, device=place, pin_memory=pin)
    return codes.random_(0, 120).view(torch.float8_e4m3fn), scale.random_(118, 124)


def cases(device: str = "cuda") -> Iterator[Case]:
    from deepinfer.ops.triton import engram

    for place, sizes in (("cuda", (1, 64, 512, 8192)), ("cpu", (1, 8, 64, 512))):
        held: list[tuple[Tensor, Tensor]] = []  # one table for all sizes, made at the first

        def table(place: str = place, held: list[tuple[Tensor, Tensor]] = held) -> tuple[Tensor, Tensor]:
            if not held:
                held.append(_table(place))
            return held[0]

        for t in sizes:

            def make(t: int = t, place: str = place, table: Callable[[], Any] = table) -> list[Callable[[], Any]]:
                codes, scale = table()
                sets = [torch.randint(0, LINES[place], (t, COLS), device="cuda") for _ in range(SETS)]
                return [partial(engram.engram_gather, rows, codes, scale, False) for rows in sets]

            def select(t: int = t, table: Callable[[], Any] = table) -> list[Callable[[], Any]]:
                codes = table()[0].view(torch.uint8)
                sets = [torch.randint(0, LINES["cuda"], (t * COLS,), device="cuda") for _ in range(SETS)]
                return [partial(codes.index_select, 0, rows) for rows in sets]

            baselines: dict[str, Make] = {"torch index_select of the codes": select} if place == "cuda" else {}
            floor = t * COLS * (3.0 * WIDTH + WIDTH / 32)
            name = f"engram_gather/T{t}" if place == "cuda" else f"engram_gather/pinned/T{t}"
            more = {"host_gb": t * COLS * 264 / 1e9} if place == "cpu" else {}
            yield Case(name, make, floor, baselines=baselines, more=more)
        held.clear()
    for t in (1, 64, 512, 8192):
        image = torch.zeros(t, dtype=torch.bool, device="cuda")
        primes = 16_000_057 + 2 * torch.arange(COLS, device="cuda")
        multipliers = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391], device="cuda")
        tokens = torch.randint(0, 99092, (t, 4), dtype=torch.int32, device="cuda")

        def gate(t: int = t, image: Tensor = image) -> tuple[Any, ...]:
            return randn(t, 4, H), randn(t, 5 * H), randn(4, H), randn(4, H), image, 1e-20

        def rows(a: Tensor = tokens, b: Tensor = multipliers, c: Tensor = primes) -> tuple[Any, ...]:
            return a, b, c, c.cumsum(0) - c

        for op, inputs in (("engram_gate", gate), ("engram_rows", rows)):
            floor = registry.OPS[op].cost(*inputs())[1]

            def one(op: str = op, inputs: Callable[[], tuple[Any, ...]] = inputs) -> Callable[[], Any]:
                args = inputs()
                return lambda: getattr(engram, op)(*args)

            yield Case(f"{op}/T{t}", rotate(one, max(floor, 5e6)), floor)
