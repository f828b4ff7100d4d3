"""How fast is the engine on a CPU against a plain Hugging Face model of its size, and against reference ops?

Belongs here: contestants, cases, how they are timed. Does not belong here: the results format (report.py).

Every contestant is a process of its own, because the table of ops is fixed once per process. They take turns
case by case and round by round, so that a busy machine slows all of them; a number is the median over the
rounds. Ours is the whole `Engine.step`: scheduling, model, sampling, stop rules, text. Theirs is the model's
forward and an argmax, in the data type and with the expert code that are fastest for this model, phase, batch
and number of threads.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from deepinfer.studies import report

if TYPE_CHECKING:
    from deepinfer.model.config import ModelConfig

MODELS = ("tiny", "tiny-realdims")
BATCHES = (1, 8)
PROMPTS = (128, 512)
STEPS = 32  # timed decode steps of a round
ROUNDS = 9  # at most: as many as fit into SECONDS
SECONDS = 120.0  # loading the contestants comes on top
TRIAL_PROMPT, TRIAL_STEPS = 64, 8  # of the choice between data types and expert codes
REFERENCE_PROMPT, REFERENCE_STEPS = 128, 8  # the references take seconds for a prompt: one round is enough
QUIET = 1.0  # load average above which threads of one process wait for each other rather than compute
TARGET = 3.0  # times the decode throughput of transformers, at batch 8


@dataclass(frozen=True)
class Case:
    """`batch` prompts of `prompt` tokens, together, on `threads` threads."""

    model: str
    batch: int
    prompt: int
    threads: int

    def name(self, phase: str) -> str:
        return f"{phase}/{self.model}/batch{self.batch}/prompt{self.prompt}/threads{self.threads}"

    def prompts(self) -> list[list[int]]:
        """Random ids, none of them special: the same for every contestant."""
        draw = random.Random(str(self))
        return [[draw.randrange(3, 500) for _ in range(self.prompt)] for _ in range(self.batch)]


@dataclass
class Timing:
    """One round of a case, seconds. Modes: providers of our ops, or their data type and expert code."""

    prefill: float
    steps: list[float]
    prefill_mode: str
    decode_mode: str


class Contestant(Protocol):
    def run(self, case: Case, steps: int) -> Timing:
        """Prefill the prompts of `case`, then `steps` greedy decode steps."""
        ...

    def facts(self) -> dict[str, Any]:
        """What its numbers depend on: part of the results' meta."""
        ...


