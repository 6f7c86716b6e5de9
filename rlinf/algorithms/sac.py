"""Soft actor-critic with a learned temperature (arXiv 1812.05905)."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from rlinf.algorithms.losses import (
    QAggregation,
    aggregate_q_values,
    critic_loss,
    sac_policy_loss,
    td_target,
    temperature_loss,
)
from rlinf.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig, require_model_option
from rlinf.errors import ConfigError
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


class SAC(OffPolicyAlgorithm):
    """See the module."""

    Config = SACConfig
    config: SACConfig

    def check(self, model: Any) -> None:
        super().check(model)
        require_model_option(
            model, "use_target_critics", True, f"{type(self).__name__} needs target networks"
        )
        if getattr(model, "critic_norm", "none") == "batch_renorm":
            require_model_option(
                model, "critic_norm", "none", "target networks have no batch statistics"
            )

    def loss(self, policy: Any, batch: Batch) -> Loss:
        module, config = policy.module, self.config
        temperature = module.log_temperature.detach().exp()
        with torch.no_grad():
            actions, logprobs = policy.rsample(batch["next_observations"], batch["next_noise"])
        values, following = self.critic_values(module, batch, actions)
        with torch.no_grad():
            value = aggregate_q_values(following, config.target_q_agg)
            if config.backup_entropy:
                value = value - temperature * logprobs
            target = td_target(batch["rewards"], batch["terminated"], value, config.gamma)
        loss = critic_loss(values, target)
        metrics = {"critic_loss": loss.detach(), "q_value_mean": values.detach().mean()}
        if "noise" in batch:
            policy_loss, policy_metrics = self.policy_loss(policy, batch)
            loss, metrics = loss + policy_loss, {**metrics, **policy_metrics}
        return loss, metrics

    def critic_values(self, module: Any, batch: Batch, following: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``[E, B]`` of the actions taken, with gradients, and ``[E, B]`` or ``[K, B]`` of
        those that follow."""
        values = module.critics(torch.cat([batch["observations"], batch["actions"]], -1))
        with torch.no_grad():
            after = torch.cat([batch["next_observations"], following], -1)
            return values, module.targets(after, critics=batch.get("critics"))

    def policy_loss(self, policy: Any, batch: Batch) -> Loss:
        """What the policy and the temperature learn."""
        module, config = policy.module, self.config
        seen = batch["observations"]
        actions, logprobs = policy.rsample(seen, batch["noise"])
        values = module.critics(torch.cat([seen, actions], -1), frozen=True)
        temperature = module.log_temperature.exp()
        chosen = aggregate_q_values(values, config.policy_q_agg)
        loss = sac_policy_loss(logprobs, chosen, temperature)
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


class CrossQ(SAC):
    """One pass of the critics over both what was done and what follows: batch statistics are of
    both, so the two are as one distribution to them (section 4)."""

    def check(self, model: Any) -> None:
        OffPolicyAlgorithm.check(self, model)
        require_model_option(model, "use_target_critics", False, "CrossQ has no target networks")
        why = "CrossQ's critics normalise by the batch"
        require_model_option(model, "critic_norm", "batch_renorm", why)

    def update_targets(self, module: Any) -> None:
        """There are no target networks, so that ``tau`` has no reader."""

    def critic_values(self, module: Any, batch: Batch, following: Tensor) -> tuple[Tensor, Tensor]:
        done = torch.cat([batch["observations"], batch["actions"]], -1)
        after = torch.cat([batch["next_observations"], following], -1)
        values, later = module.critics(torch.cat([done, after])).chunk(2, -1)
        return values, later.detach()


class RLPDConfig(SACConfig):
    """SAC's, with the paper's values."""

    offline_ratio: float = Field(default=0.5, ge=0, le=1)
    """Share of each batch that is of the prior transitions (symmetric sampling)."""
    utd_ratio: float = Field(default=20.0, gt=0)
    policy_delay: int = Field(default=20, gt=0)
    policy_q_agg: QAggregation = "mean"
    backup_entropy: bool = False
    critic_subsample_size: int = Field(default=2, gt=0)
    """Critics, drawn anew for each step, whose least value the target is of (REDQ, arXiv
    2101.05982)."""


class RLPD(SAC):
    """See the module. Critics have layer normalisation, which keeps values of actions that no data
    are of from growing."""

    Config = RLPDConfig
    config: RLPDConfig

    def __init__(self, config: RLPDConfig) -> None:
        super().__init__(config)
        self.critic_subset_size = config.critic_subsample_size

    def check(self, model: Any) -> None:
        super().check(model)
        require_model_option(
            model, "critic_norm", "layer", "RLPD's critics have layer normalisation"
        )
        if self.config.offline_data is None:
            raise ConfigError(
                "algorithm.offline_data: RLPD learns from offline transitions too; name a file "
                "of them, or choose algorithm=sac"
            )
        if self.config.critic_subsample_size > getattr(
            model, "num_critics", self.config.critic_subsample_size
        ):
            raise ConfigError(
                f"algorithm.critic_subsample_size: {self.config.critic_subsample_size} of "
                f"{model.num_critics} critics; lower it or raise model.num_critics"
            )
