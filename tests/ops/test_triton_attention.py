"""Attention kernels in Triton's interpreter; the Gluon kernel for sm_90 run as Python over torch tensors.

Gluon has no interpreter, so `Gl` below carries out what its source says, without layouts: this checks index arithmetic,
the order of dims, masks, scales and the bit placement of the inline PTX. Layouts and asynchrony need the GPU
(tests/gpu/check_attention.py).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("triton was imported without its interpreter", allow_module_level=True)

from deepinfer.ops import records, registry
from deepinfer.ops.triton import attention as family

SOURCE = Path(family.__file__).with_name("attention_sm90.py")


def error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))


@pytest.mark.parametrize("name", ["attention", "block_attention", "vision_attention"])
def test_against_the_reference(name: str) -> None:
    op = registry.OPS[name]
    for args in op.inputs(torch.Generator().manual_seed(1)):
        got, want = getattr(family, name)(*args), op.reference(*args)
        assert got.shape == want.shape and got.dtype == want.dtype
        assert error(got, want) <= op.tolerance


def real(g: torch.Generator, t: int, k: int, heads: int, dim: int, window: int, first: int) -> tuple[Any, ...]:
    """Arguments of `attention` with pages at high ids, unused entries of every kind and unwritten memory."""
    ring, slot, per_page, ratio = window + 12, 2, 64, 2
    rows = torch.arange(t, dtype=torch.int32)
    pos = rows + first
    pages = 40
    table = torch.full((3, 30), -1, dtype=torch.int32)
    table[slot] = torch.randperm(pages, generator=g)[:30].to(torch.int32)
    pool = torch.full((pages, per_page, records.latent_bytes(dim)), 255, dtype=torch.uint8)
    pool[table[slot].long()] = records.pack_latent(torch.randn(30, per_page, dim, generator=g).bfloat16())
    pool[0] = records.pack_latent(torch.randn(per_page, dim, generator=g).bfloat16())
    selected = torch.full((t, k), -1, dtype=torch.int32)
    for i in range(t):
        seen = min(k - 3 * i, int(pos[i] + 1) // ratio) if k else 0
        spots = torch.randperm(k, generator=g)[:seen]
        selected[i, spots] = torch.randperm(int(pos[i] + 1) // ratio, generator=g)[:seen].to(torch.int32)
    return (
        torch.randn(t, heads, dim, generator=g).bfloat16(),
        records.pack_window(torch.randn(t, dim, generator=g).bfloat16()),
        records.pack_window(torch.randn(3, ring, dim, generator=g).bfloat16()),
        torch.full_like(rows, slot),
        pos,
        rows,
        torch.full_like(rows, first),
        torch.full_like(rows, first - 40),
        torch.randn(heads, generator=g),
        pool if k else None,
        selected if k else None,
        table,
        dim**-0.5,
        window,
        ratio,
        per_page * ratio,
    )


def test_chunks_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in one launch, in several, and a row alone have the same bits; so has a longer list of entries."""
    args = real(torch.Generator().manual_seed(3), 3, 400, 4, 32, 100, 700)
    got, want = family.attention(*args), registry.OPS["attention"].reference(*args)
    assert error(got, want) <= 5e-3
    alone = [a[2:] if i in (0, 3, 4, 5, 6, 7, 10) else a for i, a in enumerate(args)]
    assert torch.equal(family.attention(*alone)[0], got[2])
    padded = list(args)
    padded[10] = torch.nn.functional.pad(args[10], (0, 250), value=-1)
    assert torch.equal(family.attention(*padded), got)
    monkeypatch.setattr(family, "SCRATCH", 2 * 16 * 32 * 4)  # one row a launch
    assert torch.equal(family.attention(*args), got)


def test_a_row_without_keys_is_zero() -> None:
    args = list(real(torch.Generator().manual_seed(4), 2, 8, 4, 32, 16, 50))
    args[7] = args[4] + 1  # floor above the row itself
    args[10] = torch.full_like(args[10], -1)
    assert (family.attention(*args) == 0).all()


# ---- the Gluon kernel as Python


