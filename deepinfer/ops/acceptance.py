"""DSpark at the sampling end: the sequential Markov head, and acceptance of drafted ids (spec/dspark.md 2.5 and 8).

Belongs here: drawing the next draft id, how many drafts of a request stand, the id that follows them.
Does not belong here: the draft's layers (model/draft.py), how many drafts to verify, stop rules and length limits
(the host cuts behind a stop token; what was drawn after it is dropped).

Probabilities are exp_fixed((z - max z) * (1 / T)) over an integer sum (ops/sampling.py), residual weights are integers
in units of 2^-44, and uniforms come from counters of the token's position: a decision has the same bits everywhere.
Legend: R requests, g drafts of a block, l <= g drafts verified, T = R + sum(l) target rows, V vocabulary, B rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.common import mm_rows, nbytes, randn
from deepinfer.ops.registry import define
from deepinfer.ops.sampling import (
    MASS,
    NONE_LEFT,
    NOT_FINITE,
    REACH,
    STREAM_ACCEPT,
    STREAM_DRAFT,
    STREAM_RESIDUAL,
    STREAM_TARGET,
    exp_fixed,
    mass_of,
    philox,
    sample,
    sampling_example,
    scaled_logits,
    survives,
    survivors,
)

MATCH, TOKENWISE, BLOCK = range(3)  # acceptance rules: spec/dspark.md 8.1 and 8.4, 8.2, 8.3
CHUNK = 8192  # ids whose masses are summed together, see `_total`
WEIGHT = 2.0**44  # units of residual weights: V of them stay below 2^45


# ---- Markov head ----


def _markov_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    vocab, rank, hidden = 300, 32, 64
    embed, head = randn(g, vocab, rank), randn(g, vocab, rank)
    weight = randn(g, 1, hidden + rank)
    for b in (0, 1, 2, 7, 33):
        logits = torch.randn((b, vocab), generator=g)
        previous = torch.randint(0, vocab, (b,), generator=g)
        temperature = torch.where(torch.arange(b) % 2 == 0, 0.0, 0.7)
        seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (b,), generator=g)
        positions = torch.randint(0, 9000, (b,), generator=g).int()
        who = (temperature, seeds, positions, (positions % 3).int())
        yield (logits, randn(g, b, hidden), previous, embed, head, weight, *who, STREAM_DRAFT)


@define(
    "markov_step(Tensor(a!) logits, Tensor hidden, Tensor previous, Tensor embed, Tensor head, Tensor weight,"
    " Tensor temperature, Tensor seeds, Tensor positions, Tensor sample_index, int stream) -> (Tensor, Tensor)",
    fake=lambda logits, hidden, previous, embed, head, weight, temperature, *rest: (
        torch.empty_like(previous),
        torch.empty_like(temperature),
    ),
    inputs=_markov_inputs,
    cost=lambda logits, hidden, previous, embed, head, *rest: (
        2.0 * logits.shape[0] * head.numel(),
        nbytes(head) + 8.0 * logits.numel(),
    ),
    tolerance=1e-3,
)
def markov_step(
    logits: Tensor,
    hidden: Tensor,
    previous: Tensor,
    embed: Tensor,
    head: Tensor,
    weight: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sample_index: Tensor,
    stream: int,
) -> tuple[Tensor, Tensor]:
    """One step of the sequential head: next draft ids int64 [B] and raw confidences float32 [B].

    logits float32 [B, V] (rows may be strided): the shared head's; the step adds head @ embed[previous] in place and
    leaves what the id was drawn from, which acceptance needs. hidden [B, H] (un-normed rows of the block), previous
    int64 [B], embed and head bf16 [V, r], weight bf16 [1, H + r]: confidence = weight . (hidden, embed[previous]).
    Draws as in `sample` without filters; STREAM_TARGET for sampled match, else STREAM_DRAFT.
    """
    memory = embed[previous].to(hidden.dtype)
    logits += mm_rows(memory.float(), head.float())
    joint = torch.cat((hidden.float(), memory.float()), 1)
    none, who = torch.zeros_like(positions), (seeds, positions, sample_index)
    ids, _ = sample(logits, temperature, none, none.double(), temperature, *who, None, stream, False, False)
    return ids, mm_rows(joint, weight.float())[:, 0]


# ---- acceptance ----


def accept_example(
    g: torch.Generator, r: int, vocab: int, block: int, rule: int, far: float = 0.5, device: str = "cpu"
) -> tuple[Any, ...]:
    """Requests of 0 to `block` verified drafts; draft logits near the target's, drafts drawn from them on `device`."""
    lengths = torch.randint(0, block + 1, (r,), generator=g)
    start = torch.cat((torch.zeros(1, dtype=torch.int64), (lengths + 1).cumsum(0))).int()
    t = int(start[-1])
    owner = torch.repeat_interleave(torch.arange(r), lengths + 1)
    logits, temperature, top_k, top_p, log_min_p = sampling_example(g, t, vocab)
    per_request = [x[:r].index_select(0, owner) if r else x for x in (temperature, top_k, top_p, log_min_p)]
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (r,), generator=g)
    step = torch.arange(t) - start[:-1].long().index_select(0, owner)
    positions = (torch.randint(0, 9000, (r,), generator=g).index_select(0, owner) + step).int()
    index = torch.randint(0, 3, (r,), generator=g).int().index_select(0, owner)
    rows = (start[:-1, None].long() + torch.arange(block)).clamp(0, max(t - 1, 0))  # [R, g]
    draft_logits = logits[rows] + far * torch.randn((r, block, vocab), generator=g)
    own = [x[rows.flatten()] for x in (per_request[0], seeds.index_select(0, owner), positions, index)]
    off = torch.zeros_like(own[2])
    stream = STREAM_TARGET if rule == MATCH else STREAM_DRAFT
    draws = [x.to(device) for x in (draft_logits.flatten(0, 1), own[0], off, off.double(), own[0], *own[1:])]
    drafts, _ = sample(*draws, None, stream, False, False)
    who = (seeds.index_select(0, owner), positions, index)
    stored = None if rule == MATCH else draft_logits
    args = (start, logits, drafts.view(r, block), stored, *per_request, *who, rule, True)
    return tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)


