"""The network of :mod:`rlinf.models.smolvla`, with the tensor names of LeRobot.

The network has Llama layers from transformers with custom attention. Each layer of the action
expert attends to the keys and values of the corresponding layer of the vision-language model. Every
second layer of the expert (``self_attn_every_n_layers``) also attends to its own keys; the others
are cross-attention layers with projected keys (SmolVLA, arXiv 2506.01844, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.models.action_encoding import ValueLevel
from rlinf.models.loading import disable_dropout
from rlinf.models.vla_network import GeluMLP

ROPE_THETA = 10_000.0
"""Base of the rotary embedding in LeRobot, which ignores ``rope_theta``."""
KeyValues = tuple[Tensor, Tensor]
"""Keys and values of a layer, ``[n, heads, L, head_dim]``."""


@dataclass(frozen=True)
class PrefixCache:
    """The vision-language model's results for the prefix: images, instruction and state."""

    layers: list[KeyValues]
    """Keys and values of each layer."""
    mask: Tensor
    """Valid positions, bool ``[n, P]``."""
    last_hidden: Tensor
    """Hidden states of the last position, which attends to all others, ``[n, width]``."""


class SmolVLALayer(nn.Module):
    """A Llama layer that returns its keys and values and can attend to another model's layer."""

    def __init__(self, llama_layer: Any, cross_width: int | None = None) -> None:
        """
        Args:
            llama_layer: The layer of transformers whose modules are used.
            cross_width: For a cross-attention layer, width of the other model's keys; None:
                self-attention, to which the other model's keys may be added.
        """
        super().__init__()
        self.self_attn, self.mlp = llama_layer.self_attn, llama_layer.mlp
        self.input_layernorm = llama_layer.input_layernorm
        self.post_attention_layernorm = llama_layer.post_attention_layernorm
        self.is_cross_attention = cross_width is not None
        if cross_width is not None:
            attention = llama_layer.self_attn
            bias, out = attention.k_proj.bias is not None, attention.k_proj.out_features
            attention.k_proj = nn.Linear(cross_width, out, bias=bias)
            attention.v_proj = nn.Linear(cross_width, out, bias=bias)

    def forward(
        self, hidden: Tensor, positions: Tensor, mask: Tensor, prefix: KeyValues | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next hidden states ``[n, L, width]``, and the keys and values.

        Args:
            hidden: ``[n, L, width]``.
            positions: ``[n, L]``.
            mask: Attention mask bool ``[n, 1, L, S]`` over prefix and hidden states.
            prefix: Keys and values of the other model.
        """
        inputs, attention = self.input_layernorm(hidden), self.self_attn
        queries = apply_rope(self._split_heads(attention.q_proj(inputs)), positions)
        if self.is_cross_attention:
            assert prefix is not None
            flat = (states.transpose(1, 2).flatten(2) for states in prefix)
            projections = (attention.k_proj, attention.v_proj)
            keys, values = (
                self._split_heads(project(states))
                for project, states in zip(projections, flat, strict=True)
            )
        else:
            keys = apply_rope(self._split_heads(attention.k_proj(inputs)), positions)
            values = self._split_heads(attention.v_proj(inputs))
            if prefix is not None:
                keys, values = torch.cat([prefix[0], keys], 2), torch.cat([prefix[1], values], 2)
        attended = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
        hidden = hidden + attention.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), keys, values

    def _split_heads(self, states: Tensor) -> Tensor:
        size = self.self_attn.head_dim
        return states.reshape(*states.shape[:-1], -1, size).transpose(1, 2)


def apply_rope(states: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary embeddings (arXiv 2104.09864) to ``[n, heads, L, head_dim]`` at positions ``[n,
    L]``."""
    half = states.shape[-1] // 2
    exponents = torch.arange(half, device=states.device) * (2 / states.shape[-1])
    angles = (positions[..., None] / ROPE_THETA**exponents)[:, None]
    sin, cos = angles.sin(), angles.cos()
    first, second = states[..., :half].float(), states[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(states.dtype)


def sinusoidal_time_embedding(
    tau: Tensor, width: int, min_period: float, max_period: float
) -> Tensor:
    """Return sinusoids of times ``[...]`` with periods in a range, float64 ``[..., width]``."""
    fractions = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=tau.device)
    periods = min_period * (max_period / min_period) ** fractions
    angles = tau.double()[..., None] * (2 * math.pi / periods)
    return torch.cat([angles.sin(), angles.cos()], -1)


def resize_with_padding(images: Tensor, width: int, height: int) -> Tensor:
    """Resize images ``[n, 3, H, W]`` in [0, 1] to fit; zeros pad the left and top."""
    rows, columns = images.shape[2:]
    ratio = max(columns / width, rows / height)
    size = (int(rows / ratio), int(columns / ratio))
    if size != (rows, columns):
        images = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
    return F.pad(images, (width - size[1], 0, height - size[0], 0))


class VLMWithExpert(nn.Module):
    """The vision-language model, truncated to its lower layers, and the action expert."""

    def __init__(self, settings: Mapping[str, Any], vlm_settings: Mapping[str, Any]) -> None:
        from transformers import LlamaModel, SmolVLMConfig, SmolVLMForConditionalGeneration

        super().__init__()
        config = SmolVLMConfig(**vlm_settings)
        disable_dropout(config)
        model_class: Any = SmolVLMForConditionalGeneration
        self.vlm = model_class._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        text: Any = self.vlm.model.text_model
        count = settings["num_vlm_layers"]
        vlm_layers = text.layers[:count] if count > 0 else text.layers
        text.layers = nn.ModuleList(SmolVLALayer(layer) for layer in vlm_layers)
        # The language model head is not used; as a buffer it is saved but not trained.
        head = self.vlm.lm_head.weight.detach()
        del self.vlm.lm_head.weight
        self.vlm.lm_head.register_buffer("weight", head)
        text_config: Any = config.text_config
        sizes = text_config.to_dict()
        width = int(sizes["hidden_size"] * settings["expert_width_multiplier"])
        sizes |= {"hidden_size": width, "intermediate_size": expert_intermediate_size(width)}
        sizes |= {"num_hidden_layers": len(vlm_layers), "vocab_size": 1}
        sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        expert = LlamaModel(type(text_config)(**sizes))
        kv_width = sizes["num_key_value_heads"] * sizes["head_dim"]
        period = settings["self_attn_every_n_layers"]
        layers = []
        for index, layer in enumerate(expert.layers):
            is_self_attention = "cross" not in settings["attention_mode"] or (
                period > 0 and index % period == 0
            )
            layers.append(SmolVLALayer(layer, None if is_self_attention else kv_width))
        self.lm_expert = nn.ModuleDict({"layers": nn.ModuleList(layers), "norm": expert.norm})
        self.expert_width = width


def expert_intermediate_size(width: int) -> int:
    """Return the MLP size of the action expert: 8/3 of its width, rounded up to 256."""
    return 256 * -(-int(4 * int(2 * width / 3)) // 256)


class VLAFlowMatching(nn.Module):
    """Both models (:class:`VLMWithExpert`), with the projections of states, actions and times."""

    def __init__(self, settings: Mapping[str, Any], vlm_settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.vlm_with_expert = VLMWithExpert(settings, vlm_settings)
        expert_width = self.vlm_with_expert.expert_width
        self.state_proj = nn.Linear(
            settings["max_state_dim"], vlm_settings["text_config"]["hidden_size"]
        )
        self.action_in_proj = nn.Linear(settings["max_action_dim"], expert_width)
        self.action_out_proj = nn.Linear(expert_width, settings["max_action_dim"])
        self.action_time_mlp_in = nn.Linear(2 * expert_width, expert_width)
        self.action_time_mlp_out = nn.Linear(expert_width, expert_width)


class SmolVLANetwork(nn.Module):
    """The network from images, instruction, state and noisy actions to velocities and a value."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        vlm_settings: Mapping[str, Any],
        *,
        learned_noise: bool,
        value_level: ValueLevel = "chunk",
    ) -> None:
        """
        Args:
            settings: The ``config.json`` of a folder.
            vlm_settings: The ``config.json`` of the vision-language model.
            learned_noise: Whether a noise head computes the noise of denoising steps.
            value_level: Whether there is one value per chunk or per action.
        """
        super().__init__()
        self.model = VLAFlowMatching(settings, vlm_settings)
        self.image_size: tuple[int, int] = tuple(settings["resize_imgs_with_padding"])
        """Width and height of the vision transformer's input, pixels."""
        self._time_periods = (float(settings["min_period"]), float(settings["max_period"]))
        width = vlm_settings["text_config"]["hidden_size"]
        expert_width = self.model.vlm_with_expert.expert_width
        self._value_level = value_level
        num_values = int(settings["n_action_steps"]) if value_level == "action" else 1
        self.value_head = GeluMLP(width, width, num_values)
        self.noise_head = (
            GeluMLP(expert_width, expert_width, settings["max_action_dim"])
            if learned_noise
            else None
        )
        for head in filter(None, (self.value_head, self.noise_head)):
            nn.init.zeros_(head.fc2.weight)
            nn.init.zeros_(head.fc2.bias)

    def forward(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        state: Tensor,
        points: Tensor,
        tau: Tensor,
        *images: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return velocities and outputs of the noise head (None without), float32 ``[n, K, C, A]``,
        and the values of :meth:`value`.

        Args:
            prompt: Token ids ``[n, L]``, padded on the right.
            prompt_mask: The mask of the prompt, bool ``[n, L]``.
            state: Normalized state ``[n, max_state_dim]``.
            points: ``[n, K, C, max_action_dim]``, at ``K`` noise fractions.
            tau: The noise fractions, ``[K]`` or ``[n, K]``.
            images: Images uint8 ``[n, H, W, 3]``, in the order of the folder's cameras.
        """
        prefix = self.encode_prefix(prompt, prompt_mask, state, *images)
        return *self.velocity(prefix, points, tau), self.value(prefix)

    def encode_prefix(
        self, prompt: Tensor, prompt_mask: Tensor, state: Tensor, *images: Tensor
    ) -> PrefixCache:
        """Compute the keys and values of all inputs except the actions."""
        vlm: Any = self.model.vlm_with_expert.vlm.model
        text, dtype = vlm.text_model, self.model.state_proj.weight.dtype
        embeddings = []
        for image in images:
            pixels = resize_with_padding(image.permute(0, 3, 1, 2) / 255, *self.image_size)
            features = vlm.vision_model(pixel_values=(2 * pixels - 1).to(dtype)).last_hidden_state
            embeddings.append(vlm.connector(features))
        embeddings.append(text.embed_tokens(prompt).to(dtype))
        scale = embeddings[0].shape[-1] ** 0.5
        num_image_tokens = sum(embedding.shape[1] for embedding in embeddings[:-1])
        hidden = torch.cat([scale * embedding for embedding in embeddings], 1)
        hidden = torch.cat([hidden, self.model.state_proj(state.to(dtype))[:, None]], 1)
        valid = F.pad(F.pad(prompt_mask, (num_image_tokens, 0), value=True), (0, 1), value=True)
        length = valid.shape[1]
        # The state attends to all positions, and only the state attends to the state.
        mask = valid[:, None, None].expand(-1, 1, length, -1).clone()
        mask[..., :-1, -1] = False
        # Padding attends to itself, because attention without any key is NaN.
        mask = mask | torch.eye(length, dtype=torch.bool, device=mask.device)
        positions = valid.long().cumsum(1) - 1
        layers = []
        for layer in text.layers:
            hidden, keys, values = layer(hidden, positions, mask)
            layers.append((keys, values))
        return PrefixCache(layers, valid, text.norm(hidden[:, -1]))

    def velocity(
        self, prefix: PrefixCache, points: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return velocities and outputs of the noise head at points ``[n, K, C, A]``.

        One pass computes the points of all noise fractions ``tau`` (``[K]`` or ``[n, K]``). Points
        of different fractions do not attend to each other.
        """
        model = self.model
        expert: Any = model.vlm_with_expert.lm_expert
        count, num_fractions, length = points.shape[:3]
        dtype = model.action_in_proj.weight.dtype
        actions = model.action_in_proj(points.to(dtype))
        tau = tau.expand(count, num_fractions)
        embedding = sinusoidal_time_embedding(tau, actions.shape[-1], *self._time_periods)
        inputs = torch.cat([actions, embedding.to(dtype)[:, :, None].expand_as(actions)], -1)
        hidden = model.action_time_mlp_out(F.silu(model.action_time_mlp_in(inputs))).flatten(1, 2)
        index = torch.arange(num_fractions * length, device=points.device)
        tau_index, action_index = index // length, index % length
        causal_mask = (tau_index[:, None] == tau_index) & (action_index[:, None] >= action_index)
        prefix_mask = prefix.mask[:, None, None].expand(-1, 1, num_fractions * length, -1)
        full_mask = torch.cat([prefix_mask, causal_mask.expand(count, 1, -1, -1)], -1)
        prefix_length = prefix.mask.sum(1, keepdim=True)
        for layer, key_values in zip(expert["layers"], prefix.layers, strict=True):
            # As in LeRobot, positions of cross-attention layers start at 0.
            is_cross = layer.is_cross_attention
            positions = action_index.expand(count, -1) if is_cross else prefix_length + action_index
            mask = prefix_mask if is_cross else full_mask
            hidden = layer(hidden, positions, mask, key_values)[0]
        hidden = expert["norm"](hidden).reshape(count, num_fractions, length, -1)
        noise = None if self.noise_head is None else self.noise_head(hidden).float()
        return model.action_out_proj(hidden).float(), noise

    def value(self, prefix: PrefixCache) -> Tensor:
        """Return values float32 ``[n]``, or ``[n, C]`` per executed action."""
        values = self.value_head(prefix.last_hidden).float()
        return values if self._value_level == "action" else values[:, 0]
