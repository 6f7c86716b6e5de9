"""The algorithm interface: which samples count, and how they change the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from rlinf.algorithms.learner import Learner
from rlinf.capabilities import SAMPLE_GROUPS, VALUE_ESTIMATES, Component
from rlinf.config import Section
from rlinf.data.batch import TrainingSample


class Algorithm(Component, ABC):
    """Holds nothing but its configuration; all that a run learns is in the trainer's state."""

    Config: ClassVar[type[Section]] = Section
    config_keys_read: ClassVar[frozenset[str]] = frozenset()
    """Keys of the configuration that the class reads where :mod:`rlinf.algorithms.unused_keys`
    cannot see it. Any other key that is set and has no reader is refused."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def needs_values(self) -> bool:
        """Whether the inference stage must give value estimates."""
        return VALUE_ESTIMATES in self.requires

    @property
    def needs_groups(self) -> bool:
        """Whether a sample is judged by the others of its group, so that one teaches nothing."""
        return SAMPLE_GROUPS in self.requires

    @property
    def needs_reference(self) -> bool:
        """Whether the inference stage must also run the reference policy."""
        return False

    @property
    def needs_turns(self) -> bool:
        """Whether turns of a dialogue must be told apart, each with rewards of its own."""
        return False

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the inference stage must give the log-probabilities of the policy before the
        update, under the training stack."""
        return False

    @property
    def minibatches(self) -> int:
        """Equal parts that a batch is cut into."""
        return 1

    @property
    def supports_streaming(self) -> bool:
        """Whether its update is one sum over the batch, which begins before all of it is there."""
        return False

    def check(self, model: Any) -> None:
        """See that it can train such a policy; asked before a run begins.

        Args:
            model: the policy's options, of whichever class.

        Raises:
            ConfigError: it cannot; names the key of the section ``model``.
            DataError: a data file that it is to read is missing or malformed.
        """
        return None

    @property
    def replay_capacity(self) -> int:
        """Most transitions, the newest, that a buffer keeps for it."""
        return 0

    @property
    def uses_offline_data(self) -> bool:
        """Whether a share of its batches is of transitions that were there before; those in which
        a person acted are then kept apart too."""
        return False

    def select_samples(self, scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Which samples take part in the update: bool ``[N]`` from scores and group numbers."""
        return np.ones(len(scores), dtype=bool)

    @abstractmethod
    def update(self, learner: Learner, parts: Iterable[list[TrainingSample]]) -> None:
        """Learn from one iteration's batch: any number of optimizer steps on it, or on more.

        Args:
            parts: the batch, in parts as they arrive: to take the next one may wait for it.

        Equal batches and weights must give equal weights: randomness is :meth:`Learner.rng`.
        """
