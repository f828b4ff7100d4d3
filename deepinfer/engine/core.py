"""The engine: a queue of requests and the loop that turns steps of the model into their tokens.

Belongs here: life of a request (make, submit, step, finish, abort), the overlap of planning and running. Does not
belong here: building an engine from a checkpoint (load.py), prompt formats (llm.py), policy (scheduler.py), tensors
(runner.py). One thread uses an engine at a time.

A step is planned from what is planned, not from what was sampled, so the next one is launched before the last one's
tokens are read. A stop that is found one step late drops the extra row: results count only for the incarnation of a
slot that they were planned for.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import numpy as np

from deepinfer.cache.groups import PoolSizes, human, size_pools
from deepinfer.compile.modes import Mode
from deepinfer.config import IN_FLIGHT_STEPS, EngineConfig
from deepinfer.engine.metrics import EngineMetrics, Usage
from deepinfer.engine.plan import StepPlan
from deepinfer.engine.requests import Limits, Prompt, Request, Sequence
from deepinfer.engine.runner import Model, Runner, StepResult
from deepinfer.engine.sampler import Sampled, SeedSource
from deepinfer.engine.scheduler import Scheduler
from deepinfer.errors import EngineError
from deepinfer.model.config import ModelConfig
from deepinfer.model.state import ModelState
from deepinfer.outputs import Logprob, RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.platform.device import Device, Ticket
from deepinfer.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests with one model on one device.

    `make_request` validates without side effects, `submit` queues, `step` plans and launches one step and applies the
    results of an earlier one, `abort` gives up requests. `config` is fully resolved; `sizes` says how large the cache
    became.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: Model,
        tokenizer: Tokenizer,
        default_params: SamplingParams | None = None,
    ) -> None:
        """default_params: what requests use that bring none."""
        resolved = config.resolve_for(model_config)
        self.device = Device(config.device)
        self.sizes = _size_pools(config, model_config, self.device)
        self.config = replace(resolved, max_model_len=self.sizes.max_model_len)
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.default_params = default_params or SamplingParams()
        self.metrics = EngineMetrics(self._usage)
        self.requests: dict[str, Request] = {}
        self.limits = Limits(
            vocab_size=model_config.vocab_size,
            max_model_len=self.sizes.max_model_len,
            page_size=config.page_size,
            num_pages=self.sizes.num_pages,
            eos_token_id=model_config.eos_token_id,
            image_token_id=model_config.image_token_id,
            max_logprobs=config.max_logprobs,
            replay_keep=None if config.replay == "off" else resolved.replay_keep_tokens,
        )
        self.scheduler = Scheduler(
            num_pages=self.sizes.num_pages,
            num_slots=self.sizes.num_slots,
            page_size=config.page_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            compact=config.replay == "compact",
            prefix_keep=_prefix_keep(resolved, model_config) if config.enable_prefix_caching else None,
            look_back=max(0, model_config.engram_max_ngram_size - 1),
        )
        self.depth = IN_FLIGHT_STEPS if config.async_scheduling else 1
        state = _allocate(config, model_config, self.sizes)
        self.runner = Runner(model, state, self.device, IN_FLIGHT_STEPS, (model_config.image_token_id,))
        self.runner.compile(cast(Mode, resolved.compile), self.sizes.num_slots)
        self._in_flight: deque[tuple[StepPlan, Ticket[StepResult]]] = deque()
        self._late: list[Request] = []  # ended, but the step broke off before it said so
        self._seeds = SeedSource(config.seed)
        self._begin = 0.0  # of the step that is planned
        self._ids, self._arrivals = itertools.count(), itertools.count()

    # ---- life of a request ----

    def make_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, *, priority: int = 0
    ) -> Request:
        """Validate a request without queueing it; RequestError or UnsupportedError says what is wrong with it.

        priority: lower runs first, and takes memory from higher; equal ones run in the order of `make_request`.
        """
        bad_words = params.bad_word_ids(self.tokenizer.encode_ordinary) if params.bad_words else ()
        self.limits.check(prompt, params, bad_words)
        keep = self.limits.replay_keep
        all_rows = keep is None or params.prompt_logprobs is not None
        seed = self._seeds.next() if params.seed is None else params.seed
        return Request(
            request_id=request_id or f"request-{next(self._ids)}",
            prompt=prompt,
            params=params,
            seed=seed,
            max_tokens=self.limits.max_tokens(prompt, params),
            floor=0 if all_rows or keep is None else max(0, len(prompt.token_ids) - keep),
            eos_token_id=self.limits.eos_token_id,
            forbidden_ids=(self.limits.image_token_id,),
            bad_word_ids=bad_words,
            tokenizer=self.tokenizer,
            priority=priority,
            arrival=next(self._arrivals),
        )

    def submit(self, request: Request) -> None:
        """Queue a request."""
        if request.request_id in self.requests:
            raise EngineError(f"request id {request.request_id!r} is in use; ids of queued requests must differ")
        self.requests[request.request_id] = request
        self.scheduler.add(request.sequences[0], request.sequences[1:])

    def add_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, *, priority: int = 0
    ) -> Request:
        """`make_request` and `submit`."""
        request = self.make_request(prompt, params, request_id, priority=priority)
        self.submit(request)
        return request

    def abort(self, requests: Iterable[Request]) -> None:
        """Give up requests, at any time. What they hold is free once the steps in flight have ended; nothing they
        still sample counts. Finished and unknown ones are ignored.
        """
        for request in requests:
            self._stop(request)
            if self.requests.pop(request.request_id, None) is not None:
                request.metrics.finished_s = time.monotonic()
                self.metrics.observe(request.output())

    def _stop(self, request: Request) -> None:
        """End what is left of a request and free what it holds."""
        for seq in request.sequences:
            if seq.finish_reason is None:
                seq.finish("abort")
        self.scheduler.remove(request.sequences)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    # ---- the loop ----

    def step(self) -> list[RequestOutput]:
        """Plan and launch a step, then apply the oldest one in flight if there are enough; returns the requests that
        finished. [] is normal.

        Whatever raises here (Ctrl-C included) leaves the engine usable: running sequences recompute.
        """
        begin = self._begin = time.monotonic()
        try:
            plan = self.scheduler.schedule()
            if plan is not None:
                for seq in plan.admitted:
                    seq.request.metrics.first_scheduled_s = seq.request.metrics.first_scheduled_s or begin
                self._in_flight.append((plan, self.runner.launch(plan)))
            finished: list[RequestOutput] = []
            if self._in_flight and (plan is None or len(self._in_flight) >= self.depth):
                plan, ticket = self._in_flight[0]
                result = ticket.wait()
                self._in_flight.popleft()
                finished = self._apply(plan, result)
        except BaseException:
            self._recover()
            raise
        return finished + self._report(self._late)

    def _recover(self) -> None:
        """After something broke off: let the steps in flight end, forget them, and recompute from confirmed tokens."""
        for _, ticket in self._in_flight:
            ticket.settle()
        self._in_flight.clear()
        for request in list(self.requests.values()):
            for seq in request.sequences:
                seq.rewind()
            if request.finished:
                self._late.append(request)
        self.runner.recover()
        self.scheduler.restart()

    def _apply(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Hand tokens and logprobs to their sequences, drop those of earlier incarnations; free what ended."""
        now, table = time.monotonic(), self.scheduler.table
        slots = plan.sample_slots
        live = table.incarnation[slots] == plan.sample_incarnations
        look = plan.is_last | table.careful[slots] | (result.tokens == table.eos[slots])
        look[plan.num_decode :] = True  # first tokens
        look[list(result.details)] = True
        plain = np.flatnonzero(live & ~look)
        for slot, token in zip(slots[plain].tolist(), result.tokens[plain].tolist(), strict=True):
            table.outputs[slot].append(token)
        ended: list[Sequence] = []
        failed: dict[Request, None] = {}
        for i in np.flatnonzero(live & look).tolist():
            seq, detail = table.seqs[slots[i]], result.details.get(i)
            assert seq is not None
            if detail is not None and detail.error is not None:
                seq.request.error = detail.error
                failed[seq.request] = None
                continue
            self._accept(seq, int(result.tokens[i]), detail, now)
            if seq.finish_reason is not None:
                ended.append(seq)
        self._apply_prompt_logprobs(plan, result)
        for request in failed:
            if self.scheduler.prefix is not None:  # what they computed is not to be trusted
                self.scheduler.prefix.forget(page for seq in request.sequences for page in seq.pages)
            self._stop(request)
        self.scheduler.confirm(plan)
        self.scheduler.remove(ended)
        done = dict.fromkeys([*failed, *(seq.request for seq in ended if seq.request.finished)])
        outputs = self._report(list(done))
        seconds = time.monotonic() - self._begin
        self.metrics.count_step(plan.num_rows, int(live.sum()), plan.num_decode, seconds)
        self.metrics.preemptions = self.scheduler.num_preemptions
        return outputs

    def _report(self, ended: list[Request]) -> list[RequestOutput]:
        """Results of requests that ended; empties the list."""
        outputs = []
        while ended:
            request = ended[0]
            if self.requests.pop(request.request_id, None) is not None:  # not aborted meanwhile
                request.metrics.finished_s = time.monotonic()
                outputs.append(request.output())
                self.metrics.observe(outputs[-1])
            del ended[0]
        return outputs

    def _accept(self, seq: Sequence, token: int, detail: Sampled | None, now: float) -> None:
        request = seq.request
        if request.metrics.first_token_s is None:
            request.metrics.first_token_s = now
        logprobs = None if detail is None else detail.logprobs
        self._name_tokens(logprobs or {})
        seq.accept(token, None if detail is None else detail.logprob, logprobs)

    def _apply_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        alive = self.scheduler.table.alive(plan)
        for wanted, entries in result.prompt_logprobs:
            if alive[wanted.run] and wanted.seq.request.prompt_logprobs is not None:
                for entry in entries:
                    self._name_tokens(entry)
                wanted.seq.request.prompt_logprobs.extend(entries)

    def _usage(self) -> Usage:
        pages, slots, prefix = self.scheduler.pages, self.scheduler.slots, self.scheduler.prefix
        return Usage(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages_used=pages.num_used,
            pages_cached=pages.num_idle,
            pages_total=pages.total,
            slots_used=slots.num_used,
            slots_total=slots.total,
            prefix_queried_tokens=0 if prefix is None else prefix.queries,
            prefix_hit_tokens=0 if prefix is None else prefix.hits,
        )

    def _name_tokens(self, entry: dict[int, Logprob]) -> None:
        for token, logprob in entry.items():
            logprob.decoded_token = self.tokenizer.decode([token], skip_special_tokens=False)

    # ---- upkeep ----

    def drain(self) -> list[RequestOutput]:
        """Apply every step in flight and plan nothing new; returns the requests that finished."""
        finished = []
        while self._in_flight:
            plan, ticket = self._in_flight[0]
            try:
                result = ticket.wait()
                self._in_flight.popleft()
                finished += self._apply(plan, result)
            except BaseException:
                self._recover()
                raise
        return finished + self._report(self._late)

    def reset_prefix_cache(self) -> bool:
        """Forget what prefixes are cached. True if there is a cache."""
        if self.scheduler.prefix is not None:
            self.scheduler.prefix.clear()
        return self.scheduler.prefix is not None

    def close(self) -> None:
        """Abort what is queued and end the device's thread. The engine cannot be used afterwards."""
        self.abort(list(self.requests.values()))
        self._recover()
        self.runner.close()
        self.device.close()

    def check_idle(self) -> None:
        """EngineError unless nothing is queued or in flight and every page and slot is free. Every test that builds an
        engine ends so.
        """
        if self.requests or self.scheduler.running or self.scheduler.waiting:
            raise EngineError(f"not idle: {len(self.requests)} requests are unfinished")
        self.drain()
        self.scheduler.pages.check_idle()
        self.scheduler.slots.check_idle()


