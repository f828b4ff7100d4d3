"""The exceptions of the project, one per kind of reader: who has to change something?

Belongs here: exception classes and the helper that lists several problems in one message.
Does not belong here: checks themselves (they live beside the data they check).

Every message names the value, the limit and the remedy. All classes derive from `DeepInferError`; each also
derives from the built-in that fits, so that `except ValueError` in a user's code keeps working.
"""

from __future__ import annotations

from collections.abc import Sequence


class DeepInferError(Exception):
    """Base of every error that DeepInfer raises on purpose."""


class ConfigError(DeepInferError, ValueError):
    """An option, an environment variable or a model config is unusable; who starts the engine changes it."""


class CheckpointError(DeepInferError, ValueError):
    """A checkpoint folder is incomplete, damaged or not in the expected format."""


class RequestError(DeepInferError, ValueError):
    """One request is bad (its prompt or its parameters). Other requests go on."""


class EngineError(DeepInferError, RuntimeError):
    """The engine cannot go on: it is closed, out of a resource that it owns, or met a NaN."""


class UnsupportedError(DeepInferError, NotImplementedError):
    """A valid wish that this version or this device does not serve yet."""


def subjects(problems: Sequence[str]) -> set[str]:
    """The fields that `problems` are about: by convention a problem begins with the name of its field."""
    return {problem.split()[0].rstrip(":") for problem in problems}


def list_problems(subject: str, problems: Sequence[str]) -> str:
    """One message for all `problems` (at least one): a single line for one, a bulleted list for several."""
    if len(problems) == 1:
        return f"{subject}: {problems[0]}"
    return "\n  - ".join([f"{subject}: {len(problems)} problems", *problems])
