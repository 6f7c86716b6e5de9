"""What an algorithm's update works with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.batch import TrainingSample
from rlinf.data.record import Record
from rlinf.data.transitions import (
    EPISODE_ENDS,
    InMemoryTransitions,
    Transitions,
    concatenate_transitions,
    to_transitions,
    transition_dtype,
)
from rlinf.models.base import Batch, Policy, StepOutputs
from rlinf.replay import offline_data
from rlinf.seeding import generator
from rlinf.trainers.base import BatchLoss, LossFunction, Trainer


class Learner:
    """A trainer at the learning rates of one iteration.

    Every process of the trainer's world makes the same calls. A stage gives its own, which moves
    the trainer to its device before each call and reports what happens.
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
            rates: learning rate of each group of the policy's parameters.
            iteration: counted from 0, which is also the version of the weights before the update.
            seed: of the run.
            temperature: that the samples were drawn at.
            gap_limit: largest mean difference, nats, between log-probabilities of engine and
                trainer under equal weights.
            staleness: most updates that the weights which chose a step may be behind; None: any.
        """
        self._trainer, self.learning_rates = trainer, dict(learning_rates)
        self.iteration, self.seed = iteration, seed
        self.temperature, self.max_logprob_diff = temperature, max_logprob_diff
        self.max_staleness = max_staleness
        self.num_updates = 0
        """Optimizer steps so far."""
        self._said: dict[str, list[float]] = defaultdict(list)

    @property
    def policy(self) -> Policy:
        """What is trained; the module's trainable parameters change by :meth:`update` alone."""
        return self._trainer.policy

    @property
    def supports_accumulation(self) -> bool:
        """Whether parts of a batch can be given one by one."""
        return self._trainer.supports_accumulation

    def rng(self, *address: int | str) -> np.random.Generator:
        """Randomness that depends on seed, iteration and address alone."""
        return generator(self.seed, self.iteration, "train", *address)

    def forward(self, records: Sequence[Record]) -> list[tuple[int, StepOutputs]]:
        """See :meth:`Trainer.forward`."""
        self._ready("weights")
        with self._span():
            return self._trainer.forward(records, self.temperature)

    def accumulate(
        self,
        records: Sequence[Record],
        loss: LossFunction,
        *,
        row_groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """See :meth:`Trainer.accumulate`."""
        self._ready("weights", "gradients")
        with self._span():
            self._trainer.accumulate(records, loss, row_groups=row_groups)

    def update(
        self,
        *,
        groups: Collection[str] | None = None,
        scale: float = 1.0,
        check: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Change the weights by what was accumulated; see :meth:`Trainer.update`.

        The metrics of an iteration are means over its updates that have them.
        """
        self.mark_dirty()
        with self._span():
            metrics = self._trainer.update(
                lr=self.learning_rates, scale=scale, groups=groups, check=check
            )
        self.num_updates += 1
        for name, value in metrics.items():
            if not name.startswith("_"):
                self.log_metric(name, value)
        return metrics

    def step(
        self,
        records: Sequence[Record],
        loss: LossFunction,
        *,
        row_groups: Sequence[Sequence[int]] | None = None,
        groups: Collection[str] | None = None,
    ) -> dict[str, float]:
        """One optimizer step: :meth:`accumulate`, then :meth:`update`."""
        self.accumulate(records, loss, row_groups=row_groups)
        return self.update(groups=groups)

    def run_steps(
        self,
        batches: Iterable[Batch],
        loss: BatchLoss,
        *,
        groups: Callable[[int], Collection[str] | None] = lambda number: None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """An optimizer step on each of many batches; see :meth:`Trainer.accumulate_batch`.

        Args:
            only: which groups of parameters step ``number`` of these is to change; None: all.
            after: called after each step, to follow the weights (target networks).
        """
        self.mark_dirty()
        with self._span():
            for number, batch in enumerate(batches):
                self._trainer.accumulate_batch(batch, loss)
                said = self._trainer.update(lr=self.learning_rates, groups=groups(number))
                self.num_updates += 1
                for name, value in said.items():
                    self.log_metric(name, value)
                on_step()

    def replay_transitions(self, parts: Iterable[list[TrainingSample]]) -> Transitions:
        """What the flow has to replay; without a buffer the steps of the batch."""
        rows = [
            to_transitions(
                sample.trajectory,
                sample.reward.steps["rewards"],
                sample.reward.steps.get(EPISODE_ENDS),
            )
            for part in parts
            for sample in part
            if sample.is_included and sample.reward is not None
        ]
        return InMemoryTransitions(
            concatenate_transitions(rows) if rows else np.zeros(0, transition_dtype(0, 0))
        )

    def load_offline_data(self, path: Path) -> InMemoryTransitions:
        """Return the transitions of an offline dataset (:mod:`rlinf.replay.offline_data`).

        In a stage, the run's reward replaces the simulator's reward.

        Raises:
            DataError: there are none.
        """
        return offline_data.load_offline_data(path)

    def intervention_transitions(self) -> Transitions:
        """Those of the run in which a person acted, where the flow keeps them; else none."""
        return InMemoryTransitions(np.zeros(0, transition_dtype(0, 0)))

    def mark_dirty(self) -> None:
        """To be called before weights or buffers change in another way than by :meth:`update`."""
        self._ready()

    def log_metric(self, name: str, value: float) -> None:
        """Report a number; its mean, if there are several."""
        self._said[name].append(float(value))

    @property
    def metrics(self) -> dict[str, float]:
        """What was reported, by name."""
        return {name: float(np.mean(self._said[name])) for name in sorted(self._said)}

    def report_progress(self, done: int, total: int) -> None:
        """Tell how many updates are done."""

    def previous_batches(self) -> Iterator[list[TrainingSample]]:
        """The batches of the iterations before, newest first, as many as the flow's sources of
        this stage have in their ``window`` and are there."""
        yield from ()

    def _ready(self, *groups: str) -> None:
        """See that these groups of the trainer's tensors, or all, are on its device."""

    def _span(self) -> AbstractContextManager[Any]:
        """Entered while the trainer computes."""
        return nullcontext()
