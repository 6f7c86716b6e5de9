"""The tanh-Gaussian: a normal vector, squashed into [-1, 1] (SAC, arXiv 1812.05905, app. C)."""

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

from rlinf.capabilities import ACTION_VALUES, IMITATION_LOSS, OBSERVATIONS, SINGLE_PASS_ACTIONS
from rlinf.config import Section
from rlinf.errors import ConfigError
from rlinf.models.action_encoding import ActionScale, check_action_scale
from rlinf.models.base import Batch, ModelSpec, StepOutputs
from rlinf.models.vector_policy import VectorPolicy

TANH_EDGE = 1e-6
"""Actions of other sources are taken so much inside of the interval: on its edge no density is."""


def inverse_tanh(actions: Tensor, edge: float = TANH_EDGE) -> Tensor:
    """The inverse of ``tanh``; what lies outside of ``1 - edge`` counts as on that bound."""
    return torch.atanh(actions.clamp(edge - 1, 1 - edge))


def tanh_normal_log_prob(raw: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density ``[...]`` of ``tanh(raw)`` for ``raw``, ``mean``, ``log_std`` ``[..., A]``.

    ``log (1 - tanh(u)^2)`` is ``2 (log 2 - u - softplus(-2 u))``: exact where ``tanh`` rounds to 1.
    """
    distance = (raw - mean) / log_std.exp()
    normal = -0.5 * distance.square() - log_std - 0.5 * math.log(2 * math.pi)
    slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
    return (normal - slope).sum(-1)


CriticNorm = Literal["none", "layer", "batch_renorm"]
RENORM_MOMENTUM = 0.01
"""Of batch renormalisation's running statistics (CrossQ: momentum 0.99)."""
R_MAX, D_MAX = 3.0, 5.0
RENORM_WARMUP_BATCHES = 100_000
"""Batches after which the running statistics are used in training (CrossQ, appendix)."""


class CriticEnsemble(nn.Module):
    """``E`` networks of rectified layers from ``[B, I]`` to ``[E, B]``; nothing is shared.

    A layer is one product of all networks' matrices.
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
            count: ``E``.
            size: ``I``.
            gain: of the last layer's first weights.
        """
        super().__init__()
        sizes = [size, *hidden, 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for place, (a, b) in enumerate(itertools.pairwise(sizes)):
            bound = 1 / math.sqrt(a)
            scale = bound * (gain if place + 2 == len(sizes) else 1.0)
            self.weights.append(nn.Parameter(torch.empty(count, a, b).uniform_(-scale, scale)))
            # [E, 1, b]: what has three dimensions decays with the weights, as gains do not.
            self.biases.append(nn.Parameter(torch.empty(count, 1, b).uniform_(-scale, scale)))
        self.norms = nn.ModuleList()
        if norm == "layer":
            self.norms.extend(EnsembleLayerNorm(count, width) for width in hidden)
        elif norm == "batch_renorm":
            self.norms.extend(EnsembleBatchRenorm(count, width) for width in sizes[:-1])
        self._before = norm == "batch_renorm"

    def forward(
        self, inputs: Tensor, *, frozen: bool = False, critics: Tensor | None = None
    ) -> Tensor:
        """Outputs ``[E, B]`` of ``[B, I]``.

        Args:
            frozen: gradients flow to the inputs alone, and no running statistics change: what an
                actor's loss needs.
            chosen: int64 ``[K]``: of these networks alone, ``[K, B]``.
        """
        count = len(self.weights[0]) if critics is None else len(critics)
        at = inputs.expand(count, *inputs.shape)
        last = len(self.weights) - 1

        def own(parameter: Tensor) -> Tensor:
            parameter = parameter.detach() if frozen else parameter
            return parameter if critics is None else parameter[critics]

        for place in range(last + 1):
            if self._before:
                at = self.norms[place](at, frozen=frozen, chosen=critics)
            weight, bias = own(self.weights[place]), own(self.biases[place])
            if place == last:
                # One column: as a product of matrices it takes six times as long.
                return (at * weight.transpose(1, 2)).sum(-1) + bias[..., 0]
            at = torch.bmm(at, weight) + bias
            if len(self.norms) and not self._before:
                at = self.norms[place](at, frozen=frozen, chosen=critics)
            at = F.relu(at)
        raise AssertionError("an ensemble has a last layer")


class EnsembleLayerNorm(nn.Module):
    """Layer normalisation of each of several networks (Ba et al., 2016)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(count, 1, width))
        self.shift = nn.Parameter(torch.zeros(count, 1, width))

    def forward(self, at: Tensor, *, frozen: bool, chosen: Tensor | None) -> Tensor:
        gain, shift = _own(self.gain, self.shift, frozen, chosen)
        return F.layer_norm(at, at.shape[-1:]) * gain + shift


class EnsembleBatchRenorm(nn.Module):
    """Batch renormalisation of each of several networks (Ioffe, 2017, arXiv 1702.03275).

    While it trains a batch is normalised by its own statistics, corrected towards the running ones
    by ``r`` and ``d``, which are constants of the gradient; else by the running ones. Before
    :data:`RENORM_WARMUP_BATCHES` batches ``r`` is 1 and ``d`` 0.
    """

    mean: Tensor
    variance: Tensor
    batches: Tensor

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(count, 1, width))
        self.shift = nn.Parameter(torch.zeros(count, 1, width))
        self.register_buffer("mean", torch.zeros(count, 1, width))
        self.register_buffer("variance", torch.ones(count, 1, width))
        self.register_buffer("batches", torch.zeros(1))

    def forward(self, at: Tensor, *, frozen: bool, chosen: Tensor | None) -> Tensor:
        gain, shift = _own(self.gain, self.shift, frozen, chosen)
        if frozen or not self.training:
            mean, variance = _own(self.mean, self.variance, True, chosen)
            return (at - mean) / (variance + 1e-5).sqrt() * gain + shift
        assert chosen is None, "running statistics are of all networks"
        variance, mean = torch.var_mean(at, 1, unbiased=False, keepdim=True)
        deviation = (variance + 1e-5).sqrt()
        out = (at - mean) / deviation
        with torch.no_grad():
            if self.batches.item() >= RENORM_WARMUP_BATCHES:
                running = (self.variance + 1e-5).sqrt()
                r = (deviation / running).clamp(1 / R_MAX, R_MAX)
                d = ((mean - self.mean) / running).clamp(-D_MAX, D_MAX)
            else:
                r, d = torch.ones_like(mean), torch.zeros_like(mean)
            self.mean.lerp_(mean, RENORM_MOMENTUM)
            self.variance.lerp_(variance, RENORM_MOMENTUM)
            self.batches += 1
        return (out * r + d) * gain + shift


def _own(one: Tensor, other: Tensor, frozen: bool, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
    if frozen:
        one, other = one.detach(), other.detach()
    return (one, other) if chosen is None else (one[chosen], other[chosen])


LOG_STD_RANGE = (-20.0, 2.0)
IMITATION_EDGE = 1e-3
"""Actions that are imitated count as at least so far inside of the interval, on whose edge the
squashed density has no bound."""


class MLPQConfig(Section):
    """Rectified networks: the policy's, the critics', and what some methods need besides."""

    hidden: tuple[Annotated[int, Field(gt=0)], ...] = (256, 256)
    """Of the policy (and of the state's value)."""
    critic_hidden: tuple[Annotated[int, Field(gt=0)], ...] = (256, 256)
    num_critics: int = Field(default=2, gt=0)
    """Independent estimates of an action's value."""
    critic_norm: CriticNorm = "none"
    """Inside the critics: ``layer`` (RLPD) or ``batch_renorm`` (CrossQ)."""
    use_target_critics: bool = True
    """Copies of the critics that follow them slowly."""
    use_state_value: bool = False
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
        many, wide = settings["num_critics"], settings["critic_hidden"]
        self.critics = CriticEnsemble(many, seen + size, wide, settings["critic_norm"])
        self.targets: CriticEnsemble | None = None
        if settings["use_target_critics"]:
            self.targets = CriticEnsemble(many, seen + size, wide, settings["critic_norm"])
            self.targets.load_state_dict(self.critics.state_dict())
            self.targets.requires_grad_(False)
        self.value = (
            _network([seen, *settings["hidden"], 1]) if settings["use_state_value"] else None
        )
        start = math.log(settings["initial_temperature"])
        self.log_temperature = nn.Parameter(torch.full((1,), start))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation ``[..., A]`` before the squashing, float32."""
        mean, spread = self.policy(observations).float().chunk(2, -1)
        return mean, spread.clamp(*LOG_STD_RANGE)

    @torch.no_grad()
    def polyak_update(self, rate: float) -> None:
        """Move the target networks towards the critics by a share ``rate`` (Polyak averaging)."""
        assert self.targets is not None
        own: list[Tensor] = [*self.targets.parameters()]
        torch._foreach_lerp_(own, [*self.critics.parameters()], rate)


class MLPQPolicy(VectorPolicy):
    """See the module. Log-probabilities are those of the squashed action, in [-1, 1]; critics see
    actions in that interval too (:mod:`rlinf.models.action_encoding`)."""

    Config = MLPQConfig
    requires = frozenset({OBSERVATIONS})
    provides = frozenset({SINGLE_PASS_ACTIONS, ACTION_VALUES, IMITATION_LOSS})
    parameter_groups = ("policy", "critic", "value", "temperature")
    Network = QNetworks
    module: QNetworks

    def __init__(self, module: QNetworks, settings: dict[str, Any]) -> None:
        super().__init__(module, settings)
        self.size = int(settings["action"]["size"])

    @classmethod
    def check(cls, config: MLPQConfig, spec: ModelSpec) -> None:
        if spec["action"]["kind"] != "box":
            raise ConfigError(
                "model.name: mlp_q chooses vectors (task.action.kind box), not one of "
                f"{spec['action']['size']} numbers; use model=mlp, or another task"
            )
        check_action_scale(spec["action"], config.action_scale, squashed=True)

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        """As every policy; the entropy is estimated by the action taken, as minus its log-prob."""
        seen, mask = batch["observations"].float(), batch["mask"]
        logprobs = self.action_logprob(seen, batch["actions"], temperature) * mask
        values = None if self.module.value is None else self.module.value(seen)[..., 0] * mask
        return StepOutputs(logprobs, -logprobs if entropy else None, values)

    def action_logprob(
        self,
        observations: Tensor,
        actions: Tensor,
        temperature: float = 1.0,
        eps: float = TANH_EDGE,
    ) -> Tensor:
        """Log-probabilities ``[...]`` of actions ``[..., A]`` in [-1, 1]; those outside count as at
        ``edge``.

        A temperature multiplies standard deviations; 0 (greedy) is judged as 1.
        """
        mean, log_std = self.module(observations)
        raw = inverse_tanh(actions.double(), eps)
        log_std = log_std + math.log(temperature or 1.0)
        return tanh_normal_log_prob(raw, mean.double(), log_std.double()).float()

    def rsample(self, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions ``[B, A]`` in [-1, 1] and their log-probabilities ``[B]``, both with gradients.

        Args:
            noise: standard normal ``[B, A]`` (the reparametrisation trick).
        """
        mean, log_std = self.module(observations)
        raw = mean + noise * log_std.exp()
        return torch.tanh(raw), tanh_normal_log_prob(raw, mean, log_std)

    def draw_noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
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
        logprobs = tanh_normal_log_prob(raw, mean.double(), log_std)
        assert self.action_box is not None, "it acts by vectors"
        return {"action": self.action_box.unnormalize(torch.tanh(raw)), "logprob": logprobs.float()}

    def imitation_loss(self, batch: Batch) -> Tensor:
        """Minus the log-probability of what was done."""
        return -self.action_logprob(batch["observations"], batch["actions"], eps=IMITATION_EDGE)

    def parameter_group(self, parameter: str) -> str:
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
