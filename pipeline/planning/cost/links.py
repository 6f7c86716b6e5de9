"""Communication by latency and bandwidth (Hockney's alpha and beta): sends, collectives, paths.

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations
in MPICH" (sections 4 to 8) for the collectives; the documentation of NCCL and of nccl-tests
(PERFORMANCE.md) for rings and for the double binary tree (Sanders, Speck and Träff 2009). The cost
of the arithmetic in a reduction is left out: GPUs add faster than links bring.

All functions take numbers or arrays that broadcast. A group of one process costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf.errors import PlanError

Numbers = Any
"""A number or an array of numbers."""


@dataclass(frozen=True)
class Link:
    """A way from one process to another."""

    latency_s: Numbers
    """Alpha: seconds until the first byte is there."""
    bytes_per_s: Numbers
    """1 / beta: what one process gets, in one direction."""

    def __post_init__(self) -> None:
        if not (np.all(np.asarray(self.latency_s) >= 0) and np.all(self.bytes_per_s > 0)):
            raise PlanError(
                f"a link of {self.bytes_per_s} bytes/s with a latency of {self.latency_s} s cannot "
                "be; give bandwidths above 0 and latencies of 0 or more"
            )

    def send(self, size: Numbers) -> Numbers:
        """Seconds for ``size`` bytes from one process to another."""
        return self.latency_s + size / self.bytes_per_s


def path_send(path: Sequence[Link], size: float, chunk: float | None = None) -> float:
    """Seconds for ``size`` bytes over links one after the other: GPU to host, host to host, host to
    GPU; or a shared filesystem.

    Args:
        chunk: bytes passed on at once: the first chunk takes the whole way, each further one
            follows as fast as the slowest link takes chunks. None: a link takes up the message
            when the one before it has all of it (as with a file that is written, then read).

    Raises:
        PlanError: the path has no links.
    """
    if not path:
        raise PlanError("a relay path needs at least one link")
    if chunk is None or chunk >= size:
        return float(sum(link.send(size) for link in path))
    times = [float(link.send(chunk)) for link in path]
    return sum(times) + (math.ceil(size / chunk) - 1) * max(times)


def all_reduce(link: Link, processes: Numbers, size: Numbers) -> Numbers:
    """Seconds to sum ``size`` bytes over all processes: the quicker of ring and tree.

    Ring, ``2 (p - 1) alpha + 2 (p - 1) / p n beta``: reduce-scatter, then all-gather. Tree,
    ``2 log2(p) alpha + 2 n beta``: two binary trees, each with half of the data, up and down.
    """
    ring = 2 * all_gather(link, processes, size)
    depth = np.ceil(np.log2(np.maximum(processes, 1)))
    tree = 2 * depth * link.latency_s + 2 * size / link.bytes_per_s
    return np.minimum(ring, tree)


def all_gather(link: Link, processes: Numbers, size: Numbers) -> Numbers:
    """``(p - 1) alpha + (p - 1) / p n beta`` (ring), where ``size`` is what each has in the end; a
    reduce-scatter of ``size`` bytes takes as long."""
    others = np.asarray(processes) - 1
    return others * link.latency_s + others / processes * size / link.bytes_per_s


def all_to_all(link: Link, processes: Numbers, size: Numbers) -> Numbers:
    """``(p - 1) (alpha + n / p beta)``, pair by pair; each has ``size`` bytes for all together."""
    return all_gather(link, processes, size)
