"""Behavior cloning: a policy learns to imitate demonstrated actions, whatever their outcome.

The loss is the policy's imitation loss: the negative log-likelihood of an action, or conditional
flow matching for policies that denoise actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.learner import Learner
from rlinf.algorithms.off_policy import check_transitions, require_model_option, to_tensors
from rlinf.config import Section
from rlinf.data.batch import TrainingSample
from rlinf.models.base import Batch
from rlinf.registry import (
    IMITATION_LOSS,
    NO_ROLLOUTS,
    REPLAY_ALGORITHM,
    TRANSITION_REPLAY,
    RunComponents,
)
from rlinf.replay import offline_data
from rlinf.trainers.base import Loss


class BCConfig(Section):
    """Settings of behavior cloning."""

    offline_data: Path
    """Demonstrations: an HDF5 file of columns, or a folder of trajectories
    (docs/howto/off-policy.md)."""
    batch_size: int = Field(default=256, gt=0)
    """Transitions per optimizer step, drawn with replacement."""
    gradient_steps: int = Field(default=500, gt=0)
    """Optimizer steps per iteration."""


class BC(Algorithm):
    """Behavior cloning."""

    Config = BCConfig
    config: BCConfig
    requires = frozenset({IMITATION_LOSS, TRANSITION_REPLAY, NO_ROLLOUTS})
    provides = frozenset({REPLAY_ALGORITHM})

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        super().check(options, run)
        require_model_option(
            run.options["model"], "normalize_observations", False, "bc updates no statistics"
        )
        offline_data.check_offline_data(options.offline_data)

    def update(self, learner: Learner, parts: Iterable[list[TrainingSample]]) -> None:
        learner.run_steps(self._batches(learner), self.loss)

    def loss(self, policy: Any, batch: Batch) -> Loss:
        """Return the mean imitation loss of the policy over a batch."""
        loss = policy.imitation_loss(batch).mean()
        return loss, {"bc_loss": loss.detach()}

    def _batches(self, learner: Learner) -> Iterator[Batch]:
        policy: Any = learner.policy
        source = offline_data.load_offline_data(self.config.offline_data)
        check_transitions(policy, source, f"algorithm.offline_data: {self.config.offline_data}")
        learner.log_metric("transitions", len(source))
        learner.log_metric("steps", self.config.gradient_steps)
        batch_size = self.config.batch_size
        for step in range(self.config.gradient_steps):
            random = learner.rng("imitation", step)
            indices = random.integers(len(source), size=batch_size)
            columns = to_tensors(policy, source.take(indices))
            batch = {name: columns[name] for name in ("observations", "actions")}
            # Flow matching adds noise at a uniformly distributed time.
            noise = random.standard_normal((batch_size, policy.action_size), dtype="float32")
            batch["noise"] = torch.from_numpy(noise)
            batch["uniform"] = torch.from_numpy(random.random(batch_size, dtype="float32"))
            yield batch
            if step % 100 == 99:
                learner.report_progress(step + 1, self.config.gradient_steps)
