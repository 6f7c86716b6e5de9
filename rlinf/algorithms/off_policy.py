"""The update of off-policy methods: many small optimizer steps on replayed transitions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.learner import Learner
from rlinf.algorithms.losses import QAggregation
from rlinf.config import Section
from rlinf.data.batch import TrainingSample
from rlinf.data.transitions import (
    TRANSITION_FIELDS,
    ConcatenatedTransitions,
    InMemoryTransitions,
    Transitions,
    dtype_mismatch,
)
from rlinf.errors import ConfigError, DataError
from rlinf.models.base import Batch
from rlinf.registry import (
    ACTION_VALUES,
    NO_ROLLOUTS,
    REPLAY_ALGORITHM,
    STEP_REWARDS,
    TRANSITION_REPLAY,
    RunComponents,
)
from rlinf.replay import offline_data
from rlinf.trainers.base import Loss

STEPS_PER_READ = 32
"""Number of optimizer steps whose transitions are read at once."""


class OffPolicyConfig(Section):
    """Settings of all off-policy methods."""

    buffer_size: int = Field(default=1_000_000, gt=0)
    """Maximum number of transitions in the replay buffer, which keeps the newest ones."""
    batch_size: int = Field(default=256, gt=0)
    """Transitions per optimizer step."""
    utd_ratio: float = Field(default=1.0, gt=0)
    """Optimizer steps per new transition (update-to-data ratio)."""
    gradient_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps per iteration, independent of the number of new transitions; null: by
    ``utd_ratio``. Required if there are no new transitions (flow=offline)."""
    learning_starts: int = Field(default=1, gt=0)
    """Number of transitions that must exist before the first optimizer step."""
    policy_delay: int = Field(default=1, gt=0)
    """Number of steps between updates of the policy, counted back from the last step of an
    iteration. The critics learn at every step."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    tau: float = Field(default=0.005, gt=0, le=1)
    """Fraction by which target networks move towards the critics after each step."""
    offline_data: Path | None = None
    """Dataset of existing transitions: an HDF5 file of columns, or a folder of trajectories
    (docs/howto/off-policy.md)."""
    offline_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of each batch that comes from ``offline_data``."""
    target_q_agg: QAggregation = "min"
    """Aggregation of the critics' values of the next action."""
    policy_q_agg: QAggregation = "min"
    """Aggregation of the critics' values that the policy maximises."""


