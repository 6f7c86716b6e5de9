"""The base classes of policies for vector observations: folder format, batches, normalization."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from rlinf.data.batch import pad_right
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.data.transitions import transition_dtype
from rlinf.errors import DataError
from rlinf.models.action_encoding import ActionBox
from rlinf.models.base import Batch, ModelSpec, Policy
from rlinf.models.checkpoint_tensors import check_tensors
from rlinf.safetensors_io import load_tensors
from rlinf.verified_io import read_text

WEIGHTS_FILE, SETTINGS_FILE = "model.safetensors", "config.json"


class VectorPolicy(Policy):
    """A policy for vector observations. Its ``settings`` (``config.json``) define the network: the
    model spec of the task, merged with the policy options."""

    Network: ClassVar[Any]
    """Class of the module; its argument is the settings."""
    has_independent_steps = True
    module: nn.Module

    def __init__(self, module: Any, settings: dict[str, Any]) -> None:
        self.module = module
        self.settings = settings
        self.action_box: ActionBox | None = None
        """Scaling of action vectors, if the configuration has ``action_scale``. Without it, actions
        have the simulator's units."""
        if settings["action"]["kind"] == "box" and "action_scale" in settings:
            self.action_box = ActionBox.from_spec(settings["action"], settings["action_scale"])

    @classmethod
    def create(cls, config: Any, spec: ModelSpec, seed: int, folder: Path) -> None:
        cls.check_spec(config, spec)
        settings = cls.settings_of(config, spec)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = cls.Network(settings)
        cls(module, settings).save(folder, dict(module.state_dict()))

    @classmethod
    def settings_of(cls, config: Any, spec: ModelSpec) -> dict[str, Any]:
        """Return the settings of a new policy."""
        return {**spec, **config.model_dump(mode="json", exclude={"path"})}

    @classmethod
    def load(cls, folder: Path, config: Any) -> Self:
        """Load a policy folder; its own ``config.json`` defines the network.

        Raises:
            DataError: Files are missing, damaged, or inconsistent.
        """
        try:
            settings = json.loads(read_text(folder / SETTINGS_FILE))
            module = cls.Network(settings)
            tensors = load_tensors(folder / WEIGHTS_FILE)
            check_tensors(str(folder), {name: t.shape for name, t in tensors.items()}, module)
            module.load_state_dict(tensors)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise DataError(f"model.path: {folder}: not a policy folder ({error})") from None
        return cls(module, settings)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        (folder / SETTINGS_FILE).write_text(json.dumps(self.settings, indent=1, sort_keys=True))
        save_file({k: v.contiguous() for k, v in sorted(tensors.items())}, folder / WEIGHTS_FILE)

    @property
    def transition_dtype(self) -> np.dtype:
        return transition_dtype(self.settings["observation"], self.settings["action"]["size"])

    def to_policy_actions(self, actions: np.ndarray) -> np.ndarray:
        """Return executed actions ``[..., A]`` in the policy's units, for critics and imitation."""
        return (
            actions
            if self.action_box is None
            else self.action_box.normalize(self.action_box.clip_to_bounds(actions))
        )

    def collate(self, trajectories: Sequence[Trajectory]) -> Batch:
        """Return ``observations`` ``[B, T, D]``, ``actions`` ``[B, T]`` or, in the policy's units,
        ``[B, T, A]``, and ``mask`` ``[B, T]``."""
        length = max(len(trajectory) for trajectory in trajectories)
        actions = [np.asarray(trajectory.actions) for trajectory in trajectories]
        if self.action_box is not None:
            actions = [self.action_box.normalize(column) for column in actions]
        return {
            "observations": pad_right([t.require("observations") for t in trajectories], length),
            "actions": pad_right(actions, length),
            "mask": pad_right([np.ones(len(t), np.float32) for t in trajectories], length),
        }


class ObservationNormalizer(nn.Module):
    """A network with running statistics of its observations, as buffers in double precision.

    The buffers are ``seen`` (the number of observations), ``mean`` and ``square`` (the variance).
    They cover the entire run.
    """

    seen: Tensor
    mean: Tensor
    square: Tensor

    def __init__(self, size: int, clip: float) -> None:
        """
        Args:
            size: Dimension of an observation.
            clip: Largest magnitude of a component of a standardized observation.
        """
        super().__init__()
        self.clip = clip
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("square", torch.ones(size, dtype=torch.float64))

    def standardize(self, observations: Tensor) -> Tensor:
        """Return standardized and clipped observations ``[..., D]``, float64."""
        deviation = self.square.clamp(min=1e-8).sqrt()
        return ((observations - self.mean) / deviation).clamp(-self.clip, self.clip)


class NormalizedVectorPolicy(VectorPolicy):
    """A vector policy that tracks observation statistics if ``normalize_observations`` is set."""

    module: ObservationNormalizer
    tracks_observations = True

    @torch.no_grad()
    def update_observation_stats(self, trajectories: Sequence[Trajectory]) -> None:
        """Add the observations of unmasked steps to the running statistics.

        Masked steps may have observations that are not simulator states. The pairwise update of
        Chan, Golub and LeVeque (1979) is exact for all batch sizes.
        """
        if not self.settings["normalize_observations"]:
            return
        module = self.module
        observations = np.concatenate(
            [t.require("observations")[loss_mask(t)] for t in trajectories]
        )
        if not len(observations):
            return
        batch = torch.as_tensor(observations, dtype=torch.float64)
        mean = batch.mean(0).to(module.mean.device)
        variance = batch.var(0, unbiased=False).to(module.mean.device)
        old_count, new_count = module.seen, len(batch)
        total = old_count + new_count
        delta = mean - module.mean
        squares = module.square * old_count + variance * new_count
        squares = squares + delta.square() * old_count * new_count / total
        module.square.copy_(squares / total)
        module.mean.add_(delta * new_count / total)
        module.seen.copy_(total)


def tanh_network(sizes: Sequence[int], last_gain: float | None) -> nn.Sequential:
    """Return linear layers, each followed by tanh, with orthogonal weights of gain sqrt(2). If
    ``last_gain`` is given, the last layer has this gain and no tanh."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        is_output = last_gain is not None and i + 2 == len(sizes)
        linear = nn.Linear(a, b)
        nn.init.orthogonal_(linear.weight, last_gain if last_gain and is_output else 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear] if is_output else [linear, nn.Tanh()]
    return nn.Sequential(*layers)
