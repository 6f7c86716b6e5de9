"""The network of :mod:`rlinf.models.pi0`, with the tensor names of LeRobot.

PaliGemma (a SigLIP vision tower, a linear projector and Gemma) encodes the prefix: images and
prompt, which attend to each other in both directions. The action expert, a smaller Gemma, denoises
the actions, which attend to the prefix and to each other. In pi-0 the expert has the state as a
first position and adds the time to the actions (arXiv 2410.24164); in pi-0.5 the time is the
condition of its norms, and the state, if it is used, is text (arXiv 2504.16054).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.models.action_encoding import ValueLevel
from rlinf.models.action_expert import (
    AdaptiveNorm,
    ExpertLayer,
    FlowVLANetwork,
    PrefixCache,
    normalize,
    resize_with_padding,
    sinusoidal_time_embedding,
)


class PaliGemma(nn.Module):
    """A vision tower, a projector to the width of the text, and a language model without head."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        from transformers import SiglipVisionConfig, SiglipVisionModel

        super().__init__()
        vision = SiglipVisionConfig(
            **sizes["vision"], hidden_act="gelu_pytorch_tanh", vision_use_head=False
        )
        vision_class: Any = SiglipVisionModel
        tower: Any = vision_class._from_config(
            vision, dtype=torch.float32, attn_implementation="sdpa"
        )
        # The positions are a constant, which a network on the meta device would lack.
        positions = torch.arange(tower.embeddings.num_positions, device="cpu")
        tower.embeddings.register_buffer("position_ids", positions[None], persistent=False)
        self.vision_tower = nn.ModuleDict({"vision_model": tower})
        width = sizes["language"]["hidden_size"]
        projector = nn.Linear(vision.hidden_size, width)
        self.multi_modal_projector = nn.ModuleDict({"linear": projector})
        self.language_model = _gemma(sizes["language"], adaptive=False)
        embeddings = nn.Embedding(sizes["vocab_size"], width)
        nn.init.normal_(embeddings.weight, std=width**-0.5)
        self.language_model["embed_tokens"] = embeddings


