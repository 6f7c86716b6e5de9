"""Small actor-critic networks for vector observations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from rlinf.capabilities import OBSERVATIONS, SINGLE_PASS_ACTIONS, VALUE_ESTIMATES
from rlinf.config import Section
from rlinf.data.batch import pad_right
from rlinf.data.record import Record
from rlinf.errors import ConfigError
from rlinf.models.action_encoding import ActionScale, ValueLevel, action_chunks, check_action_scale
from rlinf.models.base import Batch, ModelSpec, StepOutputs
from rlinf.models.vector_policy import NormalizedVectorPolicy, ObservationNormalizer, tanh_network


class MLPConfig(Section):
    """Hyperbolic-tangent networks: one for the policy and an equal one for the value."""

    hidden: tuple[Annotated[int, Field(gt=0)], ...] = (64, 64)
    shared_trunk: bool = False
    """One network for both, with a linear head each."""
    normalize_observations: bool = False
    """Standardise observations by running statistics, which travel with the weights."""
    initial_log_std: float = 0.0
    """Of a Gaussian policy; it is learned, the same for all states."""
    action_scale: ActionScale = None
    """Of a Gaussian policy: what 1 is in the simulator's units; null: -1 to 1 are the task's
    bounds. Actions beyond the bounds are clipped when they are carried out."""
    observation_clip: float = Field(default=10.0, gt=0)
    """Largest magnitude of a (standardised) observation."""
    chunk_size: int = Field(default=1, gt=0)
    """Actions that are chosen at once and carried out one after the other."""
    value_level: ValueLevel = "chunk"
    """Whether there is one value for a chunk, or one for each of its actions; advantages are of the
    same then."""

    @model_validator(mode="after")
    def _chunks_are_valued(self) -> MLPConfig:
        if self.value_level == "action" and self.chunk_size == 1:
            raise ValueError(
                "value_level: action is of chunks, and a step is one action here; set chunk above "
                "1, or value_level to chunk"
            )
        return self


class MLPActorCritic(ObservationNormalizer):
    """From observations ``[..., D]`` to action parameters ``[..., A]`` and values ``[...]``, or
    ``[..., C]`` of each action of a chunk."""

    def __init__(self, settings: dict[str, Any], features: int = 0) -> None:
        """``features``: how many numbers stand behind the observation."""
        size = settings["observation"]
        # Folders from before there were chunks say nothing of them.
        out = settings["action"]["size"] * settings.get("chunk_size", 1)
        super().__init__(size, float(settings["observation_clip"]))
        sizes = [size + features, *settings["hidden"]]
        common, own = (sizes, sizes[-1:]) if settings["shared_trunk"] else (sizes[:1], sizes)
        self.trunk = tanh_network(common, last_gain=None)
        self.policy = tanh_network([*own, out], last_gain=0.01)
        self._of_actions = settings.get("value_level") == "action"
        self.value = tanh_network(
            [*own, settings["chunk_size"] if self._of_actions else 1], last_gain=1.0
        )
        self.log_std = nn.Parameter(torch.full((out,), float(settings["initial_log_std"])))
        self.log_std.requires_grad_(settings["action"]["kind"] == "box")

    def forward(
        self, observations: Tensor, features: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Action parameters, log standard deviations ``[A]`` and values, float32."""
        # Mixed precision shows in the parameters' type.
        inputs = self.standardize(observations).to(self.log_std.dtype)
        hidden = self.trunk(inputs if features is None else torch.cat([inputs, features], -1))
        # A copy: a sharded module frees its parameters after the forward pass.
        log_std = self.log_std.float().clone()
        values = self.value(hidden).float()
        return self.policy(hidden).float(), log_std, values if self._of_actions else values[..., 0]


