"""Runs a StepPlan on the model: the only place of the engine that makes tensors.

Belongs here: the device's half of the engine: the model's memory, sampling state by slot, a plan's arrays as tensors,
image embeddings, logits to tokens. Does not belong here: what runs (scheduler.py), what a token means for its request
(requests.py), the model's maths.

`launch` returns at once; the work is done by the device's thread, step after step. The token a sequence sampled last
stays there, by slot: the host never needs it to plan the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.engine import sampler
from deepinfer.engine.plan import PromptLogprobs, StepPlan
from deepinfer.engine.requests import ImageSpan
from deepinfer.errors import EngineError
from deepinfer.model.state import ModelState, StepInputs, StepOutputs
from deepinfer.outputs import Logprob
from deepinfer.platform.device import Device, Ticket

FIRST_BUFFER = 1 << 14  # int32 values of a new plan buffer


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
    """What a step gave: a token of each row that samples, and logprobs for the prompt tokens that want them."""

    tokens: NDArray[np.int64]  # [R]
    details: dict[int, sampler.Sampled]  # rows of R with an error or logprobs
    prompt_logprobs: list[tuple[PromptLogprobs, list[dict[int, Logprob]]]]


class Skipped(EngineError):
    """The step before broke off, so this one did not run."""


class Runner:
    """Owns the model and its memory on one device. Everything below `launch` runs in the device's thread."""

    def __init__(self, model: Model, state: ModelState, device: Device, in_flight: int) -> None:
        self.model, self.state, self.device = model, state, device
        num_slots = state.page_table.shape[0]
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int32, device=device.torch)
        self._rows: list[sampler.SamplingRow | None] = [None] * num_slots
        self._buffers = [device.host_buffer(FIRST_BUFFER) for _ in range(in_flight)]
        self._broken = False

    def launch(self, plan: StepPlan) -> Ticket[StepResult]:
        """Start a step. If it breaks off, steps launched after it do not run, until `recover`.

        A host buffer is used again only `in_flight` steps later: by then its step was confirmed.
        """
        index = plan.step % len(self._buffers)
        size = sum(array.size for array in plan.arrays.values())
        if size > self._buffers[index].numel():
            self._buffers[index] = self.device.host_buffer(2 * size)
        buffer = self._buffers[index][:size]
        np.concatenate([array.ravel() for array in plan.arrays.values()], out=buffer.numpy())
        return self.device.submit(lambda: self._run(plan, buffer))

    def recover(self) -> None:
        """After a step broke off and nothing is in flight: accept steps again. Memory of sequences is undefined."""
        self._broken = False

    @torch.inference_mode()
    def _run(self, plan: StepPlan, buffer: Tensor) -> StepResult:
        if self._broken:
            raise Skipped("the step before this one broke off")
        self._broken = True
        a = self._unpack(plan, buffer)
        self._write_tables(a)
        if plan.num_decode:
            a["ids"][: plan.num_decode] = self.last_tokens[a["slots"][: plan.num_decode].long()]
        logits = self.model.forward(self._inputs(plan, a), self.state).logits
        if "slot_copies" in a:
            self.state.copy_slots(*a["slot_copies"].long())
        if "page_copies" in a:
            self.state.copy_pages(*a["page_copies"].long())
        result = self._sample(plan, logits)
        self._broken = False
        return result

    def _unpack(self, plan: StepPlan, buffer: Tensor) -> dict[str, Tensor]:
        """The plan's arrays as device tensors int32: one copy."""
        on_device = buffer.to(self.device.torch, copy=True, non_blocking=True)
        parts = torch.split(on_device, [array.size for array in plan.arrays.values()])
        return {
            name: part if array.ndim == 1 else part.view(array.shape)
            for (name, array), part in zip(plan.arrays.items(), parts, strict=True)
        }

    def _write_tables(self, a: dict[str, Tensor]) -> None:
        if "page_updates" in a:
            slots, indices, pages = a["page_updates"]
            self.state.page_table[slots.long(), indices.long()] = pages
        if "remember" in a:
            slots, positions, ids = a["remember"]
            self.state.remember(slots.long(), positions.long(), ids)

    def _inputs(self, plan: StepPlan, a: dict[str, Tensor]) -> StepInputs:
        is_image = torch.zeros(plan.num_rows, dtype=torch.bool, device=self.device.torch)
        image_rows = image_embeds = None
        if plan.images:
            rows = [torch.arange(i.first, i.first + i.count, device=self.device.torch) for i in plan.images]
            image_rows = torch.cat(rows)
            image_embeds = torch.cat([self._embed(i.span)[i.offset : i.offset + i.count] for i in plan.images])
            is_image[image_rows] = True
        return StepInputs(
            ids=a["ids"],
            positions=a["positions"],
            slots=a["slots"],
            run_start=a["run_start"],
            is_image=is_image,
            window_floor=a["window_floor"],
            logit_rows=a["logit_rows"].long(),
            kept=a["kept"].long() if "kept" in a else None,
            image_rows=image_rows,
            image_embeds=image_embeds,
            want_taps=False,
            kv_slots=a.get("kv_slots"),
            ring_floor=a.get("ring_floor"),
        )

    def _embed(self, span: ImageSpan) -> Tensor:
        """The span's embeddings, computed once per request: chunks and recomputation reuse them."""
        if span.embeds is None:
            image = span.patches
            span.embeds = self.model.encode_image(image.patches.to(self.device.torch), image.n_h, image.n_w)
        embeds: Tensor = span.embeds
        return embeds

    def _sample(self, plan: StepPlan, logits: Tensor) -> StepResult:
        for slot, row in plan.samplers:
            self._rows[slot] = row
        rows = [row for slot in plan.sample_slots.tolist() if (row := self._rows[slot]) is not None]
        at = plan.sample_logits
        everything = len(at) == len(logits) and bool((at == np.arange(len(at))).all())
        drawn = sampler.sample(logits if everything else logits[torch.from_numpy(at).to(logits.device)], rows)
        tokens = np.fromiter((one.token_id for one in drawn), np.int64, len(drawn))
        valid = torch.from_numpy(
            np.maximum(tokens, 0).astype(np.int32)
        )  # a failed row may run once more: any id will do
        self.last_tokens[torch.from_numpy(plan.sample_slots).to(self.device.torch)] = valid.to(self.device.torch)
        details = {}
        for i, (row, one) in enumerate(zip(rows, drawn, strict=True)):
            row.append(one.token_id)
            if one.error is not None or one.logprobs is not None:
                details[i] = one
        prompt = [(p, self._prompt_logprobs(p, logits)) for p in plan.prompt_logprobs]
        return StepResult(tokens, details, prompt)

    @staticmethod
    def _prompt_logprobs(wanted: PromptLogprobs, logits: Tensor) -> list[dict[int, Logprob]]:
        num = wanted.seq.params.prompt_logprobs or 0
        rows = logits[wanted.first : wanted.first + len(wanted.targets)]
        return sampler.prompt_logprobs(rows, wanted.targets, num)
