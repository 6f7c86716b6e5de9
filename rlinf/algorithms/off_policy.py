"""The loop of off-policy methods: many small optimizer steps on transitions that are replayed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rlinf.algorithms.action_values import Aggregate
from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.learner import Learner
from rlinf.config import Section
from rlinf.data.batch import Sample
from rlinf.data.transitions import FIELDS, Held, Joined, Transitions, misfit
from rlinf.errors import ConfigError, DataError
from rlinf.fit import ACTION_VALUES, REPLAY, REPLAYS
from rlinf.models.base import Batch
from rlinf.replay import prior
from rlinf.trainers.base import Loss

CHUNK = 32
"""Steps whose transitions are read at once."""


class OffPolicyConfig(Section):
    """Settings of all such methods."""

    capacity: int = Field(default=1_000_000, gt=0)
    """Most transitions in the buffer, the newest."""
    batch_size: int = Field(default=256, gt=0)
    """Transitions of one optimizer step."""
    update_ratio: float = Field(default=1.0, gt=0)
    """Optimizer steps for each new transition (update-to-data ratio)."""
    updates: int | None = Field(default=None, gt=0)
    """Optimizer steps of an iteration, whatever is new; null: by ``update_ratio``. Without new
    transitions (flow=offline) it has to be given."""
    min_transitions: int = Field(default=1, gt=0)
    """None are made before so many transitions are there."""
    policy_every: int = Field(default=1, gt=0)
    """The policy learns at every so manieth step of an iteration, counted back from its last one;
    the critics at each."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    tau: float = Field(default=0.005, gt=0, le=1)
    """Share by which target networks move towards the critics after each step."""
    prior: Path | None = None
    """Transitions that were there before: an HDF5 file of columns, or a folder of trajectories
    (docs/off-policy.md)."""
    prior_share: float = Field(default=0.0, ge=0, le=1)
    """Share of each batch that is of the prior ones."""
    target_aggregate: Aggregate = "min"
    """How critics' values of the next action become one."""
    policy_aggregate: Aggregate = "min"
    """The same of what the policy is to raise."""


