"""Episodes in which a person acted in the place of the policy, as demonstrations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlinf.data.counted import counted
from rlinf.data.record import Identity, Record
from rlinf.data.transitions import (
    CUT_OBSERVATIONS,
    CUT_STEPS,
    INTERVENED,
    carried_out,
)
from rlinf.errors import InputError


def helped(trajectory: Record, first: int = 0) -> Iterator[Record]:
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
                "acted if its world does (docs/simulators.md, Franka)"
            )
    acted: np.ndarray = np.asarray(steps[INTERVENED]).reshape(len(trajectory), -1).max(1) != 0
    counts, done = counted(trajectory), carried_out(trajectory)
    cuts = np.asarray(trajectory.context[CUT_STEPS], np.int64)
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
                Identity(0, first),
                {**kept, "actions": done[start:end]},
                {
                    CUT_STEPS: cuts[mine] - start,
                    CUT_OBSERVATIONS: np.asarray(trajectory.context[CUT_OBSERVATIONS])[mine],
                },
                dict(trajectory.info),
            )
            first += 1
        start = end
