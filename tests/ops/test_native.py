"""The C++ CPU ops against their references, on the ops' own examples and on larger ones; bits that depend on nothing
else.

Tolerances: relative Frobenius error of float results; codes, records, ids and everything not listed are equal bit for
bit. The references sum in another order, so a bf16 result may differ by one rounding and an e4m3 code inside `experts`
by one step.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.ops import QUANTISED, formats, native, records, registry
from deepinfer.ops.common import fp4_weight, fp8_weight, randn

_LIBRARY = native.library()
if isinstance(_LIBRARY, str):
    pytest.skip(f"native CPU ops: {_LIBRARY}", allow_module_level=True)
if any(registry.OPS[name].chosen["cpu"] != "native" for name in native.OPS):
    pytest.skip("native CPU ops: DEEPINFER_OPS or the registry chose other providers", allow_module_level=True)

TOLERANCE = {
    "attention": 1e-3,
    "block_attention": 1e-3,
    "vision_attention": 1e-3,
    "pair_pool": 1e-3,
    "engram_gate": 1e-3,
    "rms_norm": 1e-3,
    "hc_mix": 1e-6,
    "linear_fp8": 1e-3,
    "linear_dequant": 1e-3,
    "linear": 1e-3,
    "router": 1e-6,
    "swiglu": 1e-3,
    "experts": 5e-3,
}
ROWS = (1, 2, 3, 8, 17, 64)
PAGE, RING, PAGES, WIDTH = 16, 150, 32, 15
Args = tuple[Any, ...]
REPO = Path(__file__).resolve().parents[2]


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- larger cases: `case(name, m)` gives arguments with m rows
# ----------------------------------------------------------


def _int(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _run(m: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """slots, positions, row ids and first positions of two requests, the second with positions from 0."""
    row = torch.arange(m, dtype=torch.int32)
    second = row >= max(1, m // 2)
    first = torch.where(second, 0, 131).int()
    pos = torch.where(second, row - max(1, m // 2), row + 131).int()
    return torch.where(second, 2, 1).int(), pos, row, first


def _tables(g: torch.Generator) -> Tensor:
    """Pages of slots 0..2; those of 1 and 2 are disjoint."""
    pages = torch.randperm(PAGES, generator=g)[: 2 * WIDTH].view(2, WIDTH)
    return torch.cat((pages[:1], pages)).int()


def _linear(g: torch.Generator, m: int) -> Iterator[tuple[str, Args]]:
    for k, n in ((1056, 200), (64, 1)):  # more than one cache block of K; N that is no multiple of a tile
        yield "linear", (randn(g, m, k), randn(g, n, k), None, True)
        yield "linear_fp8", (*formats.quant_fp8(randn(g, m, k)), *fp8_weight(g, (n // 32 + 1) * 32, k))
    yield "linear", (randn(g, m, 588), randn(g, 72, 588), randn(g, 72), False)  # K of a patch: no multiple of 32
    yield "linear", (torch.randn((m, 70), generator=g), torch.randn((33, 70), generator=g), None, False)
    yield "linear_dequant", (randn(g, m, 8 * 544), *fp8_weight(g, 8 * 48, 544), 8)
    yield "linear_dequant", (torch.randn((m, 2 * 64), generator=g), *fp8_weight(g, 2 * 96, 64), 2)
    yield "quant_fp8", (randn(g, m, 512),)
    yield "quant_fp8", (torch.randn((m, 64), generator=g) * 1e-5,)


def _moe(g: torch.Generator, m: int) -> Iterator[tuple[str, Args]]:
    e, h, i, k = 24, 544, 96, 6
    weights = (*fp4_weight(g, e, 2 * i, h), *fp4_weight(g, e, h, i))
    ids = torch.stack([torch.randperm(e, generator=g)[:k].sort().values for _ in range(m)]).int()
    yield "experts", (*formats.quant_fp8(randn(g, m, h)), ids, torch.rand((m, k), generator=g), *weights, 10.0)
    yield "experts", (torch.randn((m, h), generator=g), None, ids, torch.rand((m, k), generator=g), *weights, 1.5)
    bias = torch.randn((2, 384), generator=g) * 0.01
    image = torch.arange(m) % 3 == 1
    yield "router", (randn(g, m, 160), randn(g, 384, 160) * 0.2, *bias, image, 6, 1.5)
    yield "router", (torch.randn((m, 50), generator=g) * 30, randn(g, 5, 50), bias[0, :5], bias[1, :5], image, 2, 2.5)
    yield "swiglu", (randn(g, m, 2 * 100) * 8, 10.0)
    yield "swiglu_quant", (randn(g, m, 2 * 96) * 8, 10.0)
    yield "swiglu", (torch.randn((m, 2 * 48), generator=g) * 50, 7.0)


def _attention(g: torch.Generator, m: int) -> Iterator[tuple[str, Args]]:
    slots, pos, row, first = _run(m)
    for dim, heads, packed in ((512, 8, True), (64, 3, False)):
        dtype = torch.bfloat16 if packed else torch.float32
        new = records.pack_window(randn(g, m, dim, dtype=dtype))
        ring = records.pack_window(randn(g, 3, RING, dim, dtype=dtype))
        pool = records.pack_latent(randn(g, PAGES, PAGE // 2, dim, dtype=dtype))
        selected = torch.full((m, 40), -1, dtype=torch.int32)
        for i in range(m):
            n = min(40, (int(pos[i]) + 1) // 2)
            selected[i, :n] = torch.randperm((int(pos[i]) + 1) // 2, generator=g)[:n].sort().values.int()
        sink, q = torch.randn(heads, generator=g), randn(g, m, heads, dim, dtype=dtype)
        common = (q, new, ring, slots, pos, row, first, torch.where(slots == 1, 20, 0).int(), sink)
        yield "attention", (*common, pool, selected, _tables(g), dim**-0.5, 128, 2, PAGE)
        yield "attention", (*common, None, None, _tables(g), dim**-0.5, 5, 0, PAGE)
        size = 5 if m % 5 == 0 else 1
        b = m // size
        start = torch.randint(0, 400, (b,), generator=g).int()
        where = (torch.arange(b).int() % 3, start, (start - 60).clamp_min(0))
        yield "block_attention", (q, new, ring, *where, sink, dim**-0.5, 128)


def _vision(g: torch.Generator, m: int) -> Iterator[tuple[str, Args]]:
    for heads, d, dtype in ((3, 64, torch.bfloat16), (2, 20, torch.float32)):
        angle = torch.rand((m, d // 2), generator=g) * 6
        yield "vision_attention", (randn(g, m, 3 * heads * d, dtype=dtype), angle.cos(), angle.sin(), heads)


def _indexer(g: torch.Generator, m: int) -> Iterator[tuple[str, Args]]:
    slots, pos, _, _ = _run(m)
    for dim, heads, packed in ((128, 5, True), (32, 16, True), (32, 3, False)):
        dtype = torch.bfloat16 if packed else torch.float32
        rec = records.pack_index(randn(g, PAGES, PAGE, dim, dtype=dtype))
        pool = rec
        if packed:
            pool = torch.cat((rec[..., : dim // 2].flatten(1), rec[..., dim // 2 :].flatten(1)), dim=1)
        q = records.pack_index(randn(g, m, heads, dim, dtype=dtype))
        common = (q, torch.randn((m, heads), generator=g), pool, _tables(g), slots, pos + 1, 1, PAGE, 20)
        yield "index_topk", common
        yield "index_topk_publish", (*common, 9, 4)
        yield "index_topk_publish", (*common[:-1], 192, 7, 5)  # scores for the blocks only
        blocks = torch.stack([torch.randperm(50, generator=g)[:9].sort().values for _ in range(m)]).int()
        blocks[:, -1] = -1
        yield "index_topk_blocks", (*common, blocks, 4)


def _rows(g: torch.Generator, m: int) -> Iterator[tuple[str, Args]]:
    for h, dtype in ((1280, torch.bfloat16), (72, torch.float32)):
        x, streams = randn(g, m, h, dtype=dtype), randn(g, m, 4, h, dtype=dtype)
        yield "rms_norm", (x, randn(g, h), 1e-20)
        mix = (torch.randn((24, 4 * h), generator=g) * 0.05, torch.randn(24, generator=g), torch.rand(3, generator=g))
        yield "hc_mix", (streams, *mix, 20, 1e-6, 1e-20)
        yield "hc_collapse", (streams, torch.rand((m, 4), generator=g))
        post, comb = torch.rand((m, 4), generator=g), torch.rand((m, 4, 4), generator=g)
        yield "hc_write", (x.float(), streams, post, comb)
        if dtype is torch.bfloat16 and h % 32 == 0:
            pre = torch.rand((m, 4), generator=g)
            yield "hc_boundary", (x, streams, post, comb, pre, *mix, randn(g, h), 20, 1e-6, 1e-20)
            wide = randn(g, m, 3 * h)
            yield "rms_norm_quant", (wide[:, h : 2 * h], randn(g, h), 1e-20)
            turn = torch.rand((m, 16), generator=g) * 6
            yield "norm_rope_pack_window", (wide[:, 2 * h :], randn(g, h), turn.cos(), turn.sin(), 1e-20)
        gate = (randn(g, m, 5 * h, dtype=dtype), randn(g, 4, h), randn(g, 4, h), torch.arange(m) % 4 == 1, 1e-20)
        yield "engram_gate", (streams, *gate)
        angle = torch.rand((m, 32), generator=g) * 6
        yield "rope", (randn(g, m, 3, h, dtype=dtype), angle.cos(), angle.sin(), False)
        yield "rope", (x, angle.cos(), angle.sin(), True)


def _cache(g: torch.Generator, m: int) -> Iterator[tuple[str, Args]]:
    slots, pos, _, _ = _run(m)
    start = torch.where(slots == 1, 0, max(1, m // 2)).int()
    last = torch.where(slots == 1, int(pos[slots == 1].max()), int(pos.masked_fill(slots == 1, 0).max())).int()
    for pack in ("pack_window", "pack_latent", "pack_index"):
        yield pack, (randn(g, m, 512) * 3,)
        yield pack, (torch.randn((m, 40), generator=g),)
    table = _tables(g)
    for dim in (64, 512):
        window, latent = records.pack_window(randn(g, m, dim)), records.pack_latent(randn(g, m, dim))
        index = records.pack_index(randn(g, m, dim))
        yield "ring_write", (torch.zeros((3, 20, window.shape[1]), dtype=torch.uint8), window, slots, pos, last)
        for ratio in (1, 2):
            entries = PAGE // ratio
            pool = torch.zeros((PAGES, entries, latent.shape[1]), dtype=torch.uint8)
            keys = torch.zeros((PAGES, entries * index.shape[1]), dtype=torch.uint8)
            yield "page_write", (pool, latent, table, slots, pos, ratio, PAGE)
            yield "index_page_write", (keys, index, table, slots, pos, ratio, PAGE)
            exact = torch.zeros((PAGES, entries, dim))
            yield "index_page_write", (exact, torch.randn((m, dim), generator=g), table, slots, pos, ratio, PAGE)
        pair = (
            torch.randn((m, 2 * dim), generator=g) * 3,
            torch.randn((3, 8, 2 * dim), generator=g),
            slots,
            pos,
            start,
        )
        yield "pair_pool", (*pair, dim == 64)
    ids = torch.randint(0, 500, (m,), generator=g, dtype=torch.int32)
    past = torch.randint(-1, 500, (3, 8), generator=g, dtype=torch.int32)
    maps = torch.randperm(500, generator=g).int()
    yield "engram_lookback", (ids, pos, slots, start, ids % 5 == 0, maps, past, 2, 4)
    primes = torch.tensor([16000057 + 2 * i for i in range(24)])
    mult = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
    tokens = torch.randint(0, 99092, (m, 4), generator=g, dtype=torch.int32)
    yield "engram_rows", (tokens, mult, primes, primes.cumsum(0) - primes)
    table8 = formats.quant_fp8(randn(g, 300, 256))
    for wide in (False, True):
        yield "engram_gather", (torch.randint(0, 300, (m, 24), generator=g), *table8, wide)


FAMILIES = (_linear, _moe, _attention, _vision, _indexer, _rows, _cache)


@functools.cache
def everything(m: int, seed: int) -> list[tuple[str, Args]]:
    return [case for family in FAMILIES for case in family(gen(seed), m)]


def larger(name: str, m: int, seed: int = 0) -> list[Args]:
    """Shared between tests: copy before writing."""
    return [args for op, args in everything(m, seed) if op == name]


# ---- comparing
# ------------------------------------------------------------------------------------------------------------


def copies(args: Args) -> Args:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in args)


def outputs(name: str, fn: Callable[..., Any], args: Args) -> list[Tensor]:
    """Results, or the written argument of an op that returns nothing."""
    own = copies(args)
    out = fn(*own)
    return [own[0]] if out is None else list(out) if isinstance(out, tuple) else [out]


def native_outputs(name: str, args: Args) -> list[Tensor]:
    return outputs(name, registry.OPS[name].overload, args)


def raw(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


# Fused ops against the native ops that they replace, bit for bit: a norm's sum has another order than the reference's,
# and a code next to a rounding boundary shows it.
_op = QUANTISED
CHAINS: dict[str, Callable[..., Any]] = {
    "rms_norm_quant": lambda x, w, eps: _op.quant_fp8(_op.rms_norm(x, w, eps)),
    "swiglu_quant": lambda x, limit: _op.quant_fp8(_op.swiglu(x, limit)),
    "norm_rope_pack_window": lambda x, w, c, s, eps: _op.pack_window(_op.rope(_op.rms_norm(x, w, eps), c, s, False)),
}


def _boundary(y: Tensor, r: Tensor, post: Tensor, comb: Tensor, pre: Tensor, *rest: Any) -> Any:
    fn, base, scale, norm, iters, hc_eps, eps = rest
    streams = _op.hc_write(y, r, post, comb)
    x = _op.rms_norm(_op.hc_collapse(streams, pre), norm, eps)
    return (streams, *_op.hc_mix(streams, fn, base, scale, iters, hc_eps, eps), x, *_op.quant_fp8(x))


CHAINS["hc_boundary"] = _boundary


def assert_close(name: str, args: Args, got: list[Tensor]) -> None:
    for want, have in zip(outputs(name, CHAINS.get(name, registry.OPS[name].reference), args), got, strict=True):
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
        assert have.is_contiguous()
        limit = TOLERANCE.get(name, 0.0) if want.dtype in (torch.bfloat16, torch.float32) else 0.0
        if limit:
            error = (have.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
            assert error <= limit, f"{name}: {error:.2e} > {limit}"
        else:
            assert torch.equal(raw(have), raw(want)), f"{name}: {int((raw(have) != raw(want)).sum())} bytes differ"


ALL = pytest.mark.parametrize("name", sorted(native.OPS))


def test_the_library_has_every_op() -> None:
    assert set(native.OPS) == {
        name for name, op in registry.OPS.items() if op.family not in ("sampling", "acceptance")
    } - {
        "kv_global_write",  # fused for GPUs; on a CPU the passes that would use them are off
        "index_key_write",
    }
    assert native.isa() in ("avx512", "avx2", "generic")


@ALL
def test_examples(name: str) -> None:
    for seed in (1, 2):
        for args in registry.OPS[name].inputs(gen(seed)):
            assert_close(name, args, native_outputs(name, args))


@ALL
def test_larger(name: str) -> None:
    for m in (1, 5, 40):
        cases = larger(name, m)
        assert cases, f"no larger case for {name}"
        for args in cases:
            assert_close(name, args, native_outputs(name, args))


# ---- bits
# -----------------------------------------------------------------------------------------------------------------

NOT_BY_ROW = {"vision_attention", "block_attention", "ring_write", "page_write", "index_page_write"}
WHOLE = {"attention": (1, 2, 8, 9, 11), "pair_pool": (1,)}  # arguments that are not sliced with the rows


def first_rows(name: str, args: Args, m: int, rows: int) -> Args:
    keep = WHOLE.get(name, ())
    return tuple(
        a[:rows] if isinstance(a, Tensor) and i not in keep and a.dim() and a.shape[0] == m else a
        for i, a in enumerate(args)
    )


@pytest.mark.parametrize("name", sorted(set(native.OPS) - NOT_BY_ROW))
def test_a_row_does_not_depend_on_the_batch(name: str) -> None:
    m = max(ROWS)
    for args in larger(name, m):
        full = native_outputs(name, args)
        for rows in ROWS:
            part = native_outputs(name, first_rows(name, args, m, rows))
            assert all(torch.equal(raw(p), raw(f[:rows])) for p, f in zip(part, full, strict=True)), (name, rows)


@pytest.mark.parametrize(
    "name", ["attention", "linear_fp8", "linear", "experts", "rms_norm", "hc_mix", "index_topk", "router"]
)
def test_the_last_row_alone(name: str) -> None:
    """Another row than the first, and one that sits in the padded part of a tile."""
    m = 17
    for args in larger(name, m):
        keep = WHOLE.get(name, ())
        alone = tuple(
            a[-1:] if isinstance(a, Tensor) and i not in keep and a.dim() and a.shape[0] == m else a
            for i, a in enumerate(args)
        )
        got, full = native_outputs(name, alone), native_outputs(name, args)
        assert all(torch.equal(raw(g), raw(f[-1:])) for g, f in zip(got, full, strict=True))


def test_draft_blocks_do_not_depend_on_each_other() -> None:
    for args in larger("block_attention", 40):
        q, block, ring, slots, start, floor, *rest = args
        full = native_outputs("block_attention", args)[0]
        one = (q[5:10], block[5:10], ring, slots[1:2], start[1:2], floor[1:2], *rest)
        assert torch.equal(raw(native_outputs("block_attention", one)[0]), raw(full[5:10]))


@ALL
def test_threads_do_not_change_bits(name: str) -> None:
    before = torch.get_num_threads()
    try:
        for args in larger(name, 150):
            torch.set_num_threads(1)
            one = native_outputs(name, args)
            torch.set_num_threads(2)
            assert all(torch.equal(raw(a), raw(b)) for a, b in zip(one, native_outputs(name, args), strict=True)), name
    finally:
        torch.set_num_threads(before)


def digests() -> dict[str, str]:
    out = {}
    for name in native.OPS:
        h = hashlib.blake2b()
        for args in larger(name, 9, seed=3):
            for t in native_outputs(name, args):
                h.update(raw(t).numpy().tobytes())
        out[name] = h.hexdigest()
    return out


def test_instruction_sets_agree_bit_for_bit() -> None:
    other = "avx2" if native.isa() == "avx512" else "avx512"
    if _LIBRARY.deepinfer_use(other.encode()):
        pytest.skip(f"this CPU has {native.isa()} only")
    _LIBRARY.deepinfer_use(b"avx512")
    script = f"""
