"""Requests go where their prefix is, as long as that is not much busier than the rest."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rlinf.engines.replicas import PREFIX_BLOCK, PrefixRouter

GROUPS = [[group * 1000 + i for i in range(40)] for group in range(8)]


def test_a_group_stays_together_and_groups_are_spread() -> None:
    router = PrefixRouter(4, max_load_imbalance=8)
    at = [{router.assign(prompt, range(4)) for _ in range(8)} for prompt in GROUPS]
    assert all(len(servers) == 1 for servers in at)
    assert Counter(next(iter(servers)) for servers in at) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert router.loads == [16] * 4


def test_a_short_prompt_is_a_prefix_too() -> None:
    router = PrefixRouter(3, max_load_imbalance=8)
    router.assign([9], range(3))
    assert {router.assign([1, 2, 3], range(3)) for _ in range(5)} == {1}


def test_who_is_much_busier_gets_no_more() -> None:
    router = PrefixRouter(2, max_load_imbalance=3)
    chosen = [router.assign(GROUPS[0], range(2)) for _ in range(12)]
    assert chosen[:4] == [0, 0, 0, 0]
    assert abs(router.loads[0] - router.loads[1]) <= 4
    assert min(router.loads) > 0


def test_the_next_turn_goes_where_the_turns_before_were_read() -> None:
    router = PrefixRouter(2, max_load_imbalance=8)
    first = router.assign(GROUPS[0], range(2))
    second = router.assign(GROUPS[1], range(2))
    assert (first, second) == (0, 1)
    result = [*GROUPS[1], *range(500, 560)]
    router.release(0)
    router.release(1, result)
    router.assign(GROUPS[2], [1])
    assert router.assign([*result, *range(10)], range(2)) == 1, "though it is busier"


def test_a_little_in_common_binds_nothing() -> None:
    """A system message that all prompts begin with."""
    router = PrefixRouter(4, max_load_imbalance=100)
    system = list(range(PREFIX_BLOCK * 2))
    at = {router.assign([*system, *[group] * 70], range(4)) for group in range(4)}
    assert len(at) == 4


def test_what_is_gone_holds_nothing() -> None:
    router = PrefixRouter(2, max_load_imbalance=8)
    assert router.assign(GROUPS[0], range(2)) == 0
    assert router.assign(GROUPS[0], [1]) == 1, "only that one is up"
    router.release(0)
    assert router.assign(GROUPS[0], range(2)) == 1, "which has read it since"
    router.forget(1)
    assert router.assign(GROUPS[0], range(2)) == 0


@given(
    st.integers(1, 5),
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=80),
)
def test_loads_differ_by_no_more_than_the_bound(
    count: int, imbalance: int, steps: list[tuple[int, bool]]
) -> None:
    """Of whoever was just chosen, over the least loaded one; what is done is no load."""
    router, under_way = PrefixRouter(count, imbalance), list[int]()
    for group, ends in steps:
        if ends and under_way:
            router.release(under_way.pop(0), GROUPS[group])
        else:
            chosen = router.assign(GROUPS[group], range(count))
            under_way.append(chosen)
            assert router.loads[chosen] - min(router.loads) <= imbalance + 1
        assert router.loads == [under_way.count(number) for number in range(count)]
