"""The command before any model: how fast it starts, its help, its options, its errors."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from deepinfer import CheckpointError
from deepinfer.cli import options
from deepinfer.cli.main import cli, run
from deepinfer.config import EngineConfig
from deepinfer.params import SamplingParams

START_SECONDS = 0.5  # of processor time; the clock on the wall depends on the neighbours
COMMANDS = ["generate", "chat", "run-batch", "make-checkpoint", "verify", "doctor"]


@pytest.mark.parametrize("args", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_starts_fast_and_without_torch(args: list[str]) -> None:
    code = f"""
import sys
from deepinfer.cli.main import run
code = run({args!r})
heavy = {{"torch", "numpy", "PIL"}} & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else code)
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < START_SECONDS


def test_an_error_needs_no_torch_either(tmp_path: Path) -> None:
    batch = tmp_path / "batch.jsonl"
    batch.write_text("{}\n")
    lines = [
        ["generate"],
        ["generate", "-p", "x", "--temperature", "nan"],
        ["generate", "-m", "tiny", "-p", "x", "--temperature", "nan"],
        ["generate", "-m", "tiny", "-p", "x", "--num-pages", "0"],
        ["run-batch", "-m", "tiny", "-i", str(batch), "-o", str(tmp_path / "out.jsonl")],
    ]
    code = f"""
import sys
from deepinfer.cli.main import run
codes = [run(line) for line in {lines!r}]
print(codes, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{[2] * len(lines)} False\n", done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_option(name: str, deepinfer: Callable[..., Any]) -> None:
    result = deepinfer(name, "--help")
    assert result.code == 0
    for parameter in cli.commands[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{parameter.name} has no help"
            assert parameter.opts[0] in result.out


def test_people_get_a_model_and_a_batch_must_name_one(deepinfer: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("generate", "chat"):
        (model,) = (parameter for parameter in cli.commands[name].params if parameter.name == "model")
        assert model.default == "small" and isinstance(model, click.Option) and "[small]" in str(model.help)
    result = deepinfer("run-batch", "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    assert result.code == 2 and "--model" in result.err


def test_generate_has_every_sampling_and_engine_field() -> None:
    names = {parameter.name for parameter in cli.commands["generate"].params}
    assert {field.name for field in fields(SamplingParams)} <= names
    engine = {field.name for field in fields(EngineConfig)} - {"seed"} | {"engine_seed"}
    assert engine <= names


def parse(*args: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a command with the generated options would hand to the two dataclasses."""
    found: list[dict[str, Any]] = []

    @click.command()
    @options.sampling_options
    @options.engine_options
    def command(**values: Any) -> None:
        found.extend([options.given(SamplingParams, values), options.given(EngineConfig, values)])

    command.main(list(args), standalone_mode=False)
    return found[0], found[1]


def test_only_options_that_were_given_count() -> None:
    assert parse() == ({}, {})


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        (["--n", "2"], "n", 2),
        (["--temperature", "0"], "temperature", 0.0),
        (["--max-tokens", "none"], "max_tokens", None),
        (["--max-tokens", "7"], "max_tokens", 7),
        (["--stop", "a", "--stop", "1,2"], "stop", ("a", "1,2")),
        (["--stop-token-ids", "3,4"], "stop_token_ids", [3, 4]),
        (["--allowed-token-ids", "5"], "allowed_token_ids", [5]),
        (["--logit-bias", "5=1.5,6=-2"], "logit_bias", {5: 1.5, 6: -2.0}),
        (["--bad-words", "no"], "bad_words", ("no",)),
        (["--ignore-eos"], "ignore_eos", True),
        (["--no-detokenize"], "detokenize", False),
        (["--so-args", '{"regex": "a+"}'], "so_args", {"regex": "a+"}),
        (["--seed", str(2**64 - 1)], "seed", 2**64 - 1),
    ],
)
def test_text_of_an_option_becomes_the_value_of_its_field(args: list[str], field: str, value: Any) -> None:
    sampling, engine = parse(*args)
    assert sampling == {field: value} and engine == {}
    SamplingParams(**sampling)


def test_engine_options() -> None:
    sampling, engine = parse("--engine-seed", "3", "--num-pages", "none", "--replay", "mask", "--device", "cpu")
    assert sampling == {}
    assert engine == {"seed": 3, "num_pages": None, "replay": "mask", "device": "cpu"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--temperature", "warm"], ["--temperature", "warm"]),
        (["--n", "0"], ["n is 0"]),
        (["--stop", ""], ["stop", "non-empty"]),
        (["--logit-bias", "5"], ["--logit-bias", "ID=BIAS"]),
        (["--so-args", "{"], ["--so-args", "JSON"]),
        (["--replay", "sometimes"], ["--replay", "sometimes"]),
        (["--max-num-seqs", "0"], ["max_num_seqs is 0"]),
        (["--bogus"], ["--bogus", "deepinfer generate --help"]),
        (["--prompts-file", "absent.jsonl"], ["absent.jsonl"]),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(
    args: list[str], words: list[str], deepinfer: Callable[..., Any]
) -> None:
    result = deepinfer("generate", "-m", "tiny", "-p", "x", *args)
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("deepinfer: error: ") and result.err.count("\n") == 1
    for word in words:
        assert word in result.err


def test_every_broken_sampling_rule_is_told_at_once(deepinfer: Callable[..., Any]) -> None:
    result = deepinfer("generate", "-m", "tiny", "-p", "x", "--top-p", "2", "--min-p", "3")
    assert "top_p is 2" in result.err and "min_p is 3" in result.err and "Traceback" not in result.err


def test_the_traceback_is_there_for_those_who_ask(
    deepinfer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_LOG_LEVEL", "debug")
    assert "Traceback" in deepinfer("generate", "-m", "tiny", "-p", "x", "--n", "0").err


def test_a_bad_environment_variable_is_an_error_and_an_unknown_one_a_warning(
    deepinfer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_NATVE", "0")
    result = deepinfer("--version")
    assert result.code == 0 and "DEEPINFER_NATIVE" in result.err
    monkeypatch.setenv("DEEPINFER_LOG_LEVEL", "loud")
    result = deepinfer("--version")
    assert result.code == 2 and "'loud'" in result.err


def test_generation_defaults_come_from_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "max_new_tokens": 9}))
    params = SamplingParams.defaults_of(tmp_path)
    assert (params.temperature, params.max_tokens) == (0.6, 9)
    for content in ("[1", "[1]", "5", '{"top_p": 3}'):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            SamplingParams.defaults_of(tmp_path)
    assert SamplingParams.defaults_of(tmp_path / "absent") == SamplingParams()


def test_disk_full_and_closed_pipe_are_one_line(tmp_path: Path) -> None:
    """/dev/full refuses every write; `head` style readers close the pipe early."""
    command = [sys.executable, "-m", "deepinfer", "generate", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "disk full" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 1 and done.stderr == ""


def test_module_and_version_agree(deepinfer: Callable[..., Any]) -> None:
    import tomllib

    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert deepinfer("--version").out == f"deepinfer {project['version']}\n"
    assert run(["no-such-command"]) == 2
