"""Sync: publish the trained weights as the next version, and remove old ones."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from rlinf.artifacts import prune, read_manifest
from rlinf.config import RunConfig
from rlinf.models.base import Policy
from stages.context import Context
from stages.flow import EVALUATE, flow_of
from stages.layout import stage_folder
from stages.parts import WEIGHTS, held_trainer, save_weights, trainer_published


def run(ctx: Context) -> None:
    """Inputs ``initial`` and ``checkpoint``; output: policy folder ``weights``."""
    trainer = held_trainer(ctx)
    policy = trainer.policy
    folder = ctx.data / WEIGHTS
    with ctx.span("publish"):
        if ctx.live is None:
            save_weights(ctx, trainer, folder)
        elif ctx.world.rank == 0 or ctx.resident.engine is not None:
            # In a pool they are written while the next iteration's update changes the trainer's.
            tensors = trainer.full_state(copy=True)
            ctx.hand_on(WEIGHTS, tensors)
            if ctx.world.rank == 0:
                ctx.later(lambda: _write(policy, tensors, folder))
                if (deltas := ctx.resident.deltas) is not None:
                    ctx.later(lambda: deltas.write(ctx, tensors))
        else:
            # It sends them to nobody, and generates nothing.
            trainer.stream().drain()
    trainer_published(ctx)
    if ctx.world.rank == 0:
        ctx.later(lambda: _prune(ctx))
        ctx.metric("version", ctx.iteration + 1)
        ctx.metric("bytes", sum(like.nbytes for like in trainer.stream().like.values()))


def _write(policy: Policy, tensors: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir()
    policy.save(folder, tensors)


def _prune(ctx: Context) -> None:
    for old in expired(ctx.config, ctx.run, ctx.iteration):
        prune(old)


def expired(config: RunConfig, run: Path, iteration: int) -> list[Path]:
    """Outputs that the retention policy removes once ``iteration`` is about to be published.

    The newest two checkpoints always stay, for a damaged one is rebuilt from the one before; so do
    weights whose evaluation is still to come.
    """
    policy, out, flow = config.retention, [], flow_of(config)
    streams = [name for name, stage in flow.stages.items() if stage.streams]
    states = [name for name in flow.stages if name not in streams]
    # What a stage takes of several iterations stays until it was taken.
    last = max(2, policy.last, *map(flow.taken, states))
    oldest_weights = iteration + 1 - last - config.rollout.staleness
    trajectories = max([policy.trajectories, *map(flow.taken, streams)])
    for old in range(max(0, iteration - 50 - max(last, trajectories)), iteration):
        # The first trajectories stay: the report compares them with the last.
        if 0 < old < iteration + 1 - trajectories:
            out += [stage_folder(run, stage, old) for stage in streams]
        version = old + 1
        kept = policy.every and version % policy.every == 0
        if old < oldest_weights and not kept and not _evaluation_due(config, run, version):
            out += [stage_folder(run, stage, old) for stage in states]
    return out


def _evaluation_due(config: RunConfig, run: Path, version: int) -> bool:
    every = config.evaluate.every
    if not every or version % every:
        return False
    return read_manifest(stage_folder(run, EVALUATE, version)) is None
