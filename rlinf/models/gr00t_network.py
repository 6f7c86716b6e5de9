"""The networks of :mod:`rlinf.models.gr00t`, with the tensor names of published folders.

A vision-language model encodes images and prompt: Eagle 2.5 (arXiv 2504.15271) in N1.5, Qwen3-VL
(arXiv 2511.21631) in N1.7. Its outputs are the prefix. A diffusion transformer (DiT, arXiv
2212.09748) denoises the actions: even blocks attend to the prefix, odd blocks to state and actions.
The encoders of state and actions and the decoder of actions have weights for each embodiment
(arXiv 2503.14734).

The reference does not mask the padding of prompts. Here it is masked, so a row has the outputs that
the reference computes for the row alone. No layer has dropout, because the likelihoods of rollout
and update must agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.models.action_encoding import ValueLevel
from rlinf.models.action_expert import FlowVLANetwork, KeyValues, PrefixCache, siglip_tower
from rlinf.models.attention import grouped_query_attention
from rlinf.models.openvla_network import UnusedTensors

TIME_CHANNELS = 256
"""Number of sinusoids of the time in the diffusion transformer."""
MAX_PERIOD = 10_000.0
"""Largest period of these sinusoids, divided by 2 pi."""
EAGLE, QWEN3_VL = "eagle_2_5_vl", "qwen3_vl"
"""Types of vision-language models, of N1.5 and N1.7."""


@dataclass(frozen=True)
class Gr00tPrefix(PrefixCache):
    """The prefix. Its ``layers`` are keys and values of the blocks of the diffusion transformer
    that attend to it; without them, the blocks compute them."""

    features: Tensor = field(default_factory=lambda: torch.empty(0))
    """Features of the vision-language model after their self-attention, ``[n, P, width]``."""
    block_masks: list[Tensor] = field(default_factory=list)
    """Positions to which each of these blocks attends, bool ``[n, 1, 1, P]``."""


class EmbodimentLinear(nn.Module):
    """A linear layer with weights ``W`` ``[embodiments, in, out]`` and biases ``b``."""

    def __init__(self, embodiments: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(embodiments, inputs, outputs))
        self.b = nn.Parameter(torch.empty(embodiments, outputs))
        nn.init.normal_(self.W, std=inputs**-0.5)
        nn.init.zeros_(self.b)

    def forward(self, states: Tensor, embodiment: int) -> Tensor:
        return states @ self.W[embodiment] + self.b[embodiment]


class EmbodimentMLP(nn.Module):
    """Two layers with a ReLU."""

    def __init__(self, embodiments: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(embodiments, inputs, hidden)
        self.layer2 = EmbodimentLinear(embodiments, hidden, outputs)

    def forward(self, states: Tensor, embodiment: int) -> Tensor:
        out: Tensor = self.layer2(F.relu(self.layer1(states, embodiment)), embodiment)
        return out


class ActionEncoder(nn.Module):
    """Encodes noisy actions and their times."""

    def __init__(self, embodiments: int, inputs: int, width: int) -> None:
        super().__init__()
        self.W1 = EmbodimentLinear(embodiments, inputs, width)
        self.W2 = EmbodimentLinear(embodiments, 2 * width, width)
        self.W3 = EmbodimentLinear(embodiments, width, width)

    def forward(self, actions: Tensor, time: Tensor, embodiment: int) -> Tensor:
        """Encode actions ``[..., C, A]`` at times ``[...]`` as ``[..., C, width]``."""
        hidden = self.W1(actions, embodiment)
        half = hidden.shape[-1] // 2
        exponents = -torch.arange(half, device=time.device) * (math.log(MAX_PERIOD) / half)
        angles = time[..., None] * exponents.exp()
        times = torch.cat([angles.sin(), angles.cos()], -1).to(hidden.dtype)
        hidden = torch.cat([hidden, times[..., None, :].expand_as(hidden)], -1)
        out: Tensor = self.W3(F.silu(self.W2(hidden, embodiment)), embodiment)
        return out


class TimeEncoder(nn.Module):
    """Encodes times ``[n]`` as the conditions ``[n, width]`` of adaptive norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = {"linear_1": nn.Linear(TIME_CHANNELS, width), "linear_2": nn.Linear(width, width)}
        self.timestep_embedder = nn.ModuleDict(layers)

    def forward(self, time: Tensor) -> Tensor:
        half, layers = TIME_CHANNELS // 2, self.timestep_embedder
        exponents = -math.log(MAX_PERIOD) * torch.arange(half, device=time.device) / (half - 1)
        angles = time[:, None] * exponents.exp()
        sinusoids = torch.cat([angles.cos(), angles.sin()], -1)
        first: Any = layers["linear_1"]
        hidden = first(sinusoids.to(first.weight.dtype))
        out: Tensor = layers["linear_2"](F.silu(hidden))
        return out


