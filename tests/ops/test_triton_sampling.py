"""Sampling and acceptance kernels in Triton's interpreter."""

# ruff: noqa: E402
from __future__ import annotations

import copy
import os
import sys

WITHOUT = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

pytest.importorskip("triton")
if WITHOUT:
    pytest.skip("triton was imported without its interpreter", allow_module_level=True)

from deepinfer.ops import acceptance as definition
from deepinfer.ops import registry
from deepinfer.ops.acceptance import BLOCK, MATCH, TOKENWISE, accept_example
from deepinfer.ops.sampling import STREAM_DRAFT, sampling_example
from deepinfer.ops.triton import acceptance, filters, implementation, sampling

pytestmark = pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning")  # rows of NaN and infinities
NAMES = ["penalise", "record_prompt", "record_output", "survivors", "sample", "top_logprobs", "markov_step"]


def tensors(x):
    return [x] if isinstance(x, torch.Tensor) else [t for t in (x or ()) if isinstance(t, torch.Tensor)]


def same(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if tolerance and b.dtype.is_floating_point:
            assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()
        else:
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def compare(name, args):
    op = registry.OPS[name]
    mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
    got, want = tensors(implementation(name)(*mine)), tensors(op.reference(*theirs))
    same(got or tensors(mine), want or tensors(theirs), op.tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_op_inputs(name, monkeypatch):
    monkeypatch.setattr(filters, "CHUNK", 128)  # three chunks
    monkeypatch.setattr(sampling, "STEP", 64)
    examples = list(registry.OPS[name].inputs(torch.Generator().manual_seed(3)))
    for args in examples if name not in ("sample", "survivors") else examples[:-2]:
        compare(name, args)


def rows(seed, m=4, vocab=600):
    g = torch.Generator().manual_seed(seed)
    logits, *params = sampling_example(g, m, vocab)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (m,), generator=g)
    return logits, params, (seeds, torch.arange(m).int() + 7, torch.arange(m).int() % 2)


@pytest.mark.parametrize("lists", [8192, 16])
def test_filters(lists, monkeypatch):
    """Wide and narrow logits, ties, all equal; a list that overflows; top_p that keeps everything."""
    monkeypatch.setattr(filters, "CHUNK", 256)
    monkeypatch.setattr(filters, "STEP", 128)
    monkeypatch.setattr(filters, "TILE", 512)
    monkeypatch.setattr(filters, "LIST", lists)
    for seed, scale in enumerate((0.0, 0.02, 1.0, 9.0)):
        logits, params, _ = rows(seed, vocab=400)
        params[0] = params[0].clamp_min(0.2)
        params[1] = torch.tensor([0, 37, 0, 900], dtype=torch.int32)
        params[2] = torch.tensor([0.9, 1.0, 1 - 1e-12, 0.4], dtype=torch.float64)
        logits = logits * scale
        compare("survivors", ((logits * 8).round() / 8 if seed == 2 else logits, *params))


def test_every_draw_in_float64(monkeypatch):
    monkeypatch.setattr(filters, "CHUNK", 256)
    monkeypatch.setattr(sampling, "WINDOW", 1e9)
    monkeypatch.setattr(sampling, "EXACT_TILE", 128)
    logits, params, who = rows(5)
    for filtered in (True, False):
        compare("sample", (logits, *params, *who, None, 0, filtered, True))


def test_equal_noise_and_equal_logits_take_the_smaller_id():
    """Logits so far apart that nothing but the tie decides, and a tie across chunks."""
    logits, params, who = rows(6, m=2)
    logits = torch.full_like(logits, -50.0)
    logits[:, [40, 500]] = 30.0
    params[0] = torch.tensor([0.0, 0.0])
    ids, _ = sampling.sample(logits, *params, *who, None, 0, True, False)
    assert ids.tolist() == [40, 40]


def test_a_row_alone_has_the_same_bits():
    logits, params, who = rows(7)
    full = sampling.sample(logits, *params, *who, None, 0, True, True)
    for i in range(4):
        one = [x[i : i + 1] for x in (*params, *who)]
        same(sampling.sample(logits[i : i + 1], *one, None, 0, True, True), [x[i : i + 1] for x in full], 0)


def test_markov_step_draws_from_what_it_leaves():
    """Strided rows of a block; ids are the sampler's for the kernel's own logits; the other rows stay."""
    args = list(list(registry.OPS["markov_step"].inputs(torch.Generator().manual_seed(4)))[3])
    block = torch.stack((args[0], args[0]), 1)
    untouched = args[0].clone()
    args[0] = block[:, 1]
    ids, _ = acceptance.markov_step(*args)
    none = torch.zeros(7, dtype=torch.int32)
    plain = (args[6], none, none.double(), args[6], *args[7:10], None, STREAM_DRAFT, False, False)
    assert torch.equal(ids, registry.OPS["sample"].reference(block[:, 1].contiguous(), *plain)[0])
    assert torch.equal(block[:, 0], untouched) and not torch.equal(block[:, 1], untouched)


@pytest.mark.parametrize("rule", [MATCH, TOKENWISE, BLOCK])
@pytest.mark.parametrize("filtered", [True, False])
def test_accept(rule, filtered, monkeypatch):
    monkeypatch.setattr(filters, "CHUNK", 64)
    args = accept_example(torch.Generator().manual_seed(10 + rule), 4, 150, 3, rule)
    compare("accept", (*args[:-1], filtered))


@pytest.mark.parametrize("rule", [MATCH, TOKENWISE, BLOCK])
def test_accept_in_several_chunks_and_with_failing_rows(rule, monkeypatch):
    monkeypatch.setattr(filters, "CHUNK", 64)
    monkeypatch.setattr(definition, "CHUNK", 64)
    args = list(accept_example(torch.Generator().manual_seed(20 + rule), 5, 150, 3, rule))
    args[1][args[0][1] : args[0][2]] = float("nan")
    args[1][args[0][3] : args[0][4]] = float("-inf")
    compare("accept", (*args[:-1], False))


def test_accept_where_the_residual_is_empty():
    """p equal to q: everything stands; and a target that is narrower than the draft."""
    args = list(accept_example(torch.Generator().manual_seed(2), 3, 80, 2, BLOCK, 0.0))
    args[-1] = False
    for rule in (TOKENWISE, BLOCK):
        args[-2] = rule
        compare("accept", tuple(args))
        assert torch.equal(acceptance.accept(*args)[0], args[0].diff() - 1)


def test_markov_step_refuses_other_dtypes():
    args = list(registry.OPS["markov_step"].inputs(torch.Generator()))[1]
    with pytest.raises(ValueError, match="bfloat16"):
        acceptance.markov_step(args[0], args[1].float(), *args[2:])
