"""The training twin against the engine: same weights, same numbers, in both numerics; hand-written gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.model.checkpoint import load_checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.state import ModelState, StepInputs
from deepinfer.model.transformer import Transformer
from deepinfer.ops import formats
from recipes.small import confide, fakequant, files, sinkhorn
from recipes.small.config import small
from recipes.small.draft import DraftTwin, heads
from recipes.small.host import Host
from recipes.small.optim import orthogonalise
from recipes.small.own import continued
from recipes.small.quantise import file_tensors, to_float
from recipes.small.twin import BF16, EXACT, QUANTISED, Twin, initialise

TOLERANCE = {
    "exact": 1e-4,  # relative to the largest logit: float32 sums in another order
    "quantised": 0.08,  # median row; two right implementations differ by 0.05 on this checkpoint (spec/model.md 20)
    "sinkhorn": 1e-5,
}
TINY = Path(__file__).parents[1] / "data/tiny"
RECIPE = Path(files.__file__).parent
CONFIG = ModelConfig.from_dir(TINY)
TENSORS = load_checkpoint(TINY, CONFIG)
GOLDEN = load_file(TINY / "golden.safetensors")
IDS = GOLDEN["p1.ids"].long()[:90]


def twin() -> Twin:
    return Twin(CONFIG, *to_float(TENSORS, CONFIG), GOLDEN["token_map"])


class Engine:
    """One prompt through the engine's model: logits and taps of every row, and its memory."""

    def __init__(self, numerics: str, ids: Tensor) -> None:
        self.model = Transformer(CONFIG, TENSORS, GOLDEN["token_map"], numerics=numerics)
        self.state = ModelState.allocate(CONFIG, num_slots=2, num_pages=3, max_pages=2, numerics=numerics)
        self.state.page_table[1] = torch.tensor([1, 2])
        t = torch.arange(len(ids), dtype=torch.int32)
        zero = torch.zeros_like(t)
        step = StepInputs(ids.int(), t, zero + 1, zero, zero.bool(), zero, t.long())
        out = self.model.forward(step, self.state)
        assert out.taps is not None
        self.logits, self.taps = out.logits, out.taps


def relative(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)


def test_exact_numerics_equal_the_engine() -> None:
    """Window edges, pairs, selection and candidates: 90 tokens, window 16, top-16, six candidate blocks."""
    with torch.no_grad():
        model = twin()
        out = model.forward(IDS.repeat(2, 1), EXACT, want_taps=True)
        engine = Engine("exact", IDS)
    got = model.logits(out).detach().unflatten(0, (2, -1))
    assert relative(got[0], engine.logits).max() < TOLERANCE["exact"]
    assert torch.allclose(got[0], got[1], atol=1e-4)
    assert relative(torch.cat(out.taps, 1)[: len(IDS)], engine.taps).max() < TOLERANCE["exact"]


def test_quantised_numerics_are_near_the_engine() -> None:
    with torch.no_grad():
        model = twin()
        got = model.logits(model.forward(IDS[None], QUANTISED))
        logits = Engine("quantised", IDS).logits
    assert relative(got, logits).median() < TOLERANCE["quantised"]


def test_draft_equals_the_engine() -> None:
    """Context from the taps, the block, Markov and confidence heads; anchors before and past the window."""
    c, g = CONFIG, CONFIG.dspark_block_size
    with torch.no_grad():
        engine, model = Engine("exact", IDS), twin()
        draft = DraftTwin(model, *to_float(TENSORS, CONFIG))
        out = model.forward(IDS[None], EXACT, want_taps=True)
        keys = draft.context(torch.cat(out.taps, 1), *model.rope_tables(1, len(IDS))[0], EXACT)
        assert engine.model.draft is not None
        for start in (3, 50, 89):
            t = torch.arange(start, dtype=torch.int32)
            one = torch.ones_like(t)
            engine.model.draft.write_context(engine.taps[:start], one, t, one * (start - 1), engine.state)
            at = torch.tensor([start], dtype=torch.int32)
            anchor = IDS[start : start + 1]
            expected = engine.model.draft.propose(anchor, at, one[:1], at * 0, engine.state)
            near = start - torch.arange(c.sliding_window, 0, -1)[None]
            x, base, _ = draft.forward(anchor, at.long(), [k[near.clamp_min(0)] for k in keys], near >= 0, EXACT)
            previous = torch.cat((anchor, expected.tokens[0, : g - 1]))[None]
            logits, confidence = heads(draft.head_weights, x, base, previous)
            assert relative(logits, expected.logits).max() < TOLERANCE["exact"]
            assert torch.allclose(confidence, expected.confidence, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_fake_quantisation_is_the_formats(scale: float) -> None:
    """Values equal deepinfer/ops/formats.py bit for bit, ties and zeros included; gradients pass."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn((64, 128), generator=g) * scale
    x[0], x[1, :32] = torch.arange(128) * 0.25 * scale, 0.0
    x = x.bfloat16().float()
    pairs = [
        (fakequant.fp8, formats.dequant_fp8(*formats.quant_fp8(x))),
        (fakequant.fp8_block, formats.dequant_fp8_block(*formats.quant_fp8_block(x))),
        (fakequant.fp4, formats.dequant_fp4(*formats.quant_fp4(x))),
        (fakequant.latent_fp4, formats.dequant_latent(*formats.quant_latent(x))),
    ]
    for fake, expected in pairs:
        leaf = x.clone().requires_grad_()
        rounded = fake(leaf)
        assert torch.equal(rounded, expected)
        assert torch.equal(fake(x.bfloat16()).float(), expected)  # exact in bf16
        rounded.sum().backward()
        assert leaf.grad is not None and bool((leaf.grad == 1).all())


def test_sinkhorn_gradient() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.rand((7, 4, 4), generator=g) + 0.01
    weight = torch.randn((7, 4, 4), generator=g)
    leaf = x.clone().requires_grad_()
    (sinkhorn.sinkhorn(leaf, 20, 1e-6) * weight).sum().backward()
    plain = x.double().requires_grad_()
    comb = plain / (plain.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(2, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
    (comb * weight).sum().backward()
    assert leaf.grad is not None and plain.grad is not None
    assert torch.allclose(leaf.grad, plain.grad.float(), atol=TOLERANCE["sinkhorn"])


def test_every_parameter_learns() -> None:
    """One step's gradient reaches every tensor of the target; indexers through their own loss alone."""
    params, biases = initialise(CONFIG, 0)
    params = {n: p.requires_grad_() for n, p in params.items() if not n.startswith("mtp.")}
    model = Twin(CONFIG, params, biases, GOLDEN["token_map"])
    for mode in (BF16, QUANTISED):
        out = model.forward(IDS[None], mode, probe=torch.arange(1, 90, 4))
        model.logits(out).logsumexp(1).mean().backward(retain_graph=True)
        silent = {n for n, p in params.items() if p.grad is None}
        assert silent and all(".indexer." in n for n in silent)
        out.index_loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in params.values())
        for p in params.values():
            p.grad = None


