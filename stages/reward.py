"""Reward: score the trajectories, place rewards on their steps, say which groups count."""

from __future__ import annotations

import numpy as np

from rlinf.data.record import Record, Scalar
from stages.context import Context
from stages.parts import held_environment, make_algorithm, make_reward


def run(ctx: Context) -> None:
    """Inputs ``trajectories`` and ``initial`` (for its tokenizer); output channel ``rewards``.

    Runs as one process: groups must be seen whole, and scoring brings its own worker processes.
    """
    if ctx.world.rank:
        return
    environment = held_environment(ctx, ctx.inputs["initial"].data / "weights")
    trajectories = list(ctx.reader("trajectories", "trajectories"))
    with ctx.span("score"):
        scores = environment.score(trajectories)
    rewards = make_reward(ctx.config).rewards(trajectories, scores)
    groups = np.array([int(trajectory.info["group"]) for trajectory in trajectories])
    totals = np.array([reward.sum(dtype=np.float64) for reward in rewards])
    keep = make_algorithm(ctx.config).keep(totals, groups)
    output = ctx.writer("rewards")
    for trajectory, score, reward, kept in zip(trajectories, scores, rewards, keep, strict=True):
        info: dict[str, Scalar] = {
            "score": float(score),
            "keep": int(kept),
            "group": int(trajectory.info["group"]),
        }
        output.put(Record(trajectory.identity, {"rewards": reward}, info=info))
    output.close()
    spread = [float(totals[groups == group].std()) for group in np.unique(groups)]
    ctx.metric("mean", float(totals.mean()))
    ctx.metric("std", float(totals.std()))
    ctx.metric("score", float(np.mean(scores)))
    ctx.metric("kept_share", float(keep.mean()))
    ctx.metric("group_std", float(np.mean(spread)))
