"""What a pool remembers of its leases."""

from __future__ import annotations

import time

import pytest

from pipeline.graph import StageNode
from pipeline.pools.leases import Lease, PoolState
from rlinf.errors import PlanError
from stages.timeout_retries import MAX_TIMEOUTS


def lease(number: int, left_s: float = 5.0, began_s: float = 600.0) -> Lease:
    member = Lease(f"pool-0-{number}", str(number), 2, started_at=time.time() - began_s)
    for rank in range(2):
        member.add_worker({"rank": rank, "ends": time.time() + left_s + rank})
    member.worker_info.clear()  # its workers have left
    return member


def test_work_that_is_longer_than_a_lease_is_given_up() -> None:
    pool = PoolState(0, ("rollout",), ())
    train = StageNode("train", 3)
    for number in range(MAX_TIMEOUTS - 1):
        member = lease(number)
        member.assigned.add(train)
        pool.check_lease_length(member)
    one = lease(MAX_TIMEOUTS)
    one.assigned.add(train)
    with pytest.raises(PlanError, match=r"pools\[0\].*before they finished train.*time_limit_min"):
        pool.check_lease_length(one)


def test_so_is_a_policy_apart_whose_leases_are_shorter_than_what_it_answers() -> None:
    pool = PoolState(1, ("rollout.generate",), ())
    members = [lease(number) for number in range(MAX_TIMEOUTS)]
    for member in members:
        member.served.add(StageNode("rollout", 3))
    for member in members[:-1]:
        pool.check_lease_length(member)
    with pytest.raises(PlanError, match=r"pools\[1\].* finished rollout\.generate, which"):
        pool.check_lease_length(members[-1])


def test_only_leases_without_any_finished_work_count_as_failed() -> None:
    pool = PoolState(0, ("rollout",), ())
    for number in range(3 * MAX_TIMEOUTS):
        member = lease(number, left_s=400.0 if number % 3 == 0 else 5.0)
        if number % 3 != 1:
            member.assigned.add(StageNode("train", 3))
        member.num_finished = int(number % 3 == 2)
        pool.check_lease_length(member)
    assert pool.unproductive_leases == 0
