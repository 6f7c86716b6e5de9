"""Problems of several sets are drawn by weight, by the number of the draw alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.envs.problem_mixture import BLOCK, ProblemMixture

SIZES = {"small": 3, "large": 400}
WEIGHTS = {"small": 1.0, "large": 3.0}


def test_shares_of_a_block_are_the_weights() -> None:
    mixture = ProblemMixture(SIZES, WEIGHTS)
    for block in range(2):
        places = [mixture.locate(5, block * BLOCK + i) for i in range(BLOCK)]
        assert Counter(name for name, _ in places) == {"small": 250, "large": 750}


def test_each_set_is_drawn_without_replacement_in_its_own_epochs() -> None:
    mixture = ProblemMixture(SIZES, WEIGHTS)
    places = [mixture.locate(5, draw) for draw in range(2 * BLOCK)]
    for name, size in SIZES.items():
        rows = [row for found, row in places if found == name]
        epochs = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1, "epochs have different orders"


@given(st.lists(st.integers(0, 5 * BLOCK), min_size=1, max_size=20), st.integers(0, 3))
@settings(max_examples=20)
def test_a_draw_depends_on_seed_and_number_alone(draws: list[int], seed: int) -> None:
    used = ProblemMixture(SIZES, WEIGHTS)
    found = [used.locate(seed, draw) for draw in draws]
    assert found == [ProblemMixture(SIZES, WEIGHTS).locate(seed, draw) for draw in draws]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9))
def test_every_set_is_drawn(weights: list[float]) -> None:
    names = [str(i) for i in range(len(weights))]
    mixture = ProblemMixture(dict.fromkeys(names, 7), dict(zip(names, weights, strict=True)))
    counts = Counter(mixture.locate(0, draw)[0] for draw in range(BLOCK))
    assert counts.keys() == set(names)
    for name, weight in zip(names, weights, strict=True):
        expected = weight / sum(weights) * BLOCK
        assert counts[name] == pytest.approx(expected, abs=len(weights) + 1)
