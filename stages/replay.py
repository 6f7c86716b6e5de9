"""Replay: add what was collected to the run's buffer of transitions."""

from __future__ import annotations

import numpy as np

from rlinf.data.batch import join
from rlinf.data.transitions import ENDS, INTERVENED, acted_in, concatenated, transitions_of
from rlinf.replay.buffer import SPARE, ReplayBuffer
from stages.context import Context
from stages.parts import WEIGHTS, make_algorithm, policy_class

FOLDER = "replay"
"""Of the buffer, in the run's directory."""
HELPED = "helped"
"""Below it, of another one: of the transitions in which a person acted, where a share of each batch
is of demonstrations."""


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
    parts, acted, helps = [], [], False
    for samples in ctx.parts():
        pairs = join(ctx.records("trajectories", samples), ctx.records("rewards", samples))
        for trajectory, reward in pairs:
            helps |= INTERVENED in trajectory.steps
            if reward.info["keep"]:
                given, ends = reward.steps["rewards"], reward.steps.get(ENDS)
                parts.append(transitions_of(trajectory, given, ends))
                acted.append(acted_in(trajectory))
    cls, options = policy_class(ctx.config)
    policy = cls.load(ctx.verified("initial") / WEIGHTS, options)
    rows = concatenated(parts) if parts else np.zeros(0, policy.rows)
    with ctx.span("append"):
        buffer = replay_buffer(ctx, policy.rows)
        added = buffer.append(ctx.iteration, rows)
        said = [added]
        if helps and make_algorithm(ctx.config).draws_prior:
            by_people = rows[np.concatenate(acted)] if acted else rows
            said.append(replay_buffer(ctx, policy.rows, HELPED).append(ctx.iteration, by_people))
            ctx.metric("helped", said[-1].stop)
    ctx.metric("added", len(rows))
    ctx.metric("held", min(added.stop, buffer.capacity))
    ctx.metric("total", added.stop)
    for name in ("terminated", "truncated"):
        ctx.metric(name, float(rows[name].sum()))
    # Its checksum makes the content of this stage that of the rows.
    lines = [f"{each.start} {each.stop} {each.checksum}\n" for each in said]
    (ctx.data / "added.txt").write_text("".join(lines))


def replay_buffer(ctx: Context, dtype: np.dtype, below: str = "") -> ReplayBuffer:
    """The run's buffer, or the one :data:`HELPED`, for rows of this type.

    Raises:
        DataError: it is damaged, or of another schema.
    """
    settings = ctx.config.rollout
    return ReplayBuffer(
        ctx.run / FOLDER / below,
        dtype,
        capacity=make_algorithm(ctx.config).capacity,
        most=settings.batch * settings.group_size * settings.horizon,
        spare=SPARE + settings.staleness,
    )
