"""Sync: publish the trained weights with their delta as the next version; remove old versions."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from rlinf.artifacts import prune_output
from rlinf.models.base import Policy
from stages.context import StageContext
from stages.factory import (
    WEIGHTS,
    get_trainer,
    mark_published,
    save_weights,
)
from stages.retention import RetentionPolicy


def run(ctx: StageContext) -> None:
    """Inputs: ``initial`` and ``checkpoint``. Output: policy folder ``weights``."""
    trainer = get_trainer(ctx)
    policy = trainer.policy
    folder = ctx.data_folder / WEIGHTS
    with ctx.span("publish"):
        if ctx.live is None:
            save_weights(ctx, trainer, folder)
        elif ctx.world.rank == 0 or ctx.worker_state.engine is not None:
            # Copy, because the next update changes the trainer while these tensors are written.
            tensors = trainer.full_state_dict(copy=True)
            ctx.publish_live(WEIGHTS, tensors)
            if ctx.world.rank == 0:
                ctx.defer(lambda: _write(policy, tensors, folder))
                if (deltas := ctx.worker_state.weight_deltas) is not None:
                    ctx.defer(lambda: deltas.write(ctx, tensors))
        else:
            # This rank needs no weights, but takes part in gathering them.
            trainer.stream_weights().drain()
    mark_published(ctx)
    if ctx.world.rank == 0:
        ctx.defer(lambda: _prune(ctx))
        ctx.log_metric("version", ctx.iteration + 1)
        templates = trainer.stream_weights().templates
        ctx.log_metric("bytes", sum(template.nbytes for template in templates.values()))


def _write(policy: Policy, tensors: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir()
    policy.save(folder, tensors)


def _prune(ctx: StageContext) -> None:
    for old in RetentionPolicy(ctx.config, ctx.run_folder, ctx.iteration).expired_outputs():
        prune_output(old)
