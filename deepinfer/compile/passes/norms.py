"""Chains that end in the quantisation of a linear's input: one pass over the row instead of two."""

from __future__ import annotations

from torch.fx import Graph

from deepinfer.compile.passes import match


def norm_quant(graph: Graph) -> int:
    """rms_norm whose only user is quant_fp8."""
    return _quantised(graph, "rms_norm", "rms_norm_quant")


def swiglu_quant(graph: Graph) -> int:
    """swiglu whose only user is quant_fp8."""
    return _quantised(graph, "swiglu", "swiglu_quant")


def _quantised(graph: Graph, op: str, fused: str) -> int:
    count = 0
    for node in list(match.nodes(graph, op)):
        quant = match.only_user(node, "quant_fp8")
        if quant is not None:
            with graph.inserting_after(node):
                new = match.call(graph, fused, tuple(match.arguments(node)))
            quant.replace_all_uses_with(new)
            count += 1
    return count
