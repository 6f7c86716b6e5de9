"""What algorithms share that judge a sample by the others of its group."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import numpy as np
from pydantic import model_validator
from torch import Tensor

from rlinf.algorithms.advantages import (
    group_relative_advantages,
    leave_one_out_advantages,
    turn_level_advantages,
)
from rlinf.algorithms.losses import LossAggMode
from rlinf.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig
from rlinf.capabilities import SAMPLE_GROUPS
from rlinf.data.batch import StepBatch


class GroupFilterConfig(PolicyGradientConfig):
    """Which groups take part in the update."""

    filter_zero_variance_groups: bool = False
    """Leave out groups whose samples all scored the same: they carry no gradient."""
    min_group_reward: float | None = None
    max_group_reward: float | None = None
    """Leave out groups whose mean score is below the one or above the other, those that are too
    hard or too easy say; null: there is no such bound."""

    @model_validator(mode="after")
    def _bounds_are_a_range(self) -> GroupFilterConfig:
        low, high = self.min_group_reward, self.max_group_reward
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"min_group_reward {low} is above max_group_reward {high}, so that no group "
                "remains; exchange them"
            )
        return self


def select_groups(
    scores: np.ndarray,
    groups: np.ndarray,
    *,
    filter_zero_variance: bool = False,
    min_reward: float | None = None,
    max_reward: float | None = None,
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
    if filter_zero_variance:
        least, most = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(least, index, scores)
        np.maximum.at(most, index, scores)
        kept &= most > least
    mean = np.bincount(index, weights=scores, minlength=count) / np.bincount(index, minlength=count)
    if min_reward is not None:
        kept &= mean >= min_reward
    if max_reward is not None:
        kept &= mean <= max_reward
    return kept[index]


class GroupAlgorithm(PolicyGradient):
    """Leaves groups out of the update, as its settings say."""

    Config = GroupFilterConfig
    requires = frozenset({SAMPLE_GROUPS})

    def select_samples(self, scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
        config = self.config
        return select_groups(
            scores,
            groups,
            filter_zero_variance=config.filter_zero_variance_groups,
            min_reward=config.min_group_reward,
            max_reward=config.max_group_reward,
        )


class GroupRelativeConfig(GroupFilterConfig):
    """What is compared within a group."""

    advantage_level: Literal["trajectory", "turn"] = "trajectory"
    """``trajectory``: every step shares the advantage of its sample's whole reward; ``turn``: of a
    dialogue, every step of a message that of the rewards from this message on, among the samples
    of the group that have as many (:func:`rlinf.algorithms.advantages.turn_level_advantages`)."""


class GroupRelativeAlgorithm(GroupAlgorithm):
    """Every step of a sample, or of a turn, shares what :meth:`relative` makes of its score."""

    Config = GroupRelativeConfig
    has_group_local_advantages = True

    @property
    def needs_turns(self) -> bool:
        return bool(self.config.advantage_level == "turn")

    @abstractmethod
    def group_advantage(self, scores: Tensor, groups: Tensor) -> Tensor:
        """Scores ``[N]`` relative to the others of the same group, ``[N]``."""

    def compute_advantages(self, batch: StepBatch) -> tuple[Tensor, None]:
        if self.needs_turns:
            turns = batch.require("turns")
            return turn_level_advantages(
                batch.rewards, batch.mask, turns, batch.groups, self.group_advantage
            ), None
        relative = self.group_advantage(batch.rewards.sum(-1), batch.groups)
        return relative[:, None] * batch.mask, None

    def zero_gradient_rows(self, batch: StepBatch) -> Tensor:
        # A subclass's own loss may have a gradient without an advantage.
        plain = all(
            getattr(type(self), name) is getattr(PolicyGradient, name)
            for name in ("policy_loss", "add_loss_terms", "total_loss", "micro_batch_loss")
        )
        if not plain or self.config.entropy_coeff or self.config.kl_loss_coef:
            return super().zero_gradient_rows(batch)
        return (batch.require("advantages") == 0).flatten(1).all(1)


class GRPOConfig(GroupRelativeConfig):
    """Settings of GRPO."""

    norm_adv_by_std: bool = True
    """Divide by the group's standard deviation (off: Dr. GRPO, arXiv 2503.20783)."""


class GRPO(GroupRelativeAlgorithm):
    """See the module."""

    Config = GRPOConfig
    config: GRPOConfig

    def group_advantage(self, scores: Tensor, groups: Tensor) -> Tensor:
        return group_relative_advantages(scores, groups, norm_by_std=self.config.norm_adv_by_std)


class DAPOConfig(GRPOConfig):
    """GRPO with a wider upper clip, a mean over all tokens, and no groups without a signal."""

    clip_ratio_high: float = 0.28
    loss_agg_mode: LossAggMode = "token_mean"
    filter_zero_variance_groups: bool = True


class DAPO(GRPO):
    """See :class:`DAPOConfig`; the penalty for overlong responses is a reward setting."""

    Config = DAPOConfig


class RLOOConfig(GroupRelativeConfig):
    """Settings of RLOO: those of all group-relative algorithms.

    ``kl_reward_coef`` is the KL penalty that the paper subtracts from the reward. Here the estimate
    of each token is clipped to :data:`rlinf.algorithms.losses.KL_BOUND`.
    """


class RLOO(GroupRelativeAlgorithm):
    """See the module."""

    Config = RLOOConfig
    config: RLOOConfig

    def group_advantage(self, scores: Tensor, groups: Tensor) -> Tensor:
        return leave_one_out_advantages(scores, groups)
