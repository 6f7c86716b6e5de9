"""Tanh-Gaussian policies with action-value critics, for vector observations (SAC and others).

Actions are normal vectors, squashed into [-1, 1] by tanh (SAC, arXiv 1812.05905, app. C). The
critics form an ensemble, computed with batched matrix products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from rlinf.config import Section
from rlinf.errors import ConfigError
from rlinf.models.action_encoding import ActionScale, check_action_scale
from rlinf.models.base import Batch, ModelSpec, StepOutputs
from rlinf.models.vector_policy import VectorPolicy
from rlinf.registry import ACTION_VALUES, IMITATION_LOSS, OBSERVATIONS, SINGLE_PASS_ACTIONS

TANH_EPS = 1e-6
"""Actions are clamped to magnitude ``1 - TANH_EPS`` before tanh is inverted, because the density
is undefined at magnitude 1."""


def inverse_tanh(actions: Tensor, eps: float = TANH_EPS) -> Tensor:
    """Return the inverse of ``tanh`` for actions, clamped to magnitude ``1 - eps``."""
    return torch.atanh(actions.clamp(eps - 1, 1 - eps))


def tanh_normal_log_prob(raw: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the log-density ``[...]`` of ``tanh(raw)``; all arguments are ``[..., A]``.

    ``log (1 - tanh(u)^2)`` is computed as ``2 (log 2 - u - softplus(-2 u))``, which is exact even
    where ``tanh`` rounds to 1.
    """
    distance = (raw - mean) / log_std.exp()
    normal = -0.5 * distance.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
    return (normal - log_slope).sum(-1)


CriticNorm = Literal["none", "layer", "batch_renorm"]
RENORM_MOMENTUM = 0.01
"""Update rate of the running statistics of batch renormalization (CrossQ: momentum 0.99)."""
R_MAX, D_MAX = 3.0, 5.0
"""Limits of the corrections ``r`` and ``d`` (:class:`EnsembleBatchRenorm`)."""
RENORM_WARMUP_BATCHES = 100_000
"""Number of batches before training uses the running statistics (CrossQ, appendix)."""


