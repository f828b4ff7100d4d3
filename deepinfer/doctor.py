"""What this machine has and what DeepInfer needs: the facts behind `deepinfer doctor`.

Belongs here: looking at the system, comparing with requirements, saying what to do. Does not belong here:
printing (cli/doctor.py). Nothing is assumed to work: what fails becomes a check that says so. torch-npu is
never imported here, because its import fails on machines without CANN.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from deepinfer import __version__

State = Literal["ok", "missing", "optional"]  # optional: absent, and only something extra needs it

PYTHON = (3, 11)
CXX = (11,)  # C++20 for the CPU ops
CXX_FOR_CUDA, CUDA = (13,), (13,)
CANN = (9, 2)
CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
ISA = ("avx2", "avx512f", "avx512_bf16", "amx_tile")
CANN_VERSION = re.compile(r"^\s*\w*version\w*\s*=\s*[\[\w:]*?(\d+\.\d[\w.]*)", re.I | re.M)
DEVICES: dict[str, str] = {  # what this version does there
    "cpu": "works; C++ ops, tested",
    "cuda": "SM90: kernels checked on an H200, the engine last with earlier forms of them; SM100: compiled, not run",
    "npu": "reference ops only, not run on hardware",
}


@dataclass(frozen=True)
class Check:
    """One thing looked at. `remedy` is empty when there is nothing to do."""

    name: str
    found: str
    needed: str
    state: State
    remedy: str = ""


def report(device: str = "cpu") -> dict[str, Any]:
    """Everything as JSON values. `ok`: what `device` ("cpu", "cuda", "npu") needs is there."""
    checks = [_python(), *_packages(), _loads("torch", devices), _loads("ops", ops), *_cpu()]
    if device != "cpu":
        checks += {"cuda": _cuda, "npu": _npu}[device]()
    return {
        "deepinfer": __version__,
        "system": system(),
        "device": device,
        "checks": [asdict(check) for check in checks],
        "devices": _or_empty(devices, {}),
        "ops": _or_empty(ops, []),
        "ok": all(check.state != "missing" for check in checks),
    }


def system() -> dict[str, str]:
    """Operating system, processor, memory."""
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    cpu = _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    memory = _field("/proc/meminfo", "MemTotal")
    flags = (_field("/proc/cpuinfo", "flags") or "").split()
    return {
        "os": f"{release.get('PRETTY_NAME', platform.system())}, kernel {platform.release()}",
        "cpu": f"{cpu}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable",
        "isa": " ".join([platform.machine(), *(flag for flag in ISA if flag in flags)]),
        "memory": f"{int(memory.split()[0]) / 2**20:.1f} GiB" if memory else "unknown",
    }


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name), None)


# ----------------------------------------------------------------------------------------- versions


def version_of(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def satisfies(version: str, spec: str) -> bool:
    """Whether `version` lies in a range such as ">=2.11,<2.15". Pre-releases count as the release."""
    found = version_of(version)
    for part in filter(None, spec.split(",")):
        match = re.match(r"\s*(>=|<=|==|<|>)\s*([\d.]+)", part)
        if match is None:
            continue
        wanted = version_of(match[2])
        size = max(len(found), len(wanted))
        a, b = found + (0,) * (size - len(found)), wanted + (0,) * (size - len(wanted))
        if not {">=": a >= b, "<=": a <= b, "==": a == b, "<": a < b, ">": a > b}[match[1]]:
            return False
    return True


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


# ------------------------------------------------------------------------------------------- checks


def _python() -> Check:
    good = sys.version_info >= PYTHON
    found = f"{platform.python_version()} ({sys.executable})"
    needed = f"{_dotted(PYTHON)} or later"
    return Check("Python", found, needed, "ok" if good else "missing", "" if good else "install a later Python")


def _packages() -> list[Check]:
    """The runtime dependencies, as the installed metadata names them."""
    try:
        requirements = importlib.metadata.requires("deepinfer") or []
    except importlib.metadata.PackageNotFoundError:
        return [Check("deepinfer", "not installed, run from its source", "installed", "optional", "pip install -e .")]
    checks = []
    for requirement in requirements:
        if ";" in requirement:  # of an extra
            continue
        name, spec = re.match(r"([\w.-]+)(.*)", requirement).groups()  # type: ignore[union-attr]
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = ""
        good = bool(found) and satisfies(found, spec)
        remedy = "" if good else f'pip install "{requirement}"'
        checks.append(Check(name, found or "not installed", spec or "any", "ok" if good else "missing", remedy))
    return checks


def _cpu() -> list[Check]:
    compiler = _compiler(CXX, "C++ compiler", "install g++; without the C++ ops the reference ops run")
    reason, built = _or_empty(_native_ops, ("the ops cannot be loaded", ""))
    if reason:
        return [compiler, Check("C++ ops", "not in use", "optional", "optional", reason)]
    return [compiler, Check("C++ ops", built, "optional", "ok")]


def _native_ops() -> tuple[str, str]:
    """(why the C++ ops are not used or "", what is used)."""
    from deepinfer.ops import native

    library = native.library()
    if isinstance(library, str):
        return library, ""
    return "", f"{native.LIBRARY.name}, {native.isa()}"


def _cuda() -> list[Check]:
    built = _or_empty(_cuda_of_torch, "")
    good = version_of(built) >= CUDA
    remedy = "" if good else "install a CUDA 13 build of torch (PyPI's wheel for Linux)"
    newest = f"{_dotted(CUDA)} or later"
    checks = [Check("CUDA of torch", built or "none", newest, "ok" if good else "missing", remedy)]
    names = _or_empty(devices, {}).get("cuda", [])
    remedy = "" if names else "no device is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    state: State = "ok" if names else "missing"
    checks.append(Check("NVIDIA device", "; ".join(names) or "none", "SM90 or SM100", state, remedy))
    checks.append(_compiler(CXX_FOR_CUDA, "C++ compiler for CUDA code", "native CUDA code is built with GCC 13"))
    nvcc = _tool_version("nvcc", r"release (\d+\.\d+)")
    good = version_of(nvcc) >= CUDA
    remedy = "" if good else "native CUDA code is built with the CUDA 13 toolkit: put its nvcc on PATH"
    checks.append(Check("nvcc", nvcc or "not found", f"{newest}, to build", "ok" if good else "optional", remedy))
    reason = _or_empty(_cuda_ops, "the ops cannot be loaded")
    state = "optional" if reason else "ok"
    checks.append(Check("CUDA C++ ops", "not in use" if reason else "loaded", "optional", state, reason))
    return checks


def _cuda_ops() -> str:
    """Why the CUDA C++ library is not used, "" when it is."""
    from deepinfer.ops.native import cuda

    library = cuda.library()
    return library if isinstance(library, str) else ""


def _cuda_of_torch() -> str:
    import torch

    return torch.version.cuda or ""


def _npu() -> list[Check]:
    found = cann_version()
    good = version_of(found) >= CANN
    remedy = "" if good else "install CANN and source its set_env.sh; torch-npu cannot be imported without it"
    checks = [Check("CANN", found or "not found", f"{_dotted(CANN)} or later", "ok" if good else "missing", remedy)]
    try:
        plugin = importlib.metadata.version("torch-npu")
    except importlib.metadata.PackageNotFoundError:
        plugin = ""
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = ""
    good = bool(plugin) and version_of(plugin)[:2] == version_of(torch_version)[:2]
    remedy = "" if good else "install CANN first, then the torch-npu release with the number of your torch"
    needed = f"that of torch {torch_version or '(not installed)'}"
    checks.append(Check("torch-npu", plugin or "not installed", needed, "ok" if good else "missing", remedy))
    return checks


def _compiler(needed: tuple[int, ...], name: str, remedy: str) -> Check:
    command = os.environ.get("CXX", "g++").split()[0]
    found = _tool_version(command, r"(?:\) |version )(\d+\.\d+(?:\.\d+)?)")
    good = version_of(found) >= needed or ("clang" in command and bool(found))
    text = f"{command} {found}" if found else f"no {command}"
    needs = f"GCC {_dotted(needed)} or later, to build"
    return Check(name, text, needs, "ok" if good else "optional", "" if good else remedy)


def _tool_version(command: str, pattern: str) -> str:
    """The version that `command --version` prints; "" when there is no such command."""
    path = shutil.which(command)
    if path is None:
        return ""
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(pattern, text)
    return match[1] if match else ""


def cann_version(folders: Iterable[str] | None = None) -> str:
    """Version of the CANN toolkit in the first folder that has one; "" when there is none.

    folders: default: ASCEND_HOME_PATH, ASCEND_TOOLKIT_HOME, then the usual places (spec/ascend.md 2.4).
    """
    if folders is None:
        folders = [
            os.environ.get("ASCEND_HOME_PATH", ""),
            os.environ.get("ASCEND_TOOLKIT_HOME", ""),
            *CANN_FOLDERS,
        ]
    for folder in filter(None, folders):
        for pattern in ("version.cfg", "*/version.cfg", "*/ascend_toolkit_install.info"):
            for file in sorted(Path(folder).glob(pattern)):
                if match := CANN_VERSION.search(file.read_text(errors="replace")):
                    return match[1]
    return ""


# ------------------------------------------------------------------------------------- torch's view


def devices() -> dict[str, list[str]]:
    """Devices that torch can use now, by kind, with their names."""
    import torch

    found = {"cpu": [f"{torch.get_num_threads()} threads"]}
    if torch.accelerator.is_available() and (accelerator := torch.accelerator.current_accelerator()):
        module = torch.get_device_module(accelerator.type)
        found[accelerator.type] = [module.get_device_name(i) for i in range(torch.accelerator.device_count())]
    return found


def ops() -> list[dict[str, Any]]:
    """The op table: op, family, device, provider, chosen, state, why. Importing `deepinfer.ops` fixes it."""
    import deepinfer.ops

    return deepinfer.ops.registry.table()


def _loads(name: str, look: Callable[[], Any]) -> Check:
    """Whether `look` works: the error, in one line, when it does not."""
    try:
        look()
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Check(f"{name} loads", text, "no error", "missing", "repair the installation of torch and deepinfer")
    return Check(f"{name} loads", "yes", "no error", "ok")


def _or_empty(look: Callable[[], Any], empty: Any) -> Any:
    try:
        return look()
    except Exception:
        return empty  # `_loads` has said why