class V:
    """A value of the kernel: a torch tensor, or a pointer (tuple of flat memories, which one, offset)."""

    def __init__(self, x: Any, memory: tuple[Tensor, ...] = (), which: Tensor | None = None) -> None:
        self.x, self.memory = torch.as_tensor(x), memory
        self.which = torch.zeros_like(self.x) if which is None and memory else which

    type = property(lambda self: type("T", (), {"layout": None}))
    shape = property(lambda self: self.x.shape)

    def _op(self, other: Any, fn: Any) -> V:
        a, b = self.x, other.x if isinstance(other, V) else torch.as_tensor(other, dtype=self._kind(other))
        if self.memory:
            return V(fn(a, b), self.memory, self.which + torch.zeros_like(b))
        return V(fn(a, b))

    def _kind(self, other: Any) -> torch.dtype:
        return torch.float32 if isinstance(other, float) else self.x.dtype

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> V:
        return V(self.x.view(dtype) if bitcast else self.x.to(dtype))

    def reshape(self, shape: list[int]) -> V:
        return V(self.x.reshape(shape))

    def permute(self, order: list[int]) -> V:
        return V(self.x.permute(order))

    def __neg__(self) -> V:
        return V(-self.x)

    def __index__(self) -> int:
        return int(self.x)

    __int__ = __index__

    def __bool__(self) -> bool:
        return bool(self.x)


for _name, _fn in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b,
    "truediv": torch.div, "and": torch.bitwise_and, "or": torch.bitwise_or, "rshift": torch.bitwise_right_shift,
    "lshift": torch.bitwise_left_shift, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq,
}.items():  # fmt: skip
    setattr(V, f"__{_name}__", lambda self, other, fn=_fn: self._op(other, fn))
    if _name in ("add", "mul", "sub", "truediv"):
        setattr(V, f"__r{_name}__", lambda self, other, fn=_fn: self._op(other, lambda a, b: fn(b, a)))


class Shared:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def index(self, i: Any) -> Shared:
        return Shared(self.x[int(i)])

    def permute(self, order: Any) -> Shared:
        return Shared(self.x.permute(*order))

    def store(self, v: V) -> None:
        self.x.copy_(v.x)

    def load(self, layout: Any) -> V:
        return V(self.x.clone())

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(self.x.view(dtype).view(shape))


def ptx(text: str, inputs: list[Tensor], outputs: int) -> list[Tensor]:
    """Runs straight-line PTX on int64 tensors that hold 32-bit registers."""
    regs: dict[str, Tensor] = {f"${outputs + i}": x.long() & 0xFFFFFFFF for i, x in enumerate(inputs)}

    def value(name: str) -> Any:
        return int(name, 0) if name[0].isdigit() else regs[name]

    for line in re.findall(r"((?:prmt|shl|shr|and|or|mul)\.[^;]+);", text):
        op, rest = line.split(" ", 1)
        target, *names = [n.strip() for n in rest.split(",")]
        a = [value(n) for n in names]
        if op == "prmt.b32":
            out = torch.zeros_like(a[0])
            for i in range(4):
                pick = a[2] >> (4 * i) & 7
                source = a[0] if pick < 4 else torch.as_tensor(a[1])
                out = out | (source >> (8 * (pick & 3)) & 255) << (8 * i)
        elif op == "mul.rn.bf16x2":
            pairs = [(r & 0xFFFFFFFF).int().view(torch.bfloat16).view(*r.shape, 2).float() for r in map(signed, a)]
            exact = pairs[0] * pairs[1]
            assert torch.equal(exact, exact.bfloat16().float()), "the product of code and scale is exact"
            out = exact.bfloat16().view(torch.int32).squeeze(-1).long() & 0xFFFFFFFF
        else:
            out = {
                "shl": lambda x, y: x << y,
                "shr": lambda x, y: x >> y,
                "and": lambda x, y: x & y,
                "or": lambda x, y: x | y,
            }[op.split(".")[0]](*a) & 0xFFFFFFFF
        regs[target] = out
    return [signed(regs[f"${i}"]).int() for i in range(outputs)]


def signed(x: Tensor) -> Tensor:
    return torch.where(x >= 1 << 31, x - (1 << 32), x)


