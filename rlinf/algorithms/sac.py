"""Soft actor-critic with a learned temperature (arXiv 1812.05905)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlinf.algorithms.action_values import (
    aggregated,
    bootstrapped,
    critic_loss,
    soft_policy_loss,
    temperature_loss,
)
from rlinf.algorithms.off_policy import OffPolicy, OffPolicyConfig, required
from rlinf.models.base import Batch
from rlinf.trainers.base import Loss


class SACConfig(OffPolicyConfig):
    """Settings of SAC."""

    target_entropy: float | None = None
    """Entropy, nats, that the temperature is learned for, of actions scaled to [-1, 1]; null: minus
    the number of their components."""
    learn_temperature: bool = True
    """Else it stays ``model.initial_temperature``."""
    backup_entropy: bool = True
    """Whether the entropy of later actions is part of an action's value."""


class SAC(OffPolicy):
    """See the module."""

    Config = SACConfig
    config: SACConfig

    def check(self, model: Any) -> None:
        super().check(model)
        required(model, "targets", True, f"{type(self).__name__} needs target networks")
        if getattr(model, "critic_norm", "none") == "batch_renorm":
            required(model, "critic_norm", "none", "target networks have no batch statistics")

    def loss(self, policy: Any, batch: Batch) -> Loss:
        module, config = policy.module, self.config
        temperature = module.log_temperature.detach().exp()
        with torch.no_grad():
            actions, logprobs = policy.sample(batch["next_observations"], batch["next_noise"])
        values, following = self.values(module, batch, actions)
        with torch.no_grad():
            value = aggregated(following, config.target_aggregate)
            if config.backup_entropy:
                value = value - temperature * logprobs
            target = bootstrapped(batch["rewards"], batch["terminated"], value, config.gamma)
        loss = critic_loss(values, target)
        metrics = {"critic_loss": loss.detach(), "action_value": values.detach().mean()}
        if "noise" in batch:
            more, said = self.policy_loss(policy, batch)
            loss, metrics = loss + more, {**metrics, **said}
        return loss, metrics

    def values(self, module: Any, batch: Batch, following: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``[E, B]`` of the actions taken, with gradients, and ``[E, B]`` or ``[K, B]`` of
        those that follow."""
        values = module.critics(torch.cat([batch["observations"], batch["actions"]], -1))
        with torch.no_grad():
            after = torch.cat([batch["next_observations"], following], -1)
            return values, module.targets(after, chosen=batch.get("critics"))

    def policy_loss(self, policy: Any, batch: Batch) -> Loss:
        """What the policy and the temperature learn."""
        module, config = policy.module, self.config
        seen = batch["observations"]
        actions, logprobs = policy.sample(seen, batch["noise"])
        values = module.critics(torch.cat([seen, actions], -1), frozen=True)
        temperature = module.log_temperature.exp()
        chosen = aggregated(values, config.policy_aggregate)
        loss = soft_policy_loss(logprobs, chosen, temperature)
        metrics = {
            "policy_loss": loss.detach(),
            "entropy": -logprobs.detach().mean(),
            "temperature": temperature.detach().sum(),
        }
        if config.learn_temperature:
            wanted = config.target_entropy
            wanted = -float(policy.size) if wanted is None else wanted
            loss = loss + temperature_loss(module.log_temperature, logprobs, wanted)
        return loss, metrics
