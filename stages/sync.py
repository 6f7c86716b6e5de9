"""Sync: publish the trained weights with their delta as the next version; remove old versions."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from rlinf.artifacts import prune_output
from rlinf.models.base import Policy
from rlinf.trainers.base import Trainer
from rlinf.weights.node_copy import collect_once_per_node
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
        elif (tensors := _collect_weights(ctx, trainer)) is not None:
            ctx.publish_live(WEIGHTS, tensors)
            if ctx.world.rank == 0:
                ctx.defer(partial(_write, policy, tensors, folder))
                if (deltas := ctx.worker_state.weight_deltas) is not None:
                    ctx.defer(partial(deltas.write, ctx, tensors))
    mark_published(ctx)
    if ctx.world.rank == 0:
        ctx.defer(lambda: _prune(ctx))
        ctx.log_metric("version", ctx.iteration + 1)
        templates = trainer.stream_weights().templates
        ctx.log_metric("bytes", sum(template.nbytes for template in templates.values()))


def _collect_weights(ctx: StageContext, trainer: Trainer) -> dict[str, Tensor] | None:
    """Return copies of the full weights, which the next update does not change; collective.

    None: this rank neither publishes nor generates, and only takes part in gathering them.
    """
    is_needed = ctx.world.rank == 0 or ctx.worker_state.engine is not None
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return collect_once_per_node(trainer.stream_weights, is_needed=is_needed)
    if is_needed:
        return trainer.full_state_dict(copy=True)
    trainer.stream_weights().drain()
    return None


def _write(policy: Policy, tensors: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir()
    policy.save(folder, tensors)


def _prune(ctx: StageContext) -> None:
    for old in RetentionPolicy(ctx.config, ctx.run_folder, ctx.iteration).expired_outputs():
        prune_output(old)
