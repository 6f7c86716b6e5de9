"""Deterministic partitions of a batch: balanced shares for ranks, micro-batches under a token
budget."""

from __future__ import annotations

import bisect
import heapq
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple


class StepSpan(NamedTuple):
    """The steps of one trajectory from ``start`` up to ``stop``: a row of a minibatch."""

    row: int
    start: int
    stop: int


def balance_costs(costs: Sequence[int], shares: Sequence[float]) -> list[list[int]]:
    """Distribute items over ``len(shares)`` workers so that the last one finishes early.

    The heaviest item goes first, to the worker that would finish it first (Graham 1969). If all
    workers have one speed and :func:`karmarkar_karp` gives a smaller maximum, its partition is
    used.

    Args:
        costs: cost of each item.
        shares: relative speeds of the workers; load is cost divided by share.

    Returns:
        For each worker its item numbers, ascending. Every item is assigned exactly once.

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
    least = max(-(-sum(costs) // len(shares)), max(costs, default=0))
    if min(shares) == max(shares) and max(loads) > least:
        partition = karmarkar_karp(costs, len(shares))
        if max(sum(costs[item] for item in items) for items in partition) < max(loads):
            workers = partition
    return [sorted(items) for items in workers]


def karmarkar_karp(costs: Sequence[int], count: int) -> list[list[int]]:
    """Partition items into parts of similar cost by the largest differencing method.

    Karmarkar and Karp, "The Differencing Method of Set Partitioning" (UC Berkeley, CSD-83-113,
    1982), for several parts. Each item begins as a partition whose other parts are empty. The two
    partitions with the largest differences are merged, the largest part of one with the smallest of
    the other, until one is left.

    Returns:
        Item numbers of each part, the most expensive part first. The costs of the parts do not
        depend on the order of the items.
    """
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    if count == 1 or not order:
        return [order, *([] for _ in range(count - 1))]
    # Parts are trees of items, as joining lists would copy them. Costs count from a partition's
    # least part, which changes no difference and keeps numbers small.
    empty: list[tuple[int, Any]] = [(0, None)] * (count - 1)
    heap = [(-costs[item], at, [(costs[item], item), *empty]) for at, item in enumerate(order)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heap[0]
        pairs = zip(one, reversed(other), strict=True)
        joined = [
            (cost + more, mine if its is None else its if mine is None else (mine, its))
            for (cost, mine), (more, its) in pairs
        ]
        joined.sort(key=_cost, reverse=True)
        low = joined[-1][0]
        joined = [(cost - low, items) for cost, items in joined]
        heapq.heapreplace(heap, (-joined[0][0], number, joined))
        number += 1
    return [_items(tree) for _, tree in heap[0][2]]


_cost = operator.itemgetter(0)


def _items(tree: Any) -> list[int]:
    """Return the leaves of a tree of pairs."""
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
    """Group items into few groups whose size stays within ``budget``.

    An item that exceeds the budget forms a micro-batch of its own.

    Args:
        padded: True if the size of a group is its count times its largest cost, else its sum.

    Returns:
        Item numbers of each group, both by descending cost.
    """
    return _groups(costs, sorted(items, key=lambda i: (-costs[i], i)), budget, padded)


def even_microbatches(
    costs: Sequence[int], items: Sequence[int], count: int, budget: int, *, padded: bool = True
) -> list[list[int]]:
    """Group items into ``count`` groups of sizes as even as possible.

    Sizes are computed as in :func:`pack_microbatches`. They stay within ``budget`` where that
    function needs no more than ``count`` groups. With fewer items than groups, each item is a group
    of its own, so there are fewer groups.
    """
    order = sorted(items, key=lambda i: (-costs[i], i))
    count = min(count, len(order))
    best = _groups(costs, order, budget, padded)
    low, high = 0, budget
    if len(best) > count:
        high = sum(costs[i] for i in order[:1]) * len(order)
        best = [order]
    # A larger limit may need more groups now and then: what was found is kept.
    while low < high:
        middle = (low + high) // 2
        groups = _groups(costs, order, middle, padded)
        if len(groups) <= count:
            high, best = middle, groups
        else:
            low = middle + 1
    while len(best) < count:
        widest = max((g for g in best if len(g) > 1), key=lambda g: costs[g[0]] * len(g))
        at, half = best.index(widest), (len(widest) + 1) // 2
        best[at : at + 1] = [widest[:half], widest[half:]]
    return best


def _groups(
    costs: Sequence[int], order: Sequence[int], limit: int, padded: bool
) -> list[list[int]]:
    """Group items, most expensive first, within a size; a single item may exceed it.

    With padding, filling one group after another needs the fewest groups: the widest item fixes how
    many rows its group takes, and the next widest ones lose the least by it.
    """
    filled = _next_fit(costs, order, limit, padded)
    if padded:
        return filled
    fitted = _best_fit(costs, order, limit)
    return fitted if len(fitted) <= len(filled) else filled


def _next_fit(
    costs: Sequence[int], order: Sequence[int], limit: int, padded: bool
) -> list[list[int]]:
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


def _best_fit(costs: Sequence[int], order: Sequence[int], limit: int) -> list[list[int]]:
    """Group items by best-fit decreasing (Johnson 1974): each joins the group that it fills the
    most.

    At most 11/9 of the fewest groups, and 2/3 of one more (Dosa 2007, for first-fit).
    """
    groups: list[list[int]] = []
    free: list[tuple[int, int]] = []  # sorted: room, number of the group
    for item in order:
        at = bisect.bisect_left(free, (costs[item], 0))
        if at == len(free):
            groups.append([item])
            bisect.insort(free, (limit - costs[item], len(groups) - 1))
        else:
            room, number = free.pop(at)
            groups[number].append(item)
            bisect.insort(free, (room - costs[item], number))
    return groups
