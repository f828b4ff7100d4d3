"""A plain loop over the engine's model for evaluation: prefill, decode, draft and verify, one batch at a time.

Belongs here: driving Transformer.forward and Draft.propose. Does not belong here: what is measured (evaluate.py), the
product's scheduler and sampler (deepinfer/engine). No replay: every prompt row runs through every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.model.checkpoint import load_checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.state import PAGE_SIZE, ModelState, StepInputs
from deepinfer.model.transformer import Transformer
from deepinfer.text.tokenizer import Tokenizer, engram_token_map

CHUNK = 1024  # rows of a prefill step


@dataclass
class Block:
    """One draft and its verification."""

    accepted: int
    raw: Tensor  # float32 [g], the confidences before the sigmoid


@dataclass
class Run:
    """One request."""

    ids: list[int]  # prompt and what was generated
    prompt: int
    done: bool = False
    gaps: list[float] = field(default_factory=list)  # top-2 logit gap of every emitted token
    blocks: list[Block] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt :]


class Host:
    """A checkpoint folder, loaded."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.config = ModelConfig.from_dir(folder)
        self.tokenizer = Tokenizer(folder)
        token_map = torch.from_numpy(engram_token_map(self.tokenizer, self.config.vocab_size))
        self.model = Transformer(self.config, load_checkpoint(folder, self.config, device=device), token_map)
        self.device = device

    def state(self, slots: int, tokens: int) -> ModelState:
        pages = -(-tokens // PAGE_SIZE)
        state = ModelState.allocate(
            self.config, num_slots=slots + 1, num_pages=slots * pages + 1, max_pages=pages, device=self.device
        )
        state.page_table[1:] = torch.arange(1, slots * pages + 1, dtype=torch.int32).view(slots, pages)
        return state

    def forward(
        self, state: ModelState, runs: Sequence[tuple[int, int, Sequence[int]]], last_only: bool
    ) -> tuple[Tensor, Tensor]:
        """runs: (slot, first position, ids). Logits of all rows or of the last row of each run; taps of all rows."""
        lengths = torch.tensor([len(ids) for _, _, ids in runs])
        ends = lengths.cumsum(0)
        flat = lambda values: torch.cat([torch.as_tensor(v) for v in values]).int()  # noqa: E731
        ids = flat([r[2] for r in runs])
        out = self.model.forward(
            StepInputs(
                ids=ids,
                positions=flat([torch.arange(p, p + len(r)) for _, p, r in runs]),
                slots=flat([torch.full((len(r),), s) for s, _, r in runs]),
                run_start=(ends - lengths).repeat_interleave(lengths).int(),
                is_image=torch.zeros(len(ids), dtype=torch.bool),
                window_floor=torch.zeros_like(ids),
                logit_rows=ends - 1 if last_only else torch.arange(len(ids)),
            ),
            state,
        )
        assert out.taps is not None
        return out.logits, out.taps

    def prefill(self, state: ModelState, slot: int, ids: Sequence[int], last_only: bool = True) -> Tensor:
        """Logits of the last row (or all), with the draft's context written."""
        parts = []
        for i in range(0, len(ids), CHUNK):
            part = ids[i : i + CHUNK]
            logits, taps = self.forward(state, [(slot, i, part)], last_only)
            self._commit(state, [(slot, i, len(part))], taps)
            parts.append(logits)
        return parts[-1] if last_only else torch.cat(parts)

    def _commit(self, state: ModelState, runs: Sequence[tuple[int, int, int]], taps: Tensor) -> None:
        """Give the draft the taps of (slot, first position, rows) of each run, in order."""
        if self.model.draft is None:
            return
        column = lambda f: torch.cat([f(*r) for r in runs]).int()  # noqa: E731
        self.model.draft.write_context(
            taps,
            column(lambda s, p, n: torch.full((n,), s)),
            column(lambda s, p, n: torch.arange(p, p + n)),
            column(lambda s, p, n: torch.full((n,), p + n - 1)),
            state,
        )

    def greedy(self, prompt: Sequence[int], limit: int) -> list[int]:
        """The continuation of one prompt, EOS excluded."""
        state = self.state(1, len(prompt) + limit)
        logits, out = self.prefill(state, 1, prompt), []
        while len(out) < limit:
            token = int(logits[-1].argmax())
            if token == self.config.eos_token_id:
                break
            out.append(token)
            logits, _ = self.forward(state, [(1, len(prompt) + len(out) - 1, [token])], True)
        return out

    def speculate(
        self, prompts: Sequence[Sequence[int]], limit: int, temperature: float, generator: torch.Generator
    ) -> list[Run]:
        """Every prompt continued by up to `limit` tokens, always verifying the whole block.

        temperature 0: accept while the target's argmax agrees. Else rejection, token by token (spec/dspark.md 8.2).
        """
        g, draft = self.config.dspark_block_size, self.model.draft
        assert draft is not None
        runs = [Run(list(p), len(p)) for p in prompts]
        state = self.state(len(runs), max(map(len, prompts)) + limit + 2 * g)
        for slot, r in enumerate(runs, 1):
            self._emit(r, self._draw(self.prefill(state, slot, r.ids)[-1], temperature, generator), limit)
        while active := [(s, r) for s, r in enumerate(runs, 1) if not r.done]:
            slots = torch.tensor([s for s, _ in active], dtype=torch.int32)
            start = torch.tensor([len(r.ids) - 1 for _, r in active], dtype=torch.int32)
            anchors = torch.tensor([r.ids[-1] for _, r in active])

            def choose(logits: Tensor, _k: int) -> Tensor:
                return torch.stack([self._draw(row, temperature, generator)[0] for row in logits])

            guess = draft.propose(anchors, start, slots, torch.zeros_like(slots), state, choose)
            rows = [(s, len(r.ids) - 1, [r.ids[-1], *guess.tokens[i].tolist()]) for i, (s, r) in enumerate(active)]
            logits, taps = self.forward(state, rows, False)
            kept = []
            for i, (slot, r) in enumerate(active):
                mine, first = logits[i * (g + 1) : (i + 1) * (g + 1)], len(r.ids) - 1
                accepted = self._verify(r, guess.tokens[i], guess.logits[i], mine, temperature, generator, limit)
                if not r.done:  # a block cut by the end of its text says nothing about its other tokens
                    r.blocks.append(Block(accepted, guess.confidence[i].clone()))
                kept.append((slot, first, accepted + 1, i * (g + 1)))
            taken = torch.cat([taps[at : at + n] for _, _, n, at in kept])
            self._commit(state, [(s, p, n) for s, p, n, _ in kept], taken)
        return runs

    def _verify(
        self,
        r: Run,
        tokens: Tensor,
        guess: Tensor,
        target: Tensor,
        temperature: float,
        generator: torch.Generator,
        limit: int,
    ) -> int:
        """Emit the accepted tokens and one more; returns how many drafts were accepted."""
        for k, token in enumerate(tokens):
            if temperature == 0:
                good = int(target[k].argmax()) == int(token)
                rest = target[k]
            else:
                p, q = torch.softmax(target[k] / temperature, 0), torch.softmax(guess[k] / temperature, 0)
                good = bool(torch.rand((), generator=generator) * q[token] < p[token])
                left = (p - q).clamp_min(0)
                rest = (left if left.sum() > 0 else p).log() * temperature
            if not good:
                self._emit(r, (self._draw(rest, temperature, generator)[0], target[k]), limit)
                return k
            self._emit(r, (token, target[k]), limit)
        self._emit(r, self._draw(target[-1], temperature, generator), limit)
        return len(tokens)

    @staticmethod
    def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if temperature == 0:
            return logits.argmax(), logits
        return torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)[0], logits

    def _emit(self, r: Run, choice: tuple[Tensor, Tensor], limit: int) -> None:
        if r.done:
            return
        token, logits = choice
        top = logits.topk(2).values
        r.ids.append(int(token))
        r.gaps.append(float(top[0] - top[1]))
        r.done = r.ids[-1] == self.config.eos_token_id or len(r.ids) - r.prompt >= limit
