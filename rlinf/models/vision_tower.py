"""A vision transformer (arXiv 2010.11929), with the names of tensors that timm's have.

Patches alone, without a class token, as SigLIP's towers are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6


class Attention(nn.Module):
    """Each patch sees all."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts.unbind(0))
        out: Tensor = self.proj(seen.transpose(1, 2).reshape(x.shape))
        return out


class Perceptron(nn.Module):
    """Two layers with a GELU between."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[2])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    """Attention and a perceptron, each after a layer norm and beside a straight path."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, EPS), nn.LayerNorm(width, EPS)
        self.attn, self.mlp = Attention(width, heads), Perceptron(width, mlp, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PatchEmbedding(nn.Module):
    """Squares of pixels as vectors."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return out


class VisionTower(nn.Module):
    """From pixels ``[n, 3, H, W]`` in [-1, 1] to features ``[n, patches, width]``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """``settings``: ``image_size`` (height and width), ``patch_size``, ``hidden_size``,
        ``num_hidden_layers``, ``num_attention_heads``, ``intermediate_size``."""
        super().__init__()
        width, patch = settings["hidden_size"], settings["patch_size"]
        rows, columns = (side // patch for side in settings["image_size"])
        self.patches = rows * columns
        self.patch_embed = PatchEmbedding(patch, width)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, self.patches, width))
        heads, mlp = settings["num_attention_heads"], settings["intermediate_size"]
        self.blocks = nn.ModuleList(
            Block(width, heads, mlp) for _ in range(settings["num_hidden_layers"])
        )
        self.norm = nn.LayerNorm(width, EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed(pixels) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out