def test_orthogonalise() -> None:
    for shape in ((2, 32, 64), (2, 64, 32)):
        s = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0))).float())
        assert s.min() > 0.5 and s.max() < 1.4


def test_checkpoint_round_trip() -> None:
    """Parameters rounded to a checkpoint and read back are what fake quantisation computes with."""
    params, biases = to_float(TENSORS, CONFIG)
    written = dict(file_tensors(params, biases, CONFIG))
    for name in (
        "layers.0.ffn.experts.3.w2.weight",
        "layers.2.attn.wq_a.scale",
        "layers.1.engram.embed.weight",
        "embed.weight",
    ):
        assert name in written
    e = 3
    w2 = written[f"layers.0.ffn.experts.{e}.w2.weight"].view(torch.uint8)
    s2 = written[f"layers.0.ffn.experts.{e}.w2.scale"].view(torch.uint8)
    assert torch.equal(formats.dequant_fp4(w2, s2), params["layers.0.ffn.experts.w2.weight"][e])
    assert torch.equal(
        fakequant.fp4(params["layers.0.ffn.experts.w2.weight"]), params["layers.0.ffn.experts.w2.weight"]
    )


def test_training_files_are_few_and_small(tmp_path: Path) -> None:
    """The rented machine returns eight files of 16 MiB: the target in two, the draft in one, their state inside."""
    params, biases = initialise(small(RECIPE), 0)
    params = {n: p + 0.1 for n, p in params.items()}
    for name, draft, count in (("target", False, 2), ("draft", True, 1)):
        kept = {n: p for n, p in (params | biases).items() if n.startswith("mtp.") == draft}
        files.save(tmp_path, name, kept, {"step": 3, "steps": 4})
        written = sorted(tmp_path.glob(f"{name}*"))
        assert [p.name for p in written] == [f"{name}-{i}.safetensors" for i in range(count)]
        assert all(p.stat().st_size < 16 * 2**20 for p in written)
        loaded, state = files.load(tmp_path, name)
        assert state == {"step": 3, "steps": 4, "files": count}
        assert loaded.keys() == kept.keys() and all(torch.equal(loaded[n], kept[n]) for n in kept)


def test_own_texts_are_the_targets() -> None:
    """Every prompt is continued as it is alone, at most so far."""
    host = Host(TINY)
    prompts = [IDS[:24].tolist(), IDS[3:10].tolist(), IDS[40:88].tolist()]
    with torch.no_grad():
        texts = continued(host, prompts, 12, 0.0, torch.Generator())
        for prompt, text in zip(prompts, texts, strict=True):
            assert text[: len(prompt)] == prompt
            assert [t for t in text[len(prompt) :] if t != CONFIG.eos_token_id] == host.greedy(prompt, 12)


def test_the_confidence_head_learns_what_was_accepted() -> None:
    """From the trained head on; inputs are those the engine's head saw."""
    inputs, accepted = confide.gather(Host(TINY), seed=3, temperature=1.0, prompts=4)
    assert (
        inputs.shape[0] == accepted.shape[0] > 4 and inputs.shape[1] == CONFIG.hidden_size + CONFIG.dspark_markov_rank
    )
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn((2000, 8), generator=g) * torch.linspace(0.1, 10, 8)
    truth = torch.linspace(-1, 1, 8) / torch.linspace(0.1, 10, 8)
    found = confide.fit(torch.zeros(8), inputs, (torch.rand(2000, generator=g) < torch.sigmoid(inputs @ truth)).float())
    assert float(torch.cosine_similarity(found * inputs.std(0), truth * inputs.std(0), dim=0)) > 0.95
