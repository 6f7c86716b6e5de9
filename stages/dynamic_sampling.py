"""Rollout with dynamic sampling (DAPO, arXiv 2503.14476, eq. 11 and algorithm 1).

The algorithm drops a group if all its samples have the same score, because their advantages are 0.
This rollout replaces such a group by a group from another start, at most ``rollout.max_resamples``
times. A *batch index* is the place of a group in the batch. Groups of different indices are
resampled independently, so the result does not depend on how the batch is sharded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlinf.algorithms.base import Algorithm
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError
from stages.context import StageContext
from stages.factory import create_algorithm, get_reward, primary_rank_environment
from stages.reward import compute_rewards
from stages.rollout import emit_trajectories, generate_trajectories, policy_runner

__all__ = ["group_by_batch_index", "is_informative", "policy_runner", "resample_groups", "run"]


def run(ctx: StageContext) -> None:
    """Input: ``weights``. Output channel: ``trajectories``.

    Raises:
        ConfigError: the engine is sharded. Only the primary rank of a replica would know how often
            it must generate.
    """
    if ctx.world.layout.parallel_dims():
        raise ConfigError(
            "plan.stages.rollout.layout: with rollout.max_resamples each process of the rollout "
            "has a model of its own; leave out the layout or rollout.max_resamples"
        )
    counts = Counter[str]()
    emit_trajectories(ctx, lambda ctx, batch_indices: resample_groups(ctx, batch_indices, counts))
    # Sums over processes.
    ctx.log_metric("resampled_groups", float(counts["resampled_groups"]), weight=0)
    ctx.log_metric("rejected_groups", float(counts["rejected_groups"]), weight=0)


def resample_groups(
    ctx: StageContext, batch_indices: Sequence[int], counts: Counter[str]
) -> Iterator[Trajectory]:
    """Yield the samples of one group for each batch index, once an informative group is found.

    Groups of the last draw are always yielded; the reward stage drops uninformative groups.

    Args:
        counts: updated with ``resampled_groups`` (replaced) and ``rejected_groups`` (uninformative
            in the last draw).
    """
    settings = ctx.config.rollout
    max_resamples, pending = settings.max_resamples or 0, list(batch_indices)
    algorithm = create_algorithm(ctx.config)
    for draw in range(max_resamples + 1):
        if not pending:
            return
        starts = [index + draw * settings.batch_size for index in pending]
        trajectories = generate_trajectories(
            ctx, starts, num_starts=settings.batch_size * (max_resamples + 1)
        )
        # Generate all groups first, because the reward may need the device of the engine.
        groups = group_by_batch_index(list(trajectories), settings.batch_size, settings.group_size)
        informative = {index for index in pending if is_informative(ctx, algorithm, groups[index])}
        for index in pending:
            if index in informative or draw == max_resamples:
                yield from groups[index]
        pending = [index for index in pending if index not in informative]
        counts["rejected_groups" if draw == max_resamples else "resampled_groups"] += len(pending)


def group_by_batch_index(
    trajectories: Sequence[Trajectory], batch_size: int, group_size: int
) -> dict[int, list[Trajectory]]:
    """Return the samples by batch index, ordered and renumbered by their places in the batch."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in sorted(trajectories, key=lambda trajectory: trajectory.identity):
        start, number = divmod(trajectory.identity.sample, group_size)
        index = start % batch_size
        identity = trajectory.identity._replace(sample=index * group_size + number)
        groups.setdefault(index, []).append(replace(trajectory, identity=identity, group=index))
    return groups


def is_informative(ctx: StageContext, algorithm: Algorithm, group: Sequence[Trajectory]) -> bool:
    """Return whether the algorithm includes any sample of a group in the loss."""
    reward = get_reward(ctx)
    environment = primary_rank_environment(ctx) if reward.needs_score else None
    with ctx.span("score"):
        # The reward stage reports failures.
        batch = compute_rewards(reward, algorithm, environment, group, Counter())
    return any(rewards.is_included for rewards in batch.step_rewards)
