"""Reward the task's score minus a price for every token of the answer."""

from collections.abc import Sequence

from pydantic import Field

from rlinf.config import Section
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.rewards.base import Reward


class BriefConfig(Section):
    """Keys of the section ``reward`` besides its name."""

    price: float = Field(default=0.01, ge=0)
    """Price of a token."""


class Brief(Reward):
    Config = BriefConfig

    def compute(self, trajectories: Sequence[Trajectory], scores: Sequence[float]) -> list[float]:
        lengths = [int(loss_mask(trajectory).sum()) for trajectory in trajectories]
        return [s - self.config.price * n for s, n in zip(scores, lengths, strict=True)]
