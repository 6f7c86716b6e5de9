"""The network of :mod:`rlinf.models.smolvla`, with the tensor names of LeRobot.

The network has Llama layers from transformers with custom attention. Each layer of the action
expert attends to the keys and values of the corresponding layer of the vision-language model. Every
second layer of the expert (``self_attn_every_n_layers``) also attends to its own keys; the others
are cross-attention layers with projected keys (SmolVLA, arXiv 2506.01844, section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.models.action_encoding import ValueLevel
from rlinf.models.action_expert import (
    ExpertLayer,
    FlowVLANetwork,
    PrefixCache,
    resize_with_padding,
    sinusoidal_time_embedding,
    suffix_mask,
)
from rlinf.models.loading import disable_dropout


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
        text.layers = nn.ModuleList(ExpertLayer(layer) for layer in vlm_layers)
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
            layers.append(ExpertLayer(layer, None if is_self_attention else kv_width))
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


class SmolVLANetwork(FlowVLANetwork):
    """The network of SmolVLA, whose prefix has the state as its last position."""

    model: VLAFlowMatching

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
        model = VLAFlowMatching(settings, vlm_settings)
        super().__init__(
            model,
            vlm_settings["text_config"]["hidden_size"],
            model.vlm_with_expert.expert_width,
            settings["max_action_dim"],
            num_values=int(settings["n_action_steps"]) if value_level == "action" else None,
            learned_noise=learned_noise,
        )
        self.image_size: tuple[int, int] = tuple(settings["resize_imgs_with_padding"])
        """Width and height of the vision transformer's input, pixels."""
        self._time_periods = (float(settings["min_period"]), float(settings["max_period"]))

    def encode_prefix(
        self, prompt: Tensor, prompt_mask: Tensor, state: Tensor, *images: Tensor
    ) -> PrefixCache:
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
        full_mask = suffix_mask(prefix, causal_mask)
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
