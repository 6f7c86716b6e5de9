"""Train: run the algorithm's update on the samples of one iteration."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlinf.algorithms.learner import Learner
from rlinf.artifacts import describe_files
from rlinf.config import RunConfig
from rlinf.data.batch import TrainingSample, join_by_identity
from rlinf.data.trajectory import ChannelItem, PolicyOutputs, StepRewards, Trajectory
from rlinf.data.transitions import InMemoryTransitions, Transitions
from rlinf.trainers.base import Trainer
from stages.context import StageContext
from stages.factory import (
    CHECKPOINT,
    WEIGHTS,
    commit_trainer_state,
    create_algorithm,
    default_dtype_of,
    ensure_on_device,
    get_environment,
    get_reward,
    get_trainer,
    mark_trainer_dirty,
)
from stages.retention import is_checkpoint_saved
from stages.sft import prepare_demonstrations

SAMPLE_CHANNELS = {"trajectory": "trajectories", "reward": "rewards", "inference": "logprobs"}
"""Input of the stage for each field of a training sample; a flow may have only trajectories."""
SAMPLE_TYPES: Mapping[str, type[ChannelItem]] = {
    "trajectory": Trajectory,
    "reward": StepRewards,
    "inference": PolicyOutputs,
}
"""Class of each field of a training sample."""


def run(ctx: StageContext) -> None:
    """Inputs: those of :data:`SAMPLE_CHANNELS`, ``initial`` and ``checkpoint``.

    Output: folder ``checkpoint`` (weights and optimizer), which any number of processes can load.
    """
    algorithm = create_algorithm(ctx.config)
    trainer = get_trainer(ctx)
    trainer.discard_gradients()
    learner = StageLearner(ctx, trainer)
    try:
        algorithm.update(learner, learner.sample_chunks())
    except Exception:
        # A sharded trainer may keep gradients, which the next attempt would add to its own.
        ctx.worker_state.drop_trainer()
        raise
    ensure_on_device(ctx, trainer)
    with ctx.span("save"):
        state = trainer.snapshot() if ctx.live else None
        if is_checkpoint_saved(ctx.config, ctx.iteration):
            ctx.defer(lambda: trainer.save(ctx.data_folder / CHECKPOINT, state))
        else:
            ctx.defer(lambda: _describe_checkpoint(ctx, trainer, state))
    if ctx.world.rank == 0:
        for name, value in learner.metrics.items():
            ctx.log_metric(name, value)
    commit_trainer_state(ctx)


def _describe_checkpoint(
    ctx: StageContext, trainer: Trainer, state: dict[str, Tensor] | None
) -> None:
    """Compute sizes and checksums of the checkpoint's files without keeping them.

    So the output has the identity that it would have with its files. The files are written on the
    node's own disk, whose time and space do not burden the shared filesystem.
    """
    with tempfile.TemporaryDirectory(prefix="rlinf-checkpoint-") as scratch:
        trainer.save(Path(scratch) / CHECKPOINT, state)
        ctx.discarded_files = describe_files(Path(scratch))


class StageLearner(Learner):
    """A learner that reads the inputs of the stage; other stages use the device between chunks."""

    def __init__(self, ctx: StageContext, trainer: Trainer) -> None:
        config, settings = ctx.config, ctx.config.optimizer
        decay_iterations = settings.lr_decay_iterations or config.iterations
        super().__init__(
            trainer,
            {
                group: settings.learning_rate(ctx.iteration, decay_iterations, group)
                for group in trainer.policy.parameter_groups
            },
            iteration=ctx.iteration,
            seed=config.seed,
            temperature=config.rollout.temperature,
            max_logprob_diff=default_max_logprob_diff(config),
            max_staleness=config.rollout.staleness,
        )
        self._ctx = ctx
        self.log_metric("lr", settings.learning_rate(ctx.iteration, decay_iterations))

    def sample_chunks(self) -> Iterator[list[TrainingSample]]:
        """Yield the samples of the iteration as they arrive; log how many the loss includes."""
        num_included = 0
        for samples in self._ctx.chunks():
            chunk = self._read_samples(samples)
            num_included += sum(sample.is_included for sample in chunk)
            yield chunk
        self.log_metric("samples", num_included)

    def previous_batches(self) -> Iterator[list[TrainingSample]]:
        """Yield the samples of earlier iterations that the flow has as inputs, newest first."""
        rollout, age = self._ctx.config.rollout, 1
        while f"{SAMPLE_CHANNELS['trajectory']}.{age}" in self._ctx.inputs:
            yield self._read_samples(range(rollout.batch_size * rollout.group_size), f".{age}")
            age += 1

    def replay_transitions(self, parts: Iterable[list[TrainingSample]]) -> Transitions:
        if "replay" in self._ctx.inputs:
            from stages.replay import open_replay_buffer

            # Wait for the commit, because then the added transitions are on disk.
            _ = self._ctx.inputs["replay"].manifest
            buffer = open_replay_buffer(self._ctx, self.policy.transition_dtype)
            with self._ctx.span("verify"):
                return buffer.view(self.iteration)
        if not set(SAMPLE_CHANNELS.values()) & set(self._ctx.inputs):  # a flow without rollouts
            return InMemoryTransitions(np.zeros(0, self.policy.transition_dtype))
        return super().replay_transitions(parts)

    def load_offline_data(self, path: Path) -> InMemoryTransitions:
        from rlinf.replay import offline_data

        reward = get_reward(self._ctx)
        # Offline data has no scores. A reward that uses them is NaN, which is rejected.
        return offline_data.load_offline_data(
            path, lambda trajectory: reward.compute_step_rewards([trajectory], [math.nan])[0]
        )

    def intervention_transitions(self) -> Transitions:
        if "replay" not in self._ctx.inputs:
            return super().intervention_transitions()
        from stages.replay import INTERVENTIONS_FOLDER, REPLAY_FOLDER, open_replay_buffer

        if not (self._ctx.run_folder / REPLAY_FOLDER / INTERVENTIONS_FOLDER).exists():
            return super().intervention_transitions()
        with self._ctx.span("verify"):
            return open_replay_buffer(
                self._ctx, self.policy.transition_dtype, INTERVENTIONS_FOLDER
            ).view(self.iteration)

    def demonstrations(self, step: int, count: int) -> list[Trajectory]:
        """Return demonstrations of the task; their order continues where the SFT stage ended."""
        ctx, config = self._ctx, self._ctx.config
        environment = get_environment(ctx, lambda: ctx.verified_folder("initial") / WEIGHTS)
        first = config.sft.max_steps
        return prepare_demonstrations(config, environment, self.policy, first + step, count)

    def mark_dirty(self) -> None:
        super().mark_dirty()
        mark_trainer_dirty(self._ctx)

    def report_progress(self, done: int, total: int) -> None:
        self._ctx.report_progress(done, total, "updates")

    def _read_samples(self, samples: range, suffix: str = "") -> list[TrainingSample]:
        ctx = self._ctx
        channels = {
            field: name + suffix
            for field, name in SAMPLE_CHANNELS.items()
            if name + suffix in ctx.inputs
        }
        rows = join_by_identity(
            *(ctx.read(SAMPLE_TYPES[field], name, samples) for field, name in channels.items())
        )
        return [TrainingSample(**dict(zip(channels, row, strict=True))) for row in rows]

    def _move_to_device(self, *tensor_groups: str) -> None:
        ensure_on_device(self._ctx, self._trainer, *tensor_groups)

    def _span(self) -> AbstractContextManager[Any]:
        return self._ctx.span("update")


MAX_LOGPROB_DIFF, HALF_PRECISION_MAX_LOGPROB_DIFF = 0.02, 0.2
"""Largest allowed mean difference of log-probabilities between engine and trainer, in nats."""


def default_max_logprob_diff(config: RunConfig) -> float:
    """Return the default of the algorithm's ``max_logprob_diff`` for the dtypes of model, engine
    and trainer."""
    model, engine, trainer = (
        section.model_extra or {} for section in (config.model, config.engine, config.trainer)
    )
    default = default_dtype_of(config, trainer.get("device", "auto"))
    names = {
        model.get("dtype"),
        engine.get("dtype") or default,
        trainer.get("param_dtype") or default,
    }
    return (
        MAX_LOGPROB_DIFF
        if {"bfloat16", "float16"}.isdisjoint(names)
        else HALF_PRECISION_MAX_LOGPROB_DIFF
    )
