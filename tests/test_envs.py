"""The table of environment variables: parsing, warnings, and whether it agrees with code and docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepinfer import envs
from deepinfer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (".py", ".cpp", ".h", ".cu")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("DEEPINFER_NATIVE", "0", False),
        ("DEEPINFER_NATIVE", "on", True),
        ("DEEPINFER_NATIVE", "", True),
        ("DEEPINFER_OPS", "*=reference", "*=reference"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "MASK", "mask"),
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", " 140 ", 140),
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "", None),
        ("DEEPINFER_GOLDENS", "/some/folder", "/some/folder"),
    ],
)
def test_values_are_parsed(name, text, value):
    assert envs.get(name, {name: text}) == value


def test_folders_expand_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert envs.get("DEEPINFER_CACHE_ROOT", {}) == "/home/somebody/.cache/deepinfer"
    assert envs.get("DEEPINFER_GOLDENS", {"DEEPINFER_GOLDENS": "~/g"}) == "/home/somebody/g"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DEEPINFER_NATIVE", "2"),
        ("DEEPINFER_LOG_LEVEL", "loud"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "none"),
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "0"),
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "many"),
    ],
)
def test_a_bad_value_names_itself_and_what_is_taken(name, text):
    with pytest.raises(ConfigError) as error:
        envs.get(name, {name: text})
    for part in (name, repr(text), envs.VARIABLES[name].accepts):
        assert part in str(error.value)


def test_all_bad_values_are_found_together():
    found = envs.problems({"DEEPINFER_NATIVE": "maybe", "DEEPINFER_LOG_LEVEL": "loud", "DEEPINFER_OPS": ""})
    assert len(found) == 2


def test_unknown_names_warn_with_the_nearest_known_one():
    environ = {"DEEPINFER_NATIV": "0", "DEEPINFER_NATIVE": "0", "DEEPINFER_MAGIC": "1", "OTHER": "1"}
    with pytest.warns(RuntimeWarning) as caught:
        envs.warn_unknown(environ)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert "DEEPINFER_MAGIC" in messages[0]
    assert "did you mean DEEPINFER_NATIVE?" in messages[1]


def test_the_page_is_current():
    page = (ROOT / "docs" / "env.md").read_text(encoding="utf-8")
    assert page == envs.to_markdown(), "run: python -m deepinfer.envs > docs/env.md"


def variables_in(*places: str) -> set[str]:
    """DEEPINFER_* names that stand alone in quotes, as code that reads or sets a variable writes them."""
    own = {ROOT / "deepinfer" / "envs.py", Path(__file__).resolve()}
    files = {file for place in places for file in (ROOT / place, *(ROOT / place).rglob("*")) if file.is_file()}
    texts = [f.read_text(encoding="utf-8", errors="ignore") for f in files - own if f.suffix in SOURCES]
    return {name for text in texts for name in re.findall(r"""["'](DEEPINFER_[A-Z_]+)["']""", text)}


def test_the_table_holds_the_variables_that_code_reads_and_no_other():
    code = variables_in("deepinfer", "csrc", "bench", "tools", "setup.py")
    assert code - set(envs.VARIABLES) == set(), "read by the code, not in the table"
    assert set(envs.VARIABLES) - code - variables_in("tests") == set(), "in the table, read by nobody"
