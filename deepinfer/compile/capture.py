"""Functions of the model, traced once by torch.compile, fused by our passes, lowered, and called without guards.

Belongs here: how a function becomes a compiled one. Does not belong here: which functions (modes.py), passes (passes/),
CUDA graphs (graphs.py).

torch.compile traces with full graph and rows as the one dynamic size. The backend runs the passes, lowers the graph
(by Inductor, or as plain Python calls of the fused ops) and remembers which of the function's tensors and sizes the
graph takes. Later calls go straight to the lowered graph: Dynamo's guards, 200 us a layer call on a CPU, would only
check again what the caller promises by construction: `Captured` belongs to one model on one device, static values are
part of its key, and a size that is not dynamic belongs to a weight.
"""

from __future__ import annotations

import itertools
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch._dynamo
import torch._dynamo.utils
import torch.fx.experimental._config
from torch import Tensor

from deepinfer.compile import counters, passes, tree
from deepinfer.errors import EngineError

logger = logging.getLogger(__name__)
_names = itertools.count()
INPUTS = "inputs"

# Asserts in the generated code check what the op references' fakes promise; on a CPU they cost more than the work.
INDUCTOR = {
    "size_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
    "emulate_precision_casts": True,  # a fused bf16 chain rounds where the separate ops round
    "fx_graph_cache": True,
}


@dataclass
class Options:
    """What a capture depends on besides the function. `inductor`: lower through Inductor instead of plain Python."""

    inductor: bool
    passes: tuple[passes.Pass, ...]

    @classmethod
    def for_device(cls, device: str) -> Options:
        """What is fastest on "cpu", "cuda" or "npu"."""
        return cls(inductor=device != "cpu", passes=passes.enabled(device))


@dataclass
class Lowered:
    """A compiled graph and where its inputs come from: argument i, (argument i, dimension) for a size, or a tensor that
    the function holds itself, such as the embedding.
    """

    call: Callable[..., Any]
    bindings: list[int | tuple[int, int] | Tensor]
    matches: dict[str, int]  # chains replaced, by pass
    num_ops: int  # ops of ours in the graph after the passes

    def __call__(self, tensors: list[Tensor]) -> Any:
        return self.call(
            *[
                tensors[b] if type(b) is int else tensors[b[0]].shape[b[1]] if type(b) is tuple else b
                for b in self.bindings
            ]
        )


class Captured:
    """`fn(*arguments)` compiled at its first call.

    Arguments are trees (tree.py) of tensors and static values.
    Every later call must bring the same tree. Results are a tree of tensors.
    """

    def __init__(self, name: str, fn: Callable[..., Any], options: Options) -> None:
        self.name, self.fn, self.options = name, fn, options
        self.lowered: Lowered | None = None
        self._result: Any = None
        self._sources: list[int | None] = []  # of each result: the input that it is, or None

    def __call__(self, arguments: tuple[Any, ...], tensors: list[Tensor], dynamic: int) -> Any:
        """tensors: those of `arguments` in order; dynamic: how many of the first may have another first size later."""
        if self.lowered is None:
            self._capture(arguments, tensors, dynamic)
        assert self.lowered is not None
        fresh = iter(self.lowered(tensors))
        return tree.rebuild(self._result, (next(fresh) if i is None else tensors[i] for i in self._sources))

    def _capture(self, arguments: tuple[Any, ...], tensors: list[Tensor], dynamic: int) -> None:
        shape, fn = tree.template(arguments), self.fn
        tensors = _distinct(tensors)
        result = fn(*tree.rebuild(shape, iter(tensors)))  # run once: what it returns, kernels that compile at first use
        places = {id(t): i for i, t in enumerate(tensors)}
        self._result, self._sources = tree.template(result), [places.get(id(t)) for t in tree.flatten(result, [])]
        passed = [i is not None for i in self._sources]  # Dynamo leaves results that are inputs out of the graph

        def flat(*inputs: Tensor) -> list[Tensor]:  # the name is INPUTS
            results = tree.flatten(fn(*tree.rebuild(shape, iter(inputs))), [])
            return [t for t, is_input in zip(results, passed) if not is_input]  # noqa: B905

        for t in tensors[:dynamic]:
            if t.dim() and t.shape[0] > 1:
                torch._dynamo.mark_dynamic(t, 0)
        name = f"{self.name}_{next(_names)}"  # Dynamo keeps what it compiled by code object: one of our own each
        function = types.FunctionType(
            flat.__code__.replace(co_name=name), flat.__globals__, name, None, flat.__closure__
        )
        # rows are dynamic down to one: without this, 1 gets a graph of its own
        sizes = torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        limits = torch._dynamo.config.patch(assume_static_by_default=True, automatic_dynamic_shapes=False)
        misses = _generated()
        with sizes, limits:
            torch.compile(function, fullgraph=True, backend=self._lower)(*tensors)
        if self.lowered is None:
            raise EngineError(f"torch.compile traced nothing of {self.name}: was it disabled (TORCH_COMPILE_DISABLE)?")
        counters.add("compiled")
        counters.add("generated", _generated() - misses)
        logger.debug("%s: %d ops, passes %s", name, self.lowered.num_ops, self.lowered.matches)

    def _lower(self, module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """The backend that torch.compile calls with the traced graph."""
        if self.lowered is not None:
            raise EngineError(f"{self.name} was traced twice: a graph break or a recompilation")
        bindings = [_binding(node) for node in module.graph.nodes if node.op == "placeholder"]
        matches = passes.apply(module, self.options.passes)
        num_ops = sum(getattr(node.target, "namespace", "") == "di" for node in module.graph.nodes)
        call: Callable[..., Any] = torch.fx.GraphModule(module, module.graph).forward  # without a module's call hooks
        if self.options.inductor:
            from torch._inductor.compile_fx import compile_fx

            call = cast(Callable[..., Any], compile_fx(module, examples, config_patches=INDUCTOR))
        self.lowered = Lowered(call, bindings, matches, num_ops)
        return call


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    """The same with no tensor twice: Dynamo makes one input of two arguments that are one object, and says so in a
    guard. In another call they may be two.
    """
    seen: set[int] = set()
    out = []
    for t in tensors:
        out.append(t.view_as(t) if id(t) in seen else t)
        seen.add(id(t))
    return out


def _generated() -> int:
    """Graphs that Inductor has generated code for in this process: misses of its cache."""
    found = torch._dynamo.utils.counters["inductor"]
    return int(found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"])


def _binding(node: torch.fx.Node) -> int | tuple[int, int] | Tensor:
    """Where a graph input comes from, out of the source that Dynamo notes."""
    argument = node.meta["grapharg"]
    source, dimension = argument.source, None
    if hasattr(source, "prop"):  # a size
        dimension, source = source.idx, source.base
    index = getattr(source, "index", None)
    if isinstance(index, int) and getattr(source.base, "local_name", "") == INPUTS:
        return index if dimension is None else (index, dimension)
    held = argument.example
    if dimension is not None or not isinstance(held, Tensor):
        raise EngineError(
            f"graph input {node.name} is {source}, which is neither an argument nor a tensor of the model"
        )
    return held
