"""Cutting a batch: shares for ranks, micro-batches under a token budget. All deterministic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Steps of one trajectory: a row of a minibatch, from ``start`` up to ``stop``."""

    row: int
    start: int
    stop: int


def balance(costs: Sequence[int], shares: Sequence[float]) -> list[list[int]]:
    """Give every item to one of ``len(shares)`` workers, heaviest first, to who ends first.

    Args:
        costs: cost of each item.
        shares: relative speeds of the workers; load is cost divided by share.

    Returns:
        For each worker its item numbers, ascending. No item is lost or given twice.

    Raises:
        ValueError: a share is not positive.
    """
    if min(shares) <= 0:
        raise ValueError(f"shares must be positive, got {list(shares)}")
    workers: list[list[int]] = [[] for _ in shares]
    loads = [0.0 for _ in shares]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        cost = costs[item]
        ends = [(load + cost) / share for load, share in zip(loads, shares, strict=True)]
        rank = ends.index(min(ends))
        workers[rank].append(item)
        loads[rank] += cost
    return [sorted(items) for items in workers]


def micro_batches(
    costs: Sequence[int], items: Sequence[int], budget: int, *, padded: bool = True
) -> list[list[int]]:
    """Group items of like cost so that the size of each group stays within ``budget``.

    An item dearer than the budget gets a micro-batch of its own.

    Args:
        padded: whether the size of a group is its count times its largest cost, or its sum.
    """
    return _filled(costs, sorted(items, key=lambda i: (-costs[i], i)), budget, padded)


def even_batches(
    costs: Sequence[int], items: Sequence[int], count: int, *, padded: bool = True
) -> list[list[int]]:
    """Group items of like cost into ``count`` groups whose sizes are as even as may be.

    Sizes are those of :func:`micro_batches`. With fewer items than groups each has its own, and
    there are fewer groups.
    """
    order = sorted(items, key=lambda i: (-costs[i], i))
    count = min(count, len(order))
    low, high = 0, sum(costs[i] for i in order[:1]) * len(order)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(costs, order, middle, padded)) <= count:
            high = middle
        else:
            low = middle + 1
    groups = _filled(costs, order, low, padded)
    while len(groups) < count:
        widest = max((g for g in groups if len(g) > 1), key=lambda g: costs[g[0]] * len(g))
        at, half = groups.index(widest), (len(widest) + 1) // 2
        groups[at : at + 1] = [widest[:half], widest[half:]]
    return groups


def _filled(
    costs: Sequence[int], order: Sequence[int], limit: int, padded: bool
) -> list[list[int]]:
    """Items, dearest first, in groups that stay within a size; one alone may exceed it."""
    groups: list[list[int]] = []
    size = 0
    for item in order:
        # Items come in falling cost, so the first of a group is its widest.
        more = costs[groups[-1][0] if padded else item] if groups else 0
        if groups and size + more <= limit:
            groups[-1].append(item)
            size += more
        else:
            groups.append([item])
            size = costs[item]
    return groups
