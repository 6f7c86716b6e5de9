"""How fast the planner is, and how near to exhaustive search."""

from __future__ import annotations

import math
import time

from benchmarks.row import BenchmarkRow, median_row
from pipeline.planning.planner.problem import PlacementProblem
from pipeline.planning.planner.search import solve
from tests.pipeline.planning.planner.problems import (
    OBJECTIVES,
    embodied_case,
    exhaustive,
    public_case,
    random_problem,
)

SIZES = ((16,), (8, 8), (5, 4), (3, 3, 3), (2, 2, 2, 2))


def measure() -> list[BenchmarkRow]:
    """Four stages on many GPUs; every small problem against plain enumeration."""
    ratios = []
    for seed in range(100):
        problem = random_problem(seed, SIZES[seed % len(SIZES)], 1 + seed % 3)
        objective = OBJECTIVES[seed % len(OBJECTIVES)]
        least = exhaustive(problem, objective)
        if math.isfinite(least):
            ratios.append(solve(problem, objective)[0].cost / least)
    worst = max(ratios)
    medium = [random_problem(seed, (32,) * 4, 4, smooth=True) for seed in range(20)]
    large = [random_problem(seed, (512,) * 8, 4, smooth=True) for seed in range(10)]
    eight = [random_problem(seed, (64, 32), 8, smooth=True) for seed in range(5)]
    gaps = [solve(problem)[0].gap for problem in medium + large]
    return [
        median_row("plan_128x4_ms", [1e3 * seconds(p) for p in medium], "ms", 200, "lower"),
        median_row("plan_4096x8_s", [seconds(p) for p in large], "s", 2, "lower"),
        median_row("plan_eight_stages_s", [seconds(p) for p in eight], "s", 10, "lower"),
        median_row("plan_gap", gaps, "share", None, "lower"),
        BenchmarkRow("plan_vs_exhaustive", round(worst, 9), "x", 1.0, "lower", len(ratios), 0.0),
        median_row("plan_public_case_s", [solve(public_case())[0].cost], "s", 289.1, "lower"),
        *(
            median_row(f"plan_embodied_case_{actor_s}s", [overlap(actor_s)], "x", None, "higher")
            for actor_s in (100, 5, 1)
        ),
    ]


def overlap(actor_s: float) -> float:
    """What simulators and policy side by side, then training on all of their GPUs, are quicker than
    the best plan whose pools share none."""
    apart = solve(embodied_case(actor_s, beside=False))[0].cost
    return apart / solve(embodied_case(actor_s))[0].cost


def seconds(problem: PlacementProblem) -> float:
    """How long the planner takes."""
    start = time.perf_counter()
    solve(problem, alternatives=3)
    return time.perf_counter() - start
