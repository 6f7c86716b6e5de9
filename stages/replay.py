"""Replay: add what was collected to the run's buffer of transitions."""

from __future__ import annotations

import numpy as np

from rlinf.data.batch import join
from rlinf.data.transitions import ENDS, concatenated, transitions_of
from rlinf.replay.buffer import SPARE, ReplayBuffer
from stages.context import Context
from stages.parts import WEIGHTS, make_algorithm, policy_class

FOLDER = "replay"
"""Of the buffer, in the run's directory."""


def run(ctx: Context) -> None:
    """Inputs ``trajectories``, ``rewards``, ``initial``, and after the first iteration ``replay``,
    what the one before added.

    Output: the metrics alone; the rows are in the buffer, synced before this commits.

    Raises:
        InputError: they are no trajectories of a simulator.
        DataError: the buffer is damaged, of another schema, or lacks what was added before.
    """
    if ctx.world.rank:
        return
    parts = []
    for samples in ctx.parts():
        pairs = join(ctx.records("trajectories", samples), ctx.records("rewards", samples))
        parts += [
            transitions_of(trajectory, reward.steps["rewards"], reward.steps.get(ENDS))
            for trajectory, reward in pairs
            if reward.info["keep"]
        ]
    cls, options = policy_class(ctx.config)
    policy = cls.load(ctx.verified("initial") / WEIGHTS, options)
    rows = concatenated(parts) if parts else np.zeros(0, policy.rows)
    with ctx.span("append"):
        buffer = replay_buffer(ctx, policy.rows)
        added = buffer.append(ctx.iteration, rows)
    ctx.metric("added", len(rows))
    ctx.metric("held", min(added.stop, buffer.capacity))
    ctx.metric("total", added.stop)
    for name in ("terminated", "truncated"):
        ctx.metric(name, float(rows[name].sum()))
    # Its checksum makes the content of this stage that of the rows.
    (ctx.data / "added.txt").write_text(f"{added.start} {added.stop} {added.checksum}\n")


def replay_buffer(ctx: Context, dtype: np.dtype) -> ReplayBuffer:
    """The run's buffer, for rows of this type.

    Raises:
        DataError: it is damaged, or of another schema.
    """
    settings = ctx.config.rollout
    return ReplayBuffer(
        ctx.run / FOLDER,
        dtype,
        capacity=make_algorithm(ctx.config).capacity,
        most=settings.batch * settings.group_size * settings.horizon,
        spare=SPARE + settings.staleness,
    )
