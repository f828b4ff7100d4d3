"""What the documents claim about the code, checked against the code."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from deepinfer import __version__, doctor
from deepinfer.cli.main import cli
from deepinfer.ops import registry

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load_tool(name: str) -> Any:
    return runpy.run_path(str(ROOT / "tools" / f"{name}.py"))


def test_architecture_lists_every_room_and_module_as_it_is() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert load_tool("architecture")["page"]() == page, "run `python -m tools.architecture`"
    assert "(no docstring)" not in page
    (planned,) = re.findall(r"Planned rooms: (.*)\.", page)
    assert not [name for name in planned.split(", ") if (ROOT / "deepinfer" / name).exists()]


def test_the_ops_page_is_current() -> None:
    page = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    assert load_tool("ops_table")["page"]() == page, "run `python -m tools.ops_table`"
    for op in registry.names():
        assert f"### {op}\n" in page


def test_every_target_names_a_case_that_exists_or_says_so() -> None:
    """A renamed bench case would turn its target into "not measured" unnoticed."""
    tool = load_tool("ops_table")
    cases = [row["case"] for row in tool["results"]()[1]]
    page = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    for target in tool["TARGETS"]:
        if not any(re.fullmatch(target.case, case) for case in cases):
            assert f"| {target.text} |" in page and "not measured" in page


def test_every_room_has_its_layer() -> None:
    (contract,) = PROJECT["tool"]["importlinter"]["contracts"]
    layers = {name for layer in contract["layers"] for name in re.findall(r"\w+", layer)}
    parts = {path.stem for path in (ROOT / "deepinfer").glob("*.py")} - {"__init__"}
    parts |= {path.parent.name for path in (ROOT / "deepinfer").glob("*/__init__.py")}
    assert layers == parts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    monkeypatch.setenv("DEEPINFER_CACHE_ROOT", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time, -> ") and "\nOne day, a little fox -> " in done.stdout
    assert done.stdout.endswith(" stop\n")


def test_the_demo_runs_on_reference_ops() -> None:
    """`make demo` where there is no compiler."""
    command = [sys.executable, "examples/demo.py", "--max-tokens", "2"]
    environment = {**os.environ, "DEEPINFER_NATIVE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n> ") == 5 and done.stdout.count("\nyou:   ") == done.stdout.count("\nmodel: ") == 3
    assert all(f"\n{name} " in done.stdout for name in ("model", "load", "tokens", "speed", "KV cache", "ops (cpu)"))
    assert "100%" in done.stderr and "tok/s" in done.stderr  # the progress bar


def test_every_command_is_described() -> None:
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/cli.md"))
    for name in cli.commands:
        assert f"deepinfer {name}" in readme and name in page


def test_extras_are_described_and_the_placeholders_named() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert f"| `{extra}` |" in page
    for name in ("`flash-mla`", "`deep-gemm`", "`deep-ep`"):
        assert name in page


def test_one_version_and_one_range_of_torch() -> None:
    assert PROJECT["project"]["version"] == __version__
    (torch,) = [item for item in PROJECT["project"]["dependencies"] if item.startswith("torch")]
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    assert doctor.satisfies(pins["torch"], torch.removeprefix("torch"))
    for page in ("README.md", "docs/install.md"):
        assert re.search(r"2\.11 to 2\.14|>= 2\.11, < 2\.15", (ROOT / page).read_text(encoding="utf-8"))
    names = {re.match(r"[\w-]+", item)[0] for item in PROJECT["project"]["dependencies"]}  # type: ignore[index]
    assert names <= set(pins)


def test_a_given_environment_keeps_its_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = load_tool("pin_torch")
    versions = {"torch": "2.11.0+cu130"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    tool["main"]()
    assert capsys.readouterr().out == "torch==2.11.0+cu130\n"
    versions["torch"] = "2.10.0"
    with pytest.raises(SystemExit, match=r"has torch 2\.10\.0"):
        tool["main"]()

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(SystemExit, match="has no torch"):
        tool["main"]()
