"""Parts of vision-language-action networks whose action expert attends to a vision-language model.

The vision-language model computes keys and values of the *prefix* (images, instruction, perhaps the
state) once per chunk of actions. No position of the prefix attends to the actions, so these keys
and values are exact for all denoising steps. Each layer of the action expert, a smaller network,
attends to the keys and values of the corresponding layer and to its own (pi-0, arXiv 2410.24164).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.models.action_encoding import ValueLevel
from rlinf.models.attention import grouped_query_attention
from rlinf.models.openvla_network import GeluMLP

ROPE_THETA = 10_000.0
"""Base of the rotary embedding in LeRobot, which ignores ``rope_theta``."""
KeyValues = tuple[Tensor, Tensor]
"""Keys and values of a layer, ``[n, heads, L, head_dim]``."""


@dataclass(frozen=True)
class PrefixCache:
    """The vision-language model's results for the prefix."""

    layers: list[KeyValues]
    """Keys and values of each layer."""
    mask: Tensor
    """Valid positions, bool ``[n, P]``."""
    summary: Tensor
    """Hidden states that represent the whole prefix, for the value head, ``[n, width]``."""
    state: Tensor | None = None
    """The normalized state ``[n, max_state_dim]`` if it is not part of the prefix."""
    shift: int = 0
    """Rotary position of the first action minus the number of valid positions of the prefix."""


class AdaptiveNorm(nn.Module):
    """A root mean square norm whose scale, shift and gate follow from a condition (arXiv
    2212.09748, section 3.2). New norms have zero weights and scale nothing."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, hidden: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm and the gate of the residual branch, each ``[n, L, width]``.

        Args:
            hidden: ``[n, K * l, width]``.
            condition: ``[n, K, width]``, each for ``l`` consecutive positions.
        """
        repeats = hidden.shape[1] // condition.shape[1]
        modulation = self.dense(condition).repeat_interleave(repeats, 1)
        scale, shift, gate = modulation.chunk(3, -1)
        states = hidden.float()
        states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps)
        return (states * (1 + scale.float()) + shift.float()).to(hidden.dtype), gate


class ExpertLayer(nn.Module):
    """A layer of transformers (Llama, Gemma) that returns its keys and values and can attend to
    another model's layer."""

    def __init__(self, layer: Any, cross_width: int | None = None) -> None:
        """
        Args:
            layer: The layer of transformers whose modules are used.
            cross_width: For a cross-attention layer, width of the other model's keys; None:
                self-attention, to which the other model's keys may be added.
        """
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.is_cross_attention = cross_width is not None
        if cross_width is not None:
            attention = layer.self_attn
            bias, out = attention.k_proj.bias is not None, attention.k_proj.out_features
            attention.k_proj = nn.Linear(cross_width, out, bias=bias)
            attention.v_proj = nn.Linear(cross_width, out, bias=bias)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        prefix: KeyValues | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next hidden states ``[n, L, width]``, and the keys and values.

        Args:
            hidden: ``[n, L, width]``.
            positions: ``[n, L]``.
            mask: Attention mask bool ``[n, 1, L, S]`` over prefix and hidden states; None: causal.
            prefix: Keys and values of the other model.
            condition: The condition of adaptive norms (:class:`AdaptiveNorm`).
        """
        attention = self.self_attn
        inputs, gate = normalize(self.input_layernorm, hidden, condition)
        queries = self._rotate(self._split_heads(attention.q_proj(inputs)), positions)
        if self.is_cross_attention:
            assert prefix is not None
            flat = (states.transpose(1, 2).flatten(2) for states in prefix)
            projections = (attention.k_proj, attention.v_proj)
            keys, values = (
                self._split_heads(project(states))
                for project, states in zip(projections, flat, strict=True)
            )
        else:
            keys = self._rotate(self._split_heads(attention.k_proj(inputs)), positions)
            values = self._split_heads(attention.v_proj(inputs))
            if prefix is not None:
                keys, values = torch.cat([prefix[0], keys], 2), torch.cat([prefix[1], values], 2)
        attended = grouped_query_attention(queries, keys, values, mask, is_causal=mask is None)
        branch = attention.o_proj(attended.transpose(1, 2).flatten(2))
        hidden = hidden + (branch if gate is None else gate * branch)
        inputs, gate = normalize(self.post_attention_layernorm, hidden, condition)
        branch = self._feed_forward(inputs, has_prefix=prefix is not None)
        return hidden + (branch if gate is None else gate * branch), keys, values

    def _rotate(self, states: Tensor, positions: Tensor) -> Tensor:
        return apply_rope(states, positions)

    def _feed_forward(self, inputs: Tensor, *, has_prefix: bool) -> Tensor:
        result: Tensor = self.mlp(inputs)
        return result

    def _split_heads(self, states: Tensor) -> Tensor:
        size = self.self_attn.head_dim
        return states.reshape(*states.shape[:-1], -1, size).transpose(1, 2)


def normalize(
    norm: nn.Module, hidden: Tensor, condition: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the norm of hidden states and, of an adaptive norm, the gate of the branch."""
    if isinstance(norm, AdaptiveNorm):
        result: tuple[Tensor, Tensor] = norm(hidden, condition)
        return result
    return norm(hidden), None


