"""The ops library: `torch.ops.di.*`, one file per family.

Belongs here: importing the families, choosing implementations once, the two namespaces the model uses.
Does not belong here: definitions of ops.

`QUANTISED` goes through the dispatcher; `EXACT` holds the plain references (exact numerics). Same names in both.
"""

from __future__ import annotations

from deepinfer.ops import (
    acceptance,
    attention,
    cache,
    engram,
    fused,
    hyper,
    indexer,
    linear,
    moe,
    native,
    providers,
    registry,
    sampling,
    tilelang,
    triton,
)

native.declare()
triton.declare()
tilelang.declare()
providers.declare()
registry.install()
QUANTISED, EXACT = registry.namespaces()

__all__ = [
    "EXACT",
    "QUANTISED",
    "acceptance",
    "attention",
    "cache",
    "engram",
    "fused",
    "hyper",
    "indexer",
    "linear",
    "moe",
    "registry",
    "sampling",
]
