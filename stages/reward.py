"""Reward: score trajectories, assign rewards to steps, and select the trainable samples."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlinf.algorithms.base import Algorithm
from rlinf.data.trajectory import StepRewards, Trajectory, loss_mask
from rlinf.envs.base import Environment, score_trajectories
from rlinf.rewards.base import Reward, rewards_per_step
from stages.context import StageContext
from stages.evaluate import scores_by_task
from stages.factory import WEIGHTS, create_algorithm, get_environment, get_reward


class RewardBatch(NamedTuple):
    """The rewards of ``N`` trajectories."""

    task_scores: list[float]
    """``N`` scores of the task; empty if the reward does not need them."""
    step_rewards: list[StepRewards]
    reward_sums: np.ndarray
    """``[N]``: sum of the rewards of each trajectory."""
    group_ids: np.ndarray
    """``[N]``: group of each trajectory."""
    valid: np.ndarray
    """Bool ``[N]``: whether the trajectory has a reward and at least one unmasked step."""


def compute_rewards(
    reward: Reward,
    algorithm: Algorithm,
    environment: Environment | None,
    trajectories: Sequence[Trajectory],
    failure_counts: Counter[str],
) -> RewardBatch:
    """Compute the rewards of complete groups.

    Args:
        environment: computes the scores of the task; None: the reward needs no scores.
        failure_counts: updated with the number of failures by kind.
    """
    scores = list[float]()
    if environment is not None:
        scores = score_trajectories(environment, trajectories, failure_counts)
    # A score is NaN only if the trajectory has no unmasked step.
    results = reward.compute_results(trajectories, np.nan_to_num(scores).tolist())
    rewards = []
    for trajectory, result in zip(trajectories, results, strict=True):
        values, episode_ends = np.asarray(result.reward, np.float32), result.episode_ends
        rewards.append(
            StepRewards(
                identity=trajectory.identity,
                rewards=rewards_per_step(values),
                action_rewards=values if values.ndim > 1 else None,
                episode_ends=None if episode_ends is None else np.asarray(episode_ends, np.uint8),
                group=trajectory.require("group"),
                failure=result.failure if reward.failure_kinds else None,
            )
        )
    failure_counts.update(dict.fromkeys(reward.failure_kinds, 0))
    failure_counts.update(result.failure for result in results if result.failure)
    valid = np.array([result.valid for result in results])
    group_ids = np.array([r.group for r in rewards])
    reward_sums = np.array([r.rewards.sum(dtype=np.float64) for r in rewards])
    # A fully masked trajectory has no gradient and is not part of its group's mean.
    has_steps = np.array([bool(loss_mask(trajectory).any()) for trajectory in trajectories])
    failure_counts["fully_masked"] += int((~has_steps).sum())
    valid &= has_steps
    included = valid.copy()
    # Groups are selected by their rewards without shaping terms, such as a length penalty.
    unshaped = np.array(
        [
            reward_sum if result.raw_reward is None else result.raw_reward
            for reward_sum, result in zip(reward_sums, results, strict=True)
        ]
    )
    included[included] = algorithm.select_samples(unshaped[included], group_ids[included])
    displayed_scores = np.nan_to_num(scores).tolist() or reward_sums.tolist()
    for step_rewards, score, is_included in zip(
        rewards, displayed_scores, included.tolist(), strict=True
    ):
        step_rewards.score, step_rewards.is_included = score, is_included
    return RewardBatch(scores, rewards, reward_sums, group_ids, valid)


def run(ctx: StageContext) -> None:
    """Inputs: ``trajectories`` and ``initial`` (for its tokenizer). Output channel: ``rewards``.

    Each process scores complete groups.
    """
    reward, algorithm = get_reward(ctx), create_algorithm(ctx.config)
    group_size = ctx.config.rollout.group_size
    shard = set(ctx.world.shard(ctx.config.rollout.batch_size))
    output = ctx.open_writer("rewards")

    def tokenizer_folder() -> Path:
        return ctx.inputs["initial"].data_folder / WEIGHTS

    scores = list[float]()
    scores_of_tasks, sums_of_tasks = (defaultdict[str, list[float]](list) for _ in range(2))
    reward_sums, group_ids, included = [], [], list[bool]()
    failure_counts = Counter[str]()
    for samples in ctx.chunks():
        all_trajectories = ctx.read(Trajectory, "trajectories", samples)
        trajectories = [t for t in all_trajectories if t.identity.sample // group_size in shard]
        if not trajectories:
            continue
        environment = get_environment(ctx, tokenizer_folder) if reward.needs_score else None
        with ctx.span("score"):
            batch = compute_rewards(reward, algorithm, environment, trajectories, failure_counts)
        for step_rewards in batch.step_rewards:
            output.put(step_rewards.to_record())
            included.append(step_rewards.is_included)
        scores += [score for score in batch.task_scores if not np.isnan(score)]
        if batch.task_scores:
            for task, task_scores in scores_by_task(trajectories, batch.task_scores).items():
                scores_of_tasks[task] += task_scores
        valid_sums = np.where(batch.valid, batch.reward_sums, np.nan).tolist()
        for task, sums in scores_by_task(trajectories, valid_sums).items():
            sums_of_tasks[task] += sums
        # The means below leave out trajectories without a reward.
        reward_sums.append(batch.reward_sums[batch.valid])
        group_ids.append(batch.group_ids[batch.valid])
    output.close()
    if not reward_sums:
        return
    all_sums, all_ids = np.concatenate(reward_sums), np.concatenate(group_ids)
    group_stds = [float(all_sums[all_ids == group].std()) for group in np.unique(all_ids)]
    count = len(included)
    if len(all_sums):
        ctx.log_metric("mean", float(all_sums.mean()), weight=len(all_sums))
        ctx.log_metric("std", float(all_sums.std()), weight=len(all_sums), reduction="std")
        ctx.log_metric("group_std", float(np.mean(group_stds)), weight=len(group_stds))
    if scores:
        ctx.log_metric("score", float(np.mean(scores)), weight=len(scores))
    for name, by_task in (("score", scores_of_tasks), ("mean", sums_of_tasks)):
        for task, values in by_task.items():
            ctx.log_metric(f"{name}/{task}", float(np.mean(values)), weight=len(values))
    ctx.log_metric("used_fraction", float(np.mean(included)), weight=count)
    ctx.log_counts(failure_counts, count, "samples")
