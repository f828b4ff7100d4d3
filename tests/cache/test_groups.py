"""Pool sizes from options and memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from deepinfer.cache.groups import DEFAULT_CAP, human, size_pools
from deepinfer.errors import ConfigError

MIB = 1 << 20


def sizes(**changes: Any) -> Any:
    options: dict[str, Any] = {
        "page_bytes": 113_920,
        "slot_bytes": 3 * MIB,
        "page_size": 128,
        "max_num_seqs": 32,
        "model_limit": 1_048_576,
        "max_model_len": None,
        "num_pages": None,
        "memory_bytes": None,
        "free_bytes": 64 << 30,
    }
    return size_pools(**{**options, **changes})


def test_the_default_is_capped() -> None:
    result = sizes()
    assert DEFAULT_CAP - 113_920 <= result.total_bytes <= DEFAULT_CAP
    assert result.max_model_len == min(1_048_576, result.num_tokens)
    small = sizes(free_bytes=1 << 30)
    assert small.total_bytes <= 1 << 28


def test_the_default_takes_no_more_than_the_requests_can_use() -> None:
    assert sizes(model_limit=4096, slot_bytes=1000).num_pages == 32 * 32
    assert sizes(max_model_len=200, slot_bytes=1000).num_pages == 32 * 2


def test_bytes_cover_pages_slots_and_the_reserved_ones() -> None:
    result = sizes(memory_bytes=200 * MIB)
    assert 200 * MIB - 113_920 < result.total_bytes <= 200 * MIB


def test_num_pages_is_what_requests_can_have_and_limits_the_context() -> None:
    result = sizes(num_pages=10)
    assert (result.num_pages, result.max_model_len, result.max_pages) == (10, 1280, 10)


def test_an_explicit_length_may_exceed_the_pool_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "deepinfer"):
        assert sizes(num_pages=2, max_model_len=4096).max_model_len == 4096
    assert "4096 exceeds the pool of 256" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_bytes": MIB}, r"kv_cache_memory_bytes is 1048576, but .* need \d+"),
        ({"max_model_len": 2_000_000}, "max_model_len is 2000000, .* 1048576 positions"),
        ({"free_bytes": MIB}, "MiB are free: lower max_num_seqs"),
        ({"num_pages": 10**9}, r"1000000000 pages .* need \d+.* GiB, 64.0 GiB are free"),
        ({"memory_bytes": 65 << 30}, r"need 65.0 GiB, 64.0 GiB are free"),
    ],
)
def test_what_does_not_fit_names_both_numbers(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes(**options)


def test_every_byte_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "deepinfer"):
        sizes(num_pages=10).log()
    assert "10 pages of 128 tokens (113920 B each)" in caplog.text and "32 request slots" in caplog.text


@pytest.mark.parametrize(("size", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")])
def test_human(size: int, text: str) -> None:
    assert human(size) == text
