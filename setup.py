"""Builds the optional C++ and CUDA C++ ops into the package; everything else is in pyproject.toml.

`deepinfer/ops/native/build.py` and `build_cuda.py` do the work. Without a C++ compiler, or without torch at build time
(pip builds in isolation unless told --no-build-isolation), it says so in one line and the package is complete all the
same: every op has a reference. CUDA ops are built where nvcc and a CUDA torch are; elsewhere, and for a torch that came
later, `python -m deepinfer.ops.native.build_cuda` builds them, and until then their Triton forms run.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

NATIVE = Path(__file__).parent / "deepinfer" / "ops" / "native"


class BuildWithNative(build_py):
    """Compiles csrc before the package's files are collected."""

    def run(self) -> None:
        runpy.run_path(str(NATIVE / "build.py"))["build"]()
        runpy.run_path(str(NATIVE / "build_cuda.py"))["build_with_package"]()
        self.__dict__.pop("data_files", None)  # collected lazily, and maybe before the library was there
        super().run()


class MaybeBinary(Distribution):
    """A wheel is for one platform when it holds the library, else for all."""

    def has_ext_modules(self) -> bool:
        return any(NATIVE.glob("*.so"))


setup(distclass=MaybeBinary, cmdclass={"build_py": BuildWithNative})
