"""A model small enough to know by heart, a byte tokenizer, and an engine over both.

The mock writes every token id into the paged pools and the rings exactly where the page table and slots say,
and reads its whole history back from there before it answers. A wrong page, slot, position or run, or memory
that was freed and poisoned with NaN, changes or breaks its answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.config import EngineConfig
from deepinfer.engine.core import Engine
from deepinfer.engine.requests import Prompt
from deepinfer.model.config import ModelConfig
from deepinfer.model.state import ModelState, StepInputs, StepOutputs
from deepinfer.model.synthetic import tiny

CONFIG = tiny()
VOCAB = CONFIG.vocab_size
BOS, EOS, PAD, IMAGE = CONFIG.bos_token_id, CONFIG.eos_token_id, CONFIG.pad_token_id, CONFIG.image_token_id
FIRST_BYTE = 3
EXTRA = {300: "ND", 301: "EN", 302: "xENDy", 303: "END", 304: "🚀"}


class ByteTokenizer:
    """ids: 0 BOS, 1 EOS, 2 pad, 3.. bytes, then a few tokens of several characters."""

    vocab_size = VOCAB
    special_ids = frozenset((BOS, EOS, PAD, IMAGE))

    def encode(self, text: str) -> list[int]:
        return [BOS, *self.encode_ordinary(text)]

    def encode_ordinary(self, text: str) -> list[int]:
        return [FIRST_BYTE + byte for byte in text.encode()]

    def token_bytes(self, token: int) -> bytes:
        if token in self.special_ids:
            return f"<{token}>".encode()
        if token < FIRST_BYTE + 256:
            return bytes([token - FIRST_BYTE])
        return EXTRA.get(token, f"[{token}]").encode()

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")


TOKENIZER: Any = ByteTokenizer()


def random_logits(history: list[int]) -> Tensor:
    """Logits that only this history gives; the image token would win if it were not forbidden."""
    generator = torch.Generator().manual_seed(zlib.crc32(bytes(str(history), "ascii")))
    logits = torch.randn(VOCAB, generator=generator)
    logits[IMAGE] = 9.0
    return logits


def scripted(answers: dict[str, list[int]]) -> Callable[[list[int]], Tensor]:
    """After the prompt with this text, these tokens; then EOS for ever. Every choice has a margin of 10."""
    table = {tuple(TOKENIZER.encode(text)): tokens for text, tokens in answers.items()}

    def logits(history: list[int]) -> Tensor:
        out = torch.zeros(VOCAB)
        for prompt, tokens in table.items():
            if tuple(history[: len(prompt)]) == prompt:
                place = len(history) - len(prompt)
                out[EOS] = 5.0  # runner-up everywhere
                out[tokens[place] if place < len(tokens) else EOS] = 10.0
        return out

    return logits


class MockModel:
    """`answer(history)` gives the logits after a history of token ids."""

    def __init__(self, answer: Callable[[list[int]], Tensor] = random_logits) -> None:
        self.answer = answer
        self.steps: list[StepInputs] = []
        self.images = 0
        self.before_step: Callable[[StepInputs], None] = lambda step: None

    def encode_image(self, patches: Tensor, grid_h: int, grid_w: int) -> Tensor:
        self.images += 1
        return torch.arange(1, 65, dtype=torch.float32).unsqueeze(1).expand(-1, CONFIG.hidden_size)

    def forward(self, step: StepInputs, state: ModelState) -> StepOutputs:
        self.before_step(step)
        self.steps.append(step)
        self._check(step, state)
        pool = next(pool for source, pool in state.latent.items() if pool.shape[1] == state.page_size)
        ring = state.window[0]
        slots, positions = step.slots.long(), step.positions.long()
        kv_slots = slots if step.kv_slots is None else step.kv_slots.long()
        pages = state.page_table[kv_slots, positions // state.page_size].long()
        assert (pages[kv_slots > 0] > 0).all(), "a row without a page"
        pool[pages, positions % state.page_size] = step.ids.float().unsqueeze(1)
        wanted = [(int(slots[row]), int(positions[row])) for row in step.logit_rows]
        answers = [self.answer(self._history(pool, state, slot, p)) for slot, p in wanted]
        last = torch.full((len(ring),), -1).scatter_reduce(0, slots, positions, "amax")[slots]
        kept = positions > last - state.ring  # of rows that share a place, the last one
        ring[slots[kept], positions[kept] % state.ring] = positions[kept].float().unsqueeze(1)
        return StepOutputs(torch.stack(answers) if answers else torch.zeros((0, VOCAB)), None)

    @staticmethod
    def _history(pool: Tensor, state: ModelState, slot: int, position: int) -> list[int]:
        at = torch.arange(position + 1)
        values = pool[state.page_table[slot, at // state.page_size].long(), at % state.page_size, 0]
        assert torch.isfinite(values).all(), "read of freed memory"
        return [int(value) for value in values]

    @staticmethod
    def _check(step: StepInputs, state: ModelState) -> None:
        rows = torch.arange(len(step.ids))
        assert (step.slots > 0).all() and (step.slots < state.page_table.shape[0]).all()
        assert (step.slots == step.slots[step.run_start.long()]).all()
        assert (step.positions - step.positions[step.run_start.long()] == rows - step.run_start).all()
        kept = rows if step.kept is None else step.kept
        assert set(step.logit_rows.tolist()) <= set(kept.tolist())
        assert (step.positions[kept] >= step.window_floor[kept]).all() or step.kept is None
        for row in rows[step.run_start == rows]:  # the newest earlier row that a run needs is still in its ring
            before = int(step.positions[row]) - 1
            if before >= (0 if step.ring_floor is None else int(step.ring_floor[row])):
                assert float(state.window[0][int(step.slots[row]), before % state.ring, 0]) == before


def mock_engine(
    model: MockModel | None = None, *, poison: bool = True, model_config: ModelConfig = CONFIG, **options: Any
) -> Engine:
    """An engine over the mock; small pages, and freed memory turns to NaN."""
    chosen: dict[str, Any] = {"num_pages": 40, "page_size": 8, "max_num_seqs": 4, **options}
    config = EngineConfig("mock", numerics="exact", **chosen)
    engine = Engine(config, model_config, model or MockModel(), TOKENIZER)
    if poison:
        poison_freed(engine)
    return engine


def poison_freed(engine: Engine) -> None:
    """From now on every page and slot whose content is given up is filled with NaN (0xFF in quantised pools)."""
    state, scheduler = engine.runner.state, engine.scheduler

    def poison(tensors: list[Tensor]) -> Callable[[int], None]:
        def fill(number: int) -> None:
            for tensor in tensors:
                tensor[number] = float("nan") if tensor.is_floating_point() else 255

        return fill

    scheduler.pages.on_reuse = poison([*state.latent.values(), *state.index_key.values()])
    scheduler.slots.on_reuse = poison([*state.window, *state.draft_window, *state.open_pair.values()])


def text_prompt(text: str) -> Prompt:
    return Prompt(TOKENIZER.encode(text), text)


def run(engine: Engine, limit: int = 10_000) -> dict[str, Any]:
    """Step until idle; results by request id."""
    results = {}
    for _ in range(limit):
        for output in engine.step():
            assert output.request_id not in results, "a request finished twice"
            results[output.request_id] = output
        if not engine.has_unfinished:
            engine.check_idle()
            return results
    raise AssertionError(f"not idle after {limit} steps")
