"""Partitions over the same nodes: what their kinds have together is less than the sum of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from pipeline.planning.planner.devices import Devices

Crowds = tuple[tuple[tuple[str, ...], int], ...]
"""Names of kinds, and how many devices they have together."""
MOST_SUBSETS = 6
"""Of more kinds over the same nodes only pairs and all together are looked at."""


def crowds(devices: Mapping[str, Devices]) -> Crowds:
    """Kinds that share nodes, in every combination whose devices are fewer than those of each
    added up; with all of these kept, the devices asked for can be found (Hall's theorem)."""
    found = []
    for names in _components(devices):
        sizes = range(2, len(names) + 1) if len(names) <= MOST_SUBSETS else (2, len(names))
        for some in itertools.chain(*(itertools.combinations(names, size) for size in sizes)):
            most = _together([devices[name] for name in some])
            if most < sum(devices[name].count for name in some):
                found.append((some, most))
    return tuple(found)


def _components(devices: Mapping[str, Devices]) -> Iterator[list[str]]:
    """Names of kinds that share nodes, also by way of others; several each."""
    left = [name for name, own in devices.items() if own.nodes]
    while left:
        names = [left.pop(0)]
        for name in names:
            near = [n for n in left if devices[n].nodes & devices[name].nodes]
            names += near
            left = [n for n in left if n not in near]
        if len(names) > 1:
            yield names


def _together(some: list[Devices]) -> int:
    """Devices of several kinds; nodes that are down may be others in each."""
    nodes = len(frozenset[str]().union(*(own.nodes for own in some)))
    usable = nodes - sum(own.down_nodes for own in some)
    per_node = max(own.per_node for own in some)
    return max(usable * per_node, *(own.count for own in some))
