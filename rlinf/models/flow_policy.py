"""A small flow-matching policy for vector observations, based on :mod:`rlinf.models.denoising`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rlinf.data.batch import pad_right
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError
from rlinf.models.action_encoding import ActionScale, check_action_scale
from rlinf.models.base import Batch, ModelSpec, StepOutputs
from rlinf.models.denoising import (
    CHAIN_COLUMN,
    DenoisingConfig,
    DenoisingProcess,
    bounded_log_std,
    noise_fractions,
)
from rlinf.models.vector_policy import NormalizedVectorPolicy, ObservationNormalizer, tanh_network
from rlinf.registry import IMITATION_LOSS, OBSERVATIONS, SINGLE_PASS_ACTIONS, VALUE_ESTIMATES
from rlinf.seeding import generator


class FlowConfig(DenoisingConfig):
    """Options of flow policies: tanh networks for velocity, value and learned noise."""

    hidden: tuple[Annotated[int, Field(gt=0)], ...] = (64, 64)
    """Hidden sizes of each network."""
    denoising_steps: int = Field(default=4, gt=0, le=100)
    """Number of denoising steps ``N``."""
    action_scale: ActionScale = None
    """Factor from the output (last point of a chain) to the action in the simulator's units; null:
    -1 to 1 spans the task's bounds. The initial noise has standard deviation 1."""
    normalize_observations: bool = False
    """Standardize observations with running statistics, which are part of the weights."""
    observation_clip: float = Field(default=10.0, gt=0)
    """Largest magnitude of a (standardized) observation."""


