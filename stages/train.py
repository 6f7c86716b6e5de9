"""Train: advantages over the whole batch, then optimizer steps on minibatches of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlinf.algorithms.base import scheduled_lr, step_weights
from rlinf.data.batch import StepBatch, assemble, join
from rlinf.seeding import generator
from stages.context import Context
from stages.parts import changing_trainer, make_algorithm


def run(ctx: Context) -> None:
    """Inputs ``trajectories``, ``rewards``, ``logprobs``, ``initial``, ``checkpoint``.

    Output: folder ``checkpoint`` (weights and optimizer), for any number of processes.
    """
    algorithm = make_algorithm(ctx.config)
    settings = algorithm.config
    rows: list[Any] = join(
        ctx.reader("trajectories", "trajectories"),
        ctx.reader("rewards", "rewards"),
        ctx.reader("logprobs", "logprobs"),
    )
    trainer = changing_trainer(ctx)
    trainer.policy.observe([row[0] for row in rows])
    rows = [row for row in rows if row[1].info["keep"]]
    lr = scheduled_lr(settings, ctx.iteration, ctx.config.iterations)
    history: list[dict[str, float]] = []
    if rows:
        records = [row[0] for row in rows]
        batch = assemble(rows)
        advantages, returns = algorithm.advantages(batch)
        batch = replace(batch, advantages=advantages, returns=returns)
        cuts = minibatches(
            len(rows), settings.epochs, settings.minibatches, ctx.config.seed, ctx.iteration
        )
        for done, chosen in enumerate(cuts):
            weights = step_weights(batch.mask[chosen], settings.aggregation)
            with ctx.span("update"):
                metrics = trainer.step(
                    [records[i] for i in chosen],
                    lambda outputs, local, chosen=chosen, weights=weights: _loss(
                        algorithm, outputs, batch, chosen, weights, local
                    ),
                    lr=lr,
                    temperature=ctx.config.rollout.temperature,
                    entropy=settings.entropy_bonus > 0 or done == 0,
                )
            history.append(metrics)
            ctx.progress(done + 1, len(cuts), "updates")
    with ctx.span("save"):
        trainer.save(ctx.data / "checkpoint")
    if ctx.world.rank == 0:
        ctx.metric("samples", len(rows))
        ctx.metric("lr", lr)
        for name in sorted({name for metrics in history for name in metrics}):
            ctx.metric(name, float(np.mean([m[name] for m in history if name in m])))
        if rows and batch.values is not None and returns is not None:
            ctx.metric("explained_variance", explained_variance(batch.values, returns, batch.mask))


def minibatches(count: int, epochs: int, parts: int, seed: int, iteration: int) -> list[list[int]]:
    """Sample numbers of each optimizer step: every sample once per epoch, in seeded order."""
    steps = []
    for epoch in range(epochs):
        order = np.arange(count)
        if parts > 1:
            order = generator(seed, iteration, "train", epoch).permutation(count)
        steps += [sorted(int(i) for i in part) for part in np.array_split(order, min(parts, count))]
    return steps


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """``1 - Var(returns - values) / Var(returns)`` over the steps that count."""
    counted = mask.bool()
    spread = returns[counted].var()
    return float(1 - (returns[counted] - values[counted]).var() / spread) if spread > 0 else 0.0


def _loss(
    algorithm: Any,
    outputs: Any,
    batch: StepBatch,
    chosen: list[int],
    weights: torch.Tensor,
    local: list[int],
) -> Any:
    """Loss of one micro-batch: rows ``local`` of the minibatch, which are ``chosen[local]``."""
    length, device = outputs.logprobs.shape[1], outputs.logprobs.device
    part = batch.rows([chosen[i] for i in local], length, device)
    return algorithm.loss(outputs, part, weights[local, :length].to(device))
