"""Reinforcement learning with prior data (RLPD, arXiv 2302.02948)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rlinf.algorithms.action_values import Aggregate
from rlinf.algorithms.off_policy import required
from rlinf.algorithms.sac import SAC, SACConfig
from rlinf.errors import ConfigError


class RLPDConfig(SACConfig):
    """SAC's, with the paper's values."""

    prior_share: float = Field(default=0.5, ge=0, le=1)
    """Share of each batch that is of the prior transitions (symmetric sampling)."""
    update_ratio: float = Field(default=20.0, gt=0)
    policy_every: int = Field(default=20, gt=0)
    policy_aggregate: Aggregate = "mean"
    backup_entropy: bool = False
    target_critics: int = Field(default=2, gt=0)
    """Critics, drawn anew for each step, whose least value the target is of (REDQ, arXiv
    2101.05982)."""


class RLPD(SAC):
    """See the module. Critics have layer normalisation, which keeps values of actions that no data
    are of from growing."""

    Config = RLPDConfig
    config: RLPDConfig

    def __init__(self, config: RLPDConfig) -> None:
        super().__init__(config)
        self.subset = config.target_critics

    def check(self, model: Any) -> None:
        super().check(model)
        required(model, "critic_norm", "layer", "RLPD's critics have layer normalisation")
        if self.config.prior is None:
            raise ConfigError(
                "algorithm.prior: RLPD learns from prior transitions too; name a file of them, or "
                "choose algorithm=sac"
            )
        if self.config.target_critics > getattr(model, "critics", self.config.target_critics):
            raise ConfigError(
                f"algorithm.target_critics: {self.config.target_critics} of {model.critics} "
                "critics; lower it or raise model.critics"
            )
