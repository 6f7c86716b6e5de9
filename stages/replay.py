"""Replay: add the collected transitions to the run's replay buffer."""

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
"""Folder of the replay buffer in the run folder."""
INTERVENTIONS_FOLDER = "interventions"
"""Subfolder with a second buffer: the steps in which a human acted, for algorithms that sample a
share of each batch from demonstrations."""


def run(ctx: StageContext) -> None:
    """Inputs: ``trajectories``, ``rewards``, ``initial``; after the first iteration also
    ``replay``, the output of the previous iteration.

    Output: metrics, and the added ranges of the buffer. The transitions themselves are in the
    buffer, which is on disk before the commit.

    Raises:
        InputError: the trajectories are not from a simulator.
        DataError: the buffer is damaged, has another schema, or lacks earlier transitions.
    """
    if ctx.world.rank:
        return
    parts, masks, has_interventions = [], [], False
    for samples in ctx.chunks():
        pairs = join_by_identity(
            ctx.read(Trajectory, "trajectories", samples),
            ctx.read(StepRewards, "rewards", samples),
        )
        for trajectory, reward in pairs:
            has_interventions |= trajectory.intervened is not None
            if reward.is_included:
                parts.append(to_transitions(trajectory, reward.rewards, reward.episode_ends))
                masks.append(intervention_mask(trajectory))
    cls, options = policy_class(ctx.config)
    policy = cls.load(ctx.verified_folder("initial") / WEIGHTS, options)
    transitions = concatenate_transitions(parts) if parts else np.zeros(0, policy.transition_dtype)
    with ctx.span("append"):
        buffer = open_replay_buffer(ctx, policy.transition_dtype)
        added = buffer.append(ctx.iteration, transitions)
        added_ranges = [added]
        if has_interventions and create_algorithm(ctx.config).uses_offline_data:
            interventions = transitions[np.concatenate(masks)] if masks else transitions
            added_ranges.append(
                open_replay_buffer(ctx, policy.transition_dtype, INTERVENTIONS_FOLDER).append(
                    ctx.iteration, interventions
                )
            )
            ctx.log_metric("interventions", added_ranges[-1].stop)
    ctx.log_metric("added", len(transitions))
    ctx.log_metric("size", min(added.stop, buffer.capacity))
    ctx.log_metric("total", added.stop)
    for name in ("terminated", "truncated"):
        ctx.log_metric(name, float(transitions[name].sum()))
    # With the checksums, the content digest of this stage depends on the transitions.
    lines = [f"{range_.start} {range_.stop} {range_.checksum}\n" for range_ in added_ranges]
    (ctx.data_folder / "added.txt").write_text("".join(lines))


def open_replay_buffer(ctx: StageContext, dtype: np.dtype, subfolder: str = "") -> ReplayBuffer:
    """Open the run's replay buffer, or that in ``subfolder``, for transitions of this dtype.

    Raises:
        DataError: the buffer is damaged or has another schema.
    """
    settings = ctx.config.rollout
    return ReplayBuffer(
        ctx.run_folder / REPLAY_FOLDER / subfolder,
        dtype,
        capacity=create_algorithm(ctx.config).replay_capacity,
        max_append=settings.batch_size * settings.group_size * settings.horizon,
        spare=SPARE_APPENDS + settings.staleness,
    )
