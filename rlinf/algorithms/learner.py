"""The interface through which an algorithm's update uses the trainer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.batch import TrainingSample
from rlinf.data.trajectory import Trajectory
from rlinf.data.transitions import (
    InMemoryTransitions,
    Transitions,
    concatenate_transitions,
    to_transitions,
    transition_dtype,
)
from rlinf.models.base import Batch, Policy, StepOutputs
from rlinf.seeding import generator
from rlinf.trainers.base import BatchLoss, LossFunction, Trainer


class Learner:
    """Wraps the trainer for the update of one iteration, with its learning rates.

    Every process of the trainer makes the same calls. A stage passes a subclass, which moves the
    trainer to its device before each call and reports progress.
    """

    def __init__(
        self,
        trainer: Trainer,
        learning_rates: Mapping[str, float],
        *,
        iteration: int = 0,
        seed: int = 0,
        temperature: float = 1.0,
        max_logprob_diff: float = float("inf"),
        max_staleness: int | None = None,
    ) -> None:
        """
        Args:
            learning_rates: learning rate of each group of the policy's parameters.
            iteration: index of the iteration, from 0. The weights before the update have this
                version.
            seed: seed of the run.
            temperature: temperature with which the samples were generated.
            max_logprob_diff: largest allowed mean difference, nats, between the log-probabilities
                of engine and trainer under equal weights.
            max_staleness: largest allowed staleness of a step, in updates; None: unlimited.
        """
        self._trainer, self.learning_rates = trainer, dict(learning_rates)
        self.iteration, self.seed = iteration, seed
        self.temperature, self.max_logprob_diff = temperature, max_logprob_diff
        self.max_staleness = max_staleness
        self.num_updates = 0
        """Number of optimizer steps so far."""
        self._logged: dict[str, list[float]] = defaultdict(list)

    @property
    def policy(self) -> Policy:
        """The policy in training. Only :meth:`update` changes the trainable parameters of its
        module."""
        return self._trainer.policy

    @property
    def supports_accumulation(self) -> bool:
        """Whether gradients of the parts of a batch can be accumulated one by one."""
        return self._trainer.supports_accumulation

    def rng(self, *address: int | str) -> np.random.Generator:
        """Return a random generator that depends only on seed, iteration and ``address``."""
        return generator(self.seed, self.iteration, "train", *address)

    def forward(self, trajectories: Sequence[Trajectory]) -> list[tuple[int, StepOutputs]]:
        """Compute step outputs; see :meth:`Trainer.forward`."""
        self._move_to_device("weights")
        with self._span():
            return self._trainer.forward(trajectories, self.temperature)

    def accumulate(
        self,
        trajectories: Sequence[Trajectory],
        loss: LossFunction,
        *,
        row_groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Accumulate gradients; see :meth:`Trainer.accumulate`."""
        self._move_to_device("weights", "gradients")
        with self._span():
            self._trainer.accumulate(trajectories, loss, row_groups=row_groups)

    def update(
        self,
        *,
        groups: Collection[str] | None = None,
        scale: float = 1.0,
        check: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Step the optimizer on the accumulated gradient; see :meth:`Trainer.update`.

        Metrics of an iteration are means over the updates that report them.
        """
        self.mark_dirty()
        with self._span():
            metrics = self._trainer.update(
                lr=self.learning_rates, scale=scale, groups=groups, check=check
            )
        self.num_updates += 1
        for name, value in metrics.items():
            if not name.startswith("_"):  # the others are sums for ``check``
                self.log_metric(name, value)
        return metrics

    def step(
        self,
        trajectories: Sequence[Trajectory],
        loss: LossFunction,
        *,
        row_groups: Sequence[Sequence[int]] | None = None,
        groups: Collection[str] | None = None,
    ) -> dict[str, float]:
        """Do one optimizer step: :meth:`accumulate`, then :meth:`update`."""
        self.accumulate(trajectories, loss, row_groups=row_groups)
        return self.update(groups=groups)

    def run_steps(
        self,
        batches: Iterable[Batch],
        loss: BatchLoss,
        *,
        groups: Callable[[int], Collection[str] | None] = lambda step: None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Do one optimizer step on each of many batches; see :meth:`Trainer.accumulate_batch`.

        Args:
            groups: maps a step (from 0) to the parameter groups that it changes; None: all groups.
            on_step: called after each step, for example to update target networks.
        """
        self.mark_dirty()
        with self._span():
            for step, batch in enumerate(batches):
                self._trainer.accumulate_batch(batch, loss)
                metrics = self._trainer.update(lr=self.learning_rates, groups=groups(step))
                self.num_updates += 1
                for name, value in metrics.items():
                    self.log_metric(name, value)
                on_step()

    def replay_transitions(self, parts: Iterable[list[TrainingSample]]) -> Transitions:
        """Return the transitions of the replay buffer; without a buffer, those of the batch."""
        arrays = [
            to_transitions(
                sample.trajectory,
                sample.reward.rewards,
                sample.reward.episode_ends,
            )
            for part in parts
            for sample in part
            if sample.is_included and sample.reward is not None
        ]
        return InMemoryTransitions(
            concatenate_transitions(arrays) if arrays else np.zeros(0, transition_dtype(0, 0))
        )

    def load_offline_data(self, path: Path) -> InMemoryTransitions:
        """Return the transitions of an offline dataset (:mod:`rlinf.replay.offline_data`).

        In a stage, the run's reward replaces the simulator's reward.

        Raises:
            DataError: the dataset has no transitions.
        """
        from rlinf.replay import offline_data

        return offline_data.load_offline_data(path)

    def intervention_transitions(self) -> Transitions:
        """Return the transitions in which a person intervened; none if the flow stores none."""
        return InMemoryTransitions(np.zeros(0, transition_dtype(0, 0)))

    def demonstrations(self, step: int, count: int) -> list[Trajectory]:
        """Return ``count`` demonstrations, prepared for the policy; none if there are none.

        Seed and step determine them, so a resumed run continues with the same demonstrations.

        Args:
            step: number of batches of demonstrations in this run before this batch.
        """
        return []

    def mark_dirty(self) -> None:
        """Announce that weights or buffers will change; :meth:`update` does this by itself."""
        self._move_to_device()

    def log_metric(self, name: str, value: float) -> None:
        """Log a metric. Several values of the same name are averaged."""
        self._logged[name].append(float(value))

    @property
    def metrics(self) -> dict[str, float]:
        """Mean of the logged values, by name."""
        return {name: float(np.mean(self._logged[name])) for name in sorted(self._logged)}

    def report_progress(self, done: int, total: int) -> None:
        """Report the number of completed updates."""

    def previous_batches(self) -> Iterator[list[TrainingSample]]:
        """Yield the batches of earlier iterations, newest first. ``history`` of the stage's sources
        in the flow sets their number."""
        yield from ()

    def _move_to_device(self, *tensor_groups: str) -> None:
        """Move these groups of the trainer's tensors, by default all, to its device."""

    def _span(self) -> AbstractContextManager[Any]:
        """Return a context that is entered while the trainer computes."""
        return nullcontext()
