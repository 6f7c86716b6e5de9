"""The steps of a trajectory that count: those the policy chose and is to be judged by.

A trajectory may hold other steps too (what a tool said, what came after the end of an episode).
Its step column ``mask`` is 0 there; without that column all steps count.
"""

from __future__ import annotations

import numpy as np

from rlinf.data.record import Record


def counted(trajectory: Record) -> np.ndarray:
    """Which steps count, bool ``[T]``."""
    if "mask" not in trajectory.steps:
        return np.ones(len(trajectory), dtype=bool)
    return np.asarray(trajectory.steps["mask"]) != 0


def credited(rewards: np.ndarray, counts: np.ndarray) -> np.ndarray:
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
