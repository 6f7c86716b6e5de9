"""Small actor-critic policies: MLPs for vector observations, and CNNs for images with a state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from rlinf.config import Section
from rlinf.data.batch import pad_right
from rlinf.data.record import IMAGE_PREFIX
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError
from rlinf.models.action_encoding import ActionScale, ValueLevel, action_chunks, check_action_scale
from rlinf.models.base import Batch, ModelSpec, StepOutputs
from rlinf.models.vector_policy import NormalizedVectorPolicy, ObservationNormalizer, tanh_network
from rlinf.registry import OBSERVATIONS, SINGLE_PASS_ACTIONS, VALUE_ESTIMATES


class MLPConfig(Section):
    """Options of MLP policies: tanh networks of equal size for policy and value."""

    hidden: tuple[Annotated[int, Field(gt=0)], ...] = (64, 64)
    shared_trunk: bool = False
    """Whether policy and value share one network, with a linear head each."""
    normalize_observations: bool = False
    """Standardize observations with running statistics, which are part of the weights."""
    initial_log_std: float = 0.0
    """Initial log standard deviation of a Gaussian policy; learned, equal for all states."""
    action_scale: ActionScale = None
    """For a Gaussian policy, the action in the simulator's units that output 1 represents; null: -1
    to 1 spans the task's bounds. Actions beyond the bounds are clipped when executed."""
    observation_clip: float = Field(default=10.0, gt=0)
    """Largest magnitude of a (standardized) observation."""
    chunk_size: int = Field(default=1, gt=0)
    """Number of actions that the policy chooses at once and the simulator executes in turn."""
    value_level: ValueLevel = "chunk"
    """Whether there is one value (and advantage) per chunk or per action."""
    path: Path | None = None
    """Folder of a policy of this kind (``rlinf export``), from whose weights the run begins. Its
    observations, actions and networks must be those of this configuration. Null: new weights."""

    @model_validator(mode="after")
    def _check_value_level(self) -> MLPConfig:
        if self.value_level == "action" and self.chunk_size == 1:
            raise ValueError(
                "value_level: action needs chunks, and a step is one action here; set chunk_size "
                "above 1, or value_level to chunk"
            )
        return self


