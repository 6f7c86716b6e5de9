"""Importance sampling between the engine's policy, which collected the steps, and the trainer's.

Even with the same weights, the two differ, because an engine uses other kernels and often another
precision. The gradient is then off-policy ("Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training", Yao et al. 2025). Importance weights, trainer over engine, correct this. In
the decoupled objective (arXiv 2110.00641, eq. 6; for asynchronous rollouts arXiv 2505.24298, eq. 5)
they multiply the clipped surrogate, whose ratio is relative to the policy before the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.losses import bounded_ratio, kl_estimate
from rlinf.data.batch import StepBatch, pad_right
from rlinf.data.trajectory import Trajectory

RolloutISLevel = Literal["token", "sequence", "geometric"]
RolloutISMode = Literal["truncate", "mask"]
DIFF_SUM, STEP_COUNT = "_gap", "_gap_steps"
"""Names of sums over the unmasked steps that the trainer's current version chose."""
RATIO_SUM, KL_SUM = "_ratio", "_divergence"
"""Names of sums, over the same steps, of the ratio of trainer over engine and of the KL."""
MAX_RATIO = "rollout_ratio_max"


def rollout_ratio(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, level: RolloutISLevel
) -> Tensor:
    """Return the probability ratio of the policy before the update over the engine's policy, ``[B,
    T]``.

    Args:
        mask: ``[B, T]``; masked steps do not enter the ratio of their sequence.
        level: ``token``: the ratio of each step, ``old / rollout``; ``sequence``: the product over
            all steps of a row; ``geometric``: their geometric mean.
    """
    gap = (old_logprobs - rollout_logprobs) * mask
    if level == "token":
        return bounded_ratio(gap, torch.zeros_like(gap))
    total = gap.sum(-1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(-1, keepdim=True).clamp(min=1)
    return bounded_ratio(total, torch.zeros_like(total)).expand_as(gap)


def rollout_is_weights(
    ratio: Tensor, threshold: float, mode: RolloutISMode
) -> tuple[Tensor, Tensor]:
    """Return the importance weights of steps, without a gradient, and 1 where they were clipped.

    Args:
        ratio: of any shape; see :func:`rollout_ratio`.
        threshold: ``C``, the largest weight.
        mode: ``truncate``: the weight is ``min(ratio, C)`` (truncated importance sampling, TIS);
            ``mask``: the weight is 0 where the ratio is not within ``[1 / C, C]`` (masked
            importance sampling).
    """
    ratio = ratio.detach()
    if mode == "truncate":
        return ratio.clamp(max=threshold), (ratio > threshold).float()
    is_outside = (ratio > threshold) | (ratio < 1 / threshold)
    return torch.where(is_outside, 0.0, ratio), is_outside.float()


def rollout_mismatch_sums(logprobs: Tensor, batch: StepBatch) -> dict[str, Tensor]:
    """Return sums of the mismatch of engine and trainer over steps of the current weights.
    :func:`rollout_mismatch_metrics` turns them into metrics."""
    if batch.on_policy_mask is None:
        return {}
    trainer, engine = logprobs.detach(), batch.require("rollout_logprobs")
    mask = batch.on_policy_mask * batch.mask
    ratio = bounded_ratio(trainer, engine)
    return {
        DIFF_SUM: (mask * (trainer - engine).abs()).sum(),
        STEP_COUNT: mask.sum(),
        RATIO_SUM: (mask * ratio).sum(),
        # The samples are from the engine's policy, so this estimates KL(engine || trainer).
        KL_SUM: (mask * kl_estimate(engine, trainer)).sum(),
        MAX_RATIO: (mask * ratio).max(),
    }


def rollout_mismatch_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Return the mismatch metrics from summed :func:`rollout_mismatch_sums`.

    These are ``rollout_logprob_diff`` (mean absolute difference of log-probabilities, nats),
    ``rollout_ratio_mean`` (mean probability ratio, trainer over engine) and ``rollout_kl``. The
    dictionary is empty if no step was compared.
    """
    steps = totals.get(STEP_COUNT, 0.0)
    if steps <= 0:
        return {}
    names = {
        "rollout_logprob_diff": DIFF_SUM,
        "rollout_ratio_mean": RATIO_SUM,
        "rollout_kl": KL_SUM,
    }
    return {name: totals[key] / steps for name, key in names.items()}


def policy_lags(trajectories: Sequence[Trajectory], version: int) -> Tensor:
    """Return the staleness of each step, in updates before ``version``, float32 ``[N, T]``."""
    return pad_right(
        [
            np.asarray(version - trajectory.step_versions(), np.float32)
            for trajectory in trajectories
        ],
        max(map(len, trajectories)),
    )


def old_logprob_interp(lag: Tensor, progress: float) -> Tensor:
    """Return the position of the policy before the update, ``[N, T]`` (A-3PO, arXiv 2512.06547).

    It is counted in versions from the collecting policy (0) to the policy in training (1).

    Args:
        lag: ``[N, T]``, the result of :func:`policy_lags`.
        progress: completed fraction of the update, in [0, 1). Before the first step, the policy in
            training is the policy before the update.
    """
    return lag / (lag + progress) if progress else torch.ones_like(lag)


def interpolate_old_logprobs(
    logprobs: Tensor, rollout_logprobs: Tensor, position: Tensor
) -> Tensor:
    """Estimate the log-probabilities of the policy before the update by linear interpolation. The
    end points are the collecting policy and the policy in training; ``position`` is the result of
    :func:`old_logprob_interp`. This needs no forward pass and has no gradient."""
    return rollout_logprobs + position * (logprobs.detach() - rollout_logprobs)
