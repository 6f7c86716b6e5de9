"""The level of probability ratios: tokens (or dimensions) of actions, actions, or whole steps.

A step may have several parts: the tokens of an action, or a chunk of actions of several tokens or
dimensions each. Its log-probabilities are then ``[B, T, K]`` for the ``K`` tokens of one action, or
``[B, T, C, D]`` for ``C`` actions of ``D`` tokens or dimensions. This module sums them up to the
configured level. The sums are the units of the loss, flattened to ``[B, U]``. The advantage of a
step or of an action applies to each of its units.

The trajectory's ``choice_mask`` is 0 at masked parts.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

import torch
from torch import Tensor

from rlinf.data.batch import StepBatch
from rlinf.errors import InputError
from rlinf.models.base import StepOutputs

LogprobLevel = Literal["token", "action", "chunk"]


def sum_to_level(values: Tensor, choice_mask: Tensor | None, level: LogprobLevel) -> Tensor:
    """Sum log-probabilities or entropies to units, ``[B, T]`` or several per step ``[B, T, K]``.

    Args:
        values: ``[B, T]``, which are units at any level, ``[B, T, K]`` or ``[B, T, C, D]``.
        choice_mask: of the same shape, 0 where a value is masked. None: no value is masked.
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
    """Return a batch with the log-probabilities and the loss mask of units."""
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
    """Return the mask of a column, for a batch of :func:`batch_at_level`.

    Args:
        column: per step, ``[N, T]``, or per action of a chunk, ``[N, T, C]``. An action must be a
            unit or consist of units.

    Raises:
        InputError: a unit is larger than an action.
    """
    if column.ndim == 2:
        return batch.mask
    if not _has_units_within_actions(units := batch.require("loss_mask"), column):
        raise InputError(
            "the policy values each action of a chunk, and several actions have one ratio; set "
            "algorithm.logprob_level to action (or to token, if the policy returns one "
            "log-probability per action)"
        )
    return units.reshape(*column.shape, -1).amax(-1)


def flatten_to_level(
    outputs: StepOutputs, batch: StepBatch, weights: Tensor, level: LogprobLevel
) -> tuple[StepOutputs, StepBatch, Tensor]:
    """Flatten outputs, batch and weights to units ``[B, U]``, for a batch of
    :func:`batch_at_level`.

    Args:
        weights: per unit, ``[B, T]`` or ``[B, T, K]``.
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
    """Return whether each action of a column ``[N, T, C]`` is a unit or consists of units."""
    return units.ndim > 2 and units.shape[2] % column.shape[2] == 0


def _broadcast_to_units(column: Tensor, units: Tensor) -> Tensor:
    """Return a step column ``[B, T]`` in a shape that broadcasts to a column of units."""
    return column if units.ndim == 2 else column[..., None]


def _flatten_column(column: Tensor, units: Tensor) -> Tensor:
    """Return a column of steps, actions or units as ``[B, U]``; a column ``[B]`` is unchanged."""
    if column.ndim == 1:
        return column
    if units.ndim == 3:
        column = column if column.ndim > 2 else column[..., None]
        column = column.repeat_interleave(units.shape[2] // column.shape[2], 2)
    return column.flatten(1)
