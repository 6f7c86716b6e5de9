"""The level at which log-probabilities are compared: of sub-actions, of actions, or of steps.

A step may be several choices: the tokens of an action, or a chunk of actions of several tokens or
dimensions each. Its log-probabilities are ``[B, T, K]`` then for the ``K`` tokens of one action, or
``[B, T, C, D]`` for ``C`` actions of ``D``. Those below the level are added up, here and nowhere
else; what remains are the units of a loss, which has ``[B, U]`` of them, the mask included. Columns
of steps, such as advantages, hold for each unit of theirs, and so do columns of actions.

The trajectory's step column ``submask`` is 0 at sub-actions that do not count.
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


def sum_to_level(values: Tensor, submask: Tensor | None, level: LogprobLevel) -> Tensor:
    """Log-probabilities or entropies of units, ``[B, T]`` or several of a step: ``[B, T, K]``.

    Args:
        values: ``[B, T]``, which is of units at any level, ``[B, T, K]`` or ``[B, T, C, D]``.
        submask: of the same shape, 0 where a value does not count; None: all do.
        level: ``token``: each is a unit; ``action``: their sum over the last dimension is;
            ``chunk``: that of the whole step.
    """
    if values.ndim == 2:
        return values
    if submask is not None:
        values = torch.where(submask != 0, values, 0.0)
    if level == "chunk":
        return values.flatten(2).sum(-1)
    if level == "action":
        values = values.sum(-1)
    return values.flatten(2) if values.ndim > 2 else values


def batch_at_level(batch: StepBatch, level: LogprobLevel) -> StepBatch:
    """A batch whose log-probabilities are of units, with a mask of those."""
    columns = ("old_logprobs", "rollout_logprobs", "reference_logprobs")
    values = {name: column for name in columns if (column := getattr(batch, name)) is not None}
    made = {name: sum_to_level(column, batch.submask, level) for name, column in values.items()}
    units = batch.mask
    if batch.submask is not None:
        # A unit counts where any of its parts does.
        units = (sum_to_level((batch.submask != 0).float(), None, level) > 0).to(batch.mask.dtype)
    if units.ndim < made["old_logprobs"].ndim:
        units = units[..., None].expand(made["old_logprobs"].shape)
    # Where a unit is more than an action, nothing is of actions.
    of_actions = batch.action_rewards
    if of_actions is not None and not _within(units, of_actions):
        of_actions = None
    return replace(
        batch, loss_mask=_over(batch.mask, units) * units, action_rewards=of_actions, **made
    )


def mask_like(batch: StepBatch, column: Tensor) -> Tensor:
    """1 where an entry of a column counts, of a batch of :func:`batch_at_level`.

    Args:
        column: of steps, ``[N, T]``, or of the actions of chunks, ``[N, T, C]``, which are units at
            the level or consist of them.

    Raises:
        InputError: units are larger than that.
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
    """The same as units ``[B, U]`` throughout, of a batch of :func:`batch_at_level`.

    Args:
        weights: of the units, ``[B, T]`` or ``[B, T, K]``.
    """
    logprobs = sum_to_level(outputs.logprobs, batch.submask, level)
    entropy = (
        None if outputs.entropy is None else sum_to_level(outputs.entropy, batch.submask, level)
    )
    columns = {
        field.name: _flat(value, logprobs)
        for field in fields(batch)
        if (value := getattr(batch, field.name)) is not None and field.name != "submask"
    }
    values = None if outputs.values is None else _flat(outputs.values, logprobs)
    said = StepOutputs(logprobs.flatten(1), None if entropy is None else entropy.flatten(1), values)
    columns["mask"] = columns["loss_mask"]
    return said, replace(batch, submask=None, **columns), weights.flatten(1)


def _within(units: Tensor, column: Tensor) -> bool:
    """Whether each action of a column ``[N, T, C]`` is a unit, or several."""
    return units.ndim > 2 and units.shape[2] % column.shape[2] == 0


def _over(column: Tensor, units: Tensor) -> Tensor:
    """A column of steps ``[B, T]`` that can be multiplied with one of units."""
    return column if units.ndim == 2 else column[..., None]


def _flat(column: Tensor, units: Tensor) -> Tensor:
    """A column of samples as it is, one of steps, actions or units as ``[B, U]``."""
    if column.ndim == 1:
        return column
    if units.ndim == 3:
        column = column if column.ndim > 2 else column[..., None]
        column = column.repeat_interleave(units.shape[2] // column.shape[2], 2)
    return column.flatten(1)
