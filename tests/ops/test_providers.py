"""Library adapters without the libraries: doubles that enforce the recorded schema, record the call, and compute.

A double is defined from the very text that the adapter's file records, so a misspelt argument, a wrong order or a wrong
type fails here. It decodes the layouts that the library reads and computes what it documents; the adapter's result must
then equal the reference of the op. It shows nothing about the library itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops import formats, providers, registry
from deepinfer.ops.common import fp4_weight, fp8_weight, randn
from deepinfer.ops.providers import deep_gemm, deep_select, pytorch, tile_kernels, torch_npu

BINDINGS = providers.bindings()
CALLS: list[tuple[str, tuple[Any, ...]]] = []


def compare(op: str, run: Callable[..., Any], args: tuple[Any, ...], limit: float | None = None) -> None:
    got, want = run(*args), registry.OPS[op].reference(*args)
    assert got.shape == want.shape and got.dtype == want.dtype
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)) if got.numel() else 0
    assert error <= (registry.OPS[op].tolerance if limit is None else limit)


# ----------------------------------------------------------------------------------------------------- the table


def test_every_binding_is_complete() -> None:
    seen = set()
    for b in BINDINGS:
        assert b.op in registry.OPS, b
        assert (b.op, b.library, b.device) not in seen
        seen.add((b.op, b.library, b.device))
        assert (b.run is None) == bool(b.always), f"{b.library} {b.op}: an adapter, or a reason against it everywhere"
        assert not (set(b.archs) & set(b.refused))
        if b.run is not None:
            assert b.recorded or b.library == "torch", f"{b.library} {b.op} records no schema"
    assert {"deep_ep", "deep_gemm", "deep_select", "torch", "torch_npu"} <= {b.library for b in BINDINGS}


def test_nothing_that_never_ran_is_a_default() -> None:
    for b in BINDINGS:
        assert not b.prefer or b.measured, f"{b.library} {b.op}"
        (provider,) = [p for p in registry.OPS[b.op].providers if (p.name, p.device) == (b.library, b.device)]
        if not b.measured:
            assert provider.only_if_asked == registry.NOT_RUN
            assert set(provider.states.values()) <= {registry.NOT_RUN}


def test_no_library_is_imported() -> None:
    """Importing deepinfer.ops and printing the table looks for none of them on a machine without their device."""
    import subprocess

    names = "('deep_gemm', 'deep_select', 'deep_ep', 'flash_mla', 'tile_kernels', 'tilelang', 'torch_npu')"
    code = "import sys; from deepinfer.ops import registry; registry.table(); "
    code += f"print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_refusals_name_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(op: str, library: str, arch: tuple[int, int] | None) -> str | None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: arch is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: arch)
        (found,) = [b for b in BINDINGS if (b.op, b.library, b.device) == (op, library, "cuda")]
        return providers.reason_against(found)

    monkeypatch.delenv("DEEPINFER_BATCH_INVARIANT", raising=False)
    assert reason("linear_fp8", "deep_gemm", None) == "no CUDA device"
    assert reason("linear_fp8", "deep_gemm", (9, 0)) == "on SM90 it takes neither 32x32 scales nor FP4"
    assert "sm_100" in str(reason("experts", "deep_gemm", (12, 0)))
    assert "deep_gemm" in str(reason("experts", "deep_gemm", (10, 0)))  # not installed here
    assert reason("linear", "torch", (9, 0)) is None
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    assert "BATCH_INVARIANT" in str(reason("linear", "torch", (9, 0)))
    monkeypatch.delenv("DEEPINFER_BATCH_INVARIANT")
    assert "ranks" in str(reason("experts", "deep_ep", (9, 0)))


def test_a_schema_must_accept_the_recorded_call() -> None:
    parse = torch._C.parse_schema
    wanted = parse("x::f(Tensor a, int? b, str c) -> Tensor")
    assert providers.mismatch(parse("x::f(Tensor a, int? b, str c) -> Tensor"), wanted) is None
    assert providers.mismatch(parse("x::f(Tensor a, int? b, str c, bool d=False) -> Tensor"), wanted) is None
    for other, part in (
        ("x::f(Tensor a, int? b, str c, bool d) -> Tensor", "also wants d"),
        ("x::f(Tensor a, int b, str c) -> Tensor", "argument 1 is int b"),
        ("x::f(Tensor a, str c, int? b) -> Tensor", "argument 1"),
        ("x::f(Tensor a, int? b) -> Tensor", "no argument c"),
        ("x::f(Tensor a, int? b, str c) -> ()", "returns"),
    ):
        assert part in str(providers.mismatch(parse(other), wanted))


def test_a_function_must_accept_the_recorded_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_library")
    monkeypatch.setitem(sys.modules, "a_library", module)
    monkeypatch.setattr(providers, "_imported", lambda name: name == "a_library")
    recorded = "f(a, b, c=None)"
    assert providers.lacks_functions(recorded, "a_library") == "a_library has no f"
    for f, problem in (
        (lambda a, b, c=None, d=1: 0, None),
        (lambda a, b: 0, "no argument c"),
        (lambda a, b, c, d: 0, "also wants d"),
    ):
        module.f = f  # type: ignore[attr-defined]
        found = providers.lacks_functions(recorded, "a_library")
        assert found is None if problem is None else problem in str(found)
    assert "not installed" in str(providers.lacks_functions(recorded, "no_such_library"))


# ------------------------------------------------------------------------------------------------------ DeepGEMM


def unpacked(sf: Tensor, k: int) -> Tensor:
    """What the library reads from packed scales int32 [..., M, K/128]: E8M0 [..., M, K/32]. Layout checked."""
    m = sf.shape[-2]
    assert sf.dtype is torch.int32 and sf.stride(-2) == 1 and sf.stride(-1) == -(-m // 4) * 4
    return torch.stack([(sf >> (8 * i)) & 255 for i in range(4)], dim=-1).flatten(-2)[..., : k // 32].to(torch.uint8)


def gemm(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, d: Tensor, *rest: Any) -> None:
    CALLS.append(("gemm", rest))
    k = a.shape[1]
    left, right = formats.dequant_fp8(a, unpacked(a_sf, k)), formats.dequant_fp8(b, unpacked(b_sf, k))
    d.copy_(left @ right.t())


def grouped(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, d: Tensor, layout: Tensor, *rest: Any) -> None:
    CALLS.append(("grouped", rest))
    k = a.shape[1]
    assert b.dtype is torch.int8 and layout.dtype is torch.int32 and layout.shape == (a.shape[0],)
    assert a.shape[0] % 128 == 0
    left = formats.dequant_fp8(a, unpacked(a_sf, k))
    scales = unpacked(b_sf, k)
    for first in range(0, a.shape[0], 128):  # a block of 128 rows belongs to one expert, the rest of it is padding
        ids = set(layout[first : first + 128].tolist()) - {-1}
        assert len(ids) <= 1
        for e in ids:
            rows = first + (layout[first : first + 128] == e).nonzero().squeeze(1)
            d[rows] = (left[rows] @ formats.dequant_fp4(b[e].view(torch.uint8), scales[e]).t()).bfloat16()


def bf16_gemm(a: Tensor, b: Tensor, d: Tensor, *rest: Any) -> None:
    CALLS.append(("bf16_gemm", rest))
    d.copy_(a.float() @ b.float().t())


@pytest.fixture
def deep_gemm_ops() -> Iterator[None]:
    """torch.ops.deep_gemm.* as recorded, on the CPU."""
    lib = torch.library.Library("deep_gemm", "DEF")
    for schema, double in ((deep_gemm.GEMM, gemm), (deep_gemm.GROUPED, grouped), (deep_gemm.BF16_GEMM, bf16_gemm)):
        name = schema.split("(")[0].split("::")[1]
        lib.define(schema.split("::", 1)[1])
        lib.impl(name, double, "CPU")
    deep_gemm.build.cache_clear()
    yield
    lib._destroy()
    deep_gemm.build.cache_clear()


@pytest.fixture
def deep_gemm_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tvm-ffi build: Python functions that take pairs (data, scales)."""
    module = ModuleType("deep_gemm")
    module.fp8_fp4_gemm_nt = (  # type: ignore[attr-defined]
        lambda a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="", disable_ue8m0_cast=False: (
            gemm(*a, *b, d, recipe_a, recipe_b)
        )
    )
    module.m_grouped_fp8_fp4_gemm_nt_contiguous = (  # type: ignore[attr-defined]
        lambda a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk": grouped(
            *a, *b, d, grouped_layout, recipe_a, recipe_b
        )
    )
    module.bf16_gemm_nt = lambda a, b, d, c=None, compiled_dims="": bf16_gemm(a, b, d)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr(providers, "_imported", lambda name: name == "deep_gemm")
    deep_gemm.build.cache_clear()
    yield
    deep_gemm.build.cache_clear()


