"""REINFORCE with a leave-one-out baseline (RLOO, arXiv 2402.14740).

Sample a group of responses per prompt; a response's advantage is its reward less the mean reward of
the others of its group, which is an unbiased baseline; every token of it shares that advantage.
"""

from __future__ import annotations

from torch import Tensor

from rlinf.algorithms.advantages import leave_one_out
from rlinf.algorithms.groups import Relative, RelativeConfig


class RLOOConfig(RelativeConfig):
    """Those of all that judge by groups; ``kl_reward`` is the divergence that the paper takes from
    the reward, here with the estimate of each token within
    :data:`rlinf.algorithms.losses.KL_BOUND`."""


class RLOO(Relative):
    """See the module."""

    Config = RLOOConfig
    config: RLOOConfig

    def relative(self, scores: Tensor, groups: Tensor) -> Tensor:
        return leave_one_out(scores, groups)