class AdaptiveLayerNorm(nn.Module):
    """A layer norm whose scale and shift follow from a condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.linear(F.silu(condition))[:, None].chunk(2, -1)
        return F.layer_norm(hidden, hidden.shape[-1:]) * (1 + scale) + shift


class DiTAttention(nn.Module):
    """Attention with the tensor names of diffusers."""

    def __init__(self, width: int, heads: int, source_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k, self.to_v = nn.Linear(source_width, width), nn.Linear(source_width, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def key_values(self, source: Tensor) -> KeyValues:
        return self._split_heads(self.to_k(source)), self._split_heads(self.to_v(source))

    def forward(self, hidden: Tensor, key_values: KeyValues, mask: Tensor | None) -> Tensor:
        """Attend from ``[n * K, S, width]`` to keys and values ``[n, heads, L, head_dim]``."""
        keys, values = key_values
        queries = self.to_q(hidden).reshape(len(keys), -1, hidden.shape[-1])
        attended = grouped_query_attention(self._split_heads(queries), keys, values, mask)
        out: Tensor = self.to_out[0](attended.transpose(1, 2).reshape(hidden.shape))
        return out

    def _split_heads(self, states: Tensor) -> Tensor:
        return states.reshape(*states.shape[:-1], self.heads, -1).transpose(1, 2)


class DiTBlock(nn.Module):
    """A transformer block with adaptive norms, or with usual norms, whose weights are learned."""

    def __init__(self, width: int, heads: int, source_width: int, *, is_adaptive: bool) -> None:
        super().__init__()
        self.norm1 = AdaptiveLayerNorm(width) if is_adaptive else nn.LayerNorm(width)
        self.attn1 = DiTAttention(width, heads, source_width)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=not is_adaptive)
        projection = nn.ModuleDict({"proj": nn.Linear(width, 4 * width)})
        layers = nn.ModuleDict({"0": projection, "2": nn.Linear(4 * width, width)})
        self.ff = nn.ModuleDict({"net": layers})

    def forward(
        self,
        hidden: Tensor,
        condition: Tensor | None = None,
        source: Tensor | KeyValues | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the next hidden states ``[n * K, S, width]``.

        Args:
            hidden: ``[n * K, S, width]``.
            condition: The condition of adaptive norms, ``[n * K, width]``.
            source: Another sequence to attend to, ``[n, L, source_width]``, or its keys and values;
                None: the hidden states.
            mask: Visible positions, bool ``[n, 1, 1, L]``.
        """
        inputs = self.norm1(hidden) if condition is None else self.norm1(hidden, condition)
        source = inputs if source is None else source
        key_values = self.attn1.key_values(source) if isinstance(source, Tensor) else source
        hidden = hidden + self.attn1(inputs, key_values, mask)
        layers: Any = self.ff["net"]
        inner = F.gelu(layers["0"]["proj"](self.norm3(hidden)), approximate="tanh")
        out: Tensor = hidden + layers["2"](inner)
        return out