class Gl:
    """`triton.experimental.gluon.language` over torch tensors; layouts are ignored."""

    int32, int64, float32, bfloat16 = torch.int32, torch.int64, torch.float32, torch.bfloat16
    pid = 0
    constexpr = staticmethod(lambda x: x)
    static_range = range
    thread_barrier = staticmethod(lambda: None)
    program_id = staticmethod(lambda axis: V(torch.tensor(Gl.pid, dtype=torch.int32)))
    arange = staticmethod(lambda a, b, layout=None: V(torch.arange(a, b, dtype=torch.int32)))
    zeros = staticmethod(lambda shape, dtype, layout=None: V(torch.zeros(shape, dtype=dtype)))
    full = staticmethod(lambda shape, v, dtype, layout=None: V(torch.full(shape, v, dtype=dtype)))
    zeros_like = staticmethod(lambda v: V(torch.zeros_like(v.x)))
    full_like = staticmethod(lambda v, c: V(torch.full_like(v.x, c)))
    convert_layout = staticmethod(lambda v, layout, assert_trivial=False: v)
    to_tensor = staticmethod(lambda v: v)
    exp2 = staticmethod(lambda v: V(torch.exp2(v.x)))
    fma = staticmethod(lambda a, b, c: V((a.x.double() * b.x.double() + c.x.double()).float()))
    max = staticmethod(lambda v, axis: V(v.x.amax(axis)))
    sum = staticmethod(lambda v, axis: V(v.x.sum(axis)))
    join = staticmethod(lambda a, b: V(torch.stack((a.x, b.x), -1)))
    split = staticmethod(lambda v: (V(v.x[..., 0]), V(v.x[..., 1])))
    broadcast = staticmethod(lambda a, b: tuple(map(V, torch.broadcast_tensors(a.x, b.x))))
    allocate_shared_memory = staticmethod(lambda dtype, shape, layout: Shared(torch.zeros(shape, dtype=dtype)))

    def __getattr__(self, name: str) -> Any:  # layout constructors
        return lambda *args, **kwargs: None

    @staticmethod
    def maximum(a: Any, b: Any) -> V:
        a, b = (v.x if isinstance(v, V) else torch.tensor(v) for v in (a, b))
        return V(torch.maximum(a, b))

    @staticmethod
    def minimum(a: Any, b: Any) -> V:
        a, b = (v.x if isinstance(v, V) else torch.tensor(v) for v in (a, b))
        return V(torch.minimum(a, b))

    @staticmethod
    def expand_dims(v: V, axis: int) -> V:
        return V(v.x.unsqueeze(axis), v.memory, v.which.unsqueeze(axis) if v.memory else None)

    @staticmethod
    def where(c: V, a: Any, b: Any) -> V:
        a, b = (v if isinstance(v, V) else V(v) for v in (a, b))
        if a.memory:
            which = torch.where(c.x, a.which, b.which + len(a.memory))
            return V(torch.where(c.x, a.x, b.x), (*a.memory, *b.memory), which)
        return V(torch.where(c.x, a.x, b.x))

    @staticmethod
    def load(p: V, mask: V | None = None, other: Any = 0) -> V:
        at, which = torch.broadcast_tensors(p.x, p.which)
        live = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.x.expand(at.shape)
        out = torch.full(at.shape, other, dtype=p.memory[0].dtype)
        for i, memory in enumerate(p.memory):
            here = live & (which == i)
            assert not here.any() or (int(at[here].min()) >= 0 and int(at[here].max()) < memory.numel()), (
                "out of bounds"
            )
            out[here] = memory[at[here].long()]
        return V(out)

    @staticmethod
    def store(p: V, v: V) -> None:
        p.memory[0][p.x.long()] = v.x.to(p.memory[0].dtype)

    @staticmethod
    def inline_asm_elementwise(
        text: str, constraints: str, args: list[V], dtype: Any, pure: bool, pack: int
    ) -> tuple[V, ...]:
        shape = torch.broadcast_shapes(*(a.x.shape for a in args))
        return tuple(map(V, ptx(text, [a.x.expand(shape).contiguous() for a in args], len(dtype))))