def timed(call: Callable[[], Any]) -> float:
    """Seconds that `call` takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# ---- ours ----


class Ours:
    """The engine as `LLM` builds it, with steps so large that a batch of prompts is one step."""

    def __init__(self) -> None:
        from deepinfer import LLM
        from deepinfer.ops import native, registry

        rows = max(BATCHES) * max(PROMPTS)
        limits = {"max_num_seqs": max(BATCHES), "max_num_batched_tokens": rows, "max_model_len": 1024}
        limits |= {"async_scheduling": False, "enable_prefix_caching": False}  # one step is timed at a time
        self.llms = {model: LLM(model, **limits) for model in MODELS}
        self.mode = "+".join(sorted(set(registry.chosen("cpu").values())))
        self.isa = native.isa()

    def run(self, case: Case, steps: int) -> Timing:
        import torch

        from deepinfer import SamplingParams

        torch.set_num_threads(case.threads)
        llm, engine = self.llms[case.model], self.llms[case.model].engine
        params = SamplingParams(temperature=0.0, max_tokens=1 + steps, ignore_eos=True)
        requests = [llm.make_request(ids, params) for ids in case.prompts()]

        def prefill() -> None:
            for request in requests:
                engine.submit(request)
            engine.step()

        timing = Timing(timed(prefill), [timed(engine.step) for _ in range(steps)], self.mode, self.mode)
        if engine.has_unfinished or any(len(r.sequences[0].output_ids) != 1 + steps for r in requests):
            raise RuntimeError(f"{case} was not timed as one prefill step and {steps} decode steps")
        return timing

    def facts(self) -> dict[str, Any]:
        config = self.llms[MODELS[0]].config
        sizes = {name: backbone_parameters(llm.engine.model_config) for name, llm in self.llms.items()}
        options = {"numerics": config.numerics, "replay": config.replay}
        return {"ops": self.mode, "isa": self.isa, **options, "parameters": sizes}


def backbone_parameters(config: ModelConfig) -> int:
    """Parameters without what the other model does not have: Engram, vision, draft."""
    from deepinfer.model.checkpoint import tensor_table

    backbone = ("layers.", "embed.", "head.", "norm.")
    table = tensor_table(config).items()
    return sum(t.parameters for name, t in table if name.startswith(backbone) and ".engram." not in name)


# ---- theirs ----

SAME_IN_V4 = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank"),
    *("o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "swiglu_limit"),
    *("routed_scaling_factor", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings"),
)


class Mode(NamedTuple):
    dtype: str
    experts: str

    def __str__(self) -> str:
        return f"{self.dtype}/{self.experts}"


class Transformers:
    """DeepSeek-V4 of Hugging Face `transformers`, random weights, its own cache, eager as it only can be."""

    DTYPES = ("float32", "bfloat16")
    PREFILL_EXPERTS = ("eager", "grouped_mm")
    DECODE_EXPERTS = (*PREFILL_EXPERTS, "batched_mm")  # copies the weights of each row's experts

    def __init__(self) -> None:
        import torch

        from deepinfer.model.synthetic import named_config

        self.library: Any = importlib.import_module("transformers")
        self.library.logging.set_verbosity_error()
        torch.manual_seed(0)
        new = self.library.DeepseekV4ForCausalLM._from_config
        self.models = {
            (name, dtype): new(hf_config(named_config(name)), dtype=getattr(torch, dtype)).eval()
            for name in MODELS
            for dtype in self.DTYPES
        }
        self.choose = cache(self._choose)

    def run(self, case: Case, steps: int) -> Timing:
        import torch

        torch.set_num_threads(case.threads)
        prefill, decode = self.choose(replace(case, prompt=TRIAL_PROMPT))
        seconds, state = self._prefill(case, prefill)
        if prefill.dtype != decode.dtype:  # the decode steps need a cache of their own type
            _, state = self._prefill(case, Mode(decode.dtype, prefill.experts))
        return Timing(seconds, self._decode(case, decode, state, steps), str(prefill), str(decode))

    def facts(self) -> dict[str, Any]:
        models = {name: self.models[name, self.DTYPES[0]] for name in MODELS}
        sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
        return {"version": self.library.__version__, "parameters": sizes}

    def _choose(self, trial: Case) -> tuple[Mode, Mode]:
        """The fastest mode of prefill and of decode."""
        prefill: dict[Mode, float] = {}
        decode: dict[Mode, float] = {}
        for dtype in self.DTYPES:
            for mode in (Mode(dtype, experts) for experts in self.PREFILL_EXPERTS):
                prefill[mode] = min(self._prefill(trial, mode)[0] for _ in range(2))
            for mode in (Mode(dtype, experts) for experts in self.DECODE_EXPERTS):
                _, state = self._prefill(trial, Mode(dtype, "grouped_mm"))
                decode[mode] = median(self._decode(trial, mode, state, TRIAL_STEPS))
        return min(prefill, key=prefill.__getitem__), min(decode, key=decode.__getitem__)

    def _model(self, case: Case, mode: Mode) -> Any:
        model = self.models[case.model, mode.dtype]
        model.set_experts_implementation(mode.experts)
        return model

    def _prefill(self, case: Case, mode: Mode) -> tuple[float, dict[str, Any]]:
        import torch

        model, ids, state = self._model(case, mode), torch.tensor(case.prompts()), {"cache": None}
        return timed(lambda: _forward(model, ids, state)), state

    def _decode(self, case: Case, mode: Mode, state: dict[str, Any], steps: int) -> list[float]:
        model = self._model(case, mode)
        return [timed(lambda: _forward(model, state["tokens"], state)) for _ in range(steps)]


def _forward(model: Any, ids: Any, state: dict[str, Any]) -> None:
    """Run `ids` [batch, n] behind the cache of `state`; leaves the next tokens there, on the host too."""
    import torch

    with torch.inference_mode():
        out = model(ids, cache=state["cache"], use_cache=True, logits_to_keep=1)
        state["cache"], state["tokens"] = out.cache, out.logits[:, -1].argmax(-1, keepdim=True)
        state["tokens"].tolist()


def hf_config(c: ModelConfig) -> Any:
    """DeepSeek-V4 of the same layers, widths, experts and vocabulary.

    V4 has no layer that reads another one's keys. A layer that selects entries itself becomes V4's layer with
    compression and index; one that reuses a selection becomes the cheaper one with compression and no index.
    """
    compressed = {True: "compressed_sparse_attention", False: "heavily_compressed_attention"}
    kinds = [compressed[layer.owns_index] if layer.ratio else "sliding_attention" for layer in c.layers]
    new = importlib.import_module("transformers").DeepseekV4Config
    return new(
        **{name: getattr(c, name) for name in SAME_IN_V4},
        layer_types=kinds,
        mlp_layer_types=["moe"] * c.num_hidden_layers,
        partial_rotary_factor=c.qk_rope_head_dim / c.head_dim,
        initializer_range=c.hidden_size**-0.5,  # keeps activations of order one, so that routing varies
        eos_token_id=None,
    )


# ---- the contest ----

CONTESTANTS: dict[str, tuple[Callable[[], Contestant], dict[str, str]]] = {
    "ours": (Ours, {}),
    "transformers": (Transformers, {}),
    "reference": (Ours, {"DEEPINFER_OPS": "*=reference"}),
}
_here: Contestant | None = None  # the one of this process


def _enter(name: str) -> None:
    global _here
    make, environment = CONTESTANTS[name]
    os.environ.update(environment)
    _here = make()


def _run(case: Case, steps: int) -> Timing:
    assert _here is not None
    return _here.run(case, steps)


def _facts() -> dict[str, Any]:
    assert _here is not None
    return _here.facts()


class Contest:
    """A process for each contestant, and all timings so far."""

    def __init__(self) -> None:
        spawn = get_context("spawn")
        self.processes = {name: ProcessPoolExecutor(1, spawn, _enter, (name,)) for name in CONTESTANTS}
        self.timings: dict[tuple[str, Case], list[Timing]] = {}

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.shutdown(cancel_futures=True)

    def facts(self) -> dict[str, Any]:
        return {name: process.submit(_facts).result() for name, process in self.processes.items()}

    def run(self, cases: Sequence[Case], seconds: float) -> int:
        """Rounds until the next one would not fit into `seconds`, at least one. Returns how many."""
        begin = time.monotonic()
        for case in cases:  # first touch of memory, choice of modes
            for name in ("ours", "transformers"):
                self.processes[name].submit(_run, replace(case, prompt=TRIAL_PROMPT), 1).result()
            if case.prompt == REFERENCE_PROMPT and case.threads == 1:
                self._time("reference", case, REFERENCE_STEPS)
        rounds, last = 0, 0.0
        while rounds < ROUNDS and (rounds == 0 or time.monotonic() - begin + last < seconds):
            start = time.monotonic()
            for case in cases:
                for name in ("ours", "transformers"):
                    self._time(name, case, STEPS)
            rounds, last = rounds + 1, time.monotonic() - start
            print(f"round {rounds}: {last:.0f} s", file=sys.stderr, flush=True)
        return rounds

    def _time(self, name: str, case: Case, steps: int) -> None:
        timing = self.processes[name].submit(_run, case, steps).result()
        self.timings.setdefault((name, case), []).append(timing)

    def median_us(self, name: str, case: Case, phase: str) -> float:
        samples = {"prefill": [t.prefill for t in self.timings[name, case]]}
        samples["decode"] = [step for t in self.timings[name, case] for step in t.steps]
        return 1e6 * median(samples[phase])


def cases(cores: int) -> list[Case]:
    """All on one thread, where a neighbour disturbs least; the short batch also on all cores."""
    single = [Case(model, batch, prompt, 1) for model in MODELS for batch in BATCHES for prompt in PROMPTS]
    return single + [Case(model, max(BATCHES), min(PROMPTS), cores) for model in MODELS if cores > 1]


def fill(out: report.Report, contest: Contest, done: Sequence[Case]) -> None:
    """A row for each phase of each case."""
    for phase in ("decode", "prefill"):
        for case in done:
            names = [name for name in CONTESTANTS if (name, case) in contest.timings]
            ours, *others = (contest.median_us(name, case, phase) for name in names)
            modes = {name: getattr(contest.timings[name, case][-1], f"{phase}_mode") for name in names}
            tokens = case.batch * (case.prompt if phase == "prefill" else 1)
            out.add(
                case.name(phase),
                ours,
                provider=modes["ours"],
                tok_per_s=tokens / ours * 1e6,
                baselines=dict(zip(names[1:], others, strict=True)),
                transformers_mode=modes["transformers"],
            )


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """What became of the aim that the project set for this bench."""
    wanted = [row for row in rows if row["case"].startswith("decode/") and "/batch8/" in row["case"]]
    ratio, case = min((row["ratio"]["transformers"], row["case"]) for row in wanted)
    reached = "reached" if ratio >= TARGET else "MISSED"
    return f"decode at batch 8, worst case {case}: {ratio:.2f}x transformers; the aim of {TARGET:g}x is {reached}"


def main(arguments: Sequence[str] | None = None, *, results: Path | None = None) -> None:
    """Command line of bench/cpu.py. results: the folder to write to unless --dry-run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all rounds, default %(default)g")
    parser.add_argument("--dry-run", action="store_true", help="print only, write no results file")
    options = parser.parse_args(arguments)
    if report.version("transformers") is None:
        parser.error("transformers is not installed; pip install 'deepinfer[bench]'")
    load = round(os.getloadavg()[0], 2)
    chosen = cases(report.cores() if load <= QUIET else 1)
    if load > QUIET:
        print(f"load average {load:.1f}: other work runs here; one thread only, and noisy numbers", file=sys.stderr)
    with Contest() as contest:
        facts: dict[str, Any] = contest.facts()
        rounds = contest.run(chosen, options.seconds)
        flags = {"rounds": rounds, "decode_steps": STEPS, "reference_decode_steps": REFERENCE_STEPS}
        out = report.Report("cpu", device=report.cpu(), flags=flags, load_average_before=load, **facts)
        fill(out, contest, chosen)
    print(verdict(out.rows), file=sys.stderr)
    out.finish(None if options.dry_run else results)
