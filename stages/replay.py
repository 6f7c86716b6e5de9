"""Replay: add what was collected to the run's buffer of transitions."""

from __future__ import annotations

import numpy as np

from rlinf.data.batch import join_by_identity
from rlinf.data.trajectory import StepRewards, Trajectory
from rlinf.data.transitions import (
    concatenate_transitions,
    intervention_mask,
    to_transitions,
)
from rlinf.replay.buffer import SPARE_APPENDS, ReplayBuffer
from stages.context import StageContext
from stages.factory import WEIGHTS, create_algorithm, policy_class

REPLAY_FOLDER = "replay"
"""Of the buffer, in the run's directory."""
INTERVENTIONS_FOLDER = "interventions"
"""Below it, of another one: of the transitions in which a person acted, where a share of each batch
is of demonstrations."""


def run(ctx: StageContext) -> None:
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
    for samples in ctx.chunks():
        pairs = join_by_identity(
            ctx.read(Trajectory, "trajectories", samples),
            ctx.read(StepRewards, "rewards", samples),
        )
        for trajectory, reward in pairs:
            helps |= trajectory.intervened is not None
            if reward.is_included:
                parts.append(to_transitions(trajectory, reward.rewards, reward.episode_ends))
                acted.append(intervention_mask(trajectory))
    cls, options = policy_class(ctx.config)
    policy = cls.load(ctx.verified_folder("initial") / WEIGHTS, options)
    rows = concatenate_transitions(parts) if parts else np.zeros(0, policy.transition_dtype)
    with ctx.span("append"):
        buffer = open_replay_buffer(ctx, policy.transition_dtype)
        added = buffer.append(ctx.iteration, rows)
        appended = [added]
        if helps and create_algorithm(ctx.config).uses_offline_data:
            by_people = rows[np.concatenate(acted)] if acted else rows
            appended.append(
                open_replay_buffer(ctx, policy.transition_dtype, INTERVENTIONS_FOLDER).append(
                    ctx.iteration, by_people
                )
            )
            ctx.log_metric("interventions", appended[-1].stop)
    ctx.log_metric("added", len(rows))
    ctx.log_metric("size", min(added.stop, buffer.capacity))
    ctx.log_metric("total", added.stop)
    for name in ("terminated", "truncated"):
        ctx.log_metric(name, float(rows[name].sum()))
    # Its checksum makes the content of this stage that of the rows.
    lines = [f"{each.start} {each.stop} {each.checksum}\n" for each in appended]
    (ctx.data_folder / "added.txt").write_text("".join(lines))


def open_replay_buffer(ctx: StageContext, dtype: np.dtype, below: str = "") -> ReplayBuffer:
    """The run's buffer, or the one :data:`INTERVENTIONS_FOLDER`, for rows of this type.

    Raises:
        DataError: it is damaged, or of another schema.
    """
    settings = ctx.config.rollout
    return ReplayBuffer(
        ctx.run_folder / REPLAY_FOLDER / below,
        dtype,
        capacity=create_algorithm(ctx.config).replay_capacity,
        max_append=settings.batch_size * settings.group_size * settings.horizon,
        spare=SPARE_APPENDS + settings.staleness,
    )
