"""What a sample leaves to the same one of the next iteration: an episode that is still open.

It is in the context of a trajectory when that comes from its environment; the rollout stage keeps
it apart, as records of their own, for nobody else has a use for it.
"""

from __future__ import annotations

from rlinf.data.record import Record

OPEN = "open"
"""The channel of these records, and the input of the rollout that takes those of the one before."""
STATE, MEASURED = "open_state", "open_measured"
"""What it takes to go on, uint8 ``[n]`` (its environment knows how to read it), and what was
measured of the episode so far, float64 ``[m]``."""


def taken_out(trajectory: Record) -> Record | None:
    """What a trajectory leaves open, which it then has no more; None: nothing."""
    if STATE not in trajectory.context:
        return None
    left = {name: trajectory.context.pop(name) for name in (STATE, MEASURED)}
    return Record(trajectory.identity, context=left)
