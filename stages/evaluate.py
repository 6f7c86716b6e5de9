"""Evaluate: the score of one version of the weights on held-out starts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlinf.data.counted import counted
from rlinf.data.record import Record
from rlinf.engines.base import Engine
from rlinf.envs.base import Environment, Episodes
from stages.collect import collect
from stages.context import Context
from stages.parts import held_engine, speaking_environment


def run(ctx: Context) -> None:
    """Input ``weights``; output channel ``trajectories`` (test split) and metric ``score``."""
    environment = speaking_environment(ctx)
    engine = held_engine(ctx, "weights", ctx.iteration)
    if environment is None:
        with ctx.span("generate"):
            engine.assist(seed=0, stage="evaluate")
        return
    starts = ctx.world.mine(ctx.config.evaluate.samples)
    counts = Counter[str]()
    with ctx.span("generate"):
        trajectories, scores = held_out(ctx, environment, engine, starts, counts)
    output = ctx.writer("trajectories")
    for trajectory in trajectories:
        output.put(trajectory)
    output.close()
    if trajectories:
        ctx.metric("score", float(np.mean(scores)), weight=len(scores))
        lengths = [counted(trajectory).sum() for trajectory in trajectories]
        ctx.metric("length_mean", float(np.mean(lengths)), weight=len(lengths))
        for name, value in environment.measures(trajectories).items():
            ctx.metric(name, value, weight=len(scores))
        ctx.count(counts, len(scores), "held-out answers")


def held_out(
    ctx: Context,
    environment: Environment,
    engine: Engine,
    starts: Sequence[int],
    counts: Counter[str],
) -> tuple[list[Record], list[float]]:
    """Trajectories and scores of held-out starts; always the same ones, whatever the seed."""
    episodes = Episodes(
        seed=0,
        iteration=0,
        split="test",
        starts=starts,
        batch=ctx.config.evaluate.samples,
        group_size=1,
        horizon=ctx.config.evaluate.horizon or ctx.config.rollout.horizon,
        temperature=ctx.config.evaluate.temperature,
        sampling=(ctx.config.evaluate.sampling or ctx.config.rollout.sampling).settings(),
    )
    trajectories = []
    with contextlib.closing(collect(environment, engine, episodes, "evaluate")) as made:
        for trajectory in made:
            trajectories.append(trajectory)
            ctx.progress(len(trajectories), len(starts), "held-out samples")
    trajectories.sort(key=lambda record: record.identity)
    return trajectories, environment.score(trajectories, counts)
