"""DeepInfer: DeepSeek-V4.1-Flash, offline, on any device.

Belongs here: the public names, loaded on first use. Does not belong here: code.
`import deepinfer` imports neither torch nor numpy, so command-line help stays instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.async_llm import AsyncLLM
    from deepinfer.config import EngineConfig
    from deepinfer.errors import (
        CheckpointError,
        ConfigError,
        DeepInferError,
        EngineError,
        RequestError,
        UnsupportedError,
    )
    from deepinfer.llm import LLM
    from deepinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from deepinfer.params import SamplingParams, StructuredOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DeepInferError",
    "EngineConfig",
    "EngineError",
    "Logprob",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "UnsupportedError",
    "__version__",
]

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "EngineConfig": "config",
    "SamplingParams": "params",
    "StructuredOutput": "params",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DeepInferError": "errors",
    "EngineError": "errors",
    "RequestError": "errors",
    "UnsupportedError": "errors",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"deepinfer.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
