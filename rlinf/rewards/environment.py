"""The rewards a simulator gave, step by step; of chunks of actions, action by action."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.fit import STEP_REWARDS, TURN_REWARDS
from rlinf.rewards.base import Reward


class EnvironmentConfig(Section):
    """A fixed factor, so that returns suit the value head."""

    scale: float = 1.0


class EnvironmentReward(Reward):
    """See the module. Where steps are chunks of actions, what :meth:`judge` gives is ``[T, C]``."""

    Config = EnvironmentConfig
    needs = frozenset({STEP_REWARDS})
    offers = frozenset({TURN_REWARDS})
    config: EnvironmentConfig

    def judge(self, trajectories: Sequence[Record], scores: Sequence[float]) -> list[np.ndarray]:
        given = [t.steps.get("action_rewards", t.steps["rewards"]) for t in trajectories]
        return [np.asarray(rewards, np.float32) * self.config.scale for rewards in given]
