"""Every worker gets what it waits for, once, over as few links as may be."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipeline.routes import FAN_OUT, to_all, tree
from stages.inbox import SHARED_MEMORY, SOCKET

HOSTS = st.sampled_from(["n0", "n1", "n2", "n3", "n4", "n5", None])
TAKERS = st.lists(HOSTS, min_size=1, max_size=40).map(
    lambda hosts: {f"t{i}": host for i, host in enumerate(hosts)}
)


def test_weights_cross_to_each_node_once_and_nodes_pass_them_on() -> None:
    takers = {"a0": "a", "a1": "a", "b0": "b", "b1": "b", "c0": "c", "d0": "d", "s1": "s"}
    assert tree("s0", "s", takers, near=True) == {
        "s0": {"s1": SHARED_MEMORY, "a0": SOCKET, "b0": SOCKET},
        "a0": {"a1": SHARED_MEMORY, "c0": SOCKET, "d0": SOCKET},
        "b0": {"b1": SHARED_MEMORY},
    }


@given(HOSTS, TAKERS, st.booleans())
def test_a_tree_reaches_each_worker_once_in_few_steps(
    host: str | None, takers: dict[str, str | None], near: bool
) -> None:
    routes = tree("source", host, takers, near=near)
    got = Counter(worker for to in routes.values() for worker in to)
    assert got == Counter(list(takers))
    reached, steps = {"source"}, 0
    while len(reached) <= len(takers):
        new = {worker for sender in reached for worker in routes.get(sender, ())}
        assert new - reached, "a worker waits for one that gets nothing"
        reached |= new
        steps += 1
    assert steps <= 2 + math.log2(len(takers) + 1)
    hosts = {**takers, "source": host}
    for sender, to in routes.items():
        for worker, way in to.items():
            if way == SHARED_MEMORY:
                assert near
                assert hosts[sender] == hosts[worker] is not None
        sockets = [worker for worker, way in to.items() if way == SOCKET]
        assert len(sockets) <= FAN_OUT
        assert not near or all(hosts[w] is None or hosts[w] != hosts[sender] for w in sockets)


@given(st.dictionaries(st.sampled_from(["m0", "m1", "m2"]), HOSTS, min_size=1), TAKERS)
def test_records_come_from_all_makers_by_memory_only_where_all_are_on_one_node(
    makers: dict[str, str | None], takers: dict[str, str | None]
) -> None:
    routes = to_all(makers, takers, near=True)
    assert routes.keys() == makers.keys()
    for to in routes.values():
        assert to.keys() == takers.keys()
        for worker, way in to.items():
            one_node = {takers[worker]} == set(makers.values()) != {None}
            assert way == (SHARED_MEMORY if one_node else SOCKET)
