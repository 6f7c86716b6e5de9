"""The policy that collected the steps, as its engine says, beside the one that is trained.

Both have the same weights where a rollout is on-policy, and still differ: an engine computes in
other kernels, often in another precision. What was sampled is then from a policy that is not the
one whose gradient is taken ("Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training", Yao et al. 2025), which importance weights of trainer over engine correct. They are the
factor of the decoupled objective (arXiv 2110.00641, eq. 6; for asynchronous rollouts arXiv
2505.24298, eq. 5), which stands before the clipped surrogate, whose ratio is against the policy
just before the update.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.losses import bounded_ratio, kl_estimate
from rlinf.data.batch import StepBatch
from rlinf.data.padding import pad
from rlinf.data.record import Record

WeightLevel = Literal["token", "sequence", "geometric"]
Outside = Literal["truncate", "mask"]
GAP, STEPS = "_gap", "_gap_steps"
"""Sums over the steps that count and were chosen by the trainer's own version."""
RATIO, DIVERGENCE = "_ratio", "_divergence"
"""Over the same steps, of trainer over engine."""
LARGEST_RATIO = "engine_ratio_max"


def behaviour_ratio(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, level: WeightLevel
) -> Tensor:
    """How likelier the policy before the update is to do what the engine's did, ``[B, T]``.

    Args:
        mask: ``[B, T]`` 1 where a step counts; others have no part in that of their sequence.
        level: ``token``: of each step, ``old / rollout``; ``sequence``: of all steps of a row
            together, the product of theirs; ``geometric``: their geometric mean.
    """
    gap = (old_logprobs - rollout_logprobs) * mask
    if level == "token":
        return bounded_ratio(gap, torch.zeros_like(gap))
    total = gap.sum(-1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(-1, keepdim=True).clamp(min=1)
    return bounded_ratio(total, torch.zeros_like(total)).expand_as(gap)


def behaviour_weights(ratio: Tensor, cap: float, outside: Outside) -> tuple[Tensor, Tensor]:
    """Importance weights of steps, without a gradient, and 1 where the cap took effect.

    Args:
        ratio: of any shape; see :func:`behaviour_ratio`.
        cap: ``C``, the largest weight.
        outside: ``truncate``: weigh ``min(ratio, C)`` (truncated importance sampling, TIS);
            ``mask``: weigh 0 where the ratio is not within ``[1 / C, C]`` (masked importance
            sampling).
    """
    ratio = ratio.detach()
    if outside == "truncate":
        return ratio.clamp(max=cap), (ratio > cap).float()
    left_out = (ratio > cap) | (ratio < 1 / cap)
    return torch.where(left_out, 0.0, ratio), left_out.float()


def engine_gap(logprobs: Tensor, batch: StepBatch) -> dict[str, Tensor]:
    """How far engine and trainer differ on the steps that both chose with equal weights: sums.

    :func:`engine_metrics` makes numbers of them.
    """
    if batch.fresh is None:
        return {}
    ours, theirs = logprobs.detach(), batch.require("rollout_logprobs")
    fresh = batch.fresh * batch.mask
    ratio = bounded_ratio(ours, theirs)
    return {
        GAP: (fresh * (ours - theirs).abs()).sum(),
        STEPS: fresh.sum(),
        RATIO: (fresh * ratio).sum(),
        # The engine drew the samples: the estimate is of KL(engine || trainer).
        DIVERGENCE: (fresh * kl_estimate(theirs, ours)).sum(),
        LARGEST_RATIO: (fresh * ratio).max(),
    }


def engine_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Of summed :func:`engine_gap`: ``engine_gap`` (mean absolute difference of log-probabilities,
    nats), ``engine_ratio`` (mean probability ratio, trainer over engine) and ``engine_kl``; none
    where no step was compared."""
    steps = totals.get(STEPS, 0.0)
    if steps <= 0:
        return {}
    names = {"engine_gap": GAP, "engine_ratio": RATIO, "engine_kl": DIVERGENCE}
    return {name: totals[key] / steps for name, key in names.items()}


def lags(trajectories: list[Record], version: int) -> Tensor:
    """How many updates the weights that chose a step are behind ``version``: ``[N, T]`` float32."""
    return pad(
        [
            np.asarray(version - record.steps["versions"], np.float32)
            if "versions" in record.steps
            else np.full(len(record), version - int(record.info["policy_version"]), np.float32)
            for record in trajectories
        ],
        max(len(record) for record in trajectories),
    )


def anchors(lag: Tensor, done: float) -> Tensor:
    """Where the policy before an update lies between the one that collected a step (0) and the one
    in training (1), counted in versions (A-3PO, arXiv 2512.06547): ``[N, T]``.

    Args:
        lag: ``[N, T]``, of :func:`lags`.
        done: how much of the update is done, in [0, 1). Before its first step the policy in
            training is that before the update.
    """
    return lag / (lag + done) if done else torch.ones_like(lag)


def interpolated(logprobs: Tensor, rollout_logprobs: Tensor, anchor: Tensor) -> Tensor:
    """Log-probabilities of the policy before the update, without a pass of their own: on the line
    from those of the policy that collected a step to those of the one in training. No gradient."""
    return rollout_logprobs + anchor * (logprobs.detach() - rollout_logprobs)
