"""Speed of the planner and the simulator; plans against exact results."""

from __future__ import annotations

import math
import time

from benchmarks.row import BenchmarkRow, median_row
from pipeline.planning.planner.problem import PlacementProblem
from pipeline.planning.planner.search import solve
from pipeline.planning.simulator import Scenario, simulate
from pipeline.planning.simulator.scenario import LengthDistribution, StragglerModel
from tests.pipeline.planning.planner.problems import (
    OBJECTIVES,
    exhaustive,
    public_case,
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
    return [
        median_row(
            "plan_128x4_ms", [1e3 * planning_seconds(p) for p in medium], "ms", 200, "lower"
        ),
        median_row("plan_4096x8_s", [planning_seconds(p) for p in large], "s", 2, "lower"),
        median_row("plan_eight_stages_s", [planning_seconds(p) for p in eight], "s", 10, "lower"),
        BenchmarkRow("plan_vs_exhaustive", round(worst, 9), "x", 1.0, "lower", len(ratios), 0.0),
        median_row("plan_public_case_s", [solve(public_case())[0].cost], "s", 289.1, "lower"),
    ]


def planning_seconds(problem: PlacementProblem) -> float:
    """Return the time that the planner takes."""
    start = time.perf_counter()
    solve(problem, max_solutions=3)
    return time.perf_counter() - start


def measure_simulator() -> list[BenchmarkRow]:
    """Time the simulation of 100 iterations on 4,096 GPUs of eight kinds, with all disturbances."""
    problem = random_problem(0, (512,) * 8, 4, smooth=True)
    placement = solve(problem)[0].placement
    scenario = Scenario(
        startup_s=120,
        lengths=LengthDistribution(samples=32768),
        stragglers=StragglerModel(per_gpu_hour=0.002),
        queue=True,
        losses=True,
        walltime_s=86400,
    )
    times = []
    for seed in range(10):
        start = time.perf_counter()
        simulate(problem, placement, scenario, iterations=100, seed=seed)
        times.append(time.perf_counter() - start)
    return [median_row("simulate_4096_s", times, "s", 5, "lower")]