def _gemma(sizes: Mapping[str, Any], *, adaptive: bool) -> nn.ModuleDict:
    """Return the layers and the last norm of a Gemma."""
    from transformers import GemmaConfig, GemmaModel

    config = GemmaConfig(**sizes, vocab_size=1, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    gemma: Any = GemmaModel(config)
    layers, norm = [ExpertLayer(layer) for layer in gemma.layers], gemma.norm
    if adaptive:
        norm = AdaptiveNorm(config.hidden_size)
        for layer in layers:
            layer.input_layernorm = AdaptiveNorm(config.hidden_size)
            layer.post_attention_layernorm = AdaptiveNorm(config.hidden_size)
    return nn.ModuleDict({"layers": nn.ModuleList(layers), "norm": norm})


class PaliGemmaWithExpert(nn.Module):
    """PaliGemma and the action expert."""

    def __init__(self, sizes: Mapping[str, Any], *, adaptive: bool) -> None:
        super().__init__()
        self.paligemma = nn.ModuleDict({"model": PaliGemma(sizes)})
        self.gemma_expert = nn.ModuleDict({"model": _gemma(sizes["expert"], adaptive=adaptive)})
        # The expert's language model head is not used; as a buffer it is saved but not trained.
        head = nn.Module()
        head.register_buffer(
            "weight", torch.zeros(sizes["vocab_size"], sizes["expert"]["hidden_size"])
        )
        self.gemma_expert["lm_head"] = head


class PiFlowMatching(nn.Module):
    """Both models, with the projections of states, actions and times."""

    def __init__(self, settings: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
        super().__init__()
        is_pi05, width = settings["type"] == "pi05", sizes["expert"]["hidden_size"]
        self.paligemma_with_expert = PaliGemmaWithExpert(sizes, adaptive=is_pi05)
        self.action_in_proj = nn.Linear(settings["max_action_dim"], width)
        self.action_out_proj = nn.Linear(width, settings["max_action_dim"])
        if is_pi05:
            self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(settings["max_state_dim"], width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)


class PiNetwork(FlowVLANetwork):
    """The network of pi-0 and pi-0.5."""

    model: PiFlowMatching

    def __init__(
        self,
        settings: Mapping[str, Any],
        sizes: Mapping[str, Any],
        *,
        learned_noise: bool,
        value_level: ValueLevel = "chunk",
        device: str = "cpu",
    ) -> None:
        """
        Args:
            settings: The ``config.json`` of a folder.
            sizes: The sizes of both models (:func:`rlinf.models.pi0_folder.network_sizes`).
            learned_noise: Whether a noise head computes the noise of denoising steps.
            value_level: Whether there is one value per chunk or per action.
            device: ``meta`` for a network without weights, except those of the heads.
        """
        with torch.device(device):
            model = PiFlowMatching(settings, sizes)
        super().__init__(
            model,
            sizes["language"]["hidden_size"],
            sizes["expert"]["hidden_size"],
            settings["max_action_dim"],
            num_values=int(settings["n_action_steps"]) if value_level == "action" else None,
            learned_noise=learned_noise,
        )
        self._is_pi05 = settings["type"] == "pi05"
        self.image_size: tuple[int, int] = tuple(settings["image_resolution"])
        """Width and height of the vision tower's input, pixels."""
        self._time_periods = (float(settings["min_period"]), float(settings["max_period"]))

    def encode_prefix(
        self, prompt: Tensor, prompt_mask: Tensor, state: Tensor, *images: Tensor
    ) -> PrefixCache:
        vlm: Any = self.model.paligemma_with_expert.paligemma["model"]
        text, dtype = vlm.language_model, self.model.action_in_proj.weight.dtype
        embeddings = []
        for image in images:
            pixels = image.permute(0, 3, 1, 2) / 255
            pixels = resize_with_padding(pixels, *self.image_size, center=True)
            tower = vlm.vision_tower["vision_model"]
            # The tower casts them to the type of its patch embedding.
            features = tower(pixel_values=2 * pixels - 1).last_hidden_state
            embeddings.append(vlm.multi_modal_projector["linear"](features))
        tokens = text["embed_tokens"](prompt).to(dtype)
        hidden = torch.cat([*embeddings, tokens * tokens.shape[-1] ** 0.5], 1)
        length = hidden.shape[1]
        valid = F.pad(prompt_mask, (length - prompt.shape[1], 0), value=True)
        positions = valid.long().cumsum(1) - 1
        mask, layers = valid[:, None, None].expand(-1, 1, length, -1), []
        for layer in text["layers"]:
            hidden, keys, values = layer(hidden, positions, mask)
            layers.append((keys, values))
        weights = valid[..., None].to(hidden.dtype)
        summary = (text["norm"](hidden) * weights).sum(1) / weights.sum(1)
        return PrefixCache(layers, valid, summary, state)

    def velocity(
        self, prefix: PrefixCache, points: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        count, num_fractions, length = points.shape[:3]
        expert: Any = self.model.paligemma_with_expert.gemma_expert["model"]
        hidden, condition = self._embed_suffix(prefix, points, tau.expand(count, num_fractions))
        size = hidden.shape[2]  # number of positions per fraction
        index = torch.arange(num_fractions * size, device=points.device)
        tau_index, position = index // size, index % size
        is_action = position >= size - length
        # The state, if there is one, does not attend to the actions.
        visible = (tau_index[:, None] == tau_index) & (is_action[:, None] | ~is_action)
        mask = torch.cat(
            [
                prefix.mask[:, None, None].expand(-1, 1, len(index), -1),
                visible.expand(count, 1, -1, -1),
            ],
            -1,
        )
        positions = prefix.mask.sum(1, keepdim=True) + position
        hidden = hidden.flatten(1, 2)
        for layer, key_values in zip(expert["layers"], prefix.layers, strict=True):
            hidden = layer(hidden, positions, mask, key_values, condition)[0]
        hidden, _ = normalize(expert["norm"], hidden, condition)
        hidden = hidden.reshape(count, num_fractions, size, -1)[:, :, size - length :]
        noise = None if self.noise_head is None else self.noise_head(hidden).float()
        return self.model.action_out_proj(hidden).float(), noise

    def _embed_suffix(
        self, prefix: PrefixCache, points: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the expert's inputs ``[n, K, S, width]`` and the condition of its norms ``[n, K,
        width]``; ``S`` is ``C``, or ``C + 1`` with the state."""
        model: Any = self.model
        dtype = model.action_in_proj.weight.dtype
        actions = model.action_in_proj(points.to(dtype))
        time = sinusoidal_time_embedding(tau, actions.shape[-1], *self._time_periods).to(dtype)
        if self._is_pi05:
            return actions, F.silu(model.time_mlp_out(F.silu(model.time_mlp_in(time))))
        inputs = torch.cat([actions, time[:, :, None].expand_as(actions)], -1)
        actions = model.action_time_mlp_out(F.silu(model.action_time_mlp_in(inputs)))
        assert prefix.state is not None
        state = model.state_proj(prefix.state.to(dtype))[:, None, None]
        return torch.cat([state.expand(-1, actions.shape[1], -1, -1), actions], 2), None
