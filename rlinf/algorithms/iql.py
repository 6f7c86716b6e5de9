"""Implicit Q-learning (arXiv 2110.06169), which never evaluates actions outside the data."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from rlinf.algorithms.losses import (
    advantage_weights,
    aggregate_q_values,
    critic_loss,
    expectile_loss,
    td_target,
)
from rlinf.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig, require_model_option
from rlinf.errors import ConfigError
from rlinf.models.base import Batch
from rlinf.registry import RunComponents
from rlinf.trainers.base import Loss


class IQLConfig(OffPolicyConfig):
    """Settings of IQL."""

    offline_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of each batch that comes from ``offline_data``, if transitions are collected too."""
    expectile: float = Field(default=0.7, gt=0, lt=1)
    """Expectile of the action values: 0.5 is their mean, and 1 approaches their maximum."""
    beta: float = Field(default=3.0, ge=0)
    """Inverse temperature of the advantage weights; 0 imitates all actions equally."""
    max_advantage_weight: float = Field(default=100.0, gt=0)
    """Largest advantage weight of an action."""
    action_bound_eps: float = Field(default=1e-3, gt=0, lt=1)
    """Minimum distance of actions from their bounds, in units of half their range. The density of a
    tanh-squashed Gaussian grows without limit there."""


class IQL(OffPolicyAlgorithm):
    """Implicit Q-learning."""

    Config = IQLConfig
    config: IQLConfig

    @property
    def critic_groups(self) -> tuple[str, ...]:
        return ("critic", "value")

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        super().check(options, run)
        model = run.options["model"]
        require_model_option(model, "use_target_critics", True, "IQL needs target networks")
        require_model_option(model, "use_state_value", True, "IQL learns the value of states")
        if getattr(model, "critic_norm", "none") == "batch_renorm":
            require_model_option(
                model, "critic_norm", "none", "target networks have no batch statistics"
            )
        if options.offline_data is None:
            raise ConfigError(
                "algorithm.offline_data: IQL learns from an existing dataset; name a file of "
                "transitions"
            )

    def loss(self, policy: Any, batch: Batch) -> Loss:
        module, config = policy.module, self.config
        observations, actions = batch["observations"], batch["actions"]
        state_actions = torch.cat([observations, actions], -1)
        with torch.no_grad():
            q_values = aggregate_q_values(module.targets(state_actions), config.target_q_agg)
            next_values = module.value(batch["next_observations"])[..., 0]
            target = td_target(batch["rewards"], batch["terminated"], next_values, config.gamma)
        value = module.value(observations)[..., 0]
        value_loss = expectile_loss(q_values - value, config.expectile)
        predictions = module.critics(state_actions)
        q_loss = critic_loss(predictions, target)
        loss = q_loss + value_loss
        metrics = {
            "critic_loss": q_loss.detach(),
            "value_loss": value_loss.detach(),
            "q_value_mean": predictions.detach().mean(),
        }
        if "noise" in batch:  # the policy learns in this step
            advantages = q_values - value
            weights = advantage_weights(advantages, config.beta, config.max_advantage_weight)
            logprobs = policy.action_logprob(observations, actions, eps=config.action_bound_eps)
            imitation = -(weights * logprobs).mean()
            loss = loss + imitation
            metrics |= {"policy_loss": imitation.detach(), "weight": weights.mean()}
        return loss, metrics