def apply_rope(states: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary embeddings (arXiv 2104.09864) to ``[n, heads, L, head_dim]`` at positions ``[n,
    L]``."""
    half = states.shape[-1] // 2
    exponents = torch.arange(half, device=states.device) * (2 / states.shape[-1])
    return rotate(states, positions[..., None] / ROPE_THETA**exponents)


def rotate(states: Tensor, angles: Tensor) -> Tensor:
    """Rotate the two halves of ``[n, heads, L, head_dim]`` by angles ``[n, L, head_dim / 2]``."""
    half = states.shape[-1] // 2
    sin, cos = angles[:, None].sin(), angles[:, None].cos()
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


def siglip_tower(sizes: Mapping[str, Any]) -> Any:
    """Return a SigLIP vision tower of transformers without pooling head and dropout.

    Args:
        sizes: Entries of its configuration.
    """
    from transformers import SiglipVisionConfig, SiglipVisionModel

    fixed = {"vision_use_head": False, "attention_dropout": 0.0}
    config = SiglipVisionConfig(**{"hidden_act": "gelu_pytorch_tanh", **sizes, **fixed})
    tower_class: Any = SiglipVisionModel
    tower = tower_class._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    # The positions are a constant, which a network on the meta device would lack.
    positions = torch.arange(tower.embeddings.num_positions, device="cpu")
    tower.embeddings.register_buffer("position_ids", positions[None], persistent=False)
    return tower


def resize_with_padding(images: Tensor, width: int, height: int, *, center: bool = False) -> Tensor:
    """Resize images ``[n, 3, H, W]`` in [0, 1] to fit; zeros pad the left and top, or all sides."""
    rows, columns = images.shape[2:]
    ratio = max(columns / width, rows / height)
    size = (int(rows / ratio), int(columns / ratio))
    if size != (rows, columns):
        images = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
    right, below = ((width - size[1] + 1) // 2, (height - size[0] + 1) // 2) if center else (0, 0)
    return F.pad(images, (width - size[1] - right, right, height - size[0] - below, below))


def suffix_mask(prefix: PrefixCache, visible: Tensor) -> Tensor:
    """Return the attention mask of an expert, bool ``[n, 1, L, P + L]``.

    Args:
        prefix: The prefix, whose valid positions all positions of the expert attend to.
        visible: Whether positions of the expert attend to each other, ``[L, L]``.
    """
    count, length = len(prefix.mask), len(visible)
    prefix_mask = prefix.mask[:, None, None].expand(-1, 1, length, -1)
    return torch.cat([prefix_mask, visible.expand(count, 1, -1, -1)], -1)


class FlowVLANetwork(nn.Module):
    """A network from images, instruction, state and noisy actions to velocities and a value."""

    def __init__(
        self,
        model: nn.Module,
        width: int,
        expert_width: int,
        action_dim: int,
        *,
        num_values: int | None,
        learned_noise: bool,
    ) -> None:
        """
        Args:
            model: The pretrained part, with the tensor names of LeRobot.
            width: Width of the vision-language model.
            expert_width: Width of the action expert.
            action_dim: Number of components of an action, with padding.
            num_values: Number of values, one per executed action; None: one per chunk.
            learned_noise: Whether a noise head computes the noise of denoising steps.
        """
        super().__init__()
        self.model = model
        self._value_level: ValueLevel = "chunk" if num_values is None else "action"
        self.value_head = GeluMLP(width, width, num_values or 1)
        self.noise_head = GeluMLP(expert_width, expert_width, action_dim) if learned_noise else None
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

    @abstractmethod
    def encode_prefix(
        self, prompt: Tensor, prompt_mask: Tensor, state: Tensor, *images: Tensor
    ) -> PrefixCache:
        """Compute the keys and values of all inputs except the actions."""

    @abstractmethod
    def velocity(
        self, prefix: PrefixCache, points: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return velocities and outputs of the noise head at points ``[n, K, C, A]``.

        One pass computes the points of all noise fractions ``tau`` (``[K]`` or ``[n, K]``). Points
        of different fractions do not attend to each other.
        """

    def value(self, prefix: PrefixCache) -> Tensor:
        """Return values float32 ``[n]``, or ``[n, C]`` per executed action."""
        values = self.value_head(prefix.summary).float()
        return values if self._value_level == "action" else values[:, 0]
