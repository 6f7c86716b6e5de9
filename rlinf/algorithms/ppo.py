"""Proximal policy optimisation with generalised advantages (arXiv 1707.06347, 1506.02438).

They are of steps, or, where the policy values each action of a chunk (``model.value_level``), of
those: each is learned from by what came after it, its own chunk included.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from rlinf.algorithms.advantages import generalised
from rlinf.algorithms.levels import mask_of
from rlinf.algorithms.losses import clipped_value_loss
from rlinf.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig
from rlinf.data.batch import StepBatch
from rlinf.errors import ConfigError
from rlinf.fit import VALUES
from rlinf.models.base import StepOutputs
from rlinf.trainers.base import Loss


class PPOConfig(PolicyGradientConfig):
    """Settings of PPO."""

    gamma: float = Field(default=0.99, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    value_coefficient: float = Field(default=0.5, ge=0)
    value_clip: float | None = Field(default=None, gt=0)
    """Largest change of a value per update that the value loss rewards; null: unlimited."""
    value_huber: float | None = Field(default=None, gt=0)
    """Error from which on the value loss grows linearly (Huber); null: it is quadratic."""
    critic_warmup: int = Field(default=0, ge=0)
    """First iterations of a run in which the value alone learns: advantages of a critic that knows
    nothing yet are noise."""
    whiten_advantages: bool = True


class PPO(PolicyGradient):
    """See the module."""

    Config = PPOConfig
    config: PPOConfig
    needs = frozenset({VALUES})

    def learns(self, iteration: int) -> tuple[str, ...] | None:
        return ("value",) if iteration < self.config.critic_warmup else None

    def check(self, model: Any) -> None:
        of_actions = getattr(model, "value_level", "chunk") == "action"
        if of_actions and self.config.logprob_level == "chunk":
            raise ConfigError(
                "model.value_level: action gives each action of a chunk an advantage of its own, "
                "and algorithm.logprob_level=chunk has one ratio for all of them; set that to "
                "action or token, or model.value_level to chunk"
            )

    def advantages(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        values = batch.require("values")
        mask = mask_of(batch, values)  # refuses what would leave no rewards of actions
        return generalised(
            batch.require("action_rewards") if values.ndim > 2 else batch.rewards,
            values,
            batch.terminated,
            batch.truncated,
            batch.bootstrap,
            mask,
            self.config.gamma,
            self.config.gae_lambda,
        )

    def add_terms(
        self, loss: Tensor, outputs: StepOutputs, batch: StepBatch, weights: Tensor
    ) -> Loss:
        """Add ``value_coefficient`` times the value loss."""
        loss, metrics = super().add_terms(loss, outputs, batch, weights)
        assert outputs.values is not None
        error = clipped_value_loss(
            outputs.values,
            batch.require("values"),
            batch.require("returns"),
            self.config.value_clip,
            self.config.value_huber,
        )
        value_loss = (weights * error).sum()
        metrics["value_loss"] = value_loss.detach()
        return loss + self.config.value_coefficient * value_loss, metrics
