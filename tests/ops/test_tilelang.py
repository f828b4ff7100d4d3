"""TileLang programs without a GPU: the CUDA C++ that TileLang writes, in an emulation of a block, against references.

Needs tilelang (extra `gpu`); without it the table and the adapter are tested alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.ops import cache, engram, formats, hyper, linear, records, registry, tilelang
from deepinfer.ops.common import randn

needs_tilelang = pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="tilelang is not installed")
HEADER = Path(__file__).parent / "tilelang_emulation.h"
Run = Callable[..., None]


def test_table_names_ops_and_reasons() -> None:
    for op in tilelang.KERNELS:
        found = [p for p in registry.OPS[op].providers if p.name == "tilelang"]
        assert len(found) == 1 and found[0].device == "cuda"
        if not torch.cuda.is_available():
            assert found[0].why_not() == "no CUDA device"
            assert registry.OPS[op].chosen["cuda"] != "tilelang"


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """emulate(factory, *arguments) -> run(grid, **tensors and scalars by the names of the program)."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    from deepinfer.ops.tilelang import compile

    folder = tmp_path_factory.mktemp("tilelang")
    made = 0

    def build(factory: Callable[..., Any], *args: Any) -> Run:
        nonlocal made
        made += 1
        source = compile.lower(compile.Variant("test", factory, args), compile.target(9, 0))
        head, body = source[source.index('extern "C"') :].split(";", 1)
        name, listed = re.search(r"void (\w+)\((.*)\)", head).groups()  # type: ignore[union-attr]
        parameters = [p.strip() for p in listed.split(",")]
        names = [p.split()[-1].lstrip("*") for p in parameters]
        threads = int(re.search(r"__launch_bounds__\((\d+)", body).group(1))  # type: ignore[union-attr]
        memory = r"\1* \2 = reinterpret_cast<\1*>((uint64_t(emu::dynamic[0].data()) + 1023) & ~1023ull);"
        body = re.sub(r"extern __shared__ __align__\(1024\) (\w+) (\w+)\[\];", memory, body)
        fields = "".join(re.sub(r"(\w+)$", r"a_\1; ", p) for p in parameters)
        code = f"""#include "{HEADER}"
{body}
static struct {{ {fields} }} args;
static void entry() {{ {name}({", ".join(f"args.a_{n}" for n in names)}); }}
extern "C" void run(unsigned gx, unsigned gy, {listed}) {{
  {" ".join(f"args.a_{n} = {n};" for n in names)}
  for (emu::second = 0; emu::second < gy; emu::second++)
    for (unsigned x = 0; x < gx; x++) emu::run_cluster(x, 1, {threads}, 0, 98304, entry);
}}
"""
        file = folder / f"{name}{made}.cpp"
        file.write_text(code)
        flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
        command = [compiler, *flags, "-o", str(file.with_suffix(".so")), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]
        entry = ctypes.CDLL(str(file.with_suffix(".so"))).run

        def run(grid: tuple[int, int], **values: Any) -> None:
            passed: list[Any] = [ctypes.c_uint(n) for n in grid]
            for parameter, key in zip(parameters, names, strict=True):
                value = values[re.sub(r"_\d+$", "", key)]
                if isinstance(value, Tensor):
                    assert value.is_contiguous()
                    passed.append(ctypes.c_void_p(value.data_ptr()))
                else:
                    passed.append((ctypes.c_float if parameter.startswith("float") else ctypes.c_int)(value))
            entry(*passed)

        run.threads = threads  # type: ignore[attr-defined]
        return run

    return build


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Memory full of NaN."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), 255, dtype=torch.uint8).view(dtype).view(shape)


def relative(a: Tensor, b: Tensor) -> float:
    error = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
    return error if error == error else float("inf")


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@needs_tilelang
@pytest.mark.parametrize("n", [64, 768])
def test_rms_norm(emulate: Callable[..., Run], n: int) -> None:
    from deepinfer.ops.tilelang.norm import norm_program

    g = torch.Generator().manual_seed(n)
    x, weight, out = randn(g, 3, n), randn(g, n), blank(3, n)
    emulate(norm_program, n)((3, 1), x=x, weight=weight, out=out, eps=1e-20, t=3)
    assert relative(out, hyper.rms_norm(x, weight, 1e-20)) <= 5e-3


@needs_tilelang
@pytest.mark.parametrize(("shape", "rotary", "inverse"), [((5, 3, 32), 8, False), ((5, 128), 32, True)])
def test_rope(emulate: Callable[..., Run], shape: tuple[int, ...], rotary: int, inverse: bool) -> None:
    from deepinfer.ops.tilelang.norm import rope_program

    g = torch.Generator().manual_seed(rotary)
    x, angle, out = (randn(g, *shape), torch.rand((5, rotary), generator=g) * 6, blank(*shape))
    run = emulate(rope_program, shape[1] if len(shape) == 3 else 1, shape[-1], rotary, inverse)
    span = run.threads * (4 if len(shape) == 3 else 1) * 8  # type: ignore[attr-defined]
    cos, sin = angle.cos(), angle.sin()
    run((ceil(x.numel(), span), 1), x=x, cos=cos, sin=sin, out=out, t=5)
    assert relative(out, hyper.rope(x, cos, sin, inverse)) <= 1e-3


