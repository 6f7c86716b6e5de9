"""Speed of the planner, the cost model and the simulator, and their error against exact results."""

from __future__ import annotations

import math
import statistics
import time

from benchmarks.row import BenchmarkRow, median_row
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import PlacementProblem
from pipeline.planning.planner.search import solve
from pipeline.planning.simulator import simulate
from pipeline.planning.simulator.studies import STUDIES
from tests.pipeline.planning.cost.shapes import LLAMA_3_8B, LLAMA_3_70B, many_tables
from tests.pipeline.planning.planner.problems import (
    OBJECTIVES,
    embodied_case,
    exhaustive,
    public_case,
    random_placement,
    random_problem,
)

SIZES = ((16,), (8, 8), (5, 4), (3, 3, 3), (2, 2, 2, 2))


def measure() -> list[BenchmarkRow]:
    """Measure planning times, and compare small problems with exhaustive enumeration."""
    ratios = []
    for seed in range(100):
        problem = random_problem(seed, SIZES[seed % len(SIZES)], 1 + seed % 3)
        objective = OBJECTIVES[seed % len(OBJECTIVES)]
        optimal_cost = exhaustive(problem, objective)
        if math.isfinite(optimal_cost):
            ratios.append(solve(problem, objective)[0].cost / optimal_cost)
    worst = max(ratios)
    medium = [random_problem(seed, (32,) * 4, 4, smooth=True) for seed in range(20)]
    large = [random_problem(seed, (512,) * 8, 4, smooth=True) for seed in range(10)]
    eight = [random_problem(seed, (64, 32), 8, smooth=True) for seed in range(5)]
    gaps = [solve(problem)[0].gap for problem in medium + large]
    return [
        median_row(
            "plan_128x4_ms", [1e3 * planning_seconds(p) for p in medium], "ms", 200, "lower"
        ),
        median_row("plan_4096x8_s", [planning_seconds(p) for p in large], "s", 2, "lower"),
        median_row("plan_eight_stages_s", [planning_seconds(p) for p in eight], "s", 10, "lower"),
        median_row("plan_gap", gaps, "share", None, "lower"),
        BenchmarkRow("plan_vs_exhaustive", round(worst, 9), "x", 1.0, "lower", len(ratios), 0.0),
        median_row("plan_public_case_s", [solve(public_case())[0].cost], "s", 289.1, "lower"),
        *(
            median_row(
                f"plan_embodied_case_{actor_s}s",
                [side_by_side_speedup(actor_s)],
                "x",
                None,
                "higher",
            )
            for actor_s in (100, 5, 1)
        ),
    ]


def side_by_side_speedup(actor_s: float) -> float:
    """Return the speedup of running simulators and policy side by side, then training on all of
    their GPUs, over the best plan with disjoint pools."""
    exclusive_cost = solve(embodied_case(actor_s, beside=False))[0].cost
    return exclusive_cost / solve(embodied_case(actor_s))[0].cost


def planning_seconds(problem: PlacementProblem) -> float:
    """Return the time that the planner takes."""
    start = time.perf_counter()
    solve(problem, max_solutions=3)
    return time.perf_counter() - start


def measure_rate_tables() -> list[BenchmarkRow]:
    """Measure 40 rate tables for 4,096 GPUs of 8 kinds and 5 stages, alternately for 8B and 70B."""
    seconds = []
    for shape in (LLAMA_3_8B, LLAMA_3_70B) * 5:
        start = time.perf_counter()
        many_tables(shape)
        seconds.append(time.perf_counter() - start)
    return [median_row("rate_tables_4096x8_s", seconds, "s", 1, "lower")]


def measure_simulator() -> list[BenchmarkRow]:
    """Compare the simulator with the formula on random placements, and time the largest study."""
    differences = []
    for seed in range(1000):
        problem = random_problem(seed, (12, 8), 1 + seed % 5)
        placement = random_placement(problem, seed)
        predicted = float(Predictor(problem).predict(placement).total_s)
        if math.isfinite(predicted):
            differences.append(
                abs(simulate(problem, placement, iterations=3).mean_s / predicted - 1)
            )
    median, worst = statistics.median(differences), max(differences)
    study = STUDIES["70b-4096"]
    placement = solve(study.problem)[0].placement
    scenario = study.scenario("all")
    times = []
    for seed in range(10):
        start = time.perf_counter()
        simulate(study.problem, placement, scenario, iterations=100, seed=seed)
        times.append(time.perf_counter() - start)
    count = len(differences)
    return [
        BenchmarkRow("simulation_vs_plan", round(worst, 6), "share", 0.05, "lower", count, 0.0),
        BenchmarkRow(
            "simulation_vs_plan_median", round(median, 6), "share", 0.05, "lower", count, 0.0
        ),
        median_row("simulate_4096_s", times, "s", 5, "lower"),
    ]
