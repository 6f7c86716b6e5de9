"""CrossQ: SAC without target networks, with batch renormalisation (arXiv 1902.05605)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlinf.algorithms.off_policy import OffPolicy, required
from rlinf.algorithms.sac import SAC
from rlinf.models.base import Batch


class CrossQ(SAC):
    """One pass of the critics over both what was done and what follows: batch statistics are of
    both, so the two are as one distribution to them (section 4)."""

    def check(self, model: Any) -> None:
        OffPolicy.check(self, model)
        required(model, "targets", False, "CrossQ has no target networks")
        why = "CrossQ's critics normalise by the batch"
        required(model, "critic_norm", "batch_renorm", why)

    def follow(self, module: Any) -> None:
        """There are no target networks, so that ``tau`` has no reader."""

    def values(self, module: Any, batch: Batch, following: Tensor) -> tuple[Tensor, Tensor]:
        done = torch.cat([batch["observations"], batch["actions"]], -1)
        after = torch.cat([batch["next_observations"], following], -1)
        values, later = module.critics(torch.cat([done, after])).chunk(2, -1)
        return values, later.detach()
