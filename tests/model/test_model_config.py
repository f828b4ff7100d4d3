"""ModelConfig: the released form read and written, the layer map, load-time checks, the Engram constants."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from deepinfer.errors import ConfigError
from deepinfer.model.config import (
    LayerSpec,
    ModelConfig,
    consecutive_primes,
    engram_multipliers,
    engram_offsets,
    engram_primes,
)
from deepinfer.model.synthetic import CONFIGS, full, tiny

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = Path(os.environ.get("DEEPINFER_GOLDENS") or ROOT.parent / "shared" / "goldens")
needs_goldens = pytest.mark.skipif(not GOLDENS.is_dir(), reason="the goldens are not there (DEEPINFER_GOLDENS)")


# ---- reading and writing ----


@needs_goldens
@pytest.mark.parametrize("name", ["tiny", "lite"])
def test_goldens_round_trip(name):
    config = ModelConfig.from_dir(GOLDENS / name)
    assert config.to_dict() == json.loads((GOLDENS / name / "config.json").read_text())


@pytest.mark.parametrize("name", CONFIGS)
def test_to_dict_round_trip(name):
    config = CONFIGS[name]()
    through_json = json.loads(json.dumps(config.to_dict()))
    again = ModelConfig.from_dict(through_json)
    assert again == config and hash(again) == hash(config)
    assert again.to_dict() == through_json


def test_release_form_is_nested():
    hf = full().to_dict()
    assert hf["architectures"] == ["DeepseekV41ForCausalLM"]
    assert hf["image_token_id"] == 129264 and "image_token_id" not in hf["text_config"]
    assert hf["quantization_config"]["weight_block_size"] == [32, 32]
    assert hf["text_config"]["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    }
    assert hf["vision_config"]["max_wh_ratio"] is None
    hf["text_config"]["vocab_size"] = 1  # the dict is the caller's own
    assert full().to_dict()["text_config"]["vocab_size"] == 129280


def test_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        tiny().vocab_size = 1


# ---- the layer map ----


def test_release_layer_map():
    layers = full().layers
    assert [s.index for s in layers] == list(range(40))
    assert layers[0] == LayerSpec(
        index=0,
        name="layers.0",
        ratio=0,
        kv_source=None,
        index_source=None,
        owns_kv=False,
        owns_index=False,
        candidate=None,
        engram=None,
        yarn=False,
        tap=False,
        n_experts=384,
        top_k=6,
        draft=False,
    )
    owners = (2, 8, 14, 20)
    indexers = (*owners, 24, 28, 32, 36)
    for s in layers[2:]:
        assert s.ratio == (2 if s.index < 20 else 1) and s.yarn
        assert s.kv_source == max(i for i in owners if i <= s.index)
        assert s.index_source == max(i for i in indexers if i <= s.index)
        assert s.owns_kv == (s.index in owners) and s.owns_index == (s.index in indexers)
        reader = "reader" if s.index in (24, 28, 32, 36) else None
        assert s.candidate == ("source" if s.index == 20 else reader)
    assert [(s.index, s.engram) for s in layers if s.engram is not None] == [(1, 0), (14, 1)]
    assert [s.index for s in layers if s.tap] == [37, 38, 39]
    assert full().decoder_start == 20


def test_release_draft_stages():
    stages = full().draft_layers
    assert [(s.name, s.index, s.n_experts, s.top_k) for s in stages] == [(f"mtp.{i}", 40 + i, 128, 3) for i in range(3)]
    assert all(s.draft and s.ratio == 0 and not s.yarn and not s.tap and s.kv_source is None for s in stages)


def test_map_without_drafts_and_with_engram_first():
    config = replace(
        CONFIGS["tiny-realdims"](),
        num_nextn_predict_layers=0,
        compress_ratios=(2, 1, 1),
        dspark_target_layer_ids=(1, 2),
        vision=None,
    )
    assert config.draft_layers == () and not any(s.tap for s in config.layers)  # nobody would read the taps
    assert config.layers[0].engram == 0 and config.layers[0].owns_kv
    assert [s.candidate for s in config.layers] == [None, "source", "reader"]


# ---- Engram constants ----


def test_release_engram_constants():
    multipliers = [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert engram_multipliers(full()).tolist() == multipliers
    primes = engram_primes(full())
    assert primes.shape == (2, 3, 8) and primes.dtype == np.int64
    ends = [primes[i].flat[j] for i in (0, 1) for j in (0, -1)]
    assert ends == [16000057, 16000463, 16000477, 16000889]
    assert primes.sum((1, 2)).tolist() == [384006168, 384016682]
    offsets = engram_offsets(full())
    assert offsets.shape == (2, 24) and offsets[:, 0].tolist() == [0, 0]
    assert (offsets[:, -1] + primes[:, -1, -1]).tolist() == [384006168, 384016682]
    assert (np.diff(offsets) == primes.reshape(2, 24)[:, :-1]).all()


@pytest.mark.parametrize("name", ["slice-12", "tiny"])
def test_products_of_the_hash_fit_63_bits(name):
    config = CONFIGS[name]()
    multipliers = engram_multipliers(config)
    assert (multipliers % 2 == 1).all()
    assert int(multipliers.max()) * (config.engram_compressed_vocab_size - 1) < 2**63


@needs_goldens
@pytest.mark.parametrize("name", ["tiny", "lite"])
def test_engram_constants_of_goldens(name):
    config = ModelConfig.from_dir(GOLDENS / name)
    with safe_open(GOLDENS / name / "golden.safetensors", framework="np") as golden:
        np.testing.assert_array_equal(engram_multipliers(config), golden.get_tensor("engram_multipliers"))
        np.testing.assert_array_equal(engram_primes(config), golden.get_tensor("engram_primes"))


def test_no_engram_layers():
    config = CONFIGS["unit-4"]()
    assert engram_primes(config).shape == (0, 3, 8)
    assert engram_offsets(config).shape == (0, 24)
    assert engram_multipliers(config).shape == (0, 4)


def test_consecutive_primes():
    assert consecutive_primes(0, 6) == (2, 3, 5, 7, 11, 13)
    assert consecutive_primes(1000, 3) == (1009, 1013, 1019)
    assert consecutive_primes(25, 1) == (29,)
    assert consecutive_primes(49, 2) == (53, 59)


# ---- refusals ----


def _broken(**changes):
    """tiny's config.json with text fields (or, with a dot, fields of a section) changed; None deletes."""
    hf = tiny().to_dict()
    for path, value in changes.items():
        section, _, key = path.rpartition("__")
        target = hf if section == "top" else hf[section] if section in hf else hf["text_config"]
        if section == "rope":
            target = hf["text_config"]["rope_scaling"]
        if value is None:
            del target[key]
        else:
            target[key] = value
    return hf


