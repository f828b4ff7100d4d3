"""What an engine counts: rows, tokens, steps, preemptions, seconds.

Belongs here: counters and how people read them. Does not belong here: per-request times
(outputs.RequestMetrics), progress bars (llm.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineMetrics:
    """Totals since the engine was made. Times are seconds of wall clock inside `step`."""

    steps: int = 0
    prompt_rows: int = 0  # rows of prompt chunks, recomputed ones included
    decode_rows: int = 0
    output_tokens: int = 0
    finished_requests: int = 0
    preemptions: int = 0
    max_step_rows: int = 0  # the largest step: the effective max_num_batched_tokens
    busy_s: float = 0.0

    def count_step(self, rows: int, sampled: int, decode_rows: int, seconds: float) -> None:
        self.steps += 1
        self.prompt_rows += rows - decode_rows
        self.decode_rows += decode_rows
        self.output_tokens += sampled
        self.max_step_rows = max(self.max_step_rows, rows)
        self.busy_s += seconds

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.busy_s if self.busy_s else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.prompt_rows / self.busy_s if self.busy_s else 0.0
