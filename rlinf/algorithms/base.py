"""The algorithm interface and what all algorithms share: optimizer settings and loss weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlinf.config import Section
from rlinf.data.batch import StepBatch
from rlinf.fit import GROUPS, VALUES, Part
from rlinf.models.base import StepOutputs

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]

Beta = Annotated[float, Field(ge=0, lt=1)]


class AlgorithmConfig(Section):
    """Settings every algorithm has."""

    lr: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate over the run's iterations, after the warm-up."""
    schedule_iterations: int | None = Field(default=None, gt=0)
    """Iterations the schedule takes; those of the run at its first start by default. Further ones
    run at its last rate."""
    lr_warmup: int = Field(default=0, ge=0)
    """Iterations over which the learning rate rises linearly."""
    lr_final: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate of a falling schedule, as a share of ``lr``."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    epochs: int = Field(default=1, gt=0)
    """Passes over one iteration's batch."""
    minibatches: int = Field(default=1, gt=0)
    """Optimizer steps per pass."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Denominator of the ratio: computed by the inference stage under the training stack, or taken
    from the engine."""
    behaviour_weight_cap: float | None = Field(default=None, gt=0)
    """Weight each step by how likely the policy before the update is to do what the policy that
    collected it did, at most this; null: all weigh the same. For stale or inexact rollouts."""
    logprob_gap_limit: float | None = Field(default=None, gt=0)
    """Largest mean difference, nats, between the log-probabilities that the engine gave to the
    steps of an iteration and those of the trainer before its first step, where both have the same
    weights; above it the run stops. null: 0.02, or 0.2 where either computes in half precision."""
    aggregation: Aggregation = "token_mean"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped to ``[1 - clip_low, 1 + clip_high]``."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the reference policy (the weights after warm start)."""

    @model_validator(mode="after")
    def _behaviour_is_known(self) -> AlgorithmConfig:
        if self.behaviour_weight_cap is not None and self.old_logprobs == "rollout":
            raise ValueError(
                "behaviour_weight_cap compares recomputed log-probabilities with those of the "
                "rollout; it needs old_logprobs: recompute"
            )
        return self


class Algorithm(Part, ABC):
    """Pure functions of step batches; holds nothing but its configuration."""

    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    by_group: ClassVar[bool] = False
    """Whether advantages of a group do not depend on the rest of the batch."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def needs_values(self) -> bool:
        """Whether the inference stage must give value estimates."""
        return VALUES in self.needs

    @property
    def needs_groups(self) -> bool:
        """Whether a sample is judged by the others of its group, so that one teaches nothing."""
        return GROUPS in self.needs

    @property
    def needs_reference(self) -> bool:
        """Whether the inference stage must also run the reference policy."""
        return bool(self.config.kl_coefficient > 0)

    def keep(self, scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Which samples take part in the update: bool ``[N]`` from scores and group numbers."""
        return np.ones(len(scores), dtype=bool)

    @abstractmethod
    def advantages(self, batch: StepBatch) -> tuple[Tensor, Tensor | None]:
        """Advantages ``[N, T]`` and, for a value loss, returns ``[N, T]``, over the whole batch."""

    @abstractmethod
    def loss(
        self, outputs: StepOutputs, batch: StepBatch, weights: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over steps of ``weights`` times the loss, and metrics summed the same way.

        ``batch`` holds the rows of one micro-batch, ``batch.advantages`` included. Sums over
        micro-batches (and ranks) are the minibatch's however it was cut.
        """


def step_shares(mask: Tensor, aggregation: Aggregation) -> tuple[Tensor, float]:
    """Weight ``[N, T]`` of each step and the divisor of the whole, which add up over parts.

    ``(weights * loss).sum() / max(1, divisor)`` is the aggregated loss of one part, and with the
    sums of both that of several; a part without any step that counts adds nothing to either.

    Args:
        mask: ``[N, T]`` 1 where a step counts.
        aggregation: ``token_mean`` averages over all steps (DAPO, arXiv 2503.14476),
            ``seq_mean_token_mean`` first within each sequence (GRPO, arXiv 2402.03300),
            ``seq_mean_token_sum`` sums within each sequence (Dr. GRPO, arXiv 2503.20783).
    """
    lengths = mask.sum(-1, keepdim=True)
    if aggregation == "token_mean":
        return mask, float(mask.sum())
    sequences = float((lengths > 0).sum())
    if aggregation == "seq_mean_token_mean":
        return mask / lengths.clamp(min=1), sequences
    return mask, sequences


def step_weights(mask: Tensor, aggregation: Aggregation) -> Tensor:
    """Weight of each step so that ``(weights * loss).sum()`` is the aggregated loss.

    Of a whole minibatch; see :func:`step_shares`.
    """
    weights, divisor = step_shares(mask, aggregation)
    return weights / max(1.0, divisor)


def scheduled_lr(config: AlgorithmConfig, iteration: int, iterations: int) -> float:
    """Learning rate of an iteration (counted from 0) of a schedule of ``iterations``.

    A schedule that is over goes on at its last rate; one that is constant is never over.
    """
    if config.schedule != "constant":
        iteration = min(iteration, iterations - 1)
    if iteration < config.lr_warmup:
        return config.lr * (iteration + 1) / config.lr_warmup
    if config.schedule == "constant":
        return config.lr
    span = max(1, iterations - config.lr_warmup - 1)
    progress = min(1.0, (iteration - config.lr_warmup) / span)
    if config.schedule == "linear":
        share = 1 - progress
    else:
        share = 0.5 * (1 + float(np.cos(np.pi * progress)))
    return config.lr * (config.lr_final + (1 - config.lr_final) * share)


def policy_terms(
    config: AlgorithmConfig, outputs: StepOutputs, batch: StepBatch, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The part of the loss that GRPO and PPO share: clipped surrogate, entropy, KL."""
    from rlinf.algorithms.losses import behaviour_weights, clipped_surrogate, kl_estimate

    surrogate, clipped = clipped_surrogate(
        outputs.logprobs,
        batch.old_logprobs,
        batch.require("advantages"),
        config.clip_low,
        config.clip_high,
    )
    metrics: dict[str, Tensor] = {}
    if config.behaviour_weight_cap is not None:
        behaviour, capped = behaviour_weights(
            batch.old_logprobs, batch.require("rollout_logprobs"), config.behaviour_weight_cap
        )
        surrogate = behaviour * surrogate
        metrics = {
            "behaviour_weight": (weights * behaviour).sum(),
            "behaviour_capped_share": (weights * capped).sum(),
        }
    loss = (weights * surrogate).sum()
    with torch.no_grad():
        change = kl_estimate(batch.old_logprobs, outputs.logprobs)
        metrics |= {
            "policy_loss": loss.detach(),
            "clip_share": (weights * clipped).sum(),
            "kl_old": (weights * change).sum(),
        }
    if outputs.entropy is not None:
        entropy = (weights * outputs.entropy).sum()
        metrics["entropy"] = entropy.detach()
        loss = loss - config.entropy_bonus * entropy
    if config.kl_coefficient:
        divergence = (
            weights * kl_estimate(outputs.logprobs, batch.require("reference_logprobs"))
        ).sum()
        metrics["kl_reference"] = divergence.detach()
        loss = loss + config.kl_coefficient * divergence
    return loss, metrics
