"""The level at which log-probabilities are compared: sub-actions, actions, or steps.

A step may consist of several choices: the tokens of an action, or a chunk of actions of several
tokens or dimensions each. Its log-probabilities are then ``[B, T, K]`` for the ``K`` tokens of one
action, or ``[B, T, C, D]`` for ``C`` actions of ``D``. This module alone sums those below the
level. The results are the units of a loss, ``[B, U]`` including the mask. Columns of steps, such as
advantages, and columns of actions apply to each of their units.

The trajectory's ``choice_mask`` is 0 at sub-actions that do not count.
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
    """Return log-probabilities or entropies of units, ``[B, T]`` or several per step: ``[B, T,
    K]``.

    Args:
        values: ``[B, T]``, which are units at any level, ``[B, T, K]`` or ``[B, T, C, D]``.
        choice_mask: of the same shape, 0 where a value does not count; None: all count.
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
    """Return a batch whose log-probabilities are those of units, with the loss mask of the
    units."""
    columns = ("old_logprobs", "rollout_logprobs", "reference_logprobs")
    values = {name: column for name in columns if (column := getattr(batch, name)) is not None}
    reduced_columns = {
        name: sum_to_level(column, batch.choice_mask, level) for name, column in values.items()
    }
    units = batch.mask
    if batch.choice_mask is not None:
        # A unit counts if any of its parts counts.
        units = (sum_to_level((batch.choice_mask != 0).float(), None, level) > 0).to(
            batch.mask.dtype
        )
    if units.ndim < reduced_columns["old_logprobs"].ndim:
        units = units[..., None].expand(reduced_columns["old_logprobs"].shape)
    # Rewards per action are dropped if a unit is larger than an action.
    of_actions = batch.action_rewards
    if of_actions is not None and not _within(units, of_actions):
        of_actions = None
    return replace(
        batch,
        loss_mask=_over(batch.mask, units) * units,
        action_rewards=of_actions,
        **reduced_columns,
    )


def mask_like(batch: StepBatch, column: Tensor) -> Tensor:
    """Return 1 where an entry of a column counts, for a batch of :func:`batch_at_level`.

    Args:
        column: of steps, ``[N, T]``, or of the actions of chunks, ``[N, T, C]``. These actions are
            units or consist of units.

    Raises:
        InputError: a unit is larger than an action.
    """
    if column.ndim == 2:
        return batch.mask
    if not _within(units := batch.require("loss_mask"), column):
        raise InputError(
            "the policy values each action of a chunk, and several actions have one ratio; set "
            "algorithm.logprob_level to action (token, where the policy gives one log-probability "
            "for each action)"
        )
    return units.reshape(*column.shape, -1).amax(-1)


def flatten_to_level(
    outputs: StepOutputs, batch: StepBatch, weights: Tensor, level: LogprobLevel
) -> tuple[StepOutputs, StepBatch, Tensor]:
    """Flatten outputs, batch and weights to units ``[B, U]``, for a batch of
    :func:`batch_at_level`.

    Args:
        weights: of the units, ``[B, T]`` or ``[B, T, K]``.
    """
    logprobs = sum_to_level(outputs.logprobs, batch.choice_mask, level)
    entropy = (
        None if outputs.entropy is None else sum_to_level(outputs.entropy, batch.choice_mask, level)
    )
    columns = {
        field.name: _flat(value, logprobs)
        for field in fields(batch)
        if (value := getattr(batch, field.name)) is not None and field.name != "choice_mask"
    }
    values = None if outputs.values is None else _flat(outputs.values, logprobs)
    unit_outputs = StepOutputs(
        logprobs.flatten(1), None if entropy is None else entropy.flatten(1), values
    )
    columns["mask"] = columns["loss_mask"]
    return unit_outputs, replace(batch, choice_mask=None, **columns), weights.flatten(1)


def _within(units: Tensor, column: Tensor) -> bool:
    """Return whether each action of a column ``[N, T, C]`` is a unit or consists of several."""
    return units.ndim > 2 and units.shape[2] % column.shape[2] == 0


def _over(column: Tensor, units: Tensor) -> Tensor:
    """Return a column of steps ``[B, T]`` that broadcasts to one of units."""
    return column if units.ndim == 2 else column[..., None]


def _flat(column: Tensor, units: Tensor) -> Tensor:
    """Return a column of samples unchanged, and one of steps, actions or units as ``[B, U]``."""
    if column.ndim == 1:
        return column
    if units.ndim == 3:
        column = column if column.ndim > 2 else column[..., None]
        column = column.repeat_interleave(units.shape[2] // column.shape[2], 2)
    return column.flatten(1)