class DiffusionTransformer(nn.Module):
    """Blocks that attend to the prefix and to themselves in turn."""

    def __init__(self, sizes: Mapping[str, Any], source_width: int) -> None:
        super().__init__()
        heads = sizes["num_attention_heads"]
        width = heads * sizes["attention_head_dim"]
        period = 2 if sizes["interleave_self_attention"] else 1
        self.timestep_encoder = TimeEncoder(width)
        widths = [source_width if i % period == 0 else width for i in range(sizes["num_layers"])]
        self.transformer_blocks = nn.ModuleList(
            DiTBlock(width, heads, source, is_adaptive=True) for source in widths
        )
        self.cross_blocks = range(0, sizes["num_layers"], period)
        """Indices of the blocks that attend to the prefix."""
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, sizes["output_dim"])

    def prefix_key_values(self, features: Tensor) -> list[KeyValues]:
        """Return the keys and values of features ``[n, P, width]`` in each block that attends to
        the prefix."""
        blocks: Any = self.transformer_blocks
        return [blocks[index].attn1.key_values(features) for index in self.cross_blocks]

    def forward(self, hidden: Tensor, time: Tensor, prefix: Gr00tPrefix) -> Tensor:
        """Return ``[n * K, S, output_dim]`` for hidden states ``[n * K, S, width]`` at times
        ``[n * K]``."""
        condition = self.timestep_encoder(time)
        sources: list[Any] = [*prefix.layers] or [prefix.features] * len(self.cross_blocks)
        pairs = zip(sources, prefix.block_masks, strict=True)
        prefixes = dict(zip(self.cross_blocks, pairs, strict=True))
        for index, block in enumerate(self.transformer_blocks):
            hidden = block(hidden, condition, *prefixes.get(index, ()))
        shift, scale = self.proj_out_1(F.silu(condition))[:, None].chunk(2, -1)
        normalized = F.layer_norm(hidden, hidden.shape[-1:], eps=1e-6)
        out: Tensor = self.proj_out_2(normalized * (1 + scale) + shift)
        return out


