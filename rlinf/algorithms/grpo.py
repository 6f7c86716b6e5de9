"""Group relative policy optimisation (arXiv 2402.03300) and its variant DAPO (arXiv 2503.14476).

Sample a group of responses per prompt; a response's advantage is its reward relative to its group;
every token of it shares that advantage; the surrogate is clipped as in PPO; there is no critic.
"""

from __future__ import annotations

from torch import Tensor

from rlinf.algorithms.advantages import group_relative
from rlinf.algorithms.groups import Relative, RelativeConfig
from rlinf.algorithms.shares import Aggregation


class GRPOConfig(RelativeConfig):
    """Settings of GRPO."""

    normalise: bool = True
    """Divide by the group's standard deviation (off: Dr. GRPO, arXiv 2503.20783)."""


class GRPO(Relative):
    """See the module."""

    Config = GRPOConfig
    config: GRPOConfig

    def relative(self, scores: Tensor, groups: Tensor) -> Tensor:
        return group_relative(scores, groups, normalise=self.config.normalise)


class DAPOConfig(GRPOConfig):
    """GRPO with a wider upper clip, a mean over all tokens, and no groups without a signal."""

    clip_high: float = 0.28
    aggregation: Aggregation = "token_mean"
    drop_equal_groups: bool = True


class DAPO(GRPO):
    """See :class:`DAPOConfig`; the penalty for overlong responses is a reward setting."""

    Config = DAPOConfig
