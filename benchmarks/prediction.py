"""Predicted and measured iteration times of plans with jobs and with pools, of two experiments.

On the dev cluster with ``a100`` nodes at half the speed of ``h100`` nodes. Each experiment is
profiled once. Then every plan is predicted and run by the real driver. An iteration lasts from one
publication of weights to the next. At most two processes compute at once, because this machine has
two cores. ``prediction.json`` has the results, and ``docs/images/prediction.png`` plots them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from benchmarks.placement import draw_plan
from benchmarks.row import BenchmarkRow
from benchmarks.slurm_jobs import start_dev_cluster
from pipeline.commands.experiment import drive, open_run, run_sft
from pipeline.plan import Plan, PlanningSources, parse_plan
from pipeline.planning.planner.plan_command import build_request
from pipeline.planning.planner.planner import assess_plan, propose_plan
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.profile.profile_pass import ProfileOptions, clone_run, profile_run
from pipeline.pools.measured_times import compare_with_forecast, measure_times
from pipeline.report.chart_style import TEXT_COLOUR, finish_chart
from pipeline.run import Run
from rlinf import package_paths
from rlinf.artifacts import write_atomic
from stages.flow import flow_of

MINUTES, PASSES = 6, 2
"""Minutes of a profile pass, and number of passes. A pass of at least 5.4 minutes also measures
stages as separate jobs. The second pass adds to the measurements of the first."""
ITERATIONS = {"jobs": 4, "pools": 7}
"""Iterations of each run, by execution; the first does not count."""
DRAWN = 1
"""Number of random plans of jobs, in addition to the best one."""
POINTS = Path(__file__).with_name("prediction.json")
WORK = package_paths.ROOT / "runs" / "prediction"
"""Profiles, runs and points of an unfinished measurement, which the next call resumes."""
PROFILE = "profile.json"
PICTURE = package_paths.ROOT / "docs" / "images" / "prediction.png"
TICKS_S = (1, 1.5, 2, 3, 4, 6, 8, 10, 15, 20, 30, 40, 60)
COMMON = [
    "cluster=slurm",
    f"cluster.site={package_paths.ROOT}/slurm/devcluster/site.yaml",
    "cluster.poll_interval_s=0.2",
    "log.trackers=[]",
    "sft.max_steps=0",
]
EXPERIMENTS = {
    "halfcheetah": ["experiment=halfcheetah_ppo", "rollout.batch_size=64"],
    # Without SFT, so that responses may end at any token and their lengths have a tail.
    "arithmetic": [
        "experiment=arithmetic_grpo",
        "rollout.batch_size=64",
        "rollout.horizon=32",
        "algorithm.entropy_coeff=0.01",
        "algorithm.filter_zero_variance_groups=false",
        "trainer.cpu_threads=1",
    ],
}
POOLS: Mapping[str, tuple[list[tuple[str, str]], int]] = {
    "all on one h100": ([("*", "h100")], 1),
    "all on one a100": ([("*", "a100")], 1),
    "rollout a100, rest h100": ([("rollout", "a100"), ("*", "h100")], 1),
    "rollout h100, rest a100, 4 parts": ([("rollout", "h100"), ("*", "a100")], 4),
    "rollout a100, rest h100, 4 parts": ([("rollout", "a100"), ("*", "h100")], 4),
    "train h100, rest a100, 4 parts": ([("train", "h100"), ("*", "a100")], 4),
}
"""Pools by name: stages (``*``: all others) with the kind of their one device; number of chunks."""


@dataclass(frozen=True)
class PredictionPoint:
    """A plan that was predicted and run."""

    experiment: str
    execution: str
    plan: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: tuple[float, ...]
    """Seconds of each counted iteration."""

    @property
    def median_s(self) -> float:
        """Median seconds of the measured iterations."""
        return statistics.median(self.measured_s)

    @property
    def error(self) -> float:
        """Predicted divided by measured time, minus 1."""
        return self.predicted_s / self.median_s - 1


def measure() -> list[BenchmarkRow]:
    """Measure all missing points and return the rows."""
    while not advance(math.inf):
        pass
    points = read_points(POINTS)
    draw(points)
    errors = sorted(abs(p.error) for p in points)
    low, median, high = statistics.quantiles(errors, n=4)
    spread, count = round(high - low, 4), len(errors)
    within = sum(p.low_s <= p.median_s <= p.high_s for p in points)
    return [
        BenchmarkRow("predict_error", round(median, 4), "share", 0.1, "lower", count, spread),
        BenchmarkRow(
            "predict_error_worst", round(errors[-1], 4), "share", 0.25, "lower", count, spread
        ),
        BenchmarkRow(
            "predict_within_80", round(within / count, 4), "share", None, "higher", count, 0.0
        ),
    ]


def advance(minutes: float) -> bool:
    """Measure missing points for some minutes; returns whether all points are complete."""
    end = time.monotonic() + 60 * minutes
    start_dev_cluster()
    for experiment, words in EXPERIMENTS.items():
        root = WORK / experiment
        run = open_run([*COMMON, *words, f"run.name={experiment}", f"run.root={root}"])
        for name in [*(f"pass-{number + 1}.json" for number in range(PASSES - 1)), PROFILE]:
            if not (root / name).exists():
                if time.monotonic() > end:
                    return False
                # One process on each of two nodes uses both cores.
                options = ProfileOptions(("a100", "h100"), minutes=MINUTES, processes=1)
                profile_run(run, options, run_sft).save(root / name)
        sources = PlanningSources(profile=str(root / PROFILE), partitions=("a100", "h100", "gpu"))
        request = build_request(run.config, sources)
        for number, (description, plan) in enumerate(plans(request)):
            points = read_points(WORK / POINTS.name)
            if any((p.experiment, p.plan) == (experiment, description) for p in points):
                continue
            if time.monotonic() > end:
                return False
            measured_point = measure_point(
                run, request, experiment, description, plan, root, f"plan-{number}"
            )
            write_points([*points, measured_point], WORK / POINTS.name)
            print(
                f"  {experiment}, {description}: predicted {measured_point.predicted_s:.2f} s, was "
                f"{measured_point.median_s:.2f} s ({measured_point.error:+.0%})",
                flush=True,
            )
    write_points(read_points(WORK / POINTS.name), POINTS)
    shutil.rmtree(WORK)
    return True


def read_points(path: Path) -> list[PredictionPoint]:
    """Return the points of a file; an empty list if it does not exist."""
    values = json.loads(path.read_text()) if path.exists() else []
    return [PredictionPoint(**{**p, "measured_s": tuple(p["measured_s"])}) for p in values]


def write_points(points: list[PredictionPoint], path: Path) -> None:
    """Write points to a file."""
    write_atomic(path, json.dumps([asdict(p) for p in points], indent=1) + "\n")


def plans(request: PlanRequest, seed: int = 0) -> Iterator[tuple[str, Plan]]:
    """Yield the plans to run: the best plan of jobs, others drawn at random, and pools."""
    flow, rng = flow_of(request.config), random.Random(seed)
    yield "jobs, the best", propose_plan(replace(request, execution="jobs")).plan
    for number in range(DRAWN):
        yield f"jobs, drawn {number + 1}", draw_plan(replace(request, execution="jobs"), rng)
    for description, (pools, chunks) in POOLS.items():
        named_stages = {stage for stage, _ in pools}
        rest = [stage for stage in flow.direct_dependencies() if stage not in named_stages]
        values: dict[str, Any] = {
            "num_chunks": chunks,
            "pools": [
                {"stages": rest if stage == "*" else [stage], "devices": {kind: 1}}
                for stage, kind in pools
            ],
            # Stages in no pool, such as SFT, are jobs with these resources.
            "defaults": {"partition": "h100", "gpus": 1, "mem_mb": 2000},
        }
        yield description, parse_plan(values, description, flow)


def measure_point(
    run: Run,
    request: PlanRequest,
    experiment: str,
    description: str,
    plan: Plan,
    root: Path,
    name: str,
) -> PredictionPoint:
    """Predict a plan, run it and return both times."""
    proposal = assess_plan(request, plan, description)
    forecast = proposal.forecast
    clone = clone_run(run, proposal.plan, root / "runs", name, ITERATIONS[plan.execution])
    drive(clone)
    for line in compare_with_forecast(clone):
        print(f"    {line.name}: {line.predicted_s:.2f} s, was {line.actual.median_s:.2f} s")
    return PredictionPoint(
        experiment,
        plan.execution,
        description,
        forecast.iteration_s,
        forecast.low_s,
        forecast.high_s,
        measure_times(clone)["iteration"].total_s,
    )


def table(points: list[PredictionPoint]) -> str:
    """Return the points as a Markdown table for the documentation."""
    lines = [
        "| experiment | plan | predicted, s | 80 % | measured, s | error |",
        "|---|---|---|---|---|---|",
    ]
    for p in points:
        lines.append(
            f"| {p.experiment} | {p.plan} | {p.predicted_s:.2f} | {p.low_s:.2f} to {p.high_s:.2f} "
            f"| {p.median_s:.2f} ({min(p.measured_s):.2f} to {max(p.measured_s):.2f}) "
            f"| {p.error:+.0%} |"
        )
    return "\n".join(lines)


def draw(points: list[PredictionPoint], path: Path = PICTURE) -> None:
    """Plot predicted against measured times on logarithmic axes, with the 80 % intervals."""
    figure, axes = plt.subplots(figsize=(6.4, 5.2))
    colours = dict(zip(EXPERIMENTS, ("#2f7fb5", "#c8553d"), strict=True))
    markers = {"jobs": ("o", "a job for each stage"), "pools": ("s", "pools")}
    for p in points:
        axes.errorbar(
            p.median_s,
            p.predicted_s,
            xerr=[[p.median_s - min(p.measured_s)], [max(p.measured_s) - p.median_s]],
            yerr=[[p.predicted_s - p.low_s], [p.high_s - p.predicted_s]],
            fmt=markers[p.execution][0],
            color=colours[p.experiment],
            ms=6,
            lw=1,
            alpha=0.85,
        )
    ends = [0.8 * min(min(p.measured_s) for p in points), 1.25 * max(p.high_s for p in points)]
    axes.plot(ends, ends, color=TEXT_COLOUR, lw=1)
    axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="#9aa4af33")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ticks = [t for t in TICKS_S if ends[0] < t < ends[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())
    axes.set(
        xlabel="measured seconds of an iteration (bars: all of a run)",
        ylabel="predicted seconds (bars: 80 %)",
    )
    axes.set_title("Plans, predicted and run (grey: 10 % either way)")
    for label in dict.fromkeys(p.experiment for p in points):
        axes.plot([], [], "o", color=colours[label], label=label)
    for marker, label in markers.values():
        axes.plot([], [], marker, color=TEXT_COLOUR, mfc="none", label=label)
    axes.legend(loc="upper left")
    finish_chart(figure).savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction")
    parser.add_argument(
        "--minutes", type=float, help="measure for this long; default: only show results"
    )
    if (minutes := parser.parse_args().minutes) is None:
        draw(read_points(POINTS))
        print(table(read_points(POINTS)))
    else:
        print("all measured" if advance(minutes) else "more to measure")
