"""Vision tower, aligner and image spans (spec/model.md 10). Runs once per image, outside the text step.

Belongs here: patches -> embedding rows of a span. Does not belong here: resizing and patching (text/images.py).
Legend: n patches on a grid of gh x gw, V vision hidden, H text hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.model.config import ModelConfig, VisionConfig
from deepinfer.model.weights import Ops, Source

VISION_EPS = 1e-6


class Vision:
    """ViT + aligner + the three span rows. `tensors` is the flat dict of checkpoint.py."""

    def __init__(
        self,
        config: ModelConfig,
        vision: VisionConfig,
        tensors: Mapping[str, Tensor],
        ops: Ops,
        dtype: torch.dtype,
    ):
        self.vision, self.ops, self.dtype, self.hidden = vision, ops, dtype, config.hidden_size
        self.w = Source(tensors, "")

    def encode(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tower output: patches [n, 3, p, p] -> [n, V] in the activation dtype."""
        v, w = self.vision, self.w
        x = self._linear(patches.to(self.dtype).flatten(1), "vision.patch_embed.proj", bias=True)
        cos, sin = self._angles(grid, x.device)
        for b in range(v.num_hidden_layers):
            p = f"vision.blocks.{b}."
            qkv = self._linear(self._norm(x, p + "norm1"), p + "attn.wqkv", bias=True)
            o = self.ops.vision_attention(qkv, cos, sin, v.num_attention_heads)
            x = x + self._linear(o, p + "attn.wo", bias=True)
            gate, up = self._linear(self._norm(x, p + "norm2"), p + "mlp.w1").chunk(2, dim=1)
            x = x + self._linear(F.silu(gate) * up, p + "mlp.w2")  # silu rounds on its own
        return self.ops.rms_norm(x, w["vision.norm.weight"], VISION_EPS)

    def span(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Embedding rows of a whole span: START, then per row IMAGE * width + NEWLINE, then END. [tokens, H]."""
        rows = self.align(self.encode(patches, grid), grid)  # [lh, lw, H]
        row = lambda name: self.w[name].to(rows.dtype).view(1, -1)  # noqa: E731
        newline = row("image_newline").expand(rows.shape[0], 1, -1)
        body = torch.cat((rows, newline), dim=1).flatten(0, 1)
        return torch.cat((row("image_start"), body, row("image_end")))

    def align(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Merge r x r patches and project: [n, V] -> [ceil(gh/r), ceil(gw/r), H]; the grid is padded with zeros."""
        r = self.vision.downsample_ratio
        g = F.pad(x.view(*grid, -1), (0, 0, 0, -grid[1] % r, 0, -grid[0] % r))
        g = g.unflatten(0, (-1, r)).unflatten(2, (-1, r))  # [lh, r, lw, r, V]
        merged = g.permute(0, 2, 4, 1, 3).flatten(2)  # channel-major, then the r*r positions
        h = F.gelu(self._linear(merged.flatten(0, 1), "aligner.w1", bias=True))
        return self._linear(h, "aligner.w2", bias=True).view(merged.shape[0], merged.shape[1], self.hidden)

    def _linear(self, x: Tensor, name: str, bias: bool = False) -> Tensor:
        return self.ops.linear(x, self.w[name + ".weight"].flatten(1), self.w[name + ".bias"] if bias else None, False)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self.ops.rms_norm(x, self.w[name + ".weight"], VISION_EPS)

    def _angles(self, grid: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        """cos, sin float32 [n, d/2]: half of the frequencies turns with the row, half with the column."""
        v = self.vision
        half = v.hidden_size // v.num_attention_heads // 2
        freq = 1.0 / (v.rope_theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=device) / half))
        y, x = (torch.arange(n, dtype=torch.float32, device=device) for n in grid)
        angle = torch.cat(
            (
                (y[:, None] * freq)[:, None].expand(-1, grid[1], -1),
                (x[:, None] * freq)[None].expand(grid[0], -1, -1),
            ),
            dim=2,
        ).flatten(0, 1)
        return angle.cos(), angle.sin()
