"""Every worker gets what it waits for, once, over as few links as may be."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipeline.pools.dispatcher import FAN_OUT, route_tree
from stages.worker.record_transfer import SHARED_MEMORY, SOCKET

HOSTS = st.sampled_from(["n0", "n1", "n2", "n3", "n4", "n5", None])
TAKERS = st.lists(HOSTS, min_size=1, max_size=40).map(
    lambda hosts: {f"t{i}": host for i, host in enumerate(hosts)}
)


def test_each_node_is_sent_to_once_and_nodes_pass_on() -> None:
    takers = {"a0": "a", "a1": "a", "b0": "b", "b1": "b", "c0": "c", "d0": "d", "s1": "s"}
    assert route_tree("s0", "s", takers, use_shared_memory=True) == {
        "s0": {"s1": SHARED_MEMORY, "a0": SOCKET, "b0": SOCKET},
        "a0": {"a1": SHARED_MEMORY, "c0": SOCKET, "d0": SOCKET},
        "b0": {"b1": SHARED_MEMORY},
    }


def test_a_rank_that_takes_what_it_makes_is_not_sent_to() -> None:
    takers = {"r0": "n", "r1": "n", "r2": "n", "r3": "n"}
    assert route_tree("r1", "n", takers, use_shared_memory=False) == {
        "r1": {"r0": SOCKET, "r2": SOCKET},
        "r0": {"r3": SOCKET},
    }


@given(HOSTS, TAKERS, st.booleans())
def test_a_tree_reaches_each_worker_once_in_few_steps(
    host: str | None, takers: dict[str, str | None], near: bool
) -> None:
    routes = route_tree("source", host, takers, use_shared_memory=near)
    got = Counter(worker for to in routes.values() for worker in to)
    assert got == Counter(list(takers))
    reached, steps = {"source"}, 0
    while len(reached) <= len(takers):
        new = {worker for sender in reached for worker in routes.get(sender, ())}
        assert new - reached, "a worker waits for one that gets nothing"
        reached |= new
        steps += 1
    assert steps <= 2 + 2 * math.log2(len(takers) + 1)
    hosts = {**takers, "source": host}
    entered = Counter[str | None]()
    for sender, to in routes.items():
        within = [w for w in to if hosts[w] is not None and hosts[w] == hosts[sender]]
        assert all(to[w] == (SHARED_MEMORY if near else SOCKET) for w in within)
        assert near or len(within) <= FAN_OUT
        others = [w for w in to if w not in within]
        assert len(others) <= FAN_OUT
        assert all(to[w] == SOCKET for w in others)
        entered.update(hosts[w] for w in others if hosts[w] is not None)
    assert not entered or max(entered.values()) == 1, "a node was sent to twice"
