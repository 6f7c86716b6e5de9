"""The planner finds the best placement, or one close to it where there are too many to compare."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import (
    GpuKind,
    Objective,
    Placement,
    PlacementProblem,
    PlacementStage,
)
from pipeline.planning.planner.search import enumerate_groupings, solve
from rlinf.errors import PlanError
from tests.pipeline.planning.planner.problems import (
    OBJECTIVES,
    exhaustive,
    public_case,
    random_problem,
)

SIZES = st.one_of(
    st.tuples(st.integers(1, 16)),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    st.tuples(*[st.integers(1, 2)] * 4),
)


@pytest.mark.parametrize(("stages", "ways"), [(1, 1), (2, 2), (4, 15), (5, 52)])
def test_groupings_are_the_partitions_of_the_stages(stages: int, ways: int) -> None:
    every = enumerate_groupings(random_problem(0, (16, 8), stages))
    assert len(every) == len(set(every)) == ways
    assert all(sorted(s for pool in pools for s in pool) == list(range(stages)) for pools in every)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=SIZES,
    stages=st.integers(1, 3),
    objective=st.sampled_from(OBJECTIVES),
    mixes=st.sampled_from([None, frozenset[str](), frozenset({"rollout"})]),
    per_node=st.sampled_from([0, 2]),
)
def test_small_problems_are_solved_exactly(
    seed: int,
    sizes: tuple[int, ...],
    stages: int,
    objective: Objective,
    mixes: frozenset[str] | None,
    per_node: int,
) -> None:
    problem = replace(random_problem(seed, sizes, stages), mixes=mixes)
    kinds = [replace(kind, per_node=per_node) for kind in problem.kinds]
    problem = replace(problem, kinds=kinds)
    expected = exhaustive(problem, objective)
    if math.isinf(expected):
        with pytest.raises(PlanError):
            solve(problem, objective)
        return
    best = solve(problem, objective)[0]
    assert best.is_optimal
    assert best.cost == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_a_grid_finds_what_all_placements_have(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems that can be enumerated, but of which only a grid is refined."""
    problem = random_problem(seed, (24, 12), 3, smooth=True)
    monkeypatch.setattr("pipeline.planning.planner.search.EXACT_ROWS", 10**9)
    exact = solve(problem)[0]
    monkeypatch.setattr("pipeline.planning.planner.search.EXACT_ROWS", 0)
    best = solve(problem)[0]
    assert exact.is_optimal
    assert not best.is_optimal
    assert exact.cost * (1 - 1e-9) <= best.cost <= 1.01 * exact.cost


@pytest.mark.parametrize("sizes", [(32, 32), (128, 64, 64), (1024, 1536, 1024, 512)])
def test_fewer_limits_never_give_a_much_worse_plan(sizes: tuple[int, ...]) -> None:
    free = random_problem(1, sizes, 3, smooth=True)
    kinds = [replace(kind, per_node=8) for kind in free.kinds]
    limited = solve(replace(free, kinds=kinds, mixes=frozenset({"rollout"})))[0]
    assert solve(free)[0].cost <= 1.02 * limited.cost
    for members, gpus in zip(limited.placement.pools, limited.placement.gpus, strict=True):
        assert sum(n > 0 for n in gpus) == 1 or members == (0,)
        assert members == (0,) or all(n < 8 or n % 8 == 0 for n in gpus)


def test_the_public_case_of_equal_gpus_is_solved_as_well_as_known_or_better() -> None:
    best, *others = solve(public_case(), max_solutions=5)
    assert best.cost <= 289.1
    collocated = next(s for s in others if s.placement.mode == "collocated")
    assert collocated.cost == pytest.approx(335.0)


def test_a_stage_that_can_run_nowhere_is_refused() -> None:
    problem = random_problem(7, (8, 8), 2, smooth=True)
    only = PlacementStage("reward", {"kind0": np.zeros(9)}, after=("rollout",))
    with pytest.raises(PlanError, match="'reward' can run nowhere"):
        solve(replace(problem, stages=[problem.stages[0], only]))


def test_a_stage_gets_no_more_gpus_than_it_can_use() -> None:
    """Training runs on four, is slower on five, and not at all on six."""
    gpus = np.arange(7)
    train = np.array([0, 0, 0, 0, 1 / 10, 1 / 20, 0])
    stages = [
        PlacementStage("rollout", {"gpu": gpus / 60}),
        PlacementStage("train", {"gpu": train}, ("rollout",)),
    ]
    best = solve(PlacementProblem(stages, [GpuKind("gpu", 6)], chunks=(1,)))[0]
    assert best.placement.gpus == ((4,),)
    assert best.cost == pytest.approx(15 + 10)


@pytest.mark.parametrize("gpus", [8, 512])
def test_of_equal_costs_the_one_with_fewer_gpus_is_chosen(gpus: int) -> None:
    """Rewards take as long on any number of GPUs, and training ends no sooner on more than two."""
    constant = np.full(gpus + 1, 1.0)
    constant[0] = 0
    train = np.minimum(np.arange(gpus + 1), 2) / 10
    stages = [
        PlacementStage("reward", {"fast": constant}, divisible=False),
        PlacementStage("train", {"slow": train}, ("reward",)),
    ]
    kinds = [GpuKind("fast", gpus), GpuKind("slow", gpus)]
    best = solve(PlacementProblem(stages, kinds, chunks=(1,), sync=None))[0]
    assert best.placement.gpus == ((1, 0), (0, 2))


def test_a_slow_kind_is_left_out_and_one_that_cannot_run_is_refused() -> None:
    rates = {"fast": np.array([0, 1.0]), "slow": np.array([0, 0.01])}
    kinds = [GpuKind("fast", 1), GpuKind("slow", 1)]
    problem = PlacementProblem([PlacementStage("train", rates)], kinds, sync=None, mixing=0.9)
    best = solve(problem)[0]
    assert (best.placement.gpus, best.cost) == (((1, 0),), pytest.approx(1.0))
    both = Placement(((0,),), ((1, 1),), 1)
    assert float(Predictor(problem).predict(both).total_s) == pytest.approx(1 / (0.9 * 1.01))
    other = PlacementProblem([PlacementStage("train", {"fast": rates["fast"]})], kinds, sync=None)
    assert math.isinf(Predictor(other).predict(both).total_s)


def test_alternatives_are_other_groupings_and_cost_more() -> None:
    solutions = solve(random_problem(3, (16, 16), 3, smooth=True), max_solutions=3)
    assert len({s.placement.pools for s in solutions}) == 3
    assert [s.cost for s in solutions] == sorted(s.cost for s in solutions)


def test_bad_measurements_are_refused() -> None:
    for bad in (np.array([0.0, -1.0]), np.array([0.0, np.nan])):
        with pytest.raises(PlanError, match="negative or not a number"):
            PlacementProblem([PlacementStage("train", {"a": bad})], [GpuKind("a", 1)], sync=None)
