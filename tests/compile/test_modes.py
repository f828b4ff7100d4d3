"""Compiled models against the eager one, on the CPU: the same bits in every mode and for every number of rows.

Native fused ops have the bits of the native chains that they replace (tests/ops/test_native.py), so nothing differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.compile import counters, passes
from deepinfer.compile.capture import Options
from deepinfer.compile.modes import Compiled, warm_up
from deepinfer.errors import ConfigError, EngineError
from deepinfer.model.checkpoint import load_checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.state import ModelState, StepInputs
from deepinfer.model.transformer import Transformer
from deepinfer.ops import registry
from deepinfer.text.tokenizer import Tokenizer, engram_token_map

TINY = Path(__file__).parents[1] / "data/tiny"
CONFIG = ModelConfig.from_dir(TINY)
WARM = (7, 3)
# chains that the passes replace in tiny: 9 layers have 17 boundaries without an Engram gate between, and so on
MATCHES = {
    "layer": {"boundary": 14, "norm_quant": 9, "swiglu_quant": 8, "window_key": 8},
    "model": {"boundary": 16, "norm_quant": 10, "swiglu_quant": 9, "window_key": 9},
}


@pytest.fixture(scope="module")
def model() -> Transformer:
    token_map = torch.from_numpy(
        engram_token_map(Tokenizer(TINY), CONFIG.vocab_size, num_classes=CONFIG.engram_compressed_vocab_size)
    )
    return Transformer(CONFIG, load_checkpoint(TINY, CONFIG), token_map)


def memory() -> ModelState:
    state = ModelState.allocate(CONFIG, num_slots=4, num_pages=13, max_pages=4, page_size=16)
    state.page_table[1:] = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
    return state


def step(runs: list[tuple[int, int, int]], keep: int | None = None, **more: Any) -> StepInputs:
    """runs: (slot, first position, rows)."""
    positions = torch.cat([torch.arange(p, p + n, dtype=torch.int32) for _, p, n in runs])
    slots = torch.cat([torch.full((n,), s, dtype=torch.int32) for s, _, n in runs])
    starts, at = [], 0
    for _, _, n in runs:
        starts.append(torch.full((n,), at, dtype=torch.int32))
        at += n
    ids = (positions * 7 + slots * 31) % CONFIG.vocab_size
    kept = None if keep is None else torch.arange(at - keep, at)
    floor = torch.zeros(at, dtype=torch.int32)
    if keep is not None:
        floor += int(positions[at - keep])
    return StepInputs(
        ids=ids.int(),
        positions=positions,
        slots=slots,
        run_start=torch.cat(starts),
        is_image=torch.zeros(at, dtype=torch.bool),
        window_floor=floor,
        logit_rows=torch.arange(at - (keep or at), at),
        kept=kept,
        want_taps=False,
        **more,
    )


def script() -> Iterator[StepInputs]:
    """Prefill in chunks, decode of one and of several, replay, a prefix hit's fields."""
    yield step([(1, 0, 5)])
    yield step([(1, 5, 1)])
    yield step([(1, 6, 1), (2, 0, 20)])
    yield step([(1, 7, 1), (2, 20, 1)])
    yield step([(3, 0, 30)], keep=9)
    yield step([(1, 8, 1), (2, 21, 1), (3, 30, 1)])
    rows = step([(1, 9, 1), (2, 22, 1), (3, 31, 1)])
    rows.logit_rows = None
    yield rows
    zeros = torch.zeros(2, dtype=torch.int32)
    # one tensor in the steps before, two here: an input that Dynamo saw once for both must not serve both
    yield step([(1, 10, 1), (2, 23, 1)], ring_floor=zeros + 3, kv_slots=torch.tensor([0, 2], dtype=torch.int32))
    yield step([(1, 11, 1), (2, 24, 1)])


def run(model: Transformer) -> tuple[list[torch.Tensor], ModelState]:
    state = memory()
    return [model.forward(s, state).logits.clone() for s in script()], state


def tensors(state: ModelState) -> list[torch.Tensor]:
    """What sequences own: everything but slot 0 and page 0."""
    return [
        *(t[1:] for t in (*state.window, *state.open_pair.values(), state.history)),
        *(t[1:] for t in (*state.latent.values(), *state.index_key.values())),
    ]


