"""Rollout: the current policy acts, G samples per start; trajectories come out."""

from __future__ import annotations

import numpy as np

from rlinf.envs.base import Episodes
from stages.collect import collect
from stages.context import Context
from stages.parts import WEIGHTS, held_engine, held_environment


def run(ctx: Context) -> None:
    """Input ``weights``; output channel ``trajectories``."""
    settings = ctx.config.rollout
    engine = held_engine(ctx, "weights", ctx.iteration)
    environment = held_environment(ctx, lambda: ctx.inputs["weights"].data / WEIGHTS)
    starts = ctx.world.mine(settings.batch)
    episodes = Episodes(
        seed=ctx.config.seed,
        iteration=ctx.iteration,
        split="train",
        starts=starts,
        batch=settings.batch,
        group_size=settings.group_size,
        horizon=settings.horizon,
        temperature=settings.temperature,
    )
    trajectories = ctx.writer("trajectories")
    lengths, truncated = [], 0
    total = len(starts) * settings.group_size
    with ctx.span("generate"):
        for trajectory in collect(environment, engine, episodes, "rollout"):
            trajectories.put(trajectory, weight=len(trajectory))
            lengths.append(len(trajectory))
            truncated += trajectory.info["stop_reason"] == "length"
            ctx.progress(len(lengths), total, "samples")
    trajectories.close()
    ctx.metric("samples", len(lengths), weight=0)
    ctx.metric("steps", float(np.sum(lengths)), weight=0)
    if lengths:
        ctx.metric("length_mean", float(np.mean(lengths)), weight=len(lengths))
        ctx.metric("truncated_share", truncated / len(lengths), weight=len(lengths))
