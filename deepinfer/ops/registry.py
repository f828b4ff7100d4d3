"""One table of ops: schema, reference, fake, example inputs, tolerance, cost, and who implements it on which device.

Belongs here: defining ops in the torch namespace `di`, declaring providers, choosing one per (op, device), explaining
why. Does not belong here: any arithmetic (family files), kernels (native/).

torch.library holds one implementation per (op, dispatch key) and process, so the table is fixed when `deepinfer.ops` is
first imported. `DEEPINFER_OPS=op=provider,...` overrides the choice (`*=reference` for all). The reference of an op is
an ordinary function that runs on every device: it is the definition, the fallback, and the whole backend of a new
device.

A provider says how far it was seen on each architecture: "measured" (it ran there and equalled the reference),
"compiled, not run", "not run on hardware".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from deepinfer import envs
from deepinfer.errors import ConfigError

NAMESPACE = "di"
DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}
MEASURED, COMPILED, NOT_RUN = "measured", "compiled, not run", "not run on hardware"
NO_FORM = "no form for this"  # what a provider that cannot serve the op says
REFERENCE_STATES = {
    "cpu": {"cpu": MEASURED},
    "cuda": {"sm_90": MEASURED, "sm_100": NOT_RUN},
    "npu": {"npu": NOT_RUN},
}

_LIB = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True)
class Provider:
    """An implementation of one op on one device type.

    `install` registers it at the dispatcher (called at most once); `why_not` returns None when usable here, else the
    reason; `prepare` turns weights as stored into the layout that it reads (same bytes, same shapes). `states`:
    architecture ("cpu", "sm_90", "sm_100", "npu") -> how far it was seen there. `only_if_asked`: empty when it may be
    the default; else why only DEEPINFER_OPS chooses it.
    """

    name: str
    device: str
    install: Callable[[], None]
    why_not: Callable[[], str | None] = lambda: None
    prepare: Callable[..., tuple[Any, ...]] = lambda *weights: weights
    states: Mapping[str, str] = field(default_factory=dict)
    only_if_asked: str = ""


@dataclass
class Op:
    """What the project knows of an op. `inputs` yields argument tuples; `cost` maps arguments to (FLOPs, bytes)."""

    name: str
    schema: str
    family: str
    reference: Callable[..., Any]
    inputs: Callable[[torch.Generator], Iterator[tuple[Any, ...]]]
    tolerance: float  # relative Frobenius error of float outputs against the reference; integer outputs are exact
    cost: Callable[..., tuple[float, float]]
    providers: list[Provider] = field(default_factory=list)  # first usable one wins, per device
    chosen: dict[str, str] = field(default_factory=dict)  # device -> provider name
    asked: frozenset[str] = frozenset()  # devices where DEEPINFER_OPS made the choice

    @property
    def overload(self) -> Any:
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default


OPS: dict[str, Op] = {}


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    inputs: Callable[[torch.Generator], Iterator[tuple[Any, ...]]],
    cost: Callable[..., tuple[float, float]],
    tolerance: float = 0.0,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define op `di::<schema>` with the decorated function as its reference on every device."""

    def decorate(reference: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.split("(", 1)[0]
        if name in OPS:
            raise ConfigError(f"op {name!r} is defined twice; every op has one schema and one reference")
        _LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIB)
        family = reference.__module__.rsplit(".", 1)[-1]
        op = Op(name, schema, family, reference, inputs, tolerance, cost)
        for device, key in DISPATCH_KEYS.items():
            step = _installer(name, reference, key)
            op.providers.append(Provider("reference", device, step, states=REFERENCE_STATES[device]))
        OPS[name] = op
        return reference

    return decorate


def _installer(name: str, fn: Callable[..., Any], key: str) -> Callable[[], None]:
    return lambda: _LIB.impl(name, fn, key)


def implement(
    name: str,
    provider: str,
    device: str,
    install: Callable[[], None] | Callable[..., Any],
    *,
    why_not: Callable[[], str | None] = lambda: None,
    prepare: Callable[..., tuple[Any, ...]] = lambda *weights: weights,
    states: Mapping[str, str] | None = None,
    only_if_asked: str = "",
    python: bool = False,
) -> None:
    """Declare `provider` for op `name` on `device`, preferred over everything declared before.

    With `python=True`, `install` is the implementation itself; otherwise a function that registers a native one.
    """
    if name not in OPS:
        raise ConfigError(f"provider {provider!r} implements unknown op {name!r}; known: {', '.join(sorted(OPS))}")
    step = _installer(name, install, DISPATCH_KEYS[device]) if python else install
    OPS[name].providers.insert(0, Provider(provider, device, step, why_not, prepare, states or {}, only_if_asked))


def register(name: str, fn: Callable[..., Any], device: str) -> None:
    """Make `fn` the implementation of an op on a device: what `install` of a provider in Python calls."""
    _LIB.impl(name, fn, DISPATCH_KEYS[device])