def _accept_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for rule in (MATCH, TOKENWISE, BLOCK):
        yield from (accept_example(g, r, 90, 3, rule) for r in (0, 1, 2, 7))
    yield (*accept_example(g, 5, 90, 3, BLOCK)[:-1], False)


def _accept_cost(start: Tensor, logits: Tensor, drafts: Tensor, draft_logits: Tensor | None, *_: Any) -> Any:
    return 60.0 * logits.numel(), nbytes(start, logits, draft_logits)


@define(
    "accept(Tensor row_start, Tensor logits, Tensor drafts, Tensor? draft_logits, Tensor temperature, Tensor top_k,"
    " Tensor top_p, Tensor log_min_p, Tensor seeds, Tensor positions, Tensor sample_index, int rule, bool filtered)"
    " -> (Tensor, Tensor, Tensor)",
    fake=lambda row_start, logits, drafts, *rest: (
        drafts.new_empty(drafts.shape[0], dtype=torch.int32),
        drafts.new_empty(drafts.shape[0]),
        drafts.new_empty((drafts.shape[0], drafts.shape[1] + 1)),
    ),
    inputs=_accept_inputs,
    cost=_accept_cost,
)
def accept(
    row_start: Tensor,
    logits: Tensor,
    drafts: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sample_index: Tensor,
    rule: int,
    filtered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts that stand int32 [R], the id after them int64 [R], all emitted ids int64 [R, g + 1] (-1 fill).

    row_start int32 [R + 1]: target rows of request r; it verifies its first row_start[r + 1] - row_start[r] - 1 drafts
    (0: an ordinary draw). logits float32 [T, V] processed: row i of a request follows anchor and i drafts. drafts
    int64 [R, g]; draft_logits float32 [R, g, V]: what `markov_step` left (None for MATCH). Per row [T], as in `sample`:
    temperature .. sample_index (positions: of the token that the row produces), `filtered` too; a request's are equal.
    MATCH: drafts stand while they equal what `sample` draws from the target row; the id after them is that draw.
    TOKENWISE: draft d stands if u q(d) < p(d). BLOCK: block verification. q: softmax of the draft logits at the
    request's temperature; p: of the survivors. Both then draw from max(P p - q, 0), or p after the last draft or where
    that is empty. Streams: STREAM_ACCEPT for u, STREAM_RESIDUAL for the draw. Greedy requests compare best ids in every
    rule. An id below 0 is `sample`'s sign of a row without a choice.
    """
    requests, g = drafts.shape
    if not requests:
        return drafts.new_empty(0, dtype=torch.int32), drafts.new_empty(0), drafts.new_empty((0, g + 1))
    first, lengths = row_start[:-1].long(), (row_start[1:] - row_start[:-1] - 1).long()
    step = torch.arange(g + 1, device=drafts.device)
    rows = (first.unsqueeze(1) + step).clamp_max(logits.shape[0] - 1)  # [R, g + 1]
    verified = step[:g] < lengths.unsqueeze(1)
    params = (temperature, top_k, top_p, log_min_p)
    if rule == MATCH or draft_logits is None:
        drawn, _ = sample(logits, *params, seeds, positions, sample_index, None, STREAM_TARGET, filtered, False)
        num = ((drafts == drawn[rows[:, :g]]) & verified).long().cumprod(1).sum(1)
        following = drawn[rows].gather(1, num.unsqueeze(1))[:, 0]
    else:
        who = (seeds, positions, sample_index)
        num, following = _ratio(rows, lengths, logits, drafts, draft_logits, params, who, rule, filtered)
    tokens = torch.cat((drafts, drafts[:, :1]), 1)
    tokens = torch.where(step < num.unsqueeze(1), tokens, -1)
    return num.int(), following, torch.where(step == num.unsqueeze(1), following.unsqueeze(1), tokens)


def _distribution(logits: Tensor, temperature: Tensor, filters: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """(e^scaled of the survivors, else 0; 1 / their sum; peak): float32 [M, V], [M], [M]."""
    inverse = 1.0 / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    peak = scaled_logits(logits, temperature)[1]
    scaled = (logits - peak) * inverse
    if filters is not None:
        _, threshold, last_id, total = survivors(logits, temperature, *filters)
        inside = survives(logits, scaled, threshold, last_id, filters[2])
    else:
        best = logits.argmax(1, keepdim=True)
        ids = torch.arange(logits.shape[1], device=logits.device)
        inside = (scaled >= REACH) & ((temperature > 0).unsqueeze(1) | (ids == best))
        total = torch.where(temperature > 0, _total(logits, inverse, peak), int(MASS))
    e = torch.where(inside, exp_fixed(torch.where(inside, scaled, 0.0)), 0.0)
    return e, torch.where(total > 0, MASS / total.double(), 0.0).float(), peak[:, 0]


def _total(logits: Tensor, inverse: Tensor, peak: Tensor) -> Tensor:
    """Mass of rows without filters, int64 [M]: chunks' masses in units of their own best id's, then of the row's.

    One reading gives a chunk's best and its mass; a sum in units of the row's best would take two.
    """
    n = min(CHUNK, logits.shape[1])
    chunks = torch.nn.functional.pad(logits, (0, -logits.shape[1] % n), value=float("-inf")).unflatten(1, (-1, n))
    best = chunks.amax(2)
    part = mass_of((chunks - best.unsqueeze(2)) * inverse.unsqueeze(2)).sum(2)
    below = (best - peak) * inverse
    inside = below >= REACH
    share = torch.where(inside, exp_fixed(torch.where(inside, below, 0.0)), 0.0)
    return (part.double() * share.double()).long().sum(1)


def _ratio(
    rows: Tensor,
    lengths: Tensor,
    logits: Tensor,
    drafts: Tensor,
    draft_logits: Tensor,
    params: tuple[Tensor, ...],
    who: tuple[Tensor, ...],
    rule: int,
    filtered: bool,
) -> tuple[Tensor, Tensor]:
    """(accepted int64 [R], the id that follows int64 [R])."""
    requests, g = drafts.shape
    temperature, *filters = params
    e_p, scale_p, peak = _distribution(logits, temperature, tuple(filters) if filtered else None)
    e_q, scale_q, _ = _distribution(draft_logits.flatten(0, 1), temperature[rows[:, :g].flatten()], None)
    e_q, scale_q = e_q.unflatten(0, (-1, g)), scale_q.view(-1, g)
    p = e_p[rows[:, :g]].gather(2, drafts.unsqueeze(2))[..., 0] * scale_p[rows[:, :g]]
    q = e_q.gather(2, drafts.unsqueeze(2))[..., 0] * scale_q
    u = (_word(rows[:, :g], who, STREAM_ACCEPT).float() + 0.5) * 2.0**-32
    verified = torch.arange(g, device=drafts.device) < lengths.unsqueeze(1)
    keep = torch.ones_like(p[:, 0])  # P of block verification
    keeps, weights = [keep], []
    for i in range(g):
        ratio = torch.where(q[:, i] > 0, p[:, i] / q[:, i], torch.where(p[:, i] > 0, float("inf"), 0.0))
        keep = (keep * ratio).clamp_max(1.0)
        keeps.append(keep)
    for i in range(g + 1):
        a = e_p[rows[:, i]] * ((keeps[i] if rule == BLOCK else 1.0) * scale_p[rows[:, i]]).unsqueeze(1)
        b = e_q[:, min(i, g - 1)] * scale_q[:, min(i, g - 1), None]
        rest = torch.where(
            (i < lengths).unsqueeze(1), (a - b).clamp_min(0.0), e_p[rows[:, i]] * scale_p[rows[:, i], None]
        )
        weights.append((rest * WEIGHT).long())
    if rule == TOKENWISE:
        num = ((u * q < p) & verified).long().cumprod(1).sum(1)
    else:
        num = torch.zeros_like(lengths)
        for i in range(1, g + 1):
            share = (weights[min(i, g)].sum(1).double() / WEIGHT).float()
            under = (share + 1.0) - keeps[i]
            h = torch.where(lengths == i, keeps[i], torch.where(under > 0, share / under, 0.0))
            stands = (u[:, i - 1] <= h) & (u[:, i - 1] <= keeps[i])  # h <= P but for rounding
            num = torch.where((i <= lengths) & stands, i, num)
    own = rows.gather(1, num.unsqueeze(1))[:, 0]
    chosen = torch.stack(weights, 1)[torch.arange(requests, device=drafts.device), num]
    plain = ((e_p[own] * scale_p[own].unsqueeze(1)) * WEIGHT).long()
    chosen = torch.where(chosen.sum(1, keepdim=True) > 0, chosen, plain)
    through = chosen.cumsum(1)
    total, word = through[:, -1], _word(own, who, STREAM_RESIDUAL)
    target = (((total >> 20) * word) + (((total & 0xFFFFF) * word) >> 20)) >> 12  # total * word / 2^32, rounded down
    drawn = (through <= target.unsqueeze(1)).sum(1)
    top = peak[own]
    bad = torch.where(top == float("-inf"), NONE_LEFT, NOT_FINITE)
    return num, torch.where(torch.isfinite(top), drawn, bad)


def _word(rows: Tensor, who: tuple[Tensor, ...], stream: int) -> Tensor:
    """32 random bits (int64) of the token that each row produces."""
    seeds, positions, sample_index = (x[rows].long() for x in who)
    zero = torch.zeros_like(positions)
    return philox(positions, zero, zero + stream, sample_index, seeds)[0]
