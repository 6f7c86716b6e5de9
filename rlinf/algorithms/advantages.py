"""Advantage estimators: pure functions of rewards, values and masks."""

from __future__ import annotations

import torch
from torch import Tensor


def group_relative(
    scores: Tensor, groups: Tensor, *, normalise: bool = True, eps: float = 1e-6
) -> Tensor:
    """Score relative to the samples of the same group (GRPO, arXiv 2402.03300, section 4.1).

    Args:
        scores: ``[N]`` total reward of each sample.
        groups: ``[N]`` group numbers; groups may differ in size and order.
        normalise: also divide by the group's (unbiased) standard deviation.

    Returns:
        ``[N]``; exactly zero for a group of one or of equal scores.
    """
    _, index = torch.unique(groups, return_inverse=True)
    exact = scores.double()
    count = torch.bincount(index).double()
    mean = torch.zeros_like(count).index_add(0, index, exact) / count
    # The mean of equal scores is rounded: what is left of them would be divided by itself.
    lowest, highest = (
        torch.zeros_like(count).scatter_reduce(0, index, exact, which, include_self=False)
        for which in ("amin", "amax")
    )
    centred = torch.where((lowest == highest)[index], 0.0, exact - mean[index])
    if normalise:
        square = torch.zeros_like(count).index_add(0, index, centred**2)
        deviation = (square / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (deviation[index] + eps)
    return centred.to(scores.dtype)


def leave_one_out(scores: Tensor, groups: Tensor) -> Tensor:
    """Score relative to the mean of the others of its group (RLOO, arXiv 2402.14740, section 3).

    Args:
        scores: ``[N]`` total reward of each sample.
        groups: ``[N]`` group numbers.

    Returns:
        ``[N]``; exactly zero for a group of one or of equal scores.
    """
    _, index = torch.unique(groups, return_inverse=True)
    count = torch.bincount(index)[index].to(scores.dtype)
    # r - (sum - r) / (n - 1) is n / (n - 1) times what it is relative to the mean of all.
    return group_relative(scores, groups, normalise=False) * count / (count - 1).clamp(min=1)


def group_means(scores: Tensor, groups: Tensor) -> Tensor:
    """Mean score of each sample's group, ``[N]`` of ``[N]``."""
    _, index = torch.unique(groups, return_inverse=True)
    total = torch.zeros(int(index.max()) + 1, dtype=scores.dtype).index_add(0, index, scores)
    return (total / torch.bincount(index))[index]


def generalised(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstrap: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over ``[N, T]``.

    A step that terminated has no future; one that was truncated, or is the last of its row, is
    followed by the state whose value is ``bootstrap``. Nothing flows across either. A step where
    ``mask`` is 0 takes no time: the one before it is followed by the next that counts, unless the
    episode ended in between.

    Returns:
        Advantages and returns (advantage + value), zero where ``mask`` is 0.
    """
    advantages = torch.zeros_like(rewards)
    zero = torch.zeros_like(rewards[:, 0])
    # Of the steps so far, from the back: the advantage that flows to the step before, the value of
    # the state after it, and whether none of them counts.
    carry, ahead, tail = zero, zero, torch.ones_like(zero, dtype=torch.bool)
    for t in reversed(range(rewards.shape[1])):
        counts, ends, cuts = (column[:, t].bool() for column in (mask, terminated, truncated))
        ahead = torch.where(tail, ahead + bootstrap[:, t], ahead)
        ahead = torch.where(ends, zero, torch.where(cuts, bootstrap[:, t], ahead))
        carry = torch.where(ends | cuts, zero, carry)
        delta = rewards[:, t] + gamma * ahead - values[:, t]
        carry = torch.where(counts, delta + gamma * lam * carry, carry)
        ahead = torch.where(counts, values[:, t], ahead)
        tail = tail & ~counts
        advantages[:, t] = torch.where(counts, carry, zero)
    return advantages, (advantages + values) * mask


def whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit (unbiased) deviation over the steps where ``mask`` is 1."""
    count = mask.sum()
    mean = (values * mask).sum() / count.clamp(min=1)
    variance = ((values - mean) ** 2 * mask).sum() / (count - 1).clamp(min=1)
    return (values - mean) * mask / (variance.sqrt() + eps)
