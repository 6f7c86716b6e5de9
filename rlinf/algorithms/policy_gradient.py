"""Policy-gradient algorithms: the clipped ratio to an old policy, entropy and KL terms, and the
update over minibatches.

With streaming, gradients of the first parts of the batch are computed before later parts arrive.
The weights change only after all parts have arrived. A *unit* is a step, or a part of a step that
has its own probability ratio (:mod:`rlinf.algorithms.importance_sampling`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlinf.algorithms.advantages import masked_whiten
from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.importance_sampling import (
    LogprobLevel,
    RolloutISLevel,
    RolloutISMode,
    batch_at_level,
    flatten_to_level,
    interpolate_old_logprobs,
    mask_like,
    old_logprob_interpolation,
    rollout_is_weights,
    rollout_mismatch_metrics,
    rollout_mismatch_sums,
    rollout_ratio,
    step_staleness,
)
from rlinf.algorithms.learner import Learner
from rlinf.algorithms.losses import (
    KLEstimator,
    LossAggMode,
    clipped_surrogate,
    kl_estimate,
    kl_loss,
    loss_agg_weights,
    sequence_log_ratio,
    sft_loss,
)
from rlinf.config import Section
from rlinf.data.batch import StepBatch, TrainingSample, build_step_batch, gather_steps
from rlinf.data.load_balancing import StepSpan
from rlinf.errors import ConfigError, InputError
from rlinf.models.base import Batch, Policy, StepOutputs
from rlinf.registry import RunComponents
from rlinf.trainers.base import Loss, is_max_metric


def run_minibatch_updates(
    algorithm: PolicyGradient, learner: Learner, parts: Iterable[list[TrainingSample]]
) -> None:
    """Update the policy on one iteration's batch, which arrives in parts."""
    update = _Update(algorithm, learner)
    # True if the gradient of a part of the batch does not depend on the other parts.
    is_streaming = (
        algorithm.supports_streaming
        and learner.supports_accumulation
        and not learner.policy.tracks_observations
    )
    samples: list[TrainingSample] = []
    for part in parts:
        samples += part
        if is_streaming:
            update.accumulate([sample for sample in part if sample.is_included])
    if is_streaming:
        update.step()
    elif included := [sample for sample in samples if sample.is_included]:
        update.run_epochs(included)
    # Update the observation statistics last: old log-probabilities used the old statistics.
    if learner.policy.tracks_observations:
        learner.mark_dirty()
        learner.policy.update_observation_stats([sample.trajectory for sample in samples])


