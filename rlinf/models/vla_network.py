"""The network of :mod:`rlinf.models.vla`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.models.vision_tower import Perceptron, VisionTower


def first_token(settings: Mapping[str, Any]) -> int:
    """The id of the first token of actions: they are the last ones before those that fill the
    vocabulary up."""
    known = settings["text_config"]["vocab_size"] - settings.get("pad_to_multiple_of", 0)
    return int(known - settings["n_action_bins"])


class VLANetwork(nn.Module):
    """From pictures, prompt and state to what is said of every place of a chunk."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """``settings``: the ``config.json`` of a folder."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        super().__init__()
        vision, text = settings["vision_config"], LlamaConfig(**settings["text_config"])
        self.chunk = (int(settings["num_actions_chunk"]), int(settings["action_dim"]))
        self.cameras = list(settings["cameras"])
        self.first, self.bins = first_token(settings), int(settings["n_action_bins"])
        self.vision_backbone = nn.ModuleDict({"featurizer": VisionTower(vision)})
        width = text.hidden_size
        self.projector = Perceptron(vision["hidden_size"], width, width)
        made: Any = AutoModelForCausalLM
        self.language_model = made.from_config(
            text, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.proprio = int(settings.get("proprio_dim", 0))
        if self.proprio:
            self.proprio_projector = Perceptron(self.proprio, width, width)
        # Without any, all places are alike to the first layer, and positions alone tell them apart
        # in the others: a small network takes long to learn that.
        self.places = nn.Parameter(0.02 * torch.randn(self.chunk[0] * self.chunk[1], width))
        self.value_head = Perceptron(width, width, 1)
        nn.init.zeros_(self.value_head.fc2.weight)
        nn.init.zeros_(self.value_head.fc2.bias)

    @property
    def positions(self) -> int:
        """Of a step, without its prompt."""
        tower: Any = self.vision_backbone["featurizer"]
        seen = tower.patches * len(self.cameras) + bool(self.proprio)
        return int(seen + self.chunk[0] * self.chunk[1])

    def forward(
        self, prompt: Tensor, there: Tensor, state: Tensor | None, **pictures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits float32 ``[n, C, D, bins]`` and values float32 ``[n]``.

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
            pixels = pictures[name].permute(0, 3, 1, 2).to(dtype) / 127.5 - 1
            parts.append(self.projector(self.vision_backbone["featurizer"](pixels)))
        if self.proprio:
            assert state is not None
            parts.append(self.proprio_projector(state.to(dtype))[:, None])
        words = model.embed_tokens(prompt)
        places = self.places.to(words.dtype).expand(len(prompt), -1, -1)
        inputs = torch.cat([*parts, words, places], 1)
        ahead = sum(part.shape[1] for part in parts)
        seen = F.pad(F.pad(there, (ahead, 0), value=True), (0, places.shape[1]), value=True)
        hidden = model(
            inputs_embeds=inputs,
            attention_mask=seen[:, None, None].expand(-1, 1, seen.shape[1], -1),
            position_ids=(seen.long().cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        before = hidden[:, -places.shape[1] - 1 : -1]
        head = self.language_model.lm_head.weight[self.first : self.first + self.bins]
        logits = F.linear(before, head).float().reshape(len(prompt), *self.chunk, self.bins)
        return logits, self.value_head(before[:, 0])[:, 0].float()
