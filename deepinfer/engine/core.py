"""The engine: a queue of requests and the loop that turns steps of the model into their tokens.

Belongs here: life of a request (make, submit, step, finish, abort), building an engine from a checkpoint.
Does not belong here: prompt formats (llm.py), policy (scheduler.py), tensors (runner.py). This loop is
synchronous: a step is planned, run and applied before the next one is planned. One thread uses an engine at a
time.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from deepinfer import envs
from deepinfer.cache.groups import PoolSizes, free_memory, human, size_pools
from deepinfer.config import EngineConfig
from deepinfer.engine.metrics import EngineMetrics
from deepinfer.engine.requests import Limits, Prompt, Request
from deepinfer.engine.runner import Model, Runner, StepResult
from deepinfer.engine.sampler import SeedSource
from deepinfer.engine.scheduler import Scheduler, StepPlan
from deepinfer.errors import ConfigError, EngineError
from deepinfer.model import checkpoint, synthetic
from deepinfer.model.config import ModelConfig
from deepinfer.model.state import ModelState
from deepinfer.model.transformer import Transformer
from deepinfer.outputs import Logprob, RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.text.tokenizer import Tokenizer, engram_token_map

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests with one model on one device.

    `make_request` validates without side effects, `submit` queues, `step` runs the model once, `abort` gives
    up requests. `config` is fully resolved; `sizes` says how large the cache became.
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
        self.sizes = _size_pools(config, model_config)
        self.config = replace(resolved, max_model_len=self.sizes.max_model_len)
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.default_params = default_params or SamplingParams()
        self.metrics = EngineMetrics()
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
        )
        self.runner = Runner(model, _allocate(config, model_config, self.sizes))
        self._seeds = SeedSource(config.seed)
        self._ids = itertools.count()

    # ---- life of a request ----

    def make_request(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Request:
        """Validate a request without queueing it; RequestError or UnsupportedError says what is wrong with
        it.
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
        )

    def submit(self, request: Request) -> None:
        """Queue a request behind all others."""
        if request.request_id in self.requests:
            raise EngineError(f"request id {request.request_id!r} is in use; ids of queued requests must differ")
        self.requests[request.request_id] = request
        for seq in request.sequences:
            self.scheduler.add(seq)

    def add_request(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Request:
        """`make_request` and `submit`."""
        request = self.make_request(prompt, params, request_id)
        self.submit(request)
        return request

    def abort(self, requests: Iterable[Request]) -> None:
        """Give up requests: what they hold is free at once. Finished and unknown ones are ignored."""
        for request in requests:
            live = [seq for seq in request.sequences if seq.finish_reason is None]
            self.scheduler.remove(live)
            for seq in live:
                seq.finish("abort")
            self.requests.pop(request.request_id, None)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    # ---- the loop ----

    def step(self) -> list[RequestOutput]:
        """Run the model once over whatever the scheduler chooses; returns the requests that finished in this
        step.

        Whatever raises here (Ctrl-C included) leaves the engine usable: running sequences recompute.
        """
        begin = time.monotonic()
        try:
            plan = self.scheduler.schedule()
            if plan is None:
                return []
            result = self.runner.run(plan)
            self.scheduler.commit(plan)
            finished = self._apply(plan, result, begin)
        except BaseException:
            self.scheduler.restart()
            raise
        self.metrics.preemptions = self.scheduler.num_preemptions
        decode_rows = sum(run.start >= run.seq.num_prompt for run in plan.runs)
        self.metrics.count_step(plan.num_rows, len(result.sampled), decode_rows, time.monotonic() - begin)
        return [request.output() for request in finished]

    def _apply(self, plan: StepPlan, result: StepResult, begin: float) -> list[Request]:
        """Hand tokens and logprobs to their sequences; free what ended."""
        now = time.monotonic()
        for run in plan.runs:
            if run.seq.request.metrics.first_scheduled_s is None:
                run.seq.request.metrics.first_scheduled_s = begin
        for seq, entries in result.prompt_logprobs:
            for entry in entries:
                self._name_tokens(entry)
            if seq.request.prompt_logprobs is not None:
                seq.request.prompt_logprobs.extend(entries)
        touched: dict[Request, None] = {}
        for seq, sampled in result.sampled:
            request = seq.request
            touched[request] = None
            if sampled.error is not None:
                request.error = sampled.error
                continue
            if request.metrics.first_token_s is None:
                request.metrics.first_token_s = now
            self._name_tokens(sampled.logprobs or {})
            seq.accept(sampled.token_id, sampled.logprob, sampled.logprobs)
        self.scheduler.remove([seq for seq, _ in result.sampled if seq.finish_reason is not None])
        for request in touched:
            if request.error is not None:
                self.abort([request])
        finished = [request for request in touched if request.finished]
        for request in finished:
            request.metrics.finished_s = now
            self.requests.pop(request.request_id, None)
        self.metrics.finished_requests += len(finished)
        return finished

    def _name_tokens(self, entry: dict[int, Logprob]) -> None:
        for token, logprob in entry.items():
            logprob.decoded_token = self.tokenizer.decode([token], skip_special_tokens=False)

    # ---- upkeep ----

    def check_idle(self) -> None:
        """EngineError unless nothing is queued and every page and slot is free. Every test that builds an
        engine ends so.
        """
        if self.requests or self.scheduler.running or self.scheduler.waiting:
            raise EngineError(f"not idle: {len(self.requests)} requests are unfinished")
        self.scheduler.pages.check_idle()
        self.scheduler.slots.check_idle()


def load_engine(config: EngineConfig) -> Engine:
    """Read the checkpoint that `config.model` names and build an engine for it."""
    begin = time.monotonic()
    envs.warn_unknown()
    config.check_device()
    folder = checkpoint_folder(config.model)
    model_config = ModelConfig.from_dir(folder)
    config.resolve_for(model_config)  # an option beyond the model's limits is told before the weights are read
    tokenizer = Tokenizer(config.tokenizer or folder)
    weights = checkpoint.load_checkpoint(folder, model_config, device=config.device)
    token_map = None
    if model_config.engram_layer_ids:
        classes = model_config.engram_compressed_vocab_size
        token_map = torch.from_numpy(engram_token_map(tokenizer, model_config.vocab_size, num_classes=classes))
    model = Transformer(model_config, weights, token_map, numerics=config.numerics)
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    engine = Engine(config, model_config, model, tokenizer, SamplingParams.defaults_of(folder))
    seconds = time.monotonic() - begin
    logger.info("%s: %d tensors, %s of weights, ready in %.1f s", folder, len(weights), human(size), seconds)
    return engine


def checkpoint_folder(model: str) -> Path:
    """The folder of `model`: a folder as it is, or a synthetic name, written below DEEPINFER_CACHE_ROOT at
    first use.

    Written aside and renamed, so that several processes may start together on an empty cache.
    """
    if Path(model).is_dir():
        return Path(model)
    if model not in synthetic.CONFIGS:
        names = ", ".join(synthetic.CONFIGS)
        raise ConfigError(f"model {model!r} is neither a folder nor a synthetic checkpoint ({names})")
    root = Path(envs.get("DEEPINFER_CACHE_ROOT")) / "checkpoints"
    final = root / f"{model}-{_generator_digest()}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    logger.info("writing the synthetic checkpoint %s to %s", model, final)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{model}-") as scratch:
        synthetic.make_checkpoint(model, Path(scratch) / "new")
        try:
            os.rename(Path(scratch) / "new", final)
        except OSError:
            if not final.is_dir():  # otherwise another process was faster
                raise
    return final


def _generator_digest() -> str:
    """Names the code that writes synthetic checkpoints: a newer version never meets an older folder."""
    sources = (Path(str(module.__file__)).read_bytes() for module in (synthetic, checkpoint))
    return hashlib.blake2b(b"".join(sources), digest_size=4).hexdigest()


def _size_pools(config: EngineConfig, model_config: ModelConfig) -> PoolSizes:
    sizes = size_pools(
        page_bytes=ModelState.bytes_per_page(model_config, config.page_size, config.numerics),
        slot_bytes=ModelState.bytes_per_slot(model_config, numerics=config.numerics),
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        model_limit=model_config.max_position_embeddings,
        max_model_len=config.max_model_len,
        num_pages=config.num_pages,
        memory_bytes=config.kv_cache_memory_bytes,
        free_bytes=free_memory(),
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