class _Update:
    """The optimizer steps of one iteration."""

    def __init__(self, algorithm: PolicyGradient, learner: Learner) -> None:
        self._algorithm, self._learner = algorithm, learner
        self._total_divisor: float | None = None
        """Sum of the divisors of the accumulated parts; see :func:`loss_agg_weights`."""
        self._loss_divisor = 1.0
        """Divisor of a loss before its gradient is computed: the power of two nearest to the total
        weight. The division is exact and makes the loss as small as a mean, for float16."""

    def accumulate(self, samples: list[TrainingSample]) -> None:
        """Add the gradient of one part of the batch; :meth:`step` divides by the whole batch."""
        if samples:
            batch = self._with_advantages(samples)
            weights, divisor = self._loss_weights(batch.require("loss_mask"))
            if self._total_divisor is None:
                self._loss_divisor = nearest_power_of_two(weights)
            self._total_divisor = (self._total_divisor or 0.0) + divisor
            rows = list(range(len(samples)))
            self._accumulate_rows(batch, samples, rows, weights, entropy=True)

    def step(self) -> None:
        if self._total_divisor is not None:
            self._step_optimizer(self._total_divisor)

    def run_epochs(self, samples: list[TrainingSample]) -> None:
        """Do all optimizer steps on the whole batch."""
        learner, settings = self._learner, self._algorithm.config
        batch = self._with_advantages(samples)
        minibatches = minibatch_indices(
            learner, len(samples), settings.epochs, settings.minibatches
        )
        for index, rows in enumerate(minibatches):
            weights, divisor = self._loss_weights(batch.require("loss_mask")[rows])
            entropy = self._algorithm.needs_entropy or index == 0
            self._loss_divisor = nearest_power_of_two(weights)
            self._accumulate_rows(batch, samples, rows, weights, entropy=entropy)
            self._step_optimizer(divisor)
            learner.report_progress(index + 1, len(minibatches))
        if batch.values is not None and batch.returns is not None:
            mask = mask_like(batch, batch.values)
            value = explained_variance(batch.values, batch.returns, mask)
            learner.log_metric("explained_variance", value)

    def _loss_weights(self, mask: Tensor) -> tuple[Tensor, float]:
        config = self._algorithm.config
        weights, divisor = loss_agg_weights(
            mask.flatten(1), config.loss_agg_mode, config.loss_agg_divisor
        )
        return weights.view(mask.shape), divisor

    def _with_advantages(self, samples: list[TrainingSample]) -> StepBatch:
        config = self._algorithm.config
        batch = batch_at_level(build_step_batch(samples), config.logprob_level)
        if config.kl_reward_coef:
            divergence = reference_kl(batch, config.kl_reward_type)
            mean = divergence.sum() / batch.mask.sum().clamp(min=1)
            batch = subtract_penalty(batch, config.kl_reward_coef * divergence)
            self._learner.log_metric("reward_kl_penalty", float(mean))
        return self._algorithm.with_advantages(batch)

    def _accumulate_rows(
        self,
        batch: StepBatch,
        samples: list[TrainingSample],
        rows: list[int],
        weights: Tensor,
        *,
        entropy: bool,
    ) -> None:
        """Add the gradient of the loss of these rows of the batch.

        Args:
            weights: aggregation weights of the rows.
            entropy: whether the entropy must be computed.
        """
        learner, config = self._learner, self._algorithm.config
        loss_divisor = self._loss_divisor
        computed, weight_share = self._rows_with_gradient(batch, rows, weights)
        rows, weights = [rows[index] for index in computed], weights[computed]
        is_first, interpolate = not learner.num_updates, config.old_logprobs == "interpolate"
        if (is_first or interpolate) and batch.rollout_logprobs is not None:
            trajectories = [sample.trajectory for sample in samples]
            staleness = step_staleness(trajectories, learner.iteration)
            if is_first:
                self._check_staleness(staleness, batch.mask)
                batch = replace(batch, on_policy_mask=batch.mask * (staleness == 0))
            if interpolate:
                progress = learner.num_updates / (config.epochs * config.minibatches)
                interpolation = old_logprob_interpolation(staleness, progress)
                batch = replace(batch, old_logprob_interpolation=interpolation)

        def loss(policy: Policy, inputs: Batch, spans: list[StepSpan]) -> Loss:
            length, device = inputs["mask"].shape[1], inputs["mask"].device
            micro_batch = batch.select_spans(
                [s._replace(row=rows[s.row]) for s in spans], length, device
            )
            value, metrics = self._algorithm.micro_batch_loss(
                policy,
                inputs,
                micro_batch,
                gather_steps(weights, spans, length).to(device),
                temperature=learner.temperature,
                entropy=entropy,
            )
            return value / loss_divisor, {
                name: metric if is_max_metric(name) else metric / weight_share / loss_divisor
                for name, metric in metrics.items()
            }

        # Independent steps may be split into spans, but a sequence-level ratio needs all steps.
        unsplit = self._algorithm.needs_full_sequences and learner.policy.has_independent_steps
        learner.accumulate(
            [samples[i].trajectory for i in rows],
            loss,
            row_groups=[[row] for row in range(len(rows))] if unsplit else None,
        )

    def _check_staleness(self, staleness: Tensor, mask: Tensor) -> None:
        """Check and log the staleness ``[N, T]`` of unmasked steps.

        Raises:
            InputError: a step is staler than ``rollout.staleness`` allows, or was chosen with
                weights newer than those before the update.
        """
        learner, is_unmasked = self._learner, mask > 0
        limit = learner.max_staleness
        if limit is None or not is_unmasked.any():
            return
        unmasked = staleness[is_unmasked]
        if not 0 <= float(unmasked.min()) <= float(unmasked.max()) <= limit:
            wrong = unmasked.min() if unmasked.min() < 0 else unmasked.max()
            raise InputError(
                f"iteration {learner.iteration + 1}: steps were chosen by version "
                f"{learner.iteration - int(wrong)} of the weights, and version {learner.iteration} "
                f"is to be updated; rollout.staleness allows {limit} updates between them. Look at "
                "the flow's inputs and the engine's version, or raise rollout.staleness"
            )
        if limit:
            learner.log_metric("staleness", float(unmasked.mean()))

    def _rows_with_gradient(
        self, batch: StepBatch, rows: list[int], weights: Tensor
    ) -> tuple[list[int], float]:
        """Return the indices into ``rows`` that must be computed (at least one), and their share of
        the weights. The other rows have no gradient. Metrics are means over the computed rows."""
        has_gradient = ~self._algorithm.zero_gradient_rows(batch)[rows]
        if bool(has_gradient.all()):
            return list(range(len(rows))), 1.0
        computed = has_gradient.nonzero()[:, 0].tolist() or [0]
        share = float(weights[computed].sum() / weights.sum().clamp(min=1e-30))
        return computed, share if len(computed) < len(rows) and share > 0 else 1.0

    def _step_optimizer(self, divisor: float) -> None:
        """Add the loss of demonstrations, check that engine and trainer agree, and step the
        optimizer.

        Args:
            divisor: divisor of the accumulated loss; see :func:`loss_agg_weights`.
        """
        groups = self._algorithm.trainable_groups(self._learner.iteration)
        scale = self._loss_divisor / max(1.0, divisor)
        if self._algorithm.config.sft_loss_coef:
            self._accumulate_demonstrations(scale)
        self._learner.update(scale=scale, check=self._check_engine_mismatch, groups=groups)

    def _accumulate_demonstrations(self, scale: float) -> None:
        """Add the gradient of ``sft_loss_coef`` times the SFT loss of one batch of demonstrations.

        Args:
            scale: factor of the gradient in the update, which the loss is divided by.

        Raises:
            ConfigError: the task has no demonstrations.
        """
        learner, config = self._learner, self._algorithm.config
        step = learner.iteration * config.epochs * config.minibatches + learner.num_updates
        demonstrations = learner.demonstrations(step, config.sft_batch_size)
        if not demonstrations:
            raise ConfigError(
                "algorithm.sft_loss_coef: this task has no demonstrations; set it to 0"
            )
        batch_loss = sft_loss(demonstrations)

        def loss(policy: Policy, inputs: Batch, spans: list[StepSpan]) -> Loss:
            value = batch_loss(policy, inputs, spans)[0] / scale
            return config.sft_loss_coef * value, {"sft_loss": value.detach()}

        learner.accumulate(demonstrations, loss)

    def _check_engine_mismatch(self, totals: dict[str, float]) -> None:
        """Check that engine and trainer, with equal weights, agree on the log-probabilities.

        Args:
            totals: sums over the minibatch; see :func:`rollout_mismatch_sums`.

        Raises:
            InputError: the mean difference over unmasked steps exceeds the limit.
        """
        metrics = rollout_mismatch_metrics(totals)
        for name, value in metrics.items():
            self._learner.log_metric(name, value)
        limit = self._algorithm.config.max_logprob_diff
        limit = self._learner.max_logprob_diff if limit is None else limit
        difference = metrics.get("rollout_logprob_diff", 0.0)
        if not difference <= limit:
            raise InputError(
                f"iteration {self._learner.iteration + 1}: the log-probabilities of engine and "
                f"trainer differ by {difference:.3g} nats in the mean, the limit is {limit:.3g}; "
                "no weight was changed. Both have the same weights: check engine.*, trainer.* and "
                "the model's files, or raise algorithm.max_logprob_diff"
            )


