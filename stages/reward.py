"""Reward: judge the trajectories, place rewards on their steps, say which of them count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlinf.algorithms.base import Algorithm
from rlinf.data.counted import counted
from rlinf.data.record import Record, Scalar
from rlinf.data.transitions import ENDS
from rlinf.envs.base import Environment, scores_of
from rlinf.rewards.base import Reward, per_step
from stages.context import Context
from stages.parts import WEIGHTS, held_environment, held_reward, make_algorithm


class Verdict(NamedTuple):
    """What is said of ``N`` trajectories."""

    scores: list[float]
    """The task's, where the reward needs them."""
    rewards: list[dict[str, np.ndarray]]
    """Of the steps of each: ``rewards``, where they are chunks ``action_rewards`` ``[T, C]`` too,
    and :data:`ENDS` where it says so."""
    totals: np.ndarray
    """``[N]`` their sums."""
    groups: np.ndarray
    """``[N]``."""
    kept: np.ndarray
    """Bool ``[N]``: which take part in the update."""
    troubles: list[str]
    """Why each was not judged; empty: it was."""
    judged: np.ndarray
    """Bool ``[N]``: all but those that were left out because they could not be judged, or because
    none of their steps counts."""


def judged(
    reward: Reward,
    algorithm: Algorithm,
    environment: Environment | None,
    trajectories: Sequence[Record],
    troubles: Counter[str],
) -> Verdict:
    """Judge whole groups.

    Args:
        environment: None: the reward needs no scores of the task.
        troubles: what went wrong is counted there.
    """
    scores = list[float]()
    if environment is not None:
        scores = scores_of(environment, trajectories, troubles)
    # One that could not be taken is of a trajectory of which no step counts.
    judgements = reward.judgements(trajectories, np.nan_to_num(scores).tolist())
    rewards = []
    for judgement in judgements:
        worth = np.asarray(judgement.worth, np.float32)
        steps = {"rewards": per_step(worth)}
        if worth.ndim > 1:
            steps["action_rewards"] = worth
        if judgement.ends is not None:
            steps[ENDS] = np.asarray(judgement.ends, np.uint8)
        rewards.append(steps)
    found = [judgement.trouble for judgement in judgements]
    troubles.update(dict.fromkeys(reward.troubles, 0))
    troubles.update(filter(None, found))
    judged = np.array([judgement.kept for judgement in judgements])
    groups = np.array([int(trajectory.info["group"]) for trajectory in trajectories])
    totals = np.array([steps["rewards"].sum(dtype=np.float64) for steps in rewards])
    # One without a step that counts has no gradient, and no place in its group's mean.
    there = np.array([bool(counted(trajectory).any()) for trajectory in trajectories])
    troubles["uncounted"] += int((~there).sum())
    judged &= there
    kept = judged.copy()
    # Whether a group teaches is asked of how well its samples did, not of a penalty beside it.
    plain = [j.unshaped for j in judgements]
    did = np.array([t if p is None else p for t, p in zip(totals, plain, strict=True)])
    kept[kept] = algorithm.keep(did[kept], groups[kept])
    return Verdict(scores, rewards, totals, groups, kept, found, judged)


def run(ctx: Context) -> None:
    """Inputs ``trajectories`` and ``initial`` (for its tokenizer); output channel ``rewards``.

    Several processes judge whole groups each.
    """
    reward, algorithm = held_reward(ctx), make_algorithm(ctx.config)
    size = ctx.config.rollout.group_size
    mine = set(ctx.world.mine(ctx.config.rollout.batch))
    output = ctx.writer("rewards")

    def tokenizer() -> Path:
        return ctx.inputs["initial"].data / WEIGHTS

    scores = list[float]()
    totals, groups, keep = [], [], []
    troubles = Counter[str]()
    for samples in ctx.parts():
        every = ctx.records("trajectories", samples)
        trajectories = [record for record in every if record.identity.sample // size in mine]
        if not trajectories:
            continue
        environment = held_environment(ctx, tokenizer) if reward.needs_score else None
        with ctx.span("score"):
            verdict = judged(reward, algorithm, environment, trajectories, troubles)
        part, rewards, kept = verdict.scores, verdict.rewards, verdict.kept
        total, group, judged_ones = verdict.totals, verdict.groups, verdict.judged
        shown = np.nan_to_num(part).tolist() or total.tolist()
        for trajectory, score, steps, counts, trouble in zip(
            trajectories, shown, rewards, kept, verdict.troubles, strict=True
        ):
            info: dict[str, Scalar] = {
                "score": float(score),
                "keep": int(counts),
                "group": int(trajectory.info["group"]),
            }
            if reward.troubles:
                info["trouble"] = trouble
            output.put(Record(trajectory.identity, steps, info=info))
        scores += [score for score in part if not np.isnan(score)]
        # What nobody judged is no part of the mean.
        totals.append(total[judged_ones])
        groups.append(group[judged_ones])
        keep.append(kept)
    output.close()
    if not totals:
        return
    every_total, numbers = np.concatenate(totals), np.concatenate(groups)
    spread = [float(every_total[numbers == group].std()) for group in np.unique(numbers)]
    every_kept = np.concatenate(keep)
    count = len(every_kept)
    if len(every_total):
        ctx.metric("mean", float(every_total.mean()), weight=len(every_total))
        ctx.metric("std", float(every_total.std()), weight=len(every_total), how="std")
        ctx.metric("group_std", float(np.mean(spread)), weight=len(spread))
    if scores:
        ctx.metric("score", float(np.mean(scores)), weight=len(scores))
    ctx.metric("kept_share", float(every_kept.mean()), weight=count)
    ctx.count(troubles, count, "samples")
