"""Tokenizer against the real vocabulary, and Engram's token map against the goldens."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from deepinfer.errors import CheckpointError, RequestError
from deepinfer.text.tokenizer import BOS, Tokenizer, engram_token_map

SAMPLES = [
    "The quick brown fox jumps over the lazy dog.",
    "深度求索的大语言模型支持超长上下文。",
    "👩‍👩‍👧‍👦 🏳️‍🌈 é e\u0301 ﬁ ２０２４ \u200d\ufe0f",
    "def f(x: int) -> int:\n    return x ** 2 + 1  # comment\n\n\t\r\n",
    "a\x00b\x7f \u00a0\u3000",
    "",
]


def test_import_loads_no_torch() -> None:
    code = (
        "import sys, deepinfer.text, deepinfer.text.chat, deepinfer.text.images;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_token_decodes_as_the_library_does(v4: Tokenizer, v4_file: Path) -> None:
    reference = Backend.from_file(str(v4_file))
    assert v4.vocab_size == reference.get_vocab_size() == 129_280
    for token_id in range(v4.vocab_size):
        ours = v4.decode([token_id], skip_special_tokens=False)
        assert ours == reference.decode([token_id], skip_special_tokens=False), token_id


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_ids_decode_as_the_library_does(v4: Tokenizer, v4_file: Path, data: st.DataObject) -> None:
    reference = v4._backend
    ids = data.draw(st.lists(st.integers(0, 400) | st.integers(0, 129_279), max_size=30))
    for skip in (True, False):
        assert v4.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("name", ["v4", "tiny"])
def test_round_trip(text: str, name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    for ids in (tokenizer.encode(text, add_bos=False), tokenizer.encode_ordinary(text)):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_control_tokens_count_in_prompts_and_not_in_ordinary_text(v41: Tokenizer) -> None:
    text = "<｜User｜>hi<think>｜DSML｜<｜deepseek_image｜><｜end▁of▁sentence｜>"
    ids = v41.encode(text, add_bos=False)
    assert [i for i in ids if i >= 128_000 or i < 3] == [128803, 128821, 128825, 129264, 1]
    ordinary = v41.encode_ordinary(text)
    assert v41.decode(ordinary) == text
    assert not [i for i in ordinary if i >= 128_000 or i < 3]


def test_one_bos(tiny: Tokenizer, v4: Tokenizer) -> None:
    assert tiny.add_bos and not v4.add_bos  # absent tokenizer_config.json; add_bos_token false in V4's
    for tokenizer in (tiny, v4):
        bos = tokenizer.bos_token_id
        assert bos == 0 and tokenizer.eos_token_id == 1
        plain = tokenizer.encode_ordinary("Hello")
        assert tokenizer.encode("Hello", add_bos=True) == [bos, *plain]
        assert tokenizer.encode(BOS + "Hello", add_bos=True) == [bos, *plain]
        assert tokenizer.encode(BOS + "Hello", add_bos=False) == [bos, *plain]
    assert tiny.encode("Hello") == [0, *tiny.encode_ordinary("Hello")]
    assert v4.encode("Hello") == v4.encode_ordinary("Hello")
    assert tiny.encode("") == [0] and v4.encode("") == []


def test_ids_without_a_token_decode_to_nothing(tiny: Tokenizer) -> None:
    assert tiny.token_bytes(-1) == tiny.token_bytes(512) == b""
    assert tiny.id_to_token(-1) is None and tiny.id_to_token(512) is None
    assert tiny.decode([-1, 512, 10**9]) == ""


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["list"], "lone \ud800 surrogate"])
def test_not_text(tiny: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match=r"must be a str, not|lone surrogate '\\ud800' at character 5"):
        tiny.encode(text)


def test_bad_files(tmp_path: Path, golden: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer at .*tokenizer\.json"):
        Tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"no readable tokenizer\.json"):
        Tokenizer(tmp_path)
    data = json.loads(golden("tiny/tokenizer.json").read_text(encoding="utf-8"))
    file.write_text(json.dumps(data | {"decoder": None}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="decoder NoneType"):
        Tokenizer(tmp_path)
    shutil.copy(golden("tiny/tokenizer.json"), file)
    for content in ("[1]", "{", "\xff"):
        (tmp_path / "tokenizer_config.json").write_text(content, encoding="latin-1")
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            Tokenizer(tmp_path)


# ---- Engram's token map ----


def test_real_token_map(v4: Tokenizer, golden: Callable[[str], Path]) -> None:
    expected = json.loads(golden("engram_text.json").read_text(encoding="utf-8"))
    token_map = engram_token_map(v4, expected["map_size"], num_classes=expected["classes"])
    assert len(np.unique(token_map)) == token_map.max() + 1 == expected["classes"] == 99_092
    assert hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest() == expected["map_sha256_int32_le"]
    assert token_map[2] == expected["pad_compressed"]
    for sentence in expected["sentences"]:
        ids = v4.encode(sentence["text"], add_bos=False)
        assert ids == sentence["ids"]
        assert token_map[ids].tolist() == sentence["compressed"]


def test_renaming_placeholders_leaves_the_token_map(v4: Tokenizer, v41: Tokenizer) -> None:
    assert np.array_equal(engram_token_map(v4, 129_280), engram_token_map(v41, 129_280))


@pytest.mark.parametrize("checkpoint", ["tiny", "lite"])
def test_golden_token_map(
    checkpoint: str, golden: Callable[[str], Path], golden_array: Callable[[str, str], Any]
) -> None:
    expected = golden_array(checkpoint, "token_map").numpy()
    config = json.loads(golden(f"{checkpoint}/config.json").read_text())["text_config"]
    tokenizer = Tokenizer(golden(f"{checkpoint}/tokenizer.json"))
    classes = config["engram_compressed_vocab_size"]
    token_map = engram_token_map(tokenizer, config["vocab_size"], num_classes=classes)
    assert token_map.dtype == np.int32 and np.array_equal(token_map, expected)


def test_token_map_of_another_model_is_refused(tiny: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match=r"382 classes, .* engram_compressed_vocab_size = 381"):
        engram_token_map(tiny, 512, num_classes=381)


def test_token_map_of_a_padded_vocabulary(tiny: Tokenizer) -> None:
    padded = engram_token_map(tiny, 520)
    assert np.array_equal(padded[:512], engram_token_map(tiny, 512))
    assert set(padded[512:]) == {382}