def reference_kl(batch: StepBatch, kind: KLEstimator) -> Tensor:
    """Return the estimated KL divergence of the policy before the update from the reference policy.

    The shape is ``[N, T]``, or ``[N, T, K]`` if a step has several units. Masked units are 0.

    Args:
        batch: the result of :func:`rlinf.algorithms.importance_sampling.batch_at_level`.
    """
    reference = batch.require("reference_logprobs")
    return kl_estimate(batch.old_logprobs, reference, kind) * batch.require("loss_mask")


def subtract_penalty(batch: StepBatch, penalty: Tensor) -> StepBatch:
    """Return a batch whose rewards are reduced by penalties per unit, ``[N, T]`` or ``[N, T, K]``.
    The penalty of a step, or of an action of a chunk, is the sum over its units."""

    def subtract_from(rewards: Tensor) -> Tensor:
        return rewards - penalty.reshape(*rewards.shape, -1).sum(-1)

    action_rewards = batch.action_rewards
    return replace(
        batch,
        rewards=subtract_from(batch.rewards),
        action_rewards=None if action_rewards is None else subtract_from(action_rewards),
    )


def nearest_power_of_two(weights: Tensor) -> float:
    """Return the power of two nearest to the sum of the weights, at least 1."""
    # In float64 the result does not depend on the order of the sum, which depends on the machine.
    total = float(weights.sum(dtype=torch.float64))
    return 2.0 ** round(math.log2(max(1.0, total)))


