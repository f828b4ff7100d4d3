"""Libraries that other people wrote, bound to our ops: one file per library.

Belongs here: which library can serve which op on which architecture, how that is found out, why it is not chosen.
Does not belong here: kernels of ours. No library is needed, and none is imported before its provider is asked for.

A library counts by the schema of its op and the architecture of the device, never by an import name or a version: three
packages are called `deep_gemm`, with three argument lists. A binding carries the schema that it was written against
(`recorded`); what is found must accept the same call. Tests call every binding with a double of the library that
enforces that schema, records the arguments and computes the reference (tests/ops/test_providers.py).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepinfer import envs
from deepinfer.ops import registry

SM90, SM100, SM103 = (9, 0), (10, 0), (10, 3)
Arch = tuple[int, int]


def _unchanged(*weights: Any) -> tuple[Any, ...]:
    return weights


@dataclass(frozen=True)
class Binding:
    """One op of ours served by a library.

    run: a function with the op's own signature, None where no architecture can be served; archs: compute capabilities
    that it was written for (no entry: any); refused: capability -> why this library cannot serve the op there; `always`
    is such a reason everywhere. recorded: the library's schemas that the call relies on, one a line. why_not: looks for
    the library (called last), None when it fits. measured: capability -> what was seen there; an architecture without
    an entry reads "not run on hardware". prefer: may be the default where measured. invariant: a row's bits do not
    depend on its batch.
    """

    op: str
    library: str
    run: Callable[..., Any] | None = None
    device: str = "cuda"
    archs: tuple[Arch, ...] = ()
    refused: Mapping[Arch, str] = field(default_factory=dict)
    always: str = ""
    recorded: str = ""
    why_not: Callable[[], str | None] = lambda: None
    measured: Mapping[Arch, str] = field(default_factory=dict)
    prefer: bool = False
    invariant: bool = False
    prepare: Callable[..., tuple[Any, ...]] = _unchanged


def declare() -> None:
    """Declare every binding. Call after our own kernels: what is preferred to them comes first."""
    for binding in bindings():
        registry.implement(
            binding.op,
            binding.library,
            binding.device,
            functools.partial(_install, binding),
            why_not=functools.partial(reason_against, binding),
            prepare=binding.prepare,
            states=states(binding),
            only_if_asked=_only_if_asked(binding),
        )


def bindings() -> list[Binding]:
    files = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [b for name in files for b in importlib.import_module(f"{__name__}.{name}").BINDINGS]


def states(binding: Binding) -> dict[str, str]:
    """Architecture -> "measured" or "not run on hardware"; {} for a library that cannot serve the op."""
    if binding.device == "npu":
        return {} if binding.run is None else {"npu": registry.NOT_RUN}
    named = {f"sm_{major}{minor}": (major, minor) for major, minor in binding.archs}
    return {name: registry.MEASURED if arch in binding.measured else registry.NOT_RUN for name, arch in named.items()}


def _only_if_asked(binding: Binding) -> str:
    if binding.device != "cuda" or not torch.cuda.is_available():
        return "; ".join(binding.measured.values()) or registry.NOT_RUN
    seen = binding.measured.get(torch.cuda.get_device_capability())
    return "" if seen and binding.prefer else seen or registry.NOT_RUN


def _install(binding: Binding) -> None:
    assert binding.run is not None  # else there was a reason against it
    registry.register(binding.op, binding.run, binding.device)


def reason_against(binding: Binding) -> str | None:
    """Why the binding cannot be used on this machine; None when it can. Looks for the library last."""
    if binding.always:
        return binding.always
    if envs.get("DEEPINFER_BATCH_INVARIANT") and not binding.invariant:
        return "DEEPINFER_BATCH_INVARIANT=1, and a row's bits may depend on its batch there"
    if binding.device == "cuda":
        if not torch.cuda.is_available():
            return "no CUDA device"
        arch = torch.cuda.get_device_capability()
        if arch in binding.refused:
            return binding.refused[arch]
        if binding.archs and arch not in binding.archs:
            return f"for {' and '.join(f'sm_{a}{b}' for a, b in binding.archs)}, this device is sm_{arch[0]}{arch[1]}"
    elif registry.architecture(binding.device) is None:
        return "no NPU"
    return binding.why_not()


# ------------------------------------------------------------------------------------ looking at a library


def find_op(name: str, modules: tuple[str, ...]) -> Any | None:
    """The schemas registered as torch.ops.<name> ("namespace::op"), importing `modules` until one registers it."""
    for module in ("", *modules):
        if module and not _imported(module):
            continue
        if found := torch._C._jit_get_schemas_for_operator(name):
            return found
    return None


@functools.cache
def _imported(module: str) -> bool:
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return False
    try:
        importlib.import_module(module)
    except Exception:  # an ABI of another torch, no compiler, no driver: absent is normal
        return False
    return True


def lacks_ops(recorded: str, modules: tuple[str, ...]) -> str | None:
    """None when every schema in `recorded` (one a line, "namespace::op(...) -> ...") can be called as written there."""
    for line in filter(None, map(str.strip, recorded.splitlines())):
        wanted = torch._C.parse_schema(line)
        found = find_op(wanted.name, modules)
        if not found:
            return f"no op {wanted.name}"
        problems = [mismatch(schema, wanted) for schema in found]
        if all(problems):
            return f"another {wanted.name}: {problems[0]}"
    return None


def mismatch(found: Any, wanted: Any) -> str | None:
    """Why a call written for schema `wanted` does not fit `found`. Further arguments of `found` need defaults."""
    have, want = found.arguments, wanted.arguments
    for i, argument in enumerate(want):
        if i >= len(have):
            return f"no argument {argument.name}"
        if have[i].name != argument.name or str(have[i].type) != str(argument.type):
            return f"argument {i} is {have[i].type} {have[i].name}, recorded {argument.type} {argument.name}"
    more = [a.name for a in have[len(want) :] if not a.has_default_value()]
    if more:
        return f"also wants {', '.join(more)}"
    results = [[str(r.type) for r in schema.returns] for schema in (found, wanted)]
    return None if results[0] == results[1] else f"returns {results[0]}, recorded {results[1]}"


def lacks_functions(recorded: str, module: str) -> str | None:
    """The same for Python functions: recorded lines read "name(a, b, *, c=None)", module is where they must be."""
    if not _imported(module):
        return f"{module} is not installed or cannot be imported"
    home = importlib.import_module(module)
    for line in filter(None, map(str.strip, recorded.splitlines())):
        name = line.split("(", 1)[0]
        function = getattr(home, name, None)
        if function is None:
            return f"{module} has no {name}"
        try:
            found = inspect.signature(function)
        except (TypeError, ValueError):
            return f"{module}.{name} does not tell its arguments"
        if problem := signature_mismatch(found, recorded_signature(line)):
            return f"another {module}.{name}: {problem}"
    return None


def recorded_signature(line: str) -> inspect.Signature:
    """The signature that a recorded line of Python writes down."""
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def {line}: ...", scope)  # a constant of our source
    return inspect.signature(scope[line.split("(", 1)[0]])


def signature_mismatch(found: inspect.Signature, wanted: inspect.Signature) -> str | None:
    names = [p.name for p in found.parameters.values()]
    missing = [name for name in wanted.parameters if name not in names]
    if missing:
        return f"no argument {', '.join(missing)}"
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    more = [
        p.name
        for p in found.parameters.values()
        if p.name not in wanted.parameters and p.default is inspect.Parameter.empty and p.kind not in optional
    ]
    return f"also wants {', '.join(more)}" if more else None
