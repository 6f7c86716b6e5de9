"""The network of :mod:`rlinf.models.wall_oss`, with the tensor names of LeRobot.

It is a Qwen2.5-VL with two MLPs in each layer (WALL-OSS, arXiv 2509.11766): images, prompt and
state use the first one, actions the second one. Attention is causal, except that the actions of a
chunk attend to each other. So no position before the actions depends on them, and its keys and
values are computed once per chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.models.action_expert import (
    ExpertLayer,
    FlowVLANetwork,
    PrefixCache,
    rotate,
    suffix_mask,
)
from rlinf.models.images import ImageProcessor

AXES = 3
"""Axes of rotary positions: time, height and width."""
TIME_PERIOD = 10_000.0
"""Ratio of the longest to the shortest period in the time code of actions."""


class ExpertMLP(nn.Module):
    """The gated MLP of one token type, which reads and writes the first components of a state."""

    def __init__(self, size: int, intermediate_size: int, activation: str) -> None:
        from transformers.activations import ACT2FN

        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)
        self.activation: Any = ACT2FN[activation]

    def forward(self, states: Tensor) -> Tensor:
        """Return ``[..., width]`` for states ``[..., width]``."""
        size = self.down_proj.out_features
        inputs = states[..., :size]
        result = self.down_proj(self.activation(self.gate_proj(inputs)) * self.up_proj(inputs))
        return F.pad(result, (0, states.shape[-1] - size))


class WallLayer(ExpertLayer):
    """A layer of Qwen2.5-VL whose MLP depends on the token type. Positions are ``[n, L, 3]``."""

    def __init__(self, layer: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(layer)
        del self.mlp
        experts = [
            ExpertMLP(each["hidden_size"], each["intermediate_size"], each["hidden_act"])
            for each in settings["experts"]
        ]
        for weight in (weight for expert in experts for weight in expert.parameters()):
            nn.init.normal_(weight, std=0.02)
        self.moe = nn.ModuleDict({"experts": nn.ModuleList(experts)})
        self._theta = float(settings["rope_theta"])
        self._sections = list(settings["mrope_section"])

    def _rotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """Apply rotary embeddings whose frequencies are divided among the axes (M-RoPE, arXiv
        2409.12191)."""
        exponents = torch.arange(0, states.shape[-1], 2, device=states.device) / states.shape[-1]
        axes = torch.arange(AXES).repeat_interleave(torch.tensor(self._sections))
        angles = positions[..., axes.to(positions.device)] * (1 / self._theta**exponents)
        return rotate(states, angles)

    def _feed_forward(self, inputs: Tensor, *, has_prefix: bool) -> Tensor:
        # The positions that attend to a cached prefix are the actions.
        result: Tensor = self.moe["experts"][int(has_prefix)](inputs)  # type: ignore[index]
        return result


class ActionPreprocessor(nn.Module):
    """The projections of actions and states, which have a mask of their real components."""

    def __init__(self, width: int, action_dim: int, state_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(2 * action_dim, width, bias=False)
        self.w2 = nn.Linear(2 * width, width, bias=False)
        self.w3 = nn.Linear(width, width, bias=False)
        self.action_proj_back = nn.Linear(width, action_dim, bias=False)
        self.propri_proj = nn.Linear(2 * state_dim, width, bias=False)

    def embed_actions(self, points: Tensor, mask: Tensor, time: Tensor) -> Tensor:
        """Return embeddings ``[..., C, width]`` of points ``[..., C, A]``.

        Args:
            mask: 1 for real components, ``[A]``.
            time: Time of the flow, 0 for noise and 1 for actions, ``[...]``.
        """
        dtype = self.w1.weight.dtype
        inputs = self.w1(torch.cat([points, mask.expand_as(points)], -1).to(dtype))
        code = time_code(time, inputs.shape[-1]).to(dtype)[..., None, :].expand_as(inputs)
        hidden = F.silu(self.w2(torch.cat([inputs, code], -1)))
        embeddings: Tensor = self.w3(hidden)
        return embeddings

    def embed_state(self, state: Tensor, mask: Tensor) -> Tensor:
        """Return an embedding ``[n, width]`` of states ``[n, S]`` with the mask ``[S]``."""
        inputs = torch.cat([state, mask.expand_as(state)], -1)
        embedding: Tensor = self.propri_proj(inputs.to(self.propri_proj.weight.dtype))
        return embedding


def time_code(time: Tensor, width: int) -> Tensor:
    """Return sinusoids of times ``[...]``, float32 ``[..., width]``."""
    half = width // 2
    exponents = torch.arange(half, device=time.device) * -(math.log(TIME_PERIOD) / (half - 1))
    angles = time.float()[..., None] * exponents.exp()
    return torch.cat([angles.sin(), angles.cos()], -1)


class WallModel(nn.Module):
    """The vision tower, the layers with two MLPs each, and the projections of actions."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import (
            Qwen2_5_VLTextConfig,
            Qwen2_5_VLVisionConfig,
        )
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
            Qwen2_5_VLTextModel,
        )

        super().__init__()
        vision = Qwen2_5_VLVisionConfig(**settings["vision_config"])
        vision_class: Any = Qwen2_5_VisionTransformerPretrainedModel
        self.visual = vision_class._from_config(
            vision, dtype=torch.float32, attn_implementation="sdpa"
        )
        with torch.device("cpu"):
            # The frequencies are constants, which a network on the meta device would lack.
            self.visual.rotary_pos_emb = type(self.visual.rotary_pos_emb)(vision)
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        config_class: Any = Qwen2_5_VLTextConfig
        # The layers' own MLPs are discarded.
        text: Any = Qwen2_5_VLTextModel(
            config_class(
                **{name: settings[name] for name in (*names, "vocab_size", "rms_norm_eps")},
                intermediate_size=1,
                rope_parameters={"rope_type": "default", "rope_theta": settings["rope_theta"]},
                **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
            )
        )
        layers = [WallLayer(layer, settings) for layer in text.layers]
        self.model = nn.ModuleDict(
            {"embed_tokens": text.embed_tokens, "layers": nn.ModuleList(layers), "norm": text.norm}
        )
        width = settings["hidden_size"]
        if not settings["tie_word_embeddings"]:
            # The head is not used; as a buffer it is saved but not trained.
            self.lm_head = nn.Module()
            self.lm_head.register_buffer("weight", torch.zeros(settings["vocab_size"], width))
        self.action_preprocessor = ActionPreprocessor(
            width, sum(settings["dof_config"].values()), sum(settings["agent_pos_config"].values())
        )


