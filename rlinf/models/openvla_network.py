"""The network of :mod:`rlinf.models.openvla`: vision transformers, projector, language model.

The vision transformers (arXiv 2010.11929) have the tensor names of timm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """A transformer block: attention and an MLP with pre-normalization and residuals.

    With FiLM (arXiv 1709.07871), a condition scales and shifts all patches between them.
    """

    def __init__(
        self, width: int, heads: int, mlp: int, *, scaled: bool = False, film_width: int = 0
    ) -> None:
        """
        Args:
            width: Number of channels.
            heads: Number of attention heads.
            mlp: Hidden size of the MLP.
            scaled: Whether a :class:`LayerScale` follows attention and MLP.
            film_width: Size of the condition; 0: no FiLM.
        """
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, NORM_EPS), nn.LayerNorm(width, NORM_EPS)
        self.attn, self.mlp = ViTAttention(width, heads), GeluMLP(width, mlp, width)
        self.ls1, self.ls2 = (LayerScale(width) if scaled else nn.Identity() for _ in range(2))
        if film_width:
            self.scale, self.shift = nn.Linear(film_width, width), nn.Linear(film_width, width)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return the output for patches ``[n, patches, width]``; ``condition`` is ``[n, size]``."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        if condition is not None:
            x = x * (1 + self.scale(condition)[:, None]) + self.shift(condition)[:, None]
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

    def __init__(self, settings: Mapping[str, Any], film_width: int = 0) -> None:
        """
        Args:
            settings: ``image_size`` (height and width), ``patch_size``, ``hidden_size``,
                ``num_hidden_layers``, ``num_attention_heads`` and ``intermediate_size``.
            film_width: As for :class:`ViTBlock`.
        """
        super().__init__()
        width, patch_size = settings["hidden_size"], settings["patch_size"]
        rows, columns = (side // patch_size for side in settings["image_size"])
        self.num_patches = rows * columns
        self.patch_embed = PatchEmbedding(patch_size, width)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, self.num_patches, width))
        heads, mlp = settings["num_attention_heads"], settings["intermediate_size"]
        self.blocks = nn.ModuleList(
            ViTBlock(width, heads, mlp, film_width=film_width)
            for _ in range(settings["num_hidden_layers"])
        )
        self.norm = nn.LayerNorm(width, NORM_EPS)

    def forward(self, pixels: Tensor, condition: Tensor | None = None) -> Tensor:
        x = self.patch_embed(pixels) + self.pos_embed
        for block in self.blocks:
            x = block(x, condition)
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

    def __init__(self, settings: Mapping[str, Any], film_width: int = 0) -> None:
        """
        Args:
            settings: As for :class:`VisionTower`, with at least two layers, and ``registers``: the
                number of register tokens of DINOv2; None for SigLIP, which has no class token, no
                registers and no layer scale.
            film_width: As for :class:`ViTBlock`.
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
            ViTBlock(width, heads, mlp, scaled=registers is not None, film_width=film_width)
            for _ in range(settings["num_hidden_layers"])
        ]
        self.blocks = nn.ModuleList([*blocks[:-1], UnusedTensors(blocks[-1])])
        self.norm = UnusedTensors(nn.LayerNorm(width, NORM_EPS))

    def forward(self, pixels: Tensor, condition: Tensor | None = None) -> Tensor:
        x = self.patch_embed(pixels) + self.pos_embed
        if self.num_prefix_tokens:
            tokens = torch.cat([self.cls_token, self.reg_token], 1)
            x = torch.cat([tokens.expand(len(x), -1, -1), x], 1)
        for block in self.blocks[:-1]:
            x = block(x, condition)
        return x[:, self.num_prefix_tokens :]


AUTOREGRESSIVE = "autoregressive"
"""``decoding`` in ``config.json``: each component of an action follows from those before it."""
L1 = "l1"
"""``action_head`` in ``config.json``: regression with the L1 loss."""
TOWERS = ("featurizer", "fused_featurizer")
"""OpenVLA's names of its two vision towers, DINOv2 and SigLIP."""


