"""REINFORCE with a leave-one-out baseline (RLOO, arXiv 2402.14740)."""

import torch
from torch import Tensor

from rlinf.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig
from rlinf.data.batch import StepBatch
from rlinf.models.base import StepOutputs
from rlinf.registry import SAMPLE_GROUPS


class LeaveOneOutConfig(PolicyGradientConfig):
    """Keys of the section ``algorithm``: the common ones and ``scale``."""

    scale: float = 1.0
    """Factor of the advantages."""


class LeaveOneOut(PolicyGradient):
    Config = LeaveOneOutConfig
    requires = frozenset({SAMPLE_GROUPS})
    has_group_local_advantages = True

    def compute_advantages(self, batch: StepBatch) -> tuple[Tensor, None]:
        """Return each sample's reward minus the mean of the others in its group, ``[N, T]``."""
        scores = (batch.rewards * batch.mask).sum(-1)
        _, group = torch.unique(batch.groups, return_inverse=True)
        count = torch.bincount(group)[group]
        total = torch.zeros(len(scores)).index_add(0, group, scores)[group]
        others = (total - scores) / (count - 1).clamp(min=1)
        relative = torch.where(count > 1, scores - others, torch.zeros_like(scores))
        return self.config.scale * relative[:, None] * batch.mask, None  # None: no returns

    def policy_loss(
        self, outputs: StepOutputs, batch: StepBatch, weights: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum over steps of ``weights`` times the loss, and no metrics."""
        return -(weights * batch.require("advantages") * outputs.logprobs).sum(), {}
