"""Exact match plus partial credit for every character of the reference answer in its place."""

from __future__ import annotations

from collections.abc import Sequence

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

    def judge(self, trajectories: Sequence[Record], scores: Sequence[float]) -> list[float]:
        partial = self.config.partial
        shares = [
            characters_right(str(t.info["text"]), str(t.info["answer"])) for t in trajectories
        ]
        return [
            (1 - partial) * score + partial * share
            for score, share in zip(scores, shares, strict=True)
        ]


def characters_right(text: str, answer: str) -> float:
    """Share of the longer of both strings whose characters agree, place by place."""
    longest = max(len(text), len(answer), 1)
    return sum(a == b for a, b in zip(text, answer, strict=False)) / longest
