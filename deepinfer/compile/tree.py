"""Nested arguments as flat lists of tensors and back.

Belongs here: tuples, NamedTuples and dataclasses of tensors. Does not belong here: what they mean. torch's pytree does
the same for registered types at several times the cost of a call; a layer is called some thousand times a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


class Flat:
    """A tree with its tensors taken out before: what is passed again and again need not be walked again."""

    __slots__ = ("tensors", "tree")

    def __init__(self, tree: Any, tensors: list[Tensor]) -> None:
        self.tree, self.tensors = tree, tensors


def flatten(tree: Any, out: list[Tensor]) -> list[Tensor]:
    """Append the tensors of `tree` to `out`, in order; anything else is part of the template."""
    if tree is None:  # first: Dynamo of torch 2.11 cannot ask whether None is a dataclass
        return out
    if isinstance(tree, Tensor):
        out.append(tree)
    elif isinstance(tree, Flat):
        out += tree.tensors
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            flatten(item, out)
    elif is_dataclass(tree):
        for field in fields(tree):
            flatten(getattr(tree, field.name), out)
    return out


def template(tree: Any) -> Any:
    """The shape of `tree` without its tensors: what `rebuild` needs."""
    if isinstance(tree, Tensor):
        return Tensor
    if isinstance(tree, Flat):
        return template(tree.tree)
    if isinstance(tree, (tuple, list)):
        return (type(tree), *(template(item) for item in tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        return (type(tree), *(template(getattr(tree, field.name)) for field in fields(tree)))
    return _Static(tree)


class _Static:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def rebuild(shape: Any, tensors: Iterator[Tensor]) -> Any:
    """The tree of template `shape` with `tensors` in order."""
    if shape is Tensor:
        return next(tensors)
    if isinstance(shape, _Static):
        return shape.value
    kind, *items = shape
    values = [rebuild(item, tensors) for item in items]
    return kind(values) if kind in (tuple, list) else kind(*values)
