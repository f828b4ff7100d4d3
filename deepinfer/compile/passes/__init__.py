"""Passes over the graph of a compiled function: each fuses a chain of our ops into one op of ours.

Belongs here: the list, switches, counting. Does not belong here: patterns (one file per pass).

A pass works on the graph as torch.compile traced it, before anything is lowered, so every op is still one node. It
must keep the numbers: the fused op's reference is the chain itself (`bitwise`), or the pass says by how much it may
differ. `DEEPINFER_PASSES=-boundary,...` switches passes off, `none` all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepinfer import envs
from deepinfer.compile.passes import boundary, norms, records
from deepinfer.errors import ConfigError
from deepinfer.ops import registry


@dataclass(frozen=True)
class Pass:
    """`run` rewrites the graph in place and returns how many chains it replaced by `op`."""

    name: str
    op: str
    help: str
    run: Callable[[torch.fx.Graph], int]
    bitwise: bool = True  # the references of chain and fused op agree bit for bit


PASSES: tuple[Pass, ...] = (
    Pass(
        "boundary",
        "hc_boundary",
        "hc_write, hc_mix, hc_collapse, rms_norm and quant_fp8 between sublayers",
        boundary.run,
    ),
    Pass("norm_quant", "rms_norm_quant", "rms_norm and quant_fp8 of a linear's input", norms.norm_quant),
    Pass("swiglu_quant", "swiglu_quant", "swiglu and quant_fp8 of the shared expert", norms.swiglu_quant),
    Pass("window_key", "norm_rope_pack_window", "rms_norm, rope and pack_window of window keys", records.window_key),
    Pass(
        "kv_write", "kv_global_write", "rms_norm, rope, pack_latent and page_write of compressed KV", records.kv_write
    ),
    Pass("index_write", "index_key_write", "rms_norm, rope, pack_index and index_page_write", records.index_write),
)


def enabled(device: str = "cpu") -> tuple[Pass, ...]:
    """Passes that DEEPINFER_PASSES leaves on and whose op has a kernel on `device` ("cpu", "cuda"): a fused reference
    would take kernels away from a chain.
    """
    text = envs.get("DEEPINFER_PASSES")
    if text == "none":
        return ()
    off = [part.strip().removeprefix("-") for part in text.split(",") if part.strip()]
    names = [p.name for p in PASSES]
    if bad := [name for name in off if name not in names]:
        raise ConfigError(f"DEEPINFER_PASSES names {', '.join(bad)}; passes are {', '.join(names)}, or 'none'")
    chosen = registry.chosen(device)
    all_references = set(chosen.values()) == {"reference"}  # then nothing is taken away: tests, new devices
    return tuple(p for p in PASSES if p.name not in off and (all_references or chosen[p.op] != "reference"))


def apply(module: torch.fx.GraphModule, passes: tuple[Pass, ...]) -> dict[str, int]:
    """Run `passes` in order on a traced graph; returns matches by name."""
    counts = {p.name: p.run(module.graph) for p in passes}
    if any(counts.values()):
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
    return counts