def minibatch_indices(learner: Learner, count: int, epochs: int, per_epoch: int) -> list[list[int]]:
    """Return the sample indices of each optimizer step. An epoch has every sample once, in a random
    order if it has several steps.

    Args:
        count: number of samples.
        per_epoch: number of minibatches of an epoch.
    """
    minibatches = []
    for epoch in range(epochs):
        order = np.arange(count)
        if per_epoch > 1:
            order = learner.rng(epoch).permutation(count)
        for indices in np.array_split(order, min(per_epoch, count)):
            minibatches.append(sorted(int(i) for i in indices))
    return minibatches


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)`` over unmasked steps."""
    unmasked = mask.bool()
    variance = returns[unmasked].var()
    residuals = returns[unmasked] - values[unmasked]
    return float(1 - residuals.var() / variance) if variance > 0 else 0.0


class PolicyGradientConfig(Section):
    """Settings of all policy-gradient algorithms."""

    epochs: int = Field(default=1, gt=0)
    """Passes over one iteration's batch."""
    minibatches: int = Field(default=1, gt=0)
    """Optimizer steps per pass."""
    old_logprobs: Literal["recompute", "interpolate", "rollout"] = "recompute"
    """Source of the log-probabilities in the denominator of the ratio. ``recompute``: the policy
    before the update, computed by the training stack. The inference stage computes them where the
    update has several steps; a single step takes them from its own forward pass. ``rollout``: the
    engine's log-probabilities. ``interpolate``: an estimate between the engine's log-probabilities
    and those of the policy in training, without an inference stage
    (:func:`rlinf.algorithms.importance_sampling.old_logprob_interpolation`)."""
    rollout_is_threshold: float | None = Field(default=None, gt=0)
    """Largest importance weight of a step, which is the probability ratio of the policy before the
    update over the policy that collected the step; null: no importance weights. This is truncated
    importance sampling for stale or inexact rollouts
    (:mod:`rlinf.algorithms.importance_sampling`). The training stack computes the policy before the
    update: in the inference stage, or in the update's own forward pass if the update has a single
    step."""
    rollout_is_level: RolloutISLevel = "token"
    """Unit that has one importance weight: each token (``token``), the whole response by the
    product of its ratios (``sequence``), or by their geometric mean (``geometric``)."""
    rollout_is_mode: RolloutISMode = "truncate"
    """Treatment of a ratio above the threshold ``C``. ``truncate``: its weight is ``C``. ``mask``:
    its weight is 0, as is that of a ratio below ``1 / C``. A masked step still counts in the mean
    of ``loss_agg_mode``."""
    max_logprob_diff: float | None = Field(default=None, gt=0)
    """Largest mean difference, nats, between the log-probabilities of engine and trainer before the
    first step of an iteration, over steps chosen with the trainer's weights. The run stops above
    it. null: 0.02, or 0.2 if either computes in half precision."""
    logprob_level: LogprobLevel = "chunk"
    """Unit that has one probability ratio, if a step has several parts: each part (``token``), each
    action of a chunk (``action``), or the whole step (``chunk``). ``loss_agg_mode`` counts these
    units as tokens."""
    loss_agg_mode: LossAggMode = "token_mean"
    loss_agg_divisor: int | None = Field(default=None, gt=0)
    """Constant by which ``seq_mean_token_sum`` divides the sum of each sequence, for example the
    horizon; null: 1."""
    whiten_advantages: bool = False
    """Normalise the advantages of an iteration to mean 0 and standard deviation 1, over unmasked
    steps."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Unit that has one clipped ratio: each token, or the whole response by the geometric mean of
    its tokens' ratios (GSPO, arXiv 2507.18071)."""
    clip_ratio_low: float = Field(default=0.2, gt=0, le=1)
    clip_ratio_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped to ``[1 - clip_ratio_low, 1 + clip_ratio_high]``."""
    clip_ratio_c: float | None = Field(default=None, gt=1)
    """Upper bound of the loss of a negative advantage, as a multiple of its magnitude, for any
    ratio (dual-clip PPO, arXiv 1912.09729); null: unlimited."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight in the loss of the KL divergence from the reference policy, which has the weights
    after SFT."""
    kl_loss_type: KLEstimator = "k3"
    """Estimator of the KL divergence in the loss (:func:`rlinf.algorithms.losses.kl_loss`)."""
    kl_reward_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy that is subtracted from the reward of
    each step. This is the divergence of the policy before the update, without a gradient."""
    kl_reward_type: KLEstimator = "k1"
    """Estimator of the KL divergence in the reward
    (:func:`rlinf.algorithms.losses.kl_estimate`)."""
    sft_loss_coef: float = Field(default=0.0, ge=0)
    """Weight in the loss of supervised fine-tuning on the task's demonstrations (co-training). Each
    optimizer step adds the gradient of one batch of demonstrations; 0: none."""
    sft_batch_size: int = Field(default=32, gt=0)
    """Demonstrations per optimizer step, if ``sft_loss_coef`` is above 0."""

    @model_validator(mode="after")
    def _require_coefficient_for_demonstrations(self) -> PolicyGradientConfig:
        default = type(self).model_fields["sft_batch_size"].default
        if not self.sft_loss_coef and self.sft_batch_size != default:
            raise ValueError("sft_batch_size needs sft_loss_coef above 0; set both")
        return self

    @model_validator(mode="after")
    def _require_sums_for_divisor(self) -> PolicyGradientConfig:
        if self.loss_agg_divisor is not None and self.loss_agg_mode != "seq_mean_token_sum":
            raise ValueError(
                "loss_agg_divisor divides sums of sequences; it needs loss_agg_mode: "
                "seq_mean_token_sum"
            )
        return self

    @model_validator(mode="after")
    def _require_recomputed_logprobs(self) -> PolicyGradientConfig:
        if self.kl_reward_coef and self.old_logprobs != "recompute":
            raise ValueError(
                "kl_reward_coef is of the policy before the update, whose log-probabilities the "
                "inference stage computes; it needs old_logprobs: recompute"
            )
        return self

    @model_validator(mode="after")
    def _check_importance_weights(self) -> PolicyGradientConfig:
        if self.rollout_is_threshold is None:
            for key in ("rollout_is_level", "rollout_is_mode"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(
                        f"{key} needs importance weights; set rollout_is_threshold too"
                    )
            return self
        if self.rollout_is_mode == "mask" and self.rollout_is_threshold <= 1:
            raise ValueError(
                "rollout_is_threshold must be above 1 to mask ratios outside "
                "[1 / threshold, threshold]"
            )
        if self.old_logprobs == "rollout":
            raise ValueError(
                "rollout_is_threshold compares recomputed log-probabilities with those of the "
                "rollout; it needs old_logprobs: recompute, or interpolate"
            )
        return self


class PolicyGradient(Algorithm):
    """Base class of policy-gradient algorithms: pure functions of step batches, called by
    :func:`run_minibatch_updates`."""

    Config: ClassVar[type[PolicyGradientConfig]] = PolicyGradientConfig
    config: Any
    has_group_local_advantages: ClassVar[bool] = False
    """Whether the advantages of a group depend on this group alone."""

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        super().check(options, run)
        if options.sft_loss_coef and not run.classes["trainer"].supports_accumulation:
            raise ConfigError(
                f"algorithm.sft_loss_coef: trainer {run.config.trainer.name!r} cannot add the "
                "gradients of two losses; set it to 0, or trainer=fsdp"
            )

    @property
    def needs_reference(self) -> bool:
        return bool(self.config.kl_loss_coef > 0 or self.config.kl_reward_coef > 0)

    @property
    def needs_old_logprobs(self) -> bool:
        # A single step computes them in its forward pass; a KL penalty needs them before that.
        needs_inference = not self.has_single_step or self.config.kl_reward_coef > 0
        return bool(self.config.old_logprobs == "recompute" and needs_inference)

    @property
    def has_single_step(self) -> bool:
        """Whether an iteration has a single optimizer step."""
        return bool(self.config.epochs == self.config.minibatches == 1)

    @property
    def needs_full_sequences(self) -> bool:
        """Whether the loss of a step depends on the other steps of its sample."""
        config = self.config
        has_sequence_weights = config.rollout_is_threshold and config.rollout_is_level != "token"
        return bool(has_sequence_weights or config.importance_sampling_level == "sequence")

    @property
    def minibatches(self) -> int:
        return int(self.config.minibatches)

    @property
    def supports_streaming(self) -> bool:
        return (
            self.has_group_local_advantages
            and self.has_single_step
            and not self.config.whiten_advantages
        )

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the policy's entropy in every step. Otherwise entropy is only a
        metric."""
        return bool(self.config.entropy_coeff > 0)

    def update(self, learner: Learner, parts: Iterable[list[TrainingSample]]) -> None:
        run_minibatch_updates(self, learner, parts)

    def trainable_groups(self, iteration: int) -> tuple[str, ...] | None:
        """Return the parameter groups that an iteration (from 0) changes; None: all groups."""
        return None

    @abstractmethod
    def compute_advantages(self, batch: StepBatch) -> tuple[Tensor, Tensor | None]:
        """Return the advantages ``[N, T]`` of a whole batch and, for a value loss, its returns.

        Both may be per action of a chunk, ``[N, T, C]``.

        :meth:`with_advantages` applies ``whiten_advantages`` to them.
        """

    def with_advantages(self, batch: StepBatch) -> StepBatch:
        """Return a whole batch with advantages, whitened if configured, and returns."""
        advantages, returns = self.compute_advantages(batch)
        if self.config.whiten_advantages:
            advantages = masked_whiten(advantages, mask_like(batch, advantages))
        return replace(batch, advantages=advantages, returns=returns)

    def zero_gradient_rows(self, batch: StepBatch) -> Tensor:
        """Return a mask ``[N]``, True at samples whose loss has no gradient for any policy. They
        count in the mean of the loss, but are not computed. By default there are none."""
        return torch.zeros(len(batch), dtype=torch.bool)

    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        """Return the policy loss: the sum over steps of ``weights`` times the loss of a step, and
        metrics that are summed the same way.

        The default is the clipped surrogate. An override keeps all other terms of the
        configuration, because :meth:`total_loss` adds them: the importance weights of
        ``rollout_is_threshold`` are part of ``weights``; the entropy bonus, the KL divergence from
        the reference and a critic's loss are added to the result (:meth:`add_loss_terms`).

        ``batch`` holds the rows of one micro-batch, ``batch.advantages`` included. Sums over
        micro-batches and ranks equal those of the minibatch, for any split. If a step has several
        parts, its units replace the step (:mod:`rlinf.algorithms.importance_sampling`).

        Args:
            outputs: step outputs of the policy in training, ``[B, U]`` each.
            weights: ``[B, U]``, the aggregation weight (``batch.loss_weights``) times the
                importance weight of each of the ``U`` units.
        """
        config = self.config
        logprobs, old_logprobs = outputs.logprobs, batch.old_logprobs
        if config.importance_sampling_level == "sequence":
            logprobs = sequence_log_ratio(logprobs, old_logprobs, batch.mask)
            old_logprobs = torch.zeros_like(logprobs)
        surrogate, clipped = clipped_surrogate(
            logprobs,
            old_logprobs,
            batch.require("advantages"),
            config.clip_ratio_low,
            config.clip_ratio_high,
            config.clip_ratio_c,
        )
        return (weights * surrogate).sum(), {
            "clip_ratio": (batch.require("loss_weights") * clipped).sum()
        }

    def add_loss_terms(
        self, loss: Tensor, outputs: StepOutputs, batch: StepBatch, weights: Tensor
    ) -> Loss:
        """Return the loss with the other configured terms, and their metrics.

        The terms are minus ``entropy_coeff`` times the entropy, and ``kl_loss_coef`` times the KL
        divergence from the reference. A subclass adds its own terms to the result of ``super()``.

        Args:
            loss: the result of :meth:`policy_loss`, a scalar.
            weights: aggregation weights ``[B, U]``, without importance weights.

        Raises:
            InputError: ``entropy_coeff`` is above 0, and the policy returns no entropy.
        """
        config, metrics = self.config, dict[str, Tensor]()
        if outputs.entropy is None and config.entropy_coeff:
            raise InputError(
                "algorithm.entropy_coeff: the policy returns no entropy; return it in "
                "StepOutputs, or set the coefficient to 0"
            )
        if outputs.entropy is not None:
            entropy = (weights * outputs.entropy).sum()
            metrics["entropy"] = entropy.detach()
            loss = loss - config.entropy_coeff * entropy
        if config.kl_loss_coef:
            reference = batch.require("reference_logprobs")
            step_kl = kl_loss(outputs.logprobs, reference, config.kl_loss_type)
            divergence = (weights * step_kl).sum()
            metrics["kl"] = divergence.detach()
            loss = loss + config.kl_loss_coef * divergence
        return loss, metrics

    def total_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        """Return the :meth:`policy_loss` with importance weights and all other configured terms.

        Args:
            outputs, batch: as in :meth:`policy_loss`.
            weights: aggregation weights ``[B, U]``.
        """
        batch = replace(batch, loss_weights=weights)
        importance, metrics = self._importance_weights(batch, weights)
        weighted = weights if importance is None else weights * importance
        loss, policy_metrics = self.policy_loss(outputs, batch, weighted)
        with torch.no_grad():
            step_kl = kl_estimate(batch.old_logprobs, outputs.logprobs)
            metrics |= {"policy_loss": loss.detach(), "approx_kl": (weights * step_kl).sum()}
        loss, term_metrics = self.add_loss_terms(loss, outputs, batch, weights)
        return loss, {**metrics, **term_metrics, **policy_metrics}

    def _importance_weights(
        self, batch: StepBatch, weights: Tensor
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the importance weights ``[B, U]`` and their metrics; None if
        ``rollout_is_threshold`` is not set. ``weights`` are the aggregation weights."""
        config = self.config
        if config.rollout_is_threshold is None:
            return None, {}
        ratio = rollout_ratio(
            batch.old_logprobs,
            batch.require("rollout_logprobs"),
            batch.mask,
            config.rollout_is_level,
        )
        importance, is_outside = rollout_is_weights(
            ratio, config.rollout_is_threshold, config.rollout_is_mode
        )
        return importance, {
            "rollout_is_mean": (weights * importance).sum(),
            "rollout_is_clip_ratio": (weights * is_outside).sum(),
        }

    def micro_batch_loss(
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

        A subclass overrides this if its loss needs more from the policy than step outputs. An
        override that does not call ``super()`` drops the configured loss terms. A run that sets
        one of their keys is then rejected (:mod:`rlinf.algorithms.unused_keys`).

        Args:
            inputs: the result of :meth:`Policy.collate`, on the policy's device.
            entropy: whether the entropy must be computed.
        """
        outputs = policy.evaluate(inputs, temperature, entropy=entropy)
        outputs, batch, weights = flatten_to_level(
            outputs, batch, weights, self.config.logprob_level
        )
        if self.config.old_logprobs == "recompute" and self.has_single_step:
            batch = replace(batch, old_logprobs=outputs.logprobs.detach())
        elif batch.old_logprob_interpolation is not None:
            old_logprobs = interpolate_old_logprobs(
                outputs.logprobs,
                batch.require("rollout_logprobs"),
                batch.old_logprob_interpolation,
            )
            batch = replace(batch, old_logprobs=old_logprobs)
        loss, metrics = self.total_loss(outputs, batch, weights)
        return loss, {**metrics, **rollout_mismatch_sums(outputs.logprobs, batch)}
