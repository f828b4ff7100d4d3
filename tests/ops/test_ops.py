"""Every registered op: opcheck, fake against real, reference against dispatcher, rows independent of their batch.

Tolerances of values are the ops' own (registry.Op.tolerance, relative Frobenius); shapes, dtypes, strides, integers
and the row-independence of references are exact.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer.ops import EXACT, QUANTISED, registry

ALL = pytest.mark.parametrize("name", registry.names())


def cases(name: str, seed: int = 0) -> Iterator[tuple[Any, ...]]:
    yield from registry.OPS[name].inputs(torch.Generator().manual_seed(seed))


def tensors(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [t for t in (x or ()) if isinstance(t, Tensor)]


def test_the_library_is_complete() -> None:
    assert len(registry.OPS) >= 30
    for op in registry.OPS.values():
        assert op.reference.__doc__, op.name
        assert set(op.chosen) == {"cpu", "cuda", "npu"}
        assert hasattr(QUANTISED, op.name) and getattr(EXACT, op.name) is op.reference


@ALL
def test_opcheck(name: str) -> None:
    """Schema, fake tensors, autograd registration and AOT dispatch, on the first, an odd and the last example."""
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    examples = list(cases(name))
    op = registry.OPS[name]
    if any(t.dtype is torch.float8_e4m3fn for t in (*tensors(examples[0]), *tensors(op.reference(*examples[0])))):
        checks.remove("test_schema")  # compares with arithmetic that float8 lacks; see the next test
        if name in ("quant_fp8", "hc_boundary"):
            checks.remove("test_aot_dispatch_dynamic")  # the same for a float8 result
    for args in {id(e): e for e in (examples[0], examples[len(examples) // 2], examples[-1])}.values():
        torch.library.opcheck(op.overload, copy.deepcopy(args), test_utils=checks)


@ALL
def test_only_declared_arguments_change(name: str) -> None:
    """Inputs keep their bits unless the schema marks them as written; results never alias inputs."""
    op = registry.OPS[name]
    for args in cases(name):
        before = copy.deepcopy(args)
        out = tensors(op.overload(*args))
        for a, b, spec in zip(args, before, op.overload._schema.arguments, strict=True):
            if isinstance(a, Tensor) and not spec.is_write:
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{name} changed {spec.name}"
        owned = {t.untyped_storage().data_ptr() for t in tensors(args) if t.numel()}
        assert all(t.untyped_storage().data_ptr() not in owned for t in out if t.numel()), name


@ALL
def test_fake_equals_real(name: str) -> None:
    """Shape, dtype and stride of the fake kernel for every example (B22)."""
    for args in cases(name):
        real = tensors(registry.OPS[name].overload(*copy.deepcopy(args)))
        mode = FakeTensorMode()
        fake_args = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        with mode:
            fake = tensors(registry.OPS[name].overload(*fake_args))
        assert [(t.shape, t.dtype, t.stride()) for t in real] == [(t.shape, t.dtype, t.stride()) for t in fake]


@ALL
def test_dispatched_equals_reference(name: str) -> None:
    """Whatever provider was chosen agrees with the reference; in-place ops are compared by what they wrote."""
    op = registry.OPS[name]
    for args in cases(name):
        a, b = copy.deepcopy(args), copy.deepcopy(args)
        got, want = tensors(op.overload(*a)) or tensors(a), tensors(op.reference(*b)) or tensors(b)
        for x, y in zip(got, want, strict=True):
            if x.dtype.is_floating_point and x.dtype.itemsize > 1 and op.tolerance:
                error = (x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)
                assert error <= op.tolerance, f"{name}: {error:.2e} > {op.tolerance}"
            else:
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name


# op -> positions of the per-row arguments; every one has one row per query row
ROW_ARGS = {
    "quant_fp8": (0,),
    "linear_fp8": (0, 1),
    "linear_dequant": (0,),
    "linear": (0,),
    "rms_norm": (0,),
    "rope": (0, 1, 2),
    "hc_mix": (0,),
    "hc_collapse": (0, 1),
    "hc_write": (0, 1, 2, 3),
    "hc_boundary": (0, 1, 2, 3, 4),
    "pack_window": (0,),
    "pack_latent": (0,),
    "pack_index": (0,),
    "router": (0, 4),
    "swiglu": (0,),
    "experts": (0, 1, 2, 3),
    "engram_rows": (0,),
    "engram_gather": (0,),
    "engram_gate": (0, 1, 4),
    "attention": (0, 3, 4, 5, 6, 7, 10),
    "index_topk": (0, 1, 4, 5),
    "index_topk_publish": (0, 1, 4, 5),
    "index_topk_blocks": (0, 1, 4, 5, 9),
}


@pytest.mark.parametrize("exact", [False, True], ids=["quantised", "exact"])
@pytest.mark.parametrize("name", sorted(ROW_ARGS))
def test_a_row_does_not_see_its_batch(name: str, exact: bool) -> None:
    """Bits of a row alone equal its bits inside the largest example, dispatched and through the reference."""
    op = registry.OPS[name]
    rows = ROW_ARGS[name]
    args = max(cases(name, seed=3), key=lambda a: a[0].shape[0])
    if exact:
        if args[0].dtype is not torch.bfloat16:
            pytest.skip("takes codes, not activations")
        args = (torch.randn(args[0].shape, generator=torch.Generator().manual_seed(5)), *args[1:])
        if name == "attention":
            args = tuple(torch.randn((*a.shape[:-1], 64)) if i in (1, 2) else a for i, a in enumerate(args))
    for fn in (op.reference,) if exact else (op.reference, op.overload):
        full = tensors(fn(*args))
        for i in range(args[0].shape[0]):
            one = [a[i : i + 1] if j in rows and isinstance(a, Tensor) else a for j, a in enumerate(args)]
            for whole, part in zip(full, tensors(fn(*one)), strict=True):
                assert torch.equal(
                    whole[i : i + 1].contiguous().view(torch.uint8), part.contiguous().view(torch.uint8)
                ), f"row {i}"


@ALL
def test_cost_is_positive_for_real_work(name: str) -> None:
    args = max(cases(name), key=lambda a: sum(t.numel() for t in tensors(a)))
    flops, moved = registry.OPS[name].cost(*args)
    assert flops >= 0 and moved > 0


def test_unused_memory_never_leaks() -> None:
    """NaN in masked entries of rings and pools does not reach the output (B06)."""
    op = registry.OPS["attention"]
    for args in cases("attention"):
        a = list(copy.deepcopy(args))
        dim = a[0].shape[2]
        a[0], a[1] = torch.randn(a[0].shape), torch.randn((*a[1].shape[:-1], dim))
        used = a[2].new_zeros(a[2].shape[:2], dtype=torch.bool)
        for m in range(a[0].shape[0]):
            for p in range(max(int(a[7][m]), int(a[4][m]) - a[13] + 1), int(a[6][m])):
                used[int(a[3][m]), p % a[2].shape[1]] = True
        a[2] = torch.where(used.unsqueeze(2), torch.randn((*a[2].shape[:-1], dim)), float("nan"))
        if a[9] is not None:
            pool = torch.full((*a[9].shape[:-1], dim), float("nan"))
            for m, sel in enumerate(a[10].tolist()):
                for e in (e for e in sel if e >= 0):
                    pool[int(a[11][int(a[3][m]), e * a[14] // a[15]]), e % pool.shape[1]] = torch.randn(dim)
            a[9] = pool
        assert torch.isfinite(op.reference(*a)).all()


@pytest.mark.parametrize("seed", range(3))
def test_top_k_is_the_sorted_best(seed: int) -> None:
    """index_topk against a plain loop over scores computed in float64, ties to the lower entry."""
    from deepinfer.ops import records

    g = torch.Generator().manual_seed(seed)
    dim, page, n = 32, 16, 40
    keys = records.pack_index(torch.randn((5, page, dim), generator=g).bfloat16())
    keys[1] = keys[0]  # equal keys in two pages: ties
    pool = torch.cat((keys[..., :16].flatten(1), keys[..., 16:].flatten(1)), dim=1)
    table = torch.tensor([[0, 1, 4]], dtype=torch.int32)
    q = records.pack_index(torch.randn((3, 4, dim), generator=g).bfloat16())
    w = torch.randn((3, 4), generator=g)
    visible = torch.tensor([n, 7, 0], dtype=torch.int32)
    got = registry.OPS["index_topk"].overload(q, w, pool, table, torch.zeros(3, dtype=torch.int32), visible, 1, page, 6)
    flat = records.unpack_index(keys[table[0].long()].flatten(0, 1), dim).double()
    for m in range(3):
        s = (
            (torch.relu(records.unpack_index(q[m], dim).double() @ flat.t()) * w[m].double().unsqueeze(1))
            .sum(0)
            .float()
        )
        best = sorted(range(int(visible[m])), key=lambda j: (-s[j].item(), j))[:6]
        assert got[m].tolist() == sorted(best) + [-1] * (6 - len(best))
