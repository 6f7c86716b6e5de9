"""Kinds that have less together than the sum of them: partitions over the same nodes, and limits of
accounting on what all jobs have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from pipeline.planning.planner.devices import Devices
from slurm.quotas import Shared

Crowds = tuple[tuple[tuple[str, ...], int], ...]
"""Names of kinds, and how many devices they have together, or jobs."""
MOST_SUBSETS = 6
"""Of more kinds over the same nodes only pairs and all together are looked at."""


def crowds(devices: Mapping[str, Devices]) -> Crowds:
    """Kinds that share nodes, in every combination whose devices are fewer than those of each
    added up; with all of these kept, the devices asked for can be found (Hall's theorem). And kinds
    that a limit of accounting counts together; where they take unlike amounts of it, each as much
    as the one that takes most."""
    found = list(_limited(devices))
    for names in _components(devices):
        sizes = range(2, len(names) + 1) if len(names) <= MOST_SUBSETS else (2, len(names))
        for some in itertools.chain(*(itertools.combinations(names, size) for size in sizes)):
            most = _together([devices[name] for name in some])
            if most < sum(devices[name].count for name in some):
                found.append((some, most))
    return tuple(found)


def limits_of(devices: Mapping[str, Devices]) -> list[str]:
    """Limits on what all jobs have together that devices count against, in words."""
    found = {shared for own in devices.values() for shared in own.allowance.together}
    return [f"{s.who} allows {s.most} {s.key} in all ({s.name})" for s in sorted(found)]


def few_jobs(devices: Mapping[str, Devices]) -> Crowds:
    """Kinds whose jobs a limit of accounting counts together, and how many it lets run at once,
    where that is less than a job for each device.

    Of two and more one place is left to the driver, which ``rlinf submit`` makes a job too.
    """
    found: dict[Shared, list[str]] = {}
    for name, own in devices.items():
        for shared in own.allowance.together:
            if shared.key == "jobs":
                found.setdefault(shared, []).append(name)
    return tuple(
        (tuple(names), max(1, shared.most - 1))
        for shared, names in found.items()
        if shared.most - 1 < sum(devices[name].count for name in names)
    )


def _limited(devices: Mapping[str, Devices]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Kinds that limits of accounting count together, and how many devices they allow of them."""
    limits = dict.fromkeys(shared for own in devices.values() for shared in own.shares)
    for shared in limits:
        names = tuple(name for name, own in devices.items() if shared in own.shares)
        most = shared.most // max(devices[name].shares[shared] for name in names)
        if len(names) > 1 and most < sum(devices[name].count for name in names):
            yield names, most


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