class MLPActorCritic(ObservationNormalizer):
    """An MLP from observations ``[..., D]`` to action parameters ``[..., A]`` (logits or means) and
    values ``[...]``, or ``[..., C]`` per action of a chunk."""

    def __init__(self, settings: dict[str, Any], num_features: int = 0) -> None:
        """
        Args:
            settings: The policy's ``config.json``.
            num_features: Number of further inputs after the observation.
        """
        size = settings["observation"]
        # Older folders have no chunk size.
        num_outputs = settings["action"]["size"] * settings.get("chunk_size", 1)
        super().__init__(size, float(settings["observation_clip"]))
        sizes = [size + num_features, *settings["hidden"]]
        # The networks after the trunk have only a linear layer if the trunk is shared.
        is_shared = settings["shared_trunk"]
        trunk_sizes, head_sizes = (sizes, sizes[-1:]) if is_shared else (sizes[:1], sizes)
        self.trunk = tanh_network(trunk_sizes, last_gain=None)
        self.policy = tanh_network([*head_sizes, num_outputs], last_gain=0.01)
        self._has_value_per_action = settings.get("value_level") == "action"
        num_values = settings["chunk_size"] if self._has_value_per_action else 1
        self.value = tanh_network([*head_sizes, num_values], last_gain=1.0)
        self.log_std = nn.Parameter(torch.full((num_outputs,), float(settings["initial_log_std"])))
        self.log_std.requires_grad_(settings["action"]["kind"] == "box")

    def forward(
        self, observations: Tensor, features: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return action parameters, log standard deviations ``[A]`` and values, float32."""
        # With mixed precision, the parameters have another type than the observations.
        inputs = self.standardize(observations).to(self.log_std.dtype)
        hidden = self.trunk(inputs if features is None else torch.cat([inputs, features], -1))
        # A copy: a sharded module frees its parameters after the forward pass.
        log_std = self.log_std.float().clone()
        values = self.value(hidden).float()
        values = values if self._has_value_per_action else values[..., 0]
        return self.policy(hidden).float(), log_std, values


class MLPPolicy(NormalizedVectorPolicy):
    """An MLP policy with a categorical or Gaussian distribution and a value estimate."""

    Config = MLPConfig
    requires = frozenset({OBSERVATIONS})
    provides = frozenset({SINGLE_PASS_ACTIONS, VALUE_ESTIMATES})
    parameter_groups = ("policy", "value")
    Network: ClassVar[type[MLPActorCritic]] = MLPActorCritic
    module: MLPActorCritic

    @classmethod
    def check_spec(cls, config: MLPConfig, spec: ModelSpec) -> None:
        """
        Raises:
            ConfigError: an option does not fit the task, or ``model.path`` has another policy.
            DataError: ``model.path`` has no policy.
        """
        if spec["action"]["kind"] == "box":
            check_action_scale(spec["action"], config.action_scale, squashed=False)
        if config.path is not None:
            cls._load_from_path(config.path, cls.settings_of(config, spec))

    @classmethod
    def create(cls, config: MLPConfig, spec: ModelSpec, seed: int, folder: Path) -> None:
        if config.path is None:
            super().create(config, spec, seed, folder)
            return
        policy = cls._load_from_path(config.path, cls.settings_of(config, spec))
        policy.save(folder, dict(policy.module.state_dict()))

    @classmethod
    def _load_from_path(cls, path: Path, settings: dict[str, Any]) -> Self:
        policy = cls.load(path.expanduser(), None)
        for name in sorted(settings.keys() | policy.settings.keys()):
            expected, actual = settings.get(name), policy.settings.get(name)
            # The weights include the standard deviation that training has reached.
            if expected != actual and name != "initial_log_std":
                raise ConfigError(
                    f"model.path: {path}: its {name} is {actual}, and this run has {expected}; "
                    "choose a policy of the same task and the same model"
                )
        return policy

    def prepare_demonstration(self, trajectory: Trajectory, seed: int = 0) -> Trajectory:
        """Convert expert actions to the chunk that starts at each step, if chunk_size > 1.

        ``choice_mask`` masks actions after the end of the episode.
        """
        if self.chunk_size == 1:
            return trajectory
        chunks, mask = action_chunks(trajectory.actions, self.chunk_size)
        return replace(trajectory, actions=chunks, choice_mask=mask)

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        out, log_std, values = self._action_parameters(batch["observations"], batch)
        logprobs, entropies = self.logprobs_and_entropy(out, log_std, batch["actions"], temperature)
        mask = batch["mask"]
        part_mask = mask if self.chunk_size == 1 else mask[..., None, None]
        value_mask = mask if values.ndim == mask.ndim else mask[..., None]
        return StepOutputs(
            logprobs * part_mask, entropies * part_mask if entropy else None, values * value_mask
        )

    def forward_network(
        self, state: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the network's outputs for states ``[..., D]`` and all columns of the batch."""
        outputs: tuple[Tensor, Tensor, Tensor] = self.module(state)
        return outputs

    def _action_parameters(
        self, state: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the network's outputs, with action parameters ``[..., C, A]`` for chunks."""
        out, log_std, values = self.forward_network(state, columns)
        if self.chunk_size == 1:
            return out, log_std, values
        shape = (self.chunk_size, self.settings["action"]["size"])
        return out.reshape(*out.shape[:-1], *shape), log_std.reshape(shape), values

    def draw_noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        """Return Gumbel noise for discrete actions or normal noise for vectors: ``[steps, A]``, or
        ``[steps, C, A]`` for chunks."""
        draw = random.gumbel if self.is_discrete else random.standard_normal
        size = self.settings["action"]["size"]
        shape = (steps, size) if self.chunk_size == 1 else (steps, self.chunk_size, size)
        return draw(size=shape).astype(np.float32)

    def act(
        self, observations: Mapping[str, Tensor], noise: Tensor | None, temperature: float
    ) -> dict[str, Tensor]:
        """Return actions for ``observation`` ``[n, D]``.

        ``action`` is int64 ``[n]``, or ``[n, A]`` in the simulator's units (float64 if they differ
        from the policy's, else float32). ``logprob`` and ``value`` are float32 ``[n]``. For chunks,
        actions are ``[n, C]`` or ``[n, C, A]`` and log-probabilities ``[n, C, 1]`` or ``[n, C,
        A]``; with ``value_level`` ``action``, values are ``[n, C]``.
        """
        out, log_std, values = self._action_parameters(observations["observation"], observations)
        if noise is None:
            actions = out.argmax(-1) if self.is_discrete else out
        elif self.is_discrete:
            # The argmax of logits plus Gumbel noise is a sample of their distribution.
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
        """Return log-probabilities and entropies ``[...]`` of actions.

        For chunks they are per dimension, ``[..., C, A]``, or per discrete action, ``[..., C, 1]``.
        The temperature divides logits or multiplies standard deviations; 0 (greedy) counts as 1.

        Args:
            out: Action parameters of the network.
            log_std: Log standard deviations of the network.
            actions: The actions in the policy's units.
        """
        if self.is_discrete:
            all_logprobs = F.log_softmax(out / (temperature or 1.0), dim=-1)
            logprobs = all_logprobs.gather(-1, actions.long()[..., None])
            entropy = -(all_logprobs.exp() * all_logprobs).sum(-1, keepdim=True)
            if self.chunk_size > 1:
                return logprobs, entropy
            return logprobs[..., 0], entropy[..., 0]
        log_scale = (log_std + math.log(temperature or 1.0)).expand_as(out)
        distance = (actions.to(out.dtype) - out) / log_scale.exp()
        logprobs = -0.5 * distance.square() - log_scale - 0.5 * math.log(2 * math.pi)
        entropy = log_scale + 0.5 * math.log(2 * math.pi * math.e)
        return (logprobs, entropy) if self.chunk_size > 1 else (logprobs.sum(-1), entropy.sum(-1))

    def parameter_group(self, parameter: str) -> str:
        """Return ``value`` for the value network or head, else ``policy``."""
        return "value" if parameter.startswith("value.") else "policy"

    @property
    def chunk_size(self) -> int:
        """Number of actions per chunk."""
        return int(self.settings.get("chunk_size", 1))

    @property
    def is_discrete(self) -> bool:
        """Whether actions are discrete rather than vectors."""
        return bool(self.settings["action"]["kind"] == "discrete")


CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel and stride of each layer (Mnih et al. 2015, doi 10.1038/nature14236)."""
MIN_IMAGE_SIDE = 36
"""Smallest height or width of an image for which the convolutions have an output."""


class CNNConfig(MLPConfig):
    """Options of CNN policies: convolutions for each image, whose features join the state."""

    features_dim: int = Field(default=256, gt=0)
    """Number of features per image."""
    use_state: bool = True
    """Whether the state is an input besides the images."""


class CNNActorCritic(MLPActorCritic):
    """An :class:`MLPActorCritic` with image features, which policy and value share."""

    def __init__(self, settings: dict[str, Any]) -> None:
        features_dim = settings["features_dim"]
        super().__init__(settings, features_dim * len(settings["images"]))
        self.uses_state = bool(settings["use_state"])
        sizes = settings["images"].items()
        self.encoders = nn.ModuleDict(
            {name: _image_encoder(size[0], size[1], features_dim) for name, size in sizes}
        )

    def forward(
        self, observations: Tensor, features: Tensor | None = None, **images: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of the base class; ``images`` are uint8 ``[..., H, W, 3]``."""
        encoded = []
        for name, encoder in self.encoders.items():
            image = images[name]
            flat = image.reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2)
            output = encoder(flat.to(self.log_std.dtype) / 255)
            encoded.append(output.reshape(*image.shape[:-3], -1))
        if not self.uses_state:
            observations = self.mean.expand_as(observations)  # zero after standardization
        return super().forward(observations, torch.cat(encoded, -1))


class CNNPolicy(MLPPolicy):
    """A policy for image observations with a state."""

    Config = CNNConfig
    Network = CNNActorCritic
    module: CNNActorCritic

    @classmethod
    def check_spec(cls, config: MLPConfig, spec: ModelSpec) -> None:
        super().check_spec(config, spec)
        images = spec.get("images") or {}
        if not images:
            raise ConfigError(
                "model.name: cnn reads images, and the task shows none; set task.images, or "
                "choose model.name=mlp"
            )
        for name, size in images.items():
            if min(size) < MIN_IMAGE_SIDE:
                raise ConfigError(
                    f"task.images.{name}: {size[0]} x {size[1]} is too small for model.name=cnn, "
                    f"which needs {MIN_IMAGE_SIDE} at least"
                )

    def collate(self, trajectories: Sequence[Trajectory]) -> Batch:
        """Return the inputs of the base class and ``images.NAME``, uint8 ``[B, T, H, W, 3]``."""
        length = max(len(trajectory) for trajectory in trajectories)
        images = {
            IMAGE_PREFIX + camera: pad_right([t.images[camera] for t in trajectories], length)
            for camera in self.settings["images"]
        }
        return {**super().collate(trajectories), **images}

    def forward_network(
        self, state: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        images = {name: columns[IMAGE_PREFIX + name] for name in self.settings["images"]}
        outputs: tuple[Tensor, Tensor, Tensor] = self.module(state, **images)
        return outputs


def _image_encoder(height: int, width: int, features_dim: int) -> nn.Sequential:
    """Return convolutions and a linear layer, from images to ``features_dim`` numbers."""
    layers: list[nn.Module] = []
    channels = 3
    for out, kernel, stride in CONVOLUTIONS:
        layers += [nn.Conv2d(channels, out, kernel, stride), nn.ReLU()]
        height, width, channels = (
            (height - kernel) // stride + 1,
            (width - kernel) // stride + 1,
            out,
        )
    layers += [nn.Flatten(), nn.Linear(height * width * channels, features_dim), nn.ReLU()]
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.orthogonal_(layer.weight, 2**0.5)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)
