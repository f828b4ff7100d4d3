"""Prints `torch==<installed version>`, a constraint that makes pip keep the torch of an environment.

Used by `make PYTHON=...` as `python -m tools.pin_torch`. Exits with one line when that environment has no
torch, or one outside the range of pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path

from deepinfer.doctor import satisfies


def main() -> None:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    wanted = next(item for item in project["dependencies"] if item.startswith("torch"))
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"make: {sys.executable} has no torch; install {wanted} there, or leave PYTHON= out")
    if not satisfies(found, wanted.removeprefix("torch")):
        sys.exit(f"make: {sys.executable} has torch {found}; DeepInfer needs {wanted} and never replaces it")
    print(f"torch=={found}")


if __name__ == "__main__":
    main()