def gemm_cases(g: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for m in (0, 1, 2, 7, 33):
        yield "linear_fp8", (*formats.quant_fp8(randn(g, m, 384)), *fp8_weight(g, 160, 384))
        yield "linear", (randn(g, m, 96), randn(g, 40, 96), None, True)
        yield "linear", (randn(g, m, 96), randn(g, 40, 96), None, False)
    weights = (*fp4_weight(g, 9, 2 * 128, 256), *fp4_weight(g, 9, 256, 128))
    for t in (0, 1, 2, 7, 33):
        ids = torch.stack([torch.randperm(9, generator=g)[:3].sort().values for _ in range(t)] or [torch.zeros(3)])
        routed = (ids[:t].int(), torch.rand((t, 3), generator=g))
        yield "experts", (*formats.quant_fp8(randn(g, t, 256)), *routed, *weights, 10.0)


@pytest.mark.parametrize("build", ["torch.ops", "python"])
def test_deep_gemm(build: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("deep_gemm_ops" if build == "torch.ops" else "deep_gemm_module")
    CALLS.clear()
    for op, args in gemm_cases(torch.Generator().manual_seed(3)):
        if op == "experts":

            def run(*a: Any) -> Tensor:
                return deep_gemm.experts(*a[:4], *deep_gemm.prepare_experts(*a[4:8]), a[8])

            compare(op, run, args)
        else:
            compare(op, getattr(deep_gemm, op), args)
    assert {name for name, _ in CALLS} == {"gemm", "grouped", "bf16_gemm"}
    found = deep_gemm.build(deep_gemm.GEMM, deep_gemm.GEMM_PYTHON)
    assert found == build
    for name, rest in CALLS:
        if name != "bf16_gemm":
            assert [list(r) for r in rest if isinstance(r, (list, tuple))] == [[1, 32], [1, 32]]


def test_deep_gemm_skips_experts_of_other_ranks(deep_gemm_ops: None) -> None:
    g = torch.Generator().manual_seed(4)
    stored = (*fp4_weight(g, 5, 2 * 128, 128), *fp4_weight(g, 5, 128, 128))
    prepared = deep_gemm.prepare_experts(*stored)
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(prepared, stored, strict=True))
    x, scale = formats.quant_fp8(randn(g, 4, 128))
    ids = torch.tensor([[0, 3], [-1, 2], [1, 7], [-1, -1]], dtype=torch.int32)
    weights = torch.rand((4, 2), generator=g)
    got = deep_gemm.experts(x, scale, ids, weights, *prepared, 10.0)
    here = torch.where((ids >= 0) & (ids < 5), weights, 0.0)
    want = registry.OPS["experts"].reference(x, scale, ids.clamp(0, 4), here, *stored, 10.0)
    assert float((got - want).norm() / want.norm()) < 5e-3 and not got[3].any()


# ---------------------------------------------------------------------------------------------- torch, DeepSelect


def test_torch_on_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    mm = torch.mm

    def with_dtype(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:  # CUDA only
        return mm(a, b) if out_dtype is None else mm(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "mm", with_dtype)
    for op in ("linear", "vision_attention", "rms_norm"):
        run = getattr(pytorch, op)
        for args in registry.OPS[op].inputs(torch.Generator().manual_seed(5)):
            compare(op, run, args, limit=5e-3)


def test_torch_scaled_mm_gets_swizzled_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    def scales(swizzled: Tensor, rows: int, k: int) -> Tensor:
        flat = swizzled.view(torch.uint8)
        width = -(-k // 128)
        assert flat.numel() == -(-rows // 128) * 128 * width * 4
        out = torch.empty((rows, k // 32), dtype=torch.uint8)
        for r in range(rows):
            for c in range(k // 32):
                tile = (r // 128 * width + c // 4) * 512
                out[r, c] = flat[tile + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]
        return out

    def double(
        mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, scale_recipe_a: Any, scale_b: Tensor, scale_recipe_b: Any,
        swizzle_a: Any = None, swizzle_b: Any = None, bias: Any = None, output_dtype: Any = torch.bfloat16,
        contraction_dim: Any = (), use_fast_accum: bool = False,
    ) -> Tensor:  # fmt: skip
        assert scale_recipe_a is scale_recipe_b is F.ScalingType.BlockWise1x32
        assert swizzle_a is swizzle_b is F.SwizzleType.SWIZZLE_32_4_4
        assert scale_a.dtype is scale_b.dtype is torch.float8_e8m0fnu and mat_b.stride(0) == 1
        (m, k), n = mat_a.shape, mat_b.shape[1]
        a = formats.dequant_fp8(mat_a, scales(scale_a, m, k))
        return (a @ formats.dequant_fp8(mat_b.t(), scales(scale_b, n, k)).t()).to(output_dtype)

    if not hasattr(F, "scaled_mm"):
        pytest.skip("this torch has no scaled_mm")
    (binding,) = [b for b in BINDINGS if (b.op, b.library) == ("linear_fp8", "torch")]
    assert binding.why_not() is None  # the recorded signature is torch's own
    monkeypatch.setattr(F, "scaled_mm", double)
    g = torch.Generator().manual_seed(6)
    for m, n, k in ((1, 64, 128), (7, 160, 96), (130, 32, 256)):
        compare("linear_fp8", pytorch.linear_fp8, (*formats.quant_fp8(randn(g, m, k)), *fp8_weight(g, n, k)))


@pytest.mark.parametrize("fills_first", [False, True])
def test_deep_select(monkeypatch: pytest.MonkeyPatch, fills_first: bool) -> None:
    def topk(
        input: Tensor, topk: int, sorted: bool = False, begin: Any = None, end: Any = None,
        indices_type: Any = torch.int64, sorted_index: bool = False, hint: Any = None, output_idx: Any = None,
        output_idx_offset: Any = None, idx_oob_fill_value: int = 2147483647,
        value_oob_fill_value: float = float("-inf"), return_value: bool = True, abort_when_nan_found: bool = True,
    ) -> tuple[None, Tensor]:  # fmt: skip
        assert input.stride(1) == 1 and input.stride(0) * 4 % 256 == 0 and end.dtype is indices_type is torch.int32
        assert sorted_index and not return_value and not abort_when_nan_found
        out = torch.full((input.shape[0], topk), idx_oob_fill_value, dtype=indices_type)
        for i, n in enumerate(end.tolist()):
            best = input[i, :n].topk(min(topk, n)).indices.sort().values.int()
            at = topk - len(best) if fills_first else 0
            out[i, at : at + len(best)] = best
        return None, out

    module = ModuleType("deep_select")
    module.topk, module.get_stride_requirement = topk, lambda: (256, 32)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_select", module)
    monkeypatch.setattr(providers, "_imported", lambda name: name == "deep_select")
    assert providers.lacks_functions(deep_select.TOPK, "deep_select") is None
    scores = torch.randn((5, 128), generator=torch.Generator().manual_seed(7))[:, :100]
    visible = torch.tensor([100, 37, 6, 1, 0], dtype=torch.int32)
    got = deep_select.select(scores, visible, 6)
    for i, n in enumerate(visible.tolist()):
        best = sorted(scores[i, :n].topk(min(6, n)).indices.tolist())
        assert got[i].tolist() == best + [-1] * (6 - len(best))


def test_deep_select_takes_our_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """index_topk around it: the double of our score kernel has its signature and fills rows as wide as the table."""
    indexer = pytest.importorskip("deepinfer.ops.triton.indexer", reason="needs triton", exc_type=ImportError)
    import inspect

    from deepinfer.ops import indexer as reference

    seen = SimpleNamespace(width=0)

    def logits(
        q: Tensor, weights: Tensor, pool: Tensor, table: Tensor, slots: Tensor, visible: Tensor, entries: int,
        out: Tensor, free: int,
    ) -> None:  # fmt: skip
        seen.width = out.shape[1]
        dim, ratio = q.shape[2] * 32 // 17, 2
        for i in range(q.shape[0]):
            keys = reference._keys(pool, table[slots[i]], out.shape[1], ratio, entries * ratio, dim)
            out[i] = reference._scores(reference.records.unpack_index(q[i : i + 1], dim), weights[i : i + 1], keys)[0]

    names = list(inspect.signature(indexer.logits).parameters)
    assert names[:9] == ["q", "weights", "pool", "page_table", "slots", "visible", "entries", "out", "free"]
    monkeypatch.setattr(indexer, "logits", logits)
    module = ModuleType("deep_select")
    module.get_stride_requirement = lambda: (256, 32)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_select", module)

    def select(scores: Tensor, visible: Tensor, k: int) -> Tensor:
        assert scores.stride(0) * 4 % 256 == 0
        hidden = torch.arange(scores.shape[1]) >= visible.unsqueeze(1)
        return reference._top(scores.masked_fill(hidden, float("-inf")), k)

    monkeypatch.setattr(deep_select, "select", select)
    for args in registry.OPS["index_topk"].inputs(torch.Generator().manual_seed(8)):
        if args[0].dtype is torch.uint8:
            got, want = deep_select.index_topk(*args), reference.index_topk(*args)
            assert torch.equal(got, want)


# -------------------------------------------------------------------------------------------------- TileKernels


def double_of_tile_kernels() -> dict[str, ModuleType]:
    """Parts of the library by name, computing what its own torch references compute."""

    def mhc_post_fwd(
        x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Any = None
    ) -> Tensor:
        assert residual.dim() == 4 and post_layer_mix.shape == (*residual.shape[:3], 1)
        mixed = torch.einsum("abmn,abmc->abnc", comb_res_mix, residual.float())
        return (x.float().unsqueeze(-2) * post_layer_mix + mixed).bfloat16()

    def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
        return weight_hidden.float() * weight_embed.float()

    def engram_gate_fwd(
        hidden_states: Tensor, kv: Tensor, weight_fused: Tensor, eps: float, clamp_value: float,
        save_for_backward: bool = True, image_token_mask: Any = None, inplace: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert kv.dim() == 3 and weight_fused.dtype is torch.float32 and not inplace and not save_for_backward
        r, k, v = hidden_states.float(), kv[:, :-1].float(), kv[:, -1:].float()
        norms = torch.rsqrt(r.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps)
        dot = (r * weight_fused * k).sum(-1) * norms * r.shape[-1] ** -0.5
        gate = torch.sigmoid(dot.sign() * dot.abs().clamp_min(clamp_value).sqrt())
        gate = gate.masked_fill(image_token_mask.unsqueeze(1), 0.0)
        return (r + gate.unsqueeze(2) * v).bfloat16(), None, None, None, None

    def norm_forward(
        x: Tensor, weight: Any, eps: float, residual: Any = None, out_scale: float = 1.0, out: Any = None,
        residual_out: Any = None, with_rstd: bool = False,
    ) -> tuple[Tensor, None, Tensor]:  # fmt: skip
        f = x.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype), None, x

    def per_token_cast(
        x: Tensor, fmt: str, num_per_channels: int, x_block_size: Any = None,
        use_tma_aligned_col_major_sf: bool = False, round_sf: bool = False, use_packed_ue8m0: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert x.dim() == 2 and fmt == "e4m3" and num_per_channels == 32 and round_sf and not use_packed_ue8m0
        codes, scale = formats.quant_fp8(x)
        return codes, formats.e8m0_value(scale)

    def swiglu_forward(
        x: Tensor, fmt: str, psum_num_tokens_per_expert: Any = None, topk_weights: Any = None,
        routed_scaling_factor: Any = None, clamp_value: Any = None,
    ) -> Tensor:  # fmt: skip
        assert fmt == "bf16"
        gate, up = x.float().chunk(2, dim=1)
        return (F.silu(gate.clamp(max=clamp_value)) * up.clamp(-clamp_value, clamp_value)).bfloat16()

    def moe_topk_gate_forward(
        logits: Tensor, num_topk: int, use_shared_as_routed: bool, num_shared_experts: int,
        routed_scaling_factor: float, ep_rank: int, scoring_func: str = "sqrtsoftplus", mask: Any = None,
        bias: Any = None, image_bias: Any = None, image_token_mask: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert logits.dtype is torch.float32 and not use_shared_as_routed and not num_shared_experts
        score = F.softplus(logits).sqrt()
        choice = score + torch.where(image_token_mask.unsqueeze(1), image_bias, bias)
        ids = torch.sort(choice, dim=1, descending=True, stable=True).indices[:, :num_topk]
        w = score.gather(1, ids)
        return ids, w / w.sum(1, keepdim=True) * routed_scaling_factor

    parts = {
        "mhc": [mhc_post_fwd],
        "engram": [fused_weight, engram_gate_fwd],
        "quant": [norm_forward, per_token_cast, swiglu_forward],
        "moe": [moe_topk_gate_forward],
    }
    modules = {name: ModuleType(f"tile_kernels.{name}") for name in parts}
    for name, members in parts.items():
        for function in members:
            setattr(modules[name], function.__name__, function)
    return modules


@pytest.mark.parametrize("op", ["hc_write", "engram_gate", "rms_norm", "quant_fp8", "swiglu", "router"])
def test_tile_kernels(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules, mm = double_of_tile_kernels(), torch.mm
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"tile_kernels.{name}", module)
    monkeypatch.setattr(providers, "_imported", lambda name: name.split(".")[0] == "tile_kernels")
    monkeypatch.setattr(tile_kernels, "library", modules.__getitem__)
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: mm(a.to(out_dtype), b.to(out_dtype)))  # CUDA only
    (binding,) = [b for b in BINDINGS if (b.op, b.library) == (op, "tile_kernels")]
    assert binding.run is not None and binding.why_not() is None
    for args in registry.OPS[op].inputs(torch.Generator().manual_seed(10)):
        got, want = binding.run(*args), registry.OPS[op].reference(*args)
        for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            if a.dtype.is_floating_point and a.dtype.itemsize > 1 and a.numel():
                assert float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) <= 5e-3
            else:
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ----------------------------------------------------------------------------------------------------- torch-npu


@pytest.fixture(scope="module")
def npu_ops() -> Iterator[None]:
    """The recorded npu:: schemas, computing on the CPU what CANN documents."""

    def clipped_swiglu(
        x: Tensor, *, group_index: Any = None, dim: int = -1, alpha: float = 1.702, limit: float = 7.0,
        bias: float = 1.0, interleaved: bool = True,
    ) -> Tensor:  # fmt: skip
        assert dim == -1 and not interleaved and group_index is None
        a, b = x.float().chunk(2, dim=-1)
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
        return (a * torch.sigmoid(alpha * a) * (b + bias)).to(x.dtype)

    def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
        rstd = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + epsilon)
        return (input.float() * rstd * gamma.float()).to(input.dtype), rstd

    def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Any = None) -> Tensor:
        assert rotary_mode == "interleave" and input.dim() == r1.dim() == r2.dim() == 4
        a, b = input[..., 0::2], input[..., 1::2]
        return input * r1 + torch.stack((-b, a), dim=-1).flatten(-2) * r2

    lib = torch.library.Library("npu", "DEF")
    for schema, double in (
        (torch_npu.CLIPPED_SWIGLU, clipped_swiglu),
        (torch_npu.RMS_NORM, rms_norm),
        (torch_npu.ROTARY_MUL, rotary_mul),
    ):
        lib.define(schema.split("::", 1)[1])
        lib.impl(schema.split("(")[0].split("::")[1], double, "CPU")
    yield
    lib._destroy()


@pytest.mark.parametrize("op", ["swiglu", "rms_norm", "rope"])
def test_torch_npu(op: str, npu_ops: None) -> None:
    (binding,) = [b for b in BINDINGS if (b.op, b.library) == (op, "torch_npu")]
    assert binding.run is not None and binding.why_not() is None
    for args in registry.OPS[op].inputs(torch.Generator().manual_seed(9)):
        compare(op, binding.run, args)
