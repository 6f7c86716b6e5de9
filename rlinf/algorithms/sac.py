"""Soft actor-critic with a learned temperature (SAC, arXiv 1812.05905), and its variants CrossQ
(arXiv 1902.05605) and RLPD (arXiv 2302.02948)."""

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
from rlinf.registry import RunComponents
from rlinf.trainers.base import Loss


class SACConfig(OffPolicyConfig):
    """Settings of SAC."""

    target_entropy: float | None = None
    """Target entropy, nats, of the learned temperature, for actions scaled to [-1, 1]; null: minus
    the number of action components."""
    learn_temperature: bool = True
    """Learn the temperature. Otherwise it stays ``model.initial_temperature``."""
    backup_entropy: bool = True
    """Include the entropy of later actions in an action's value."""


class SAC(OffPolicyAlgorithm):
    """Soft actor-critic."""

    Config = SACConfig
    config: SACConfig

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        super().check(options, run)
        cls.check_critics(run.options["model"])

    @classmethod
    def check_critics(cls, model: Any) -> None:
        """Check that the critics of the policy, whose options are ``model``, suit the targets."""
        require_model_option(
            model, "use_target_critics", True, f"{cls.__name__} needs target networks"
        )
        if getattr(model, "critic_norm", "none") == "batch_renorm":
            require_model_option(
                model, "critic_norm", "none", "target networks have no batch statistics"
            )

    def loss(self, policy: Any, batch: Batch) -> Loss:
        module, config = policy.module, self.config
        temperature = module.log_temperature.detach().exp()
        with torch.no_grad():
            next_actions, logprobs = policy.rsample(batch["next_observations"], batch["next_noise"])
        values, next_values = self.critic_values(module, batch, next_actions)
        with torch.no_grad():
            next_value = aggregate_q_values(next_values, config.target_q_agg)
            if config.backup_entropy:
                next_value = next_value - temperature * logprobs
            target = td_target(batch["rewards"], batch["terminated"], next_value, config.gamma)
        loss = critic_loss(values, target)
        metrics = {"critic_loss": loss.detach(), "q_value_mean": values.detach().mean()}
        if "noise" in batch:  # the policy learns in this step
            policy_loss, policy_metrics = self.policy_loss(policy, batch)
            loss, metrics = loss + policy_loss, {**metrics, **policy_metrics}
        return loss, metrics

    def critic_values(
        self, module: Any, batch: Batch, next_actions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the values of the batch's actions, ``[E, B]`` for ``E`` critics, and of the next
        actions, without gradients, ``[K, B]`` for the ``K`` critics that compute the target."""
        values = module.critics(torch.cat([batch["observations"], batch["actions"]], -1))
        with torch.no_grad():
            next_inputs = torch.cat([batch["next_observations"], next_actions], -1)
            return values, module.targets(next_inputs, critics=batch.get("critics"))

    def policy_loss(self, policy: Any, batch: Batch) -> Loss:
        """Return the loss of the policy and of the temperature."""
        module, config = policy.module, self.config
        observations = batch["observations"]
        actions, logprobs = policy.rsample(observations, batch["noise"])
        values = module.critics(torch.cat([observations, actions], -1), frozen=True)
        temperature = module.log_temperature.exp()
        q_values = aggregate_q_values(values, config.policy_q_agg)
        loss = sac_policy_loss(logprobs, q_values, temperature)
        metrics = {
            "policy_loss": loss.detach(),
            "entropy": -logprobs.detach().mean(),
            "temperature": temperature.detach().sum(),
        }
        if config.learn_temperature:
            target_entropy = config.target_entropy
            if target_entropy is None:
                target_entropy = -float(policy.action_size)
            loss = loss + temperature_loss(module.log_temperature, logprobs, target_entropy)
        return loss, metrics


class CrossQ(SAC):
    """SAC without target networks, with batch renormalisation (arXiv 1902.05605).

    One forward pass of the critics covers current and next actions, so that the batch statistics
    include both (section 4).
    """

    @classmethod
    def check_critics(cls, model: Any) -> None:
        require_model_option(model, "use_target_critics", False, "CrossQ has no target networks")
        why = "CrossQ's critics normalise by the batch"
        require_model_option(model, "critic_norm", "batch_renorm", why)

    def update_targets(self, module: Any) -> None:
        """Do nothing, because there are no target networks. ``tau`` is therefore never read."""

    def critic_values(
        self, module: Any, batch: Batch, next_actions: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs = torch.cat([batch["observations"], batch["actions"]], -1)
        next_inputs = torch.cat([batch["next_observations"], next_actions], -1)
        values, next_values = module.critics(torch.cat([inputs, next_inputs])).chunk(2, -1)
        return values, next_values.detach()


class RLPDConfig(SACConfig):
    """SAC's settings, with the values of the RLPD paper."""

    offline_ratio: float = Field(default=0.5, ge=0, le=1)
    """Share of each batch that comes from ``offline_data`` (symmetric sampling)."""
    utd_ratio: float = Field(default=20.0, gt=0)
    policy_delay: int = Field(default=20, gt=0)
    policy_q_agg: QAggregation = "mean"
    backup_entropy: bool = False
    critic_subsample_size: int = Field(default=2, gt=0)
    """Number of critics, drawn at random for each step, whose minimum is the target (REDQ, arXiv
    2101.05982)."""


class RLPD(SAC):
    """Reinforcement learning with prior data. Its critics have layer normalisation, which keeps the
    values of actions outside the data from growing."""

    Config = RLPDConfig
    config: RLPDConfig

    def __init__(self, config: RLPDConfig) -> None:
        super().__init__(config)
        self.critic_subsample_size = config.critic_subsample_size

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        super().check(options, run)
        model = run.options["model"]
        require_model_option(
            model, "critic_norm", "layer", "RLPD's critics have layer normalisation"
        )
        if options.offline_data is None:
            raise ConfigError(
                "algorithm.offline_data: RLPD learns from offline transitions too; name a file "
                "of them, or choose algorithm=sac"
            )
        if options.critic_subsample_size > getattr(
            model, "num_critics", options.critic_subsample_size
        ):
            raise ConfigError(
                f"algorithm.critic_subsample_size: {options.critic_subsample_size} of "
                f"{model.num_critics} critics; lower it or raise model.num_critics"
            )
