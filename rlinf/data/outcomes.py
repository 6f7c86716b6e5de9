"""What came of the episodes in a trajectory: a simulator's may hold several, one after another."""

from __future__ import annotations

import numpy as np

from rlinf.data.counted import counted
from rlinf.data.record import Record

OUTCOME_STEPS, OUTCOMES = "outcome_steps", "outcomes"
"""Context of a simulator's trajectory: the last steps of its episodes, int64 ``[K]`` in order, and
the task's score of each, float64 ``[K]``. An episode that the simulator lost has none. One that is
still open at the end has one where no other has, and only if it does not go on in the next
iteration: it was played for a whole horizon then, and is judged as far as it came."""


def episodes_judged(trajectory: Record) -> list[tuple[int, float, int]] | None:
    """The episodes that have a score; None: the trajectory does not say.

    Returns:
        Of each its last step, its score, and how many of its steps are here and count.
    """
    if OUTCOMES not in trajectory.context:
        return None
    counts, found, first = counted(trajectory), [], 0
    context = trajectory.context
    for last, score in zip(context[OUTCOME_STEPS], context[OUTCOMES], strict=True):
        found.append((int(last), float(score), int(counts[first : last + 1].sum())))
        first = int(last) + 1
    return found


def one_number_is_of_several(trajectory: Record) -> bool:
    """Whether steps that count come after the end of an episode: what is said of the whole
    trajectory is of no single episode then."""
    judged = trajectory.context.get(OUTCOME_STEPS, np.zeros(0, np.int64))
    return bool(len(judged) and counted(trajectory)[int(judged[0]) + 1 :].any())