class MLPPolicy(NormalizedVectorPolicy):
    """A policy whose steps are the actions of an episode."""

    Config = MLPConfig
    requires = frozenset({OBSERVATIONS})
    provides = frozenset({SINGLE_PASS_ACTIONS, VALUE_ESTIMATES})
    parameter_groups = ("policy", "value")
    Network: ClassVar[type[MLPActorCritic]] = MLPActorCritic
    module: MLPActorCritic

    @classmethod
    def check(cls, config: MLPConfig, spec: ModelSpec) -> None:
        if spec["action"]["kind"] == "box":
            check_action_scale(spec["action"], config.action_scale, squashed=False)

    def prepare_demonstration(self, record: Record, seed: int = 0) -> Record:
        """Of a policy of chunks, at each step of an expert's actions the chunk that begins there;
        places behind the end do not count."""
        if self.chunk_size == 1:
            return record
        chunks, counts = action_chunks(record.steps["actions"], self.chunk_size)
        steps = {**record.steps, "actions": chunks, "submask": counts}
        return Record(record.identity, steps, record.context, record.info)

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        out, log_std, values = self._parameters(batch["observations"], batch)
        logprobs, spread = self.logprobs_and_entropy(out, log_std, batch["actions"], temperature)
        mask = batch["mask"]
        counts = mask if self.chunk_size == 1 else mask[..., None, None]
        spread_out = spread * counts if entropy else None
        valued = mask if values.ndim == mask.ndim else mask[..., None]
        return StepOutputs(logprobs * counts, spread_out, values * valued)

    def forward_network(
        self, state: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the network says of states ``[..., D]``; ``columns`` has what else there is."""
        found: tuple[Tensor, Tensor, Tensor] = self.module(state)
        return found

    def _parameters(
        self, state: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with the parameters of each action of a chunk apart: ``[..., C, A]``."""
        out, log_std, values = self.forward_network(state, columns)
        if self.chunk_size == 1:
            return out, log_std, values
        each = (self.chunk_size, self.settings["action"]["size"])
        return out.reshape(*out.shape[:-1], *each), log_std.reshape(each), values

    def draw_noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        """Gumbel noise for choices, normal noise for vectors: ``[steps, A]``, or of a chunk
        ``[steps, C, A]``."""
        draw = random.gumbel if self.is_discrete else random.standard_normal
        size = self.settings["action"]["size"]
        shape = (steps, size) if self.chunk_size == 1 else (steps, self.chunk_size, size)
        return draw(size=shape).astype(np.float32)

    def act(
        self, observations: Mapping[str, Tensor], noise: Tensor | None, temperature: float
    ) -> dict[str, Tensor]:
        """Of ``observation`` ``[n, D]``: ``action`` (int64 ``[n]``, or ``[n, A]`` in the units of
        the simulator, float64 where the policy's own differ, else float32), ``logprob`` and
        ``value``, float32 ``[n]``; of a chunk, actions ``[n, C]`` or ``[n, C, A]`` and
        log-probabilities ``[n, C, 1]`` or ``[n, C, A]``, and of ``value_level`` ``action`` values
        ``[n, C]``."""
        out, log_std, values = self._parameters(observations["observation"], observations)
        if noise is None:
            actions = out.argmax(-1) if self.is_discrete else out
        elif self.is_discrete:
            # The largest of logits plus Gumbel noise is a sample of their distribution.
            actions = (out / temperature + noise).argmax(-1)
        else:
            actions = out + noise * log_std.exp() * temperature
        logprobs, _ = self.logprobs_and_entropy(out, log_std, actions, temperature)
        if self.action_box is not None:
            actions = self.action_box.unnormalize(actions)
        return {"action": actions, "logprob": logprobs, "value": values}

    def logprobs_and_entropy(
        self, out: Tensor, log_std: Tensor, actions: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies ``[...]`` of actions, in the policy's own coordinates,
        given the network's output; of a
        chunk those of each number, ``[..., C, A]``, or of each choice, ``[..., C, 1]``.

        A temperature divides logits or multiplies standard deviations; 0 (greedy) is judged as 1.
        """
        if self.is_discrete:
            choices = F.log_softmax(out / (temperature or 1.0), dim=-1)
            taken = choices.gather(-1, actions.long()[..., None])
            entropy = -(choices.exp() * choices).sum(-1, keepdim=True)
            return (taken, entropy) if self.chunk_size > 1 else (taken[..., 0], entropy[..., 0])
        log_scale = (log_std + math.log(temperature or 1.0)).expand_as(out)
        distance = (actions.to(out.dtype) - out) / log_scale.exp()
        logprobs = -0.5 * distance.square() - log_scale - 0.5 * math.log(2 * math.pi)
        entropy = log_scale + 0.5 * math.log(2 * math.pi * math.e)
        return (logprobs, entropy) if self.chunk_size > 1 else (logprobs.sum(-1), entropy.sum(-1))

    def parameter_group(self, parameter: str) -> str:
        """``value`` is the value's own network, or its head."""
        return "value" if parameter.startswith("value.") else "policy"

    @property
    def chunk_size(self) -> int:
        """Actions that are chosen at once."""
        return int(self.settings.get("chunk_size", 1))

    @property
    def is_discrete(self) -> bool:
        """Whether actions are numbered choices rather than vectors."""
        return bool(self.settings["action"]["kind"] == "discrete")


CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel and stride of each (Mnih et al. 2015, doi 10.1038/nature14236, Methods)."""
MIN_IMAGE_SIDE = 36
"""Height or width of a picture of which something is left behind them."""
IMAGE_PREFIX = "images."
"""In the columns of requests and trajectories before the name of a camera."""


class CNNConfig(MLPConfig):
    """Convolutions for each picture; their features stand beside the state."""

    features_dim: int = Field(default=256, gt=0)
    """Numbers that a picture is made into."""
    use_state: bool = True
    """Whether the state is an input too; else pictures alone are."""


class CNNActorCritic(MLPActorCritic):
    """:class:`ActorCritic` of a state and the features of pictures, which both networks share."""

    def __init__(self, settings: dict[str, Any]) -> None:
        count = settings["features_dim"]
        super().__init__(settings, count * len(settings["images"]))
        self.sees_state = bool(settings["use_state"])
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
    Network = CNNActorCritic
    module: CNNActorCritic

    @classmethod
    def check(cls, config: MLPConfig, spec: ModelSpec) -> None:
        super().check(config, spec)
        images = spec.get("images") or {}
        if not images:
            raise ConfigError(
                "model.name: cnn sees pictures, and the task shows none; set task.images, or "
                "choose model.name=mlp"
            )
        for name, size in images.items():
            if min(size) < MIN_IMAGE_SIDE:
                raise ConfigError(
                    f"task.images.{name}: {size[0]} x {size[1]} is too small for model.name=cnn, "
                    f"which needs {MIN_IMAGE_SIDE} at least"
                )

    def collate(self, records: Sequence[Record]) -> Batch:
        """As of the base, and ``images.NAME``, uint8 ``[B, T, H, W, 3]``."""
        length = max(len(record) for record in records)
        names = [IMAGE_PREFIX + name for name in self.settings["images"]]
        pictures = {name: pad_right([r.steps[name] for r in records], length) for name in names}
        return {**super().collate(records), **pictures}

    def forward_network(
        self, state: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        pictures = {name: columns[IMAGE_PREFIX + name] for name in self.settings["images"]}
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
