"""The algorithm interface: which samples take part in the update, and how they change the
weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from rlinf.algorithms.learner import Learner
from rlinf.config import RunConfig, Section
from rlinf.data.batch import TrainingSample
from rlinf.errors import ConfigError
from rlinf.registry import (
    SAMPLE_GROUPS,
    TRANSITION_REPLAY,
    TURN_REWARDS,
    TURNS,
    VALUE_ESTIMATES,
    Component,
    RunComponents,
)


class Algorithm(Component, ABC):
    """Base class of algorithms. It holds only its configuration; all learned state is in the
    trainer."""

    Config: ClassVar[type[Section]] = Section
    config_keys_read: ClassVar[frozenset[str]] = frozenset()
    """Configuration keys that the class reads in code that :mod:`rlinf.algorithms.unused_keys`
    cannot see. Any other key that is set and never read is rejected."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def needs_values(self) -> bool:
        """Whether the inference stage must compute value estimates."""
        return VALUE_ESTIMATES in self.requires

    @property
    def needs_groups(self) -> bool:
        """Whether a sample is compared with the other samples of its group, so that a group of one
        has no signal."""
        return SAMPLE_GROUPS in self.requires

    @property
    def needs_reference(self) -> bool:
        """Whether the inference stage must also run the reference policy."""
        return False

    @property
    def needs_turns(self) -> bool:
        """Whether the turns of a dialogue must be distinguished, each with its own rewards."""
        return False

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the inference stage must compute the log-probabilities of the policy before the
        update with the training stack."""
        return False

    @property
    def minibatches(self) -> int:
        """Number of equal parts into which a batch is split."""
        return 1

    @property
    def supports_streaming(self) -> bool:
        """Whether the gradient is one sum over the batch, so that the update can begin before the
        whole batch has arrived."""
        return False

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        algorithm, config, name = cls(options), run.config, run.config.algorithm.name
        algorithm._check_batch(config)
        if algorithm.needs_turns:
            _check_turns(run)
        if TRANSITION_REPLAY in cls.requires and not run.classes["trainer"].supports_batches:
            raise ConfigError(
                f"trainer.name: {config.trainer.name!r} does not support batches of transitions; "
                "set trainer=fsdp"
            )
        needs_values = VALUE_ESTIMATES in cls.requires
        if getattr(run.options["model"], "value_level", "chunk") == "action" and not needs_values:
            raise ConfigError(
                "model.value_level: action needs an algorithm with values (ppo, async_ppo), but "
                f"{name!r} has none; set it to chunk"
            )
        if getattr(run.options["trainer"], "lora", None) is not None and needs_values:
            raise ConfigError(
                f"trainer.lora: adapters do not train the value head, but {name!r} needs a trained "
                "one; set trainer.lora=null, or choose an algorithm without values"
            )

    def _check_batch(self, config: RunConfig) -> None:
        """Check that the batch splits into minibatches, and that resampling has an effect."""
        rollout = config.rollout
        samples = rollout.batch_size * rollout.group_size
        if samples % self.minibatches:
            raise ConfigError(
                f"algorithm.minibatches: {samples} samples (rollout.batch_size "
                f"{rollout.batch_size} x rollout.group_size {rollout.group_size}) cannot be split "
                f"into {self.minibatches} equal minibatches"
            )
        # Groups of two samples with equal scores, both ordinary and extreme ones.
        scores, groups = np.repeat([-1e9, 0.0, 1.0, 1e9], 2), np.repeat(np.arange(4), 2)
        if rollout.max_resamples is not None and self.select_samples(scores, groups).all():
            raise ConfigError(
                f"rollout.max_resamples: algorithm {config.algorithm.name!r} keeps groups whose "
                "samples all scored the same, so that nothing would be resampled; set "
                "algorithm=dapo, or algorithm.filter_zero_variance_groups=true with an algorithm "
                "of groups, or leave rollout.max_resamples out"
            )

    @property
    def replay_capacity(self) -> int:
        """Maximum number of transitions in the replay buffer, which keeps the newest; 0: none."""
        return 0

    @property
    def uses_offline_data(self) -> bool:
        """Whether a share of each batch comes from an offline dataset. Transitions in which a
        person intervened are then also stored separately."""
        return False

    def select_samples(self, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Return which samples the update includes, bool ``[N]``.

        Args:
            rewards: ``[N]`` total reward of each sample, before shaping.
            groups: ``[N]`` group indices.
        """
        return np.ones(len(rewards), dtype=bool)

    @abstractmethod
    def update(self, learner: Learner, parts: Iterable[list[TrainingSample]]) -> None:
        """Update the policy on one iteration's batch, with any number of optimizer steps.

        Equal batches and old weights must give equal new weights, so draw random numbers only from
        :meth:`Learner.rng`.

        Args:
            parts: parts of the batch, in the order of arrival. ``next`` waits for the next part.
        """


def _check_turns(run: RunComponents) -> None:
    """Check that the task has turns, and that the reward gives one value for each."""
    if TURNS not in run.provided:
        raise ConfigError(
            f"algorithm.advantage_level: turn is for dialogues, but task {run.config.task.name!r} "
            "has no turns; set it to trajectory"
        )
    if TURN_REWARDS not in run.provided:
        raise ConfigError(
            f"algorithm.advantage_level: turn needs a reward per turn, but reward "
            f"{run.config.reward.name!r} gives one number for a whole dialogue; set "
            "reward=environment, which uses the task's reward of each message, or "
            "algorithm.advantage_level=trajectory"
        )
