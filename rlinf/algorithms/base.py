"""The algorithm interface: which samples take part in the update, and how they change the
weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from rlinf.algorithms.learner import Learner
from rlinf.config import Section
from rlinf.data.batch import TrainingSample
from rlinf.registry import SAMPLE_GROUPS, VALUE_ESTIMATES, Component


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

    def check(self, model: Any) -> None:
        """Check, before a run begins, that the algorithm can train the configured policy.

        Args:
            model: the policy's options (section ``model``), of any class.

        Raises:
            ConfigError: the algorithm cannot train it; the message names the key of ``model``.
            DataError: a data file that the algorithm reads is missing or malformed.
        """
        return None

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
