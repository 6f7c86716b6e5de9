"""Train: advantages over the whole batch, then optimizer steps on minibatches of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.base import Algorithm, scheduled_lr, step_shares
from rlinf.config import RunConfig
from rlinf.data.batch import StepBatch, assemble, join
from rlinf.data.padding import pad
from rlinf.data.record import Record
from rlinf.errors import InputError
from rlinf.seeding import generator
from rlinf.trainers.base import Trainer
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

    def __init__(self, ctx: Context, algorithm: Algorithm, trainer: Trainer) -> None:
        self._ctx, self._algorithm, self._trainer = ctx, algorithm, trainer
        settings = algorithm.config
        span = settings.schedule_iterations or ctx.config.iterations
        self._lr = scheduled_lr(settings, ctx.iteration, span)
        self._history: list[dict[str, float]] = []
        self._mass: float | None = None
        self._batch: StepBatch | None = None
        self._limit = gap_limit(ctx.config, settings.logprob_gap_limit)
        self.streams = (
            trainer.accumulates
            and algorithm.by_group
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
        ctx = self._ctx
        seen = [row[0] for row in rows]
        rows = [row for row in rows if row[1].info["keep"]]
        if rows:
            self._steps(rows)
        # Afterwards: the update compares the policy with the one that the old log-probs are of,
        # which saw observations by the old statistics.
        if self._trainer.policy.observes:
            changing_trainer(ctx)
            self._trainer.policy.observe(seen)

    def _steps(self, rows: Rows) -> None:
        ctx, settings = self._ctx, self._algorithm.config
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
        fresh = None
        if not self._history and batch.rollout_logprobs is not None:
            fresh = batch.mask * same_version([row[0] for row in rows], self._ctx.iteration)
        with self._ctx.span("update"):
            self._trainer.accumulate(
                [rows[i][0] for i in chosen],
                lambda outputs, local: _loss(
                    self._algorithm, outputs, batch, chosen, weights, local, fresh
                ),
                temperature=self._ctx.config.rollout.temperature,
                entropy=entropy,
            )

    def _finish(self, scale: float) -> None:
        changing_trainer(self._ctx)
        with self._ctx.span("update"):
            metrics = self._trainer.update(lr=self._lr, scale=scale, check=self._compare)
        metrics = {name: value for name, value in metrics.items() if name not in (GAP, STEPS)}
        self._history.append(metrics)

    def _compare(self, totals: dict[str, float]) -> None:
        """Stop where engine and trainer, of equal weights, disagree on what was done.

        Raises:
            InputError: by more than the limit, in the mean over the steps that count.
        """
        if totals.get(STEPS, 0.0) <= 0:
            return
        gap = totals[GAP] / totals[STEPS]
        self._ctx.metric("engine_gap", gap)
        if not gap <= self._limit:
            raise InputError(
                f"iteration {self._ctx.iteration + 1}: the log-probabilities of engine and trainer "
                f"differ by {gap:.3g} nats in the mean, the limit is {self._limit:.3g}; no weight "
                "was changed. Both have the same weights: look at engine.*, trainer.* and the "
                "model's files, or raise algorithm.logprob_gap_limit"
            )


GAP, STEPS = "gap", "gap_steps"
"""Sums over the steps that count and were chosen by the trainer's own version."""
GAP_LIMIT, HALF_PRECISION_GAP_LIMIT = 0.02, 0.2


def gap_limit(config: RunConfig, given: float | None) -> float:
    """Largest mean difference of log-probabilities between engine and trainer, nats."""
    if given is not None:
        return given
    parts = (config.model, config.engine, config.trainer)
    names = [
        (part.model_extra or {}).get(key) for part in parts for key in ("dtype", "param_dtype")
    ]
    return HALF_PRECISION_GAP_LIMIT if "bfloat16" in names else GAP_LIMIT


def same_version(trajectories: list[Record], version: int) -> Tensor:
    """``[N, T]`` 1 where a step was chosen by the weights of ``version``."""
    return pad(
        [
            np.asarray(record.steps["versions"] == version, np.float32)
            if "versions" in record.steps
            else np.full(len(record), record.info["policy_version"] == version, np.float32)
            for record in trajectories
        ],
        max(len(record) for record in trajectories),
    )


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
    fresh: Tensor | None,
) -> Any:
    """Loss of one micro-batch: rows ``local`` of the minibatch, which are ``chosen[local]``.

    Where ``fresh`` ``[N, T]`` is given also how far engine and trainer differ on those steps.
    """
    length, device = outputs.logprobs.shape[1], outputs.logprobs.device
    part = batch.rows([chosen[i] for i in local], length, device)
    loss, metrics = algorithm.loss(outputs, part, weights[local, :length].to(device))
    if fresh is not None:
        steps = fresh[[chosen[i] for i in local], :length].to(device)
        gap = (outputs.logprobs.detach() - part.require("rollout_logprobs")).abs()
        metrics = {**metrics, GAP: (steps * gap).sum(), STEPS: steps.sum()}
    return loss, metrics
