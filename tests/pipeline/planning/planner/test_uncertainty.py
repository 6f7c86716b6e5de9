"""Expectations: distributions that hold the truth, shares that add up, what dominates first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import (
    GpuKind,
    Placement,
    PlacementProblem,
    PlacementStage,
    TimeToFinish,
)
from pipeline.planning.planner.search import solve
from pipeline.planning.planner.stage_times import StageTable
from pipeline.planning.planner.uncertainty import forecast_placement
from rlinf.errors import PlanError
from tests.pipeline.planning.planner.problems import random_problem


def table(rates, spread: float, *, extrapolated: bool = False) -> StageTable:
    count = len(rates)
    with np.errstate(divide="ignore"):
        seconds = 1 / np.asarray(rates, dtype=float)
    return StageTable(
        {"work": seconds},
        np.full(count, spread),
        np.arange(count),
        np.full(count, extrapolated),
        per_node=count,
        peak_memory_bytes=0,
    )


def tables_of(problem: PlacementProblem, spread: float) -> dict[str, dict[str, StageTable]]:
    return {
        stage.name: {kind: table(rates, spread) for kind, rates in stage.rates.items()}
        for stage in problem.stages
    }


def two_stages(**changes) -> tuple[PlacementProblem, dict[str, dict[str, StageTable]]]:
    """Generation of 80 s and training of 20 s on one of ten GPUs."""
    gpus = np.arange(11)
    rates = {"rollout": gpus / 80.0, "train": gpus / 20.0}
    stages = [
        PlacementStage("rollout", {"a100": rates["rollout"]}, **changes),
        PlacementStage("train", {"a100": rates["train"]}, after=("rollout",), **changes),
    ]
    problem = PlacementProblem(stages, [GpuKind("a100", 10)])
    return problem, {name: {"a100": table(r, 0.2)} for name, r in rates.items()}


TOGETHER = Placement(((0, 1),), ((10,),), 1)
APART = Placement(((0,), (1,)), ((8,), (2,)), 4)


@given(st.integers(0, 1000), st.integers(1, 4), st.floats(0, 0.5))
@settings(deadline=None, max_examples=40)
def test_expectations_of_any_problem_hold_together(seed, stages, spread):
    problem = random_problem(seed, (3, 2), stages)
    try:
        placement = solve(problem)[0].placement
    except PlanError:
        assume(False)
    got = forecast_placement(problem, placement, tables_of(problem, spread), draws=256)
    exact = float(Predictor(problem).predict(placement).total_s)
    assert got.nominal_s == exact
    assert got.q10_s <= got.q90_s
    assert all(-1e-9 <= share <= 1 for share in got.idle_shares)
    held = sum(sum(pool) for pool in placement.gpus)
    assert got.gpu_hours == pytest.approx(held * exact / 3600)
    assert got.interruption_s >= 0
    saved = [saved_s for _, saved_s in got.sensitivities]
    assert min(saved) >= -1e-9
    assert saved == sorted(saved, reverse=True)
    # One number better by a tenth cannot bring more than a tenth.
    assert saved[0] <= 0.1 * exact + 1e-9


def test_without_uncertainty_there_is_one_time():
    problem, _ = two_stages()
    got = forecast_placement(problem, APART, tables_of(problem, 0.0))
    assert got.q10_s == pytest.approx(got.nominal_s)
    assert got.q90_s == pytest.approx(got.nominal_s)


def test_a_sum_of_stages_has_the_mean_and_spread_of_the_sum():
    problem, tables = two_stages()
    got = forecast_placement(problem, TOGETHER, tables, draws=4096)
    assert got.nominal_s == pytest.approx(10.0)
    rng = np.random.default_rng(5)
    sigma = np.sqrt(np.log1p(0.2**2))
    factors = np.exp(sigma * rng.standard_normal((2, 400_000)) - sigma**2 / 2)
    total = 8 * factors[0] + 2 * factors[1]
    for ours, true in zip((got.q10_s, got.q90_s), np.quantile(total, (0.1, 0.9)), strict=True):
        assert ours == pytest.approx(true, rel=0.01)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    problem, tables = two_stages()
    rng = np.random.default_rng(2)
    sigma = np.sqrt(np.log1p(0.2**2))
    got = forecast_placement(problem, APART, tables)
    inside = []
    for _ in range(400):
        stages = [
            replace(s, rates={"a100": s.rates["a100"] / np.exp(sigma * z - sigma**2 / 2)})
            for s, z in zip(problem.stages, rng.standard_normal(2), strict=True)
        ]
        true = float(Predictor(replace(problem, stages=stages)).predict(APART).total_s)
        inside.append(got.q10_s <= true <= got.q90_s)
    assert np.mean(inside) == pytest.approx(0.8, abs=0.06)


def test_the_same_seed_gives_the_same_answer():
    problem, tables = two_stages()
    assert forecast_placement(problem, APART, tables, seed=3) == forecast_placement(
        problem, APART, tables, seed=3
    )
    assert forecast_placement(problem, APART, tables, seed=3) != forecast_placement(
        problem, APART, tables, seed=4
    )


def test_gpus_wait_where_their_stage_is_not_the_slowest():
    problem, tables = two_stages()
    assert forecast_placement(problem, TOGETHER, tables).idle_shares == pytest.approx((0.0,))
    got = forecast_placement(problem, APART, tables)
    assert got.idle_shares == pytest.approx((1 - 10 / got.nominal_s, 1 - 10 / got.nominal_s))


def test_gpus_that_a_stage_cannot_use_are_idle_too():
    problem, tables = two_stages()
    tables["train"]["a100"] = replace(tables["train"]["a100"], used=np.minimum(np.arange(11), 5))
    # Two of ten seconds on half of the GPUs.
    assert forecast_placement(problem, TOGETHER, tables).idle_shares == pytest.approx((0.1,))


def test_the_stage_that_dominates_comes_first():
    problem, tables = two_stages()
    first = forecast_placement(problem, TOGETHER, tables)
    assert first.sensitivities[0] == ("rollout on a100", pytest.approx(0.8))
    assert first.sensitivities[1] == ("train on a100", pytest.approx(0.2))


def test_expected_losses_are_those_of_the_objective():
    problem, tables = two_stages()
    kinds = [GpuKind("a100", 10, waits_s=((1, 600.0),), interruptions_per_hour=0.5)]
    problem = replace(problem, kinds=kinds)
    got = forecast_placement(problem, TOGETHER, tables)
    gpus = [np.array([[10]])]
    cost = TimeToFinish(1).cost(problem, np.array([got.nominal_s]), np.zeros((2, 1)), gpus)[0]
    assert got.interruption_s == pytest.approx(cost - 600.0 - got.nominal_s)
    assert got.interruption_s == pytest.approx(got.nominal_s * 0.5 / 3600 * (600 + 5))


def test_guesses_are_named():
    problem, tables = two_stages()
    tables["train"]["a100"] = table(problem.stages[1].rates["a100"], 0.3, extrapolated=True)
    assert forecast_placement(problem, APART, tables).extrapolated == ("train on a100",)


def test_a_placement_that_cannot_run_is_refused():
    problem, tables = two_stages()
    with pytest.raises(PlanError, match="cannot run"):
        forecast_placement(problem, Placement(((0,), (1,)), ((10,), (0,)), 1), tables)


def test_jobs_that_depend_on_the_same_stage_wait_in_the_queue_at_the_same_time() -> None:
    """Of the two stages after the rollout, one waits 60 s for a node, the other 90 s for two."""
    rates = {"gpu": np.array([0, 1, 1, 1, 1]) / 10}
    stages = [
        PlacementStage("rollout", rates),
        PlacementStage("reward", rates, ("rollout",)),
        PlacementStage("inference", rates, ("rollout",)),
        PlacementStage("train", rates, ("reward", "inference")),
    ]
    kinds = [GpuKind("gpu", 4, waits_s=((1, 60.0), (2, 90.0)), per_node=1)]
    problem = PlacementProblem(stages, kinds, are_jobs=True, sync=None)
    gpus = [np.array([[n]]) for n in (1, 1, 2, 1)]
    busy_s = np.full((4, 1), 10.0)
    cost = TimeToFinish(2).cost(problem, np.array([30.0]), busy_s, gpus)[0]
    assert cost == pytest.approx(2 * (30 + 60 + 90 + 60))
