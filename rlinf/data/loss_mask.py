"""Loss masks: the steps of a trajectory that the policy chose and is trained on.

A trajectory also holds other steps, such as the output of a tool or steps after the end of an
episode. Its column ``mask`` is 0 there; without that column all steps count. Where a step consists
of several choices (tokens of an action, actions of a chunk), ``choice_mask`` marks those that
count.
"""

from __future__ import annotations

import numpy as np

from rlinf.data.trajectory import Trajectory


def loss_mask(trajectory: Trajectory) -> np.ndarray:
    """Return the steps that count, bool ``[T]``."""
    counts = np.ones(len(trajectory), dtype=bool)
    if trajectory.mask is not None:
        counts &= np.asarray(trajectory.mask) != 0
    if trajectory.choice_mask is not None:
        counts &= np.asarray(trajectory.choice_mask).reshape(len(trajectory), -1).any(1)
    return counts


def masked_logprobs(trajectory: Trajectory, column: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of choices that count, flat, from a column ``[T]`` or ``[T,
    ...]``."""
    values: np.ndarray = column[loss_mask(trajectory)]
    if trajectory.choice_mask is not None:
        values = values[np.asarray(trajectory.choice_mask)[loss_mask(trajectory)] != 0]
    return values.ravel()


def action_mask(trajectory: Trajectory) -> np.ndarray | None:
    """Return the actions of chunks that count, bool ``[T, C]``. None: steps are no chunks."""
    if trajectory.num_executed is None:
        return None
    place = np.arange(trajectory.actions.shape[1])
    there: np.ndarray = place < np.asarray(trajectory.num_executed)[:, None]
    return there & loss_mask(trajectory)[:, None]


def place_on_last_action(rewards: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Place the reward of each chunk, ``[T]``, on the last of its actions that counts.

    The reward results from everything that was done in the chunk.

    Args:
        rewards: ``[T]``.
        actions: :func:`action_mask`, ``[T, C]``. A chunk without a counted action uses its first
            one.

    Returns:
        ``[T, C]``.
    """
    last = np.maximum(actions.sum(1) - 1, 0)
    placed: np.ndarray = rewards[:, None] * (np.arange(actions.shape[1]) == last[:, None])
    return placed


def move_rewards_to_actions(rewards: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Move rewards to steps that count; their sum stays the same.

    The reward of a masked step goes to the last counted step before it, which led there. Rewards
    before the first counted step go to that step.

    Args:
        rewards: ``[T]``.
        counts: bool ``[T]``, true at least once.

    Returns:
        float32 ``[T]``.
    """
    places = np.flatnonzero(counts)
    # Of each step the number of the choice that it follows.
    owner = np.maximum(np.cumsum(counts) - 1, 0)
    moved = np.zeros(len(rewards))
    np.add.at(moved, places[owner], np.asarray(rewards, np.float64))
    return moved.astype(np.float32)
