"""REINFORCE with a leave-one-out baseline (RLOO, arXiv 2402.14740).

Sample a group of responses per prompt; a response's advantage is its reward less the mean reward of
the others of its group, which is an unbiased baseline; every token of it shares that advantage.
"""

from __future__ import annotations

from torch import Tensor

from rlinf.algorithms.advantages import leave_one_out
from rlinf.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig, policy_terms
from rlinf.data.batch import StepBatch
from rlinf.fit import GROUPS
from rlinf.models.base import StepOutputs
from rlinf.trainers.base import Loss


class RLOOConfig(PolicyGradientConfig):
    """Those of all policy gradients; ``kl_reward`` is the divergence that the paper takes from the
    reward."""


class RLOO(PolicyGradient):
    """See the module."""

    Config = RLOOConfig
    config: RLOOConfig
    needs = frozenset({GROUPS})
    by_group = True

    def advantages(self, batch: StepBatch) -> tuple[Tensor, None]:
        relative = leave_one_out(batch.rewards.sum(-1), batch.groups)
        return relative[:, None] * batch.mask, None

    def loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        return policy_terms(self.config, outputs, batch, weights)
