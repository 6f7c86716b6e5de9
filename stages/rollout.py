"""Rollout: the current policy acts, G samples per start; trajectories come out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rlinf.channels.file import FileReader, FileWriter
from rlinf.data.counted import counted
from rlinf.data.left_open import OPEN, taken_out
from rlinf.data.record import Record
from rlinf.data.transitions import clip_share
from rlinf.engines.base import Hooks
from rlinf.envs.base import Episodes
from stages.collect import Acting, experience
from stages.context import Context
from stages.flow import continues
from stages.parts import held_engine, newer_weights, speaking_environment


def run(ctx: Context) -> None:
    """Inputs ``weights`` and, where episodes go on, ``open``, what the iteration before left open;
    output channels ``trajectories`` and ``open``."""
    rolled_out(ctx, partial(collected, left=left_by_last(ctx)))


def left_by_last(ctx: Context) -> Mapping[int, Record] | None:
    """The episodes of this process's samples that the iteration before left open; None: none go on.

    Raises:
        ArtifactError: the input is damaged.
    """
    if not continues(ctx.config):
        return None
    if OPEN not in ctx.inputs:
        return {}
    # All processes wait for it, for they generate together.
    folder, size = ctx.verified(OPEN), ctx.config.rollout.group_size
    if not ctx.world.speaks:
        return {}
    mine = ctx.world.mine(ctx.config.rollout.batch)
    samples = {sample for s in mine for sample in range(s * size, (s + 1) * size)}
    records = FileReader(folder.glob(f"{OPEN}-r*.h5"), samples)
    return {record.identity.sample: record for record in records}


def rolled_out(ctx: Context, source: Callable[[Context, Sequence[int]], Iterable[Record]]) -> None:
    """Hand on the trajectories of this process's starts, part by part of the batch."""
    settings = ctx.config.rollout
    mine = ctx.world.mine(settings.batch)

    def parts() -> Generator[Record]:
        for samples in ctx.parts():
            yield from source(ctx, [s for s in mine if s * settings.group_size in samples])

    # However it ends, the engine is through with it then, before another stage has its turn.
    with contextlib.closing(parts()) as made:
        hand_on(ctx, made, len(mine) * settings.group_size)


def gather(ctx: Context) -> None:
    """The same, of trajectories that generators elsewhere collect and send here.

    What came twice was dropped on arrival, so all who read the channel see the same ones.

    Raises:
        InputFailed: some come of weights that were committed by another attempt.
    """
    total = ctx.config.rollout.batch * ctx.config.rollout.group_size
    trajectories = ctx.arriving("trajectories", total, made_of="weights")
    with ctx.waiting("samples"):
        hand_on(ctx, trajectories, total)


def collected(
    ctx: Context,
    starts: Sequence[int],
    begun: Mapping[int, Record] | None = None,
    gives_up: Callable[[int, int], bool] | None = None,
    *,
    batch: int | None = None,
    left: Mapping[int, Record] | None = None,
) -> Iterator[Record]:
    """Trajectories of some starts of the batch, as they are complete.

    Args:
        batch: so many starts an iteration may draw; None: those of the batch.
        begun: go on with these samples only.
        gives_up: see :class:`rlinf.engines.base.Hooks`.
        left: see :attr:`rlinf.envs.base.Episodes.open`.
    """
    settings = ctx.config.rollout
    environment = speaking_environment(ctx)
    policy = None if ctx.asks is not None else acting(ctx)
    if environment is None:
        assert policy is not None, "of processes that ask each speaks"
        with ctx.span("generate"):
            policy.engine.assist(seed=policy.seed, stage=policy.stage)
        return
    episodes = Episodes(
        seed=ctx.config.seed,
        iteration=ctx.iteration,
        split="train",
        starts=starts,
        batch=batch or settings.batch,
        places=settings.batch,
        group_size=settings.group_size,
        horizon=settings.horizon,
        temperature=settings.temperature,
        begun=begun,
        open=left,
        sampling=settings.sampling.settings(),
    )
    if policy is not None and environment.resumes:
        policy = replace(policy, hooks=replace(policy.hooks, gives_up=gives_up))
    with ctx.span("generate"):
        yield from experience(ctx, environment, episodes, policy)


def acting(ctx: Context) -> Acting:
    """The policy under input ``weights``, or the newest that are to be followed."""
    settings = ctx.config.rollout
    follows = settings.in_flight_updates
    version = max(0, ctx.iteration - settings.staleness)
    engine = held_engine(ctx, "weights", version, newest=ctx.iteration if follows else None)
    hooks = Hooks(newer_weights(ctx, engine) if follows else None)
    return Acting(engine, ctx.config.seed, "rollout", hooks)


def hand_on(ctx: Context, made: Iterable[Record], total: int) -> None:
    """Put trajectories into the output channel and say what they are like.

    Lengths, steps and lags are of the steps that count.
    """
    trajectories = ctx.writer("trajectories")
    keeps = continues(ctx.config) and ctx.world.speaks
    left = FileWriter(ctx.data, OPEN, ctx.world.rank) if keeps else None
    lengths, truncated, lags = [], 0, 0
    clipped = list[float]()
    for trajectory in made:
        if (still := taken_out(trajectory)) is not None and left is not None:
            left.put(still)
        trajectories.put(trajectory)
        counts = counted(trajectory)
        lengths.append(int(counts.sum()))
        if (share := clip_share(trajectory)) is not None:
            clipped.append(share)
        truncated += trajectory.info["stop_reason"] == "length"
        if "versions" in trajectory.steps:
            lags += int((ctx.iteration - trajectory.steps["versions"])[counts].sum())
        ctx.progress(len(lengths), total, "samples")
    trajectories.close()
    if left is not None:
        ctx.later(left.close)
    ctx.metric("samples", len(lengths), weight=0)
    ctx.metric("steps", float(np.sum(lengths)), weight=0)
    if lengths:
        ctx.metric("length_mean", float(np.mean(lengths)), weight=len(lengths))
        ctx.metric("truncated_share", truncated / len(lengths), weight=len(lengths))
        if clipped:
            ctx.metric("action_clip_share", float(np.mean(clipped)), weight=len(clipped))
        if ctx.config.rollout.in_flight_updates:
            ctx.metric("lag_mean", lags / max(1, sum(lengths)), weight=sum(lengths))
