"""Cutting a batch loses no item, keeps budgets, and does not depend on chance."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.load_balancing import (
    balance_costs,
    even_microbatches,
    karmarkar_karp,
    pack_microbatches,
)

costs = st.lists(st.integers(1, 500), min_size=0, max_size=60)


@settings(deadline=None)
@given(costs, st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_balance_gives_every_item_once(items: list[int], shares: list[float]) -> None:
    workers = balance_costs(items, shares)
    assert sorted(i for worker in workers for i in worker) == list(range(len(items)))
    assert workers == balance_costs(items, shares)


def loads(items: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(items[i] for i in part) for part in parts]


def greedy(items: list[int], count: int) -> int:
    """The largest load of who always takes the heaviest to who has the least."""
    held = [0] * count
    for item in sorted(items, reverse=True):
        held[held.index(min(held))] += item
    return max(held)


@settings(deadline=None)
@given(costs, st.integers(1, 9), st.randoms(use_true_random=False))
def test_differences_depend_on_no_order(items: list[int], count: int, random: Random) -> None:
    parts = karmarkar_karp(items, count)
    assert sorted(i for part in parts for i in part) == list(range(len(items)))
    assert len(parts) == count
    assert parts == karmarkar_karp(items, count)
    assert loads(items, parts) == sorted(loads(items, parts), reverse=True)
    other = random.sample(items, len(items))
    assert loads(other, karmarkar_karp(other, count)) == loads(items, parts)


@settings(deadline=None)
@given(costs, st.integers(1, 9))
def test_workers_of_one_speed_end_no_later_than_by_greed_alone(
    items: list[int], count: int
) -> None:
    ends = max(loads(items, balance_costs(items, [1.0] * count)))
    assert ends <= greedy(items, count)
    assert ends >= max([*items, -(-sum(items) // count)])


def test_the_example_of_the_differencing_method() -> None:
    """8, 7, 6, 5, 4: 16 and 14, where greed has 17 and 13."""
    items = [4, 7, 8, 5, 6]
    assert greedy(items, 2) == 17
    assert loads(items, balance_costs(items, [2.0, 2.0])) == [16, 14]
    # Of other speeds it is greed's.
    assert loads(items, balance_costs(items, [1.0, 1.0, 2.0])) == [7, 6, 17]


def test_long_tails_are_balanced_to_a_thousandth() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, (20, 256)).astype(int).tolist()
    least = [max(sum(items) / 8, *items) for items in lengths]
    greed = [greedy(items, 8) / low - 1 for items, low in zip(lengths, least, strict=True)]
    found = [
        max(loads(items, balance_costs(items, [1.0] * 8))) / low - 1
        for items, low in zip(lengths, least, strict=True)
    ]
    assert np.mean(found) < np.mean(greed) / 5
    assert np.mean(found) < 5e-4


@settings(deadline=None)
@given(st.integers(200, 400))
def test_shares_follow_speeds(count: int) -> None:
    fast, slow = balance_costs([10] * count, [2.0, 1.0])
    assert abs(len(fast) - 2 * len(slow)) <= 2


@settings(deadline=None)
@given(costs, st.integers(1, 1000))
def test_micro_batches_stay_within_the_budget(items: list[int], budget: int) -> None:
    groups = pack_microbatches(items, range(len(items)), budget)
    assert sorted(i for group in groups for i in group) == list(range(len(items)))
    for group in groups:
        assert len(group) == 1 or max(items[i] for i in group) * len(group) <= budget
    groups = pack_microbatches(items, range(len(items)), budget, padded=False)
    assert sorted(i for group in groups for i in group) == list(range(len(items)))
    assert all(len(group) == 1 or sum(items[i] for i in group) <= budget for group in groups)


def next_fit(items: list[int], budget: int) -> int:
    """How many groups there are where each is closed before the next begins."""
    groups, size = 0, 0
    for item in sorted(items, reverse=True):
        if not groups or size + item > budget:
            groups, size = groups + 1, 0
        size += item
    return groups


def fewest(items: list[int], budget: int) -> int:
    """The least number of groups within a budget, by trying all ways."""

    def fits(left: list[int], rooms: list[int]) -> bool:
        if not left:
            return True
        return any(
            fits(left[1:], [*rooms[:k], room - left[0], *rooms[k + 1 :]])
            for k, room in enumerate(rooms)
            if room >= left[0] and room not in rooms[:k]
        )

    order = sorted(items, reverse=True)
    return next(n for n in range(len(items) + 1) if fits(order, [budget] * n))


def test_three_micro_batches_are_enough_where_closing_groups_takes_four() -> None:
    items = [6, 5, 5, 4, 4, 3, 3]
    assert next_fit(items, 10) == 4
    groups = pack_microbatches(items, range(7), 10, padded=False)
    assert len(groups) == 3
    assert [sum(items[i] for i in group) for group in groups] == [10, 10, 10]
    assert len(even_microbatches(items, range(7), 3, 10, padded=False)) == 3


@settings(deadline=None)
@given(costs, st.integers(1, 1000))
def test_packed_micro_batches_are_no_more_than_by_closing_groups(
    items: list[int], budget: int
) -> None:
    groups = pack_microbatches(items, range(len(items)), budget, padded=False)
    assert len(groups) <= next_fit(items, budget)
    assert groups == pack_microbatches(items, range(len(items)), budget, padded=False)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 20), max_size=10), st.integers(20, 30))
def test_packed_micro_batches_are_close_to_the_fewest(items: list[int], budget: int) -> None:
    groups = pack_microbatches(items, range(len(items)), budget, padded=False)
    assert len(groups) <= 11 / 9 * fewest(items, budget) + 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 12), max_size=8), st.integers(12, 40))
def test_padded_micro_batches_are_the_fewest(items: list[int], budget: int) -> None:
    def least(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        most, rest = max(1, budget // left[0]), left[1:]
        return 1 + min(
            least(tuple(x for k, x in enumerate(rest) if k not in chosen))
            for size in range(min(most - 1, len(rest)) + 1)
            for chosen in itertools.combinations(range(len(rest)), size)
        )

    groups = pack_microbatches(items, range(len(items)), budget)
    assert len(groups) == least(tuple(sorted(items, reverse=True)))


@settings(deadline=None)
@given(costs, st.integers(1, 12))
def test_even_batches_are_as_many_as_asked_and_none_larger_than_needed(
    items: list[int], count: int
) -> None:
    groups = even_microbatches(items, range(len(items)), count, 500)
    assert sorted(i for group in groups for i in group) == list(range(len(items)))
    assert len(groups) == min(count, len(items))
    widest = max((max(items[i] for i in g) * len(g) for g in groups), default=0)
    # Any smaller limit would need more groups.
    assert (
        widest <= 1
        or len(pack_microbatches(items, range(len(items)), widest - 1)) > count
        or (widest == max(items))
    )


@settings(deadline=None)
@given(costs, st.integers(1, 1000))
def test_even_packed_batches_keep_the_budget(items: list[int], budget: int) -> None:
    count = len(pack_microbatches(items, range(len(items)), budget, padded=False))
    for more in range(3):
        groups = even_microbatches(items, range(len(items)), count + more, budget, padded=False)
        assert sorted(i for group in groups for i in group) == list(range(len(items)))
        assert len(groups) == min(count + more, len(items))
        assert all(len(g) == 1 or sum(items[i] for i in g) <= budget for g in groups)


def test_a_share_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        balance_costs([1], [1.0, 0.0])
