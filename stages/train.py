"""Train: advantages over the whole batch, then optimizer steps on minibatches of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.base import Algorithm, scheduled_lr, step_shares
from rlinf.data.batch import StepBatch, assemble, join
from rlinf.data.record import Record
from rlinf.seeding import generator
from stages.context import Context
from stages.parts import (
    changing_trainer,
    held_trainer,
    make_algorithm,
    on_device,
    trainer_moved,
)


def run(ctx: Context) -> None:
    """Inputs ``trajectories``, ``rewards``, ``logprobs``, ``initial``, ``checkpoint``.

    Output: folder ``checkpoint`` (weights and optimizer), for any number of processes.

    Where the algorithm allows it, gradients of the first parts of the batch are computed while the
    later ones are still to come; the weights change once all are there.
    """
    algorithm = make_algorithm(ctx.config)
    trainer = held_trainer(ctx)
    trainer.discard()
    update = Update(ctx, algorithm, trainer)
    parts: list[Rows] = []
    for samples in ctx.parts():
        rows: Rows = join(
            *(ctx.records(name, samples) for name in ("trajectories", "rewards", "logprobs"))
        )
        parts.append(rows)
        if update.streams:
            on_device(ctx, trainer, "weights", "gradients")
            update.accumulate(rows)
    every = [row for part in parts for row in part]
    on_device(ctx, trainer)
    if update.streams:
        update.step()
    else:
        update.epochs(every)
    with ctx.span("save"):
        state = trainer.snapshot() if ctx.live else None
        ctx.later(lambda: trainer.save(ctx.data / "checkpoint", state))
    if ctx.world.rank == 0:
        update.report(sum(bool(row[1].info["keep"]) for row in every))
    trainer_moved(ctx)


Rows = list[tuple[Record, ...]]
"""Trajectory, reward and inference record of each sample."""


class Update:
    """The optimizer steps of one iteration."""

    def __init__(self, ctx: Context, algorithm: Algorithm, trainer: Any) -> None:
        self._ctx, self._algorithm, self._trainer = ctx, algorithm, trainer
        settings = algorithm.config
        span = settings.schedule_iterations or ctx.config.iterations
        self._lr = scheduled_lr(settings, ctx.iteration, span)
        self._history: list[dict[str, float]] = []
        self._mass: float | None = None
        self._batch: StepBatch | None = None
        self.streams = (
            algorithm.by_group
            and settings.epochs == settings.minibatches == 1
            and not trainer.policy.observes
        )
        """Whether a part of the batch has a gradient of its own, whatever the others hold."""

    def accumulate(self, rows: Rows) -> None:
        """Add the gradient of one part of the batch, not yet divided by the weight of the whole."""
        rows = [row for row in rows if row[1].info["keep"]]
        if rows:
            batch = self._with_advantages(rows)
            weights, mass = step_shares(batch.mask, self._algorithm.config.aggregation)
            self._mass = (self._mass or 0.0) + mass
            self._add(batch, rows, list(range(len(rows))), weights, entropy=True)

    def step(self) -> None:
        """Change the weights by what was accumulated."""
        if self._mass is not None:
            self._finish(1 / max(1.0, self._mass))

    def epochs(self, rows: Rows) -> None:
        """All steps on the whole batch."""
        ctx, settings = self._ctx, self._algorithm.config
        self._trainer.policy.observe([row[0] for row in rows])
        rows = [row for row in rows if row[1].info["keep"]]
        if not rows:
            return
        batch = self._batch = self._with_advantages(rows)
        cuts = minibatches(
            len(rows), settings.epochs, settings.minibatches, ctx.config.seed, ctx.iteration
        )
        for done, chosen in enumerate(cuts):
            weights, mass = step_shares(batch.mask[chosen], settings.aggregation)
            entropy = settings.entropy_bonus > 0 or done == 0
            self._add(batch, rows, chosen, weights, entropy=entropy)
            self._finish(1 / max(1.0, mass))
            ctx.progress(done + 1, len(cuts), "updates")

    def report(self, samples: int) -> None:
        """Metrics of the iteration."""
        ctx, history, batch = self._ctx, self._history, self._batch
        ctx.metric("samples", samples)
        ctx.metric("lr", self._lr)
        for name in sorted({name for metrics in history for name in metrics}):
            ctx.metric(name, float(np.mean([m[name] for m in history if name in m])))
        if batch is not None and batch.values is not None and batch.returns is not None:
            value = explained_variance(batch.values, batch.returns, batch.mask)
            ctx.metric("explained_variance", value)

    def _with_advantages(self, rows: Rows) -> StepBatch:
        batch = assemble(cast(Any, rows))
        advantages, returns = self._algorithm.advantages(batch)
        return replace(batch, advantages=advantages, returns=returns)

    def _add(
        self, batch: StepBatch, rows: Rows, chosen: list[int], weights: Tensor, *, entropy: bool
    ) -> None:
        with self._ctx.span("update"):
            self._trainer.accumulate(
                [rows[i][0] for i in chosen],
                lambda outputs, local: _loss(
                    self._algorithm, outputs, batch, chosen, weights, local
                ),
                temperature=self._ctx.config.rollout.temperature,
                entropy=entropy,
            )

    def _finish(self, scale: float) -> None:
        changing_trainer(self._ctx, self._trainer)
        with self._ctx.span("update"):
            self._history.append(self._trainer.update(lr=self._lr, scale=scale))


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
    weights: Tensor,
    local: list[int],
) -> Any:
    """Loss of one micro-batch: rows ``local`` of the minibatch, which are ``chosen[local]``."""
    length, device = outputs.logprobs.shape[1], outputs.logprobs.device
    part = batch.rows([chosen[i] for i in local], length, device)
    return algorithm.loss(outputs, part, weights[local, :length].to(device))
