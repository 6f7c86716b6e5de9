"""Group-relative algorithms: GRPO (arXiv 2402.03300), DAPO (arXiv 2503.14476) and RLOO (arXiv
2402.14740).

They sample a group of responses per prompt. The advantage of a response is its reward relative to
its group, and every token of the response shares it. There is no critic. The surrogate is clipped
as in PPO. RLOO compares with the mean reward of the other responses, which is an unbiased baseline.
"""

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
from rlinf.data.batch import StepBatch
from rlinf.registry import SAMPLE_GROUPS


class GroupFilterConfig(PolicyGradientConfig):
    """Settings by which groups are excluded from the update."""

    filter_zero_variance_groups: bool = False
    """Exclude groups whose samples all have the same reward, because they carry no gradient."""
    min_group_reward: float | None = None
    max_group_reward: float | None = None
    """Exclude groups whose mean reward is below ``min_group_reward`` or above ``max_group_reward``,
    for example because they are too hard or too easy; null: no bound."""

    @model_validator(mode="after")
    def _check_bounds(self) -> GroupFilterConfig:
        low, high = self.min_group_reward, self.max_group_reward
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"min_group_reward {low} is above max_group_reward {high}, so that no group "
                "remains; exchange them"
            )
        return self


def select_groups(
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    filter_zero_variance: bool = False,
    min_reward: float | None = None,
    max_reward: float | None = None,
) -> np.ndarray:
    """Return which samples belong to selected groups, bool ``[N]``.

    Args:
        rewards: ``[N]`` total reward of each sample.
        groups: ``[N]`` group indices.
        filter_zero_variance: exclude groups of equal rewards (DAPO, arXiv 2503.14476, eq. 11).
        min_reward, max_reward: inclusive bounds of a group's mean reward.
    """
    _, index = np.unique(groups, return_inverse=True)
    count = index.max(initial=-1) + 1
    is_selected = np.ones(count, dtype=bool)
    if filter_zero_variance:
        lowest, highest = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(lowest, index, rewards)
        np.maximum.at(highest, index, rewards)
        is_selected &= highest > lowest
    sums = np.bincount(index, weights=rewards, minlength=count)
    mean = sums / np.bincount(index, minlength=count)
    if min_reward is not None:
        is_selected &= mean >= min_reward
    if max_reward is not None:
        is_selected &= mean <= max_reward
    return is_selected[index]


class GroupAlgorithm(PolicyGradient):
    """Base class of algorithms that compare the samples of a group, with configurable filters."""

    Config = GroupFilterConfig
    requires = frozenset({SAMPLE_GROUPS})

    def select_samples(self, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        config = self.config
        return select_groups(
            rewards,
            groups,
            filter_zero_variance=config.filter_zero_variance_groups,
            min_reward=config.min_group_reward,
            max_reward=config.max_group_reward,
        )


class GroupRelativeConfig(GroupFilterConfig):
    """Settings of group-relative advantages."""

    advantage_level: Literal["trajectory", "turn"] = "trajectory"
    """``trajectory``: every step shares the advantage of its sample's total reward. ``turn``: in a
    dialogue, every step of a turn shares the advantage of the rewards from this turn on, compared
    among the samples of the group that have this turn too
    (:func:`rlinf.algorithms.advantages.turn_level_advantages`)."""


class GroupRelativeAlgorithm(GroupAlgorithm):
    """Base class of algorithms whose :meth:`group_advantage` is shared by all steps of a sample.
    With ``advantage_level=turn``, all steps of a turn share it."""

    Config = GroupRelativeConfig
    has_group_local_advantages = True

    @property
    def needs_turns(self) -> bool:
        return bool(self.config.advantage_level == "turn")

    @abstractmethod
    def group_advantage(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Return advantages ``[N]`` of total rewards, or of returns of turns, in their groups."""

    def compute_advantages(self, batch: StepBatch) -> tuple[Tensor, None]:
        if self.needs_turns:
            turns = batch.require("turns")
            return turn_level_advantages(
                batch.rewards, batch.mask, turns, batch.groups, self.group_advantage
            ), None
        advantages = self.group_advantage(batch.rewards.sum(-1), batch.groups)
        return advantages[:, None] * batch.mask, None

    def zero_gradient_rows(self, batch: StepBatch) -> Tensor:
        # An overridden loss may have a gradient even if the advantage is zero.
        has_default_loss = all(
            getattr(type(self), name) is getattr(PolicyGradient, name)
            for name in ("policy_loss", "add_loss_terms", "total_loss", "micro_batch_loss")
        )
        if not has_default_loss or self.config.entropy_coeff or self.config.kl_loss_coef:
            return super().zero_gradient_rows(batch)
        return (batch.require("advantages") == 0).flatten(1).all(1)


class GRPOConfig(GroupRelativeConfig):
    """Settings of GRPO."""

    norm_adv_by_std: bool = True
    """Divide by the group's standard deviation (off: Dr. GRPO, arXiv 2503.20783)."""


class GRPO(GroupRelativeAlgorithm):
    """Group relative policy optimisation (arXiv 2402.03300)."""

    Config = GRPOConfig
    config: GRPOConfig

    def group_advantage(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return group_relative_advantages(rewards, groups, norm_by_std=self.config.norm_adv_by_std)


class DAPOConfig(GRPOConfig):
    """GRPO with a wider upper clip, a mean over all tokens, and no groups without a signal."""

    clip_ratio_high: float = 0.28
    loss_agg_mode: LossAggMode = "token_mean"
    filter_zero_variance_groups: bool = True


class DAPO(GRPO):
    """DAPO; see :class:`DAPOConfig`. The penalty for overlong responses is a setting of the
    reward."""

    Config = DAPOConfig


class RLOOConfig(GroupRelativeConfig):
    """Settings of RLOO: those of all group-relative algorithms.

    ``kl_reward_coef`` is the KL penalty that the paper subtracts from the reward. Here the estimate
    of each token is clipped to :data:`rlinf.algorithms.losses.KL_BOUND`.
    """


class RLOO(GroupRelativeAlgorithm):
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740)."""

    Config = RLOOConfig
    config: RLOOConfig

    def group_advantage(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return leave_one_out_advantages(rewards, groups)
