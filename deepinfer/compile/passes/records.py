"""Chains that end in a cache record, or in its write."""

from __future__ import annotations

from torch.fx import Graph, Node

from deepinfer.compile.passes import match


def window_key(graph: Graph) -> int:
    """rms_norm, rope, pack_window, each the only user of the one before."""
    count = 0
    for pack in list(match.nodes(graph, "pack_window")):
        rope = pack.args[0]
        norm = rope.args[0] if match.is_op(rope, "rope") and isinstance(rope, Node) else None
        if not (isinstance(norm, Node) and match.is_op(norm, "rms_norm")):
            continue
        if match.only_user(norm, "rope") is not rope or match.only_user(rope, "pack_window") is not pack:  # type: ignore[arg-type]
            continue
        x, weight, eps = match.arguments(norm)
        _, cos, sin, inverse = match.arguments(rope)  # type: ignore[arg-type]
        if inverse:
            continue
        with graph.inserting_before(pack):
            new = match.call(graph, "norm_rope_pack_window", (x, weight, cos, sin, eps))
        match.replace(pack, new)
        count += 1
    return count


def _rotated_norm(pack: object, op: str) -> tuple[Node, Node, list[object], list[object]] | None:
    """(norm, rope, their arguments) of pack(rope(norm)), each inner one used by the next alone but for the norm."""
    if not (isinstance(pack, Node) and match.is_op(pack, op) and len(pack.users) == 1):
        return None
    rope = pack.args[0]
    if not (isinstance(rope, Node) and match.is_op(rope, "rope") and len(rope.users) == 1):
        return None
    norm, turned = rope.args[0], match.arguments(rope)
    if not (isinstance(norm, Node) and match.is_op(norm, "rms_norm")) or turned[3]:
        return None
    return norm, rope, match.arguments(norm), turned


def kv_write(graph: Graph) -> int:
    """rms_norm, rope, pack_latent, page_write; the normed rows go on to the index key."""
    count = 0
    for write in list(match.nodes(graph, "page_write")):
        pool, rec, *where = match.arguments(write)
        found = _rotated_norm(rec, "pack_latent")
        if found is None:
            continue
        norm, _, (x, weight, eps), (_, cos, sin, _) = found
        inputs = [n for n in (norm, pool, cos, sin, *where) if isinstance(n, Node)]
        with graph.inserting_after(match.last_of(graph, inputs)):
            new = match.call(graph, "kv_global_write", (pool, x, weight, cos, sin, eps, *where))
        graph.erase_node(write)
        match.replace(norm, new)
        count += 1
    return count


def index_write(graph: Graph) -> int:
    """rms_norm, rope, pack_index, index_page_write."""
    count = 0
    for write in list(match.nodes(graph, "index_page_write")):
        pool, rec, *where = match.arguments(write)
        found = _rotated_norm(rec, "pack_index")
        if found is None or len(found[0].users) != 1:
            continue
        _, _, (x, weight, eps), (_, cos, sin, _) = found
        with graph.inserting_before(write):
            match.call(graph, "index_key_write", (pool, x, weight, cos, sin, eps, *where))
        graph.erase_node(write)
        count += 1
    return count
