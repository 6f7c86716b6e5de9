"""Sync: publish the trained weights as the next version, and remove old ones."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from rlinf.artifacts import prune
from rlinf.models.base import Policy
from stages.context import Context
from stages.parts import WEIGHTS, held_trainer, save_weights, trainer_published
from stages.retention import Retention


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
    for old in Retention(ctx.config, ctx.run, ctx.iteration).expired():
        prune(old)