@pytest.mark.parametrize("mode", ["layer", "model"])
def test_same_bits_and_nothing_compiles_after_warm_up(model: Transformer, mode: Any) -> None:
    want, want_state = run(model)
    compiled = Compiled(model, mode)
    try:
        with torch.inference_mode():
            scratch = memory()
            warm_up(model, lambda s: model.forward(s, scratch), *WARM)
        with counters.expect(compiled=0):
            got, state = run(model)
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            assert torch.equal(a, b), f"step {i}: {(a - b).abs().max()}"
        assert all(torch.equal(a, b) for a, b in zip(tensors(want_state), tensors(state), strict=True))
        matches = {name: n for name, n in compiled.matches.items()}
        assert all(matches[name] >= n for name, n in MATCHES[mode].items()), matches
    finally:
        compiled.close()
    assert all(torch.equal(a, b) for a, b in zip(want, run(model)[0], strict=True)), "close puts the eager model back"


@pytest.mark.parametrize("off", [p.name for p in passes.PASSES])
def test_each_pass_keeps_the_bits(model: Transformer, off: str) -> None:
    """One pass alone: the layers that it changes give what the eager ones give (references where no kernel is)."""
    only = tuple(p for p in passes.PASSES if p.name == off)
    references = registry.OPS[only[0].op].chosen["cpu"] == "reference"
    state = memory()
    want = model.forward(step([(1, 0, 7)]), state).logits
    compiled = Compiled(model, "model", Options(inductor=False, passes=only))
    try:
        got = model.forward(step([(1, 0, 7)]), memory()).logits
        # a reference norm sums in another order than the native one
        assert torch.equal(want, got) or (references and (want - got).norm() <= 0.05 * want.norm())
        assert {name for name, n in compiled.matches.items() if n} == {off}
    finally:
        compiled.close()


def test_passes_are_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_PASSES", "none")
        assert passes.enabled() == ()
        patch.setenv("DEEPINFER_PASSES", "-boundry")
        with pytest.raises(ConfigError, match=r"boundry.*boundary, norm_quant"):
            passes.enabled()


def test_a_changed_tree_is_not_silently_wrong(model: Transformer) -> None:
    """What depends on something that a key does not hold would be traced twice: that raises."""
    options = Options(inductor=False, passes=())
    from deepinfer.compile.capture import Captured

    calls = Captured("twice", lambda x: x * 2, options)
    x = torch.arange(6.0)
    assert torch.equal(calls((x,), [x], 1), x * 2)
    y = torch.arange(1.0)
    assert torch.equal(calls((y,), [y], 1), y * 2), "rows are dynamic down to one"
    assert calls.lowered is not None
    with pytest.raises(EngineError, match="traced twice"):
        calls._lower(torch.fx.symbolic_trace(lambda x: x + 1), [])


def test_inductor_has_the_same_bits(model: Transformer) -> None:
    """Glue between the ops through generated code: roundings of a chain are emulated."""
    want = model.forward(step([(1, 0, 7)]), memory()).logits
    compiled = Compiled(model, "layer", Options(inductor=True, passes=()))
    try:
        got = model.forward(step([(1, 0, 7)]), memory()).logits
        assert torch.equal(want, got)
    finally:
        compiled.close()


def test_llm_through_layers() -> None:
    params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in (0.0, 0.8, 1.0)]
    prompts = [[0, *range(20, 24 + 9 * i)] for i in range(3)]
    out = []
    for mode in ("eager", "layer"):
        sizes = {"max_model_len": 256, "max_num_batched_tokens": 16, "max_num_seqs": 8, "page_size": 16}
        with LLM(str(TINY), compile=mode, **sizes) as llm:
            with counters.expect(compiled=0):
                out.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
            llm.engine.check_idle()
    assert out[0] == out[1]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="compile is 'fast'; it must be one of eager, layer, model, graph"):
        LLM(str(TINY), compile="fast")
    with pytest.raises(ConfigError, match="numerics 'exact'"):
        LLM(str(TINY), compile="layer", numerics="exact")
