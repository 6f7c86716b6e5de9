"""Cutting a batch: shares for ranks, micro-batches under a token budget. All deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(costs: Sequence[int], shares: Sequence[float]) -> list[list[int]]:
    """Give every item to one of ``len(shares)`` workers, heaviest first, to the least loaded.

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
    loads = [(0.0, rank) for rank in range(len(shares))]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        workers[rank].append(item)
        heapq.heappush(loads, (load + costs[item] / shares[rank], rank))
    return [sorted(items) for items in workers]


def micro_batches(costs: Sequence[int], items: Sequence[int], budget: int) -> list[list[int]]:
    """Group items of like cost so that count times largest cost stays within ``budget``.

    An item dearer than the budget gets a micro-batch of its own.
    """
    groups: list[list[int]] = []
    for item in sorted(items, key=lambda i: (-costs[i], i)):
        # Items come in falling cost, so the first of a group is its widest.
        if groups and costs[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups
