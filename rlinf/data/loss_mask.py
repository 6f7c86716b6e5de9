"""Loss masks: the steps of a trajectory that the policy chose and is trained on.

A trajectory also has other steps, such as the output of a tool or steps after the end of an
episode. Its column ``mask`` is 0 there; without that column the mask is 1 everywhere. If a step has
several parts (tokens of an action, actions of a chunk), ``choice_mask`` is the mask of the parts.
"""

from __future__ import annotations

import numpy as np

from rlinf.data.trajectory import Trajectory


def loss_mask(trajectory: Trajectory) -> np.ndarray:
    """Return the loss mask of the steps, bool ``[T]``."""
    mask = np.ones(len(trajectory), dtype=bool)
    if trajectory.mask is not None:
        mask &= np.asarray(trajectory.mask) != 0
    if trajectory.choice_mask is not None:
        mask &= np.asarray(trajectory.choice_mask).reshape(len(trajectory), -1).any(1)
    return mask


def masked_logprobs(trajectory: Trajectory, column: np.ndarray) -> np.ndarray:
    """Return the unmasked log-probabilities of a column ``[T]`` or ``[T, ...]``, flattened."""
    values: np.ndarray = column[loss_mask(trajectory)]
    if trajectory.choice_mask is not None:
        values = values[np.asarray(trajectory.choice_mask)[loss_mask(trajectory)] != 0]
    return values.ravel()


def action_mask(trajectory: Trajectory) -> np.ndarray | None:
    """Return the loss mask of the actions in chunks, bool ``[T, C]``. None: there are no chunks."""
    if trajectory.num_executed is None:
        return None
    positions = np.arange(trajectory.actions.shape[1])
    is_executed: np.ndarray = positions < np.asarray(trajectory.num_executed)[:, None]
    return is_executed & loss_mask(trajectory)[:, None]


def place_on_last_action(rewards: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Place the reward of each chunk, ``[T]``, on its last unmasked action.

    The reward results from all actions of the chunk.

    Args:
        rewards: ``[T]``.
        actions: :func:`action_mask`, ``[T, C]``. A chunk without unmasked action uses its
            first action.

    Returns:
        ``[T, C]``.
    """
    last = np.maximum(actions.sum(1) - 1, 0)
    placed: np.ndarray = rewards[:, None] * (np.arange(actions.shape[1]) == last[:, None])
    return placed


def move_rewards_to_actions(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Move rewards to unmasked steps; their sum stays the same.

    The reward of a masked step goes to the last unmasked step before it, which led there. Rewards
    before the first unmasked step go to that step.

    Args:
        rewards: ``[T]``.
        mask: bool ``[T]``, true at unmasked steps, of which there must be one.

    Returns:
        float32 ``[T]``.
    """
    unmasked = np.flatnonzero(mask)
    # For each step, the index of the last unmasked step up to it.
    target = np.maximum(np.cumsum(mask) - 1, 0)
    moved = np.zeros(len(rewards))
    np.add.at(moved, unmasked[target], np.asarray(rewards, np.float64))
    return moved.astype(np.float32)
