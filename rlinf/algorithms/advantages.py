"""Advantage estimators: pure functions of rewards, values and masks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def group_relative_advantages(
    scores: Tensor, groups: Tensor, *, norm_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Return scores relative to the samples of the same group (GRPO, arXiv 2402.03300, section
    4.1).

    Args:
        scores: ``[N]`` total reward of each sample.
        groups: ``[N]`` group numbers; groups may differ in size and order.
        norm_by_std: also divide by the group's (unbiased) standard deviation.

    Returns:
        ``[N]``; exactly zero for a group of one or of equal scores.
    """
    means, index, count = _means(scores, groups)
    centred = scores.double() - means[index]
    if norm_by_std:
        square = torch.zeros_like(count).index_add(0, index, centred**2)
        deviation = (square / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (deviation[index] + eps)
    return centred.to(scores.dtype)


def leave_one_out_advantages(scores: Tensor, groups: Tensor) -> Tensor:
    """Return scores relative to the mean of the other samples of the group (RLOO, arXiv 2402.14740,
    section 3).

    Args:
        scores: ``[N]`` total reward of each sample.
        groups: ``[N]`` group numbers.

    Returns:
        ``[N]``; exactly zero for a group of one or of equal scores.
    """
    _, index = torch.unique(groups, return_inverse=True)
    count = torch.bincount(index)[index].to(scores.dtype)
    # r - (sum - r) / (n - 1) is n / (n - 1) times r minus the mean of all.
    return (
        group_relative_advantages(scores, groups, norm_by_std=False)
        * count
        / (count - 1).clamp(min=1)
    )


def turn_level_advantages(
    rewards: Tensor,
    mask: Tensor,
    turns: Tensor,
    groups: Tensor,
    group_advantage: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the return of each turn, relative to the same turn of the other samples of the group.

    The return of a turn is the sum of its own reward and those of later turns (as in GTPO, arXiv
    2511.14846, and process supervision of GRPO, arXiv 2402.03300, section 4.1.3). It is compared
    only with samples that have such a turn, because a turn does not choose whether the dialogue
    reaches it. An outcome that comes one turn later therefore counts the same.

    Args:
        rewards, mask: ``[N, T]``.
        turns: ``[N, T]`` number of the turn, from 0, of each step.
        groups: ``[N]`` group numbers.
        group_advantage: maps scores ``[M]`` and group numbers ``[M]`` to advantages ``[M]``.

    Returns:
        ``[N, T]``, equal within a turn, zero where ``mask`` is 0; exactly zero where no other
        sample of the group has such a turn.
    """
    place = torch.where(mask > 0, turns, 0).long()
    count = int(place.max()) + 1
    # In double precision, equal rewards of different turns have equal sums.
    own = rewards.new_zeros(len(rewards), count, dtype=torch.float64)
    own.scatter_add_(1, place, (rewards * mask).double())
    returns = own.flip(1).cumsum(1).flip(1).to(rewards.dtype)
    there = torch.zeros_like(own).scatter_add_(1, place, (mask > 0).double()) > 0
    _, index = torch.unique(groups, return_inverse=True)
    number = index[:, None] * count + torch.arange(count)
    advantages = torch.zeros_like(returns)
    advantages[there] = group_advantage(returns[there], number[there])
    return advantages.gather(1, place) * mask


def group_means(scores: Tensor, groups: Tensor) -> Tensor:
    """Return the mean score of each sample's group, ``[N]``; exactly the score if all scores of the
    group are equal."""
    means, index, _ = _means(scores, groups)
    return means[index].to(scores.dtype)


def _means(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean score of each group, float64 ``[G]``, the group index of each sample,
    ``[N]``, and the size of each group, float64 ``[G]``."""
    _, index = torch.unique(groups, return_inverse=True)
    exact = scores.double()
    count = torch.bincount(index).double()
    means = torch.zeros_like(count).index_add(0, index, exact) / count
    # The mean of equal scores is rounded, and the rounding error would be divided by itself.
    lowest, highest = (
        torch.zeros_like(count).scatter_reduce(0, index, exact, which, include_self=False)
        for which in ("amin", "amax")
    )
    return torch.where(lowest == highest, lowest, means), index, count


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstrap: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantages (GAE, arXiv 1506.02438, eq. 16) over ``[N, T]`` or ``[N, T,
    C]``.

    With ``[N, T, C]``, the actions of all chunks follow one another, and ``gamma`` and ``lam`` are
    per action. A terminated step has no future. A truncated step, or the last of its row, is
    followed by a state of value ``bootstrap``. Nothing flows across either. A masked step takes no
    time: the step before it is followed by the next unmasked step, unless the episode ended in
    between.

    Args:
        rewards, values, mask: ``[N, T]`` or ``[N, T, C]``.
        terminated, truncated, bootstrap: ``[N, T]``, for the end of a step or of a chunk.

    Returns:
        Advantages and returns (advantage + value), zero where ``mask`` is 0.
    """
    if rewards.ndim > 2:
        # After the last action, even if that is masked, because a masked action takes no time.
        last = torch.arange(rewards.shape[2], device=rewards.device) + 1 == rewards.shape[2]
        ended, cut, after = (
            (column[..., None] * last).flatten(1) for column in (terminated, truncated, bootstrap)
        )
        gained, valued, counted = (column.flatten(1) for column in (rewards, values, mask))
        advantages_flat, returns = compute_gae(
            gained, valued, ended, cut, after, counted, gamma, lam
        )
        return advantages_flat.view(rewards.shape), returns.view(rewards.shape)
    advantages = torch.zeros_like(rewards)
    zero = torch.zeros_like(rewards[:, 0])
    # State of the backward pass: the advantage that flows to the previous step, the value of the
    # state after it, and whether all steps so far are masked.
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


def masked_whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Normalise values to zero mean and unit (unbiased) standard deviation over unmasked steps. The
    result is zero where ``mask`` is 0, and everywhere if all unmasked values are equal or none
    exists."""
    counted = values[mask > 0]
    # The mean of equal values is rounded, and the rounding error would be divided by itself.
    if not len(counted) or bool(counted.min() == counted.max()):
        return torch.zeros_like(values)
    count = mask.sum()
    mean = (values * mask).sum() / count.clamp(min=1)
    variance = ((values - mean) ** 2 * mask).sum() / (count - 1).clamp(min=1)
    return (values - mean) * mask / (variance.sqrt() + eps)
