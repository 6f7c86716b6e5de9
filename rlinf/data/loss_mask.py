"""The steps of a trajectory that count: those the policy chose and is to be judged by.

A trajectory may hold other steps too (what a tool said, what came after the end of an episode).
Its step column ``mask`` is 0 there; without that column all steps count. Where a step is several
choices (tokens of an action, actions of a chunk), ``submask`` says which of them count.
"""

from __future__ import annotations

import numpy as np

from rlinf.data.record import Record


def loss_mask(trajectory: Record) -> np.ndarray:
    """Which steps count, bool ``[T]``."""
    counts = np.ones(len(trajectory), dtype=bool)
    if "mask" in trajectory.steps:
        counts &= np.asarray(trajectory.steps["mask"]) != 0
    if "submask" in trajectory.steps:
        submask = np.asarray(trajectory.steps["submask"])
        counts &= submask.reshape(len(trajectory), -1).any(1)
    return counts


def masked_logprobs(trajectory: Record, column: np.ndarray) -> np.ndarray:
    """What of a column of log-probabilities, ``[T]`` or ``[T, ...]``, counts, one after another."""
    values: np.ndarray = column[loss_mask(trajectory)]
    if "submask" in trajectory.steps:
        values = values[np.asarray(trajectory.steps["submask"])[loss_mask(trajectory)] != 0]
    return values.ravel()


def action_mask(trajectory: Record) -> np.ndarray | None:
    """Of steps that are chunks of actions which of those count, bool ``[T, C]``; None: they are
    not chunks."""
    if "executed" not in trajectory.steps:
        return None
    place = np.arange(trajectory.steps["actions"].shape[1])
    there: np.ndarray = place < np.asarray(trajectory.steps["executed"])[:, None]
    return there & loss_mask(trajectory)[:, None]


def place_on_last_action(rewards: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """What each chunk is worth, ``[T]``, on the last of its actions that counts: it came of all
    that was done in the chunk.

    Args:
        actions: :func:`action_mask`, ``[T, C]``; of a chunk without one it is the first.

    Returns:
        ``[T, C]``.
    """
    last = np.maximum(actions.sum(1) - 1, 0)
    placed: np.ndarray = rewards[:, None] * (np.arange(actions.shape[1]) == last[:, None])
    return placed


def move_rewards_to_actions(rewards: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Rewards on steps that count alone; their sum is the same.

    What a step that does not count was given goes to the last step before it that does: the choice
    that led there. What comes before the first choice goes to that one.

    Args:
        rewards: ``[T]``.
        counts: bool ``[T]``, true somewhere.

    Returns:
        float32 ``[T]``.
    """
    places = np.flatnonzero(counts)
    # Of each step the number of the choice that it follows.
    owner = np.maximum(np.cumsum(counts) - 1, 0)
    moved = np.zeros(len(rewards))
    np.add.at(moved, places[owner], np.asarray(rewards, np.float64))
    return moved.astype(np.float32)
