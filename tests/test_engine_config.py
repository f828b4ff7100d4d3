"""EngineConfig: defaults, environment, limits of the model, and one error for all unmet requirements."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError

MODE = "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE"
KEEP = "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"
RELEASED = SimpleNamespace(
    max_position_embeddings=1_048_576, sliding_window=128, num_nextn_predict_layers=3, dspark_block_size=5
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (MODE, KEEP):
        monkeypatch.delenv(name, raising=False)


def test_defaults_resolve_for_the_released_model():
    config = EngineConfig("some/folder").resolve_for(RELEASED)
    assert (config.device, config.numerics, config.compile, config.replay) == (
        "cpu",
        "quantised",
        "eager",
        "compact",
    )
    assert config.max_model_len == 1_048_576
    assert config.replay_keep_tokens == 140


def test_without_drafts_the_replay_bound_is_smaller():
    model = SimpleNamespace(**{**vars(RELEASED), "num_nextn_predict_layers": 0, "sliding_window": 8})
    assert EngineConfig("m").resolve_for(model).replay_keep_tokens == 10


def test_environment_fills_what_arguments_leave_open(monkeypatch):
    monkeypatch.setenv(MODE, "mask")
    monkeypatch.setenv(KEEP, "200")
    config = EngineConfig("m")
    assert (config.replay, config.replay_keep_tokens) == ("mask", 200)
    config = EngineConfig("m", replay="off", replay_keep_tokens=130)
    assert (config.replay, config.replay_keep_tokens) == ("off", 130)


def test_resolving_twice_changes_nothing():
    once = EngineConfig("m", max_model_len=4096).resolve_for(RELEASED)
    assert once.resolve_for(RELEASED) == once
    assert once.max_model_len == 4096


def test_a_path_is_accepted_and_the_config_is_frozen():
    config = EngineConfig(Path("a") / "b")
    assert config.model == str(Path("a") / "b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.device = "cuda"


BAD = {
    "numerics": "fp16",
    "device": "gpu",
    "max_model_len": 1,
    "max_num_seqs": 0,
    "max_num_batched_tokens": 2.5,
    "num_pages": 0,
    "page_size": True,
    "seed": -1,
    "max_logprobs": -1,
    "compile": "jit",
    "replay": "some",
    "replay_keep_tokens": 0,
}


@pytest.mark.parametrize("name", BAD)
def test_one_bad_option_is_named_with_its_value(name):
    with pytest.raises(ConfigError) as error:
        EngineConfig("m", **{name: BAD[name]})
    assert f"{name} is {BAD[name]!r}" in str(error.value)
    assert "problems" not in str(error.value)


def test_every_bad_option_is_listed_in_one_error(monkeypatch):
    monkeypatch.setenv(KEEP, "none")
    with pytest.raises(ConfigError) as error:
        EngineConfig("", **BAD, kv_cache_memory_bytes=1)
    for name in (*BAD, "model", KEEP):
        assert f"{name} is" in str(error.value)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, ("32", "64")),
        ({"num_pages": 10, "kv_cache_memory_bytes": 1 << 20}, ("num_pages", "kv_cache_memory_bytes")),
        ({"page_size": 12}, ("12", "multiple of 8")),
        ({"compile": "fast"}, ("fast", "eager, layer, model, graph")),
        ({"compile": "layer", "numerics": "exact"}, ("layer", "exact", "use 'eager'")),
    ],
)
def test_options_that_do_not_fit(options, parts):
    with pytest.raises(ConfigError) as error:
        EngineConfig("m", **options)
    for part in parts:
        assert part in str(error.value)


def test_limits_of_the_model_are_listed_together():
    with pytest.raises(ConfigError) as error:
        EngineConfig("m", max_model_len=2_000_000, replay_keep_tokens=100).resolve_for(RELEASED)
    for part in ("2000000", "1048576", "100", "128"):
        assert part in str(error.value)
    EngineConfig("m", replay="off", replay_keep_tokens=100).resolve_for(RELEASED)


def test_unknown_options_are_listed_with_the_known_ones():
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_options("m", dtype="auto", max_num_seqs=4)
    assert "dtype" in str(error.value)
    assert "numerics" in str(error.value)
    assert EngineConfig.from_options("m", max_num_seqs=4).max_num_seqs == 4


def test_device_is_checked_against_torch():
    torch = pytest.importorskip("torch")
    EngineConfig("m", device="cpu").check_device()
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"cuda:1.*doctor"):
            EngineConfig("m", device="cuda:1").check_device()
    with pytest.raises(ConfigError, match="npu"):
        EngineConfig("m", device="npu").check_device()


def test_every_option_has_help():
    assert all(field.metadata.get("help") for field in dataclasses.fields(EngineConfig))