class CriticEnsemble(nn.Module):
    """An ensemble of ``E`` independent ReLU networks from ``[B, I]`` to ``[E, B]``.

    Each layer is one batched matrix product for all networks.
    """

    def __init__(
        self,
        count: int,
        size: int,
        hidden: Sequence[int],
        norm: CriticNorm = "none",
        gain: float = 1.0,
    ) -> None:
        """
        Args:
            count: Number of networks ``E``.
            size: Input dimension ``I``.
            hidden: Sizes of the hidden layers.
            norm: Normalization inside the networks.
            gain: Scale of the initial weights of the last layer.
        """
        super().__init__()
        sizes = [size, *hidden, 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for layer, (a, b) in enumerate(itertools.pairwise(sizes)):
            bound = 1 / math.sqrt(a)
            scale = bound * (gain if layer + 2 == len(sizes) else 1.0)
            self.weights.append(nn.Parameter(torch.empty(count, a, b).uniform_(-scale, scale)))
            # [E, 1, b]: three-dimensional parameters get weight decay like the weights.
            self.biases.append(nn.Parameter(torch.empty(count, 1, b).uniform_(-scale, scale)))
        self.norms = nn.ModuleList()
        if norm == "layer":
            self.norms.extend(EnsembleLayerNorm(count, width) for width in hidden)
        elif norm == "batch_renorm":
            self.norms.extend(EnsembleBatchRenorm(count, width) for width in sizes[:-1])
        self._normalizes_inputs = norm == "batch_renorm"

    def forward(
        self, inputs: Tensor, *, frozen: bool = False, critics: Tensor | None = None
    ) -> Tensor:
        """Return outputs ``[E, B]`` for inputs ``[B, I]``.

        Args:
            frozen: For the loss of an actor: compute gradients only for the inputs, and do not
                update running statistics.
            critics: Indices of the networks to compute, int64 ``[K]``; the outputs are ``[K, B]``.
        """
        count = len(self.weights[0]) if critics is None else len(critics)
        x = inputs.expand(count, *inputs.shape)
        last = len(self.weights) - 1

        def select(parameter: Tensor) -> Tensor:
            parameter = parameter.detach() if frozen else parameter
            return parameter if critics is None else parameter[critics]

        for layer in range(last + 1):
            if self._normalizes_inputs:
                x = self.norms[layer](x, frozen=frozen, critics=critics)
            weight, bias = select(self.weights[layer]), select(self.biases[layer])
            if layer == last:
                # For one column, a matrix product would be six times slower.
                return (x * weight.transpose(1, 2)).sum(-1) + bias[..., 0]
            x = torch.bmm(x, weight) + bias
            if len(self.norms) and not self._normalizes_inputs:
                x = self.norms[layer](x, frozen=frozen, critics=critics)
            x = F.relu(x)
        raise AssertionError("an ensemble has a last layer")


class EnsembleLayerNorm(nn.Module):
    """Layer normalization for each network of an ensemble (Ba et al., 2016)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(count, 1, width))
        self.shift = nn.Parameter(torch.zeros(count, 1, width))

    def forward(self, x: Tensor, *, frozen: bool, critics: Tensor | None) -> Tensor:
        gain, shift = _select_critics(self.gain, self.shift, frozen, critics)
        return F.layer_norm(x, x.shape[-1:]) * gain + shift


class EnsembleBatchRenorm(nn.Module):
    """Batch renormalization for each network of an ensemble (Ioffe, 2017, arXiv 1702.03275).

    Training normalizes with the statistics of the batch. A factor ``r`` and an offset ``d``, which
    have no gradient, correct the result towards that of the running statistics. In the first
    :data:`RENORM_WARMUP_BATCHES` batches, ``r`` is 1 and ``d`` is 0. Evaluation uses the running
    statistics.
    """

    mean: Tensor
    variance: Tensor
    """The running statistics, ``[E, 1, width]``."""
    batches: Tensor
    """Number of training batches so far, float32 ``[1]``."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(count, 1, width))
        self.shift = nn.Parameter(torch.zeros(count, 1, width))
        self.register_buffer("mean", torch.zeros(count, 1, width))
        self.register_buffer("variance", torch.ones(count, 1, width))
        self.register_buffer("batches", torch.zeros(1))

    def forward(self, x: Tensor, *, frozen: bool, critics: Tensor | None) -> Tensor:
        gain, shift = _select_critics(self.gain, self.shift, frozen, critics)
        if frozen or not self.training:
            mean, variance = _select_critics(self.mean, self.variance, True, critics)
            return (x - mean) / (variance + 1e-5).sqrt() * gain + shift
        assert critics is None, "statistics are updated for all networks"
        variance, mean = torch.var_mean(x, 1, unbiased=False, keepdim=True)
        deviation = (variance + 1e-5).sqrt()
        out = (x - mean) / deviation
        with torch.no_grad():
            if self.batches.item() >= RENORM_WARMUP_BATCHES:
                running_deviation = (self.variance + 1e-5).sqrt()
                r = (deviation / running_deviation).clamp(1 / R_MAX, R_MAX)
                d = ((mean - self.mean) / running_deviation).clamp(-D_MAX, D_MAX)
            else:
                r, d = torch.ones_like(mean), torch.zeros_like(mean)
            self.mean.lerp_(mean, RENORM_MOMENTUM)
            self.variance.lerp_(variance, RENORM_MOMENTUM)
            self.batches += 1
        return (out * r + d) * gain + shift


def _select_critics(
    first: Tensor, second: Tensor, frozen: bool, critics: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return two parameters for the chosen critics; without gradients if ``frozen``."""
    if frozen:
        first, second = first.detach(), second.detach()
    return (first, second) if critics is None else (first[critics], second[critics])


LOG_STD_RANGE = (-20.0, 2.0)
IMITATION_EPS = 1e-3
"""Like :data:`TANH_EPS`, for imitated actions. It is larger, because near magnitude 1 the density
grows without bound."""


class MLPQConfig(Section):
    """Options of tanh-Gaussian policies with critics; all networks use ReLU."""

    hidden: tuple[Annotated[int, Field(gt=0)], ...] = (256, 256)
    """Hidden sizes of the policy (and of the state value)."""
    critic_hidden: tuple[Annotated[int, Field(gt=0)], ...] = (256, 256)
    num_critics: int = Field(default=2, gt=0)
    """Number of independent critics."""
    critic_norm: CriticNorm = "none"
    """Normalization inside the critics: ``layer`` (RLPD) or ``batch_renorm`` (CrossQ)."""
    use_target_critics: bool = True
    """Whether there are target networks, updated by Polyak averaging."""
    use_state_value: bool = False
    """Whether there is a state value network (IQL)."""
    action_scale: ActionScale = None
    """Largest magnitude of each action component, in the simulator's units; null: actions span the
    task's bounds."""
    initial_temperature: float = Field(default=1.0, gt=0)
    """Initial entropy temperature, if it is learned."""


class QNetworks(nn.Module):
    """The networks of policy and critics, and the learned entropy temperature.

    The target critics, ``targets``, are not trained. They are part of the weights, so a run can
    resume with them.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        observation_size, action_size = settings["observation"], settings["action"]["size"]
        self.policy = _relu_network([observation_size, *settings["hidden"], 2 * action_size])
        count, size = settings["num_critics"], observation_size + action_size
        hidden, norm = settings["critic_hidden"], settings["critic_norm"]
        self.critics = CriticEnsemble(count, size, hidden, norm)
        self.targets: CriticEnsemble | None = None
        if settings["use_target_critics"]:
            self.targets = CriticEnsemble(count, size, hidden, norm)
            self.targets.load_state_dict(self.critics.state_dict())
            self.targets.requires_grad_(False)
        self.value: nn.Sequential | None = None
        if settings["use_state_value"]:
            self.value = _relu_network([observation_size, *settings["hidden"], 1])
        initial = math.log(settings["initial_temperature"])
        self.log_temperature = nn.Parameter(torch.full((1,), initial))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation ``[..., A]`` before tanh, float32."""
        mean, log_std = self.policy(observations).float().chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD_RANGE)

    @torch.no_grad()
    def polyak_update(self, rate: float) -> None:
        """Move the target networks towards the critics by ``rate`` (Polyak averaging)."""
        assert self.targets is not None
        targets: list[Tensor] = [*self.targets.parameters()]
        torch._foreach_lerp_(targets, [*self.critics.parameters()], rate)


class MLPQPolicy(VectorPolicy):
    """A tanh-Gaussian policy with critics.

    Log-probabilities and critics use squashed actions in [-1, 1]
    (:mod:`rlinf.models.action_encoding`).
    """

    Config = MLPQConfig
    requires = frozenset({OBSERVATIONS})
    provides = frozenset({SINGLE_PASS_ACTIONS, ACTION_VALUES, IMITATION_LOSS})
    parameter_groups = ("policy", "critic", "value", "temperature")
    Network = QNetworks
    module: QNetworks

    def __init__(self, module: QNetworks, settings: dict[str, Any]) -> None:
        super().__init__(module, settings)
        self.action_size = int(settings["action"]["size"])

    @classmethod
    def check_spec(cls, config: MLPQConfig, spec: ModelSpec) -> None:
        if spec["action"]["kind"] != "box":
            raise ConfigError(
                "model.name: mlp_q chooses vectors (task.action.kind box), not one of "
                f"{spec['action']['size']} numbers; use model=mlp, or another task"
            )
        check_action_scale(spec["action"], config.action_scale, squashed=True)

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        """Compute step outputs; the entropy estimate is the negative log-probability."""
        observations, mask = batch["observations"].float(), batch["mask"]
        logprobs = self.action_logprob(observations, batch["actions"], temperature) * mask
        values = None
        if self.module.value is not None:
            values = self.module.value(observations)[..., 0] * mask
        return StepOutputs(logprobs, -logprobs if entropy else None, values)

    def action_logprob(
        self,
        observations: Tensor,
        actions: Tensor,
        temperature: float = 1.0,
        eps: float = TANH_EPS,
    ) -> Tensor:
        """Return log-probabilities ``[...]`` of actions ``[..., A]`` in [-1, 1].

        Args:
            observations: ``[..., D]``.
            actions: ``[..., A]``; clamped to ``1 - eps``.
            temperature: Multiplies standard deviations; 0 (greedy) counts as 1.
            eps: See :data:`TANH_EPS`.
        """
        mean, log_std = self.module(observations)
        raw = inverse_tanh(actions.double(), eps)
        log_std = log_std + math.log(temperature or 1.0)
        return tanh_normal_log_prob(raw, mean.double(), log_std.double()).float()

    def rsample(self, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample actions ``[B, A]`` in [-1, 1] and log-probabilities ``[B]``, with gradients.

        Args:
            observations: ``[B, D]``.
            noise: Standard normal ``[B, A]`` (the reparametrization trick).
        """
        mean, log_std = self.module(observations)
        raw = mean + noise * log_std.exp()
        return torch.tanh(raw), tanh_normal_log_prob(raw, mean, log_std)

    def draw_noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        return random.standard_normal(size=(steps, self.action_size)).astype(np.float32)

    def act(
        self, observations: Mapping[str, Tensor], noise: Tensor | None, temperature: float
    ) -> dict[str, Tensor]:
        """Return ``action`` ``[n, A]`` and ``logprob`` ``[n]`` for ``observation`` ``[n, D]``.

        Actions are float64, precise enough to invert tanh, in the simulator's units.
        Log-probabilities are float32.
        """
        mean, log_std = self.module(observations["observation"])
        raw = mean.double()
        log_std = log_std.double() + math.log(temperature or 1.0)
        if noise is not None:
            raw = raw + noise.double() * log_std.exp()
        logprobs = tanh_normal_log_prob(raw, mean.double(), log_std)
        assert self.action_box is not None, "actions are vectors"
        return {"action": self.action_box.unnormalize(torch.tanh(raw)), "logprob": logprobs.float()}

    def imitation_loss(self, batch: Batch) -> Tensor:
        """Return the negative log-probability of the demonstrated actions."""
        return -self.action_logprob(batch["observations"], batch["actions"], eps=IMITATION_EPS)

    def parameter_group(self, parameter: str) -> str:
        """Return ``critic``, ``value`` (the state value), ``temperature``, or else ``policy``."""
        module = parameter.partition(".")[0]
        groups = {
            "critics": "critic",
            "targets": "critic",
            "value": "value",
            "log_temperature": "temperature",
        }
        return groups.get(module, "policy")


def _relu_network(sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
