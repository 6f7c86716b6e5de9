"""Exact match plus partial credit for every character of the reference answer in its place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.fit import ANSWERS
from rlinf.rewards.base import Reward


class DigitsConfig(Section):
    """``(1 - partial) * score + partial * share of characters right``."""

    partial: float = Field(default=0.5, ge=0, le=1)


class DigitsReward(Reward):
    """A denser signal than exact match for short answers with a fixed form."""

    Config = DigitsConfig
    needs = frozenset({ANSWERS})
    config: DigitsConfig

    def rewards(self, trajectories: Sequence[Record], scores: Sequence[float]) -> list[np.ndarray]:
        out = []
        for trajectory, score in zip(trajectories, scores, strict=True):
            share = characters_right(str(trajectory.info["text"]), str(trajectory.info["answer"]))
            reward = np.zeros(len(trajectory), dtype=np.float32)
            reward[-1] = (1 - self.config.partial) * score + self.config.partial * share
            out.append(reward)
        return out


def characters_right(text: str, answer: str) -> float:
    """Share of the longer of both strings whose characters agree, place by place."""
    longest = max(len(text), len(answer), 1)
    return sum(a == b for a, b in zip(text, answer, strict=False)) / longest