def _prefix_keep(config: EngineConfig, model_config: ModelConfig) -> int:
    """Rows that a prefix hit runs again: at least a window, also where replay is off and keeps any number."""
    return max(config.replay_keep_tokens or 0, model_config.sliding_window)


def _size_pools(config: EngineConfig, model_config: ModelConfig, device: Device) -> PoolSizes:
    sizes = size_pools(
        page_bytes=ModelState.bytes_per_page(model_config, config.page_size, config.numerics),
        slot_bytes=ModelState.bytes_per_slot(model_config, numerics=config.numerics),
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        model_limit=model_config.max_position_embeddings,
        max_model_len=config.max_model_len,
        num_pages=config.num_pages,
        memory_bytes=config.kv_cache_memory_bytes,
        free_bytes=device.free_memory(),
    )
    sizes.log()
    return sizes


def _allocate(config: EngineConfig, model_config: ModelConfig, sizes: PoolSizes) -> ModelState:
    state = ModelState.allocate(
        model_config,
        num_slots=sizes.num_slots + 1,
        num_pages=sizes.num_pages + 1,
        max_pages=sizes.max_pages,
        page_size=sizes.page_size,
        numerics=config.numerics,
        device=config.device,
    )
    for group, size in state.groups().items():
        logger.info("cache: %s %s", group, human(size))
    return state
