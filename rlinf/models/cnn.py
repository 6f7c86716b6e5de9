"""Small actor-critic networks for pictures and a state beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from rlinf.data.padding import pad
from rlinf.data.record import Record
from rlinf.errors import ConfigError
from rlinf.models.base import Batch, Spec
from rlinf.models.mlp import ActorCritic, MLPConfig, MLPPolicy

CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel and stride of each (Mnih et al. 2015, doi 10.1038/nature14236, Methods)."""
SMALLEST = 36
"""Height or width of a picture of which something is left behind them."""
PICTURE = "images."
"""In the columns of requests and trajectories before the name of a camera."""


class CNNConfig(MLPConfig):
    """Convolutions for each picture; their features stand beside the state."""

    features: int = Field(default=256, gt=0)
    """Numbers that a picture is made into."""
    sees_state: bool = True
    """Whether the state is an input too; else pictures alone are."""


class PictureActorCritic(ActorCritic):
    """:class:`ActorCritic` of a state and the features of pictures, which both networks share."""

    def __init__(self, settings: dict[str, Any]) -> None:
        count = settings["features"]
        super().__init__(settings, count * len(settings["images"]))
        self.sees_state = bool(settings["sees_state"])
        self.encoders = nn.ModuleDict(
            {name: _encoder(size[0], size[1], count) for name, size in settings["images"].items()}
        )

    def forward(
        self, observations: Tensor, features: Tensor | None = None, **pictures: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As of the base; ``pictures`` are uint8 ``[..., H, W, 3]``."""
        found = []
        for name, encoder in self.encoders.items():
            picture = pictures[name]
            flat = picture.reshape(-1, *picture.shape[-3:]).permute(0, 3, 1, 2)
            seen = encoder(flat.to(self.log_std.dtype) / 255)
            found.append(seen.reshape(*picture.shape[:-3], -1))
        if not self.sees_state:
            observations = self.mean.expand_as(observations)  # zero, once it is standardised
        return super().forward(observations, torch.cat(found, -1))


class CNNPolicy(MLPPolicy):
    """A policy that sees pictures."""

    Config = CNNConfig
    Network = PictureActorCritic
    module: PictureActorCritic

    @classmethod
    def check(cls, config: MLPConfig, spec: Spec) -> None:
        super().check(config, spec)
        images = spec.get("images") or {}
        if not images:
            raise ConfigError(
                "model.name: cnn sees pictures, and the task shows none; set task.images, or "
                "choose model.name=mlp"
            )
        for name, size in images.items():
            if min(size) < SMALLEST:
                raise ConfigError(
                    f"task.images.{name}: {size[0]} x {size[1]} is too small for model.name=cnn, "
                    f"which needs {SMALLEST} at least"
                )

    def collate(self, records: Sequence[Record]) -> Batch:
        """As of the base, and ``images.NAME``, uint8 ``[B, T, H, W, 3]``."""
        length = max(len(record) for record in records)
        names = [PICTURE + name for name in self.settings["images"]]
        pictures = {name: pad([r.steps[name] for r in records], length) for name in names}
        return {**super().collate(records), **pictures}

    def see(self, state: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        pictures = {name: columns[PICTURE + name] for name in self.settings["images"]}
        found: tuple[Tensor, Tensor, Tensor] = self.module(state, **pictures)
        return found


def _encoder(height: int, width: int, features: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for out, kernel, stride in CONVOLUTIONS:
        layers += [nn.Conv2d(channels, out, kernel, stride), nn.ReLU()]
        height, width, channels = (
            (height - kernel) // stride + 1,
            (width - kernel) // stride + 1,
            out,
        )
    layers += [nn.Flatten(), nn.Linear(height * width * channels, features), nn.ReLU()]
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.orthogonal_(layer.weight, 2**0.5)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)
