"""The oracle itself against the goldens, so that `test_oracle.py` compares the engine with what is right.

Belongs here: whole-model arrays in both roundings, and recorded sublayers. Does not belong here: the engine.
The golden `_quant` arrays and the oracle differ by isolated one-ulp BF16 flips, which FP8 and FP4 codes
amplify in later layers: there medians over rows are compared, and sublayers from recorded inputs.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from oracle import Memory, Oracle, Trace
from oracle_numbers import Array, fake_fp4_index, fake_fp4_latent, fake_fp8, read_checkpoint, read_safetensors

TOLERANCE = {
    "official_fp32": 2e-6,  # relative, worst row: FP32 arithmetic of the published reference
    "exact": 2e-6,  # relative, worst row; the goldens' RoPE angles are float64 products
    "f16": 5e-4,  # arrays stored as F16
    "quant median": {"tiny": 5e-2, "lite": 1e-2},  # rows after a flip; the noise floors are 6e-2 and 1.2e-2
    "quant overlap": 0.96,
    "vision quant": 0.0,
    "attention": {
        "tiny": 8e-2,
        "lite": 3e-2,
    },  # relative Frobenius, worst layer (the published kernels round more)
    "moe": 1e-6,
    "mix": 5e-7,
}
FOLDERS = {"tiny", "lite"}


def folder_of_goldens() -> Path:
    root = Path(__file__).parents[2]
    folder = Path(os.environ.get("DEEPINFER_GOLDENS") or root.parent / "shared" / "goldens")
    if not (folder / "units.safetensors").exists():
        pytest.skip(f"goldens not found in {folder}: set DEEPINFER_GOLDENS")
    return folder


@cache
def golden(name: str) -> dict[str, Array]:
    return read_safetensors(folder_of_goldens() / name / "golden.safetensors")


@cache
def oracle(name: str, quant: bool) -> Oracle:
    return Oracle(*read_checkpoint(folder_of_goldens() / name), golden(name)["token_map"], quant=quant)


@cache
def trace(name: str, quant: bool) -> Trace:
    """Prompt 1 and its 32 decode tokens in one run: causal, so its rows are the prefill."""
    g = golden(name)
    return oracle(name, quant).prefill(np.concatenate([g["p1.ids"], g["p1.decode.tokens"]]))


@cache
def replayed(quant: bool) -> tuple[Trace, int]:
    g = golden("tiny")
    length = len(g["p1.ids"])
    ids = np.concatenate([g["p1.ids"], g["p1.decode.tokens"][:8]])
    return oracle("tiny", quant).prefill(ids, floor=length - oracle("tiny", quant).c["sliding_window"]), length


def row_error(got: Array, want: Array) -> Array:
    """Relative error of each row."""
    got, want = got.reshape(len(got), -1), want.reshape(len(want), -1).astype(np.float64)
    return np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)


def relative(got: Array, want: Array) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_prefill_and_decode_exact(name: str) -> None:
    g, t, length = golden(name), trace(name, False), len(golden(name)["p1.ids"])
    rows = g["p1.rows"]
    assert row_error(t.logits[rows], g["p1.logits_official_fp32"]).max() < TOLERANCE["official_fp32"]
    assert row_error(t.logits[length:], g["p1.decode.logits_exact"]).max() < TOLERANCE["exact"]
    short = oracle(name, False).prefill(g["p2.ids"])
    assert row_error(short.logits, g["p2.logits_official_fp32"]).max() < TOLERANCE["official_fp32"]


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_inside_of_the_exact_prefill(name: str) -> None:
    g, t = golden(name), trace(name, False)
    rows, length = g["p1.rows"], len(golden(name)["p1.ids"])
    assert (t.engram_rows[:length] == g["p1.engram_official"]).all()
    checked = set()
    for key, want in g.items():
        prompt, _, rest = key.partition(".")
        kind, _, layer = rest.removesuffix("_exact").partition(".")
        if prompt != "p1" or not key.endswith("_exact"):
            continue
        if kind == "res":
            assert row_error(t.streams[int(layer)][g["p1.cap_rows"]], want).max() < TOLERANCE["f16"], key
        elif kind == "cand":
            got = t.memory.candidates[rows]
            assert (got[:, : want.shape[1]] == want).all() and not got[:, want.shape[1] :].any(), key
        elif kind == "route":
            assert (t.routed[int(layer)][rows] == want).all(), key
        elif kind == "rw":
            assert np.abs(t.route_weights[int(layer)][rows] - want).max() < 1e-6, key
        checked.add(kind)
    assert checked >= {"res", "cand", "route", "rw"}


def test_image_prompt_exact() -> None:
    g, o = golden("tiny"), oracle("tiny", False)
    features, span = o.encode_image(g["p3.patches"], *g["p3.grid"][:2])
    assert row_error(features, g["p3.vit_exact"]).max() < TOLERANCE["exact"]
    assert row_error(span, g["p3.span_exact"]).max() < TOLERANCE["exact"]
    ids = np.concatenate([g["p3.ids"], g["p3.decode.tokens"]])
    t, length = o.prefill(ids, image_embeds=span), len(g["p3.ids"])
    assert row_error(t.logits[:length], g["p3.logits_official_fp32"]).max() < TOLERANCE["official_fp32"]
    assert row_error(t.logits[length:], g["p3.decode.logits_exact"]).max() < TOLERANCE["exact"]
    assert (t.engram_rows[:length] == g["p3.engram_official"]).all()
    for layer, routed in enumerate(t.routed):
        assert (routed[:length] == g[f"p3.route.{layer}_exact"]).all()


def test_draft_exact() -> None:
    g, o, t = golden("tiny"), oracle("tiny", False), trace("tiny", False)
    for step, (anchor, *tokens) in enumerate(g["p1.draft.tokens_exact"].tolist()):
        d = o.draft(t, len(g["p1.ids"]) + step, anchor)
        assert d.tokens.tolist() == tokens
        assert row_error(d.logits, g["p1.draft.logits_exact"][step]).max() < TOLERANCE["f16"]
        assert np.abs(d.confidence - g["p1.draft.conf_exact"][step]).max() < 1e-5


def test_decoder_replay_exact() -> None:
    g, (t, length) = golden("tiny"), replayed(False)
    prompt = t.positions < length
    assert (t.positions[prompt] == g["p1.replay.rows"]).all()
    assert row_error(t.logits[prompt], g["p1.replay.logits_exact"]).max() < TOLERANCE["f16"]
    assert row_error(t.logits[~prompt], g["p1.replay.decode_logits_exact"]).max() < TOLERANCE["f16"]
    anchor, *tokens = g["p1.replay.draft_tokens_exact"].tolist()
    d = oracle("tiny", False).draft(t, length + 7, anchor)
    assert d.tokens.tolist() == tokens
    assert row_error(d.logits, g["p1.replay.draft_logits_exact"]).max() < TOLERANCE["f16"]


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_whole_model_quantised(name: str) -> None:
    g, t, length = golden(name), trace(name, True), len(golden(name)["p1.ids"])
    rows, limit = g["p1.rows"], TOLERANCE["quant median"][name]
    assert np.median(row_error(t.logits[rows], g["p1.logits_quant"])) < limit
    assert np.median(row_error(t.logits[length:], g["p1.decode.logits_quant"])) < limit
    short = oracle(name, True).prefill(g["p2.ids"])  # too short for a flip: equal up to F16 storage
    assert row_error(short.logits, g["p2.logits_quant"]).max() < TOLERANCE["f16"]
    for layer in oracle(name, True).c["index_source_layer_ids"]:
        got, want = t.memory.selected[layer][rows], g[f"p1.sel.{layer}_quant"]
        overlap = [mask[w[w >= 0]].mean() for mask, w in zip(got, want, strict=True) if (w >= 0).any()]
        assert np.mean(overlap) > TOLERANCE["quant overlap"], layer


def test_image_and_replay_quantised() -> None:
    g, o = golden("tiny"), oracle("tiny", True)
    features, span = o.encode_image(g["p3.patches"], *g["p3.grid"][:2])
    assert row_error(features, g["p3.vit_quant"]).max() <= TOLERANCE["vision quant"]
    assert row_error(span, g["p3.span_quant"]).max() <= TOLERANCE["vision quant"]
    t = o.prefill(g["p3.ids"], image_embeds=span)
    assert np.median(row_error(t.logits, g["p3.logits_quant"])) < TOLERANCE["f16"]
    t, length = replayed(True)
    prompt, limit = t.positions < length, TOLERANCE["quant median"]["tiny"]
    assert np.median(row_error(t.logits[prompt], g["p1.replay.logits_quant"])) < limit
    assert np.median(row_error(t.logits[~prompt], g["p1.replay.decode_logits_quant"])) < limit


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_recorded_sublayers(name: str) -> None:
    """Each sublayer alone, fed with what the published reference recorded (quantised)."""
    g, o = golden(name), oracle(name, True)
    everything = "p1.t.ffn_in.0_official" in g  # lite holds the MoE rows at p1.rows only
    kind, rows = ("t", slice(None)) if everything else ("tr", g["p1.rows"])
    positions = np.arange(len(g["p1.ids"]))
    memory, text = Memory(len(positions)), np.zeros(len(positions), bool)[rows]
    for layer in range(o.c["num_hidden_layers"]):
        y = o.attention(layer, g[f"p1.t.attn_in.{layer}_official"], positions, memory)
        assert relative(y[rows], g[f"p1.{kind}.attn_out.{layer}_official"]) < TOLERANCE["attention"][name], layer
        x = g[f"p1.{kind}.ffn_in.{layer}_official"]
        y, _ = o.moe(f"layers.{layer}.ffn", x, text, o.c["num_experts_per_tok"])
        assert relative(y, g[f"p1.{kind}.ffn_out.{layer}_official"]) < TOLERANCE["moe"], layer


def test_recorded_mix() -> None:
    g, o = golden("tiny"), oracle("tiny", True)
    pre, _, _ = o.mix("layers.1.hc_ffn", g["p1.t.mid.1_official"])
    assert relative(pre, g["p1.t.pm.2_official"]) < TOLERANCE["mix"]
    pre, _, _ = o.mix("layers.5.hc_attn", g["p1.t.X.5_official"])
    x = o.norm(o.collapse(g["p1.t.X.5_official"], g["p1.t.pm.5_official"]), "layers.5.attn_norm")
    assert relative(x, g["p1.t.attn_in.5_official"]) < 1e-4  # one-ulp flips
    x = o.norm(o.collapse(g["p1.t.X_final_official"], g["p1.t.pm_final_official"]), "norm")
    assert row_error(x @ o.w("head").T, g["p1.logits_official"]).max() < 2 * TOLERANCE["f16"]


@pytest.mark.parametrize(
    ("name", "quantise"), [("act", fake_fp8), ("fp4_16", fake_fp4_latent), ("fp4_32", fake_fp4_index)]
)
def test_quantisers(name: str, quantise: object) -> None:
    units = read_safetensors(folder_of_goldens() / "units.safetensors")
    assert (quantise(units["act.x"]) == units[f"{name}.roundtrip_official"]).all()
