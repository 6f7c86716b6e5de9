"""Train: the algorithm's update, on the samples of one iteration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.algorithms.learner import Learner
from rlinf.config import RunConfig
from rlinf.data.batch import Sample, join
from rlinf.data.transitions import Held, Transitions
from rlinf.replay import prior
from rlinf.trainers.base import Trainer
from stages.context import Context
from stages.parts import (
    changing_trainer,
    held_reward,
    held_trainer,
    make_algorithm,
    on_device,
    trainer_moved,
)
from stages.replay import FOLDER, HELPED, replay_buffer

CHANNELS = {"trajectory": "trajectories", "reward": "rewards", "inference": "logprobs"}
"""Inputs that a sample is made of; a flow may have the first alone."""


def run(ctx: Context) -> None:
    """Inputs of :data:`CHANNELS`, ``initial``, ``checkpoint``.

    Output: folder ``checkpoint`` (weights and optimizer), for any number of processes.
    """
    algorithm = make_algorithm(ctx.config)
    trainer = held_trainer(ctx)
    trainer.discard()
    learner = StageLearner(ctx, trainer)
    try:
        algorithm.update(learner, learner.parts())
    except Exception:
        # What shares weights out may keep gradients of its own, which the next attempt would add.
        ctx.resident.drop_trainer()
        raise
    on_device(ctx, trainer)
    with ctx.span("save"):
        state = trainer.snapshot() if ctx.live else None
        ctx.later(lambda: trainer.save(ctx.data / "checkpoint", state))
    if ctx.world.rank == 0:
        for name, value in learner.metrics.items():
            ctx.metric(name, value)
    trainer_moved(ctx)


class StageLearner(Learner):
    """The trainer of a stage, which shares device and process with other parts."""

    def __init__(self, ctx: Context, trainer: Trainer) -> None:
        config, settings = ctx.config, ctx.config.optimizer
        span = settings.schedule_iterations or config.iterations
        super().__init__(
            trainer,
            {group: settings.rate(ctx.iteration, span, group) for group in trainer.policy.groups},
            iteration=ctx.iteration,
            seed=config.seed,
            temperature=config.rollout.temperature,
            gap_limit=gap_limit(config),
            staleness=config.rollout.staleness,
        )
        self._ctx = ctx
        self.metric("lr", settings.rate(ctx.iteration, span))

    def parts(self) -> Iterator[list[Sample]]:
        """The samples of the iteration, as they arrive; says how many are kept."""
        kept = 0
        for samples in self._ctx.parts():
            part = self._joined(samples)
            kept += sum(sample.kept for sample in part)
            yield part
        self.metric("samples", kept)

    def earlier(self) -> Iterator[list[Sample]]:
        rollout, place = self._ctx.config.rollout, 1
        while f"{CHANNELS['trajectory']}.{place}" in self._ctx.inputs:
            yield self._joined(range(rollout.batch * rollout.group_size), f".{place}")
            place += 1

    def transitions(self, parts: Iterable[list[Sample]]) -> Transitions:
        if "replay" in self._ctx.inputs:
            # Waits for the commit, with which what it added is on disk.
            _ = self._ctx.inputs["replay"].manifest
            buffer = replay_buffer(self._ctx, self.policy.rows)
            with self._ctx.span("verify"):
                return buffer.view(self.iteration)
        if not set(CHANNELS.values()) & set(self._ctx.inputs):
            return Held(np.zeros(0, self.policy.rows))
        return super().transitions(parts)

    def prior(self, path: Path) -> Held:
        reward = held_reward(self._ctx)
        # There are no scores: a reward that looks at them is refused, for it is not finite.
        return prior.load(path, lambda record: reward.rewards([record], [math.nan])[0])

    def helped(self) -> Transitions:
        there = "replay" in self._ctx.inputs and (self._ctx.run / FOLDER / HELPED).exists()
        if not there:
            return super().helped()
        with self._ctx.span("verify"):
            return replay_buffer(self._ctx, self.policy.rows, HELPED).view(self.iteration)

    def changing(self) -> None:
        super().changing()
        changing_trainer(self._ctx)

    def progress(self, done: int, total: int) -> None:
        self._ctx.progress(done, total, "updates")

    def _joined(self, samples: range, place: str = "") -> list[Sample]:
        ctx = self._ctx
        own = {
            field: name + place for field, name in CHANNELS.items() if name + place in ctx.inputs
        }
        rows = join(*(ctx.records(name, samples) for name in own.values()))
        return [Sample(**dict(zip(own, row, strict=True))) for row in rows]

    def _ready(self, *groups: str) -> None:
        on_device(self._ctx, self._trainer, *groups)

    def _span(self) -> AbstractContextManager[Any]:
        return self._ctx.span("update")


GAP_LIMIT, HALF_PRECISION_GAP_LIMIT = 0.02, 0.2


def gap_limit(config: RunConfig) -> float:
    """Largest mean difference of log-probabilities between engine and trainer, nats; where the
    algorithm's ``logprob_gap_limit`` does not say it."""
    parts = (config.model, config.engine, config.trainer)
    names = [
        (part.model_extra or {}).get(key) for part in parts for key in ("dtype", "param_dtype")
    ]
    return GAP_LIMIT if {"bfloat16", "float16"}.isdisjoint(names) else HALF_PRECISION_GAP_LIMIT
