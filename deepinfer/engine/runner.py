"""Runs a StepPlan on the model: the only place of the engine that makes tensors.

Belongs here: the model's memory, arrays to device tensors, image embeddings, logits to sampled tokens. Does
not belong here: what runs (scheduler.py), what a token means for its request (requests.py), the model's
maths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.engine import sampler
from deepinfer.engine.requests import ImageSpan, Sequence
from deepinfer.engine.scheduler import Run, StepPlan
from deepinfer.model.state import ModelState, StepInputs, StepOutputs
from deepinfer.outputs import Logprob


class Model(Protocol):
    """What the engine needs of a model; `model.transformer.Transformer` provides it."""

    def forward(self, step: StepInputs, state: ModelState) -> StepOutputs:
        """Logits float32 [S, vocab] of `step.logit_rows`; writes `state` for all rows."""
        ...

    def encode_image(self, patches: Tensor, grid_h: int, grid_w: int) -> Tensor:
        """Embedding rows [span, hidden] of an image of grid_h x grid_w patches."""
        ...


@dataclass
class StepResult:
    """What a step gave: a token for each sequence that samples, logprobs of prompt tokens."""

    sampled: list[tuple[Sequence, sampler.Sampled]]
    prompt_logprobs: list[tuple[Sequence, list[dict[int, Logprob]]]] = field(default_factory=list)


class Runner:
    """Owns the model and its memory on one device."""

    def __init__(self, model: Model, state: ModelState) -> None:
        self.model = model
        self.state = state
        self.device = state.page_table.device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute one step. If it raises, the memory of its sequences is undefined (`Scheduler.restart`)."""
        if len(plan.page_updates):
            slots, indices, pages = self._tensor(plan.page_updates.T)
            self.state.page_table[slots, indices] = pages.to(torch.int32)
        image_rows, image_embeds = self._images(plan)
        inputs = StepInputs(
            ids=self._tensor(plan.ids),
            positions=self._tensor(plan.positions),
            slots=self._tensor(plan.slots),
            run_start=self._tensor(plan.run_start),
            is_image=self._tensor(plan.is_image),
            window_floor=self._tensor(plan.window_floor),
            logit_rows=self._tensor(plan.logit_rows),
            kept=None if plan.kept is None else self._tensor(plan.kept),
            image_rows=image_rows,
            image_embeds=image_embeds,
            want_taps=False,
        )
        return _read(plan, self.model.forward(inputs, self.state).logits)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _images(self, plan: StepPlan) -> tuple[Tensor | None, Tensor | None]:
        """Rows of this step that lie in image spans, and their embeddings: a span may cross steps."""
        if not plan.is_image.any():
            return None, None
        rows: list[Tensor] = []
        embeds: list[Tensor] = []
        first = 0
        for run in plan.runs:
            for span in run.seq.prompt.images:
                begin, end = max(span.start, run.start), min(span.start + span.length, run.end)
                if begin < end:
                    offset = first - run.start
                    rows.append(torch.arange(begin + offset, end + offset, device=self.device))
                    embeds.append(self._embed(span)[begin - span.start : end - span.start])
            first += run.count
        return torch.cat(rows), torch.cat(embeds)

    def _embed(self, span: ImageSpan) -> Tensor:
        """The span's embeddings, computed once per request: chunks and recomputation reuse them."""
        if span.embeds is None:
            image = span.patches
            span.embeds = self.model.encode_image(image.patches.to(self.device), image.n_h, image.n_w)
        embeds: Tensor = span.embeds
        return embeds


def _read(plan: StepPlan, logits: Tensor) -> StepResult:
    """Split logits [S, vocab] into tokens of the runs that sample and logprobs of prompt tokens."""
    result = StepResult([])
    last: list[int] = []
    samplers: list[Run] = []
    first = 0
    for run in plan.runs:
        count = run.end - run.logits_from
        if run.seq.wants_prompt_logprobs and count:
            result.prompt_logprobs.append((run.seq, _prompt_logprobs(run, logits[first : first + count])))
        first += count
        if run.samples:
            samplers.append(run)
            last.append(first - 1)
    rows = logits if len(last) == len(logits) else logits[last]
    tokens = sampler.sample(rows, [run.seq.row for run in samplers])
    result.sampled = list(zip((run.seq for run in samplers), tokens, strict=True))
    return result


def _prompt_logprobs(run: Run, logits: Tensor) -> list[dict[int, Logprob]]:
    """Row of position p gives prompt token p + 1; the prompt's last row gives none."""
    num = run.seq.params.prompt_logprobs or 0
    targets = run.seq.prompt.token_ids[run.logits_from + 1 : run.end + 1]
    return sampler.prompt_logprobs(logits[: len(targets)], targets, num)
