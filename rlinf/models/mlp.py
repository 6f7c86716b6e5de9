"""Small actor-critic networks for vector observations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.fit import ACTS, OBSERVATIONS, VALUES
from rlinf.models.base import Batch, StepOutputs
from rlinf.models.vectors import VectorPolicy


class MLPConfig(Section):
    """Hyperbolic-tangent networks: one for the policy and an equal one for the value."""

    hidden: tuple[Annotated[int, Field(gt=0)], ...] = (64, 64)
    shared: bool = False
    """One network for both, with a linear head each."""
    normalise_observations: bool = False
    """Standardise observations by running statistics, which travel with the weights."""
    initial_log_std: float = 0.0
    """Of a Gaussian policy; it is learned, the same for all states."""
    observation_clip: float = Field(default=10.0, gt=0)
    """Largest magnitude of a (standardised) observation."""


class ActorCritic(nn.Module):
    """From observations ``[..., D]`` to action parameters ``[..., A]`` and values ``[...]``.

    ``seen``, ``mean`` and ``square`` (number, means and variances of the observations so far) are
    in double precision, for they are sums over a whole run.
    """

    seen: Tensor
    mean: Tensor
    square: Tensor

    def __init__(self, settings: dict[str, Any], features: int = 0) -> None:
        """``features``: how many numbers stand behind the observation."""
        super().__init__()
        size, out = settings["observation"], settings["action"]["size"]
        sizes = [size + features, *settings["hidden"]]
        common, own = (sizes, sizes[-1:]) if settings["shared"] else (sizes[:1], sizes)
        self.trunk = _network(common, last_gain=None)
        self.policy = _network([*own, out], last_gain=0.01)
        self.value = _network([*own, 1], last_gain=1.0)
        self.log_std = nn.Parameter(torch.full((out,), float(settings["initial_log_std"])))
        self.log_std.requires_grad_(settings["action"]["kind"] == "box")
        self.clip = float(settings["observation_clip"])
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("square", torch.ones(size, dtype=torch.float64))

    def forward(
        self, observations: Tensor, features: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Action parameters, log standard deviations ``[A]`` and values, float32."""
        deviation = self.square.clamp(min=1e-8).sqrt()
        scaled = ((observations - self.mean) / deviation).clamp(-self.clip, self.clip)
        # Mixed precision shows in the parameters' type.
        inputs = scaled.to(self.log_std.dtype)
        hidden = self.trunk(inputs if features is None else torch.cat([inputs, features], -1))
        # A copy: a sharded module frees its parameters after the forward pass.
        log_std = self.log_std.float().clone()
        return self.policy(hidden).float(), log_std, self.value(hidden)[..., 0].float()


class MLPPolicy(VectorPolicy):
    """A policy whose steps are the actions of an episode."""

    Config = MLPConfig
    needs = frozenset({OBSERVATIONS})
    offers = frozenset({ACTS, VALUES})
    groups = ("policy", "value")
    Network: ClassVar[type[ActorCritic]] = ActorCritic
    module: ActorCritic
    observes = True

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        out, log_std, values = self.see(batch["observations"], batch)
        logprobs, spread = self.judge(out, log_std, batch["actions"], temperature)
        mask = batch["mask"]
        return StepOutputs(logprobs * mask, spread * mask if entropy else None, values * mask)

    def see(self, state: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What the network says of states ``[..., D]``; ``columns`` has what else there is."""
        found: tuple[Tensor, Tensor, Tensor] = self.module(state)
        return found

    def noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        """Gumbel noise for choices, normal noise for vectors: ``[steps, A]``."""
        draw = random.gumbel if self.discrete else random.standard_normal
        return draw(size=(steps, self.settings["action"]["size"])).astype(np.float32)

    def act(
        self, observations: Mapping[str, Tensor], noise: Tensor | None, temperature: float
    ) -> dict[str, Tensor]:
        """Of ``observation`` ``[n, D]``: ``action`` (int64 ``[n]`` or float32 ``[n, A]``),
        ``logprob`` and ``value``, float32 ``[n]``."""
        out, log_std, values = self.see(observations["observation"], observations)
        if noise is None:
            actions = out.argmax(-1) if self.discrete else out
        elif self.discrete:
            # The largest of logits plus Gumbel noise is a sample of their distribution.
            actions = (out / temperature + noise).argmax(-1)
        else:
            actions = out + noise * log_std.exp() * temperature
        logprobs, _ = self.judge(out, log_std, actions, temperature)
        return {"action": actions, "logprob": logprobs, "value": values}

    def judge(
        self, out: Tensor, log_std: Tensor, actions: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies ``[...]`` of actions given the network's output.

        A temperature divides logits or multiplies standard deviations; 0 (greedy) is judged as 1.
        """
        if self.discrete:
            choices = F.log_softmax(out / (temperature or 1.0), dim=-1)
            taken = choices.gather(-1, actions.long()[..., None])[..., 0]
            return taken, -(choices.exp() * choices).sum(-1)
        log_scale = (log_std + math.log(temperature or 1.0)).expand_as(out)
        distance = (actions - out) / log_scale.exp()
        logprobs = -0.5 * distance.square() - log_scale - 0.5 * math.log(2 * math.pi)
        entropy = log_scale + 0.5 * math.log(2 * math.pi * math.e)
        return logprobs.sum(-1), entropy.sum(-1)

    def group(self, parameter: str) -> str:
        """``value`` is the value's own network, or its head."""
        return "value" if parameter.startswith("value.") else "policy"

    @property
    def discrete(self) -> bool:
        """Whether actions are numbered choices rather than vectors."""
        return bool(self.settings["action"]["kind"] == "discrete")

    @torch.no_grad()
    def observe(self, records: Sequence[Record]) -> None:
        """Fold a batch of observations into the running statistics.

        The pairwise update of Chan, Golub and LeVeque (1979): exact, whatever the batches.
        """
        if not self.settings["normalise_observations"]:
            return
        module = self.module
        observations = np.concatenate([record.steps["observations"] for record in records])
        batch = torch.as_tensor(observations, dtype=torch.float64)
        mean = batch.mean(0).to(module.mean.device)
        variance = batch.var(0, unbiased=False).to(module.mean.device)
        old, new = module.seen, len(batch)
        total = old + new
        delta = mean - module.mean
        squares = module.square * old + variance * new + delta.square() * old * new / total
        module.square.copy_(squares / total)
        module.mean.add_(delta * new / total)
        module.seen.copy_(total)


def _network(sizes: Sequence[int], last_gain: float | None) -> nn.Sequential:
    """Linear layers with hyperbolic tangents after all, or after all but an output of that gain."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        output = last_gain is not None and i + 2 == len(sizes)
        linear = nn.Linear(a, b)
        nn.init.orthogonal_(linear.weight, last_gain if last_gain and output else 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear] if output else [linear, nn.Tanh()]
    return nn.Sequential(*layers)
