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
    engine = held_engine(ctx, "weights", max(0, ctx.iteration - settings.staleness))
    environment = held_environment(ctx, lambda: ctx.inputs["weights"].data / WEIGHTS)
    mine = ctx.world.mine(settings.batch)
    trajectories = ctx.writer("trajectories")
    lengths, truncated = [], 0
    for samples in ctx.parts():
        episodes = Episodes(
            seed=ctx.config.seed,
            iteration=ctx.iteration,
            split="train",
            starts=[start for start in mine if start * settings.group_size in samples],
            batch=settings.batch,
            group_size=settings.group_size,
            horizon=settings.horizon,
            temperature=settings.temperature,
        )
        with ctx.span("generate"):
            for trajectory in collect(environment, engine, episodes, "rollout"):
                trajectories.put(trajectory, weight=len(trajectory))
                lengths.append(len(trajectory))
                truncated += trajectory.info["stop_reason"] == "length"
                ctx.progress(len(lengths), len(mine) * settings.group_size, "samples")
    trajectories.close()
    ctx.metric("samples", len(lengths), weight=0)
    ctx.metric("steps", float(np.sum(lengths)), weight=0)
    if lengths:
        ctx.metric("length_mean", float(np.mean(lengths)), weight=len(lengths))
        ctx.metric("truncated_share", truncated / len(lengths), weight=len(lengths))
