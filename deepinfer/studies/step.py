"""What a step costs: exact batches of decode rows and prefill rows, against the bytes and FLOPs that they need.

Belongs here: synthetic models on the device, memory filled as if sequences were long, times of captured steps, kernels
by name. Does not belong here: single ops (kernels/), the loop around steps (engine.py).

A decode case is `requests` rows, one of each request, every one with `context` tokens behind it. The floor counts
weights and cache records that the step must read (each expert that its rows use once) at the copy rate measured in the
same run; activations count for nothing. A prefill case counts the FLOPs of its matrix products and attention.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._autograd import DeviceType

from deepinfer.compile import counters
from deepinfer.compile.modes import Mode
from deepinfer.compile.passes import enabled
from deepinfer.config import IN_FLIGHT_STEPS
from deepinfer.engine.runner import GRAPH_FIELDS, Runner
from deepinfer.model import checkpoint, synthetic
from deepinfer.model.config import ModelConfig
from deepinfer.model.state import PAGE_SIZE, ModelState, StepInputs
from deepinfer.model.transformer import Transformer
from deepinfer.ops import registry
from deepinfer.platform.device import Device
from deepinfer.studies import report
from deepinfer.studies.kernels import harness

READS = {  # ops whose cost is weights and cache records
    *("linear", "linear_fp8", "linear_dequant", "router", "experts", "attention", "hc_mix"),
    *("index_topk", "index_topk_publish", "index_topk_blocks", "engram_gather"),
}
REPEATS, WARM = 15, 3


def random_model(config: ModelConfig, device: str) -> Transformer:
    """A synthetic model whose weights are drawn on the device."""
    weights = checkpoint.allocate(config, device)
    checkpoint.fill(weights, config, synthetic.synthetic_weights(config, 0, device))
    token_map = None
    if config.engram_layer_ids:
        token_map = torch.arange(config.vocab_size, dtype=torch.int32) % config.engram_compressed_vocab_size
    return Transformer(config, weights, token_map, donate=True)


class Bench:
    """A model, memory for `requests` sequences of `context` tokens, and a runner with everything captured."""

    def __init__(self, model: Transformer, requests: int, context: int, mode: Mode) -> None:
        self.model, self.mode = model, mode
        self.device = Device(str(model.device))
        pages = -(-(context + 64) // PAGE_SIZE)
        self.state = ModelState.allocate(
            model.config,
            num_slots=requests + 1,
            num_pages=requests * pages + 1,
            max_pages=pages,
            device=model.device,
        )
        self._fill(requests, pages)
        self.runner = Runner(model, self.state, self.device, IN_FLIGHT_STEPS, (model.config.image_token_id,))
        begin = time.perf_counter()
        self.runner.compile(mode, requests)
        self.start_s = time.perf_counter() - begin

    def _fill(self, requests: int, pages: int) -> None:
        """Random records whose scales are small and finite, pages in random order."""
        g = torch.Generator(str(self.model.device)).manual_seed(1)
        pools = [*self.state.window, *self.state.latent.values(), *self.state.index_key.values()]
        for pool in pools:
            pool.random_(0, 64, generator=g)
        for pair in self.state.open_pair.values():
            pair.normal_(generator=g)
        order = torch.randperm(requests * pages, generator=g, device=self.model.device).int() + 1
        self.state.page_table[1:] = order.view(requests, pages)

    def close(self) -> None:
        self.runner.close()
        self.device.close()
        del self.state, self.runner
        gc.collect()
        torch.cuda.empty_cache()

    # ---- decode ----

    def decode_inputs(self, rows: int, context: int) -> int:
        """Fill the graphs' input buffer for `rows` requests at `context`; returns the bucket."""
        graphs = self.runner.decode
        assert graphs is not None
        bucket = graphs.can_run(rows)
        assert bucket is not None
        inputs = graphs.inputs(bucket)
        inputs.zero_()
        slots = torch.arange(1, rows + 1, dtype=torch.int32, device=inputs.device)
        inputs[GRAPH_FIELDS.index("slots"), :rows] = slots
        inputs[GRAPH_FIELDS.index("kv_slots"), :rows] = slots
        inputs[GRAPH_FIELDS.index("positions"), :rows] = context
        vocab = self.model.config.vocab_size
        self.runner.last_tokens[1 : rows + 1] = torch.randint(0, vocab, (rows,), device=inputs.device).int()
        return bucket

    @torch.inference_mode()
    def decode(self, rows: int, context: int) -> dict[str, Any]:
        """Median microseconds of the captured step with the choice of tokens, and what it read."""
        bucket = self.decode_inputs(rows, context)
        graphs, draw = self.runner.decode, self.runner.draws[False]
        assert graphs is not None

        def step() -> None:
            graphs.replay(bucket)
            draw.replay(bucket)

        forward = _median_us(lambda: graphs.replay(bucket))
        whole = _median_us(step)
        kernels = kernel_times(step)
        self.decode_inputs(rows, context)
        bytes_read, flops, experts = self.costs(self._decode_step(rows, context))
        return {
            "median_us": forward,
            "with_sampling_us": whole,
            "bytes": bytes_read,
            "flops": flops,
            "distinct_experts": experts,
            "kernels": kernels,
            "bucket": bucket,
        }

    def _decode_step(self, rows: int, context: int) -> StepInputs:
        i32 = lambda v: torch.full((rows,), v, dtype=torch.int32, device=self.model.device)  # noqa: E731
        index = torch.arange(rows, dtype=torch.int32, device=self.model.device)
        return StepInputs(
            ids=self.runner.last_tokens[1 : rows + 1].clone(),
            positions=i32(context),
            slots=index + 1,
            run_start=index,
            is_image=torch.zeros(rows, dtype=torch.bool, device=self.model.device),
            window_floor=i32(0),
            logit_rows=None,
            want_taps=False,
        )

    # ---- prefill ----

    @torch.inference_mode()
    def prefill(self, rows: int, keep: int | None) -> dict[str, Any]:
        """Median microseconds of one chunk of `rows` prompt rows of one sequence; the decoder half runs on the last
        `keep` rows.
        """
        step = self.prefill_step(rows, keep)
        self.model.forward(step, self.state)
        median = _median_us(lambda: self.model.forward(step, self.state), repeats=5, warm=1)
        kernels = kernel_times(lambda: self.model.forward(step, self.state))
        bytes_read, flops, experts = self.costs(step)
        return {
            "median_us": median,
            "bytes": bytes_read,
            "flops": flops,
            "distinct_experts": experts,
            "kernels": kernels,
        }

    def prefill_step(self, rows: int, keep: int | None) -> StepInputs:
        device = self.model.device
        index = torch.arange(rows, dtype=torch.int32, device=device)
        zeros = torch.zeros(rows, dtype=torch.int32, device=device)
        return StepInputs(
            ids=torch.randint(0, self.model.config.vocab_size, (rows,), device=device).int(),
            positions=index,
            slots=zeros + 1,
            run_start=zeros,
            is_image=torch.zeros(rows, dtype=torch.bool, device=device),
            window_floor=zeros + (0 if keep is None else rows - keep),
            logit_rows=torch.tensor([rows - 1], device=device),
            kept=None if keep is None else torch.arange(rows - keep, rows, device=device),
            want_taps=False,
        )

    # ---- costs ----

    @torch.inference_mode()
    def costs(self, step: StepInputs) -> tuple[float, float, float]:
        """(bytes of weights and records, FLOPs, mean of distinct experts a layer) of a step, by the ops' own counts."""
        total = {"bytes": 0.0, "flops": 0.0}
        used: list[int] = []
        names = registry.OPS

        def counted(name: str) -> Callable[..., Any]:
            call = names[name].overload

            def run(*args: Any) -> Any:
                out = call(*args)
                if name in READS:
                    flops, moved = names[name].cost(*args)
                    total["bytes"] += moved
                    total["flops"] += flops
                if name == "experts":
                    used.append(int(args[2].unique().numel()))
                return out

            return run

        plain = self.model.ops
        own = self.model.__dict__
        compiled: dict[str, Any] = {k: own.pop(k) for k in ("front", "block", "read_out", "run_layers") if k in own}
        self.model.ops = SimpleNamespace(**{name: counted(name) for name in names})
        try:
            self.model.forward(step, self.state)
        finally:
            self.model.ops = plain
            own.update(compiled)
        return total["bytes"], total["flops"], statistics.mean(used)


