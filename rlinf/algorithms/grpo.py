"""Group relative policy optimisation (arXiv 2402.03300) and its variant DAPO (arXiv 2503.14476).

Sample a group of responses per prompt; a response's advantage is its reward relative to its group;
every token of it shares that advantage; the surrogate is clipped as in PPO; there is no critic.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rlinf.algorithms.advantages import group_relative
from rlinf.algorithms.policy_gradient import (
    PolicyGradient,
    PolicyGradientConfig,
    policy_terms,
)
from rlinf.algorithms.shares import Aggregation
from rlinf.data.batch import StepBatch
from rlinf.fit import GROUPS
from rlinf.models.base import StepOutputs
from rlinf.trainers.base import Loss


class GRPOConfig(PolicyGradientConfig):
    """Settings of GRPO."""

    normalise: bool = True
    """Divide by the group's standard deviation (off: Dr. GRPO, arXiv 2503.20783)."""
    drop_equal_groups: bool = False
    """Leave out groups whose samples all scored the same: they carry no gradient."""


class GRPO(PolicyGradient):
    """See the module."""

    Config = GRPOConfig
    config: GRPOConfig
    needs = frozenset({GROUPS})
    by_group = True

    def keep(self, scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
        if not self.config.drop_equal_groups:
            return super().keep(scores, groups)
        _, index = np.unique(groups, return_inverse=True)
        lowest = np.full(index.max(initial=-1) + 1, np.inf)
        highest = np.full_like(lowest, -np.inf)
        np.minimum.at(lowest, index, scores)
        np.maximum.at(highest, index, scores)
        return np.asarray((highest > lowest)[index])

    def advantages(self, batch: StepBatch) -> tuple[Tensor, None]:
        relative = group_relative(
            batch.rewards.sum(-1), batch.groups, normalise=self.config.normalise
        )
        return relative[:, None] * batch.mask, None

    def idle(self, batch: StepBatch) -> Tensor:
        # A loss of the user's own may have other terms.
        plain = type(self).loss is GRPO.loss and type(self).objective is GRPO.objective
        if not plain or self.config.entropy_bonus or self.config.kl_coefficient:
            return super().idle(batch)
        return (batch.require("advantages") == 0).flatten(1).all(1)

    def loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        return policy_terms(self.config, outputs, batch, weights)


class DAPOConfig(GRPOConfig):
    """GRPO with a wider upper clip, a mean over all tokens, and no groups without a signal."""

    clip_high: float = 0.28
    aggregation: Aggregation = "token_mean"
    drop_equal_groups: bool = True


class DAPO(GRPO):
    """See :class:`DAPOConfig`; the penalty for overlong responses is a reward setting."""

    Config = DAPOConfig
