"""Between two sublayers: hc_write, hc_mix, hc_collapse, rms_norm (and quant_fp8) become hc_boundary.

Eight reads and writes of the streams become two. Matches wherever the written streams are mixed and collapsed and
nothing comes between, so not in front of an Engram layer's attention.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from deepinfer.compile.passes import match


def run(graph: Graph) -> int:
    return sum(_fuse(graph, write) for write in list(match.nodes(graph, "hc_write")))


def _fuse(graph: Graph, write: Node) -> bool:
    mixes, reads = match.users(write, "hc_mix"), match.users(write, "hc_collapse")
    if len(mixes) != 1 or len(reads) != 1:
        return False
    (mix,), (read,) = mixes, reads
    norm = match.only_user(read, "rms_norm")
    if norm is None:
        return False
    y, streams, post, comb = match.arguments(write)
    _, fn, base, scale, iters, hc_eps, eps = match.arguments(mix)
    _, pre = match.arguments(read)
    _, weight, norm_eps = match.arguments(norm)
    if norm_eps != eps:
        return False
    inputs = [n for n in (pre, fn, base, scale, weight) if isinstance(n, Node)]
    with graph.inserting_after(match.last_of(graph, [write, *inputs])):
        fused = match.call(
            graph, "hc_boundary", (y, streams, post, comb, pre, fn, base, scale, weight, iters, hc_eps, eps)
        )
    with graph.inserting_after(fused):
        parts = [match.item(graph, fused, i) for i in range(7)]
    match.replace(write, parts[0])
    for i, found in match.items(mix).items():
        for node in found:
            match.replace(node, parts[1 + i])
    quants = match.users(norm, "quant_fp8")
    match.replace(norm, parts[4])
    for quant in quants:
        for i, found in match.items(quant).items():
            for node in found:
                match.replace(node, parts[5 + i])
    return True
