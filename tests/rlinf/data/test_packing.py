"""Cutting a batch loses no item, keeps budgets, and does not depend on chance."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.packing import balance, micro_batches

costs = st.lists(st.integers(1, 500), min_size=0, max_size=60)


@settings(deadline=None)
@given(costs, st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_balance_gives_every_item_once(items: list[int], shares: list[float]) -> None:
    workers = balance(items, shares)
    assert sorted(i for worker in workers for i in worker) == list(range(len(items)))
    assert workers == balance(items, shares)


@settings(deadline=None)
@given(st.integers(200, 400))
def test_shares_follow_speeds(count: int) -> None:
    fast, slow = balance([10] * count, [2.0, 1.0])
    assert abs(len(fast) - 2 * len(slow)) <= 2


@settings(deadline=None)
@given(costs, st.integers(1, 1000))
def test_micro_batches_stay_within_the_budget(items: list[int], budget: int) -> None:
    groups = micro_batches(items, range(len(items)), budget)
    assert sorted(i for group in groups for i in group) == list(range(len(items)))
    for group in groups:
        assert len(group) == 1 or max(items[i] for i in group) * len(group) <= budget


def test_a_share_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        balance([1], [1.0, 0.0])
