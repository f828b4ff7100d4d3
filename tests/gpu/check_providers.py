"""Library adapters that are usable on this GPU against the references: `python tests/gpu/check_providers.py [seed]`.

A binding that is refused here, or whose library is not installed, prints its reason and counts as no case. What passes
here may say so in `measured` of its binding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from harness import SMALL, Checks, tensors

from deepinfer.ops import formats, providers, registry
from deepinfer.ops.common import fp4_weight, fp8_weight, randn

Args = tuple[Any, ...]


def larger(op: str, g: torch.Generator) -> list[Args]:
    """Sizes of a real layer where the examples are too small for a library (K below 128)."""
    if SMALL:
        return []
    rows = (1, 7, 64, 257)
    if op == "linear":
        return [(randn(g, m, 5120), randn(g, 512, 5120) * 0.02, None, wide) for m in rows for wide in (False, True)]
    if op == "linear_fp8":
        return [(*formats.quant_fp8(randn(g, m, 5120)), *fp8_weight(g, 1024, 5120)) for m in rows]
    if op == "rms_norm":
        return [(randn(g, m, 5120), randn(g, 5120), 1e-20) for m in rows]
    if op == "experts":
        weights = (*fp4_weight(g, 300, 512, 512), *fp4_weight(g, 300, 512, 256))
        return [
            (
                *formats.quant_fp8(randn(g, m, 512)),
                torch.rand((m, 300), generator=g).topk(6).indices.sort().values.int(),
                torch.rand((m, 6), generator=g),
                *weights,
                10.0,
            )
            for m in rows
        ]
    return []


def main() -> None:
    checks = Checks("providers")
    for binding in providers.bindings():
        if binding.device != "cuda" or binding.library == "flash_mla":
            continue  # 64 heads of 512 only: check_attention.py has those shapes
        if reason := providers.reason_against(binding):
            print(f"     {binding.op} {binding.library}: {reason}", flush=True)
            continue
        assert binding.run is not None
        entry, g = registry.OPS[binding.op], checks.generator()
        weights = [
            i
            for i, a in enumerate(entry.overload._schema.arguments)
            if a.name in ("w13", "w13_scale", "w2", "w2_scale")
        ]

        def call(*args: Any, binding: providers.Binding = binding, weights: list[int] = weights) -> Any:
            given = list(args)
            if weights:
                given[weights[0] : weights[-1] + 1] = binding.prepare(*given[weights[0] : weights[-1] + 1])
            return binding.run(*given)  # type: ignore[misc]

        for i, args in enumerate([*entry.inputs(g), *larger(binding.op, g)]):
            if (
                any(t.dtype is torch.float32 and j == 0 for j, t in enumerate(tensors(args)))
                and binding.op == "experts"
            ):
                continue  # exact numerics runs the reference
            checks.compare(binding.op, f"{binding.library}/{i}/{tuple(args[0].shape)}", copy.deepcopy(args), run=call)
    checks.finish()


if __name__ == "__main__":
    main()
