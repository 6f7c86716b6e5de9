"""What algorithms share that judge a sample by the others of its group."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import numpy as np
from pydantic import model_validator
from torch import Tensor

from rlinf.algorithms.advantages import by_turn
from rlinf.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig
from rlinf.data.batch import StepBatch
from rlinf.fit import GROUPS


class GroupConfig(PolicyGradientConfig):
    """Which groups take part in the update."""

    drop_equal_groups: bool = False
    """Leave out groups whose samples all scored the same: they carry no gradient."""
    group_mean_low: float | None = None
    group_mean_high: float | None = None
    """Leave out groups whose mean score is below the one or above the other, those that are too
    hard or too easy say; null: there is no such bound."""

    @model_validator(mode="after")
    def _bounds_are_a_range(self) -> GroupConfig:
        low, high = self.group_mean_low, self.group_mean_high
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"group_mean_low {low} is above group_mean_high {high}, so that no group is left; "
                "exchange them"
            )
        return self


def kept_groups(
    scores: np.ndarray,
    groups: np.ndarray,
    *,
    drop_equal: bool = False,
    low: float | None = None,
    high: float | None = None,
) -> np.ndarray:
    """Which samples are of groups that take part, bool ``[N]``: all of a group, or none.

    Args:
        scores: ``[N]`` total reward of each sample.
        groups: ``[N]`` group numbers.
        drop_equal: leave out groups of equal scores (DAPO, arXiv 2503.14476, eq. 11).
        low, high: bounds of a group's mean score, both included.
    """
    _, index = np.unique(groups, return_inverse=True)
    count = index.max(initial=-1) + 1
    kept = np.ones(count, dtype=bool)
    if drop_equal:
        least, most = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(least, index, scores)
        np.maximum.at(most, index, scores)
        kept &= most > least
    mean = np.bincount(index, weights=scores, minlength=count) / np.bincount(index, minlength=count)
    if low is not None:
        kept &= mean >= low
    if high is not None:
        kept &= mean <= high
    return kept[index]


class OfGroups(PolicyGradient):
    """Leaves groups out of the update, as its settings say."""

    Config = GroupConfig
    needs = frozenset({GROUPS})

    def keep(self, scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
        config = self.config
        return kept_groups(
            scores,
            groups,
            drop_equal=config.drop_equal_groups,
            low=config.group_mean_low,
            high=config.group_mean_high,
        )


class RelativeConfig(GroupConfig):
    """What is compared within a group."""

    advantage_level: Literal["trajectory", "turn"] = "trajectory"
    """``trajectory``: every step shares the advantage of its sample's whole reward; ``turn``: of a
    dialogue, every step of a message that of the rewards from this message on, among the samples
    of the group that have as many (:func:`rlinf.algorithms.advantages.by_turn`)."""


class Relative(OfGroups):
    """Every step of a sample, or of a turn, shares what :meth:`relative` makes of its score."""

    Config = RelativeConfig
    by_group = True

    @property
    def needs_turns(self) -> bool:
        return bool(self.config.advantage_level == "turn")

    @abstractmethod
    def relative(self, scores: Tensor, groups: Tensor) -> Tensor:
        """Scores ``[N]`` relative to the others of the same group, ``[N]``."""

    def advantages(self, batch: StepBatch) -> tuple[Tensor, None]:
        if self.needs_turns:
            turns = batch.require("turns")
            return by_turn(batch.rewards, batch.mask, turns, batch.groups, self.relative), None
        relative = self.relative(batch.rewards.sum(-1), batch.groups)
        return relative[:, None] * batch.mask, None

    def idle(self, batch: StepBatch) -> Tensor:
        # A subclass's own loss may have a gradient without an advantage.
        plain = all(
            getattr(type(self), name) is getattr(PolicyGradient, name)
            for name in ("loss", "add_terms", "total_loss", "objective")
        )
        if not plain or self.config.entropy_bonus or self.config.kl_coefficient:
            return super().idle(batch)
        return (batch.require("advantages") == 0).flatten(1).all(1)
