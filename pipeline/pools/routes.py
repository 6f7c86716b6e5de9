"""Which worker sends an input to which others: by shared memory on one node, sockets elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from stages.worker.inbox import SHARED_MEMORY, SOCKET

FAN_OUT = 2
"""To how many a worker sends by socket; more would share its link, fewer make longer ways."""
Hosts = Mapping[str, str | None]
"""By worker its node; None: not known."""
Routes = dict[str, dict[str, str]]
"""By sender: to whom, and by which way."""


def tree(source: str, host: str | None, takers: Hosts, *, near: bool, turn: int = 0) -> Routes:
    """From one worker to all takers, of which some pass on what they get.

    It crosses to each node once: the first worker there sends it to the others of the node, and
    on to further nodes.

    Args:
        near: whether those on one node may use its memory.
        turn: of several sources each has another one, so that each taker passes on some.
    """
    names = [worker for worker in takers if worker != source]
    first = turn % len(names) if names else 0
    nodes: dict[object, list[str]] = defaultdict(list)
    for worker in (*names[first:], *names[:first]):
        at = takers[worker]
        nodes[(worker,) if at is None else at].append(worker)
    routes: Routes = defaultdict(dict)
    here = nodes.pop(host, []) if host is not None else []
    heads = [workers[0] for workers in nodes.values()]
    _pass_on(routes, source, heads)
    for head, others in [(source, here), *((head, rest) for head, *rest in nodes.values())]:
        if near:
            routes[head] |= dict.fromkeys(others, SHARED_MEMORY)
        else:
            _pass_on(routes, head, others)
    return {sender: to for sender, to in routes.items() if to}


def _pass_on(routes: Routes, source: str, workers: Sequence[str]) -> None:
    """A tree of sockets."""
    senders = [source, *workers]
    for number, worker in enumerate(workers):
        routes[senders[number // FAN_OUT]][worker] = SOCKET
