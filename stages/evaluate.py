"""Evaluate: the score of one version of the weights on held-out starts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlinf.data.counted import counted
from rlinf.data.record import Record
from rlinf.engines.base import Engine
from rlinf.envs.base import VIDEO, Environment, Episodes, scores_of
from stages.collect import Acting, experience
from stages.context import Context
from stages.flow import EVALUATE
from stages.layout import VIDEOS
from stages.outages import Outages
from stages.parts import environment_class, held_engine, speaking_environment
from stages.videos import without, write_videos

SEED = 0
"""Of held-out starts, whatever that of the run."""


def run(ctx: Context) -> None:
    """Input ``weights``; output channel ``trajectories`` (test split) and metric ``score``."""
    environment = speaking_environment(ctx)
    policy = None if ctx.asks is not None else acting(ctx)
    if environment is None:
        assert policy is not None, "of processes that ask each speaks"
        with ctx.span("generate"):
            policy.engine.assist(seed=policy.seed, stage=policy.stage)
        return
    starts = ctx.world.mine(ctx.config.evaluate.samples)
    counts = Counter[str]()
    with ctx.span("generate"):
        filmed = ctx.config.evaluate.videos
        trajectories, scores = held_out(ctx, environment, policy, starts, counts, filmed=filmed)
    outages = Outages(ctx.config)
    for trajectory in trajectories:
        outages.add(trajectory)
    outages.record(ctx)
    settings, films = ctx.config.evaluate, environment.films(environment_class(ctx.config)[1])
    if settings.videos:
        with ctx.span("videos"):
            write_videos(
                ctx.data / VIDEOS,
                trajectories,
                films,
                most=settings.videos,
                fps=settings.video_fps,
            )
    unseen = [name for name in films if name.startswith(VIDEO)]
    output = ctx.writer("trajectories")
    for trajectory in trajectories:
        output.put(without(trajectory, unseen))
    output.close()
    if trajectories:
        scored = [score for score in scores if not np.isnan(score)]
        # One that lost all of its share says nothing; if all did, the commit is refused.
        ctx.metric("score", float(np.mean(scored)) if scored else np.nan, weight=len(scored))
        for task, own in by_task(trajectories, scores).items():
            ctx.metric(f"score/{task}", float(np.mean(own)), weight=len(own))
        lengths = [counted(trajectory).sum() for trajectory in trajectories]
        ctx.metric("length_mean", float(np.mean(lengths)), weight=len(lengths))
        for name, value in environment.measures(trajectories).items():
            ctx.metric(name, value, weight=len(scored))
        ctx.count(counts, len(scores), "held-out answers")


def acting(ctx: Context) -> Acting:
    """The policy under input ``weights``."""
    return of_held_out(held_engine(ctx, "weights", ctx.iteration))


def of_held_out(engine: Engine) -> Acting:
    """An engine as it is asked for held-out starts."""
    return Acting(engine, SEED, EVALUATE)


def by_task(trajectories: Sequence[Record], scores: Sequence[float]) -> dict[str, list[float]]:
    """The scores that there are, where trajectories say of which task they are."""
    found: dict[str, list[float]] = {}
    for trajectory, score in zip(trajectories, scores, strict=True):
        if "task" in trajectory.info and not np.isnan(score):
            found.setdefault(str(trajectory.info["task"]), []).append(score)
    return found


def held_out(
    ctx: Context,
    environment: Environment,
    policy: Acting | None,
    starts: Sequence[int],
    counts: Counter[str],
    *,
    filmed: int = 0,
) -> tuple[list[Record], list[float]]:
    """Trajectories and scores of held-out starts; always the same ones, whatever the seed.

    Args:
        policy: see :func:`stages.collect.experience`.
        filmed: see :class:`rlinf.envs.base.Episodes`.
    """
    episodes = Episodes(
        seed=SEED,
        iteration=0,
        split="test",
        starts=starts,
        batch=ctx.config.evaluate.samples,
        group_size=1,
        horizon=ctx.config.evaluate.horizon or ctx.config.rollout.horizon,
        temperature=ctx.config.evaluate.temperature,
        filmed=filmed,
        sampling=(ctx.config.evaluate.sampling or ctx.config.rollout.sampling).settings(),
    )
    trajectories = []
    with contextlib.closing(experience(ctx, environment, episodes, policy)) as made:
        for trajectory in made:
            trajectories.append(trajectory)
            ctx.progress(len(trajectories), len(starts), "held-out samples")
    trajectories.sort(key=lambda record: record.identity)
    return trajectories, scores_of(environment, trajectories, counts)