import ctypes, importlib.util, torch
assert ctypes.CDLL({str(native.LIBRARY)!r}).deepinfer_use({other!r}.encode()) == 0
spec = importlib.util.spec_from_file_location("t", {__file__!r})
t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t)
assert t.native.isa() == {other!r}
print(t.digests())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert eval(done.stdout) == digests()


# ---- inputs
# ---------------------------------------------------------------------------------------------------------------


def strided(t: Tensor) -> Tensor:
    """The same values as a slice of something wider (rows) or every second element (vectors)."""
    if t.dim() < 2 or t.shape[-1] < 2:
        return torch.stack((t, t), dim=-1)[..., 0] if t.dim() else t
    wide = torch.cat((t.view(torch.uint8), t.view(torch.uint8)), dim=-1).view(t.dtype)
    return wide[..., : t.shape[-1]]


@ALL
def test_strided_inputs(name: str) -> None:
    for args in larger(name, 7):
        want = native_outputs(name, args)
        writes = registry.OPS[name].overload._schema.is_mutable
        odd = [strided(a.clone()) if isinstance(a, Tensor) else a for a in args]
        out = registry.OPS[name].overload(*odd)
        got = [odd[0]] if writes else list(out) if isinstance(out, tuple) else [out]
        assert all(torch.equal(raw(w), raw(g)) for w, g in zip(want, got, strict=True)), name
    column = randn(gen(0), 64, 40).t()  # rows are columns of memory
    weight = randn(gen(1), 5, 64)
    both = [registry.OPS["linear"].overload(x, weight, None, True) for x in (column, column.contiguous())]
    assert torch.equal(*both)


