"""Sampling state on the device, by stable slot: what a captured step needs to choose tokens without the host.

Belongs here: the tables, their upload, which sequences they can serve. Does not belong here: the choice itself
(ops/sampling.py; engine/sampler.py defines it), the model's memory (model/state.py).

A sequence is *plain* if its tokens depend on nothing but the logits, its parameters and its position: no penalties,
masks, bias, bad words or log-probabilities. Others are sampled on the host (sampler.py), in the same step.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from deepinfer.engine.sampler import SamplingRow
from deepinfer.platform.device import Device


class SamplingTable:
    """Parameters of every slot in one int32 tensor [slots, 8] on the device and a mirror on the host."""

    def __init__(self, num_slots: int, device: Device, forbidden: tuple[int, ...]) -> None:
        """forbidden: ids that are never generated."""
        self.device = device
        self.plain = np.zeros(num_slots, dtype=np.bool_)
        self.filtered = np.zeros(num_slots, dtype=np.bool_)
        self.words = torch.zeros((num_slots, 8), dtype=torch.int32, device=device.torch)
        self.top_p = torch.ones(num_slots, dtype=torch.float64, device=device.torch)
        self._forbidden = torch.tensor(forbidden, dtype=torch.int64, device=device.torch)

    def set(self, rows: list[tuple[int, SamplingRow]]) -> None:
        """Parameters of the sequences that begin to sample, by slot."""
        slots: list[int] = []
        words, masses = np.zeros((len(rows), 8), dtype=np.int32), np.ones(len(rows))
        floats = words.view(np.float32)
        for slot, row in rows:
            p = row.params
            self.plain[slot] = not row.processed and p.logprobs is None
            self.filtered[slot] = not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
            if self.plain[slot]:
                i = len(slots)
                floats[i, 0] = 0.0 if p.greedy else min(p.temperature, 1e30)
                floats[i, 1] = math.log(p.min_p) if p.min_p > 0 else -math.inf
                words[i, 2], words[i, 3] = p.top_k, row.sample_index
                words[i, 4:6] = np.array([row.seed], dtype=np.uint64).view(np.int32)
                masses[i] = p.top_p
                slots.append(slot)
        if slots:
            index = self.device.upload(np.array(slots))
            self.words[index] = self.device.upload(words[: len(slots)])
            self.top_p[index] = self.device.upload(masses[: len(slots)])

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, filtered: bool) -> Tensor:
        """Ids int64 [M] of logits float32 [M, V] (changed in place): slots int64 [M], positions int32 [M] of the tokens
        that are chosen. Negative ids as ops.sampling says.
        """
        if self._forbidden.numel():
            logits.index_fill_(1, self._forbidden, -math.inf)
        row = self.words[slots]
        floats = row.view(torch.float32)
        ids, _ = torch.ops.di.sample(
            logits,
            floats[:, 0].contiguous(),
            row[:, 2].contiguous(),
            self.top_p[slots],
            floats[:, 1].contiguous(),
            row[:, 4:6].contiguous().view(torch.int64).view(-1),
            positions,
            row[:, 3].contiguous(),
            None,
            0,
            filtered,
            False,
        )
        found: Tensor = ids
        return found
