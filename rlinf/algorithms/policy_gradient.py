"""What policy-gradient algorithms share: the ratio to an old policy, clipped; entropy; KL."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlinf.algorithms.advantages import whiten
from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.behaviour import (
    Outside,
    WeightLevel,
    behaviour_ratio,
    behaviour_weights,
    engine_gap,
    interpolated,
)
from rlinf.algorithms.learner import Learner
from rlinf.algorithms.levels import Level, by_unit, mask_of
from rlinf.algorithms.losses import (
    KLEstimator,
    clipped_surrogate,
    kl_estimate,
    kl_loss,
    sequence_log_ratio,
)
from rlinf.algorithms.shares import Aggregation
from rlinf.algorithms.update import by_minibatches
from rlinf.config import Section
from rlinf.data.batch import Sample, StepBatch
from rlinf.errors import InputError
from rlinf.models.base import Batch, Policy, StepOutputs
from rlinf.trainers.base import Loss


class PolicyGradientConfig(Section):
    """Settings of all of them."""

    epochs: int = Field(default=1, gt=0)
    """Passes over one iteration's batch."""
    minibatches: int = Field(default=1, gt=0)
    """Optimizer steps per pass."""
    old_logprobs: Literal["recompute", "interpolate", "rollout"] = "recompute"
    """Denominator of the ratio: of the policy before the update under the training stack, or taken
    from the engine. The inference stage computes it where the update has several steps; before the
    first one the update's own forward pass gives the same. ``interpolate`` spares that stage: what
    the policy before the update says is estimated from what the engine's and the one in training
    say (:func:`rlinf.algorithms.behaviour.anchors`)."""
    behaviour_weight_cap: float | None = Field(default=None, gt=0)
    """Weight each step by how likely the policy before the update is to do what the policy that
    collected it did, at most this; null: all weigh the same. For stale or inexact rollouts:
    truncated importance sampling (:mod:`rlinf.algorithms.behaviour`). The policy before the update
    is as the training stack computes it, whether the inference stage does or, where the update has
    a single step, its own forward pass."""
    behaviour_weight_level: WeightLevel = "token"
    """What has one such weight: each token, the whole response by the product of its ratios
    (``sequence``), or by their geometric mean (``geometric``)."""
    behaviour_weight_outside: Outside = "truncate"
    """What of a ratio above the cap ``C``: it weighs ``C`` (``truncate``), or nothing, as below
    ``1 / C`` (``mask``). What is left out keeps its place in the mean of ``aggregation``."""
    logprob_gap_limit: float | None = Field(default=None, gt=0)
    """Largest mean difference, nats, between the log-probabilities that the engine gave to the
    steps of an iteration and those of the trainer before its first step, where both have the same
    weights; above it the run stops. null: 0.02, or 0.2 where either computes in half precision."""
    logprob_level: Level = "chunk"
    """What has one ratio where a step is several choices, and is one of what ``aggregation`` calls
    tokens: each choice (``token``), each action of a chunk (``action``), or the whole step."""
    aggregation: Aggregation = "token_mean"
    aggregation_length: int | None = Field(default=None, gt=0)
    """A fixed length that ``seq_mean_token_sum`` divides the sum of each sequence by, the horizon
    say; null: none."""
    whiten_advantages: bool = False
    """Give the advantages of all steps of an iteration that count a mean of 0 and a deviation of 1,
    in whatever way they were made."""
    ratio_level: Literal["token", "sequence"] = "token"
    """What has one clipped ratio: each token, or the whole response, by the geometric mean of its
    tokens' (GSPO, arXiv 2507.18071)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped to ``[1 - clip_low, 1 + clip_high]``."""
    clip_dual: float | None = Field(default=None, gt=1)
    """Most that the loss of a negative advantage is, in its magnitude, however large the ratio
    (dual-clip PPO, arXiv 1912.09729); null: unlimited."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the reference policy (the weights after warm start) in the
    loss."""
    kl_estimator: KLEstimator = "k3"
    """How that is estimated (:func:`rlinf.algorithms.losses.kl_loss`)."""
    kl_reward: float = Field(default=0.0, ge=0)
    """The same, taken from the reward of each step instead: of the policy before the update, and
    without a gradient."""
    kl_reward_estimator: KLEstimator = "k1"
    """How that is estimated (:func:`rlinf.algorithms.losses.kl_estimate`)."""

    @model_validator(mode="after")
    def _length_is_of_sums(self) -> PolicyGradientConfig:
        if self.aggregation_length is not None and self.aggregation != "seq_mean_token_sum":
            raise ValueError(
                "aggregation_length divides sums of sequences; it needs aggregation: "
                "seq_mean_token_sum"
            )
        return self

    @model_validator(mode="after")
    def _reward_is_of_the_policy(self) -> PolicyGradientConfig:
        if self.kl_reward and self.old_logprobs != "recompute":
            raise ValueError(
                "kl_reward is of the policy before the update, whose log-probabilities the "
                "inference stage computes; it needs old_logprobs: recompute"
            )
        return self

    @model_validator(mode="after")
    def _behaviour_is_known(self) -> PolicyGradientConfig:
        if self.behaviour_weight_cap is None:
            for key in ("behaviour_weight_level", "behaviour_weight_outside"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} is of weights; set behaviour_weight_cap as well")
            return self
        if self.behaviour_weight_outside == "mask" and self.behaviour_weight_cap <= 1:
            raise ValueError(
                "behaviour_weight_cap must be above 1 to leave out what is not within [1 / cap, "
                "cap]"
            )
        if self.old_logprobs == "rollout":
            raise ValueError(
                "behaviour_weight_cap compares recomputed log-probabilities with those of the "
                "rollout; it needs old_logprobs: recompute, or interpolate"
            )
        return self


