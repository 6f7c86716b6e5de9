"""The network of :mod:`rlinf.models.smolvla`, with the tensor names of LeRobot.

It consists of Llama layers from transformers with custom attention. Each layer of the action expert
attends to the keys and values of the corresponding layer of the vision-language model. In every
second layer (``self_attn_every_n_layers``) it also attends to its own keys; the other layers are
cross-attention layers with projected keys (SmolVLA, arXiv 2506.01844, section 3.1).
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
"""Keys and values of a layer, ``[n, heads, L, size]``."""


@dataclass(frozen=True)
class PrefixCache:
    """Keys and values of the vision-language model for images, instruction and state."""

    layers: list[KeyValues]
    mask: Tensor
    """Valid positions, bool ``[n, P]``."""
    last_hidden: Tensor
    """Hidden states of the last position, which attends to all others, ``[n, width]``."""


class SmolVLALayer(nn.Module):
    """A Llama layer that returns its keys and values and can attend to those of another layer."""

    def __init__(self, llama_layer: Any, cross_width: int | None = None) -> None:
        """
        Args:
            llama_layer: The layer of transformers whose modules are used.
            cross_width: Width of the keys of a cross-attention layer; None: self-attention with
                optional further keys.
        """
        super().__init__()
        self.self_attn, self.mlp = llama_layer.self_attn, llama_layer.mlp
        self.input_layernorm = llama_layer.input_layernorm
        self.post_attention_layernorm = llama_layer.post_attention_layernorm
        self.is_cross_attention = cross_width is not None
        if cross_width is not None:
            bias, out = (
                llama_layer.self_attn.k_proj.bias is not None,
                llama_layer.self_attn.k_proj.out_features,
            )
            llama_layer.self_attn.k_proj = nn.Linear(cross_width, out, bias=bias)
            llama_layer.self_attn.v_proj = nn.Linear(cross_width, out, bias=bias)

    def forward(
        self, hidden: Tensor, positions: Tensor, mask: Tensor, prefix: KeyValues | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next hidden states ``[n, L, width]``, and the keys and values.

        Args:
            hidden: ``[n, L, width]``.
            positions: ``[n, L]``.
            mask: Attention mask bool ``[n, 1, L, S]`` over the prefix and the own positions.
            prefix: Keys and values of the other model.
        """
        inside, parts = self.input_layernorm(hidden), self.self_attn
        queries = apply_rope(self._heads(parts.q_proj(inside)), positions)
        if self.is_cross_attention:
            assert prefix is not None
            flat = (column.transpose(1, 2).flatten(2) for column in prefix)
            keys, values = (
                self._heads(project(column))
                for project, column in zip((parts.k_proj, parts.v_proj), flat, strict=True)
            )
        else:
            keys = apply_rope(self._heads(parts.k_proj(inside)), positions)
            values = self._heads(parts.v_proj(inside))
            if prefix is not None:
                keys, values = torch.cat([prefix[0], keys], 2), torch.cat([prefix[1], values], 2)
        attended = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
        hidden = hidden + parts.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), keys, values

    def _heads(self, column: Tensor) -> Tensor:
        size = self.self_attn.head_dim
        return column.reshape(*column.shape[:-1], -1, size).transpose(1, 2)


