"""Episodes within a trajectory: outcomes, carry-over, interventions and instructions.

A simulator's trajectory may hold several episodes, one after another.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlinf.data.loss_mask import loss_mask
from rlinf.data.record import Record, RecordId
from rlinf.data.transitions import (
    FINAL_OBSERVATIONS,
    INTERVENED,
    TRUNCATION_STEPS,
    executed_actions,
)
from rlinf.errors import InputError

OUTCOME_STEPS, OUTCOMES = "outcome_steps", "outcomes"
"""Context of a simulator's trajectory: the last steps of its episodes, int64 ``[K]`` in order, and
the task's score of each, float64 ``[K]``. An episode that the simulator lost has no entry. An
episode that is still open at the end has one if the trajectory has no other and the episode does
not continue in the next iteration: it ran for a full horizon and is scored as far as it got."""


def scored_episodes(trajectory: Record) -> list[tuple[int, float, int]] | None:
    """Return the episodes that have a score. None: the trajectory has no outcomes.

    Returns:
        For each episode its last step, its score, and how many of its steps here count.
    """
    if OUTCOMES not in trajectory.context:
        return None
    counts, episodes, first = loss_mask(trajectory), [], 0
    context = trajectory.context
    for last, score in zip(context[OUTCOME_STEPS], context[OUTCOMES], strict=True):
        episodes.append((int(last), float(score), int(counts[first : last + 1].sum())))
        first = int(last) + 1
    return episodes


def spans_several_episodes(trajectory: Record) -> bool:
    """Return whether counted steps follow the end of an episode.

    A number about the whole trajectory then belongs to no single episode.
    """
    ends = trajectory.context.get(OUTCOME_STEPS, np.zeros(0, np.int64))
    return bool(len(ends) and loss_mask(trajectory)[int(ends[0]) + 1 :].any())


OPEN_EPISODES = "open_episodes"
"""Channel of open episodes; the rollout of the next iteration reads it as an input."""
OPEN_STATE, OPEN_METRICS = "open_state", "open_measured"
"""Context columns: the simulator state to continue from, uint8 ``[n]`` in the environment's own
format, and the episode metrics so far, float64 ``[m]``."""


def pop_open_episode(trajectory: Record) -> Record | None:
    """Pop the state of an unfinished episode from the trajectory. Returns None if the episode
    ended.

    The rollout stage stores it in a channel of its own, because no other stage uses it.
    """
    if OPEN_STATE not in trajectory.context:
        return None
    left = {name: trajectory.context.pop(name) for name in (OPEN_STATE, OPEN_METRICS)}
    return Record(trajectory.identity, context=left)


def intervened_episodes(trajectory: Record, first: int = 0) -> Iterator[Record]:
    """The episodes of a trajectory in which a person acted at any step, each a trajectory whose
    ``actions`` are those that were carried out; without those that do not count.

    Args:
        first: number of the first of them, its sample.

    Raises:
        InputError: the trajectory does not say where a person acted.
    """
    steps = trajectory.steps
    for name in (INTERVENED, "terminated", "truncated"):
        if name not in steps:
            raise InputError(
                f"{trajectory.identity}: the trajectory has no {name!r}; it says where a person "
                "acted if its world does (docs/howto/simulators.md, Franka)"
            )
    acted: np.ndarray = np.asarray(steps[INTERVENED]).reshape(len(trajectory), -1).max(1) != 0
    counts, done = loss_mask(trajectory), executed_actions(trajectory)
    cuts = np.asarray(trajectory.context[TRUNCATION_STEPS], np.int64)
    ended = (np.asarray(steps["terminated"]) != 0) | (np.asarray(steps["truncated"]) != 0)
    ends = np.flatnonzero(ended) + 1
    start = 0
    for end in sorted({*ends.tolist(), len(trajectory)}):
        if acted[start:end].any() and counts[start:end].all():
            mine = (start <= cuts) & (cuts < end)
            # All of its steps count; others of the trajectory may not.
            names = [name for name in steps if name != "mask"]
            kept = {name: np.asarray(steps[name][start:end]) for name in names}
            yield Record(
                RecordId(0, first),
                {**kept, "actions": done[start:end]},
                {
                    TRUNCATION_STEPS: cuts[mine] - start,
                    FINAL_OBSERVATIONS: np.asarray(trajectory.context[FINAL_OBSERVATIONS])[mine],
                },
                dict(trajectory.info),
            )
            first += 1
        start = end


INSTRUCTION_COLUMN = "instruction"
"""Name of the column: UTF-8, filled up with zeros. A simulator may ask for another thing at any
step."""


def decode_instruction(row: np.ndarray) -> str:
    """The text of a row of the column, uint8 ``[N]``."""
    return np.asarray(row, np.uint8).tobytes().rstrip(b"\0").decode()