class FlowNetworks(ObservationNormalizer):
    """The networks of velocity, value and, if it is learned, noise."""

    def __init__(self, settings: dict[str, Any]) -> None:
        size, action_size = settings["observation"], settings["action"]["size"]
        hidden = settings["hidden"]
        super().__init__(size, float(settings["observation_clip"]))
        self.velocity = tanh_network([size + action_size + 1, *hidden, action_size], last_gain=0.01)
        self.value = tanh_network([size, *hidden, 1], last_gain=1.0)
        self.spread = None
        """The network of the log standard deviations; None: they are not learned."""
        if settings["noise_method"] == "learned":
            self.spread = tanh_network([size + 1, *hidden, action_size], last_gain=0.01)
        self._std_range: tuple[float, float] = tuple(settings["noise_std_range"])

    def forward(
        self, observations: Tensor, points: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return velocities and, if learned, log standard deviations ``[..., K, A]``, and values
        ``[...]``, float32.

        Args:
            observations: ``[..., D]``.
            points: ``[..., K, A]``.
            tau: Noise fractions, ``[K, 1]`` or ``[..., K, 1]``.
        """
        # With mixed precision, the parameters have another type than the observations.
        dtype = next(self.value.parameters()).dtype
        inputs = self.standardize(observations).to(dtype)
        repeated = inputs[..., None, :].expand(*points.shape[:-1], -1)
        state = torch.cat([repeated, tau.to(dtype).expand(*points.shape[:-1], 1)], -1)
        velocity = self.velocity(torch.cat([state, points.to(dtype)], -1)).float()
        log_std = None
        if self.spread is not None:
            log_std = bounded_log_std(self.spread(state), self._std_range)
        return velocity, log_std, self.value(inputs)[..., 0].float()


class FlowPolicy(NormalizedVectorPolicy):
    """A flow-matching policy.

    The log-probability of a step is that of its chain, given the first point (noise that does not
    depend on the parameters). The entropy of a step is the sum over the denoising steps.
    """

    Config = FlowConfig
    requires = frozenset({OBSERVATIONS})
    provides = frozenset({SINGLE_PASS_ACTIONS, VALUE_ESTIMATES, IMITATION_LOSS})
    parameter_groups = ("policy", "value")
    Network = FlowNetworks
    module: FlowNetworks

    def __init__(self, module: FlowNetworks, settings: dict[str, Any]) -> None:
        super().__init__(module, settings)
        self.num_denoising_steps = int(settings["denoising_steps"])
        self.action_size = int(settings["action"]["size"])
        self._denoising = DenoisingProcess(
            self.num_denoising_steps, float(settings["noise_level"]), 1
        )

    @classmethod
    def check_spec(cls, config: FlowConfig, spec: ModelSpec) -> None:
        if spec["action"]["kind"] != "box":
            raise ConfigError(
                "model.name: flow makes vectors (task.action.kind box), not one of "
                f"{spec['action']['size']} numbers; use model=mlp, or another task"
            )
        check_action_scale(spec["action"], config.action_scale, squashed=False)

    def prepare_demonstration(self, trajectory: Trajectory, seed: int = 0) -> Trajectory:
        """Add random numbers for the imitation loss: ``noise`` ``[T, A]``, ``uniform`` ``[T]``."""
        random = generator(seed, "imitation", *trajectory.identity.key)
        noise = random.standard_normal((len(trajectory), self.action_size), np.float32)
        draws = {"noise": noise, "uniform": random.random(len(trajectory), np.float32)}
        return replace(trajectory, policy_columns={**trajectory.policy_columns, **draws})

    def collate(self, trajectories: Sequence[Trajectory]) -> Batch:
        """Return the inputs of the base class and ``chain`` ``[B, T, N + 1, A]`` or, for
        demonstrations, ``noise`` and ``uniform``."""
        length = max(len(trajectory) for trajectory in trajectories)
        is_sampled = CHAIN_COLUMN in trajectories[0].policy_columns
        columns = {
            name: pad_right([t.policy_columns[name] for t in trajectories], length)
            for name in ([CHAIN_COLUMN] if is_sampled else ["noise", "uniform"])
        }
        return {**super().collate(trajectories), **columns}

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        """Return log-probabilities, entropies and values ``[B, T]``; for demonstrations, only the
        negative imitation losses."""
        if CHAIN_COLUMN not in batch:
            return StepOutputs(-self.imitation_loss(batch) * batch["mask"])
        logprobs, entropies, values = self.evaluate_chain(
            batch["observations"], batch[CHAIN_COLUMN], temperature
        )
        mask = batch["mask"]
        return StepOutputs(logprobs * mask, entropies * mask if entropy else None, values * mask)

    def evaluate_chain(
        self, observations: Tensor, chain: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities and entropies of chains ``[..., N + 1, A]`` and values of
        observations ``[..., D]``, each ``[...]``."""
        tau = noise_fractions(self.num_denoising_steps).to(chain.device)[:, None]
        velocity, log_std, values = self.module(observations, chain[..., :-1, :], tau)
        logprobs, entropy = self._denoising.logprobs_and_entropy(
            chain, velocity, log_std, temperature
        )
        return logprobs.sum(-1), entropy.sum(-1), values

    def draw_noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        """Return standard normal noise ``[steps, N + 1, A]``: the start of each chain and the noise
        of its steps."""
        shape = (steps, self.num_denoising_steps + 1, self.action_size)
        return random.standard_normal(size=shape).astype(np.float32)

    def act(
        self, observations: Mapping[str, Tensor], noise: Tensor | None, temperature: float
    ) -> dict[str, Tensor]:
        """Return ``action`` ``[n, A]``, ``chain`` ``[n, N + 1, A]``, ``logprob`` ``[n]`` and
        ``value`` ``[n]`` for ``observation`` ``[n, D]``, all float32."""
        inputs = observations["observation"]

        def velocity(points: Tensor, tau: Tensor) -> tuple[Tensor, Tensor | None]:
            outputs: tuple[Tensor, Tensor | None, Tensor] = self.module(
                inputs, points, tau[:, None]
            )
            return outputs[:2]

        first = torch.zeros(len(inputs), self.action_size, device=inputs.device)
        step_noise = None
        if noise is not None:
            first, step_noise = noise[:, 0], noise[:, 1:]
        chain = self._denoising.sample(velocity, first, step_noise, temperature)
        logprobs, _, values = self.evaluate_chain(inputs, chain, temperature)
        assert self.action_box is not None, "actions are vectors"
        return {
            "action": self.action_box.unnormalize(chain[:, -1]).float(),
            CHAIN_COLUMN: chain,
            "logprob": logprobs,
            "value": values,
        }

    def imitation_loss(self, batch: Batch) -> Tensor:
        """Return the conditional flow matching loss ``[...]`` (arXiv 2210.02747, eq. 14).

        The loss is the squared error of the velocity at a uniform random noise fraction.
        """
        action, noise = batch["actions"], batch["noise"]
        tau = 1 - batch["uniform"][..., None]
        points = tau * noise + (1 - tau) * action
        velocity, _, _ = self.module(batch["observations"], points[..., None, :], tau[..., None, :])
        return (velocity[..., 0, :] - (noise - action)).square().mean(-1)

    def parameter_group(self, parameter: str) -> str:
        return "value" if parameter.startswith("value.") else "policy"
