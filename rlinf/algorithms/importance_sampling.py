"""Importance sampling between the engine's policy, which collected the steps, and the trainer's.

Even with the same weights, these policies differ, because an engine uses other kernels and often
another precision. The gradient is then off-policy ("Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training", Yao et al. 2025). Importance weights, trainer over engine, correct this. In
the decoupled objective (arXiv 2110.00641, eq. 6; for asynchronous rollouts arXiv 2505.24298, eq. 5)
the weights multiply the clipped surrogate, whose ratio is relative to the policy before the update.

A step may have several parts: the tokens of an action, or a chunk of actions of several tokens or
dimensions each. Its log-probabilities are then ``[B, T, K]`` for the ``K`` tokens of one action, or
``[B, T, C, D]`` for ``C`` actions of ``D`` tokens or dimensions. They are summed over each part of
the configured level (token, action or whole step). Each sum is a *unit*; the units of a sample are
flattened to ``[B, U]``. The advantage of a step or an action applies to each of its units.
``choice_mask`` is 0 at masked parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.losses import bounded_ratio, kl_estimate
from rlinf.data.batch import StepBatch, pad_right
from rlinf.data.trajectory import Trajectory
from rlinf.errors import InputError
from rlinf.models.base import StepOutputs

RolloutISLevel = Literal["token", "sequence", "geometric"]
RolloutISMode = Literal["truncate", "mask"]
"""Importance sampling (IS): see :func:`rollout_ratio` for levels, :func:`rollout_is_weights` for
modes."""
DIFF_SUM, STEP_COUNT = "_gap", "_gap_steps"
"""Keys of :func:`rollout_mismatch_sums`: the sum of absolute differences of log-probabilities, and
the number of these steps: unmasked steps that were chosen with the trainer's current weights."""
RATIO_SUM, KL_SUM = "_ratio", "_divergence"
"""Keys of sums over the same steps: probability ratios, trainer over engine, and KL estimates."""
MAX_RATIO = "rollout_ratio_max"
"""Key, and name of the metric: the largest ratio of these steps."""


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
    log_ratio = (old_logprobs - rollout_logprobs) * mask
    if level == "token":
        return bounded_ratio(log_ratio, torch.zeros_like(log_ratio))
    total = log_ratio.sum(-1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(-1, keepdim=True).clamp(min=1)
    return bounded_ratio(total, torch.zeros_like(total)).expand_as(log_ratio)


def rollout_is_weights(
    ratio: Tensor, threshold: float, mode: RolloutISMode
) -> tuple[Tensor, Tensor]:
    """Return the importance weights, without a gradient, and a mask of the ratios out of bounds.

    Args:
        ratio: probability ratios in any shape; see :func:`rollout_ratio`.
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
    """Return sums that measure the mismatch of engine and trainer, over steps chosen with the
    current weights. :func:`rollout_mismatch_metrics` turns them into metrics."""
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


def step_staleness(trajectories: Sequence[Trajectory], version: int) -> Tensor:
    """Return the staleness of each step, in updates before ``version``, float32 ``[N, T]``."""
    return pad_right(
        [
            np.asarray(version - trajectory.step_versions(), np.float32)
            for trajectory in trajectories
        ],
        max(map(len, trajectories)),
    )


def old_logprob_interpolation(staleness: Tensor, progress: float) -> Tensor:
    """Return the position of the policy before the update, ``[N, T]``, between the policy that
    collected the step (0) and the policy in training (1) (A-3PO, arXiv 2512.06547).

    Distances between policies are counted in updates.

    Args:
        staleness: ``[N, T]``, the result of :func:`step_staleness`.
        progress: completed fraction of the update, in [0, 1). Before the first step, the policy in
            training is the policy before the update.
    """
    return staleness / (staleness + progress) if progress else torch.ones_like(staleness)


def interpolate_old_logprobs(
    logprobs: Tensor, rollout_logprobs: Tensor, interpolation: Tensor
) -> Tensor:
    """Estimate the log-probabilities of the policy before the update, linearly between those of the
    collecting policy and of the policy in training. ``interpolation`` is the result of
    :func:`old_logprob_interpolation`. This needs no forward pass and has no gradient."""
    return rollout_logprobs + interpolation * (logprobs.detach() - rollout_logprobs)


LogprobLevel = Literal["token", "action", "chunk"]
"""Part of a step that is one unit; see :func:`sum_to_level`."""


def sum_to_level(values: Tensor, choice_mask: Tensor | None, level: LogprobLevel) -> Tensor:
    """Return log-probabilities or entropies summed to units: ``[B, T]``, or ``[B, T, K]`` if a step
    has ``K`` units.

    Args:
        values: ``[B, T]`` (each step is a unit at any level), ``[B, T, K]`` or ``[B, T, C, D]``.
        choice_mask: 0 where a value is masked, in the shape of ``values``. None: none is masked.
        level: ``token``: each value is a unit; ``action``: the sum over the last dimension is a
            unit; ``chunk``: the sum over the whole step is a unit.
    """
    if values.ndim == 2:
        return values
    if choice_mask is not None:
        values = torch.where(choice_mask != 0, values, 0.0)
    if level == "chunk":
        return values.flatten(2).sum(-1)
    if level == "action":
        values = values.sum(-1)
    return values.flatten(2) if values.ndim > 2 else values


def batch_at_level(batch: StepBatch, level: LogprobLevel) -> StepBatch:
    """Return a batch whose log-probabilities and loss mask are per unit."""
    columns = ("old_logprobs", "rollout_logprobs", "reference_logprobs")
    unit_columns = {
        name: sum_to_level(column, batch.choice_mask, level)
        for name in columns
        if (column := getattr(batch, name)) is not None
    }
    unit_mask = batch.mask
    if batch.choice_mask is not None:
        # A unit is masked if all of its parts are.
        unit_mask = (sum_to_level((batch.choice_mask != 0).float(), None, level) > 0).to(
            batch.mask.dtype
        )
    if unit_mask.ndim < unit_columns["old_logprobs"].ndim:
        unit_mask = unit_mask[..., None].expand(unit_columns["old_logprobs"].shape)
    # Rewards per action are dropped if a unit is larger than an action.
    action_rewards = batch.action_rewards
    if action_rewards is not None and not _has_units_within_actions(unit_mask, action_rewards):
        action_rewards = None
    return replace(
        batch,
        loss_mask=_broadcast_to_units(batch.mask, unit_mask) * unit_mask,
        action_rewards=action_rewards,
        **unit_columns,
    )


def mask_like(batch: StepBatch, column: Tensor) -> Tensor:
    """Return the mask in the shape of ``column``.

    Args:
        batch: the result of :func:`batch_at_level`.
        column: per step, ``[N, T]``, or per action of a chunk, ``[N, T, C]``. An action must be a
            unit or consist of units.

    Raises:
        InputError: a unit is larger than an action.
    """
    if column.ndim == 2:
        return batch.mask
    if not _has_units_within_actions(unit_mask := batch.require("loss_mask"), column):
        raise InputError(
            "the policy values each action of a chunk, and several actions have one ratio; set "
            "algorithm.logprob_level to action (or to token, if the policy returns one "
            "log-probability per action)"
        )
    return unit_mask.reshape(*column.shape, -1).amax(-1)


def flatten_to_level(
    outputs: StepOutputs, batch: StepBatch, weights: Tensor, level: LogprobLevel
) -> tuple[StepOutputs, StepBatch, Tensor]:
    """Flatten outputs, batch and weights to units ``[B, U]``.

    Args:
        batch: the result of :func:`batch_at_level`.
        weights: loss weight of each unit, ``[B, T]`` or ``[B, T, K]``.
    """
    logprobs = sum_to_level(outputs.logprobs, batch.choice_mask, level)
    entropy = (
        None if outputs.entropy is None else sum_to_level(outputs.entropy, batch.choice_mask, level)
    )
    columns = {
        field.name: _flatten_column(value, logprobs)
        for field in fields(batch)
        if (value := getattr(batch, field.name)) is not None and field.name != "choice_mask"
    }
    values = None if outputs.values is None else _flatten_column(outputs.values, logprobs)
    unit_outputs = StepOutputs(
        logprobs.flatten(1), None if entropy is None else entropy.flatten(1), values
    )
    columns["mask"] = columns["loss_mask"]
    return unit_outputs, replace(batch, choice_mask=None, **columns), weights.flatten(1)


def _has_units_within_actions(units: Tensor, column: Tensor) -> bool:
    """Return whether each action of ``column`` ``[N, T, C]`` is a unit or consists of units."""
    return units.ndim > 2 and units.shape[2] % column.shape[2] == 0


def _broadcast_to_units(column: Tensor, units: Tensor) -> Tensor:
    """Return a column of steps ``[B, T]`` in a shape that broadcasts to that of ``units``."""
    return column if units.ndim == 2 else column[..., None]


def _flatten_column(column: Tensor, units: Tensor) -> Tensor:
    """Return a column of steps, actions or units as ``[B, U]``; a column ``[B]`` is unchanged."""
    if column.ndim == 1:
        return column
    if units.ndim == 3:
        column = column if column.ndim > 2 else column[..., None]
        column = column.repeat_interleave(units.shape[2] // column.shape[2], 2)
    return column.flatten(1)
