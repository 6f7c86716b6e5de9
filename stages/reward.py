"""Reward: score trajectories, assign rewards to steps, and select the trainable samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlinf.algorithms.base import Algorithm
from rlinf.data.loss_mask import loss_mask
from rlinf.data.record import Record, Scalar
from rlinf.data.transitions import EPISODE_ENDS
from rlinf.envs.base import Environment, score_trajectories
from rlinf.rewards.base import Reward, rewards_per_step
from stages.context import StageContext
from stages.factory import WEIGHTS, create_algorithm, get_environment, get_reward


class RewardBatch(NamedTuple):
    """The rewards of ``N`` trajectories."""

    task_scores: list[float]
    """The task's scores, if the reward needs them."""
    step_rewards: list[dict[str, np.ndarray]]
    """Step columns of each: ``rewards`` ``[T]``; for action chunks also ``action_rewards``
    ``[T, C]``; :data:`EPISODE_ENDS` if the reward ends episodes."""
    reward_sums: np.ndarray
    """``[N]``: sum of the rewards of each trajectory."""
    group_ids: np.ndarray
    """``[N]``: group of each trajectory."""
    trainable: np.ndarray
    """Bool ``[N]``: whether it takes part in the update."""
    failures: list[str]
    """Why each has no reward; empty: it has one."""
    valid: np.ndarray
    """Bool ``[N]``: whether it has a reward and at least one step under the loss mask."""


def compute_rewards(
    reward: Reward,
    algorithm: Algorithm,
    environment: Environment | None,
    trajectories: Sequence[Record],
    failure_counts: Counter[str],
) -> RewardBatch:
    """Compute the rewards of complete groups.

    Args:
        environment: None: the reward needs no scores of the task.
        troubles: what went wrong is counted there.
    """
    scores = list[float]()
    if environment is not None:
        scores = score_trajectories(environment, trajectories, failure_counts)
    # A trajectory without a score has only masked steps.
    judgements = reward.compute_results(trajectories, np.nan_to_num(scores).tolist())
    rewards = []
    for judgement in judgements:
        values = np.asarray(judgement.reward, np.float32)
        steps = {"rewards": rewards_per_step(values)}
        if values.ndim > 1:
            steps["action_rewards"] = values
        if judgement.episode_ends is not None:
            steps[EPISODE_ENDS] = np.asarray(judgement.episode_ends, np.uint8)
        rewards.append(steps)
    failures = [judgement.failure for judgement in judgements]
    failure_counts.update(dict.fromkeys(reward.failure_kinds, 0))
    failure_counts.update(filter(None, failures))
    valid = np.array([judgement.valid for judgement in judgements])
    groups = np.array([int(trajectory.info["group"]) for trajectory in trajectories])
    totals = np.array([steps["rewards"].sum(dtype=np.float64) for steps in rewards])
    # One without a step that counts has no gradient, and no place in its group's mean.
    there = np.array([bool(loss_mask(trajectory).any()) for trajectory in trajectories])
    failure_counts["fully_masked"] += int((~there).sum())
    valid &= there
    kept = valid.copy()
    # Groups are selected by raw rewards, without penalties.
    plain = [j.raw_reward for j in judgements]
    did = np.array([t if p is None else p for t, p in zip(totals, plain, strict=True)])
    kept[kept] = algorithm.select_samples(did[kept], groups[kept])
    return RewardBatch(scores, rewards, totals, groups, kept, failures, valid)


def run(ctx: StageContext) -> None:
    """Inputs ``trajectories`` and ``initial`` (for its tokenizer); output channel ``rewards``.

    Several processes judge whole groups each.
    """
    reward, algorithm = get_reward(ctx), create_algorithm(ctx.config)
    size = ctx.config.rollout.group_size
    mine = set(ctx.world.shard(ctx.config.rollout.batch_size))
    output = ctx.open_writer("rewards")

    def tokenizer() -> Path:
        return ctx.inputs["initial"].data_folder / WEIGHTS

    scores = list[float]()
    totals, groups, keep = [], [], []
    troubles = Counter[str]()
    for samples in ctx.chunks():
        every = ctx.read_records("trajectories", samples)
        trajectories = [record for record in every if record.identity.sample // size in mine]
        if not trajectories:
            continue
        environment = get_environment(ctx, tokenizer) if reward.needs_score else None
        with ctx.span("score"):
            verdict = compute_rewards(reward, algorithm, environment, trajectories, troubles)
        part, rewards, kept = verdict.task_scores, verdict.step_rewards, verdict.trainable
        total, group, is_valid = verdict.reward_sums, verdict.group_ids, verdict.valid
        shown = np.nan_to_num(part).tolist() or total.tolist()
        for trajectory, score, steps, counts, trouble in zip(
            trajectories, shown, rewards, kept, verdict.failures, strict=True
        ):
            info: dict[str, Scalar] = {
                "score": float(score),
                "keep": int(counts),
                "group": int(trajectory.info["group"]),
            }
            if reward.failure_kinds:
                info["trouble"] = trouble
            output.put(Record(trajectory.identity, steps, info=info))
        scores += [score for score in part if not np.isnan(score)]
        # What nobody judged is no part of the mean.
        totals.append(total[is_valid])
        groups.append(group[is_valid])
        keep.append(kept)
    output.close()
    if not totals:
        return
    every_total, numbers = np.concatenate(totals), np.concatenate(groups)
    spread = [float(every_total[numbers == group].std()) for group in np.unique(numbers)]
    every_kept = np.concatenate(keep)
    count = len(every_kept)
    if len(every_total):
        ctx.log_metric("mean", float(every_total.mean()), weight=len(every_total))
        ctx.log_metric("std", float(every_total.std()), weight=len(every_total), reduction="std")
        ctx.log_metric("group_std", float(np.mean(spread)), weight=len(spread))
    if scores:
        ctx.log_metric("score", float(np.mean(scores)), weight=len(scores))
    ctx.log_metric("used_fraction", float(every_kept.mean()), weight=count)
    ctx.log_counts(troubles, count, "samples")
