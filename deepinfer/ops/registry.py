"""One table of ops: schema, reference, fake, example inputs, tolerance, cost, and who implements it on which device.

Belongs here: defining ops in the torch namespace `di`, declaring providers, choosing one per (op, device), explaining
why. Does not belong here: any arithmetic (family files), kernels (native/).

torch.library holds one implementation per (op, dispatch key) and process, so the table is fixed when `deepinfer.ops` is
first imported. `DEEPINFER_OPS=op=provider,...` overrides the choice (`*=reference` for all). The reference of an op is
an ordinary function that runs on every device: it is the definition, the fallback, and the whole backend of a new
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from deepinfer import envs
from deepinfer.errors import ConfigError

NAMESPACE = "di"
DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}

_LIB = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True)
class Provider:
    """An implementation of one op on one device type.

    `install` registers it at the dispatcher (called at most once); `why_not` returns None when usable here, else the
    reason; `prepare` turns weights as stored into the layout that it reads (same bytes, same shapes).
    """

    name: str
    device: str
    install: Callable[[], None]
    why_not: Callable[[], str | None] = lambda: None
    prepare: Callable[..., tuple[Any, ...]] = lambda *weights: weights


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
            op.providers.append(Provider("reference", device, _installer(name, reference, key)))
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
    python: bool = False,
) -> None:
    """Declare `provider` for op `name` on `device`, preferred over everything declared before.

    With `python=True`, `install` is the implementation itself; otherwise a function that registers a native one.
    """
    if name not in OPS:
        raise ConfigError(f"provider {provider!r} implements unknown op {name!r}; known: {', '.join(sorted(OPS))}")
    step = _installer(name, install, DISPATCH_KEYS[device]) if python else install
    OPS[name].providers.insert(0, Provider(provider, device, step, why_not, prepare))


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


def _select(op: Op, device: str, choice: str | None) -> Provider:
    candidates = [p for p in op.providers if p.device == device]
    if choice is not None and any(p.name == choice for p in candidates):
        provider = next(p for p in candidates if p.name == choice)
        if reason := provider.why_not():
            raise ConfigError(
                f"DEEPINFER_OPS asks for {op.name}={choice} on {device}, which is not usable here: {reason}"
            )
        return provider
    return next(p for p in candidates if p.why_not() is None)


def table() -> list[dict[str, str]]:
    """One row per op x device x provider, for `deepinfer doctor`: keys op, family, device, provider, state."""
    rows = []
    for op in OPS.values():
        for p in op.providers:
            chosen = op.chosen.get(p.device) == p.name
            state = "chosen" if chosen else (p.why_not() or "usable, not preferred")
            rows.append({"op": op.name, "family": op.family, "device": p.device, "provider": p.name, "state": state})
    return rows


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
