"""Behavior cloning: a policy learns to do what was done, whatever came of it.

What is made small is the policy's own loss of imitation: minus the log-probability of an action
where it has one, conditional flow matching where actions are denoised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.learner import Learner
from rlinf.algorithms.off_policy import fitting, required, tensors_of
from rlinf.config import Section
from rlinf.data.batch import Sample
from rlinf.fit import IMITATION, REPLAY, REPLAYS, WITHOUT_ROLLOUTS
from rlinf.models.base import Batch
from rlinf.replay import prior
from rlinf.trainers.base import Loss


class BCConfig(Section):
    """Settings of behavior cloning."""

    prior: Path
    """What was done: an HDF5 file of columns, or a folder of trajectories (docs/off-policy.md)."""
    batch_size: int = Field(default=256, gt=0)
    """Transitions of one optimizer step, drawn with replacement."""
    updates: int = Field(default=500, gt=0)
    """Optimizer steps of an iteration."""


class BC(Algorithm):
    """See the module."""

    Config = BCConfig
    config: BCConfig
    needs = frozenset({IMITATION, REPLAY, WITHOUT_ROLLOUTS})
    offers = frozenset({REPLAYS})

    def check(self, model: Any) -> None:
        required(model, "normalise_observations", False, "bc follows no statistics")
        prior.check(self.config.prior)

    def update(self, learner: Learner, parts: Iterable[list[Sample]]) -> None:
        learner.steps(self._batches(learner), self.loss)

    def loss(self, policy: Any, batch: Batch) -> Loss:
        """The mean of the policy's loss of imitation over a batch."""
        loss = policy.imitation(batch).mean()
        return loss, {"imitation_loss": loss.detach()}

    def _batches(self, learner: Learner) -> Iterator[Batch]:
        policy: Any = learner.policy
        source = prior.load(self.config.prior)
        fitting(policy, source, f"algorithm.prior: {self.config.prior}")
        learner.metric("transitions", len(source))
        learner.metric("steps", self.config.updates)
        size = self.config.batch_size
        for step in range(self.config.updates):
            random = learner.random("imitation", step)
            rows = tensors_of(policy, source.take(random.integers(len(source), size=size)))
            batch = {name: rows[name] for name in ("observations", "actions")}
            noise = random.standard_normal((size, policy.size), dtype="float32")
            batch["noise"] = torch.from_numpy(noise)
            batch["uniform"] = torch.from_numpy(random.random(size, dtype="float32"))
            yield batch
            if step % 100 == 99:
                learner.progress(step + 1, self.config.updates)
