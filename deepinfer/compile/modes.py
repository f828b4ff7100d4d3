"""The ways to run a model: eager, layer, model, graph.

Belongs here: which functions of the model are captured. Does not belong here: how (capture.py), CUDA graphs over whole
steps (graphs.py), which `layer`, `model` and `graph` have on devices with graphs.

`layer` captures each kind of layer once, with weights as inputs: a 40-layer model compiles as fast as a 12-layer one.
`model` captures the layers before and after the rows that decoder replay drops as one function each. `graph` captures
nothing here: the ops as they are, inside a graph. Row metadata and the head are functions of their own in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from deepinfer.compile import tree
from deepinfer.compile.capture import Captured, Options
from deepinfer.errors import ConfigError
from deepinfer.model.block import BlockOut, Carry, LayerKind
from deepinfer.model.state import LayerMemory, Rows, StepInputs
from deepinfer.model.transformer import Transformer
from deepinfer.model.weights import LayerWeights

Mode = Literal["eager", "layer", "model", "graph"]
MODES: tuple[Mode, ...] = ("eager", "layer", "model", "graph")


class Compiled:
    """The functions of one model that are captured, by mode. Installs itself; `close` puts the eager ones back."""

    def __init__(self, model: Transformer, mode: Mode, options: Options | None = None) -> None:
        if mode not in MODES:
            raise ConfigError(f"compile is {mode!r}; it must be one of {', '.join(MODES)}")
        if mode in ("layer", "model") and model.numerics == "exact":
            raise ConfigError(
                f"compile={mode!r} needs numerics='quantised': exact numerics runs the definitions, one by one; "
                "use compile='eager'"
            )
        self.model, self.mode = model, mode
        self.options = options or Options.for_device(model.device.type)
        self.captured: dict[Any, Captured] = {}
        if mode in ("layer", "model"):
            self._parts = _Parts(self)
            model.front = self._parts.front  # type: ignore[method-assign]
            model.read_out = self._parts.read_out  # type: ignore[method-assign]
            if mode == "model":
                model.run_layers = self._parts.run_layers  # type: ignore[method-assign, assignment]
            else:
                model.block = self._parts.block  # type: ignore[method-assign]

    def close(self) -> None:
        for name in ("front", "read_out", "run_layers", "block"):
            self.model.__dict__.pop(name, None)
        self.captured.clear()

    @property
    def matches(self) -> dict[str, int]:
        """Chains that passes replaced, over all captured functions."""
        total: dict[str, int] = {}
        for captured in self.captured.values():
            for name, n in (captured.lowered.matches if captured.lowered else {}).items():
                total[name] = total.get(name, 0) + n
        return total

    def call(self, key: Any, name: str, fn: Callable[..., Any], arguments: tuple[Any, ...], fixed: Any = ()) -> Any:
        """`fn(*arguments, *fixed)`, captured under `key`: sizes of tensors in `arguments` are dynamic in their rows,
        those in `fixed` are not.
        """
        captured = self.captured.get(key)
        if captured is None:
            captured = self.captured[key] = Captured(name, fn, self.options)
        tensors = tree.flatten(arguments, [])
        dynamic = len(tensors)
        return captured((*arguments, *fixed), tree.flatten(fixed, tensors), dynamic)


class _Parts:
    """What takes the place of the model's methods of the same names."""

    def __init__(self, compiled: Compiled) -> None:
        model, self._call = compiled.model, compiled.call
        self._front, self._block, self._read_out = model.front, model.block, model.read_out
        self._run_layers = model.run_layers
        self._weights: dict[int, tuple[LayerWeights, list[Tensor]]] = {}  # by identity: they live as long as the model
        self._lists: dict[int, tree.Flat] = {}  # of a half of the model
        self._rows: tuple[Rows | None, list[Tensor]] = (None, [])

    def front(self, step: StepInputs, history: Tensor) -> Any:
        if step.image_rows is not None:  # outside of what is captured: rare, and another graph
            return self._front(step, history)
        logit_rows, kept, step.logit_rows, step.kept = step.logit_rows, step.kept, None, None
        key = ("front", step.want_taps, step.kv_slots is None, step.ring_floor is None)
        out = self._call(key, "front", self._front, (step, history))
        step.logit_rows, step.kept = logit_rows, kept
        return out

    def read_out(self, carry: Carry, picked: Tensor | None) -> Any:
        return self._call(("read_out", picked is None), "read_out", self._read_out, (carry, picked))

    def block(
        self, kind: LayerKind, w: LayerWeights, carry: Carry, rows: Rows, memory: LayerMemory, *rest: Tensor | None
    ) -> Any:
        def layer(carry: Carry, rows: Any, memory: LayerMemory, *rest: Any) -> BlockOut:
            return self._block(kind, rest[-1], carry, rows, memory, *rest[:-1])

        weights = self._weights.get(id(w))
        if weights is None:
            weights = self._weights[id(w)] = (w, tree.flatten(w, []))
        if self._rows[0] is not rows:
            self._rows = (rows, tree.flatten(rows, []))
        return self._call(
            kind, "layer", layer, (carry, tree.Flat(rows, self._rows[1]), memory, *rest), (tree.Flat(*weights),)
        )

    def run_layers(self, part: int, kinds: Sequence[LayerKind], weights: Sequence[LayerWeights], *rest: Any) -> Any:
        def layers(carry: Carry, rows: Rows, *rest: Any) -> Any:
            return self._run_layers(part, kinds, rest[-1], carry, rows, *rest[:-1])

        flat = self._lists.get(part)
        if flat is None:
            flat = self._lists[part] = tree.Flat(list(weights), tree.flatten(list(weights), []))
        return self._call(("layers", part, tuple(kinds)), f"layers{part}", layers, rest, (flat,))


def warm_up(model: Transformer, run: Callable[[StepInputs], Any], rows: int, keep: int) -> None:
    """Run steps of every shape class once on padding memory (slot 0, page 0), so that everything is captured.

    rows and keep must differ from each other and from the sizes of the model; run: `model.forward` on a state.
    """
    device = model.device
    for kept in (None, keep):
        for prefix in (False, True):
            for picked in (None, 2) if kept is None else (2,):
                zeros = torch.zeros(rows, dtype=torch.int32, device=device)
                index = torch.arange(rows, dtype=torch.int32, device=device)
                run(
                    StepInputs(
                        ids=zeros.clone(),
                        positions=zeros.clone(),
                        slots=zeros.clone(),
                        run_start=index,
                        is_image=torch.zeros(rows, dtype=torch.bool, device=device),
                        window_floor=zeros.clone(),
                        logit_rows=None if picked is None else index[-picked:].long(),
                        kept=None if kept is None else index[-kept:].long(),
                        want_taps=False,
                        kv_slots=zeros.clone() if prefix else None,
                        ring_floor=zeros.clone() if prefix else None,
                    )
                )