def test_every_bf16_is_quantised_like_the_reference() -> None:
    finite = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = finite[torch.isfinite(finite)]
    finite = finite[: finite.numel() // 32 * 32]
    g = gen(5)
    for x in (finite.view(-1, 32), finite[torch.randperm(finite.numel(), generator=g)].view(-1, 64)):
        for name in ("quant_fp8", "pack_window", "pack_latent", "pack_index"):
            assert_close(name, (x.contiguous(),), native_outputs(name, (x.contiguous(),)))
    fine = (torch.randn((200, 64), generator=g) * 2 ** torch.randint(-20, 20, (200, 1), generator=g)).bfloat16()
    halves = (torch.randint(-20, 21, (100, 64), generator=g) * 0.25).bfloat16()  # ties of every format
    for x in (fine, halves):
        for name in ("quant_fp8", "pack_window", "pack_latent", "pack_index"):
            assert_close(name, (x,), native_outputs(name, (x,)))


def test_nan_in_unused_memory_stays_there() -> None:
    for args in larger("attention", 6):
        q, _new, ring, slots, pos, _rows, first, floor, _sink, pool, selected, table, _scale, window, ratio, _page = (
            args
        )
        want = native_outputs("attention", args)[0]
        bad_ring, used = torch.full_like(ring, 255 if ring.dtype is torch.uint8 else float("nan")), set()
        for i in range(q.shape[0]):
            low = max(int(floor[i]), int(pos[i]) - window + 1, 0)
            used |= {(int(slots[i]), p % RING) for p in range(low, int(first[i]))}
        for s, r in used:
            bad_ring[s, r] = ring[s, r]
        poisoned = list(args)
        poisoned[2] = bad_ring
        if pool is not None:
            bad_pool = torch.full_like(pool, 255 if pool.dtype is torch.uint8 else float("nan"))
            for i in range(q.shape[0]):
                for e in selected[i][selected[i] >= 0].tolist():
                    page, at = int(table[slots[i], e * ratio // PAGE]), e % (PAGE // ratio)
                    bad_pool[page, at] = pool[page, at]
            poisoned[9] = bad_pool
        assert torch.equal(raw(native_outputs("attention", tuple(poisoned))[0]), raw(want))


def test_no_visible_key_gives_zero() -> None:
    args = list(larger("attention", 3)[0])
    args[7] = args[4] + 1  # floor above the query
    args[10] = torch.full_like(args[10], -1)
    assert not native_outputs("attention", tuple(args))[0].any()


def test_equal_scores_keep_the_lowest_entries() -> None:
    q, w, pool, table, slots, visible, ratio, page, _ = larger("index_topk", 4)[0]
    got = native_outputs("index_topk", (q, w * 0, pool, table, slots, visible, ratio, page, 7))[0]  # scores 0 and -0
    for row, n in zip(got.tolist(), visible.tolist(), strict=True):
        assert row == [*range(min(7, n)), *[-1] * (7 - min(7, n))]


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("attention", 3, 9),
        ("attention", 5, 99),
        ("attention", 11, 99),
        ("block_attention", 3, 9),
        ("index_topk", 3, 99),
        ("index_topk", 4, 9),
        ("index_topk_blocks", 3, 99),
        ("ring_write", 2, 3),
        ("page_write", 2, PAGES),
        ("index_page_write", 3, -1),
        ("pair_pool", 2, 3),
        ("experts", 2, 24),
        ("engram_gather", 0, 300),
        ("engram_lookback", 0, 500),
    ],
)
def test_a_bad_index_raises_and_writes_nothing(name: str, argument: int, value: int) -> None:
    args = list(copies(larger(name, 8)[0]))
    args[argument] = torch.full_like(args[argument], value)
    before = args[0].clone()
    with pytest.raises(RuntimeError, match=r"out of range|below|outside"):
        registry.OPS[name].overload(*args)
    assert torch.equal(raw(before), raw(args[0]))


def test_a_wrong_shape_or_dtype_says_what_is_wanted() -> None:
    x, s, w, ws = larger("linear_fp8", 2)[0]
    with pytest.raises(RuntimeError, match="linear_fp8: x must be e4m3"):
        registry.OPS["linear_fp8"].overload(x[:, :32], s, w, ws)
    with pytest.raises(RuntimeError, match=r"rms_norm: x \[..., H\] and weight"):
        registry.OPS["rms_norm"].overload(torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8), 1e-6)


