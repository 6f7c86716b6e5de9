"""Vision transformers (arXiv 2010.11929), with the names of tensors that timm's have."""

from __future__ import annotations

from collections.abc import Mapping
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


class LayerScale(nn.Module):
    """A factor for each number (arXiv 2103.17239), by the name that OpenVLA's folders have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Block(nn.Module):
    """Attention and a perceptron, each after a layer norm and beside a straight path."""

    def __init__(self, width: int, heads: int, mlp: int, *, scaled: bool = False) -> None:
        """``scaled``: with a :class:`LayerScale` behind each."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, EPS), nn.LayerNorm(width, EPS)
        self.attn, self.mlp = Attention(width, heads), Perceptron(width, mlp, width)
        self.ls1, self.ls2 = (LayerScale(width) if scaled else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        out: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
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
    """From pixels ``[n, 3, H, W]`` in [-1, 1] to features ``[n, patches, width]``.

    Patches alone, without a class token.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
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


class Unread(nn.Module):
    """The tensors of a part that is never run, by its names: folders have them.

    They are buffers, so that nothing waits for gradients that never come.
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        for name, child in part.named_children():
            self.add_module(name, Unread(child))
        for name, tensor in part.named_parameters(recurse=False):
            self.register_buffer(name, tensor.detach())


class AttentionPool(nn.Module):
    """What SigLIP sums a picture up with; of a policy that looks at patches only tensors."""

    def __init__(self, width: int, mlp: int) -> None:
        super().__init__()
        self.latent = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.proj, self.norm = nn.Linear(width, width), nn.LayerNorm(width, EPS)
        self.mlp = Perceptron(width, mlp, width)


class PretrainedTower(nn.Module):
    """DINOv2 with registers (arXiv 2309.16588) or SigLIP (arXiv 2303.15343), as OpenVLA looks
    through them: from pixels ``[n, 3, H, W]``, normalised as the tower's are, to what the last
    block but one says of patches, ``[n, patches, width]``, without a norm.

    The last block, the norm and the pool of a folder are :class:`Unread`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """``settings``: as of :class:`VisionTower`, with at least two layers, and ``registers``:
        tokens beside a class token, with layer scale; None: SigLIP, which has neither."""
        super().__init__()
        width, patch, registers = (
            settings[name] for name in ("hidden_size", "patch_size", "registers")
        )
        heads, mlp = settings["num_attention_heads"], settings["intermediate_size"]
        rows, columns = (side // patch for side in settings["image_size"])
        self.patches = rows * columns
        self.patch_embed = PatchEmbedding(patch, width)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, self.patches, width))
        self.ahead = 0
        if registers is not None:
            self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
            self.reg_token = nn.Parameter(0.02 * torch.randn(1, registers, width))
            self.ahead = 1 + registers
        else:
            self.attn_pool = Unread(AttentionPool(width, mlp))
        made = [
            Block(width, heads, mlp, scaled=registers is not None)
            for _ in range(settings["num_hidden_layers"])
        ]
        self.blocks = nn.ModuleList([*made[:-1], Unread(made[-1])])
        self.norm = Unread(nn.LayerNorm(width, EPS))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed(pixels) + self.pos_embed
        if self.ahead:
            tokens = torch.cat([self.cls_token, self.reg_token], 1)
            x = torch.cat([tokens.expand(len(x), -1, -1), x], 1)
        for block in self.blocks[:-1]:
            x = block(x)
        return x[:, self.ahead :]