class OffPolicyAlgorithm(Algorithm):
    """Base class of off-policy algorithms. A subclass implements :meth:`loss`.

    A batch has the fields of transitions (actions as in :func:`to_tensors`), and ``next_noise``
    ``[B, A]`` for the next action. At steps in which the policy learns, it also has ``noise`` ``[B,
    A]`` for the policy's action. The gradients of a step all use the weights before the step.
    """

    Config = OffPolicyConfig
    config: OffPolicyConfig
    requires = frozenset({ACTION_VALUES, TRANSITION_REPLAY})
    provides = frozenset({REPLAY_ALGORITHM})
    critic_subsample_size: int | None = None
    """Number of critics that compute the target, drawn at random for each step; None: all. The
    batch has the indices of the drawn critics as ``critics``, int64."""

    @abstractmethod
    def loss(self, policy: Any, batch: Batch) -> Loss:
        """Return the loss of a batch, for all parameter groups that learn in this step, and its
        metrics."""

    @property
    def replay_capacity(self) -> int:
        return self.config.buffer_size

    @property
    def uses_offline_data(self) -> bool:
        return self.config.offline_ratio > 0

    @property
    def critic_groups(self) -> tuple[str, ...]:
        """Parameter groups that learn at steps in which the policy does not."""
        return ("critic",)

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        super().check(options, run)
        if options.gradient_steps is None and NO_ROLLOUTS in run.provided:
            raise ConfigError(
                "algorithm.gradient_steps: optimizer steps are counted by new transitions, and "
                f"flow={run.config.flow} collects none; set the number per iteration"
            )
        if options.offline_data and STEP_REWARDS not in run.classes["reward"].requires:
            raise ConfigError(
                "algorithm.offline_data: prior transitions have the rewards of the simulator, "
                f"but new ones would have those of reward={run.config.reward.name}, so values "
                "would mix both; set reward=environment (reward.scale multiplies both), or leave "
                "algorithm.offline_data out"
            )
        dtype = getattr(run.options["trainer"], "param_dtype", None) or "float32"
        if dtype != "float32":
            raise ConfigError(
                f"trainer.param_dtype: the critics of {run.config.algorithm.name!r} compute in "
                f"float32, not in {dtype}; set trainer.param_dtype=float32"
            )
        if options.offline_ratio and options.offline_data is None:
            raise ConfigError(
                f"algorithm.offline_ratio: {options.offline_ratio} of each batch comes from "
                "offline transitions; set algorithm.offline_data"
            )
        if options.offline_data is not None:
            offline_data.check_offline_data(options.offline_data)

    def update(self, learner: Learner, parts: Iterable[list[TrainingSample]]) -> None:
        config = self.config
        online = learner.replay_transitions(parts)
        sources = self._sources(learner, online)
        count = config.gradient_steps or round(config.utd_ratio * online.num_new)
        if sum(map(len, sources)) < config.learning_starts or not any(map(len, sources)):
            count = 0
        learner.log_metric("transitions", len(online))
        learner.log_metric("steps", count)
        module: Any = learner.policy.module

        def trainable_groups(step: int) -> Collection[str] | None:
            return None if self._policy_learns(step, count) else self.critic_groups

        if count:
            batches = self.sample_batches(learner, sources, count)
            learner.run_steps(
                batches,
                self.loss,
                groups=trainable_groups,
                on_step=lambda: self.update_targets(module),
            )

    def update_targets(self, module: Any) -> None:
        """Move the target networks towards the critics, after each step."""
        if getattr(module, "targets", None) is not None:
            module.polyak_update(self.config.tau)

    def sample_batches(
        self, learner: Learner, sources: tuple[Transitions, Transitions], count: int
    ) -> Iterator[Batch]:
        """Yield one batch for each of ``count`` optimizer steps, drawn with replacement.

        Args:
            sources: online and offline transitions; see :meth:`_sources`.
        """
        policy: Any = learner.policy
        sizes = self._source_sizes(sources)
        num_critics = policy.settings["num_critics"]
        for first_step in range(0, count, STEPS_PER_READ):
            steps = min(STEPS_PER_READ, count - first_step)
            random = learner.rng("replay", first_step)
            arrays = [
                source.take(random.integers(len(source), size=steps * size)).reshape(steps, size)
                for source, size in zip(sources, sizes, strict=True)
                if size
            ]
            transitions = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)
            columns = to_tensors(policy, transitions)
            noise = torch.from_numpy(
                random.standard_normal(
                    (steps, 2, self.config.batch_size, policy.action_size), dtype=np.float32
                )
            )
            for step in range(steps):
                batch = {name: column[step] for name, column in columns.items()}
                batch["next_noise"] = noise[step, 0]
                if self._policy_learns(first_step + step, count):
                    batch["noise"] = noise[step, 1]
                if self.critic_subsample_size is not None:
                    critics = random.choice(num_critics, self.critic_subsample_size, replace=False)
                    batch["critics"] = torch.from_numpy(critics)
                yield batch
            learner.report_progress(first_step + steps, count)

    def _policy_learns(self, step: int, count: int) -> bool:
        """Return whether the policy learns at step ``step`` (from 0) of ``count``: at the last one
        and at every ``policy_delay``-th one before it."""
        return (count - 1 - step) % self.config.policy_delay == 0

    def _sources(self, learner: Learner, online: Transitions) -> tuple[Transitions, Transitions]:
        """Return the online transitions, and the offline transitions with the interventions.

        Transitions in which a person intervened are used as demonstrations too (HIL-SERL, arXiv
        2410.21845).

        Raises:
            DataError: the dtype of the transitions does not match the policy.
        """
        path, policy = self.config.offline_data, learner.policy
        offline = (
            InMemoryTransitions(np.zeros(0, policy.transition_dtype))
            if path is None
            else learner.load_offline_data(path)
        )
        interventions = learner.intervention_transitions()
        check_transitions(policy, online, "trajectories")
        check_transitions(policy, offline, f"algorithm.offline_data: {path}")
        if len(interventions):
            return online, ConcatenatedTransitions(offline, interventions)
        return online, offline

    def _source_sizes(self, sources: tuple[Transitions, Transitions]) -> tuple[int, int]:
        """Return the number of transitions of a batch from each source."""
        size = self.config.batch_size
        if not all(map(len, sources)):
            return (size, 0) if len(sources[0]) else (0, size)
        offline_size = round(self.config.offline_ratio * size)
        return size - offline_size, offline_size


def check_transitions(policy: Any, source: Transitions, name: str) -> None:
    """Check that a policy can learn from transitions.

    Raises:
        DataError: the dtype of the transitions does not match the policy; the message names the
            field, and begins with ``name``.
    """
    mismatch = dtype_mismatch(policy.transition_dtype, source.dtype) if len(source) else None
    if mismatch is not None:
        raise DataError(f"{name}: does not fit the policy; {mismatch}")


def to_tensors(policy: Any, transitions: np.ndarray) -> dict[str, Tensor]:
    """Return the fields of transitions ``[...]`` as float32 tensors ``[..., *shape]``. Executed
    actions are converted to the policy's coordinates."""
    columns = {name: transitions[name] for name in TRANSITION_FIELDS}
    columns["actions"] = policy.to_policy_actions(columns["actions"])
    return {
        name: torch.from_numpy(np.ascontiguousarray(column, dtype=np.float32))
        for name, column in columns.items()
    }


def require_model_option(model: Any, key: str, required: Any, why: str) -> None:
    """Check that an option of the policy has the value that an algorithm needs.

    Raises:
        ConfigError: the option has another value.
    """
    if getattr(model, key, required) != required:
        raise ConfigError(f"model.{key}: {why}; set model.{key}={str(required).lower()}")
