"""Runs a StepPlan on the model: the only place of the engine that makes tensors.

Belongs here: the device's half of the engine: the model's memory, sampling state by slot, a plan's arrays as tensors,
image embeddings, logits to tokens, which steps are replayed as graphs. Does not belong here: what runs (scheduler.py),
what a token means for its request (requests.py), the model's maths, capture itself (compile/).

`launch` returns at once; the work is done by the device's thread, step after step. The token a sequence sampled last
stays there, by slot: the host never needs it to plan the next step. On an accelerator that thread only launches: it
goes on to the next step while the results of this one are on their way to the host.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.compile import artifacts
from deepinfer.compile.buckets import row_buckets
from deepinfer.compile.graphs import BucketGraphs, empty_inputs
from deepinfer.compile.modes import Compiled, Mode, warm_up
from deepinfer.engine import sampler
from deepinfer.engine.plan import PromptLogprobs, StepPlan
from deepinfer.engine.requests import ImageSpan
from deepinfer.engine.state import SamplingTable
from deepinfer.errors import EngineError
from deepinfer.model.state import ModelState, StepInputs, StepOutputs
from deepinfer.model.transformer import Transformer
from deepinfer.ops.sampling import NONE_LEFT
from deepinfer.outputs import Logprob
from deepinfer.platform import graphs
from deepinfer.platform.device import Device, Pending, Ticket

logger = logging.getLogger(__name__)

WARM_ROWS, WARM_KEEP = 7, 3  # sizes that nothing of a model has: a traced size is then no constant
FIRST_BUFFER = 1 << 14  # int32 values of a new plan buffer
GRAPH_FIELDS = ("slots", "positions", "window_floor", "ring_floor", "kv_slots")  # of a decode step's rows, padded by 0


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
    """Owns the model and its memory on one device. Everything below `launch` runs in the device's thread.

    forbidden: ids that are never generated.
    """

    def __init__(
        self, model: Model, state: ModelState, device: Device, in_flight: int, forbidden: tuple[int, ...] = ()
    ) -> None:
        self.model, self.state, self.device = model, state, device
        num_slots = state.page_table.shape[0]
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int32, device=device.torch)
        self.table: SamplingTable | None = None  # where tokens are chosen on the device
        if device.torch.type == "cuda":
            self.table = SamplingTable(num_slots, device, forbidden)
        self.compiled: Compiled | None = None
        self.decode: BucketGraphs[Tensor] | None = None  # logits [bucket, vocab]
        self.draws: dict[bool, BucketGraphs[Tensor]] = {}  # ids [bucket]; by whether rows filter
        self._rows: list[sampler.SamplingRow | None] = [None] * num_slots
        self._buffers = [device.host_buffer(FIRST_BUFFER) for _ in range(in_flight)]
        self._results = [device.host_buffer(num_slots, torch.int64) for _ in range(in_flight)]
        self._broken = False

    # ---- compiled functions and graphs ----

    def compile(self, mode: Mode, most_rows: int) -> None:
        """Capture the model's functions as `mode` says, and decode steps of up to `most_rows` rows where the device has
        graphs. Nothing is compiled afterwards (compile/counters.py).
        """
        if mode == "eager":
            return
        begin = time.perf_counter()
        if isinstance(self.model, Transformer):
            self.compiled = Compiled(self.model, mode)
            if self.compiled.options.inductor:
                artifacts.use(self.device.torch)
            if mode != "graph":
                with torch.inference_mode():
                    warm_up(self.model, lambda step: self.model.forward(step, self.state), WARM_ROWS, WARM_KEEP)
        compiled = time.perf_counter()
        self.capture_graphs(most_rows)
        logger.info(
            "compile=%s: functions %.1f s, graphs %.1f s", mode, compiled - begin, time.perf_counter() - compiled
        )

    def capture_graphs(self, most_rows: int) -> None:
        """Capture decode steps of up to `most_rows` rows: the model, and the choice of tokens behind it."""
        if self.table is None or graphs.backend(self.device.torch) is None:
            return
        sizes, pool = row_buckets(most_rows), graphs.new_pool(self.device.torch)
        inputs = empty_inputs(len(GRAPH_FIELDS), sizes[-1], self.device.torch)
        with torch.inference_mode():
            self.decode = BucketGraphs("decode step", self._decode_step, inputs, sizes, pool)
            self.decode.capture()
            for filtered in (False, True):
                draw = functools.partial(self._draw_step, filtered)
                self.draws[filtered] = BucketGraphs("choice of tokens", draw, inputs, sizes, pool)
                self.draws[filtered].capture()

    def close(self) -> None:
        """Give back graph memory. Nothing may be in flight."""
        for captured in (self.decode, *self.draws.values()):
            if captured is not None:
                captured.close()
        self.decode, self.draws = None, {}
        if self.compiled is not None:
            self.compiled.close()
            self.compiled = None

    def _decode_step(self, inputs: Tensor) -> Tensor:
        """What a graph of a decode step holds: every row is a sequence whose input is the token it sampled last."""
        slots, positions, floor, ring_floor, kv_slots = inputs
        rows = inputs.shape[1]
        step = StepInputs(
            ids=self.last_tokens[slots],
            positions=positions,
            slots=slots,
            run_start=torch.arange(rows, dtype=torch.int32, device=inputs.device),
            is_image=torch.zeros(rows, dtype=torch.bool, device=inputs.device),
            window_floor=floor,
            logit_rows=None,
            want_taps=False,
            kv_slots=kv_slots,
            ring_floor=ring_floor,
        )
        return self.model.forward(step, self.state).logits

    def _draw_step(self, filtered: bool, inputs: Tensor) -> Tensor:
        assert self.table is not None and self.decode is not None
        slots, positions = inputs[0].long(), inputs[1] + 1
        logits = self.decode.result(inputs.shape[1])
        ids = self.table.sample(logits, slots, positions, filtered)
        self.last_tokens[slots] = ids.clamp_min(0).to(torch.int32)
        return ids

    def _bucket(self, plan: StepPlan) -> int | None:
        """The bucket of graphs that can run this step, None for the model's functions one by one."""
        a = plan.arrays
        plain_rows = plan.num_decode == plan.num_rows > 0 and "kept" not in a and not plan.images
        if self.decode is None or not plain_rows or len(a["logit_rows"]) != plan.num_rows:
            return None
        return self.decode.can_run(plan.num_rows)

    # ---- steps ----

    def launch(self, plan: StepPlan) -> Ticket[StepResult]:
        """Start a step. If it breaks off, steps launched after it do not run, until `recover`.

        A host buffer is used again only `in_flight` steps later: by then its step was confirmed.
        """
        index, bucket = plan.step % len(self._buffers), self._bucket(plan)
        arrays = dict(plan.arrays)
        if bucket is not None:  # the rows go where the graph reads them
            rows = np.zeros((len(GRAPH_FIELDS), bucket), dtype=np.int32)
            for i, name in enumerate(GRAPH_FIELDS):
                field = arrays.get(name, arrays["slots"] if name == "kv_slots" else None)
                if field is not None:
                    rows[i, : plan.num_rows] = field
            arrays = {"graph": rows} | {
                name: array for name, array in arrays.items() if name in ("page_updates", "remember")
            }
        size = sum(array.size for array in arrays.values())
        if size > self._buffers[index].numel():
            self._buffers[index] = self.device.host_buffer(2 * size)
        buffer = self._buffers[index][:size]
        np.concatenate([array.ravel() for array in arrays.values()], out=buffer.numpy())
        return self.device.submit(lambda: self._run(plan, arrays, buffer, bucket))

    def recover(self) -> None:
        """After a step broke off and nothing is in flight: accept steps again. Memory of sequences is undefined."""
        with contextlib.suppress(RuntimeError):  # the device's own fault: what runs next will say so again
            self.device.synchronize()  # a step that broke off left nothing to wait for, but perhaps kernels
        self._broken = False

    @torch.inference_mode()
    def _run(
        self, plan: StepPlan, arrays: dict[str, NDArray[np.int32]], buffer: Tensor, bucket: int | None
    ) -> StepResult | Pending[StepResult]:
        if self._broken:
            raise Skipped("the step before this one broke off")
        self._broken = True
        if self.table is not None:
            self.table.set(plan.samplers)
        if bucket is None:
            a = self._unpack(arrays, buffer)
            self._write_tables(a)
            if plan.num_decode:
                a["ids"][: plan.num_decode] = self.last_tokens[a["slots"][: plan.num_decode].long()]
            logits = self.model.forward(self._inputs(plan, a), self.state).logits
            if "slot_copies" in a:
                self.state.copy_slots(*a["slot_copies"].long())
            if "page_copies" in a:
                self.state.copy_pages(*a["page_copies"].long())
        else:
            assert self.decode is not None
            rows = arrays["graph"].size
            self.decode.inputs(bucket).view(-1).copy_(buffer[:rows], non_blocking=True)
            more = {name: array for name, array in arrays.items() if name != "graph"}
            if more:
                self._write_tables(self._unpack(more, buffer[rows:]))
            logits = self.decode.replay(bucket)
        result = self._sample(plan, logits, bucket)
        self._broken = False
        return result

    def _unpack(self, arrays: dict[str, NDArray[np.int32]], buffer: Tensor) -> dict[str, Tensor]:
        """The arrays as device tensors int32: one copy."""
        on_device = buffer.to(self.device.torch, copy=True, non_blocking=True)
        parts = torch.split(on_device, [array.size for array in arrays.values()])
        return {
            name: part if array.ndim == 1 else part.view(array.shape)
            for (name, array), part in zip(arrays.items(), parts, strict=True)
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

    def _sample(self, plan: StepPlan, logits: Tensor, bucket: int | None) -> StepResult | Pending[StepResult]:
        for slot, row in plan.samplers:
            self._rows[slot] = row
        slots, at = plan.sample_slots, plan.sample_logits
        if self.table is None:
            return self._sample_on_host(plan, logits, np.arange(len(slots)), np.empty(len(slots), np.int64))
        plain = self.table.plain[slots]
        others = None
        if not len(slots) or not plain.all():  # before the logits are changed in place
            others = self._sample_on_host(plan, logits, np.flatnonzero(~plain), np.empty(len(slots), np.int64))
        elif plan.prompt_logprobs:
            others = StepResult(np.empty(len(slots), np.int64), {}, self._prompts(plan, logits))
        if not plain.any():
            assert others is not None  # rows were left to the host, or none sample: a chunk inside a prompt
            # nothing of such a chunk is read, yet the step has not ended, and its host buffer is still in use
            ended = self.device.to_host(self.last_tokens[:0], self._results[plan.step % len(self._results)])
            return Pending(functools.partial(self._finish, np.flatnonzero(plain), others, ended))
        filtered = bool(self.table.filtered[slots[plain]].any())
        if bucket is not None and plain.all():
            ids = self.draws[filtered].replay(bucket)[: len(slots)]
        else:
            where = self.device.upload(at[plain])
            own = self.device.upload(slots[plain])
            positions = self.device.upload(self._positions(plan)[plain])
            ids = self.table.sample(logits[where], own, positions, filtered)
            self.last_tokens[own] = ids.clamp_min(0).to(torch.int32)
        arrived = self.device.to_host(ids, self._results[plan.step % len(self._results)])
        return Pending(functools.partial(self._finish, np.flatnonzero(plain), others, arrived))

    @staticmethod
    def _finish(rows: NDArray[np.int64], others: StepResult | None, arrived: Callable[[], Tensor]) -> StepResult:
        """The step's result once the device's choice is on the host: `rows` of it, and what the host chose before."""
        ids = arrived().numpy()
        result = others or StepResult(np.empty(len(rows), np.int64), {}, [])
        result.tokens[rows] = ids
        for row in rows[ids < 0].tolist():
            best = -math.inf if result.tokens[row] == NONE_LEFT else math.nan
            result.details[row] = sampler.Sampled(-1, error=sampler.why_not(best))
        return result

    def _positions(self, plan: StepPlan) -> NDArray[np.int32]:
        """[R] position of the token that each sampling row produces."""
        a = plan.arrays
        positions: NDArray[np.int32] = a["positions"][a["logit_rows"][plan.sample_logits]] + 1
        return positions

    def _sample_on_host(
        self, plan: StepPlan, logits: Tensor, picked: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> StepResult:
        """Choose for the sampling rows `picked`; waits for the logits."""
        slots, at = plan.sample_slots[picked], plan.sample_logits[picked]
        rows = [row for slot in slots.tolist() if (row := self._rows[slot]) is not None]
        everything = len(at) == len(logits) and bool((at == np.arange(len(at))).all())
        drawn = sampler.sample(logits if everything else logits[self.device.upload(at)], rows)
        tokens[picked] = np.fromiter((one.token_id for one in drawn), np.int64, len(drawn))
        valid = np.maximum(tokens[picked], 0).astype(np.int32)  # a failed row may run once more: any id will do
        self.last_tokens[self.device.upload(slots)] = self.device.upload(valid)
        details = {}
        for i, row, one in zip(picked.tolist(), rows, drawn, strict=True):
            row.append(one.token_id)
            if one.error is not None or one.logprobs is not None:
                details[i] = one
        return StepResult(tokens, details, self._prompts(plan, logits))

    def _prompts(self, plan: StepPlan, logits: Tensor) -> list[tuple[PromptLogprobs, list[dict[int, Logprob]]]]:
        return [(p, self._prompt_logprobs(p, logits)) for p in plan.prompt_logprobs]

    @staticmethod
    def _prompt_logprobs(wanted: PromptLogprobs, logits: Tensor) -> list[dict[int, Logprob]]:
        num = wanted.seq.params.prompt_logprobs or 0
        rows = logits[wanted.first : wanted.first + len(wanted.targets)]
        return sampler.prompt_logprobs(rows, wanted.targets, num)