class ActionHead(nn.Module):
    """The diffusion transformer with the layers before and after it."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        """
        Args:
            sizes: See :func:`rlinf.models.gr00t_folder.head_sizes`.
        """
        super().__init__()
        source, width = sizes["backbone_embedding_dim"], sizes["input_embedding_dim"]
        hidden, count = sizes["hidden_size"], sizes["max_num_embodiments"]
        attention, action_dim = sizes["vl_self_attention_cfg"], sizes["max_action_dim"]
        self.model = DiffusionTransformer(sizes["diffusion_model_cfg"], source)
        self.state_encoder = EmbodimentMLP(count, sizes["max_state_dim"], hidden, width)
        self.action_encoder = ActionEncoder(count, action_dim, width)
        self.action_decoder = EmbodimentMLP(count, hidden, hidden, action_dim)
        self.vlln = nn.LayerNorm(source)
        blocks = [
            DiTBlock(source, attention["num_attention_heads"], source, is_adaptive=False)
            for _ in range(attention["num_layers"])
        ]
        self.vl_self_attention = nn.ModuleDict({"transformer_blocks": nn.ModuleList(blocks)})
        self.position_embedding = nn.Embedding(sizes["max_seq_len"], width)
        nn.init.normal_(self.position_embedding.weight, std=0.02)
        self.future_tokens: nn.Embedding | None = None
        """Learned tokens between state and actions, which N1.7 does not have."""
        if sizes["num_target_vision_tokens"]:
            self.future_tokens = nn.Embedding(sizes["num_target_vision_tokens"], width)
            nn.init.normal_(self.future_tokens.weight, std=0.02)

    def refine_features(self, features: Tensor, mask: Tensor) -> Tensor:
        """Return the features of the prefix after its self-attention, ``[n, P, width]``."""
        features = self.vlln(features)
        blocks: Any = self.vl_self_attention["transformer_blocks"]
        for block in blocks:
            features = block(features, mask=mask[:, None, None])
        return features


class EagleBackbone(nn.Module):
    """Eagle 2.5: SigLIP, a linear layer, and the lower layers of Qwen3."""

    def __init__(self, settings: Mapping[str, Any], sizes: Mapping[str, Any], side: int) -> None:
        """
        Args:
            settings: The ``config.json`` of Eagle.
            sizes: See :func:`rlinf.models.gr00t_folder.head_sizes`.
            side: Side of an image, pixels.
        """
        from transformers import Qwen3Config, Qwen3Model

        super().__init__()
        config = Qwen3Config(**lower_layers(settings["text_config"], sizes["select_layer"]))
        qwen_class: Any = Qwen3Model
        language = qwen_class._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        tower = siglip_tower(settings["vision_config"])
        projector = nn.Linear(tower.config.hidden_size, config.hidden_size)
        self.eagle_model = nn.ModuleDict(
            {
                "vision_model": nn.ModuleDict({"vision_model": tower}),
                "mlp1": nn.ModuleList([projector]),
                "language_model": nn.ModuleDict({"model": language}),
            }
        )
        width, source = config.hidden_size, sizes["backbone_embedding_dim"]
        is_projected = sizes["project_to_dim"] is not None
        self.eagle_linear = nn.Linear(width, source) if is_projected else nn.Identity()
        self.num_image_tokens = (side // tower.config.patch_size) ** 2
        self._vision_layer = int(settings.get("select_layer", -1))

    def forward(self, prompt: Tensor, is_image: Tensor, pixels: Tensor) -> Tensor:
        """Return features ``[n, L, width]`` of prompts ``[n, L]``, whose image tokens represent
        images with values from -1 to 1, ``[n * cameras, 3, H, W]``."""
        model: Any = self.eagle_model
        language, projector = model["language_model"]["model"], model["mlp1"][0]
        is_last = self._vision_layer == -1
        states = model["vision_model"]["vision_model"](
            pixel_values=pixels.to(projector.weight.dtype), output_hidden_states=not is_last
        )
        patches = states.last_hidden_state if is_last else states.hidden_states[self._vision_layer]
        hidden = insert_images(language.embed_tokens(prompt), is_image, projector(patches))
        features: Tensor = language(inputs_embeds=hidden, use_cache=False).last_hidden_state
        out: Tensor = self.eagle_linear(features)
        return out

    def blocks(self) -> list[nn.Module]:
        model: Any = self.eagle_model
        tower, language = model["vision_model"]["vision_model"], model["language_model"]["model"]
        return [*tower.encoder.layers, *language.layers]


class SkippedNorm(UnusedTensors):
    """A norm of published folders that is not applied."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class Qwen3VLBackbone(nn.Module):
    """Qwen3-VL with its lower language layers; the last norm is not applied."""

    def __init__(self, settings: Mapping[str, Any], sizes: Mapping[str, Any], side: int) -> None:
        """
        Args:
            settings: The ``config.json`` of Qwen3-VL.
            sizes: See :func:`rlinf.models.gr00t_folder.head_sizes`.
            side: Side of an image, pixels.
        """
        from transformers import Qwen3VLConfig, Qwen3VLModel

        super().__init__()
        text = lower_layers(settings["text_config"], sizes["select_layer"])
        config = Qwen3VLConfig(**{**settings, "text_config": text})
        qwen_class: Any = Qwen3VLModel
        model = qwen_class._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        model.language_model.norm = SkippedNorm(model.language_model.norm)
        self.model = nn.ModuleDict({"model": model})
        vision: Any = config.vision_config
        self._patch, self._merge = int(vision.patch_size), int(vision.spatial_merge_size)
        self._frames = int(vision.temporal_patch_size)
        self._grid = [1, side // self._patch, side // self._patch]
        self.num_image_tokens = (side // self._patch // self._merge) ** 2

    def forward(self, prompt: Tensor, is_image: Tensor, pixels: Tensor) -> Tensor:
        """See :meth:`EagleBackbone.forward`."""
        model: Any = self.model["model"]
        grids = torch.tensor([self._grid] * len(pixels), device=prompt.device)
        patches = self._to_patches(pixels).to(model.visual.pos_embed.weight.dtype)
        outputs = model.visual(patches, grid_thw=grids)
        embeddings = model.language_model.embed_tokens(prompt)
        # Prompts begin alike, so the first row has the positions of all.
        cameras = len(pixels) // len(prompt)
        positions, _ = model.get_rope_index(prompt[:1], is_image[:1].int(), grids[:cameras])
        features: Tensor = model.language_model(
            inputs_embeds=insert_images(embeddings, is_image, outputs.pooler_output),
            position_ids=positions.expand(-1, len(prompt), -1),
            visual_pos_masks=is_image,
            deepstack_visual_embeds=outputs.deepstack_features,
            use_cache=False,
        ).last_hidden_state
        return features

    def _to_patches(self, pixels: Tensor) -> Tensor:
        """Cut images ``[m, 3, H, W]`` into patches ``[m * patches, 3 * frames * side * side]``;
        those of a token are consecutive."""
        grid, merge, side = self._grid[1] // self._merge, self._merge, self._patch
        cut = pixels.reshape(-1, 3, grid, merge, side, grid, merge, side)
        cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
        cut = cut.expand(*cut.shape[:6], self._frames, *cut.shape[7:])
        return cut.reshape(-1, 3 * self._frames * side * side)

    def blocks(self) -> list[nn.Module]:
        model: Any = self.model["model"]
        return [*model.visual.blocks, *model.language_model.layers]


def lower_layers(settings: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the configuration of the first layers of a language model, without dropout."""
    # ``layer_types`` has an entry for each layer of the whole model.
    kept = {name: value for name, value in settings.items() if name != "layer_types"}
    return {**kept, "num_hidden_layers": count, "attention_dropout": 0.0}


def insert_images(embeddings: Tensor, is_image: Tensor, features: Tensor) -> Tensor:
    """Return token embeddings ``[n, L, width]`` with the features of images at their tokens."""
    return embeddings.masked_scatter(is_image[..., None], features.to(embeddings.dtype))


def prepare_pixels(images: Tensor, side: int, crop_fraction: float) -> Tensor:
    """Crop the center of images uint8 ``[n, H, W, 3]`` and resize it to a square.

    Returns:
        Values from -1 to 1, float32 ``[n, 3, side, side]``.
    """
    rows, columns = (int(size * crop_fraction) for size in images.shape[1:3])
    top, left = (images.shape[1] - rows) // 2, (images.shape[2] - columns) // 2
    pixels = images[:, top : top + rows, left : left + columns].permute(0, 3, 1, 2) / 127.5 - 1
    if (rows, columns) == (side, side):
        return pixels
    return F.interpolate(pixels, (side, side), mode="bilinear", antialias=True)


def image_side(settings: Mapping[str, Any], vlm_settings: Mapping[str, Any]) -> int:
    """Return the side of the images that a vision-language model sees, pixels.

    Args:
        settings: The ``config.json`` of a policy folder.
        vlm_settings: The ``config.json`` of the vision-language model.
    """
    if vlm_settings["model_type"] == EAGLE:
        vision = vlm_settings["vision_config"]
        return int(vlm_settings.get("force_image_size") or vision["image_size"])
    return int(settings["image_resolution"][0])


class Gr00tModel(nn.Module):
    """The tensors of a published folder: vision-language model and action head."""

    def __init__(
        self, settings: Mapping[str, Any], vlm_settings: Mapping[str, Any], sizes: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.image_size = side = image_side(settings, vlm_settings)
        """Side of the images that the vision-language model sees, pixels."""
        is_eagle = vlm_settings["model_type"] == EAGLE
        backbone_class = EagleBackbone if is_eagle else Qwen3VLBackbone
        self.backbone: EagleBackbone | Qwen3VLBackbone = backbone_class(vlm_settings, sizes, side)
        self.action_head = ActionHead(sizes)


class Gr00tNetwork(FlowVLANetwork):
    """The network of GR00T N1.5 and N1.7."""

    model: Gr00tModel

    def __init__(
        self,
        model: Gr00tModel,
        settings: Mapping[str, Any],
        sizes: Mapping[str, Any],
        *,
        image_token_id: int,
        learned_noise: bool,
        value_level: ValueLevel = "chunk",
    ) -> None:
        """
        Args:
            model: The published part.
            settings: The ``config.json`` of a policy folder.
            sizes: See :func:`rlinf.models.gr00t_folder.head_sizes`.
            image_token_id: Id of the token that represents a part of an image.
            learned_noise: Whether a noise head computes the noise of denoising steps.
            value_level: Whether there is one value per chunk or per action.
        """
        super().__init__(
            model,
            sizes["backbone_embedding_dim"],
            sizes["diffusion_model_cfg"]["output_dim"],
            sizes["max_action_dim"],
            num_values=int(settings["n_action_steps"]) if value_level == "action" else None,
            learned_noise=learned_noise,
        )
        self._image_token_id = image_token_id
        self._embodiment = int(settings["embodiment_id"])
        self._crop_fraction = float(settings["crop_fraction"])
        self._num_buckets = int(sizes["num_timestep_buckets"])
        self._text_period = int(sizes["attend_text_every_n_blocks"])

    def forward(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        state: Tensor,
        points: Tensor,
        tau: Tensor,
        *images: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        # Each block is called once, and computes its keys itself: its weights may be sharded.
        prefix = self._encode(prompt, prompt_mask, state, *images)
        return *self.velocity(prefix, points, tau), self.value(prefix)

    def encode_prefix(
        self, prompt: Tensor, prompt_mask: Tensor, state: Tensor, *images: Tensor
    ) -> Gr00tPrefix:
        prefix = self._encode(prompt, prompt_mask, state, *images)
        layers = self.model.action_head.model.prefix_key_values(prefix.features)
        return replace(prefix, layers=layers)

    def _encode(
        self, prompt: Tensor, prompt_mask: Tensor, state: Tensor, *images: Tensor
    ) -> Gr00tPrefix:
        """Return the prefix without keys and values."""
        side = self.model.image_size
        pixels = [prepare_pixels(image, side, self._crop_fraction) for image in images]
        is_image = prompt == self._image_token_id
        features = self.model.backbone(prompt, is_image, torch.stack(pixels, 1).flatten(0, 1))
        head = self.model.action_head
        features = head.refine_features(features, prompt_mask)
        masks = [prompt_mask[:, None, None]] * len(head.model.cross_blocks)
        if self._text_period:
            parts = prompt_mask & ~is_image, prompt_mask & is_image
            periods = (index % self._text_period > 0 for index in range(len(masks)))
            masks = [parts[is_image_block][:, None, None] for is_image_block in periods]
        weights = prompt_mask[..., None].to(features.dtype)
        summary = (features * weights).sum(1) / weights.sum(1)
        return Gr00tPrefix([], prompt_mask, summary, state, features=features, block_masks=masks)

    def velocity(
        self, prefix: PrefixCache, points: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(prefix, Gr00tPrefix)
        assert prefix.state is not None
        head, embodiment = self.model.action_head, self._embodiment
        count, num_fractions, length = points.shape[:3]
        dtype = head.vlln.weight.dtype
        # The reference counts time from noise to actions, in buckets; the small number prevents
        # that rounding changes the bucket.
        time = (1 - tau.double()).expand(count, num_fractions) * self._num_buckets + 1e-3
        time = time.floor().float()
        actions = head.action_encoder(points.to(dtype), time, embodiment)
        actions = actions + head.position_embedding.weight[:length]
        state = head.state_encoder(prefix.state.to(dtype)[:, None], embodiment)
        parts = [state[:, None].expand(-1, num_fractions, -1, -1), actions]
        if head.future_tokens is not None:
            parts.insert(1, head.future_tokens.weight.expand(count, num_fractions, -1, -1))
        hidden = torch.cat(parts, 2).flatten(0, 1)
        hidden = head.model(hidden, time.flatten(), prefix)
        hidden = hidden[:, -length:].unflatten(0, (count, num_fractions))
        noise = None if self.noise_head is None else self.noise_head(hidden).float()
        return -head.action_decoder(hidden, embodiment).float(), noise
