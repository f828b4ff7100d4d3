"""DeepSelect (MIT): top-k selection for sparse attention, in place of our own selection after our own scores.

Belongs here: its one function. Does not belong here: scores of index entries (ops/triton/indexer.py).
Read in tokenspeed-deepselect 1.0.0.post20260910, whose machine code is for sm_100 and sm_103 only.
"""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from deepinfer.ops.providers import SM90, SM100, SM103, Binding, lacks_functions

MODULE = "deep_select"
TOPK = (
    "topk(input, topk, sorted=False, begin=None, end=None, indices_type=torch.int64, sorted_index=False, hint=None,"
    " output_idx=None, output_idx_offset=None, idx_oob_fill_value=2147483647, value_oob_fill_value=float('-inf'),"
    " return_value=True, abort_when_nan_found=True)"
)


def select(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Ascending ids of the k best of the first `visible` scores of each row, -1 filled.

    scores float32 [M, n] with rows aligned as the library wants, visible int32 [M] -> int32 [M, k]. NaN does not abort.
    """
    _, ids = importlib.import_module(MODULE).topk(
        scores, k, end=visible, indices_type=torch.int32, sorted_index=True, idx_oob_fill_value=-1,
        return_value=False, abort_when_nan_found=False,
    )  # fmt: skip
    # where -1 fills sort before ids (not documented), they go to the end
    return torch.where(ids < 0, 2**31 - 1, ids).sort(dim=1).values.int().masked_fill_(_beyond(visible, k), -1)


def _beyond(visible: Tensor, k: int) -> Tensor:
    return torch.arange(k, device=visible.device) >= visible.unsqueeze(1)


def index_topk(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    slots: Tensor,
    visible: Tensor,
    ratio: int,
    page_size: int,
    k: int,
) -> Tensor:
    from deepinfer.ops.triton import indexer

    if not q.shape[0]:
        return torch.empty((0, k), dtype=torch.int32, device=q.device)
    entries = page_size // ratio
    width, step = page_table.shape[1] * entries, importlib.import_module(MODULE).get_stride_requirement()[0] // 4
    space = torch.empty((q.shape[0], -(-width // step) * step), dtype=torch.float32, device=q.device)
    scores = space[:, :width]
    indexer.logits(q, weights, pool, page_table, slots, visible, entries, scores, 0)
    return select(scores, visible, k)


BINDINGS = (
    Binding(
        "index_topk",
        "deep_select",
        index_topk,
        archs=(SM100, SM103),
        refused={SM90: "no machine code for sm_90 in its wheels"},
        recorded=TOPK,
        why_not=functools.partial(lacks_functions, TOPK, MODULE),
    ),
)
