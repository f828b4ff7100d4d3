"""Sampling at the real vocabulary: draws, filters, penalties, Markov step, acceptance.

Floors count one reading of every logit. Baselines: torch's own argmax, and softmax + sort + cumsum + multinomial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.acceptance import BLOCK, MATCH, TOKENWISE
from deepinfer.ops.sampling import STREAM_DRAFT
from deepinfer.studies.kernels.harness import Case, Make

V, H, RANK, DRAFTS = 129_280, 5120, 256, 5
COLD = 160e6  # bytes that rotating buffers hold together, three times the L2


def logits_like(m: int, scale: float = 2.0, peak: float = 12.0) -> Tensor:
    """A bulk of standard deviation `scale`, and a few ids up to `peak` above it, as a language model gives."""
    bulk = torch.randn((m, V), device="cuda") * scale
    return bulk + peak * torch.rand((m, V), device="cuda") ** 400


def params(m: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> tuple[Tensor, ...]:
    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((m,), value, dtype=dtype, device="cuda")

    filters = (full(temperature, torch.float32), full(top_k, torch.int32), full(top_p, torch.float64))
    seeds = torch.randint(0, 1 << 62, (m,), device="cuda")
    position = torch.randint(0, 9000, (m,), device="cuda").int()
    return (*filters, full(float("-inf"), torch.float32), seeds, position, full(0, torch.int32))


def sets(nbytes: float) -> range:
    return range(max(2, min(12, int(COLD // nbytes) + 1)))


def sort_based(z: Tensor, top_p: float) -> Tensor:
    p, order = torch.softmax(z, 1).sort(1, descending=True)
    p = torch.where(p.cumsum(1) - p < top_p, p, 0.0)
    return order.gather(1, torch.multinomial(p, 1))


def exponential_race(z: Tensor) -> Tensor:
    p = torch.softmax(z, 1)
    return (p / torch.empty_like(p).exponential_()).argmax(1)


def top_of_softmax(z: Tensor) -> Any:
    return torch.log_softmax(z, 1).topk(20, 1)


def draws() -> Iterator[Case]:
    from deepinfer.ops.triton import implementation

    sample = implementation("sample")

    for m in (1, 64, 256):
        size = 4.0 * m * V
        for name, kind, source in (
            ("greedy", {"temperature": 0.0}, logits_like),
            ("plain", {}, logits_like),
            ("top_p", {"top_p": 0.9}, logits_like),
            ("top_k_top_p", {"top_k": 50, "top_p": 0.9}, logits_like),
            ("top_p_flat", {"top_p": 0.9}, partial(logits_like, scale=1.0, peak=0.0)),
        ):
            filtered = "top" in name

            def make(
                m: int = m,
                kind: dict[str, Any] = kind,
                source: Callable[[int], Tensor] = source,
                filtered: bool = filtered,
                size: float = size,
            ) -> list[Callable[[], Any]]:
                who = params(m, **kind)
                return [partial(sample, source(m), *who, None, 0, filtered, False) for _ in sets(size)]

            def argmax(m: int = m, size: float = size) -> list[Callable[[], Any]]:
                return [partial(torch.argmax, logits_like(m), 1) for _ in sets(size)]

            def race(m: int = m, size: float = size) -> list[Callable[[], Any]]:
                return [partial(exponential_race, logits_like(m)) for _ in sets(size)]

            def sort(m: int = m, size: float = size, source: Callable[[int], Tensor] = source) -> Any:
                return [partial(sort_based, source(m), 0.9) for _ in sets(size)]

            baselines: dict[str, Make] = {"torch softmax, sort, cumsum, multinomial": sort} if filtered else {}
            if name == "greedy":
                baselines = {"torch argmax": argmax}
            elif name == "plain":
                baselines = {"torch softmax, exponential race": race}
            yield Case(f"sample/T{m}/{name}", make, size, baselines=baselines)


def others() -> Iterator[Case]:
    from deepinfer.ops.sampling import penalise_example
    from deepinfer.ops.triton import implementation

    sample, markov_step, accept_drafts = (implementation(op) for op in ("sample", "markov_step", "accept"))
    penalise_rows, top_logprobs = implementation("penalise"), implementation("top_logprobs")

    m = 64
    size = 4.0 * m * V

    def penalise() -> list[Callable[[], Any]]:
        """Every row with all penalties, 3% of the ids in its prompt and 0.3% generated; bias, stop ids, five drafts."""
        calls: list[Callable[[], Any]] = []
        words = (V + 31) // 32
        for i in sets(size):
            args = penalise_example(torch.Generator().manual_seed(i), m, 200, m, 4)
            counts = (torch.rand((m, V), device="cuda") < 0.003).short()
            bits = (torch.rand((m, words * 32), device="cuda") < 0.03).view(m, words, 32).int()
            prompt = (bits << torch.arange(32, device="cuda").int()).sum(2).int()
            every = torch.tensor([1.1, 0.2, 0.1], device="cuda").repeat(m, 1)
            slots = torch.arange(m, device="cuda").int()
            rest = (a.cuda() for a in args[5:13])
            calls.append(partial(penalise_rows, logits_like(m), slots, counts, prompt, every, *rest, None, None))
        return calls

    yield Case("penalise/T64", penalise, m * V * (4 + 2 + 1 / 8))

    def top() -> list[Callable[[], Any]]:
        ids = torch.zeros(m, dtype=torch.int64, device="cuda")
        return [partial(top_logprobs, logits_like(m), ids, 20) for _ in sets(size)]

    def log_softmax() -> list[Callable[[], Any]]:
        return [partial(top_of_softmax, logits_like(m)) for _ in sets(size)]

    yield Case("top_logprobs/T64/n20", top, size, baselines={"torch log_softmax, topk": log_softmax})

    for r in (1, 64):
        embed, head = (torch.randn((V, RANK), device="cuda").bfloat16() for _ in range(2))
        weight = torch.randn((1, H + RANK), device="cuda").bfloat16()
        floor = V * RANK * 2 + 8.0 * r * V

        for name, temperature in (("", 1.0), ("/greedy", 0.0)):

            def markov(
                r: int = r, temperature: float = temperature, embed: Tensor = embed, head: Tensor = head,
                weight: Tensor = weight, floor: float = floor,
            ) -> list[Callable[[], Any]]:  # fmt: skip
                who = params(r, temperature)
                x, previous = torch.randn((r, H), device="cuda").bfloat16(), torch.randint(0, V, (r,), device="cuda")
                tail = (embed, weight, who[0], *who[4:], STREAM_DRAFT)
                return [
                    partial(markov_step, logits_like(r), x, previous, tail[0], head.clone(), *tail[1:])
                    for _ in sets(floor)
                ]

            def cublas(r: int = r, embed: Tensor = embed, head: Tensor = head, floor: float = floor) -> Any:
                previous = torch.randint(0, V, (r,), device="cuda")

                def call(z: Tensor, w: Tensor) -> Tensor:
                    return (z + (embed[previous] @ w.t()).float()).argmax(1)

                return [partial(call, logits_like(r), head.clone()) for _ in sets(floor)]

            yield Case(f"markov/R{r}{name}", markov, floor, baselines={"cuBLAS bf16, add, argmax": cublas})

    r = 64
    for name, rule in (("match", MATCH), ("tokenwise", TOKENWISE), ("block", BLOCK)):
        rows = r * (DRAFTS + 1)

        def accept(rule: int = rule, rows: int = rows) -> list[Callable[[], Any]]:
            start = torch.arange(r + 1, device="cuda").int() * (DRAFTS + 1)
            who = params(rows)
            z = logits_like(rows)
            q = z.unflatten(0, (r, -1))[:, :DRAFTS] + 0.3 * torch.randn((r, DRAFTS, V), device="cuda")
            p = params(r * DRAFTS)
            drafts, _ = sample(q.flatten(0, 1), *p, None, STREAM_DRAFT, False, False)
            drafts = drafts.view(r, DRAFTS)
            stored = None if rule == MATCH else q
            call = partial(accept_drafts, start, z, drafts, stored, *who, rule, False)
            return [call, call]  # 200 to 360 MB: four times the L2 and more

        floor = 4.0 * V * (rows if rule == MATCH else rows + r * DRAFTS)
        yield Case(f"accept/R64/{name}", accept, floor)


def cases(device: str = "cuda") -> Iterator[Case]:
    yield from draws()
    yield from others()
