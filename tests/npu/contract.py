"""What the model asks of an Ascend NPU, seen without one: `python tests/npu/contract.py ops|graph|eager` prints JSON.

Belongs here: a Python PrivateUse1 backend named npu, and three looks through it. Does not belong here: assertions
(test_contract.py). A backend is renamed once per process, so this never runs inside pytest's. Not an NPU test: it shows
which ops a graph has and where they dispatch, not that they run on an NPU.

ops: example inputs of every op on fake tensors of npu:0. graph: prefill (decoder replay on), decode and draft of `tiny`
on fake tensors of npu:0; every di:: op with its tensors' shapes, dtypes and devices. eager: example inputs of some
ops on npu tensors that keep their data on the CPU; the dispatcher takes our PrivateUse1 kernels, their aten calls go to
a fallback, results are compared with the reference.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("npu")
NPU = torch.device("npu", 0)
TINY = Path(__file__).parents[1] / "data/tiny"


def tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [t for t in x if isinstance(t, Tensor)] if isinstance(x, (list, tuple)) else []


# ------------------------------------------------------------------------------------------------------ fake tensors


class Watch(TorchDispatchMode):
    """Records calls of di:: ops, and any tensor of another device than npu:0 that an op meets."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []
        self.strays: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        seen = tensors(args) + tensors(out)
        stray = [t for t in seen if t.device != NPU and t.dim()]  # 0-dim CPU scalars may meet any device
        if stray and func.namespace in ("aten", "di") and not func.name().startswith("aten::_to_copy"):
            self.strays.add(f"{func.name()} {[str(t.device) for t in seen]}")
        if func.namespace == "di":
            shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors(out)]
            name = func.name().removeprefix("di::").removesuffix(".default")
            devices = sorted({str(t.device) for t in seen})
            self.calls.append({"op": name, "rows": _rows(args), "out": shapes, "devices": devices})
        return out


def _rows(args: Any) -> int:
    return next((t.shape[0] for t in tensors(args)), 0)


