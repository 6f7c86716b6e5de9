"""Which faults strike runs under chaos; itself without a cluster."""

from __future__ import annotations

from collections import Counter

import pytest

import tests.cluster.test_chaos
from tests.cluster.chaos import FAULTS
from tests.cluster.test_chaos import ITERATIONS, REFUSED, faults_of


@pytest.mark.parametrize("wanted", [1, 7, 40])
def test_faults_of_each_kind_strike_as_often_as_is_wanted(
    monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    """Over all shapes, also those of a kind that most shapes refuse."""
    monkeypatch.setenv("RLINF_CHAOS_FAULTS", str(wanted))
    owed = sum((faults_of(shape) for shape in ITERATIONS), Counter[str]())
    assert set(owed) == set(FAULTS)
    assert all(wanted <= count < wanted + len(ITERATIONS) for count in owed.values())


def test_shapes_and_kinds_that_are_named_are_there() -> None:
    assert set(tests.cluster.test_chaos.SHORT) <= set(FAULTS)
    assert set(REFUSED) <= set(ITERATIONS)
    assert set().union(*REFUSED.values()) <= set(FAULTS)
