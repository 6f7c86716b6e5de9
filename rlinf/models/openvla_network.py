"""The network of :mod:`rlinf.models.openvla`: vision transformers, projector, language model.

The vision transformers (arXiv 2010.11929) have the tensor names of timm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.models.action_encoding import ValueLevel

NORM_EPS = 1e-6


class ViTAttention(nn.Module):
    """Bidirectional attention between all patches."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv.unbind(0))
        out: Tensor = self.proj(attended.transpose(1, 2).reshape(x.shape))
        return out


class GeluMLP(nn.Module):
    """Two linear layers with a GELU; ``sizes`` are those of input, hidden layer and output."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[2])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class LayerScale(nn.Module):
    """A learned factor per channel (arXiv 2103.17239), with the tensor name of OpenVLA."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class ViTBlock(nn.Module):
    """A transformer block: attention and an MLP with pre-normalization and residuals."""

    def __init__(self, width: int, heads: int, mlp: int, *, scaled: bool = False) -> None:
        """
        Args:
            width: Number of channels.
            heads: Number of attention heads.
            mlp: Hidden size of the MLP.
            scaled: Whether a :class:`LayerScale` follows attention and MLP.
        """
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, NORM_EPS), nn.LayerNorm(width, NORM_EPS)
        self.attn, self.mlp = ViTAttention(width, heads), GeluMLP(width, mlp, width)
        self.ls1, self.ls2 = (LayerScale(width) if scaled else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        out: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return out


class PatchEmbedding(nn.Module):
    """A linear embedding of image patches with side ``patch_size``."""

    def __init__(self, patch_size: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch_size, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return out


class VisionTower(nn.Module):
    """A vision transformer from pixels ``[n, 3, H, W]`` in [-1, 1] to ``[n, patches, width]``.

    It has no class token.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """
        Args:
            settings: ``image_size`` (height and width), ``patch_size``, ``hidden_size``,
                ``num_hidden_layers``, ``num_attention_heads`` and ``intermediate_size``.
        """
        super().__init__()
        width, patch_size = settings["hidden_size"], settings["patch_size"]
        rows, columns = (side // patch_size for side in settings["image_size"])
        self.num_patches = rows * columns
        self.patch_embed = PatchEmbedding(patch_size, width)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, self.num_patches, width))
        heads, mlp = settings["num_attention_heads"], settings["intermediate_size"]
        self.blocks = nn.ModuleList(
            ViTBlock(width, heads, mlp) for _ in range(settings["num_hidden_layers"])
        )
        self.norm = nn.LayerNorm(width, NORM_EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed(pixels) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


class UnusedTensors(nn.Module):
    """The tensors of a module that published folders have, but that policies never run. They are
    buffers, so that no component expects gradients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, child in module.named_children():
            self.add_module(name, UnusedTensors(child))
        for name, tensor in module.named_parameters(recurse=False):
            self.register_buffer(name, tensor.detach())


class AttentionPool(nn.Module):
    """The attention pooling of SigLIP; a policy uses only patch features, so this never runs."""

    def __init__(self, width: int, mlp: int) -> None:
        super().__init__()
        self.latent = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.proj, self.norm = nn.Linear(width, width), nn.LayerNorm(width, NORM_EPS)
        self.mlp = GeluMLP(width, mlp, width)


class PretrainedVisionTower(nn.Module):
    """DINOv2 with registers (arXiv 2309.16588) or SigLIP (arXiv 2303.15343), as OpenVLA uses them.

    It maps normalized pixels ``[n, 3, H, W]`` to the patch outputs of the second-to-last block,
    ``[n, patches, width]``, without a final norm. The last block, the norm and the pooling of a
    folder are :class:`UnusedTensors`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """
        Args:
            settings: As for :class:`VisionTower`, with at least two layers, and ``registers``: the
                number of register tokens of DINOv2; None for SigLIP, which has no class token, no
                registers and no layer scale.
        """
        super().__init__()
        width, patch_size, registers = (
            settings[name] for name in ("hidden_size", "patch_size", "registers")
        )
        heads, mlp = settings["num_attention_heads"], settings["intermediate_size"]
        rows, columns = (side // patch_size for side in settings["image_size"])
        self.num_patches = rows * columns
        self.patch_embed = PatchEmbedding(patch_size, width)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, self.num_patches, width))
        self.num_prefix_tokens = 0
        if registers is not None:
            self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
            self.reg_token = nn.Parameter(0.02 * torch.randn(1, registers, width))
            self.num_prefix_tokens = 1 + registers
        else:
            self.attn_pool = UnusedTensors(AttentionPool(width, mlp))
        blocks = [
            ViTBlock(width, heads, mlp, scaled=registers is not None)
            for _ in range(settings["num_hidden_layers"])
        ]
        self.blocks = nn.ModuleList([*blocks[:-1], UnusedTensors(blocks[-1])])
        self.norm = UnusedTensors(nn.LayerNorm(width, NORM_EPS))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed(pixels) + self.pos_embed
        if self.num_prefix_tokens:
            tokens = torch.cat([self.cls_token, self.reg_token], 1)
            x = torch.cat([tokens.expand(len(x), -1, -1), x], 1)
        for block in self.blocks[:-1]:
            x = block(x)
        return x[:, self.num_prefix_tokens :]


TOWERS = ("featurizer", "fused_featurizer")
"""OpenVLA's names of its two vision towers, DINOv2 and SigLIP."""


def first_action_token_id(settings: Mapping[str, Any]) -> int:
    """Return the id of the first action token. Action tokens precede the vocabulary's padding."""
    size = settings["text_config"]["vocab_size"] - settings.get("pad_to_multiple_of", 0)
    return int(size - settings["n_action_bins"])


class SingleTowerBackbone(nn.Module):
    """A vision backbone with one tower, from images to patch features."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """
        Args:
            settings: The settings of :class:`VisionTower`.
        """
        super().__init__()
        self.featurizer = VisionTower(settings)
        self.width, self.num_patches = int(settings["hidden_size"]), self.featurizer.num_patches

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.featurizer.blocks)

    def forward(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Return features ``[n, patches, width]`` of images uint8 ``[n, H, W, 3]``."""
        pixels = images.permute(0, 3, 1, 2).to(dtype) / 127.5 - 1
        features: Tensor = self.featurizer(pixels)
        return features


class FusedVisionBackbone(nn.Module):
    """A vision backbone that concatenates DINOv2 and SigLIP features (arXiv 2402.07865)."""

    def __init__(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """
        Args:
            settings: For each of :data:`TOWERS`, the settings of :class:`PretrainedVisionTower`
                with ``mean`` and ``std`` of the colours in its training data, in [0, 1].
        """
        super().__init__()
        self.featurizer, self.fused_featurizer = (
            PretrainedVisionTower(settings[t]) for t in TOWERS
        )
        self.width = sum(int(settings[tower]["hidden_size"]) for tower in TOWERS)
        self.num_patches = self.featurizer.num_patches
        self._mean_std = [[x for t in TOWERS for x in settings[t][n]] for n in ("mean", "std")]
        """The 6 means and the 6 standard deviations of the colours of both towers."""

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that are computed."""
        return [*self.featurizer.blocks[:-1], *self.fused_featurizer.blocks[:-1]]

    def normalize(self, images: Tensor) -> Tensor:
        """Return the images, normalized for each of the two towers, float32 ``[n, 6, H, W]``."""
        mean, std = torch.tensor(self._mean_std, device=images.device)[..., None, None]
        return (images.permute(0, 3, 1, 2).float().repeat(1, 2, 1, 1) / 255 - mean) / std

    def forward(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Return features ``[n, patches, width]`` of images uint8 ``[n, H, W, 3]``."""
        pixels = self.normalize(images).to(dtype)
        return torch.cat([self.featurizer(pixels[:, :3]), self.fused_featurizer(pixels[:, 3:])], -1)


class FusedProjector(nn.Module):
    """Three linear layers with GELUs between them."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, 4 * size), nn.Linear(4 * size, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))
        return out


class OpenVLANetwork(nn.Module):
    """The network from images, prompt and state to logits of all placeholders and a value."""

    places: nn.Parameter | None
    """Learned placeholders ``[C * D, width]``; None: placeholders are zeros."""

    def __init__(self, settings: Mapping[str, Any], value_level: ValueLevel = "chunk") -> None:
        """
        Args:
            settings: The result of :func:`rlinf.models.openvla_folder.read_openvla_config`.
            value_level: Whether there is one value per chunk or per action.
        """
        from transformers import AutoModelForCausalLM, LlamaConfig

        super().__init__()
        vision, text = settings["vision_config"], LlamaConfig(**settings["text_config"])
        self.action_shape = (int(settings["num_actions_chunk"]), int(settings["action_dim"]))
        self.cameras = list(settings["cameras"])
        self.first_action_token_id = first_action_token_id(settings)
        self.n_action_bins = int(settings["n_action_bins"])
        self.use_fused_vision_backbone = bool(settings["use_fused_vision_backbone"])
        self.vision_backbone = (
            FusedVisionBackbone(vision)
            if self.use_fused_vision_backbone
            else SingleTowerBackbone(vision)
        )
        width, features = text.hidden_size, self.vision_backbone.width
        self.projector = (
            FusedProjector(features, width)
            if self.use_fused_vision_backbone
            else GeluMLP(features, width, width)
        )
        factory: Any = AutoModelForCausalLM
        self.language_model = factory.from_config(
            text, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.proprio_dim = int(settings.get("proprio_dim", 0))
        if self.proprio_dim:
            self.proprio_projector = GeluMLP(self.proprio_dim, width, width)
        self._num_placeholders = self.action_shape[0] * self.action_shape[1]
        eos = text.eos_token_id
        self._eos_token_id = eos[0] if isinstance(eos, list) else int(eos or 0)
        # If placeholders are zeros, they differ only by their positions, which small networks learn
        # slowly. So small networks have learned placeholders.
        placeholders = (
            None
            if self.use_fused_vision_backbone
            else nn.Parameter(0.02 * torch.randn(self._num_placeholders, width))
        )
        self.register_parameter("places", placeholders)
        self._value_level = value_level
        self.value_head = GeluMLP(
            width, width, self.action_shape[0] if value_level == "action" else 1
        )
        nn.init.zeros_(self.value_head.fc2.weight)
        nn.init.zeros_(self.value_head.fc2.bias)

    @property
    def num_positions(self) -> int:
        """Number of sequence positions of a step, without its prompt."""
        inputs = self.vision_backbone.num_patches * len(self.cameras) + bool(self.proprio_dim)
        return int(inputs + self._num_placeholders + self.use_fused_vision_backbone)

    @property
    def blocks(self) -> list[nn.Module]:
        """The computed blocks of towers and language model."""
        return [*self.vision_backbone.blocks, *self.language_model.model.layers]

    def forward(
        self, prompt: Tensor, prompt_mask: Tensor, state: Tensor | None, **images: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits ``[n, C, D, bins]`` and values ``[n]`` (per action ``[n, C]``), float32.

        Args:
            prompt: Token ids ``[n, L]``, padded on the left.
            prompt_mask: The mask of the prompt, bool ``[n, L]``.
            state: ``[n, proprio_dim]``.
            images: Images uint8 ``[n, H, W, 3]`` by camera.
        """
        model = self.language_model.model
        dtype = self.projector.fc1.weight.dtype
        prefix = []
        for name in self.cameras:
            prefix.append(self.projector(self.vision_backbone(images[name], dtype)))
        if self.proprio_dim:
            assert state is not None
            prefix.append(self.proprio_projector(state.to(dtype))[:, None])
        prompt_embeddings = model.embed_tokens(prompt)
        suffix = []
        if self.use_fused_vision_backbone:
            # OpenVLA-OFT inserts images and state after the first prompt token (BOS), uses zeros
            # as placeholders, and appends the EOS token.
            begin = prompt_mask.long().argmax(1, keepdim=True)
            width = prompt_embeddings.shape[-1]
            bos = prompt_embeddings.gather(1, begin[..., None].expand(-1, -1, width))
            prefix.insert(0, bos)
            prompt_mask = prompt_mask.scatter(1, begin, value=False)
            placeholders = prompt_embeddings.new_zeros(len(prompt), self._num_placeholders, width)
            eos = prompt.new_full((len(prompt), 1), self._eos_token_id)
            suffix.append(model.embed_tokens(eos))
        else:
            assert self.places is not None
            placeholders = self.places.to(prompt_embeddings.dtype).expand(len(prompt), -1, -1)
        inputs = torch.cat([*prefix, prompt_embeddings, placeholders, *suffix], 1)
        start = sum(embedding.shape[1] for embedding in prefix)
        stop = start + prompt.shape[1]
        valid = F.pad(prompt_mask, (start, inputs.shape[1] - stop), value=True)
        hidden = model(
            inputs_embeds=inputs,
            attention_mask=valid[:, None, None].expand(-1, 1, valid.shape[1], -1),
            position_ids=(valid.long().cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        # As in any language model, the position before a placeholder predicts it.
        predictors = hidden[:, stop - 1 : stop - 1 + self._num_placeholders]
        head = self.language_model.lm_head.weight[
            self.first_action_token_id : self.first_action_token_id + self.n_action_bins
        ]
        logits = (
            F.linear(predictors, head)
            .float()
            .reshape(len(prompt), *self.action_shape, self.n_action_bins)
        )
        values = self.value_head(predictors[:, 0]).float()
        return logits, values if self._value_level == "action" else values[:, 0]
