"""Small words for patterns over FX graphs of our ops."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node

from deepinfer.ops import registry


def target(op: str) -> Any:
    return registry.OPS[op].overload


def is_op(node: Any, op: str) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target is target(op)


def nodes(graph: Graph, op: str) -> Iterator[Node]:
    yield from graph.find_nodes(op="call_function", target=target(op))


def users(node: Node, op: str) -> list[Node]:
    return [user for user in node.users if is_op(user, op)]


def only_user(node: Node, op: str) -> Node | None:
    """The one user of `node`, if it has no other and is `op`."""
    return next(iter(node.users)) if len(node.users) == 1 and users(node, op) else None


def items(node: Node) -> dict[int, list[Node]]:
    """Nodes that take item i of a tuple-valued node; nothing else uses it, or ValueError."""
    found: dict[int, list[Node]] = {}
    for user in node.users:
        if user.target is not operator.getitem:
            raise ValueError(f"{node} is used as a whole by {user}")
        found.setdefault(user.args[1], []).append(user)  # type: ignore[arg-type]
    return found


def arguments(node: Node) -> list[Any]:
    """All arguments of an op in order, defaults and keywords included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    values = list(node.args)
    for argument in schema[len(values) :]:
        values.append(node.kwargs.get(argument.name, argument.default_value))
    return values


def item(graph: Graph, node: Node, i: int) -> Node:
    return graph.call_function(operator.getitem, (node, i))


def call(graph: Graph, op: str, args: tuple[Any, ...]) -> Node:
    return graph.call_function(target(op), args)


def last_of(graph: Graph, wanted: list[Node]) -> Node:
    """The one of `wanted` that comes last in the graph."""
    places = {node: i for i, node in enumerate(graph.nodes)}
    return max(wanted, key=places.__getitem__)


def replace(old: Node, new: Node) -> None:
    if "example_value" in old.meta:
        new.meta["example_value"] = old.meta["example_value"]
    old.replace_all_uses_with(new)
