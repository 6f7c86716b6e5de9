"""The network of :mod:`rlinf.models.vla`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.models.chunks import ValueLevel
from rlinf.models.vision_tower import Perceptron, PretrainedTower, VisionTower

TOWERS = ("featurizer", "fused_featurizer")
"""OpenVLA's names of its two, DINOv2 and SigLIP."""


def first_token(settings: Mapping[str, Any]) -> int:
    """The id of the first token of actions: they are the last ones before those that fill the
    vocabulary up."""
    known = settings["text_config"]["vocab_size"] - settings.get("pad_to_multiple_of", 0)
    return int(known - settings["n_action_bins"])


class OneTower(nn.Module):
    """From pictures to features of patches, by one tower."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """``settings``: as :class:`rlinf.models.vision_tower.VisionTower` takes them."""
        super().__init__()
        self.featurizer = VisionTower(settings)
        self.width, self.patches = int(settings["hidden_size"]), self.featurizer.patches

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.featurizer.blocks)

    def forward(self, pictures: Tensor, dtype: torch.dtype) -> Tensor:
        """``[n, patches, width]`` of uint8 ``[n, H, W, 3]``."""
        pixels = pictures.permute(0, 3, 1, 2).to(dtype) / 127.5 - 1
        found: Tensor = self.featurizer(pixels)
        return found


class FusedTowers(nn.Module):
    """By DINOv2 and SigLIP, whose features of a patch stand side by side (arXiv 2402.07865)."""

    def __init__(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """``settings``: of each of :data:`TOWERS`, as
        :class:`rlinf.models.vision_tower.PretrainedTower` takes them, with the ``mean`` and ``std``
        of colours between 0 and 1 that it was trained with."""
        super().__init__()
        self.featurizer, self.fused_featurizer = (PretrainedTower(settings[t]) for t in TOWERS)
        self.width = sum(int(settings[tower]["hidden_size"]) for tower in TOWERS)
        self.patches = self.featurizer.patches
        self._scaling = [[x for t in TOWERS for x in settings[t][name]] for name in ("mean", "std")]

    @property
    def blocks(self) -> list[nn.Module]:
        """Those that are run."""
        return [*self.featurizer.blocks[:-1], *self.fused_featurizer.blocks[:-1]]

    def normalised(self, pictures: Tensor) -> Tensor:
        """The same picture for one tower and for the other, float32 ``[n, 6, H, W]``."""
        mean, std = torch.tensor(self._scaling, device=pictures.device)[..., None, None]
        return (pictures.permute(0, 3, 1, 2).float().repeat(1, 2, 1, 1) / 255 - mean) / std

    def forward(self, pictures: Tensor, dtype: torch.dtype) -> Tensor:
        """``[n, patches, width]`` of uint8 ``[n, H, W, 3]``."""
        pixels = self.normalised(pictures).to(dtype)
        return torch.cat([self.featurizer(pixels[:, :3]), self.fused_featurizer(pixels[:, 3:])], -1)


class FusedProjector(nn.Module):
    """Three layers with GELUs between."""

    def __init__(self, seen: int, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(seen, 4 * seen), nn.Linear(4 * seen, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))
        return out


class VLANetwork(nn.Module):
    """From pictures, prompt and state to what is said of every place of a chunk."""

    places: nn.Parameter | None

    def __init__(self, settings: Mapping[str, Any], value_level: ValueLevel = "chunk") -> None:
        """``settings``: :func:`rlinf.models.vla_folder.vla_settings` of a folder."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        super().__init__()
        vision, text = settings["vision_config"], LlamaConfig(**settings["text_config"])
        self.chunk = (int(settings["num_actions_chunk"]), int(settings["action_dim"]))
        self.cameras = list(settings["cameras"])
        self.first, self.bins = first_token(settings), int(settings["n_action_bins"])
        self.fused = bool(settings["use_fused_vision_backbone"])
        self.vision_backbone = FusedTowers(vision) if self.fused else OneTower(vision)
        width, seen = text.hidden_size, self.vision_backbone.width
        self.projector = (
            FusedProjector(seen, width) if self.fused else Perceptron(seen, width, width)
        )
        made: Any = AutoModelForCausalLM
        self.language_model = made.from_config(
            text, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.proprio = int(settings.get("proprio_dim", 0))
        if self.proprio:
            self.proprio_projector = Perceptron(self.proprio, width, width)
        self._places = self.chunk[0] * self.chunk[1]
        end = text.eos_token_id
        self._end = end[0] if isinstance(end, list) else int(end or 0)
        # Without any, all places are alike to the first layer, and positions alone tell them
        # apart in the others: a small network takes long to learn that.
        learned = None if self.fused else nn.Parameter(0.02 * torch.randn(self._places, width))
        self.register_parameter("places", learned)
        self._value_level = value_level
        self.value_head = Perceptron(width, width, self.chunk[0] if value_level == "action" else 1)
        nn.init.zeros_(self.value_head.fc2.weight)
        nn.init.zeros_(self.value_head.fc2.bias)

    @property
    def positions(self) -> int:
        """Of a step, without its prompt."""
        seen = self.vision_backbone.patches * len(self.cameras) + bool(self.proprio)
        return int(seen + self._places + self.fused)

    @property
    def blocks(self) -> list[nn.Module]:
        """Those of towers and language model that are run."""
        return [*self.vision_backbone.blocks, *self.language_model.model.layers]

    def forward(
        self, prompt: Tensor, there: Tensor, state: Tensor | None, **pictures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits float32 ``[n, C, D, bins]`` and values float32 ``[n]``, or ``[n, C]`` of each
        action.

        Args:
            prompt: token ids ``[n, L]``, filled up on the left.
            there: bool ``[n, L]``, where they are.
            state: ``[n, proprio]``.
            pictures: uint8 ``[n, H, W, 3]``, by camera.
        """
        model = self.language_model.model
        dtype = self.projector.fc1.weight.dtype
        parts = []
        for name in self.cameras:
            parts.append(self.projector(self.vision_backbone(pictures[name], dtype)))
        if self.proprio:
            assert state is not None
            parts.append(self.proprio_projector(state.to(dtype))[:, None])
        words = model.embed_tokens(prompt)
        behind = []
        if self.fused:
            # OpenVLA-OFT has what is seen behind the first token of the prompt (the one that begins
            # a text), nothing at all in the places, and the token that ends a text behind them.
            begin = there.long().argmax(1, keepdim=True)
            parts.insert(0, words.gather(1, begin[..., None].expand(-1, -1, words.shape[-1])))
            there = there.scatter(1, begin, value=False)
            places = words.new_zeros(len(words), self._places, words.shape[-1])
            behind.append(model.embed_tokens(prompt.new_full((len(prompt), 1), self._end)))
        else:
            assert self.places is not None
            places = self.places.to(words.dtype).expand(len(prompt), -1, -1)
        inputs = torch.cat([*parts, words, places, *behind], 1)
        ahead = sum(part.shape[1] for part in parts)
        seen = F.pad(there, (ahead, inputs.shape[1] - ahead - there.shape[1]), value=True)
        hidden = model(
            inputs_embeds=inputs,
            attention_mask=seen[:, None, None].expand(-1, 1, seen.shape[1], -1),
            position_ids=(seen.long().cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        first = ahead + words.shape[1]
        before = hidden[:, first - 1 : first - 1 + self._places]
        head = self.language_model.lm_head.weight[self.first : self.first + self.bins]
        logits = F.linear(before, head).float().reshape(len(prompt), *self.chunk, self.bins)
        values = self.value_head(before[:, 0]).float()
        return logits, values if self._value_level == "action" else values[:, 0]
