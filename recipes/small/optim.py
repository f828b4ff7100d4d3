"""Muon for the matrices, AdamW for the rest: steps are few, and orthogonalised momentum needs about half of them.

Belongs here: which parameter goes to which optimiser, one step of both. Does not belong here: schedules (train.py).
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from recipes.small.twin import Weights

MATRICES = ("wqkv_a", "wq_b", "wo_a", "wo_b", "wkv_gate", "w13", "w2", "engram.wkv", "main_proj")


def is_matrix(name: str) -> bool:
    return name.endswith(tuple(m + ".weight" for m in MATRICES)) and ".indexer." not in name


def orthogonalise(g: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of g [B, n, k], by five quintic Newton-Schulz steps in bf16."""
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Optimiser:
    """`lr_matrix`: step of a matrix in units of its spectral norm; `lr`: AdamW's. Both are scaled by `step(factor)`."""

    def __init__(self, params: Weights, groups: int, lr_matrix: float, lr: float, decay: float = 0.01) -> None:
        self.lr_matrix, self.lr, self.decay, self.momentum = lr_matrix, lr, decay, 0.95
        self.shapes: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        rest = []
        for name, p in params.items():
            if is_matrix(name):  # wo_a is one matrix per group of heads
                view = p.unflatten(0, (groups, -1)) if name.endswith("wo_a.weight") else p
                self.shapes[tuple(view.shape)].append(p)
            else:
                rest.append((name, p))
        self.buffers = {s: torch.zeros((len(ps), *s), device=ps[0].device) for s, ps in self.shapes.items()}
        self.rest = [p for _, p in rest]
        slow = [p for n, p in rest if ".hc_" in n]
        fast = [p for n, p in rest if ".hc_" not in n]
        settings = {"betas": (0.9, 0.98), "eps": 1e-10, "weight_decay": 0.0}
        options = [{"params": fast, "scale": 1.0}] + ([{"params": slow, "scale": 0.5}] if slow else [])
        self.adam = torch.optim.AdamW(options, lr=lr, fused=self.rest[0].is_cuda, **settings)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update from the gradients, which are then dropped."""
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.lr * factor * group["scale"]
        self.adam.step()
        for shape, params in self.shapes.items():
            grads = torch.stack([p.grad.view(shape) if p.grad is not None else p.new_zeros(shape) for p in params])
            buffer = self.buffers[shape].lerp_(grads, 1 - self.momentum)
            update = grads.lerp_(buffer, self.momentum)  # Nesterov
            n, k = shape[-2:]
            update = orthogonalise(update.view(-1, n, k)).view(buffer.shape).float() * max(1.0, n / k) ** 0.5
            lr = self.lr_matrix * factor
            torch._foreach_mul_(params, 1 - lr * self.decay)
            torch._foreach_add_(params, [u.reshape(p.shape) for u, p in zip(update, params, strict=True)], alpha=-lr)
        self.drop()

    def drop(self) -> None:
        """Forget the gradients."""
        for p in (*self.rest, *(p for ps in self.shapes.values() for p in ps)):
            p.grad = None
