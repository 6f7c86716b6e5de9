"""Rewards from the task: its score, partial credit for characters of an answer, and the rewards
that a simulator or dialogue gives to steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field, model_validator

from rlinf.config import Section
from rlinf.data.episodes import scored_episodes
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.registry import EPISODE_REWARDS, REFERENCE_ANSWERS, STEP_REWARDS, TURN_REWARDS
from rlinf.rewards.base import Reward, RewardResult


class ScoreConfig(Section):
    """Settings of ``scale * score + offset``, minus the overlong penalty."""

    scale: float = 1.0
    offset: float = 0.0
    overlong_penalty_start: int | None = Field(default=None, gt=0)
    """Number of unmasked steps above which the penalty grows linearly (soft overlong punishment of
    DAPO, arXiv 2503.14476, eq. 13)."""
    overlong_penalty_end: int | None = Field(default=None, gt=0)
    """Number of unmasked steps at which the penalty reaches 1."""

    @model_validator(mode="after")
    def _check_overlong_range(self) -> ScoreConfig:
        start, stop = self.overlong_penalty_start, self.overlong_penalty_end
        if (start is None) != (stop is None) or (start and stop and start >= stop):
            raise ValueError(
                f"overlong_penalty_start {start} and overlong_penalty_end {stop} are where the "
                "penalty for overlong samples begins and reaches 1; set both, "
                "overlong_penalty_start below overlong_penalty_end"
            )
        return self


class ScoreReward(Reward):
    """The task's score, minus a penalty for overlong samples.

    A simulator's sample may have several episodes. Each episode then has its own score, on its last
    step. If the horizon truncates the last of several episodes, that episode is not scored; the
    critic's value estimates the rest of it.
    """

    Config = ScoreConfig
    provides = frozenset({EPISODE_REWARDS})
    config: ScoreConfig

    def compute(
        self, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> list[RewardResult]:
        results = []
        for trajectory, score in zip(trajectories, scores, strict=True):
            episodes = scored_episodes(trajectory)
            if episodes is None:
                length = int(loss_mask(trajectory).sum())
                raw_reward = self._scaled(score)
                reward = raw_reward - self._overlong_penalty(length)
                results.append(RewardResult(reward, raw_reward=raw_reward))
                continue
            rewards, ends = np.zeros(len(trajectory)), np.zeros(len(trajectory), bool)
            for last, episode_score, length in episodes:
                rewards[last] = self._scaled(episode_score) - self._overlong_penalty(length)
                ends[last] = True
            total = sum(self._scaled(episode_score) for _, episode_score, _ in episodes)
            results.append(RewardResult(rewards, raw_reward=total, episode_ends=ends))
        return results

    def _scaled(self, score: float) -> float:
        return self.config.scale * score + self.config.offset

    def _overlong_penalty(self, length: int) -> float:
        start, stop = self.config.overlong_penalty_start, self.config.overlong_penalty_end
        if start is None or stop is None:
            return 0.0
        return float(np.clip((length - start) / (stop - start), 0, 1))


class DigitsConfig(Section):
    """Settings of ``(1 - partial_credit) * score + partial_credit * character accuracy``."""

    partial_credit: float = Field(default=0.5, ge=0, le=1)


class DigitsReward(Reward):
    """Exact match plus partial credit for each correct character at its position. It is a denser
    signal for short answers of a fixed form."""

    Config = DigitsConfig
    requires = frozenset({REFERENCE_ANSWERS})
    config: DigitsConfig

    def compute(self, trajectories: Sequence[Trajectory], scores: Sequence[float]) -> list[float]:
        partial = self.config.partial_credit
        accuracies = [
            character_accuracy(t.require("text"), t.require("answer")) for t in trajectories
        ]
        return [
            (1 - partial) * score + partial * accuracy
            for score, accuracy in zip(scores, accuracies, strict=True)
        ]


def character_accuracy(text: str, answer: str) -> float:
    """Return the fraction of equal characters at equal positions, relative to the longer string."""
    longest = max(len(text), len(answer), 1)
    return sum(a == b for a, b in zip(text, answer, strict=False)) / longest


class EnvironmentRewardConfig(Section):
    """Settings of ``scale * reward``. A critic learns best if returns are of magnitude 1."""

    scale: float = 1.0


class EnvironmentReward(Reward):
    """The reward of each step from a simulator or dialogue, or of each action of a chunk."""

    Config = EnvironmentRewardConfig
    requires = frozenset({STEP_REWARDS})
    provides = frozenset({TURN_REWARDS})  # a turn's reward is on its last token
    config: EnvironmentRewardConfig

    def compute(
        self, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> list[np.ndarray]:
        step_rewards = [
            t.require("rewards") if t.action_rewards is None else t.action_rewards
            for t in trajectories
        ]
        return [np.asarray(rewards, np.float32) * self.config.scale for rewards in step_rewards]