REFUSED = {
    "ratio": (
        dict(compress_ratios=[0, 0, 2, 2, 2, 1, 3, 1, 1, 0, 0, 0]),
        r"compress_ratios\[6\] must be 0, 1 or 2, found 3",
    ),
    "ratio count": (dict(compress_ratios=[0, 0, 2]), r"12 entries \(9 layers \+ 3 draft stages\), found 3"),
    "draft ratio": (
        dict(compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 1, 0]),
        "draft stage 1 must have ratio 0, found 1",
    ),
    "no kv source": (dict(kv_source_layer_ids=[]), "kv_source_layer_ids must name at least one"),
    "unsorted": (dict(kv_source_layer_ids=[4, 2, 5]), r"ascending layer numbers below 9, found \[4, 2, 5\]"),
    "layer beyond": (dict(index_source_layer_ids=[2, 4, 5, 9]), r"below 9, found \[2, 4, 5, 9\]"),
    "kv source missing for ratio": (
        dict(kv_source_layer_ids=[4, 5], index_source_layer_ids=[4, 5, 7]),
        "layer 2 has ratio 2 and needs a kv source of that ratio at or before it, found none",
    ),
    "kv source of other ratio": (
        dict(compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0], kv_source_layer_ids=[2, 5]),
        "layer 4 has ratio 1 and needs .* found layer 2 with ratio 2",
    ),
    "kv source is no index source": (
        dict(index_source_layer_ids=[2, 5, 7]),
        "kv source 4 must also be an index source",
    ),
    "window-only source": (
        dict(index_source_layer_ids=[1, 2, 4, 5, 7]),
        "layer 1 has ratio 0 and cannot be a kv or index source",
    ),
    "last source ratio": (
        dict(compress_ratios=[0, 0, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0]),
        "the last kv source 5 must have ratio 1, found 2",
    ),
    "candidate source": (dict(candidate_source_layer_id=7), "must be the last kv source 5, found 7"),
    "engram on last source": (dict(engram_layer_ids=[1, 5]), r"before the last kv source 5 .*found \[5\]"),
    "engram rows": (
        dict(engram_num_embeddings=[6126, 6333]),
        r"must be \[6126, 6332\].*engram_vocab_size 1000, found \[6126, 6333\]",
    ),
    "engram rows count": (dict(engram_num_embeddings=[6126]), r"one entry per Engram layer \(2\), found 1"),
    "engram vocabulary": (dict(engram_vocab_size=2000), "the sums of the primes derived from"),
    "engram classes": (dict(engram_compressed_vocab_size=513), "513 exceeds vocab_size 512"),
    "engram order": (dict(engram_max_ngram_size=1), "at least 2, found 1"),
    "scale blocks": (dict(hidden_size=200), "hidden_size must be a multiple of 32 .*found 200"),
    "rope": (dict(qk_rope_head_dim=33), "must be even and at most 32"),
    "groups": (dict(o_groups=3), "num_attention_heads 4 must be a multiple of o_groups 3"),
    "top-k": (dict(num_experts_per_tok=9), "num_experts_per_tok 9 exceeds n_routed_experts 8"),
    "shared experts": (dict(n_shared_experts=2), "n_shared_experts must be 1, found 2"),
    "zero": (dict(sliding_window=0), "sliding_window must be positive, found 0"),
    "draft top-k": (dict(dspark_num_experts_per_tok=5), "5 exceeds dspark_n_routed_experts 4"),
    "draft block": (dict(dspark_block_size=0), "dspark_block_size must be at least 1, found 0"),
    "draft noise": (dict(dspark_noise_token_id=512), "512 is outside the vocabulary of 512"),
    "draft taps": (dict(dspark_target_layer_ids=[]), "dspark_target_layer_ids must name at least one layer"),
    "image token": (dict(top__image_token_id=512), "image_token_id 512 is outside the vocabulary of 512"),
    "vision heads": (dict(vision_config__num_attention_heads=5), "hidden_size 64 must give each of 5 heads"),
    "vision layers": (dict(vision_config__patch_size=0), "vision_config.patch_size must be at least 1"),
    "activation": (dict(hidden_act="gelu"), "text_config.hidden_act must be 'silu', found 'gelu'"),
    "router": (dict(scoring_func="softmax"), "scoring_func must be 'sqrtsoftplus', found 'softmax'"),
    "kv heads": (dict(num_key_value_heads=8), "num_key_value_heads must be 1, found 8"),
    "hash layers of V4": (dict(num_hash_layers=3), "num_hash_layers must be 0, found 3"),
    "rope kind": (dict(rope__rope_type="linear"), "rope_scaling.rope_type must be 'yarn', found 'linear'"),
    "dtype": (dict(top__dtype="float16"), "dtype must be 'bfloat16', found 'float16'"),
    "quantisation": (
        dict(quantization_config__expert_dtype="fp8"),
        "expert_dtype must be 'fp4', found 'fp8'",
    ),
    "not quantised": (dict(top__quantization_config=None), "quantization_config must be an object"),
    "no text": (dict(top__text_config=None), "text_config must be an object, found None .*nested"),
    "missing field": (dict(index_topk=None), "index_topk is missing"),
    "missing rope field": (dict(rope__factor=None), "rope_scaling.factor is missing"),
    "missing vision field": (dict(vision_config__min_pixels=None), "vision_config.min_pixels is missing"),
    "type": (dict(hidden_size="192"), "hidden_size must be an integer >= 0, found '192'"),
    "bool": (dict(hc_mult=True), "hc_mult must be an integer >= 0, found True"),
    "negative": (dict(index_topk=-1), "index_topk must be an integer >= 0, found -1"),
    "not a number": (dict(hc_eps=float("nan")), "hc_eps must be a finite number >= 0, found nan"),
    "streams": (dict(hc_mult=8), "hc_mult must be 1 to 4 .* found 8"),
    "candidates": (dict(candidate_topk_blocks=4), "only 13 candidates, fewer than index_topk 16"),
    "list": (dict(kv_source_layer_ids=5), "kv_source_layer_ids must be a list of integers >= 0, found 5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(_broken(**changes))


def test_other_maps_are_fine():
    fewer = ModelConfig.from_dict(_broken(kv_source_layer_ids=[2, 5], index_source_layer_ids=[2, 3, 5, 8]))
    assert [s.kv_source for s in fewer.layers] == [None, None, 2, 2, 2, 5, 5, 5, 5]
    assert [s.index_source for s in fewer.layers] == [None, None, 2, 3, 3, 5, 5, 5, 8]
    assert [s.candidate for s in fewer.layers if s.candidate] == ["source", "reader"]
    gap = ModelConfig.from_dict(_broken(compress_ratios=[0, 0, 2, 0, 2, 1, 0, 1, 1, 0, 0, 0]))
    assert gap.layers[6].kv_source is None and not gap.layers[6].yarn and gap.layers[8].kv_source == 5


def test_every_violation_in_one_error():
    hf = _broken(
        compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 7, 0, 0, 0],
        hidden_size=100,
        hidden_act="gelu",
        dspark_noise_token_id=600,
        engram_num_embeddings=[1, 2],
        top__dtype="float16",
        vision_config__num_attention_heads=7,
    )
    with pytest.raises(ConfigError) as e:
        ModelConfig.from_dict(hf, where="there/config.json")
    message = str(e.value)
    assert message.startswith("there/config.json: not a model this engine can run: 7 problems")
    for part in (
        "compress_ratios[8]",
        "hidden_size",
        "hidden_act",
        "noise_token_id 600",
        "engram_num",
        "dtype",
    ):
        assert part in message
    assert "vision_config.hidden_size 64" in message