# ---- loading and building
# ---------------------------------------------------------------------------------------------------


def test_reasons_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = native.library.__wrapped__
    monkeypatch.setenv("DEEPINFER_NATIVE", "0")
    assert load() == "DEEPINFER_NATIVE=0"
    monkeypatch.delenv("DEEPINFER_NATIVE")
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "absent.so")
    assert "python -m deepinfer.ops.native.build" in load()
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "broken.so")
    assert load().startswith("cannot be loaded")


def test_a_library_older_than_an_op_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native._why_not("rope") is None
    monkeypatch.setattr(native, "_signature", lambda op: "TTT")
    assert "older than the op" in native._why_not("rope")
    assert isinstance(native.library(), ctypes.CDLL)


def test_build_is_optional_and_only_when_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepinfer.ops.native import build

    monkeypatch.setattr(build, "LIBRARY", tmp_path / "x.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.build() is None
    assert "no C++ compiler" in capsys.readouterr().err
    monkeypatch.delenv("CXX")
    if build.find_compiler() is None or not build.SOURCES.is_dir():
        return
    import importlib.metadata

    key = build.stamp(build.find_compiler(), importlib.metadata.version("torch"))
    (tmp_path / "x.so").write_bytes(b"DEEPINFER_STAMP=" + key.encode())
    monkeypatch.setattr(build, "_compile", lambda *a: pytest.fail("a current library was built again"))
    assert build.build() == tmp_path / "x.so"


def test_code_that_runs_on_every_cpu_has_no_wide_registers() -> None:
    """Loading the library on a CPU without AVX-512 must not run it: static initialisers and shared std:: templates."""
    objdump = shutil.which("objdump")
    if objdump is None or native.isa() == "generic":
        pytest.skip("needs objdump and an x86-64 library")
    dump = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", native.LIBRARY], capture_output=True, text=True, check=True
    )
    functions = re.split(r"\n(?=[0-9a-f]+ <)", dump.stdout)
    wide = [f.split(">", 1)[0] for f in functions if re.search(r"%zmm|%k[1-7]|%[xy]mm(1[6-9]|2\d|3[01])", f)]
    assert wide and all("avx512" in name for name in wide)
