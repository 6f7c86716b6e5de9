"""Measured times of the stages of a run, and their comparison with the forecast of the plan."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.graph import Graph, StageNode
from pipeline.metrics import busy_s, folder_manifest, list_iterations, stage_manifest
from pipeline.plan import Plan
from pipeline.pools.work_log import read_work_spans
from pipeline.run import Run
from rlinf.artifacts import Manifest

WORK_PART = "work"
"""Key in ``breakdown_s`` of a forecast for pools: the seconds of a stage without waiting."""
RECENT_ITERATIONS = 20
"""Maximum number of iterations that are measured. Older ones may have another plan or load."""


@dataclass(frozen=True)
class MeasuredTimes:
    """Measurements of one stage, or of the whole iteration."""

    total_s: tuple[float, ...]
    """Seconds from the end of the last input to the end of the stage."""
    running_s: tuple[float, ...] = ()
    """Part of ``total_s`` after the start of the stage's program: loading and work."""
    busy_s: tuple[float, ...] = ()
    """Part of ``total_s`` spent computing, on the worker that computed longest."""

    @property
    def median_s(self) -> float:
        """Median of ``total_s``."""
        return statistics.median(self.total_s)

    @property
    def spread_s(self) -> float:
        """Standard deviation of ``total_s``."""
        return statistics.stdev(self.total_s) if len(self.total_s) > 1 else 0.0


@dataclass(frozen=True)
class ForecastComparison:
    """Predicted and measured time of one stage, or of the iteration."""

    name: str
    predicted_s: float
    low_s: float
    high_s: float
    """The predicted interval from the 10th to the 90th percentile."""
    actual: MeasuredTimes

    @property
    def error(self) -> float:
        """Predicted time divided by measured time, minus 1."""
        return self.predicted_s / self.actual.median_s - 1

    @property
    def is_within_interval(self) -> bool:
        """Whether the median is within the predicted interval."""
        return self.low_s <= self.actual.median_s <= self.high_s


def measure_times(run: Run, max_iterations: int = RECENT_ITERATIONS) -> dict[str, MeasuredTimes]:
    """Return measured times by stage, and for the ``iteration``, under the current plan.

    An iteration lasts from one publication of weights to the next, so the first iteration is left
    out. Unfinished stages are left out too.
    """
    graph = Graph(run.config)
    forecast = Plan.from_run(run.folder).forecast
    generation_s = {
        iteration: _busiest_s(spans) for iteration, spans in read_work_spans(run.folder).items()
    }
    plan_applied_at = (forecast.applied_at if forecast else None) or 0.0
    total: dict[str, list[float]] = {}
    running: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    for iteration in list_iterations(run.folder)[-max_iterations:]:
        first = stage_manifest(run.folder, next(iter(graph.flow.stages)), iteration)
        if not iteration or first is None or first.timing["began"] < plan_applied_at:
            continue
        for stage in graph.flow.stages:
            manifest = stage_manifest(run.folder, stage, iteration)
            if manifest is None:
                continue
            sources = graph.inputs(StageNode(stage, iteration)).values()
            inputs = [
                folder_manifest(graph.output_folder(run.folder, source)) for source in sources
            ]
            input_ends = [_end_s(source) for source in inputs if source is not None]
            if len(input_ends) == len(inputs):
                total.setdefault(stage, []).append(_end_s(manifest) - max(input_ends))
                running.setdefault(stage, []).append(_end_s(manifest) - manifest.timing["start"])
                # In an elastic rollout the collector only receives what generators compute.
                seconds = generation_s.get(iteration) if stage == graph.flow.elastic_stage else None
                busy.setdefault(stage, []).append(seconds or busy_s(run.folder, stage, iteration))
        published = [
            stage_manifest(run.folder, graph.flow.publish_stage, i)
            for i in (iteration - 1, iteration)
        ]
        if published[0] is not None and published[1] is not None:
            total.setdefault("iteration", []).append(_end_s(published[1]) - _end_s(published[0]))
    return {
        name: MeasuredTimes(tuple(values), tuple(running.get(name, ())), tuple(busy.get(name, ())))
        for name, values in total.items()
    }


def compare_with_forecast(run: Run) -> Sequence[ForecastComparison]:
    """Compare the forecast with measurements, by stage and for the iteration; empty without a
    forecast.

    Stages in pools wait for each other, so only the computing times of stages are compared.
    """
    plan = Plan.from_run(run.folder)
    forecast = plan.forecast
    if forecast is None:
        return []
    times = measure_times(run)
    comparisons = []
    for stage, entry in forecast.stages.items():
        if stage not in times:
            continue
        predicted_s, measured = entry.seconds, times[stage]
        if plan.execution == "pools":
            if WORK_PART not in entry.breakdown_s:
                continue
            predicted_s, measured = entry.breakdown_s[WORK_PART], MeasuredTimes(measured.busy_s)
        waiting_s = entry.seconds - predicted_s
        low, high = max(0.0, entry.low_s - waiting_s), entry.high_s - waiting_s
        comparisons.append(ForecastComparison(stage, predicted_s, low, high, measured))
    if "iteration" in times:
        interval = forecast.iteration_s, forecast.low_s, forecast.high_s
        comparisons.append(ForecastComparison("iteration", *interval, times["iteration"]))
    return comparisons


def _busiest_s(spans: Sequence[Mapping[str, Any]]) -> float:
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        if span["name"] == "generate":
            seconds[span["worker"]] += span["end"] - span["start"]
    return max(seconds.values(), default=0.0)


def _end_s(manifest: Manifest) -> float:
    return float(manifest.timing["end"])