def mma(a: Shared, b: Shared, acc: V, use_acc: bool = True, is_async: bool = False) -> V:
    out = a.x.float() @ b.x.float()
    return V(acc.x + out if use_acc else out)


def jit(f: Any = None, **options: Any) -> Any:
    return f if f is not None else lambda f: f


def counter(a: Any, b: Any, step: int = 1) -> Iterator[V]:
    return (V(torch.tensor(i, dtype=torch.int32)) for i in range(int(a), int(b), step))


def gluon_run(grid: int, args: tuple[Any, ...], scalars: tuple[Any, ...], shape: dict[str, Any], step: int) -> None:
    text = re.sub(r"^(from|import) (?!__future__|typing).*\n", "", SOURCE.read_text(), flags=re.M)
    names: dict[str, Any] = {
        "gl": Gl(), "gluon": type("G", (), {"jit": staticmethod(jit)}), "torch": torch,
        "fence_async_shared": lambda: None, "warpgroup_mma": mma, "warpgroup_mma_wait": lambda n, deps: deps[0],
    }  # fmt: skip
    exec(compile(text, str(SOURCE), "exec"), names)
    names["range"] = counter
    new, ring, pool = args[1], args[2], args[9]
    views = (new.view(torch.int32), ring.view(torch.int32), pool.view(torch.int16), pool.view(torch.int32))

    def flat(x: Any) -> Any:
        return V(torch.tensor(0, dtype=torch.int64), (x.view(-1),)) if isinstance(x, Tensor) else x

    for pid in range(grid):
        Gl.pid = pid
        names["_attend_sm90"](
            *map(flat, args), *scalars, *map(flat, views), **shape, LINES=names["lines_of"](shape), STEP=step
        )


def gluon(monkeypatch: pytest.MonkeyPatch, width: int, unit: float = 2.0**64) -> None:
    """Send the real shape to the kernel of attention_sm90.py, whose tiles hold K * 2^-64."""
    from deepinfer.ops import triton as package

    def attend(grid: int, step: int, args: Any, scalars: Any, shape: Any) -> None:
        gluon_run(grid, args, scalars, shape, step)

    module = type(sys)("attention_sm90")
    module.attend = attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepinfer.ops.triton.attention_sm90", module)
    monkeypatch.setattr(package, "attention_sm90", module, raising=False)
    monkeypatch.setattr(family, "_hopper", lambda device: True)
    monkeypatch.setattr(family, "_programs", lambda device: width)
    monkeypatch.setattr(family, "UNIT", unit)


def test_gluon_source_in_chunks_and_in_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    args = real(torch.Generator().manual_seed(6), 2, 512, 64, 512, 128, 1500)
    seen = []
    for width in (1, 4):
        gluon(monkeypatch, width)
        seen.append(family.attention(*args))
    assert error(*seen) < 1e-4  # the same sums in the same order; Triton's interpreter merges in numpy


def gluon_cases() -> Iterator[tuple[str, int, tuple[Any, ...]]]:
    g = torch.Generator().manual_seed(5)
    yield "attention", 2, real(g, 3, 512, 64, 512, 128, 1500)
    yield "attention", 8, real(g, 3, 512, 64, 512, 128, 1500)
    yield "attention", 8, real(g, 2, 0, 64, 512, 128, 90)
    yield "attention", 8, real(g, 2, 96, 64, 512, 128, 300)
    block = records.pack_window(torch.randn(10, 512, generator=g).bfloat16())
    ring = records.pack_window(torch.randn(3, 140, 512, generator=g).bfloat16())
    slots, start, floor = (torch.tensor(x, dtype=torch.int32) for x in ([1, 2], [200, 9], [120, 0]))
    q, sink = torch.randn(10, 64, 512, generator=g).bfloat16(), torch.randn(64, generator=g)
    yield "block_attention", 8, (q, block, ring, slots, start, floor, sink, 512**-0.5, 128)


@pytest.mark.parametrize("case", range(5))
def test_gluon_source_computes_the_reference(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, width, args = list(gluon_cases())[case]
    gluon(monkeypatch, width)
    got, want = getattr(family, name)(*args), registry.OPS[name].reference(*args)
    assert error(got, want) <= registry.OPS[name].tolerance
