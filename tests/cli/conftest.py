"""Running the command in this process, over a mock model where no numbers are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from deepinfer.cli import options
from deepinfer.cli.main import run
from deepinfer.config import EngineConfig
from deepinfer.params import SamplingParams


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def deepinfer(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`deepinfer(*args)` as the shell would run it: exit code, stdout, stderr."""

    def call(*args: Any) -> Result:
        code = run([str(arg) for arg in args])
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def mock_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every LLM is the engine over this mock model and the tiny tokenizer; `.answer` may be set."""
    from engine.mock_engine import CONFIG, MockModel

    import deepinfer.llm as room
    from deepinfer.engine.core import Engine
    from deepinfer.model.synthetic import TINY_TOKENIZER
    from deepinfer.text.tokenizer import Tokenizer

    model = MockModel()

    def load(config: EngineConfig) -> Engine:
        exact = replace(config, numerics="exact")  # the mock writes plain numbers into the pools
        return Engine(exact, CONFIG, model, Tokenizer(TINY_TOKENIZER))

    monkeypatch.setattr(room, "load_engine", load)
    monkeypatch.setattr(options, "generation_defaults", SamplingParams.defaults_of)  # "mock" is no checkpoint
    return model
