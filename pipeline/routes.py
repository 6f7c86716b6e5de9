"""Who sends an input to which workers, and how: shared memory on one node, sockets elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from stages.inbox import SHARED_MEMORY, SOCKET

FAN_OUT = 2
"""Nodes that a worker sends weights on to; more would share its link, fewer make longer ways."""
Hosts = Mapping[str, str | None]
"""By worker its node; None: not known."""
Routes = dict[str, dict[str, str]]
"""By sender: to whom, and by which way."""


def to_all(makers: Hosts, takers: Hosts, *, near: bool) -> Routes:
    """Records: from every maker to every taker.

    Args:
        near: whether those on one node may use its memory.
    """
    here = set(makers.values())
    ways = {
        worker: SHARED_MEMORY if near and host is not None and here == {host} else SOCKET
        for worker, host in takers.items()
    }
    return {maker: dict(ways) for maker in makers}


def tree(source: str, host: str | None, takers: Hosts, *, near: bool) -> Routes:
    """Weights: from one worker to all takers, of which some pass them on.

    They cross to each node once, where its first worker shares them with the others; nodes form a
    tree, each sending to :data:`FAN_OUT` others.

    Args, Returns: as :func:`to_all`.
    """
    nodes: dict[object, list[str]] = defaultdict(list)
    for worker, at in takers.items():
        nodes[at if near and at is not None else worker].append(worker)
    routes: Routes = defaultdict(dict)
    routes[source] = dict.fromkeys(nodes.pop(host, ()), SHARED_MEMORY)
    heads = [source, *(workers[0] for workers in nodes.values())]
    for number, head in enumerate(heads[1:]):
        routes[heads[number // FAN_OUT]][head] = SOCKET
    for head, *others in nodes.values():
        if others:
            routes[head] |= dict.fromkeys(others, SHARED_MEMORY)
    return {sender: to for sender, to in routes.items() if to}