def apply_rope(column: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary embeddings (arXiv 2104.09864) to ``[n, heads, L, size]`` at positions ``[n,
    L]``."""
    half = column.shape[-1] // 2
    powers = torch.arange(half, device=column.device) * (2 / column.shape[-1])
    angles = (positions[..., None] / ROPE_THETA**powers)[:, None]
    sin, cos = angles.sin(), angles.cos()
    one, other = column[..., :half].float(), column[..., half:].float()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(column.dtype)


def sinusoidal_time_embedding(tau: Tensor, width: int, least: float, longest: float) -> Tensor:
    """Return sinusoids of times ``[...]`` with periods in a range, float64 ``[..., width]``."""
    share = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=tau.device)
    angles = tau.double()[..., None] * (2 * math.pi / (least * (longest / least) ** share))
    return torch.cat([angles.sin(), angles.cos()], -1)


def resize_with_padding(pictures: Tensor, width: int, height: int) -> Tensor:
    """Resize images ``[n, 3, H, W]`` in [0, 1] to fit, padded with zeros on the left and top."""
    rows, columns = pictures.shape[2:]
    ratio = max(columns / width, rows / height)
    size = (int(rows / ratio), int(columns / ratio))
    if size != (rows, columns):
        pictures = F.interpolate(pictures, size=size, mode="bilinear", align_corners=False)
    return F.pad(pictures, (width - size[1], 0, height - size[0], 0))


class VLMWithExpert(nn.Module):
    """The vision-language model, truncated to its lower layers, and the action expert."""

    def __init__(self, settings: Mapping[str, Any], vlm: Mapping[str, Any]) -> None:
        from transformers import LlamaModel, SmolVLMConfig, SmolVLMForConditionalGeneration

        super().__init__()
        config = SmolVLMConfig(**vlm)
        disable_dropout(config)
        model_class: Any = SmolVLMForConditionalGeneration
        self.vlm = model_class._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        text: Any = self.vlm.model.text_model
        count = settings["num_vlm_layers"]
        kept = text.layers[:count] if count > 0 else text.layers
        text.layers = nn.ModuleList(SmolVLALayer(layer) for layer in kept)
        # The language model head is not used; as a buffer it stays in the folder untrained.
        head = self.vlm.lm_head.weight.detach()
        del self.vlm.lm_head.weight
        self.vlm.lm_head.register_buffer("weight", head)
        kind: Any = config.text_config
        own = kind.to_dict()
        width = int(own["hidden_size"] * settings["expert_width_multiplier"])
        own |= {"hidden_size": width, "intermediate_size": expert_intermediate_size(width)}
        own |= {"num_hidden_layers": len(kept), "vocab_size": 1}
        own |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        expert = LlamaModel(type(kind)(**own))
        beside = own["num_key_value_heads"] * own["head_dim"]
        every = settings["self_attn_every_n_layers"]
        layers = []
        for number, layer in enumerate(expert.layers):
            own_keys = "cross" not in settings["attention_mode"] or (
                every > 0 and number % every == 0
            )
            layers.append(SmolVLALayer(layer, None if own_keys else beside))
        self.lm_expert = nn.ModuleDict({"layers": nn.ModuleList(layers), "norm": expert.norm})
        self.width = width


def expert_intermediate_size(width: int) -> int:
    """Return the MLP size of the action expert: 8/3 of its width, rounded up to 256."""
    return 256 * -(-int(4 * int(2 * width / 3)) // 256)


class VLAFlowMatching(nn.Module):
    """Both models, with the projections of states, actions and times."""

    def __init__(self, settings: Mapping[str, Any], vlm: Mapping[str, Any]) -> None:
        super().__init__()
        self.vlm_with_expert = VLMWithExpert(settings, vlm)
        width, narrow = vlm["text_config"]["hidden_size"], self.vlm_with_expert.width
        self.state_proj = nn.Linear(settings["max_state_dim"], width)
        self.action_in_proj = nn.Linear(settings["max_action_dim"], narrow)
        self.action_out_proj = nn.Linear(narrow, settings["max_action_dim"])
        self.action_time_mlp_in = nn.Linear(2 * narrow, narrow)
        self.action_time_mlp_out = nn.Linear(narrow, narrow)


class SmolVLANetwork(nn.Module):
    """The network from images, instruction, state and noisy actions to velocities and a value."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        vlm: Mapping[str, Any],
        *,
        learned_noise: bool,
        value_level: ValueLevel = "chunk",
    ) -> None:
        """
        Args:
            settings: The ``config.json`` of a folder.
            vlm: The ``config.json`` of the vision-language model.
            learned_noise: Whether a noise head learns the noise of denoising steps.
            value_level: Whether there is one value per chunk or per action.
        """
        super().__init__()
        self.model = VLAFlowMatching(settings, vlm)
        self.width, self.height = settings["resize_imgs_with_padding"]
        self.periods = (float(settings["min_period"]), float(settings["max_period"]))
        wide, narrow = vlm["text_config"]["hidden_size"], self.model.vlm_with_expert.width
        self._value_level = value_level
        values = int(settings["n_action_steps"]) if value_level == "action" else 1
        self.value_head = GeluMLP(wide, wide, values)
        self.noise_head = (
            GeluMLP(narrow, narrow, settings["max_action_dim"]) if learned_noise else None
        )
        for head in filter(None, (self.value_head, self.noise_head)):
            nn.init.zeros_(head.fc2.weight)
            nn.init.zeros_(head.fc2.bias)

    def forward(
        self,
        prompt: Tensor,
        there: Tensor,
        state: Tensor,
        points: Tensor,
        tau: Tensor,
        *pictures: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return velocities and, if learned, noise outputs, float32 ``[n, K, C, A]``, and values as
        :meth:`value`.

        Args:
            prompt: Token ids ``[n, L]``, padded on the right.
            there: The mask of the prompt, bool ``[n, L]``.
            state: Normalized state ``[n, max_state_dim]``.
            points: ``[n, K, C, max_action_dim]``, at ``K`` times.
            tau: The times, ``[K]`` or ``[n, K]``.
            pictures: Images uint8 ``[n, H, W, 3]``, in the order of the folder's cameras.
        """
        prefix = self.prefix(prompt, there, state, *pictures)
        return *self.velocity(prefix, points, tau), self.value(prefix)

    def prefix(
        self, prompt: Tensor, there: Tensor, state: Tensor, *pictures: Tensor
    ) -> PrefixCache:
        """Compute the part that does not depend on the actions."""
        vlm: Any = self.model.vlm_with_expert.vlm.model
        text, dtype = vlm.text_model, self.model.state_proj.weight.dtype
        parts = []
        for picture in pictures:
            pixels = resize_with_padding(picture.permute(0, 3, 1, 2) / 255, self.width, self.height)
            features = vlm.vision_model(pixel_values=(2 * pixels - 1).to(dtype)).last_hidden_state
            parts.append(vlm.connector(features))
        parts.append(text.embed_tokens(prompt).to(dtype))
        root = parts[0].shape[-1] ** 0.5
        shown = sum(part.shape[1] for part in parts[:-1])
        hidden = torch.cat([root * part for part in parts], 1)
        hidden = torch.cat([hidden, self.model.state_proj(state.to(dtype))[:, None]], 1)
        known = F.pad(F.pad(there, (shown, 0), value=True), (0, 1), value=True)
        places = known.shape[1]
        # The state attends to all positions, and only the state attends to the state.
        mask = known[:, None, None].expand(-1, 1, places, -1).clone()
        mask[..., :-1, -1] = False
        # Padding attends to itself, because attention without any key is NaN.
        mask = mask | torch.eye(places, dtype=torch.bool, device=mask.device)
        positions = known.long().cumsum(1) - 1
        seen = []
        for layer in text.layers:
            hidden, keys, values = layer(hidden, positions, mask)
            seen.append((keys, values))
        return PrefixCache(seen, known, text.norm(hidden[:, -1]))

    def velocity(
        self, prefix: PrefixCache, points: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return velocities and noise outputs at points ``[n, K, C, A]`` and times ``[K]`` or
        ``[n, K]``, in one pass in which different times do not attend to each other."""
        model = self.model
        expert: Any = model.vlm_with_expert.lm_expert
        count, times, length = points.shape[:3]
        dtype = model.action_in_proj.weight.dtype
        actions = model.action_in_proj(points.to(dtype))
        tau = tau.expand(count, times)
        clock = sinusoidal_time_embedding(tau, actions.shape[-1], *self.periods).to(dtype)[
            :, :, None
        ]
        both = torch.cat([actions, clock.expand_as(actions)], -1)
        hidden = model.action_time_mlp_out(F.silu(model.action_time_mlp_in(both))).flatten(1, 2)
        place = torch.arange(times * length, device=points.device)
        block, within = place // length, place % length
        own = (block[:, None] == block) & (within[:, None] >= within)
        ahead = prefix.mask[:, None, None].expand(-1, 1, times * length, -1)
        both_seen = torch.cat([ahead, own.expand(count, 1, -1, -1)], -1)
        start = prefix.mask.sum(1, keepdim=True)
        for layer, seen in zip(expert["layers"], prefix.layers, strict=True):
            # As in LeRobot, positions of cross-attention layers start at 0.
            positions = within.expand(count, -1) if layer.is_cross_attention else start + within
            hidden = layer(
                hidden, positions, ahead if layer.is_cross_attention else both_seen, seen
            )[0]
        hidden = expert["norm"](hidden).reshape(count, times, length, -1)
        spread = None if self.noise_head is None else self.noise_head(hidden).float()
        return model.action_out_proj(hidden).float(), spread

    def value(self, prefix: PrefixCache) -> Tensor:
        """Return values float32 ``[n]``, or ``[n, C]`` per executed action."""
        values = self.value_head(prefix.last_hidden).float()
        return values if self._value_level == "action" else values[:, 0]
