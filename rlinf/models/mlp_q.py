"""A tanh-Gaussian policy with action values, for vector observations and off-policy methods."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from rlinf.config import Section
from rlinf.errors import ConfigError
from rlinf.fit import ACTION_VALUES, ACTS, IMITATION, OBSERVATIONS
from rlinf.models.action_box import ActionScale, check_scale
from rlinf.models.base import Batch, Spec, StepOutputs
from rlinf.models.ensemble import Ensemble, Norm
from rlinf.models.squashed import EDGE, log_density, unsquash
from rlinf.models.vectors import VectorPolicy

LOG_STD_RANGE = (-20.0, 2.0)
IMITATED_EDGE = 1e-3
"""Actions that are imitated count as at least so far inside of the interval, on whose edge the
squashed density has no bound."""


class MLPQConfig(Section):
    """Rectified networks: the policy's, the critics', and what some methods need besides."""

    hidden: tuple[Annotated[int, Field(gt=0)], ...] = (256, 256)
    """Of the policy (and of the state's value)."""
    critic_hidden: tuple[Annotated[int, Field(gt=0)], ...] = (256, 256)
    critics: int = Field(default=2, gt=0)
    """Independent estimates of an action's value."""
    critic_norm: Norm = "none"
    """Inside the critics: ``layer`` (RLPD) or ``batch_renorm`` (CrossQ)."""
    targets: bool = True
    """Copies of the critics that follow them slowly."""
    state_value: bool = False
    """A value of the state alone (IQL)."""
    action_scale: ActionScale = None
    """Largest magnitude of each component of an action, in the simulator's units; null: actions
    fill the task's bounds."""
    initial_temperature: float = Field(default=1.0, gt=0)
    """Of the entropy in the objective, where it is learned."""


class QNetworks(nn.Module):
    """Policy, critics and the learned temperature.

    ``targets`` are not trained; they travel with the weights, so a run goes on from them.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        seen, size = settings["observation"], settings["action"]["size"]
        self.policy = _network([seen, *settings["hidden"], 2 * size])
        many, wide = settings["critics"], settings["critic_hidden"]
        self.critics = Ensemble(many, seen + size, wide, settings["critic_norm"])
        self.targets: Ensemble | None = None
        if settings["targets"]:
            self.targets = Ensemble(many, seen + size, wide, settings["critic_norm"])
            self.targets.load_state_dict(self.critics.state_dict())
            self.targets.requires_grad_(False)
        self.value = _network([seen, *settings["hidden"], 1]) if settings["state_value"] else None
        start = math.log(settings["initial_temperature"])
        self.log_temperature = nn.Parameter(torch.full((1,), start))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation ``[..., A]`` before the squashing, float32."""
        mean, spread = self.policy(observations).float().chunk(2, -1)
        return mean, spread.clamp(*LOG_STD_RANGE)

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """Move the target networks towards the critics by a share ``rate`` (Polyak averaging)."""
        assert self.targets is not None
        own: list[Tensor] = [*self.targets.parameters()]
        torch._foreach_lerp_(own, [*self.critics.parameters()], rate)


class MLPQPolicy(VectorPolicy):
    """See the module. Log-probabilities are those of the squashed action, in [-1, 1]; critics see
    actions in that interval too (:mod:`rlinf.models.action_box`)."""

    Config = MLPQConfig
    needs = frozenset({OBSERVATIONS})
    offers = frozenset({ACTS, ACTION_VALUES, IMITATION})
    groups = ("policy", "critic", "value", "temperature")
    Network = QNetworks
    module: QNetworks

    def __init__(self, module: QNetworks, settings: dict[str, Any]) -> None:
        super().__init__(module, settings)
        self.size = int(settings["action"]["size"])

    @classmethod
    def check(cls, config: MLPQConfig, spec: Spec) -> None:
        if spec["action"]["kind"] != "box":
            raise ConfigError(
                "model.name: mlp_q chooses vectors (task.action.kind box), not one of "
                f"{spec['action']['size']} numbers; use model=mlp, or another task"
            )
        check_scale(spec["action"], config.action_scale, squashed=True)

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        """As every policy; the entropy is estimated by the action taken, as minus its log-prob."""
        seen, mask = batch["observations"].float(), batch["mask"]
        logprobs = self.judge(seen, batch["actions"], temperature) * mask
        values = None if self.module.value is None else self.module.value(seen)[..., 0] * mask
        return StepOutputs(logprobs, -logprobs if entropy else None, values)

    def judge(
        self, observations: Tensor, actions: Tensor, temperature: float = 1.0, edge: float = EDGE
    ) -> Tensor:
        """Log-probabilities ``[...]`` of actions ``[..., A]`` in [-1, 1]; those outside count as at
        ``edge``.

        A temperature multiplies standard deviations; 0 (greedy) is judged as 1.
        """
        mean, log_std = self.module(observations)
        raw = unsquash(actions.double(), edge)
        log_std = log_std + math.log(temperature or 1.0)
        return log_density(raw, mean.double(), log_std.double()).float()

    def sample(self, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions ``[B, A]`` in [-1, 1] and their log-probabilities ``[B]``, both with gradients.

        Args:
            noise: standard normal ``[B, A]`` (the reparametrisation trick).
        """
        mean, log_std = self.module(observations)
        raw = mean + noise * log_std.exp()
        return torch.tanh(raw), log_density(raw, mean, log_std)

    def noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        return random.standard_normal(size=(steps, self.size)).astype(np.float32)

    def act(
        self, observations: Mapping[str, Tensor], noise: Tensor | None, temperature: float
    ) -> dict[str, Tensor]:
        """Of ``observation`` ``[n, D]``: ``action`` float64 ``[n, A]`` in the simulator's units,
        from which the value before the squashing can be had back, and ``logprob`` float32 ``[n]``.
        """
        mean, log_std = self.module(observations["observation"])
        raw = mean.double()
        log_std = log_std.double() + math.log(temperature or 1.0)
        if noise is not None:
            raw = raw + noise.double() * log_std.exp()
        logprobs = log_density(raw, mean.double(), log_std)
        assert self.box is not None, "it acts by vectors"
        return {"action": self.box.restored(torch.tanh(raw)), "logprob": logprobs.float()}

    def imitation(self, batch: Batch) -> Tensor:
        """Minus the log-probability of what was done."""
        return -self.judge(batch["observations"], batch["actions"], edge=IMITATED_EDGE)

    def group(self, parameter: str) -> str:
        """``critic``, ``value`` (of a state), ``temperature``, else ``policy``."""
        stem = parameter.partition(".")[0]
        named = {"critics": "critic", "targets": "critic", "value": "value"}
        return named.get(stem, "temperature" if stem == "log_temperature" else "policy")


def _network(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers with rectifiers between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
