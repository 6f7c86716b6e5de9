"""The planner's formulas give the iteration time that a simulation of every micro-batch gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.simulator import simulate
from tests.pipeline.planning.planner.problems import random_placement, random_problem


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), stages=st.integers(1, 5), beside=st.booleans())
def test_without_disturbances_the_simulation_takes_what_is_predicted(
    seed: int, stages: int, beside: bool
) -> None:
    problem = random_problem(seed, (12, 8), stages, beside=beside)
    placement = random_placement(problem, seed)
    predicted = float(Predictor(problem).predict(placement).total_s)
    if np.isfinite(predicted):
        trace = simulate(problem, placement, iterations=2)
        assert trace.iteration_s == pytest.approx(predicted, rel=1e-9)
