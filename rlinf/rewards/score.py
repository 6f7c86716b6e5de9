"""The task's score as the reward, with a penalty for overlong samples.

In a simulator, whose sample may hold several episodes, each has its own score, on its own last
step. One that the horizon cut off after others had ended is not judged: what follows is worth what
a critic says of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field, model_validator

from rlinf.config import Section
from rlinf.data.counted import counted
from rlinf.data.outcomes import episodes_judged
from rlinf.data.record import Record
from rlinf.fit import EPISODE_REWARDS
from rlinf.rewards.base import Judgement, Reward


class ScoreConfig(Section):
    """``scale * score + offset``, minus the overlong penalty."""

    scale: float = 1.0
    offset: float = 0.0
    overlong_from: int | None = Field(default=None, gt=0)
    """Steps that count, after which the penalty grows linearly (soft overlong punishment of DAPO,
    arXiv 2503.14476, eq. 13)."""
    overlong_to: int | None = Field(default=None, gt=0)
    """Steps at which it has reached 1."""

    @model_validator(mode="after")
    def _overlong_is_a_range(self) -> ScoreConfig:
        start, stop = self.overlong_from, self.overlong_to
        if (start is None) != (stop is None) or (start and stop and start >= stop):
            raise ValueError(
                f"overlong_from {start} and overlong_to {stop} say where the penalty for overlong "
                "samples begins and is whole; set both, overlong_from below overlong_to"
            )
        return self


class ScoreReward(Reward):
    """See the module."""

    Config = ScoreConfig
    offers = frozenset({EPISODE_REWARDS})
    config: ScoreConfig

    def judge(self, trajectories: Sequence[Record], scores: Sequence[float]) -> list[Judgement]:
        found = []
        for trajectory, score in zip(trajectories, scores, strict=True):
            judged = episodes_judged(trajectory)
            if judged is None:
                length = int(counted(trajectory).sum())
                worth, plain = self._of(score) - self._overlong(length), self._of(score)
                found.append(Judgement(worth, unshaped=plain))
                continue
            steps, ends = np.zeros(len(trajectory)), np.zeros(len(trajectory), bool)
            for last, own, length in judged:
                steps[last], ends[last] = self._of(own) - self._overlong(length), True
            whole = sum(self._of(own) for _, own, _ in judged)
            found.append(Judgement(steps, unshaped=whole, ends=ends))
        return found

    def _of(self, score: float) -> float:
        return self.config.scale * score + self.config.offset

    def _overlong(self, length: int) -> float:
        start, stop = self.config.overlong_from, self.config.overlong_to
        if start is None or stop is None:
            return 0.0
        return float(np.clip((length - start) / (stop - start), 0, 1))
