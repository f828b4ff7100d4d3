"""What a request returns: plain dataclasses (spec/engine.md 7.3) and their JSON form.

Belongs here: fields, their meaning, `to_dict`. Does not belong here: how they are computed (engine/).
No torch, no numpy: results can be pickled, printed and stored anywhere.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
IMPOSSIBLE_LOGPROB = -9999.0  # JSON has no -inf; this is how the OpenAI API writes a probability of zero


@dataclass(slots=True)
class Logprob:
    """Natural-log probability of one token under the model's own distribution.

    The distribution is the softmax of the raw logits: before temperature, penalties, bias, masks and top-k/p.
    `rank` 1 is the most probable token of its position; of equal ones the lower id ranks first.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request (seconds of the engine's monotonic clock) and what it cost.

    `num_output_tokens` is known once the request ended, and is that of its longest sequence.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival to the first scheduled row."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first output token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        if self.finished_s is None or self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` sampled continuations of a prompt.

    `token_ids` holds every generated id, including the stop token that ended it; `text` holds neither that
    token nor (unless asked for) the stop string. `logprobs[i]` maps ids to `Logprob` for `token_ids[i]`: the
    sampled id first, then the most probable ones. `cumulative_logprob` sums the sampled ids' logprobs; None
    when none were asked for. `finish_reason` is None while running; `stop_reason` is the stop string or stop
    token id that matched, None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "cumulative_logprob": _finite(self.cumulative_logprob),
            "logprobs": None if self.logprobs is None else [_logprobs_to_dict(at) for at in self.logprobs],
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


@dataclass(slots=True)
class RequestOutput:
    """Everything about one prompt, in the order in which prompts were given.

    `prompt` is None when ids were given. `prompt_logprobs[i]` belongs to prompt token i; entry 0 is None,
    because nothing precedes it. `num_cached_tokens` counts prompt tokens taken from the prefix cache. `error`
    is None unless the request was given up (`outputs` then holds what was generated until then); see
    `LLM.generate` for which errors raise instead.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values: `json.dumps(output.to_dict(), allow_nan=False)` always works."""
        prompt_logprobs = None
        if self.prompt_logprobs is not None:
            prompt_logprobs = [None if at is None else _logprobs_to_dict(at) for at in self.prompt_logprobs]
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "prompt_logprobs": prompt_logprobs,
            "outputs": [output.to_dict() for output in self.outputs],
            "finished": self.finished,
            "metrics": None if self.metrics is None else asdict(self.metrics),
            "num_cached_tokens": self.num_cached_tokens,
            "error": self.error,
        }


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else IMPOSSIBLE_LOGPROB


def _logprobs_to_dict(at: dict[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {"logprob": _finite(lp.logprob), "rank": lp.rank, "decoded_token": lp.decoded_token}
        for token_id, lp in at.items()
    }
