"""Deterministic partitions of a batch: parts of equal duration for ranks, and micro-batches under a
token budget."""

from __future__ import annotations

import bisect
import heapq
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple


class StepSpan(NamedTuple):
    """The steps of one trajectory from ``start`` up to ``stop``."""

    row: int
    """Index of the trajectory in its minibatch."""
    start: int
    stop: int


def balance_costs(costs: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Distribute items over ``len(speeds)`` workers so that the last worker finishes early.

    Items are assigned from the heaviest on, each to the worker that would finish it first (Graham
    1969). If all workers are equally fast and :func:`karmarkar_karp` gives a smaller maximum, its
    partition is used.

    Args:
        costs: cost of each item.
        speeds: relative speeds of the workers. A worker's time is the cost of its items divided by
            its speed.

    Returns:
        For each worker its item indices, ascending. Every item is assigned exactly once.

    Raises:
        ValueError: a speed is not positive.
    """
    if min(speeds) <= 0:
        raise ValueError(f"speeds must be positive, got {list(speeds)}")
    workers: list[list[int]] = [[] for _ in speeds]
    loads = [0.0 for _ in speeds]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        cost = costs[item]
        finish_times = [(load + cost) / speed for load, speed in zip(loads, speeds, strict=True)]
        rank = finish_times.index(min(finish_times))
        workers[rank].append(item)
        loads[rank] += cost
    lower_bound = max(-(-sum(costs) // len(speeds)), max(costs, default=0))
    if min(speeds) == max(speeds) and max(loads) > lower_bound:
        partition = karmarkar_karp(costs, len(speeds))
        if max(sum(costs[item] for item in items) for items in partition) < max(loads):
            workers = partition
    return [sorted(items) for items in workers]


def karmarkar_karp(costs: Sequence[int], count: int) -> list[list[int]]:
    """Partition items into ``count`` parts of similar cost by the largest differencing method.

    Karmarkar and Karp, "The Differencing Method of Set Partitioning" (UC Berkeley, CSD-83-113,
    1982), for several parts. At first, each item is a partition of its own, whose other parts are
    empty. Until one partition remains, the two with the largest differences between their largest
    and smallest parts are merged: the largest part of one with the smallest of the other, etc.

    Returns:
        Item indices of each part, the most expensive part first. The costs of the parts do not
        depend on the order of the items.
    """
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    if count == 1 or not order:
        return [order, *([] for _ in range(count - 1))]
    # Parts are trees of items, because joining lists would copy them. Costs are relative to the
    # cheapest part of a partition: differences stay the same and numbers stay small.
    empty: list[tuple[int, Any]] = [(0, None)] * (count - 1)
    heap = [(-costs[item], i, [(costs[item], item), *empty]) for i, item in enumerate(order)]
    heapq.heapify(heap)
    tie_breaker = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heap[0]
        pairs = zip(first, reversed(second), strict=True)
        joined = [
            (cost_a + cost_b, a if b is None else b if a is None else (a, b))
            for (cost_a, a), (cost_b, b) in pairs
        ]
        joined.sort(key=_cost, reverse=True)
        lowest = joined[-1][0]
        joined = [(cost - lowest, items) for cost, items in joined]
        heapq.heapreplace(heap, (-joined[0][0], tie_breaker, joined))
        tie_breaker += 1
    return [_leaves(tree) for _, tree in heap[0][2]]


_cost = operator.itemgetter(0)


def _leaves(tree: Any) -> list[int]:
    """Return the items in a tree of pairs."""
    leaves, stack = list[int](), [] if tree is None else [tree]
    while stack:
        top = stack.pop()
        if isinstance(top, tuple):
            stack += top
        else:
            leaves.append(top)
    return leaves


def pack_microbatches(
    costs: Sequence[int], items: Sequence[int], budget: int, *, padded: bool = True
) -> list[list[int]]:
    """Group items into few micro-batches whose size stays within ``budget``.

    An item that exceeds the budget is in a micro-batch by itself.

    Args:
        costs: number of positions of each row.
        items: indices into ``costs``.
        padded: whether rows are padded. The size of a group is then its number of rows times its
            largest cost; otherwise it is the sum of its costs.

    Returns:
        Item indices of each group. Groups, and items in them, are in descending order of cost.
    """
    return _pack(costs, sorted(items, key=lambda i: (-costs[i], i)), budget, padded)


def even_microbatches(
    costs: Sequence[int], items: Sequence[int], count: int, budget: int, *, padded: bool = True
) -> list[list[int]]:
    """Group items into ``count`` micro-batches of sizes as even as possible.

    Sizes are computed as in :func:`pack_microbatches`, and stay within ``budget`` if that function
    needs at most ``count`` groups. If there are fewer items than groups, each item is one group.
    """
    order = sorted(items, key=lambda i: (-costs[i], i))
    count = min(count, len(order))
    best = _pack(costs, order, budget, padded)
    low, high = 0, budget
    if len(best) > count:
        high = sum(costs[i] for i in order[:1]) * len(order)
        best = [order]
    # A larger limit sometimes needs more groups, so keep the best result so far.
    while low < high:
        middle = (low + high) // 2
        groups = _pack(costs, order, middle, padded)
        if len(groups) <= count:
            high, best = middle, groups
        else:
            low = middle + 1
    while len(best) < count:
        largest = max((g for g in best if len(g) > 1), key=lambda g: costs[g[0]] * len(g))
        index, half = best.index(largest), (len(largest) + 1) // 2
        best[index : index + 1] = [largest[:half], largest[half:]]
    return best


def _pack(costs: Sequence[int], order: Sequence[int], limit: int, padded: bool) -> list[list[int]]:
    """Group items, in descending order of cost, within a size limit; a single item may exceed it.

    With padding, next-fit needs the fewest groups: the longest item determines how many rows fit
    into its group, and the next longest items need the least padding there.
    """
    next_fit = _next_fit(costs, order, limit, padded)
    if padded:
        return next_fit
    best_fit = _best_fit(costs, order, limit)
    return best_fit if len(best_fit) <= len(next_fit) else next_fit


def _next_fit(
    costs: Sequence[int], order: Sequence[int], limit: int, padded: bool
) -> list[list[int]]:
    groups: list[list[int]] = []
    size = 0
    for item in order:
        # Costs descend, so the first item of a group is its longest.
        added = costs[groups[-1][0] if padded else item] if groups else 0
        if groups and size + added <= limit:
            groups[-1].append(item)
            size += added
        else:
            groups.append([item])
            size = costs[item]
    return groups


def _best_fit(costs: Sequence[int], order: Sequence[int], limit: int) -> list[list[int]]:
    """Group items by best-fit decreasing (Johnson 1974): each item joins the group in which it
    leaves the least room.

    The number of groups is at most 11/9 of the minimum plus 2/3 (Dosa 2007, for first-fit).
    """
    groups: list[list[int]] = []
    free: list[tuple[int, int]] = []  # sorted pairs: free size, index of the group
    for item in order:
        index = bisect.bisect_left(free, (costs[item], 0))
        if index == len(free):
            groups.append([item])
            bisect.insort(free, (limit - costs[item], len(groups) - 1))
        else:
            room, group = free.pop(index)
            groups[group].append(item)
            bisect.insort(free, (room - costs[item], group))
    return groups