def prepare(name: str, device: str, *weights: Any) -> tuple[Any, ...]:
    """Weights of op `name` as the provider chosen on `device` ("cpu", "cuda", "npu") reads them."""
    op = OPS[name]
    for provider in op.providers:
        if provider.device == device and provider.name == op.chosen.get(device):
            return provider.prepare(*weights)
    return weights  # a device without kernels, such as meta


def parse_overrides(text: str) -> dict[str, str]:
    """`op=provider,...` -> dict; unknown ops, unknown providers and bad syntax are all listed in one ConfigError."""
    known = {p.name for op in OPS.values() for p in op.providers}
    out: dict[str, str] = {}
    bad: list[str] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, sep, provider = item.partition("=")
        if not sep:
            bad.append(f"{item!r} is not op=provider")
        elif name != "*" and name not in OPS:
            bad.append(f"{name!r} is no op (known: {', '.join(sorted(OPS))})")
        elif provider not in known or (name != "*" and provider not in {p.name for p in OPS[name].providers}):
            bad.append(f"no provider {provider!r} for {name!r} (known: {', '.join(sorted(known))})")
        else:
            out[name] = provider
    if bad:
        raise ConfigError("DEEPINFER_OPS: " + "; ".join(bad))
    return out


def install() -> None:
    """Choose and register one implementation per op and device. Called once, at the end of `deepinfer.ops` import."""
    wanted = parse_overrides(envs.get("DEEPINFER_OPS"))
    for op in OPS.values():
        for device in DISPATCH_KEYS:
            choice = wanted.get(op.name, wanted.get("*"))
            provider = _select(op, device, choice)
            provider.install()
            op.chosen[device] = provider.name
            if choice == provider.name:
                op.asked |= {device}


def _select(op: Op, device: str, choice: str | None) -> Provider:
    candidates = [p for p in op.providers if p.device == device]
    if choice is not None and any(p.name == choice for p in candidates):
        provider = next(p for p in candidates if p.name == choice)
        if reason := provider.why_not():
            raise ConfigError(
                f"DEEPINFER_OPS asks for {op.name}={choice} on {device}, which is not usable here: {reason}"
            )
        return provider
    # libraries that only DEEPINFER_OPS may choose are not even looked for: importing one takes up to seconds
    return next(p for p in candidates if not p.only_if_asked and p.why_not() is None)


def architecture(device: str) -> str | None:
    """ "cpu", "sm_90", "npu", ...: the key of Provider.states for this machine's device, None without one."""
    if device == "cuda":
        if not torch.cuda.is_available():
            return None
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"
    if device == "npu":
        module = getattr(torch, "npu", None)
        return "npu" if module is not None and module.is_available() else None
    return device


def table() -> list[dict[str, Any]]:
    """One row per op x device x provider, for `deepinfer doctor`.

    Keys: op, family, device, provider, chosen (bool), state (how far it was seen on this machine's architecture, or on
    each one where the device is absent), why (it was chosen or not).
    """
    rows = []
    for op in OPS.values():
        for device in DISPATCH_KEYS:
            arch = architecture(device)
            for p in (p for p in op.providers if p.device == device):
                taken = op.chosen.get(device) == p.name
                rows.append(
                    {
                        "op": op.name,
                        "family": op.family,
                        "device": device,
                        "provider": p.name,
                        "chosen": taken,
                        "state": state_text(p, arch),
                        "why": _why(op, p, taken),
                    }
                )
    return rows


def state_text(provider: Provider, arch: str | None = None) -> str:
    """The provider's state on an architecture; without one all: "sm_90 measured; sm_100 compiled, not run"."""
    if not provider.states:
        return NO_FORM
    if arch is not None:
        return provider.states.get(arch, NO_FORM)
    by_state: dict[str, list[str]] = {}
    for name, state in provider.states.items():
        by_state.setdefault(state, []).append(name)
    return "; ".join(f"{', '.join(names)} {state}" for state, names in by_state.items())


def _why(op: Op, provider: Provider, taken: bool) -> str:
    reason = provider.why_not()
    if taken:
        if provider.device in op.asked:
            return "DEEPINFER_OPS asks for it"
        return "the definition; nothing better is usable here" if provider.name == "reference" else "preferred"
    if reason:
        return reason
    if provider.only_if_asked:
        return f"only if DEEPINFER_OPS asks: {provider.only_if_asked}"
    return f"usable, {op.chosen[provider.device]} is preferred"


def chosen(device: str) -> dict[str, str]:
    """Provider name of every op on `device` ("cpu", "cuda", "npu")."""
    return {name: op.chosen[device] for name, op in OPS.items()}


def namespaces() -> tuple[SimpleNamespace, SimpleNamespace]:
    """(dispatched ops, plain references) with the same attribute names.

    The model takes one of the two: quantised numerics goes through the dispatcher; exact numerics calls the references,
    because other providers implement the quantised formats only (design section 6).
    """
    return (
        SimpleNamespace(**{name: op.overload for name, op in OPS.items()}),
        SimpleNamespace(**{name: op.reference for name, op in OPS.items()}),
    )


def names() -> list[str]:
    return sorted(OPS)
