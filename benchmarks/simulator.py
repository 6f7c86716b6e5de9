"""How far the planner's formulas are from the simulation, and how fast that is."""

from __future__ import annotations

import math
import statistics
import time

from benchmarks.row import BenchmarkRow, median_row
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.search import solve
from pipeline.planning.simulator import simulate
from pipeline.planning.simulator.studies import STUDIES
from tests.pipeline.planning.planner.problems import random_placement, random_problem


def measure() -> list[BenchmarkRow]:
    """Hundreds of random placements without disturbances; the largest study with all of them."""
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
        BenchmarkRow("simulator_vs_formula", round(worst, 6), "share", 0.05, "lower", count, 0.0),
        BenchmarkRow(
            "simulator_vs_formula_median", round(median, 6), "share", 0.05, "lower", count, 0.0
        ),
        median_row("simulate_4096_s", times, "s", 5, "lower"),
    ]
