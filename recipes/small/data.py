"""Batches of training sequences from the files of prepare.py, or random ids for a benchmark.

Belongs here: which stretches of the corpus make a batch. Does not belong here: making the corpus (prepare.py).
Every sequence starts at the first token of a document, as every prompt does; documents that follow fill it up.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BOS = 0


class Corpus:
    """Ids uint16 of train.bin or heldout.bin; random ones when `file` is None."""

    def __init__(self, file: Path | None, vocab: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        if file is None:
            self.ids = self.rng.integers(3, vocab, 1 << 22, dtype=np.uint16)
            self.ids[::300] = BOS
        else:
            self.ids = np.fromfile(file, dtype="<u2")
        self.starts = np.flatnonzero(self.ids == BOS)
        self.lengths = np.diff(self.starts, append=len(self.ids))

    def batch(self, rows: int, length: int) -> Tensor:
        """int64 [rows, length + 1], pinned where there is a GPU. Long ones start at long documents, if any."""
        fits = self.starts + length < len(self.ids)
        pool = self.starts[fits & (self.lengths > 0.4 * length)] if length > 512 else self.starts[fits]
        if len(pool) < 4:
            pool = self.starts[fits]
        if len(pool) == 0:
            raise ValueError(f"the corpus of {len(self.ids)} ids holds no sequence of {length}")
        first = self.rng.choice(pool, rows)
        out = torch.from_numpy(self.ids[first[:, None] + np.arange(length + 1)].astype(np.int64))
        return out.pin_memory() if torch.cuda.is_available() else out

    def documents(self, tokens: int) -> list[np.ndarray]:
        """Whole documents from the front of the file, at least `tokens` ids in all."""
        count = int(np.searchsorted(np.cumsum(self.lengths), tokens)) + 1
        return [self.ids[s : s + n] for s, n in zip(self.starts[:count], self.lengths[:count], strict=True)]
