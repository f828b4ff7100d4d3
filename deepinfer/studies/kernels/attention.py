"""Cases of the attention family: decode, prefill, window layers, draft blocks, one image.

`problem` also serves tests/gpu/check_attention.py. Decode: R requests with one row each, keys from ring and pages;
prefill: one request whose rows see each other and the pages. Buffer sets differ in queries, rings and selections and
share the pool (302 MB for 64 requests at 32k), so their keys come from memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import records
from deepinfer.studies.kernels.harness import Case

HEADS, DIM, WINDOW, RING, PAGE, RATIO = 64, 512, 128, 140, 128, 2
PER_PAGE = PAGE // RATIO
SCALE = DIM**-0.5
Make = Callable[[], list[Callable[[], Any]]]


def random_window(*shape: int) -> Tensor:
    return records.pack_window(torch.randn((*shape, DIM), device="cuda").bfloat16())


@functools.cache
def latents(pages: int) -> Tensor:
    """A pool of `pages` pages; packed once for up to 256 pages and repeated, packing is slow."""
    some = records.pack_latent(torch.randn((min(pages, 256), PER_PAGE, DIM), device="cuda").bfloat16())
    return some.repeat(-(-pages // some.shape[0]), 1, 1)[:pages].contiguous()


def problem(
    requests: int, rows: int, context: int, k: int = 512, pool: Tensor | None = None, floor: int = 0
) -> tuple[Any, ...]:
    """Arguments of op `attention`: the last `rows` positions of `requests` requests of length `context`, k of their
    entries (0: a window-only layer) in random order of random pages; unused entries are -1.
    """
    t = requests * rows
    slots = torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(rows)
    pos = torch.arange(context - rows, context, device="cuda", dtype=torch.int32).repeat(requests)
    per = -(-context // PAGE)
    if pool is None and k:
        pool = latents(requests * per)
    table = torch.zeros((requests, max(per, 1)), dtype=torch.int32, device="cuda")
    selected = None
    if k and pool is not None:
        table = (
            torch.randperm(pool.shape[0], device="cuda", dtype=torch.int64)[: requests * per].view(requests, per).int()
        )
        seen = (pos + 1) // RATIO
        picks = torch.rand((t, k), device="cuda")
        if context // RATIO > 4 * k:  # duplicates are rare and harmless
            selected = (picks * seen.unsqueeze(1)).int()
        else:
            selected = torch.empty((t, k), dtype=torch.int32, device="cuda")
            width = max(k, context // RATIO)
            for i in range(0, t, 1024):
                order = torch.rand((min(1024, t - i), width), device="cuda")
                order[torch.arange(width, device="cuda") >= seen[i : i + 1024].unsqueeze(1)] = 2.0
                value, index = order.topk(k, dim=1, largest=False)
                selected[i : i + 1024] = torch.where(value < 2.0, index, -1).int()
    return (
        torch.randn((t, HEADS, DIM), device="cuda").bfloat16(),
        random_window(t),
        random_window(requests, RING),
        slots,
        pos,
        torch.arange(t, device="cuda", dtype=torch.int32),
        torch.full_like(pos, context - rows),
        torch.full_like(pos, floor),
        torch.randn(HEADS, device="cuda"),
        pool if k else None,
        selected,
        table,
        SCALE,
        WINDOW,
        RATIO,
        PAGE,
    )


@functools.cache
def _sets(count: int, *shape: Any) -> list[tuple[Any, ...]]:
    return [problem(*shape) for _ in range(count)]


def _ours(count: int, *shape: int) -> list[Callable[[], Any]]:
    from deepinfer.ops.triton import attention as kernels

    return [functools.partial(kernels.attention, *args) for args in _sets(count, *shape)]


def _gathered(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, all keys bf16 [n, 512], indices int32 [T, 640], sink): what a bf16 kernel would be given."""
    q, new, ring, slots, pos, rows, first, floor, sink, pool, selected, table = args[:12]
    t, n = q.shape[0], ring.shape[0]
    window = records.unpack_window(torch.cat((new, ring.flatten(0, 1))), DIM).bfloat16()
    p = pos.unsqueeze(1).long() - torch.arange(WINDOW - 1, -1, -1, device="cuda")
    back = torch.arange(WINDOW - 1, -1, -1, device="cuda")
    at = torch.where(p >= first.unsqueeze(1), rows.unsqueeze(1) - back, t + slots.unsqueeze(1) * RING + p % RING)
    at = torch.where(p >= floor.unsqueeze(1), at, -1)
    if selected is None:
        return q, window, at.int(), sink
    e = selected.long().clamp_min(0)
    page = table[slots.long().unsqueeze(1), e // PER_PAGE].long()
    used, inverse = torch.unique(page * PER_PAGE + e % PER_PAGE, return_inverse=True)
    latent = records.unpack_latent(pool.flatten(0, 1)[used], DIM).bfloat16()
    other = torch.where(selected >= 0, inverse + t + n * RING, -1)
    return q, torch.cat((window, latent)), torch.cat((at, other), 1).int(), sink


def _flash_prefill(count: int, *shape: int) -> list[Callable[[], Any]]:
    """sgl-flash-mla's SM90 sparse prefill on keys that were dequantised and indexed beforehand."""
    from flash_mla import flash_mla_sparse_fwd

    calls: list[Callable[[], Any]] = []
    for args in _sets(count, *shape):
        q, kv, indices, sink = _gathered(args)
        call = functools.partial(
            flash_mla_sparse_fwd, q, kv.unsqueeze(1), indices.unsqueeze(1), SCALE, attn_sink=sink, use_legacy=True
        )
        call()
        calls.append(call)
    return calls


def _flash_decode(count: int, requests: int) -> list[Callable[[], Any]]:
    """sgl-flash-mla's V4 decode (584 B records, two pools), 128 + 512 keys; random bytes, so speed only."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    calls: list[Callable[[], Any]] = []
    blocks = requests * 64
    for _ in range(count):
        caches = [torch.randint(0, 64, (blocks, 64, 1, 584), dtype=torch.uint8, device="cuda") for _ in range(2)]
        picks = [torch.randint(0, blocks * 64, (requests, 1, k), dtype=torch.int32, device="cuda") for k in (128, 512)]
        q = torch.randn((requests, 1, HEADS, DIM), device="cuda").bfloat16()
        meta = get_mla_metadata()[0]
        call = functools.partial(
            flash_mla_with_kvcache, q, caches[0], None, None, DIM, meta, softmax_scale=SCALE, indices=picks[0],
            attn_sink=torch.zeros(HEADS, device="cuda"), extra_k_cache=caches[1], extra_indices_in_kvcache=picks[1],
            use_legacy=True, kv_format="V4",
        )  # fmt: skip
        call()
        calls.append(call)
    return calls


def _torch_dense(count: int, *shape: int) -> list[Callable[[], Any]]:
    """bf16 bmm over keys gathered inside the call from dequantised records."""
    calls: list[Callable[[], Any]] = []
    for args in _sets(count, *shape):
        q, kv, indices, sink = _gathered(args)
        at, gone = indices.clamp_min(0).long(), (indices < 0).unsqueeze(1)

        def call(q: Tensor, kv: Tensor, at: Tensor, gone: Tensor, sink: Tensor) -> Tensor:
            keys = kv[at]
            s = (torch.bmm(q, keys.transpose(1, 2)).float() * SCALE).masked_fill(gone, float("-inf"))
            s = torch.cat((s, sink.view(1, -1, 1).expand(s.shape[0], -1, 1)), 2).softmax(2)
            return torch.bmm(s[..., :-1].bfloat16(), keys)

        calls.append(functools.partial(call, q, kv, at, gone, sink))
    return calls


def _case(
    name: str, count: int, requests: int, rows: int, context: int, k: int = 512, more: dict[str, Make] | None = None
) -> Case:
    shape, t = (requests, rows, context, k), requests * rows
    read = min(t * k, requests * context // RATIO) * 288.0 + min(t * WINDOW, t + requests * WINDOW) * 528.0
    found: dict[str, Make] = {"flash_mla_sm90_prefill": lambda: _flash_prefill(count, *shape), **(more or {})}
    if t <= 512:
        found["torch_bf16_gather"] = lambda: _torch_dense(count, *shape)
    return Case(
        name,
        lambda: _ours(count, *shape),
        floor_bytes=read + 4.0 * t * HEADS * DIM,
        floor_flops=4.0 * t * HEADS * DIM * (WINDOW + k),
        baselines=found,
    )


def _block(count: int, requests: int, g: int) -> list[Callable[[], Any]]:
    from deepinfer.ops.triton import attention as kernels

    calls: list[Callable[[], Any]] = []
    for _ in range(count):
        slots = torch.arange(requests, device="cuda", dtype=torch.int32)
        args = (
            torch.randn((requests * g, HEADS, DIM), device="cuda").bfloat16(), random_window(requests * g),
            random_window(requests, RING), slots, slots + 1000, slots * 0, torch.randn(HEADS, device="cuda"),
            SCALE, WINDOW,
        )  # fmt: skip
        calls.append(functools.partial(kernels.block_attention, *args))
    return calls


def _vision(count: int, n: int, library: str = "") -> list[Callable[[], Any]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from deepinfer.ops.triton import attention as kernels

    calls: list[Callable[[], Any]] = []
    for _ in range(count):
        qkv = torch.randn((n, 3 * 1024), device="cuda").bfloat16()
        angle = torch.rand((n, 32), device="cuda") * 6
        call = functools.partial(kernels.vision_attention, qkv, angle.cos(), angle.sin(), 16)
        if library:

            def call(call: Callable[[], Tensor] = call) -> Tensor:  # type: ignore[misc]
                with sdpa_kernel(getattr(SDPBackend, library)):
                    return call()

        calls.append(call)
    return calls


def cases(device: str = "cuda") -> Iterator[Case]:
    for requests in (1, 8, 64, 256):
        for context in (1024, 32768, 131072):
            if requests * context > 64 * 131072:
                continue
            count = {1: 16, 8: 12, 64: 6, 256: 3}[requests]
            decode = functools.partial(_flash_decode, count, requests)
            flash: dict[str, Make] = {"flash_mla_v4_decode": decode} if context == 32768 else {}
            yield _case(f"attn_decode/R{requests}/ctx{context}", count, requests, 1, context, more=flash)
            _sets.cache_clear()
            latents.cache_clear()
    for rows in (512, 4096, 8192):
        yield _case(f"attn_prefill/T{rows}", 2, 1, rows, 32768)
        _sets.cache_clear()
    yield _case("attn_window/R64", 8, 64, 1, 32768, 0)
    yield _case("attn_window/T8192", 2, 1, 8192, 32768, 0)
    _sets.cache_clear()
    for requests in (1, 64):
        g = 5
        yield Case(
            f"attn_block/R{requests}/g{g}",
            functools.partial(_block, 6, requests, g),
            floor_bytes=requests * ((WINDOW + g) * 528.0 + 4.0 * g * HEADS * DIM),
            floor_flops=4.0 * requests * g * HEADS * DIM * (WINDOW + g),
        )
    for n in (1521, 8649):
        yield Case(
            f"vision_attention/n{n}",
            functools.partial(_vision, 2, n),
            floor_bytes=2.0 * n * 4 * 1024,
            floor_flops=4.0 * n * n * 1024,
            baselines={"cudnn": functools.partial(_vision, 2, n, "CUDNN_ATTENTION")},
        )
