"""Decode steps through graphs and tokens chosen on the device, on the CPU: a stand-in graph runs its work again.

What an accelerator does differently from this: nothing but the launch. Padding, buckets, inputs, tables by slot, which
sequences are sampled where, results that arrive later: all of it is the code that runs there. Native CPU ops give a row
the same bits in any batch, so texts must be equal to the plain engine's, token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.compile import counters
from deepinfer.engine.runner import Runner
from deepinfer.engine.state import SamplingTable
from deepinfer.platform import graphs
from deepinfer.platform.device import Device

TINY = str(Path(__file__).parents[1] / "data/tiny")
PROMPTS = [[0, *range(20, 23 + 7 * i)] for i in range(7)]
SIZES = {"max_model_len": 128, "max_num_seqs": 5, "page_size": 16, "max_num_batched_tokens": 40}


class Again:
    """Runs the captured work at every replay and writes its result where the first one lies."""

    def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.work = work
        self.result = work()
        return self.result

    def replay(self) -> None:
        self.result.copy_(self.work())

    def close(self) -> None: ...


class Backend:
    class Stream:
        def __init__(self, device: Any = None) -> None: ...
        def wait_stream(self, other: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    def current_stream(self, device: Any = None) -> Stream:
        return self.Stream()

    def stream(self, stream: Any) -> Any:
        return stream

    def synchronize(self, device: Any) -> None: ...

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 0, 0


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU as a device with graphs, on which tokens are chosen."""
    monkeypatch.setattr(graphs, "backend", lambda device: Backend())
    monkeypatch.setattr(graphs, "new_pool", lambda device: None)
    monkeypatch.setattr(graphs, "new_graph", lambda device, pool: Again())
    # the next step's work may run before the result is read, as on a device: so what is read is what was launched
    monkeypatch.setattr(Device, "to_host", lambda self, t, buffer: (lambda c: lambda: c)(t.clone()))
    plain = Runner.__init__

    def init(self: Runner, *args: Any) -> None:
        plain(self, *args)
        self.table = SamplingTable(self.state.page_table.shape[0], self.device, args[4])

    monkeypatch.setattr(Runner, "__init__", init)
    yield


def run(params: Any, prompts: Any = PROMPTS, **options: Any) -> list[list[list[int]]]:
    with LLM(TINY, **{**SIZES, **options}) as llm:
        with counters.expect(captured=0, compiled=0):
            outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.engine.check_idle()
        assert all(o.error is None for o in outputs)
        return [[c.token_ids for c in o.outputs] for o in outputs]


GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.8, top_k=40, seed=5, max_tokens=20, ignore_eos=True)
MIXED = [
    GREEDY,
    DRAWN,
    SamplingParams(temperature=1.0, min_p=0.02, seed=1, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=2, repetition_penalty=1.3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, logprobs=3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, logit_bias={7: 3.0}, min_tokens=4, max_tokens=13),
    SamplingParams(temperature=0.5, seed=6, max_tokens=1, ignore_eos=True),
]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"params": GREEDY},
    "drawn": {"params": DRAWN},
    "mixed": {"params": MIXED},
    "forks": {"params": SamplingParams(n=3, temperature=0.9, seed=9, max_tokens=11, ignore_eos=True)},
    "preempted": {"params": DRAWN, "num_pages": 9},
    "serial": {"params": DRAWN, "async_scheduling": False},
    "one row": {"params": DRAWN, "prompts": PROMPTS[:1]},
    "prefix hits": {"params": GREEDY, "prompts": [[0, *range(20, 90), 5 + i] for i in range(6)]},
}


@pytest.mark.parametrize(
    ("mode", "name"),
    [*(("graph", name) for name in CASES), ("layer", "mixed"), ("layer", "prefix hits")],  # a compilation each
)
def test_tokens_are_those_of_the_plain_engine(mode: str, name: str, request: pytest.FixtureRequest) -> None:
    want = run(**CASES[name])
    request.getfixturevalue("accelerator")
    before = counters.get("replayed")
    got = run(**CASES[name], compile=mode)
    assert counters.get("replayed") > before + 5, "no step ran as a graph"
    assert got == want


def test_buckets_are_padded_by_nobody(accelerator: None) -> None:
    """Padded rows write to slot 0 and page 0 alone: what sequences own is the same with and without them."""
    memories = []
    for mode in ("eager", "graph"):
        with LLM(TINY, **SIZES, compile=mode) as llm:
            llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
            state = llm.engine.runner.state
            memories.append([t[1:].clone() for t in (*state.window, *state.latent.values(), *state.index_key.values())])
    assert all(torch.equal(a, b) for a, b in zip(*memories, strict=True))


def test_a_row_without_a_choice_ends_alone(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SamplingTable.sample

    def broken(self: SamplingTable, logits: torch.Tensor, slots: torch.Tensor, *rest: Any) -> torch.Tensor:
        ids = plain(self, logits, slots, *rest)
        return torch.where(slots == 2, -2, ids)

    monkeypatch.setattr(SamplingTable, "sample", broken)
    with LLM(TINY, **SIZES, compile="graph") as llm:
        outputs = llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
        llm.engine.check_idle()
    failed = [o for o in outputs if o.error is not None]
    assert len(failed) == 1 and "nan" in str(failed[0].error)
    assert all(len(o.outputs[0].token_ids) == 20 for o in outputs if o.error is None)