class WallNetwork(FlowVLANetwork):
    """The network of WALL-OSS. Its prompt has one image token per camera and the state token."""

    model: WallModel

    def __init__(
        self,
        settings: Mapping[str, Any],
        processor: ImageProcessor,
        *,
        state_token_id: int,
        action_dim: int,
        state_dim: int,
        num_values: int | None,
        learned_noise: bool,
        device: str = "cpu",
    ) -> None:
        """
        Args:
            settings: The network's ``config.json`` (:mod:`rlinf.models.wall_oss_folder`).
            processor: The image preprocessing.
            state_token_id: Token that the state replaces.
            action_dim, state_dim: Number of real components; further ones are padding.
            num_values: Number of values, one per executed action; None: one per chunk.
            learned_noise: Whether a noise head computes the noise of denoising steps.
            device: ``meta`` for a network without weights, except those of the heads.
        """
        with torch.device(device):
            model = WallModel(settings)
        width, actions = settings["hidden_size"], model.action_preprocessor.action_proj_back
        super().__init__(
            model,
            width,
            width,
            actions.out_features,
            num_values=num_values,
            learned_noise=learned_noise,
        )
        self._processor = processor
        self._resolution = int(settings["resolution"])
        self._tokens = (processor.image_token_id, state_token_id)
        self._real_dims = (action_dim, state_dim)

    def encode_prefix(
        self, prompt: Tensor, prompt_mask: Tensor, state: Tensor, *images: Tensor
    ) -> PrefixCache:
        parts: Any = self.model.model
        image_token, state_token = self._tokens
        projected = self.model.action_preprocessor.embed_state(state, self._mask(state, 1))
        embeddings = parts["embed_tokens"](prompt).to(projected.dtype)
        is_state = (prompt == state_token)[..., None]
        embeddings = torch.where(is_state, projected[:, None], embeddings)
        # All prompts begin with the same tokens, up to the last image.
        places = (prompt[0] == image_token).nonzero()[:, 0].tolist()
        hidden, valid, positions = list[Tensor](), list[Tensor](), list[Tensor]()
        start = position = 0
        for place, image in zip(places, images, strict=True):
            features, rows, columns = self._encode_image(image)
            hidden += [embeddings[:, start:place], features]
            valid += [prompt_mask[:, start:place], prompt_mask.new_ones(features.shape[:2])]
            positions += [text_positions(position, place - start)]
            position += place - start
            positions += [image_positions(position, rows, columns)]
            start, position = place + 1, position + max(rows, columns)
        length = prompt.shape[1] - start
        states = torch.cat([*hidden, embeddings[:, start:]], 1)
        mask = torch.cat([*valid, prompt_mask[:, start:]], 1)
        positions.append(text_positions(position, length))
        shift = position + length - states.shape[1]
        axes, layers = torch.cat(positions).to(states.device)[None], []
        for layer in parts["layers"]:
            # Padding is on the right, so no valid position attends to it.
            states, keys, values = layer(states, axes, None)
            layers.append((keys, values))
        weights = mask[..., None].to(states.dtype)
        summary = (parts["norm"](states) * weights).sum(1) / weights.sum(1)
        return PrefixCache(layers, mask, summary, shift=shift)

    def velocity(
        self, prefix: PrefixCache, points: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        count, num_fractions, length = points.shape[:3]
        parts: Any = self.model.model
        actions = self.model.action_preprocessor
        time = 1 - tau.expand(count, num_fractions)
        hidden = actions.embed_actions(points, self._mask(points, 0), time).flatten(1, 2)
        index = torch.arange(num_fractions * length, device=points.device)
        mask = suffix_mask(prefix, index[:, None] // length == index // length)
        positions = prefix.mask.sum(1, keepdim=True) + prefix.shift + index % length
        axes = positions[..., None].expand(-1, -1, AXES)
        for layer, key_values in zip(parts["layers"], prefix.layers, strict=True):
            hidden = layer(hidden, axes, mask, key_values)[0]
        hidden = parts["norm"](hidden).reshape(count, num_fractions, length, -1)
        noise = None if self.noise_head is None else self.noise_head(hidden).float()
        # The network was trained on the opposite direction, from noise to actions.
        return -actions.action_proj_back(hidden).float(), noise

    def _mask(self, values: Tensor, index: int) -> Tensor:
        """Return 1 for the real components of actions (index 0) or states (index 1)."""
        indices = torch.arange(values.shape[-1], device=values.device)
        return (indices < self._real_dims[index]).float()

    def _encode_image(self, images: Tensor) -> tuple[Tensor, int, int]:
        """Return features ``[n, rows * columns, width]``, rows and columns of images uint8 ``[n, H,
        W, 3]``."""
        patches, rows, columns = to_patches(images, self._resolution, self._processor)
        tower: Any = self.model.visual
        grid = torch.tensor([[1, rows, columns]], device=images.device).expand(len(images), -1)
        dtype = tower.patch_embed.proj.weight.dtype
        features: Tensor = tower(patches.to(dtype), grid_thw=grid).pooler_output
        merge = self._processor.merge_size
        features = features.reshape(len(images), -1, features.shape[-1])
        return features, rows // merge, columns // merge


def to_patches(
    images: Tensor, resolution: int, processor: ImageProcessor
) -> tuple[Tensor, int, int]:
    """Resize images as WALL-OSS does and cut them into patches; those of a token are consecutive.

    Args:
        images: uint8 ``[n, H, W, 3]``.
        resolution: Length of the longest side, pixels, before it is rounded to whole tokens.
        processor: The sizes of patches and tokens, and the normalization.

    Returns:
        Patches float32 ``[n * rows * columns, 3 * temporal_patch_size * patch_size ** 2]``, and
        rows and columns of patches.
    """
    pixels = images.permute(0, 3, 1, 2).float()
    for size in resized_shapes(images.shape[1], images.shape[2], resolution, processor):
        if size != tuple(pixels.shape[2:]):
            pixels = F.interpolate(pixels, size, mode="bicubic", antialias=True).round()
            pixels = pixels.clamp(0, 255)
    mean, std = (
        torch.tensor(values, device=images.device)[:, None, None]
        for values in (processor.image_mean, processor.image_std)
    )
    pixels = (pixels * processor.rescale_factor - mean) / std
    side, merge = processor.patch_size, processor.merge_size
    rows, columns = pixels.shape[2] // side, pixels.shape[3] // side
    grid = pixels.reshape(-1, 3, rows // merge, merge, side, columns // merge, merge, side)
    # By image, token, and patch of the token: [n, rows, columns, row, column, 3, 1, y, x].
    grid = grid.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
    frames = grid.expand(*(-1,) * 6, processor.temporal_patch_size, -1, -1)
    return frames.reshape(len(images) * rows * columns, -1), rows, columns


def resized_shapes(
    height: int, width: int, resolution: int, processor: ImageProcessor
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the heights and widths of both resizing steps: the longest side becomes the
    resolution, then sides become multiples of a token's side."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    longest = max(height, width)
    first = (int(resolution * height / longest), int(resolution * width / longest))
    second = smart_resize(
        *first,
        factor=processor.token_side,
        min_pixels=4 * processor.token_side**2,
        max_pixels=16_384 * processor.token_side**2,
    )
    return first, (int(second[0]), int(second[1]))


def text_positions(start: int, length: int) -> Tensor:
    """Return the rotary positions of text, int64 ``[length, 3]``."""
    return (start + torch.arange(length))[:, None].expand(-1, AXES)


def image_positions(start: int, rows: int, columns: int) -> Tensor:
    """Return the rotary positions of an image's tokens, int64 ``[rows * columns, 3]``."""
    index = torch.arange(rows * columns)
    axes = (torch.zeros_like(index), index // columns, index % columns)
    return start + torch.stack(axes, -1)
