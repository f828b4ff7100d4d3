"""Synthetic checkpoints: the named configs, the seeded weights and their ranges, the written folder."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as HfTokenizer

from deepinfer.errors import ConfigError
from deepinfer.model import synthetic
from deepinfer.model.checkpoint import allocate, fill, load_checkpoint, tensor_table
from deepinfer.model.config import ModelConfig
from deepinfer.model.synthetic import (
    CONFIGS,
    TINY_TOKENIZER,
    full,
    make_checkpoint,
    named_config,
    synthetic_weights,
    tiny,
)
from deepinfer.ops.formats import dequant_fp4, dequant_fp8_block
from deepinfer.text.tokenizer import Tokenizer, engram_token_map

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = Path(os.environ.get("DEEPINFER_GOLDENS") or ROOT.parent / "shared" / "goldens")

GAIN = (0.5, 2.0)  # output over input deviation of a linear on unit rows
GAIN_FEW = (0.2, 4.0)  # the same with fewer than 16 scales, where their luck shows
MAX_LOAD = 4.0  # rows of the busiest expert over the mean: nearly uniform routing


# ---- configs ----


def test_names():
    assert list(CONFIGS) == ["tiny", "tiny-realdims", "slice-12", "slice-12-e64", "unit-4", "full"]
    assert named_config("full") is full()
    with pytest.raises(ConfigError, match=r"no synthetic config is called 'big'; there are tiny, .*full"):
        named_config("big")


@pytest.mark.skipif(not GOLDENS.is_dir(), reason="the goldens are not there (DEEPINFER_GOLDENS)")
def test_tiny_is_the_goldens_config():
    assert tiny() == ModelConfig.from_dir(GOLDENS / "tiny")
    assert (TINY_TOKENIZER / "tokenizer.json").read_bytes() == (GOLDENS / "tiny/tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "gib"), [("slice-12", 105.5), ("slice-12-e64", 33.2), ("unit-4", 30.9), ("full", 475.2)]
)
def test_sizes(name, gib):
    table = tensor_table(named_config(name))
    assert round(sum(s.nbytes for s in table.values()) / 2**30, 1) == gib


@pytest.mark.parametrize(("name", "most"), [("tiny", 10e6), ("tiny-realdims", 20e6)])
def test_small_ones_are_small(name, most):
    assert sum(s.nbytes for s in tensor_table(named_config(name)).values()) < most


@pytest.mark.parametrize(
    "field",
    [
        "head_dim",
        "qk_rope_head_dim",
        "o_groups",
        "n_routed_experts",
        "num_experts_per_tok",
        "sliding_window",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "candidate_block_size",
        "engram_n_heads",
        "num_nextn_predict_layers",
        "dspark_block_size",
        "dspark_n_routed_experts",
        "dspark_num_experts_per_tok",
        "rope_scaling",
    ],
)
def test_realdims_keeps_the_real_numbers(field):
    assert getattr(named_config("tiny-realdims"), field) == getattr(full(), field)


def test_slice_12():
    config = named_config("slice-12")
    assert config.engram_num_embeddings == (24_003_916, 24_010_950)
    assert config.hidden_size == 5120 and config.n_routed_experts == 384

    def kinds(c):
        return {(s.ratio, s.owns_kv, s.owns_index, s.candidate, s.engram is not None) for s in c.layers}

    assert kinds(config) == kinds(full())


@pytest.mark.parametrize("name", ["tiny-realdims", "slice-12", "slice-12-e64", "unit-4"])
def test_builds_on_meta(name):
    config = named_config(name)
    weights = allocate(config, device="meta")
    assert sum(t.nbytes for t in weights.values()) == sum(s.nbytes for s in tensor_table(config).values())


# ---- weights ----


def test_subset_and_order_give_the_same_bits():
    everything = dict(synthetic_weights(tiny(), seed=3))
    assert list(everything) == list(tensor_table(tiny()))
    some = [
        "vision.norm.weight",
        "layers.4.engram.embed.weight",
        "layers.0.ffn.experts.7.w2.scale",
        "embed.weight",
    ]
    torch.manual_seed(0)  # the global generator plays no part
    for name, tensor in synthetic_weights(tiny(), seed=3, names=some):
        assert torch.equal(tensor.view(torch.uint8), everything[name].view(torch.uint8)), name


def test_seeds_and_names_differ():
    def draw(seed, name):
        return dict(synthetic_weights(tiny(), seed, names=[name]))[name].view(torch.uint8)

    one = "layers.0.ffn.experts.0.w1.weight"
    assert not torch.equal(draw(0, one), draw(1, one))
    assert not torch.equal(draw(0, one), draw(0, one.replace("w1", "w3")))
    assert not torch.equal(draw(0, one), draw(0, one.replace("experts.0", "experts.1")))


def test_pinned_bits():
    """Checkpoints made by an earlier version stay equal to those made now."""
    names = ["layers.0.ffn.experts.0.w1.weight", "layers.0.attn.wkv.weight", "layers.0.attn.wkv.scale"]
    codes, weight, scale = (t for _, t in synthetic_weights(tiny(), names=names))
    assert codes.flatten()[:8].tolist() == [53, 187, 199, 128, 224, 138, 179, 236]
    assert weight.flatten()[:8].tolist() == [40.0, 15.0, -96.0, -80.0, 72.0, 160.0, 160.0, -240.0]
    assert scale.flatten()[:8].tolist() == [116, 117, 117, 117, 116, 116, 116, 115]


@pytest.fixture(scope="module", params=["tiny", "tiny-realdims"])
def drawn(request):
    config = named_config(request.param)
    return config, dict(synthetic_weights(config))


def test_no_nan_and_nothing_trivial(drawn):
    _, tensors = drawn
    for name, t in tensors.items():
        if t.dtype == torch.uint8:
            assert t.numel() < 40 or len(t.unique()) > 1, name
        else:
            assert t.float().isfinite().all() and t.float().std() > 0, name
        if name.endswith("gate.bias"):
            assert t.abs().max() < 0.2 and not torch.equal(t, tensors[name + "_vl"])


def test_linears_keep_the_variance(drawn):
    config, tensors = drawn
    for name, spec in tensor_table(config).items():
        if not name.endswith(".weight") or len(spec.shape) != 2 or "embed" in name or ".experts.1" in name:
            continue
        weight, scale = tensors[name], tensors.get(name.removesuffix("weight") + "scale")
        if spec.dtype == "I8":
            weight = dequant_fp4(weight, scale)
        elif spec.dtype == "F8_E4M3":
            weight = dequant_fp8_block(weight, scale)
        x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(0))
        low, high = GAIN if scale is None or scale.numel() >= 16 else GAIN_FEW
        assert low < (x @ weight.float().T).std() < high, name


def test_engram_rows_are_unit(drawn):
    config, tensors = drawn
    prefix = f"layers.{config.engram_layer_ids[0]}.engram.embed"
    rows = tensors[f"{prefix}.weight"].float().unflatten(1, (-1, 32))
    rows = rows * torch.exp2(tensors[f"{prefix}.scale"].float() - 127).unsqueeze(-1)
    assert GAIN[0] < rows.std() < GAIN[1]


def test_routing_is_nearly_uniform(drawn):
    config, tensors = drawn
    x = torch.randn(4096, config.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = x @ tensors["layers.1.ffn.gate.weight"].float().T
    scores = torch.nn.functional.softplus(logits).sqrt() + tensors["layers.1.ffn.gate.bias"]
    chosen = scores.topk(config.num_experts_per_tok).indices
    load = torch.bincount(chosen.flatten(), minlength=config.n_routed_experts)
    assert load.max() / load.float().mean() < MAX_LOAD and load.min() > 0


def test_real_widths():
    """At the real widths expert scales are 2^-9..2^-7 and gains stay near one."""
    expert, dense = "layers.9.ffn.experts.200.w1", "layers.9.attn.wkv"
    names = [f"{n}.{leaf}" for n in (expert, dense) for leaf in ("weight", "scale")]
    tensors = dict(synthetic_weights(full(), names=names))
    assert tensors[f"{expert}.scale"].unique().tolist() == [127 - 9, 127 - 8, 127 - 7]
    x = torch.randn(16, 5120, generator=torch.Generator().manual_seed(0))
    for name, dequant in ((expert, dequant_fp4), (dense, dequant_fp8_block)):
        weight = dequant(tensors[f"{name}.weight"], tensors[f"{name}.scale"])
        assert GAIN[0] < (x @ weight.T).std() < GAIN[1]


def test_large_tensors_are_drawn_in_chunks(monkeypatch):
    monkeypatch.setattr(synthetic, "CHUNK", 1000)
    codes = synthetic._fp8_codes(2500, torch.Generator().manual_seed(0)).float()
    assert codes.shape == (2500,) and codes.isfinite().all()
    assert 0.8 < codes.std() / synthetic.FP8_RMS < 1.2
    assert not torch.equal(codes[:500], codes[1000:1500]) and not torch.equal(codes[:500], codes[2000:])


# ---- the folder ----


@pytest.mark.parametrize("name", ["tiny", "tiny-realdims"])
def test_make_checkpoint(name, tmp_path):
    config = make_checkpoint(name, tmp_path / "new", seed=5)
    assert config == named_config(name) == ModelConfig.from_dir(tmp_path / "new")
    weights = load_checkpoint(tmp_path / "new", config)
    expected = allocate(config)
    fill(expected, config, synthetic_weights(config, seed=5))
    assert all(torch.equal(weights[n].view(torch.uint8), expected[n].view(torch.uint8)) for n in expected)

    tokenizer = Tokenizer(tmp_path / "new")
    assert tokenizer.vocab_size == config.vocab_size
    token_map = engram_token_map(tokenizer, config.vocab_size)
    assert token_map.max() + 1 == config.engram_compressed_vocab_size


def test_tokenizer_takes_any_text():
    tokenizer = HfTokenizer.from_file(str(TINY_TOKENIZER / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    every_char = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x30000, 7)]))
    for text in (
        "Hello, world",
        "你好，世界",
        "def f(x):\n\treturn x\r\n",
        "🎉👩‍👩‍👧",
        "\x00\x7f\u0301",
        every_char,
    ):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    for name, token in (
        ("image_token_id", "<｜deepseek_image｜>"),
        ("dspark_noise_token_id", "<｜System｜>"),
    ):
        assert tokenizer.token_to_id(token) == getattr(tiny(), name)


def test_no_tokenizer_for_other_vocabularies(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(CONFIGS, "unit-4", lambda: replace(tiny(), vocab_size=1024))
    with caplog.at_level(logging.WARNING):
        make_checkpoint("unit-4", tmp_path / "without")
    assert "no tokenizer written" in caplog.text
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    make_checkpoint("unit-4", tmp_path / "with", tokenizer=TINY_TOKENIZER)
    assert (tmp_path / "with" / "tokenizer.json").exists()


def test_make_checkpoint_refuses(tmp_path):
    with pytest.raises(ConfigError, match="no synthetic config is called 'huge'"):
        make_checkpoint("huge", tmp_path / "a")
    with pytest.raises(ConfigError, match="full is 475 GiB"):
        make_checkpoint("full", tmp_path / "b")
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        make_checkpoint("tiny", tmp_path / "c", tokenizer=tmp_path)
    assert not list(tmp_path.iterdir())
