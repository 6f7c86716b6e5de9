"""Which faults strike runs under chaos; itself without a cluster."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

import tests.cluster.test_chaos
from tests.cluster.chaos import FAULTS, rounds


@given(seed=st.integers(0, 100), count=st.integers(0, 200))
def test_every_kind_of_fault_is_drawn_as_often_as_any_other(seed: int, count: int) -> None:
    kinds = sorted(FAULTS)
    drawn = Counter(islice(rounds(random.Random(seed), kinds), count))
    least, most = (f(drawn[kind] for kind in kinds) for f in (min, max))
    assert least == count // len(kinds)
    assert most - least <= 1


def test_the_short_form_draws_kinds_that_there_are() -> None:
    assert set(tests.cluster.test_chaos.SHORT) <= set(FAULTS)
