"""REINFORCE++ (arXiv 2501.03262): no critic; advantages are normalised over the whole batch.

A token's advantage is the sum of the rewards from that token on. The reward of a response is on its
last unmasked token. ``kl_reward_coef`` subtracts a KL penalty to the reference policy from the
reward of every token.
"""

from __future__ import annotations

import torch
from pydantic import Field, field_validator
from torch import Tensor

from rlinf.algorithms.advantages import compute_gae, group_means
from rlinf.algorithms.group_relative import GroupAlgorithm, GroupFilterConfig
from rlinf.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig
from rlinf.data.batch import StepBatch


class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """Settings of REINFORCE++."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    whiten_advantages: bool = True


class ReinforcePlusPlus(PolicyGradient):
    """REINFORCE++."""

    Config = ReinforcePlusPlusConfig
    config: ReinforcePlusPlusConfig

    def baseline(self, batch: StepBatch) -> Tensor:
        """Return the baseline ``[N]`` that is subtracted from the return of every token."""
        return torch.zeros(len(batch))

    def compute_advantages(self, batch: StepBatch) -> tuple[Tensor, None]:
        zeros = torch.zeros_like(batch.rewards)
        # With values 0 and lambda 1, GAE gives the discounted sum of future rewards.
        returns, _ = compute_gae(
            batch.rewards,
            zeros,
            batch.terminated,
            batch.truncated,
            zeros,
            batch.mask,
            self.config.gamma,
            1.0,
        )
        return (returns - self.baseline(batch)[:, None]) * batch.mask, None


class ReinforcePlusPlusBaselineConfig(ReinforcePlusPlusConfig, GroupFilterConfig):
    """Settings of REINFORCE++-baseline."""

    @field_validator("gamma")
    @classmethod
    def _require_undiscounted(cls, value: float) -> float:
        if value < 1:
            raise ValueError(
                f"{value:g} discounts returns, but the group's mean is of undiscounted rewards; "
                "set it to 1, or choose algorithm=reinforce_plus_plus, which has no group baseline"
            )
        return value


class ReinforcePlusPlusBaseline(ReinforcePlusPlus, GroupAlgorithm):
    """REINFORCE++-baseline: the baseline is the group's mean reward, KL penalties included."""

    Config = ReinforcePlusPlusBaselineConfig
    config: ReinforcePlusPlusBaselineConfig

    def baseline(self, batch: StepBatch) -> Tensor:
        return group_means(batch.rewards.sum(-1), batch.groups)
