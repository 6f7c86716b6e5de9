"""The reward interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.fit import Part


class Reward(Part, ABC):
    """Turns the task's scores into the rewards the algorithm maximises."""

    Config: ClassVar[type[Section]] = Section

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def rewards(self, trajectories: Sequence[Record], scores: Sequence[float]) -> list[np.ndarray]:
        """Rewards per step, float32 ``[T]`` for each trajectory."""
