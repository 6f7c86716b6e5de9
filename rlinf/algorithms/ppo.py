"""Proximal policy optimisation with generalised advantages (arXiv 1707.06347, 1506.02438).

They are of steps, or, where the policy values each action of a chunk (``model.value_level``), of
those: each is learned from by what came after it, its own chunk included.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from torch import Tensor

from rlinf.algorithms.advantages import compute_gae
from rlinf.algorithms.granularity import mask_like
from rlinf.algorithms.importance_sampling import RolloutISMode
from rlinf.algorithms.losses import clipped_value_loss
from rlinf.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig
from rlinf.capabilities import STALE_ROLLOUTS, VALUE_ESTIMATES
from rlinf.data.batch import StepBatch
from rlinf.errors import ConfigError
from rlinf.models.base import StepOutputs
from rlinf.trainers.base import Loss


class PPOConfig(PolicyGradientConfig):
    """Settings of PPO."""

    gamma: float = Field(default=0.99, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    value_loss_coef: float = Field(default=0.5, ge=0)
    cliprange_value: float | None = Field(default=None, gt=0)
    """Largest change of a value per update that the value loss rewards; null: unlimited."""
    huber_delta: float | None = Field(default=None, gt=0)
    """Error from which on the value loss grows linearly (Huber); null: it is quadratic."""
    critic_warmup: int = Field(default=0, ge=0)
    """First iterations of a run in which the value alone learns: advantages of a critic that knows
    nothing yet are noise."""
    whiten_advantages: bool = True


class PPO(PolicyGradient):
    """See the module."""

    Config = PPOConfig
    config: PPOConfig
    requires = frozenset({VALUE_ESTIMATES})

    def trainable_groups(self, iteration: int) -> tuple[str, ...] | None:
        return ("value",) if iteration < self.config.critic_warmup else None

    def check(self, model: Any) -> None:
        of_actions = getattr(model, "value_level", "chunk") == "action"
        if of_actions and self.config.logprob_level == "chunk":
            raise ConfigError(
                "model.value_level: action gives each action of a chunk an advantage of its own, "
                "and algorithm.logprob_level=chunk has one ratio for all of them; set that to "
                "action or token, or model.value_level to chunk"
            )

    def compute_advantages(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        values = batch.require("values")
        mask = mask_like(batch, values)  # refuses what would leave no rewards of actions
        return compute_gae(
            batch.require("action_rewards") if values.ndim > 2 else batch.rewards,
            values,
            batch.terminated,
            batch.truncated,
            batch.bootstrap,
            mask,
            self.config.gamma,
            self.config.gae_lambda,
        )

    def add_loss_terms(
        self, loss: Tensor, outputs: StepOutputs, batch: StepBatch, weights: Tensor
    ) -> Loss:
        """Add ``value_loss_coef`` times the value loss."""
        loss, metrics = super().add_loss_terms(loss, outputs, batch, weights)
        assert outputs.values is not None
        error = clipped_value_loss(
            outputs.values,
            batch.require("values"),
            batch.require("returns"),
            self.config.cliprange_value,
            self.config.huber_delta,
        )
        value_loss = (weights * error).sum()
        metrics["value_loss"] = value_loss.detach()
        return loss + self.config.value_loss_coef * value_loss, metrics


class AsyncPPOConfig(PPOConfig):
    """PPO whose steps weigh ``pi_prox / pi_behav``; far from 1 they are left out."""

    rollout_is_threshold: float | None = Field(default=5.0, gt=0)
    rollout_is_mode: RolloutISMode = "mask"

    @model_validator(mode="after")
    def _decoupled(self) -> AsyncPPOConfig:
        if self.rollout_is_threshold is None:
            raise ValueError(
                "rollout_is_threshold: without it steps of older policies weigh as if the newest "
                "had chosen them; give a number above 1, or set algorithm=ppo"
            )
        return self


class AsyncPPO(PPO):
    """See the module."""

    Config = AsyncPPOConfig
    config: AsyncPPOConfig
    requires = frozenset({VALUE_ESTIMATES, STALE_ROLLOUTS})