def _median_us(call: Callable[[], Any], repeats: int = REPEATS, warm: int = WARM) -> float:
    for _ in range(warm):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def kernel_times(call: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """(name, launches, microseconds) of the kernels of one call, longest first."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    count: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            count[event.name] += 1
            spent[event.name] += event.device_time
    return [(name, count[name], float(us)) for name, us in spent.most_common()]


# ---- the study ----


def decode_cases(rows: tuple[int, ...], contexts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    yield from ((context, r) for context in contexts for r in rows)


def run(
    name: str,
    model_name: str,
    mode: Mode,
    rows: tuple[int, ...],
    contexts: tuple[int, ...],
    prefill: tuple[int, ...],
    results: Any = None,
    trace: str | None = None,
) -> None:
    """Measure decode and prefill steps of a synthetic model and write the report."""
    config = synthetic.named_config(model_name)
    rates = harness.ceilings()
    out = report.Report(
        name,
        kind="h200",
        device=torch.cuda.get_device_name(),
        flags={"repeats": REPEATS, "mode": mode, "passes": [p.name for p in enabled("cuda")]},
        **rates,
    )
    begin = time.perf_counter()
    model = random_model(config, "cuda")
    layers = model.config.num_hidden_layers
    print(f"{model_name}: weights drawn in {time.perf_counter() - begin:.1f} s", flush=True)
    bench = Bench(model, max(rows, default=1), max((*contexts, *prefill)), mode)
    compiled = bench.runner.compiled
    cost = bench.runner.decode.cost if bench.runner.decode else None
    print(f"compile and capture {bench.start_s:.1f} s, graphs {cost}, {counters.snapshot()}", flush=True)
    print(f"passes {compiled.matches if compiled else {}}", flush=True)
    for context, r in decode_cases(rows, contexts):
        found = bench.decode(r, context)
        _add(out, f"decode/{model_name}/ctx{context}/rows{r}/spec0", found, rates, mode, layers, r)
    keep = 140
    for r in prefill:
        _add(out, f"prefill/{model_name}/rows{r}", bench.prefill(r, min(r, keep)), rates, mode, layers, r)
    if prefill and trace:
        step = bench.prefill_step(prefill[0], keep)
        with torch.profiler.profile() as profiler:
            model.forward(step, bench.state)
            torch.cuda.synchronize()
        profiler.export_chrome_trace(trace)
    bench.close()
    out.finish(results)


def _add(
    out: report.Report, case: str, found: dict[str, Any], rates: dict[str, float], mode: Mode, layers: int, rows: int
) -> None:
    by_bytes = found["bytes"] / rates["bandwidth_gb_s"] / 1e3
    by_flops = found["flops"] / rates["matmul_tflop_s"] / 1e6
    floor, us = max(by_bytes, by_flops), found["median_us"]
    kernels = found.pop("kernels")
    launches = sum(n for _, n, _ in kernels)
    busy = sum(t for _, _, t in kernels)
    out.add(
        case,
        us,
        floor_us=floor,
        mode=mode,
        bound="bytes" if by_bytes >= by_flops else "bf16 flops",
        kernels=launches,
        kernels_per_layer=round(launches / layers, 1),
        kernel_us=round(busy, 1),
        tok_per_s=round(rows / us * 1e6, 1),
        distinct_experts=round(found["distinct_experts"], 1),
        with_sampling_us=found.get("with_sampling_us"),
        percent_of_peak=round(100 * by_flops / us, 2),
        top_kernels=[f"{name[:60]} x{n} {t:.0f} us" for name, n, t in kernels[:12]],
    )
    print(
        f"{case:45} {us:9.1f} us  {us / floor:5.2f}x floor ({floor:.0f} us)  {launches} kernels, "
        f"{launches / layers:.1f} a layer, busy {busy:.0f} us, experts {found['distinct_experts']:.0f}",
        flush=True,
    )
    for name, n, t in kernels[:25]:
        print(f"      {t:9.1f} us {n:5} x {name[:110]}", flush=True)
