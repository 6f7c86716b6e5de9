"""Rollout with dynamic sampling (DAPO, arXiv 2503.14476, eq. 11 and algorithm 1).

The algorithm drops a group if all its samples have the same score, because it has no advantage.
This rollout draws such a group again, from another start, until the group is informative or was
drawn ``rollout.max_resamples`` times more. Each batch index draws independently of the others, so
the result does not depend on how the batch is sharded.
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
    """Input ``weights``; output channel ``trajectories``.

    Raises:
        ConfigError: processes share a copy of the engine's model; they would have to know how often
            the first of them draws.
    """
    if ctx.world.layout.parallel_dims():
        raise ConfigError(
            "plan.stages.rollout.layout: with rollout.max_resamples each process of the rollout "
            "has a model of its own; leave out the layout or rollout.max_resamples"
        )
    counts = Counter[str]()
    emit_trajectories(ctx, lambda ctx, places: resample_groups(ctx, places, counts))
    # Sums over processes.
    ctx.log_metric("resampled_groups", float(counts["resampled_groups"]), weight=0)
    ctx.log_metric("rejected_groups", float(counts["rejected_groups"]), weight=0)


def resample_groups(
    ctx: StageContext, batch_indices: Sequence[int], counts: Counter[str]
) -> Iterator[Trajectory]:
    """Yield a group for each batch index, as soon as one is informative.

    Groups of the last draw are yielded in any case; the reward stage drops uninformative ones.

    Args:
        counts: is updated with ``resampled_groups`` and ``rejected_groups``.
    """
    settings = ctx.config.rollout
    most, pending = settings.max_resamples or 0, list(batch_indices)
    algorithm = create_algorithm(ctx.config)
    for draw in range(most + 1):
        if not pending:
            return
        starts = [place + draw * settings.batch_size for place in pending]
        drawn = generate_trajectories(ctx, starts, num_starts=settings.batch_size * (most + 1))
        # All of them first, because the reward may need the device of the engine.
        groups = group_by_batch_index(list(drawn), settings.batch_size, settings.group_size)
        taught = {place for place in pending if is_informative(ctx, algorithm, groups[place])}
        for place in pending:
            if place in taught or draw == most:
                yield from groups[place]
        pending = [place for place in pending if place not in taught]
        counts["rejected_groups" if draw == most else "resampled_groups"] += len(pending)


def group_by_batch_index(
    trajectories: Sequence[Trajectory], batch: int, group_size: int
) -> dict[int, list[Trajectory]]:
    """Return samples by batch index, numbered as samples of that index, in order."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in sorted(trajectories, key=lambda trajectory: trajectory.identity):
        start, number = divmod(trajectory.identity.sample, group_size)
        place = start % batch
        identity = trajectory.identity._replace(sample=place * group_size + number)
        groups.setdefault(place, []).append(replace(trajectory, identity=identity, group=place))
    return groups


def is_informative(ctx: StageContext, algorithm: Algorithm, group: Sequence[Trajectory]) -> bool:
    """Whether the algorithm keeps any sample of a group, by the run's reward."""
    reward = get_reward(ctx)
    environment = primary_rank_environment(ctx) if reward.needs_score else None
    with ctx.span("score"):
        # The reward stage reports failures.
        batch = compute_rewards(reward, algorithm, environment, group, Counter())
    return any(rewards.is_included for rewards in batch.step_rewards)
