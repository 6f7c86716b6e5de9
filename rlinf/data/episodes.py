"""Episodes within a trajectory: outcomes, carry-over, interventions and instructions.

A simulator's trajectory may have several episodes, one after another. ``outcomes`` has the score of
each episode, except of episodes that a failure of the simulator interrupted. If the trajectory ends
within an episode, this episode has a score only if it is the only one and does not continue in the
next iteration. It then ran for a full horizon, and has the score that it reached there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory, info_fields, loss_mask, step_fields
from rlinf.data.transitions import executed_actions
from rlinf.errors import InputError


def scored_episodes(trajectory: Trajectory) -> list[tuple[int, float, int]] | None:
    """Return the episodes that have a score. None: the trajectory has no outcomes.

    Returns:
        For each episode the index of its last step, its score, and its number of unmasked steps.
    """
    if trajectory.outcomes is None:
        return None
    mask, episodes, start = loss_mask(trajectory), [], 0
    for last, score in zip(trajectory.require("outcome_steps"), trajectory.outcomes, strict=True):
        episodes.append((int(last), float(score), int(mask[start : last + 1].sum())))
        start = int(last) + 1
    return episodes


def spans_several_episodes(trajectory: Trajectory) -> bool:
    """Return whether unmasked steps follow the end of the first episode, so that statistics of the
    whole trajectory do not belong to a single episode."""
    ends = trajectory.outcome_steps
    if ends is None or not len(ends):
        return False
    return bool(loss_mask(trajectory)[int(ends[0]) + 1 :].any())


OPEN_EPISODES = "open_episodes"
"""Channel of episodes that a rollout did not finish; the next iteration continues them."""
OPEN_STATE, OPEN_METRICS = "open_state", "open_measured"
"""Context columns of a record in ``OPEN_EPISODES``: the state of the simulator, uint8 ``[n]`` in
the environment's own format, and the episode metrics so far, float64 ``[m]``."""


def pop_open_episode(trajectory: Trajectory) -> Record | None:
    """Remove the state of an open episode from the trajectory and return it; None if there is none.

    The rollout stage stores the state in a separate channel, because no other stage uses it.
    """
    if trajectory.open_state is None:
        return None
    columns = {
        OPEN_STATE: trajectory.open_state,
        OPEN_METRICS: trajectory.require("open_metrics"),
    }
    trajectory.open_state = trajectory.open_metrics = None
    return Record(trajectory.identity, context=columns)


def intervened_episodes(trajectory: Trajectory, first_sample: int = 0) -> Iterator[Trajectory]:
    """Yield the episodes in which a person intervened, each as a trajectory.

    ``actions`` are the executed actions. Episodes with masked steps are left out.

    Args:
        first_sample: sample number of the first of these episodes.

    Raises:
        InputError: the trajectory does not record where a person intervened.
    """
    for name in ("intervened", "terminated", "truncated"):
        if getattr(trajectory, name) is None:
            raise InputError(
                f"{trajectory.identity}: the trajectory has no {name!r}; only some simulators "
                "record where a person acted (docs/howto/simulators.md, Franka)"
            )
    intervened: np.ndarray = (
        np.asarray(trajectory.intervened).reshape(len(trajectory), -1).max(1) != 0
    )
    mask, actions = loss_mask(trajectory), executed_actions(trajectory)
    truncation_steps = np.asarray(trajectory.require("truncation_steps"), np.int64)
    final_observations = np.asarray(trajectory.require("final_observations"))
    ended = (np.asarray(trajectory.terminated) != 0) | (np.asarray(trajectory.truncated) != 0)
    ends = np.flatnonzero(ended) + 1
    start = 0
    for end in sorted({*ends.tolist(), len(trajectory)}):
        if intervened[start:end].any() and mask[start:end].all():
            is_inside = (start <= truncation_steps) & (truncation_steps < end)
            # No step of this episode is masked, so it needs no mask.
            steps = trajectory.slice_steps(start, end).to_record().steps
            columns = {name: np.asarray(column) for name, column in steps.items() if name != "mask"}
            yield Trajectory(
                identity=RecordId(0, first_sample),
                **step_fields({**columns, "actions": actions[start:end]}),
                truncation_steps=truncation_steps[is_inside] - start,
                final_observations=final_observations[is_inside],
                **info_fields(trajectory.scalars()),
            )
            first_sample += 1
        start = end


INSTRUCTION_COLUMN = "instruction"
"""Column of instructions: UTF-8, uint8 ``[N]`` padded with zeros. An instruction may change at any
step of an episode."""


def decode_instruction(row: np.ndarray) -> str:
    """Return the text of a row of the column, uint8 ``[N]``."""
    return np.asarray(row, np.uint8).tobytes().rstrip(b"\0").decode()