def ops() -> dict[str, Any]:
    """op -> [PrivateUse1 has a kernel, devices of its results]."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from deepinfer.ops import registry

    out: dict[str, Any] = {}
    examples = {name: max(op.inputs(torch.Generator()), key=_rows) for name, op in registry.OPS.items()}
    with FakeTensorMode():
        for name, args in examples.items():
            mine = [torch.empty(a.shape, dtype=a.dtype, device=NPU) if isinstance(a, Tensor) else a for a in args]
            devices = sorted({str(t.device) for t in tensors(registry.OPS[name].overload(*mine))})
            out[name] = [torch._C._dispatch_has_kernel_for_dispatch_key(f"di::{name}", "PrivateUse1"), devices]
    return out


def graph() -> dict[str, Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from deepinfer.model.checkpoint import load_checkpoint
    from deepinfer.model.config import ModelConfig
    from deepinfer.model.state import ModelState, StepInputs
    from deepinfer.model.transformer import Transformer

    config = ModelConfig.from_dir(TINY)
    stored = load_checkpoint(TINY, config, device="cpu")
    out: dict[str, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = {name: torch.empty(t.shape, dtype=t.dtype, device=NPU) for name, t in stored.items()}
        token_map = torch.empty(config.vocab_size, dtype=torch.int32, device=NPU)
        model = Transformer(config, weights, token_map, numerics="quantised")
        state = ModelState.allocate(
            config, num_slots=3, num_pages=9, max_pages=4, page_size=128, numerics="quantised", device=NPU
        )

        def integers(n: int) -> Tensor:
            return torch.zeros(n, dtype=torch.int32, device=NPU)

        def step(rows: int, kept: int | None) -> StepInputs:
            few = None if kept is None else torch.zeros(kept, dtype=torch.int64, device=NPU)
            return StepInputs(
                ids=integers(rows),
                positions=integers(rows),
                slots=integers(rows),
                run_start=integers(rows),
                is_image=torch.zeros(rows, dtype=torch.bool, device=NPU),
                window_floor=integers(rows),
                logit_rows=torch.zeros(2, dtype=torch.int64, device=NPU),
                kept=few,
            )

        for name, rows, kept in (("prefill", 33, 16), ("decode", 2, None)):
            with Watch() as watch:
                result = model.forward(step(rows, kept), state)
            out[name] = _report(watch, result.logits)
        assert model.draft is not None
        with Watch() as watch:
            anchors = torch.zeros(2, dtype=torch.int64, device=NPU)
            drafted = model.draft.propose(anchors, integers(2), integers(2), integers(2), state)
        out["draft"] = _report(watch, drafted.logits)
    out["layers"] = len(model.layers)
    return out


def _report(watch: Watch, logits: Tensor) -> dict[str, Any]:
    shape = [list(logits.shape), str(logits.dtype).removeprefix("torch."), str(logits.device)]
    return {"calls": watch.calls, "strays": sorted(watch.strays), "logits": shape}


# ------------------------------------------------------------------------------------- tensors that keep CPU data


class OnNpu(torch.Tensor):
    """A tensor of device npu:0 whose data is the CPU tensor `data_`, always contiguous from its storage's start: what
    aten computes from sizes, strides and offsets of the npu tensor then holds for the data. A view is a copy.
    """

    data_: Tensor

    @staticmethod
    def of(data: Tensor) -> OnNpu:
        if not data.is_contiguous() or data.storage_offset():
            data = data.clone(memory_format=torch.contiguous_format)
        out = torch._C._acc.create_empty_tensor(list(data.shape), data.dtype)
        out.__class__ = OnNpu
        out.data_ = data
        return out


def to_cpu(x: Any) -> Any:
    if isinstance(x, OnNpu):
        return x.data_
    if isinstance(x, (list, tuple)):
        return type(x)(to_cpu(i) for i in x)
    return torch.device("cpu") if isinstance(x, torch.device) else x


def to_npu(x: Any, same: dict[int, Any]) -> Any:
    if isinstance(x, Tensor):
        return same[id(x)] if id(x) in same else OnNpu.of(x)
    return type(x)(to_npu(i, same) for i in x) if isinstance(x, (list, tuple)) else x


def aten_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Every aten op of an npu tensor computes on its CPU data; what it writes in place is the same npu tensor."""
    if op is torch.ops.aten._copy_from.default:
        to_cpu(args[1]).copy_(to_cpu(args[0]))
        return args[1]
    numbers = [  # a Python number arrives as it is where the schema says Tensor
        torch.tensor(a) if isinstance(a, (bool, int, float)) and str(spec.type) == "Tensor" else a
        for a, spec in zip(args, op._schema.arguments, strict=False)
    ]
    same = {id(a.data_): a for a in (*args, *kwargs.values()) if isinstance(a, OnNpu)}
    return to_npu(op(*to_cpu(numbers), **{k: to_cpu(v) for k, v in kwargs.items()}), same)


@contextmanager
def backend() -> Iterator[None]:
    """The fallback for aten, and own kernels where aten resizes an empty result, which a stand-in cannot follow."""
    fallback, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(aten_on_cpu, "PrivateUse1")
    for name in ("abs", "arange", "arange.start", "arange.start_step"):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        own.impl(name, functools.partial(aten_on_cpu, op), "PrivateUse1")
    yield
    del fallback, own


# not here: what writes through views of a result (matrix products, gathers by row blocks) or asks a tensor for a number
EAGER = (
    *("rms_norm", "rope", "hc_collapse", "hc_write", "swiglu", "vision_attention", "engram_gate"),
    *("engram_lookback", "engram_rows", "pair_pool", "ring_write", "page_write"),
    *("penalise", "record_prompt", "record_output"),
)


def eager() -> dict[str, Any]:
    from deepinfer.ops import registry

    out: dict[str, Any] = {}
    with backend():
        for name in EAGER:
            op = registry.OPS[name]
            out[name] = max(_compare(op, args) for args in op.inputs(torch.Generator().manual_seed(1)))
    return out


def _compare(op: Any, args: tuple[Any, ...]) -> float:
    """Largest difference between the op on npu tensors and its reference on CPU ones."""
    theirs = copy.deepcopy(args)
    mine = [OnNpu.of(a.contiguous()) if isinstance(a, Tensor) else a for a in copy.deepcopy(args)]
    done, want = tensors(op.overload(*mine)), tensors(op.reference(*theirs))
    assert all(t.device == NPU for t in done), [t.device for t in done]
    got = [t.data_ for t in (done or tensors(mine))]  # type: ignore[attr-defined]
    worst = 0.0
    for a, b in zip(got, want or tensors(theirs), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            worst = max(worst, float((a.double() - b.double()).abs().max()))
    return worst


if __name__ == "__main__":
    print(json.dumps({"ops": ops, "graph": graph, "eager": eager}[sys.argv[1]]()))