@needs_tilelang
def test_quantisers(emulate: Callable[..., Run]) -> None:
    from deepinfer.ops.tilelang.norm import quant_program

    g = torch.Generator().manual_seed(2)
    x = (randn(g, 9, 96) * 10.0 ** torch.randint(-6, 5, (9, 1), generator=g)).to(torch.bfloat16)
    codes, scales = (blank(9, 96, dtype=torch.float8_e4m3fn), blank(9, 3, dtype=torch.uint8))
    emulate(quant_program, 12, 0)((ceil(9 * 12, 128), 1), x=x, codes=codes, scales=scales, t=9)
    assert all(same(a, b) for a, b in zip((codes, scales), linear.quant_fp8(x), strict=True))
    kv = randn(g, 17, 64)
    rec = blank(17, records.window_bytes(64), dtype=torch.uint8)
    emulate(quant_program, 8, 80)((ceil(17 * 8, 128), 1), x=kv, codes=rec, scales=rec, t=17)
    assert torch.equal(rec, cache.pack_window(kv))


@needs_tilelang
@pytest.mark.parametrize(("h", "rows"), [(64, 1), (512, 4)])
def test_engram_gate(emulate: Callable[..., Run], h: int, rows: int) -> None:
    from deepinfer.ops.tilelang.engram import gate_program

    g = torch.Generator().manual_seed(h)
    r, kv, q, k, out = (randn(g, 5, 4, h), randn(g, 5, 5, h), randn(g, 4, h), randn(g, 4, h), blank(5, 4, h))
    image = torch.arange(5) % 4 == 1
    run = emulate(gate_program, 4, h, rows)
    run((4, ceil(5, rows)), r=r, kv=kv, q_weight=q, k_weight=k, is_image=image, out=out, eps=1e-20, t=5)
    assert relative(out, engram.engram_gate(r, kv.view(5, -1), q, k, image, 1e-20)) <= 2e-3


def boundary(t: int, h: int) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(h)
    state = (torch.rand((t, 4), generator=g), torch.rand((t, 4, 4), generator=g) / 2, torch.rand((t, 4), generator=g))
    fn = torch.randn((24, 4 * h), generator=g) * h**-0.5
    weights = (fn, torch.randn(24, generator=g), torch.rand(3, generator=g), randn(g, h))
    return (randn(g, t, h), randn(g, t, 4, h), *state, *weights, 20, 1e-6, 1e-20)


@needs_tilelang
def test_write_and_collapse(emulate: Callable[..., Run]) -> None:
    from deepinfer.ops.tilelang.hyper import collapse_program, write_program

    y, streams, post, comb, pre = boundary(3, 192)[:5]
    out, x = blank(3, 4, 192), blank(3, 192)
    run = emulate(write_program, 192)
    grid = (192 // 8 // run.threads, 3)  # type: ignore[attr-defined]
    run(grid, y=y, streams=streams, post=post, comb=comb, out=out, t=3)
    emulate(collapse_program, 192)(grid, streams=streams, pre=pre, out=x, t=3)
    assert relative(out, hyper.hc_write(y, streams, post, comb)) <= 1e-3
    assert relative(x, hyper.hc_collapse(streams, pre)) <= 1e-3


@needs_tilelang
@pytest.mark.parametrize(("t", "h"), [(3, 64), (67, 320)])
def test_boundary_in_both_splits(emulate: Callable[..., Run], t: int, h: int) -> None:
    """Against the reference, and the same bits whether a block takes a tile or a slice."""
    from deepinfer.ops.tilelang.hyper import BK, BM, _slices, finish_program, project_program

    y, streams, post, comb, pre, fn, base, scale, norm, iters, hc_eps, eps = args = boundary(t, h)
    f32, results = torch.float32, []
    for few in (True, False):
        tiles, each = _slices(h, few)
        slots = h // BK // tiles
        out, x, sums = blank(t, 4, h), blank(t, h), blank(slots, t, 32, dtype=f32)
        project = emulate(project_program, h, tiles, True, True, True)
        project(
            (slots, ceil(t, BM)),
            y=y,
            streams=streams,
            post=post,
            comb=comb,
            pre=pre,
            fn=fn,
            out=out,
            x=x,
            sums=sums,
            t=t,
        )
        mixed = [blank(t, 4, dtype=f32), blank(t, 4, dtype=f32), blank(t, 4, 4, dtype=f32)]
        codes, exponents = (blank(t, h, dtype=torch.float8_e4m3fn), blank(t, h // 32, dtype=torch.uint8))
        finish = emulate(finish_program, h, slots, each, few, True)
        pieces = ceil(h // 8, finish.threads) if few else 1  # type: ignore[attr-defined]
        finish(
            (ceil(t, 1 if each > 1 else 32) + t * pieces, 1), sums=sums, base=base, scale=scale, weight=norm,
            pre=mixed[0], post=mixed[1], comb=mixed[2], x=x, codes=codes, exponents=exponents, iters=iters,
            hc_eps=hc_eps, eps=eps, t=t,
        )  # fmt: skip
        results.append((out, *mixed, x, codes, exponents))
    want = hyper.hc_boundary(*args)
    for a, b, limit in zip(results[0][:5], want, (1e-3, 1e-5, 1e-5, 1e-5, 5e-3), strict=False):
        assert relative(a, b) <= limit
    expected = formats.quant_fp8(results[0][4])
    assert same(results[0][5], expected[0]) and same(results[0][6], expected[1])
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@needs_tilelang
def test_programs_lower_for_sm_100() -> None:
    """One program a factory (sm_90 is emulated above). Compiling all is python -m deepinfer.ops.tilelang.compile."""
    from deepinfer.ops.tilelang import compile

    found = {variant.program: variant for variant in compile.variants() if 100 in variant.archs}
    for variant in found.values():
        assert "__global__" in compile.lower(variant, compile.target(10, 0))


@needs_tilelang
def test_programs_lower_for_ascend() -> None:
    from tilelang import tvm

    from deepinfer.ops.tilelang import compile

    for variant in compile.variants(("ascend",)):
        assert not variant.archs
        assert "__gm__" in compile.lower(variant, tvm.target.Target({"kind": "ascend"}))
