"""Advantage estimators: pure functions of rewards, values and masks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def group_relative_advantages(
    rewards: Tensor, groups: Tensor, *, norm_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Return rewards relative to the mean of their group (GRPO, arXiv 2402.03300, section 4.1).

    Args:
        rewards: ``[N]`` total reward of each sample, or return of one of its turns.
        groups: ``[N]`` group indices; groups may differ in size and order.
        norm_by_std: also divide by the group's (unbiased) standard deviation.

    Returns:
        ``[N]``; exactly zero for a group of one sample or of equal rewards.
    """
    means, index, count = _means(rewards, groups)
    advantages = rewards.double() - means[index]
    if norm_by_std:
        squares = torch.zeros_like(count).index_add(0, index, advantages**2)
        deviation = (squares / (count - 1).clamp(min=1)).sqrt()
        advantages = advantages / (deviation[index] + eps)
    return advantages.to(rewards.dtype)


def leave_one_out_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return rewards relative to the mean of the other samples of the group (RLOO, arXiv
    2402.14740, section 3).

    Args:
        rewards, groups: as in :func:`group_relative_advantages`.

    Returns:
        ``[N]``; exactly zero for a group of one sample or of equal rewards.
    """
    _, index = torch.unique(groups, return_inverse=True)
    count = torch.bincount(index)[index].to(rewards.dtype)
    # r - (sum - r) / (n - 1) equals n / (n - 1) * (r - mean).
    return (
        group_relative_advantages(rewards, groups, norm_by_std=False)
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
    """Return each turn's return, relative to the same turn of the other samples of the group.

    The return of a turn is the sum of its reward and the rewards of later turns (as in GTPO, arXiv
    2511.14846, and process supervision of GRPO, arXiv 2402.03300, section 4.1.3). Only samples that
    have this turn are compared, because earlier turns decide whether the dialogue reaches it. The
    same outcome therefore has the same effect if a sample gets this outcome one turn later.

    Args:
        rewards, mask: ``[N, T]``.
        turns: ``[N, T]`` turn of each step, from 0.
        groups: ``[N]`` group indices.
        group_advantage: maps returns ``[M]`` and group indices ``[M]`` to advantages ``[M]``.

    Returns:
        ``[N, T]``, equal within a turn, zero where ``mask`` is 0; exactly zero where no other
        sample of the group has this turn.
    """
    turn_of_step = torch.where(mask > 0, turns, 0).long()
    num_turns = int(turn_of_step.max()) + 1
    # In double precision, equal rewards of different turns have equal sums.
    turn_rewards = rewards.new_zeros(len(rewards), num_turns, dtype=torch.float64)
    turn_rewards.scatter_add_(1, turn_of_step, (rewards * mask).double())
    returns = turn_rewards.flip(1).cumsum(1).flip(1).to(rewards.dtype)
    num_steps = torch.zeros_like(turn_rewards).scatter_add_(1, turn_of_step, (mask > 0).double())
    has_turn = num_steps > 0
    _, index = torch.unique(groups, return_inverse=True)
    turn_groups = index[:, None] * num_turns + torch.arange(num_turns)
    advantages = torch.zeros_like(returns)
    advantages[has_turn] = group_advantage(returns[has_turn], turn_groups[has_turn])
    return advantages.gather(1, turn_of_step) * mask


def group_means(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return the mean reward of each sample's group, ``[N]``. The mean of equal rewards is
    exact."""
    means, index, _ = _means(rewards, groups)
    return means[index].to(rewards.dtype)


def _means(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean reward of each group, float64 ``[G]``, the group index of each sample,
    ``[N]``, and the size of each group, float64 ``[G]``."""
    _, index = torch.unique(groups, return_inverse=True)
    exact_rewards = rewards.double()
    count = torch.bincount(index).double()
    means = torch.zeros_like(count).index_add(0, index, exact_rewards) / count
    # The mean of equal rewards is rounded, and normalization would amplify the rounding error.
    lowest, highest = (
        torch.zeros_like(count).scatter_reduce(0, index, exact_rewards, reduce, include_self=False)
        for reduce in ("amin", "amax")
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
    per action. The state after a terminated step has value 0. The state after a truncated step, or
    after the last step of a row, has value ``bootstrap``. No advantage flows back over an episode
    end. Masked steps are skipped: an unmasked step is followed by the next unmasked step, unless
    the episode ended in between.

    Args:
        rewards, values, mask: ``[N, T]`` or ``[N, T, C]``.
        terminated, truncated, bootstrap: ``[N, T]``, at the end of each step or chunk.

    Returns:
        Advantages and returns (advantage + value), zero where ``mask`` is 0.
    """
    if rewards.ndim > 2:
        # Episode ends go to the last action of a chunk, even if it is masked.
        is_last = torch.arange(rewards.shape[2], device=rewards.device) + 1 == rewards.shape[2]
        flat_ends = (
            (column[..., None] * is_last).flatten(1)
            for column in (terminated, truncated, bootstrap)
        )
        flat_terminated, flat_truncated, flat_bootstrap = flat_ends
        flat_advantages, returns = compute_gae(
            rewards.flatten(1),
            values.flatten(1),
            flat_terminated,
            flat_truncated,
            flat_bootstrap,
            mask.flatten(1),
            gamma,
            lam,
        )
        return flat_advantages.view(rewards.shape), returns.view(rewards.shape)
    advantages = torch.zeros_like(rewards)
    zero = torch.zeros_like(rewards[:, 0])
    # State of the backward pass: the advantage of the next step, the value of the next state, and
    # whether all later steps are masked.
    next_advantage, next_value = zero, zero
    is_tail = torch.ones_like(zero, dtype=torch.bool)
    for t in reversed(range(rewards.shape[1])):
        unmasked, is_end, is_cut = (column[:, t].bool() for column in (mask, terminated, truncated))
        next_value = torch.where(is_tail, next_value + bootstrap[:, t], next_value)
        next_value = torch.where(is_end, zero, torch.where(is_cut, bootstrap[:, t], next_value))
        next_advantage = torch.where(is_end | is_cut, zero, next_advantage)
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(unmasked, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(unmasked, values[:, t], next_value)
        is_tail = is_tail & ~unmasked
        advantages[:, t] = torch.where(unmasked, next_advantage, zero)
    return advantages, (advantages + values) * mask


def masked_whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Normalise values to zero mean and unit (unbiased) standard deviation over unmasked steps.
    Masked values become zero. If all unmasked values are equal, these become zero too."""
    unmasked = values[mask > 0]
    # The mean of equal values is rounded, and normalization would amplify the rounding error.
    if not len(unmasked) or bool(unmasked.min() == unmasked.max()):
        return torch.zeros_like(values)
    count = mask.sum()
    mean = (values * mask).sum() / count.clamp(min=1)
    variance = ((values - mean) ** 2 * mask).sum() / (count - 1).clamp(min=1)
    return (values - mean) * mask / (variance.sqrt() + eps)
