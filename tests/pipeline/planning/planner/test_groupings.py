"""All groupings of the stages, those that are alike, and what bounds all of them at once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pipeline.planning.planner.bounds import price_bounds
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import (
    IterationTime,
    PoolStages,
    pools_of_jobs,
    pools_of_stages,
)
from pipeline.planning.planner.search import GroupingNeighbors, enumerate_groupings, solve
from tests.pipeline.planning.planner.problems import exhaustive, random_problem


@pytest.mark.parametrize(("stages", "ways"), [(1, 1), (2, 2), (4, 15), (6, 203)])
def test_there_are_as_many_as_partitions_of_a_set(stages: int, ways: int) -> None:
    every = enumerate_groupings(random_problem(0, (16, 8), stages))
    assert len(every) == len(set(every)) == ways
    assert all(sorted(s for pool in pools for s in pool) == list(range(stages)) for pools in every)


def test_stages_that_may_are_side_by_side_before_those_that_have_all_of_their_job() -> None:
    problem = random_problem(1, (16,), 4, beside=True)
    overlap = [
        pools for pools in enumerate_groupings(problem) if len(pools_of_jobs(pools)) < len(pools)
    ]
    first = replace(problem, stages=[replace(s, beside=False) for s in problem.stages])
    assert (
        len(set(overlap))
        == len(overlap)
        == len(enumerate_groupings(problem)) - len(enumerate_groupings(first))
    )
    assert ((0, 2, 3), (1, 2, 3)) in overlap  # two beside each other, then the others
    assert ((0, 3), (1,), (2, 3)) in overlap  # one job, and a pool of its own
    assert ((0, 3), (1, 3), (2, 3)) in overlap
    for pools in overlap:
        home = pools_of_stages(pools)
        for job in pools_of_jobs(pools):
            of_all = [s for s, places in home.items() if places == job]
            assert all(home[s] == (p,) for p in job for s in pools[p] if s not in of_all)
            assert len(job) == 1 or max(s for p in job for s in pools[p]) in of_all
    # A cycle takes its turns side by side, or all of it on all.
    act = [replace(s, cycle="act", lead={}, again=0.0) for s in problem.stages[:3]]
    cut = enumerate_groupings(replace(problem, stages=[*act, problem.stages[3]]))
    assert ((0, 3), (1, 2, 3)) in cut
    assert ((0, 2, 3), (1, 2, 3)) not in cut


def without(pools: PoolStages, stage: int) -> set[tuple[int, ...]]:
    return {tuple(s for s in pool if s != stage) for pool in pools} - {()}


@pytest.mark.parametrize("stages", [1, 2, 4, 5])
def test_neighbours_are_those_that_are_equal_without_one_stage(stages: int) -> None:
    every = enumerate_groupings(random_problem(0, (16, 8), stages))
    neighbours = GroupingNeighbors(every)
    for pools in every:
        expected = [
            other
            for other in every
            if other != pools and any(without(other, s) == without(pools, s) for s in range(stages))
        ]
        assert neighbours.neighbors_of(pools) == expected


@pytest.mark.parametrize("seed", range(16))
def test_no_placement_is_quicker_than_the_quick_bound_of_its_grouping(seed: int) -> None:
    sizes = ((6,), (4, 3), (2, 2, 2))[seed % 3]
    problem = random_problem(seed, sizes, 1 + seed % 4, beside=seed % 2 == 0)
    every = enumerate_groupings(problem)
    bounds = dict(zip(every, price_bounds(Predictor(problem), every), strict=True))
    least = exhaustive(problem, IterationTime())
    assert min(bounds.values()) <= least * (1 + 1e-9)
    if not math.isfinite(least):
        return
    for solution in solve(problem, max_solutions=len(every)):
        assert bounds[solution.placement.pools] <= solution.cost * (1 + 1e-9)


def test_eight_stages_have_a_plan_and_a_bound() -> None:
    problem = random_problem(3, (64, 32), 8, smooth=True)
    best, *others = solve(problem, max_solutions=3)
    assert math.isfinite(best.cost)
    assert best.lower_bound <= best.cost <= min(other.cost for other in others)