class OffPolicy(Algorithm):
    """Subclasses say what the loss of a batch is.

    A batch has the fields of transitions (actions as in :func:`tensors_of`), ``next_noise``
    ``[B, A]`` for the next action, and at steps in which the policy learns ``noise`` ``[B, A]`` for
    its own. Gradients of all groups are
    those at the weights before the step.
    """

    Config = OffPolicyConfig
    config: OffPolicyConfig
    needs = frozenset({ACTION_VALUES, REPLAY})
    offers = frozenset({REPLAYS})
    subset: int | None = None
    """Critics, chosen at random for each step, that give the target: ``critics`` int64 in the
    batch; None: all."""

    @abstractmethod
    def loss(self, policy: Any, batch: Batch) -> Loss:
        """The loss of a batch, with gradients of all that learn in this step, and metrics."""

    @property
    def capacity(self) -> int:
        return self.config.capacity

    @property
    def draws_prior(self) -> bool:
        return self.config.prior_share > 0

    @property
    def learning(self) -> tuple[str, ...]:
        """Groups of parameters that learn at steps in which the policy does not."""
        return ("critic",)

    def check(self, model: Any) -> None:
        if self.config.prior_share and self.config.prior is None:
            raise ConfigError(
                f"algorithm.prior_share: {self.config.prior_share} of each batch is of prior "
                "transitions; name them in algorithm.prior"
            )
        if self.config.prior is not None:
            prior.check(self.config.prior)

    def update(self, learner: Learner, parts: Iterable[list[Sample]]) -> None:
        config = self.config
        online = learner.transitions(parts)
        sources = self._sources(learner, online)
        count = config.updates or round(config.update_ratio * online.new)
        if sum(map(len, sources)) < config.min_transitions or not any(map(len, sources)):
            count = 0
        learner.metric("transitions", len(online))
        learner.metric("steps", count)
        module: Any = learner.policy.module

        def only(number: int) -> Collection[str] | None:
            return None if self._policy_learns(number, count) else self.learning

        def after() -> None:
            if getattr(module, "targets", None) is not None:
                module.follow(config.tau)

        if count:
            batches = self.batches(learner, sources, count)
            learner.steps(batches, self.loss, only=only, after=after)

    def batches(
        self, learner: Learner, sources: tuple[Transitions, Transitions], count: int
    ) -> Iterator[Batch]:
        """Batches of so many steps, drawn with replacement; a source that is empty is left out."""
        policy: Any = learner.policy
        shares = self._shares(sources)
        critics = policy.settings["critics"]
        for first in range(0, count, CHUNK):
            steps = min(CHUNK, count - first)
            random = learner.random("replay", first)
            rows = [
                source.take(random.integers(len(source), size=steps * share)).reshape(steps, share)
                for source, share in zip(sources, shares, strict=True)
                if share
            ]
            whole = rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)
            columns = tensors_of(policy, whole)
            noise = random.standard_normal(
                (steps, 2, self.config.batch_size, policy.size), dtype=np.float32
            )
            drawn = torch.from_numpy(noise)
            for step in range(steps):
                batch = {name: column[step] for name, column in columns.items()}
                batch["next_noise"] = drawn[step, 0]
                if self._policy_learns(first + step, count):
                    batch["noise"] = drawn[step, 1]
                if self.subset is not None:
                    chosen = random.choice(critics, self.subset, replace=False)
                    batch["critics"] = torch.from_numpy(chosen)
                yield batch
            learner.progress(first + steps, count)

    def _policy_learns(self, number: int, count: int) -> bool:
        """Whether it does at a step (from 0) of so many, the last of which is always one."""
        return (count - 1 - number) % self.config.policy_every == 0

    def _sources(self, learner: Learner, online: Transitions) -> tuple[Transitions, Transitions]:
        """What was collected; and what was there before, with what a person did since (they are
        demonstrations as well, as of HIL-SERL, arXiv 2410.21845).

        Raises:
            DataError: one is of another type than the policy learns from.
        """
        path, policy = self.config.prior, learner.policy
        before = Held(np.zeros(0, policy.rows)) if path is None else learner.prior(path)
        helped = learner.helped()
        fitting(policy, online, "trajectories")
        fitting(policy, before, f"algorithm.prior: {path}")
        return online, Joined(before, helped) if len(helped) else before

    def _shares(self, sources: tuple[Transitions, Transitions]) -> tuple[int, int]:
        """Transitions of a batch from each source."""
        size = self.config.batch_size
        if not all(map(len, sources)):
            return (size, 0) if len(sources[0]) else (0, size)
        before = round(self.config.prior_share * size)
        return size - before, before


def fitting(policy: Any, source: Transitions, where: str) -> None:
    """See that a policy can learn from transitions.

    Raises:
        DataError: they are of another type; names the field.
    """
    wrong = misfit(policy.rows, source.dtype) if len(source) else None
    if wrong is not None:
        raise DataError(f"{where}: does not fit the policy; {wrong}")


def tensors_of(policy: Any, rows: np.ndarray) -> dict[str, Tensor]:
    """The fields of rows ``[...]`` as float32 tensors ``[..., *shape]``: actions as they were
    carried out, in the policy's own coordinates."""
    columns = {name: rows[name] for name in FIELDS}
    columns["actions"] = policy.learned_actions(columns["actions"])
    return {
        name: torch.from_numpy(np.ascontiguousarray(column, dtype=np.float32))
        for name, column in columns.items()
    }


def required(model: Any, key: str, wanted: Any, why: str) -> None:
    """See that an option of the policy is what an algorithm needs.

    Raises:
        ConfigError: it is not.
    """
    found = getattr(model, key, wanted)
    if found != wanted:
        shown = str(wanted).lower()
        raise ConfigError(f"model.{key}: {why}; set model.{key}={shown}")
