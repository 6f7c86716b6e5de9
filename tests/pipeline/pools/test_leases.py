"""What a pool remembers of its leases."""

from __future__ import annotations

import time

import pytest

from pipeline.flow import Node
from pipeline.pools.leases import Member, PoolState
from rlinf.errors import PlanError
from stages.lives import MOST


def lease(number: int, left_s: float = 5.0, began_s: float = 600.0) -> Member:
    member = Member(f"pool-0-{number}", str(number), 2, began=time.time() - began_s)
    for rank in range(2):
        member.join({"rank": rank, "ends": time.time() + left_s + rank})
    member.joined.clear()  # its workers have left
    return member


def test_work_that_is_longer_than_a_lease_is_given_up() -> None:
    pool = PoolState(0, ("rollout",), ())
    train = Node("train", 3)
    for number in range(MOST - 1):
        member = lease(number)
        member.given.add(train)
        pool.see_use(member)
    one = lease(MOST)
    one.given.add(train)
    with pytest.raises(PlanError, match=r"pools\[0\].*not finished train.*time_min"):
        pool.see_use(one)


def test_so_is_a_policy_apart_whose_leases_are_shorter_than_what_it_answers() -> None:
    pool = PoolState(1, ("rollout.generate",), ())
    members = [lease(number) for number in range(MOST)]
    for member in members:
        member.answers.add(Node("rollout", 3))
    for member in members[:-1]:
        pool.see_use(member)
    with pytest.raises(PlanError, match=r"pools\[1\].*not finished rollout\.generate, which"):
        pool.see_use(members[-1])


def test_leases_that_finished_something_had_nothing_or_were_ended_early_do_not_count() -> None:
    pool = PoolState(0, ("rollout",), ())
    for number in range(3 * MOST):
        member = lease(number, left_s=400.0 if number % 3 == 0 else 5.0)
        if number % 3 != 1:
            member.given.add(Node("train", 3))
        member.finished = int(number % 3 == 2)
        pool.see_use(member)
    assert pool.in_vain == 0
