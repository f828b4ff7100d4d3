"""Prints `torch==<installed version>` for a constraints file, so that pip keeps the torch of the environment.

Used by `make PYTHON=...`. Exits with one line when that environment has no torch, or one outside
pyproject.toml's range.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path


def main() -> None:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    wanted = next(item for item in project["dependencies"] if item.startswith("torch"))
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"make: {sys.executable} has no torch; install {wanted} there, or leave PYTHON= out")
    low, high = (bound.strip("torch<>=") for bound in wanted.split(","))
    version = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if not tuple(map(int, low.split("."))) <= version < tuple(map(int, high.split("."))):
        sys.exit(f"make: {sys.executable} has torch {found}; DeepInfer needs {wanted} and never replaces it")
    print(f"torch=={found}")


if __name__ == "__main__":
    main()
