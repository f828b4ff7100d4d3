"""Training's own checkpoints: float32 parameters in few files, each small enough to be copied off a rented machine.

Belongs here: saving and resuming. Does not belong here: the shipped format (quantise.py).
The rented machine gives back at most eight files of at most 16 MiB: the target takes two, the draft one, and the state
stands in the first file's header. The optimiser's state is not kept: momentum refills within the warm-up that follows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE_BYTES = 15 * 2**20


def save(folder: Path, name: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """`name`-0.safetensors, ... of about equal size. Number 0, which holds the state, is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value.detach().float().cpu().contiguous() for key, value in tensors.items()}
    count = max(1, -(-sum(v.nbytes for v in kept.values()) // FILE_BYTES))
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    sizes = [0] * count
    for key in sorted(kept, key=lambda k: (-kept[k].nbytes, k)):  # large ones first, each into the emptiest file
        at = sizes.index(min(sizes))
        parts[at][key] = kept[key]
        sizes[at] += kept[key].nbytes
    header = {"state": json.dumps(state | {"files": count})}
    for i in reversed(range(count)):
        save_file(parts[i], folder / f"{name}-{i}.safetensors", header if i == 0 else None)


def load(folder: Path, name: str, device: str | torch.device = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, state) of what `save` wrote."""
    tensors, count, state = {}, 1, {}
    i = 0
    while i < count:
        with safe_open(folder / f"{name}-{i}.safetensors", "pt") as file:
            tensors |= {key: file.get_tensor(key).to(device) for key in file.keys()}  # noqa: SIM118
            if i == 0:
                state = json.loads(file.metadata()["state"])
                count = state["files"]
        i += 1
    return tensors, state
