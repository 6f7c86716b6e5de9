"""Reward: score the trajectories, place rewards on their steps, say which groups count."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rlinf.data.counted import counted
from rlinf.data.record import Record, Scalar
from stages.context import Context
from stages.parts import WEIGHTS, held_environment, make_algorithm, make_reward


def run(ctx: Context) -> None:
    """Inputs ``trajectories`` and ``initial`` (for its tokenizer); output channel ``rewards``.

    Runs as one process: groups must be seen whole, and scoring brings its own worker processes.
    """
    if ctx.world.rank:
        return
    environment = held_environment(ctx, lambda: ctx.inputs["initial"].data / WEIGHTS)
    reward, algorithm = make_reward(ctx.config), make_algorithm(ctx.config)
    output = ctx.writer("rewards")
    scores, totals, groups, keep = [], [], [], []
    ungraded = Counter[str]()
    for samples in ctx.parts():
        trajectories = ctx.records("trajectories", samples)
        with ctx.span("score"):
            part = environment.score(trajectories, ungraded)
        rewards = reward.rewards(trajectories, part)
        group = np.array([int(trajectory.info["group"]) for trajectory in trajectories])
        total = np.array([steps.sum(dtype=np.float64) for steps in rewards])
        # One without a step that counts has no gradient, and no place in its group's mean.
        kept = np.array([bool(counted(trajectory).any()) for trajectory in trajectories])
        ungraded["uncounted"] += int((~kept).sum())
        kept[kept] = algorithm.keep(total[kept], group[kept])
        for trajectory, score, steps, counts in zip(trajectories, part, rewards, kept, strict=True):
            info: dict[str, Scalar] = {
                "score": float(score),
                "keep": int(counts),
                "group": int(trajectory.info["group"]),
            }
            output.put(Record(trajectory.identity, {"rewards": steps}, info=info))
        scores += part
        totals.append(total)
        groups.append(group)
        keep.append(kept)
    output.close()
    every, numbers = np.concatenate(totals), np.concatenate(groups)
    spread = [float(every[numbers == group].std()) for group in np.unique(numbers)]
    ctx.metric("mean", float(every.mean()))
    ctx.metric("std", float(every.std()))
    ctx.metric("score", float(np.mean(scores)))
    ctx.metric("kept_share", float(np.concatenate(keep).mean()))
    ctx.metric("group_std", float(np.mean(spread)))
    ctx.count(ungraded, len(scores), "answers")
