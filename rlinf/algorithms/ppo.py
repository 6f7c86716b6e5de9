"""Proximal policy optimisation with GAE (arXiv 1707.06347, 1506.02438), synchronous and
asynchronous.

Advantages are per step. If the policy has a value for each action of a chunk
(``model.value_level``), they are per action: an action is credited with its own reward and all
later ones, also within its chunk.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from torch import Tensor

from rlinf.algorithms.advantages import compute_gae
from rlinf.algorithms.importance_sampling import RolloutISMode, mask_like
from rlinf.algorithms.losses import clipped_value_loss
from rlinf.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig
from rlinf.data.batch import StepBatch
from rlinf.errors import ConfigError
from rlinf.models.base import StepOutputs
from rlinf.registry import STALE_ROLLOUTS, VALUE_ESTIMATES, RunComponents
from rlinf.trainers.base import Loss


class PPOConfig(PolicyGradientConfig):
    """Settings of PPO."""

    gamma: float = Field(default=0.99, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    value_loss_coef: float = Field(default=0.5, ge=0)
    cliprange_value: float | None = Field(default=None, gt=0)
    """Clip range of PPO's value clipping: a value farther than this from its value before the
    update does not lower the loss; null: no clipping."""
    huber_delta: float | None = Field(default=None, gt=0)
    """Error above which the value loss grows linearly (Huber); null: it is quadratic."""
    critic_warmup: int = Field(default=0, ge=0)
    """Number of first iterations in which only the value function learns, because the advantages of
    an untrained critic are noise."""
    whiten_advantages: bool = True


class PPO(PolicyGradient):
    """Proximal policy optimisation."""

    Config = PPOConfig
    config: PPOConfig
    requires = frozenset({VALUE_ESTIMATES})

    def trainable_groups(self, iteration: int) -> tuple[str, ...] | None:
        return ("value",) if iteration < self.config.critic_warmup else None

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        super().check(options, run)
        has_action_values = getattr(run.options["model"], "value_level", "chunk") == "action"
        if has_action_values and options.logprob_level == "chunk":
            raise ConfigError(
                "model.value_level: action gives each action of a chunk an advantage of its own, "
                "and algorithm.logprob_level=chunk has one ratio for all of them; set "
                "logprob_level to action or token, or model.value_level to chunk"
            )

    def compute_advantages(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        values = batch.require("values")
        mask = mask_like(batch, values)  # raises if several actions share one ratio
        return compute_gae(
            batch.require("action_rewards") if values.ndim > 2 else batch.rewards,
            values,
            batch.terminated,
            batch.truncated,
            batch.bootstrap_values,
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
    """Settings of asynchronous PPO. The loss of a step is weighted by the ratio ``pi_prox /
    pi_behav`` (see :class:`AsyncPPO`), and masked if this ratio is far from 1."""

    rollout_is_threshold: float | None = Field(default=5.0, gt=0)
    rollout_is_mode: RolloutISMode = "mask"

    @model_validator(mode="after")
    def _require_importance_weights(self) -> AsyncPPOConfig:
        if self.rollout_is_threshold is None:
            raise ValueError(
                "rollout_is_threshold: without importance weights, steps of older policies count "
                "like on-policy steps; give a number above 1, or set algorithm=ppo"
            )
        return self


class AsyncPPO(PPO):
    """PPO on stale rollouts (AReaL, arXiv 2505.24298, section 5.2).

    Three policies take part. ``behav`` collected a step, up to ``rollout.staleness`` versions ago.
    ``prox`` is the policy before the update; clipping keeps the policy in training near it. With
    ``u = pi / pi_prox`` the objective of a step is (eq. 5 there)::

        pi_prox / pi_behav * min(u A, clip(u, 1 - eps, 1 + eps) A)

    The flow bounds the staleness: a rollout begins with weights that are recent enough, and an
    update rejects staler steps (:mod:`rlinf.algorithms.policy_gradient`).
    """

    Config = AsyncPPOConfig
    config: AsyncPPOConfig
    requires = frozenset({VALUE_ESTIMATES, STALE_ROLLOUTS})