@pytest.mark.parametrize(
    ("architectures", "found"),
    [
        (["LlamaForCausalLM"], "LlamaForCausalLM"),
        (["DeepseekV4ForCausalLM"], "DeepseekV4ForCausalLM"),
        (["DeepseekV3ForCausalLM"], "DeepseekV3ForCausalLM"),
        ([], r"\[\]"),
        ("DeepseekV41ForCausalLM", "'DeepseekV41ForCausalLM'"),
        (None, "None"),
    ],
)
def test_other_architectures(architectures, found):
    hf = {"architectures": architectures, "model_type": "other", "hidden_size": 4096}
    with pytest.raises(ConfigError, match=rf"runs DeepSeek-V4.1 only, found {found} \(model_type 'other'\)"):
        ModelConfig.from_dict(hf)


def test_building_one_checks_it():
    with pytest.raises(ConfigError, match=r"ModelConfig: not a model .*: hidden_size must be a multiple of 32"):
        replace(tiny(), hidden_size=100)


def test_unknown_fields_warn(caplog):
    with caplog.at_level(logging.WARNING):
        assert ModelConfig.from_dict(_broken(a_new_trick=1)) == tiny()
    assert "a_new_trick" in caplog.text


def test_from_dir_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        ModelConfig.from_dir(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        ModelConfig.from_dir(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object, found list"):
        ModelConfig.from_dir(tmp_path)