def first_action_token_id(settings: Mapping[str, Any]) -> int:
    """Return the id of the first action token. Action tokens precede the vocabulary's padding."""
    size = settings["text_config"]["vocab_size"] - settings.get("pad_to_multiple_of", 0)
    return int(size - settings["n_action_bins"])


class SingleTowerBackbone(nn.Module):
    """A vision backbone with one tower, from images to patch features."""

    def __init__(self, settings: Mapping[str, Any], film_width: int = 0) -> None:
        """
        Args:
            settings: The settings of :class:`VisionTower`.
            film_width: As for :class:`ViTBlock`.
        """
        super().__init__()
        self.featurizer = VisionTower(settings, film_width)
        self.width, self.num_patches = int(settings["hidden_size"]), self.featurizer.num_patches

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.featurizer.blocks)

    def forward(
        self, images: Tensor, dtype: torch.dtype, condition: Tensor | None = None
    ) -> Tensor:
        """Return features ``[n, patches, width]`` of images uint8 ``[n, H, W, 3]``."""
        pixels = images.permute(0, 3, 1, 2).to(dtype) / 127.5 - 1
        features: Tensor = self.featurizer(pixels, condition)
        return features


class FusedVisionBackbone(nn.Module):
    """A vision backbone that concatenates DINOv2 and SigLIP features (arXiv 2402.07865)."""

    def __init__(self, settings: Mapping[str, Mapping[str, Any]], film_width: int = 0) -> None:
        """
        Args:
            settings: For each of :data:`TOWERS`, the settings of :class:`PretrainedVisionTower`
                with ``mean`` and ``std`` of the colours in its training data, in [0, 1].
            film_width: As for :class:`ViTBlock`.
        """
        super().__init__()
        self.featurizer, self.fused_featurizer = (
            PretrainedVisionTower(settings[t], film_width) for t in TOWERS
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

    def forward(
        self, images: Tensor, dtype: torch.dtype, condition: Tensor | None = None
    ) -> Tensor:
        """Return features ``[n, patches, width]`` of images uint8 ``[n, H, W, 3]``."""
        pixels = self.normalize(images).to(dtype)
        first = self.featurizer(pixels[:, :3], condition)
        return torch.cat([first, self.fused_featurizer(pixels[:, 3:], condition)], -1)


class FusedProjector(nn.Module):
    """Three linear layers with GELUs between them."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, 4 * size), nn.Linear(4 * size, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))
        return out


class ResidualBlock(nn.Module):
    """A residual block of :class:`ResidualMLP`, with the tensor names of OpenVLA-OFT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.ffn(x)
        return out


class ResidualMLP(nn.Module):
    """An MLP with normalization and two residual blocks, with the tensor names of OpenVLA-OFT."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1, self.fc1 = nn.LayerNorm(inputs), nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(2))
        self.layer_norm2, self.fc2 = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        out: Tensor = self.fc2(self.layer_norm2(x))
        return out


class L1ActionHead(nn.Module):
    """The regression head of OpenVLA-OFT, trained with the L1 loss (arXiv 2502.19645)."""

    def __init__(self, width: int, action_dim: int) -> None:
        super().__init__()
        self.model = ResidualMLP(width * action_dim, width, action_dim)
        self._action_dim = action_dim

    def forward(self, hidden: Tensor) -> Tensor:
        """Return normalized actions ``[n, C, D]`` of hidden states ``[n, C * D, width]``."""
        joined = hidden.reshape(len(hidden), -1, self._action_dim * hidden.shape[-1])
        actions: Tensor = self.model(joined)
        return actions


class OpenVLANetwork(nn.Module):
    """The network from images, prompt and state to logits or actions, and a value."""

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
        self.is_autoregressive = settings.get("decoding") == AUTOREGRESSIVE
        self.uses_film = bool(settings.get("use_film", False))
        self.use_fused_vision_backbone = bool(settings["use_fused_vision_backbone"])
        width = text.hidden_size
        backbone = FusedVisionBackbone if self.use_fused_vision_backbone else SingleTowerBackbone
        self.vision_backbone = backbone(vision, width if self.uses_film else 0)
        features = self.vision_backbone.width
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
        self._num_components = self.action_shape[0] * self.action_shape[1]
        eos = text.eos_token_id
        self._eos_token_id = eos[0] if isinstance(eos, list) else int(eos or 0)
        # If placeholders are zeros, they differ only by their positions, which small networks learn
        # slowly. So small networks have learned placeholders.
        has_places = not (self.use_fused_vision_backbone or self.is_autoregressive)
        self.register_parameter(
            "places",
            nn.Parameter(0.02 * torch.randn(self._num_components, width)) if has_places else None,
        )
        self.action_head: L1ActionHead | None = None
        if settings.get("action_head") == L1:
            self.action_head = L1ActionHead(width, self.action_shape[1])
            self.language_model.lm_head = UnusedTensors(self.language_model.lm_head)
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
        return int(inputs + self._num_components + self._appends_eos)

    @property
    def blocks(self) -> list[nn.Module]:
        """The computed blocks of towers and language model."""
        return [*self.vision_backbone.blocks, *self.language_model.model.layers]

    @property
    def _appends_eos(self) -> bool:
        return self.use_fused_vision_backbone and not self.is_autoregressive

    def forward(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        state: Tensor | None,
        tokens: Tensor | None,
        **images: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return logits ``[n, C, D, bins]`` and values ``[n]`` (per action ``[n, C]``), float32.

        With a regression head, return normalized actions ``[n, C, D]`` instead of logits.

        Args:
            prompt: Token ids ``[n, L]``, padded on the left.
            prompt_mask: The mask of the prompt, bool ``[n, L]``.
            state: ``[n, proprio_dim]``.
            tokens: Token ids of the actions ``[n, C, D]``; only autoregressive decoding needs them.
            images: Images uint8 ``[n, H, W, 3]`` by camera.
        """
        prefix, valid = self._prefix(prompt, prompt_mask, state, images)
        if self.is_autoregressive:
            assert tokens is not None
            suffix = [self.language_model.model.embed_tokens(tokens.flatten(1)[:, :-1])]
        else:
            suffix = self._placeholders(prefix)
        inputs = torch.cat([prefix, *suffix], 1)
        valid = F.pad(valid, (0, inputs.shape[1] - valid.shape[1]), value=True)
        hidden = self._language_model(inputs, valid).last_hidden_state
        # As in any language model, the position before a component predicts it.
        start = prefix.shape[1] - 1
        predictors = hidden[:, start : start + self._num_components]
        if self.action_head is not None:
            return self.action_head(predictors).float(), self._value(predictors)
        return self._by_component(self._logits(predictors)), self._value(predictors)

    def decode(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        state: Tensor | None,
        choose: Callable[[Tensor, int], Tensor],
        **images: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the components of actions one after the other, with a KV cache.

        Args:
            prompt, prompt_mask, state, images: As for :meth:`forward`.
            choose: Returns the indices ``[n]`` of the bins of a component for logits ``[n, bins]``
                and the component's number.

        Returns:
            Indices ``[n, C, D]``, and logits and values as :meth:`forward`.
        """
        from transformers import DynamicCache

        inputs, valid = self._prefix(prompt, prompt_mask, state, images)
        cache, logits, indices, values = DynamicCache(), list[Tensor](), list[Tensor](), None
        for component in range(self._num_components):
            hidden = self._language_model(inputs, valid, cache).last_hidden_state[:, -1:]
            values = self._value(hidden) if values is None else values
            logits.append(self._logits(hidden)[:, 0])
            indices.append(choose(logits[-1], component))
            tokens = indices[-1][:, None] + self.first_action_token_id
            inputs = self.language_model.model.embed_tokens(tokens)
            valid = F.pad(valid, (0, 1), value=True)
        assert values is not None
        rows = self._by_component(torch.stack(indices, 1))
        return rows, self._by_component(torch.stack(logits, 1)), values

    def _prefix(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        state: Tensor | None,
        images: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the embeddings of images, state and prompt ``[n, S, width]``, and their mask."""
        dtype = self.projector.fc1.weight.dtype
        words = self.language_model.model.embed_tokens(prompt)
        condition = self._film_condition(words, prompt_mask) if self.uses_film else None
        parts = [
            self.projector(self.vision_backbone(images[name], dtype, condition))
            for name in self.cameras
        ]
        if self.proprio_dim:
            assert state is not None
            parts.append(self.proprio_projector(state.to(dtype))[:, None])
        if self.use_fused_vision_backbone:
            # OpenVLA inserts images and state after the first prompt token (BOS).
            begin = prompt_mask.long().argmax(1, keepdim=True)
            parts.insert(0, words.gather(1, begin[..., None].expand(-1, -1, words.shape[-1])))
            prompt_mask = prompt_mask.scatter(1, begin, value=False)
        inputs = torch.cat([*parts, words], 1)
        return inputs, F.pad(prompt_mask, (inputs.shape[1] - words.shape[1], 0), value=True)

    def _film_condition(self, words: Tensor, prompt_mask: Tensor) -> Tensor:
        """Return the mean embedding ``[n, width]`` of the prompt and the EOS token, as OFT."""
        total = (words * prompt_mask[..., None]).sum(1) + self._eos_embedding(words)
        return total / (prompt_mask.sum(1, keepdim=True) + 1)

    def _eos_embedding(self, like: Tensor) -> Tensor:
        token = torch.tensor(self._eos_token_id, device=like.device)
        embedding: Tensor = self.language_model.model.embed_tokens(token)
        return embedding

    def _placeholders(self, prefix: Tensor) -> list[Tensor]:
        """Return the embeddings of all components: zeros and EOS as in OFT, or learned ones."""
        if self.places is not None:
            return [self.places.to(prefix.dtype).expand(len(prefix), -1, -1)]
        zeros = prefix.new_zeros(len(prefix), self._num_components, prefix.shape[-1])
        if not self._appends_eos:
            return [zeros]
        return [zeros, self._eos_embedding(prefix).expand(len(prefix), 1, -1)]

    def _language_model(self, inputs: Tensor, valid: Tensor, cache: Any = None) -> Any:
        """Run the language model on embeddings ``[n, S, width]``, the last ones of ``valid``.

        Args:
            inputs: The embeddings that are not in the cache.
            valid: The mask of all positions, bool ``[n, total]``.
            cache: A KV cache with the positions before ``inputs``.
        """
        length, total = inputs.shape[1], valid.shape[1]
        mask = valid[:, None, None].expand(-1, 1, length, -1)
        if self.is_autoregressive:
            mask = mask & valid.new_ones(length, total).tril(total - length)
        return self.language_model.model(
            inputs_embeds=inputs,
            attention_mask=mask,
            position_ids=(valid.long().cumsum(1) - 1).clamp(min=0)[:, total - length :],
            past_key_values=cache,
            use_cache=cache is not None,
        )

    def _logits(self, predictors: Tensor) -> Tensor:
        """Return logits of action tokens ``[n, K, bins]``, float32, of states ``[n, K, width]``."""
        begin = self.first_action_token_id
        head = self.language_model.lm_head.weight[begin : begin + self.n_action_bins]
        return F.linear(predictors, head).float()

    def _by_component(self, column: Tensor) -> Tensor:
        """Return a column ``[n, C * D, ...]`` as ``[n, C, D, ...]``."""
        return column.reshape(len(column), *self.action_shape, *column.shape[2:])

    def _value(self, predictors: Tensor) -> Tensor:
        values: Tensor = self.value_head(predictors[:, 0]).float()
        return values if self._value_level == "action" else values[:, 0]