class PolicyGradient(Algorithm):
    """Pure functions of step batches, for the loop of :mod:`rlinf.algorithms.update`."""

    Config: ClassVar[type[PolicyGradientConfig]] = PolicyGradientConfig
    config: Any
    by_group: ClassVar[bool] = False
    """Whether advantages of a group do not depend on the rest of the batch."""

    @property
    def needs_reference(self) -> bool:
        return bool(self.config.kl_coefficient > 0 or self.config.kl_reward > 0)

    @property
    def needs_old_logprobs(self) -> bool:
        # What is taken from the reward is of them, before there is a forward pass of the update.
        needed = not self.one_step or self.config.kl_reward > 0
        return bool(self.config.old_logprobs == "recompute" and needed)

    @property
    def one_step(self) -> bool:
        """Whether an iteration has a single optimizer step."""
        return bool(self.config.epochs == self.config.minibatches == 1)

    @property
    def whole_rows(self) -> bool:
        """Whether the loss of a step depends on the others of its sample."""
        config = self.config
        weighed = config.behaviour_weight_cap and config.behaviour_weight_level != "token"
        return bool(weighed or config.ratio_level == "sequence")

    @property
    def minibatches(self) -> int:
        return int(self.config.minibatches)

    @property
    def streams(self) -> bool:
        return self.by_group and self.one_step and not self.config.whiten_advantages

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the policy's entropy in every step; else it is a metric only."""
        return bool(self.config.entropy_bonus > 0)

    def update(self, learner: Learner, parts: Iterable[list[Sample]]) -> None:
        by_minibatches(self, learner, parts)

    def learns(self, iteration: int) -> tuple[str, ...] | None:
        """Groups of the policy's parameters that an iteration (from 0) changes; None: all."""
        return None

    @abstractmethod
    def advantages(self, batch: StepBatch) -> tuple[Tensor, Tensor | None]:
        """Advantages ``[N, T]`` and, for a value loss, returns ``[N, T]``, over the whole batch; or
        both of each action of a chunk, ``[N, T, C]``.

        What ``whiten_advantages`` asks for is done with them by :meth:`judged`.
        """

    def judged(self, batch: StepBatch) -> StepBatch:
        """A whole batch, with advantages as they stand in the loss."""
        advantages, returns = self.advantages(batch)
        if self.config.whiten_advantages:
            advantages = whiten(advantages, mask_of(batch, advantages))
        return replace(batch, advantages=advantages, returns=returns)

    def idle(self, batch: StepBatch) -> Tensor:
        """``[N]`` true for samples whose loss has no gradient, whatever the policy says of them:
        they weigh in the mean and are not computed. By default none."""
        return torch.zeros(len(batch), dtype=torch.bool)

    def loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        """Return the policy's loss: the sum over steps of ``weights`` times the loss of a step, and
        metrics that are summed the same way.

        The default is the clipped surrogate. A subclass that overrides this keeps all other terms
        of the configuration, because :meth:`total_loss` adds them around it: the importance weights
        of ``behaviour_weight_cap`` are part of ``weights``; the entropy bonus, the divergence from
        the reference and a critic's loss are added to the result (:meth:`add_terms`).

        ``batch`` holds the rows of one micro-batch, ``batch.advantages`` included. Sums over
        micro-batches (and ranks) are the minibatch's however it was cut. Where a step is several
        choices, its units stand in place of the step (:mod:`rlinf.algorithms.levels`).

        Args:
            outputs: of the policy in training, ``[B, U]`` each.
            weights: ``[B, U]``, of the aggregation times the importance weight. The former alone
                is ``batch.shares``.
        """
        config = self.config
        ours, old = outputs.logprobs, batch.old_logprobs
        if config.ratio_level == "sequence":
            ours = sequence_log_ratio(ours, old, batch.mask)
            old = torch.zeros_like(ours)
        surrogate, clipped = clipped_surrogate(
            ours,
            old,
            batch.require("advantages"),
            config.clip_low,
            config.clip_high,
            config.clip_dual,
        )
        return (weights * surrogate).sum(), {
            "clip_share": (batch.require("shares") * clipped).sum()
        }

    def add_terms(
        self, loss: Tensor, outputs: StepOutputs, batch: StepBatch, weights: Tensor
    ) -> Loss:
        """Return ``loss`` with what the configuration adds to it, and metrics: minus
        ``entropy_bonus`` times the entropy, plus ``kl_coefficient`` times the divergence from the
        reference.

        A subclass adds terms of its own to the result of ``super()``.

        Args:
            loss: the result of :meth:`loss`, a scalar.
            weights: ``[B, U]`` of the aggregation, without importance weights.

        Raises:
            InputError: there is an entropy bonus, and the policy gives no entropy.
        """
        config, metrics = self.config, dict[str, Tensor]()
        if outputs.entropy is None and config.entropy_bonus:
            raise InputError(
                "algorithm.entropy_bonus: the policy gives no entropy of its steps; give one in "
                "StepOutputs, or set the bonus to 0"
            )
        if outputs.entropy is not None:
            entropy = (weights * outputs.entropy).sum()
            metrics["entropy"] = entropy.detach()
            loss = loss - config.entropy_bonus * entropy
        if config.kl_coefficient:
            reference = batch.require("reference_logprobs")
            each = kl_loss(outputs.logprobs, reference, config.kl_estimator)
            divergence = (weights * each).sum()
            metrics["kl_reference"] = divergence.detach()
            loss = loss + config.kl_coefficient * divergence
        return loss, metrics

    def total_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        """Return :meth:`loss` with everything that the configuration puts around it.

        Args:
            outputs, batch: as :meth:`loss` takes them.
            weights: ``[B, U]`` of the aggregation.
        """
        batch = replace(batch, shares=weights)
        importance, metrics = self._importance(batch, weights)
        weighted = weights if importance is None else weights * importance
        loss, own = self.loss(outputs, batch, weighted)
        with torch.no_grad():
            change = kl_estimate(batch.old_logprobs, outputs.logprobs)
            metrics |= {"policy_loss": loss.detach(), "kl_old": (weights * change).sum()}
        loss, added = self.add_terms(loss, outputs, batch, weights)
        return loss, {**metrics, **added, **own}

    def _importance(
        self, batch: StepBatch, weights: Tensor
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the importance weights ``[B, U]`` of ``behaviour_weight_cap``, and metrics; None
        where the configuration asks for none."""
        config = self.config
        if config.behaviour_weight_cap is None:
            return None, {}
        ratio = behaviour_ratio(
            batch.old_logprobs,
            batch.require("rollout_logprobs"),
            batch.mask,
            config.behaviour_weight_level,
        )
        importance, capped = behaviour_weights(
            ratio, config.behaviour_weight_cap, config.behaviour_weight_outside
        )
        return importance, {
            "behaviour_weight": (weights * importance).sum(),
            "behaviour_capped_share": (weights * capped).sum(),
        }

    def objective(
        self,
        policy: Policy,
        inputs: Batch,
        batch: StepBatch,
        weights: Tensor,
        *,
        temperature: float,
        entropy: bool,
    ) -> Loss:
        """Return the :meth:`total_loss` of one micro-batch.

        A subclass overrides this where a loss needs more of the policy than its step outputs. The
        terms of the configuration stand inside: an override that does not call ``super()`` drops
        them, and a run that sets one of their keys is refused
        (:mod:`rlinf.algorithms.unread_keys`).

        Args:
            inputs: of :meth:`Policy.collate`, on the policy's device.
            entropy: whether it is wanted.
        """
        outputs = policy.evaluate(inputs, temperature, entropy=entropy)
        outputs, batch, weights = by_unit(outputs, batch, weights, self.config.logprob_level)
        if self.config.old_logprobs == "recompute" and self.one_step:
            batch = replace(batch, old_logprobs=outputs.logprobs.detach())
        elif batch.anchor is not None:
            theirs = batch.require("rollout_logprobs")
            old = interpolated(outputs.logprobs, theirs, batch.anchor)
            batch = replace(batch, old_logprobs=old)
        loss, metrics = self.total_loss(outputs, batch, weights)
        return loss, {**metrics, **engine_gap(outputs.logprobs, batch)}
