"""What the stages of a run really took, beside what its plan predicted."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.graph import Graph, StageNode
from pipeline.metrics import busy_s, folder_manifest, iterations, stage_manifest
from pipeline.plan import Plan
from pipeline.pools.rollout_scheduler import read_work_spans
from pipeline.run import Run
from rlinf.artifacts import Manifest

WORK_PART = "work"
"""In the forecast of a stage of a pool: what it computes, beside what it waits."""
RECENT_ITERATIONS = 20
"""Iterations that count: those of an earlier plan, or of other neighbours, go out of date."""


@dataclass(frozen=True)
class MeasuredTimes:
    """Repeats of one stage, or of the whole iteration."""

    total_s: tuple[float, ...]
    """From the end of the last input to the end of the stage."""
    running_s: tuple[float, ...] = ()
    """Of that, loading and work: from the first line of the stage on."""
    busy_s: tuple[float, ...] = ()
    """Of that, computing, by the worker that computed longest."""

    @property
    def median_s(self) -> float:
        """Of the whole."""
        return statistics.median(self.total_s)

    @property
    def spread_s(self) -> float:
        """Standard deviation of the whole."""
        return statistics.stdev(self.total_s) if len(self.total_s) > 1 else 0.0


@dataclass(frozen=True)
class ForecastComparison:
    """One line of predicted against actual."""

    name: str
    predicted_s: float
    low_s: float
    high_s: float
    actual: MeasuredTimes

    @property
    def error(self) -> float:
        """Predicted over actual, less 1."""
        return self.predicted_s / self.actual.median_s - 1

    @property
    def is_within_interval(self) -> bool:
        """Whether the median lies in the predicted interval."""
        return self.low_s <= self.actual.median_s <= self.high_s


def measure_times(run: Run, newest: int = RECENT_ITERATIONS) -> dict[str, MeasuredTimes]:
    """By stage, and ``iteration`` for the whole; what never finished is left out, and what began
    under an earlier plan.

    An iteration lasts from one publication of weights to the next, so the first does not count.
    """
    graph = Graph(run.config)
    predicted = Plan.from_run(run.folder).forecast
    generated = {
        iteration: _busiest(spans) for iteration, spans in read_work_spans(run.folder).items()
    }
    since = (predicted.applied_at if predicted else None) or 0.0
    whole: dict[str, list[float]] = {}
    inside: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    for iteration in iterations(run.folder)[-newest:]:
        first = stage_manifest(run.folder, next(iter(graph.flow.stages)), iteration)
        if not iteration or first is None or first.timing["began"] < since:
            continue
        for stage in graph.flow.stages:
            manifest = stage_manifest(run.folder, stage, iteration)
            if manifest is None:
                continue
            sources = graph.inputs(StageNode(stage, iteration)).values()
            known = [folder_manifest(graph.output_folder(run.folder, source)) for source in sources]
            ready = [_end(source) for source in known if source is not None]
            if len(ready) == len(known):
                whole.setdefault(stage, []).append(_end(manifest) - max(ready))
                inside.setdefault(stage, []).append(_end(manifest) - manifest.timing["start"])
                # The worker that is ordered an elastic rollout only gathers what others generate.
                seconds = generated.get(iteration) if stage == graph.flow.elastic_stage else None
                busy.setdefault(stage, []).append(seconds or busy_s(run.folder, stage, iteration))
        ends = [
            stage_manifest(run.folder, graph.flow.publish_stage, i)
            for i in (iteration - 1, iteration)
        ]
        if ends[0] is not None and ends[1] is not None:
            whole.setdefault("iteration", []).append(_end(ends[1]) - _end(ends[0]))
    return {
        name: MeasuredTimes(tuple(values), tuple(inside.get(name, ())), tuple(busy.get(name, ())))
        for name, values in whole.items()
    }


def compare_with_forecast(run: Run) -> Sequence[ForecastComparison]:
    """Predicted against actual, by stage and for the iteration; empty without a prediction.

    Stages of pools wait for each other in the middle: of them what they compute is compared.
    """
    plan = Plan.from_run(run.folder)
    predicted = plan.forecast
    if predicted is None:
        return []
    times = measure_times(run)
    lines = []
    for stage, entry in predicted.stages.items():
        if stage not in times:
            continue
        expected, took = entry.seconds, times[stage]
        if plan.execution == "segment":
            if WORK_PART not in entry.breakdown_s:
                continue
            expected, took = entry.breakdown_s[WORK_PART], MeasuredTimes(times[stage].busy_s)
        waits = entry.seconds - expected
        low, high = max(0.0, entry.low_s - waits), entry.high_s - waits
        lines.append(ForecastComparison(stage, expected, low, high, took))
    if "iteration" in times:
        whole = predicted.iteration_s, predicted.low_s, predicted.high_s
        lines.append(ForecastComparison("iteration", *whole, times["iteration"]))
    return lines


def _busiest(spans: Sequence[Mapping[str, Any]]) -> float:
    """Seconds for which the busiest of some generators generated."""
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        if span["name"] == "generate":
            seconds[span["worker"]] += span["end"] - span["start"]
    return max(seconds.values(), default=0.0)


def _end(manifest: Manifest) -> float:
    return float(manifest.timing["end"])
