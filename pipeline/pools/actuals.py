"""What the stages of a run really took, beside what its plan predicted."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.flow import Graph, Node
from pipeline.metrics import busy_s, iterations, manifest_in, manifest_of
from pipeline.plan import Plan
from pipeline.pools.generators import claimed
from pipeline.run import Run
from rlinf.artifacts import Manifest

WORK = "work"
"""In the forecast of a stage of a pool: what it computes, beside what it waits."""
NEWEST = 20
"""Iterations that count: those of an earlier plan, or of other neighbours, go out of date."""


@dataclass(frozen=True)
class Times:
    """Repeats of one stage, or of the whole iteration."""

    whole_s: tuple[float, ...]
    """From the end of the last input to the end of the stage."""
    inside_s: tuple[float, ...] = ()
    """Of that, loading and work: from the first line of the stage on."""
    busy_s: tuple[float, ...] = ()
    """Of that, computing, by the worker that computed longest."""

    @property
    def median_s(self) -> float:
        """Of the whole."""
        return statistics.median(self.whole_s)

    @property
    def spread_s(self) -> float:
        """Standard deviation of the whole."""
        return statistics.stdev(self.whole_s) if len(self.whole_s) > 1 else 0.0


@dataclass(frozen=True)
class Comparison:
    """One line of predicted against actual."""

    what: str
    predicted_s: float
    low_s: float
    high_s: float
    actual: Times

    @property
    def error(self) -> float:
        """Predicted over actual, less 1."""
        return self.predicted_s / self.actual.median_s - 1

    @property
    def within(self) -> bool:
        """Whether the median lies in the predicted interval."""
        return self.low_s <= self.actual.median_s <= self.high_s


def actual(run: Run, newest: int = NEWEST) -> dict[str, Times]:
    """By stage, and ``iteration`` for the whole; what never finished is left out, and what began
    under an earlier plan.

    An iteration lasts from one publication of weights to the next, so the first does not count.
    """
    graph = Graph(run.config)
    predicted = Plan.read(run.folder).predicted
    generated = {iteration: _busiest(spans) for iteration, spans in claimed(run.folder).items()}
    since = (predicted.since if predicted else None) or 0.0
    whole: dict[str, list[float]] = {}
    inside: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    for iteration in iterations(run.folder)[-newest:]:
        first = manifest_of(run.folder, next(iter(graph.flow.stages)), iteration)
        if not iteration or first is None or first.timing["began"] < since:
            continue
        for stage in graph.flow.stages:
            manifest = manifest_of(run.folder, stage, iteration)
            if manifest is None:
                continue
            sources = graph.inputs(Node(stage, iteration)).values()
            known = [manifest_in(graph.folder(run.folder, source)) for source in sources]
            ready = [_end(source) for source in known if source is not None]
            if len(ready) == len(known):
                whole.setdefault(stage, []).append(_end(manifest) - max(ready))
                inside.setdefault(stage, []).append(_end(manifest) - manifest.timing["start"])
                # The worker that is ordered an elastic rollout only gathers what others generate.
                seconds = generated.get(iteration) if stage == graph.flow.elastic else None
                busy.setdefault(stage, []).append(seconds or busy_s(run.folder, stage, iteration))
        ends = [
            manifest_of(run.folder, graph.flow.publishes, i) for i in (iteration - 1, iteration)
        ]
        if ends[0] is not None and ends[1] is not None:
            whole.setdefault("iteration", []).append(_end(ends[1]) - _end(ends[0]))
    return {
        name: Times(tuple(values), tuple(inside.get(name, ())), tuple(busy.get(name, ())))
        for name, values in whole.items()
    }


def compare(run: Run) -> Sequence[Comparison]:
    """Predicted against actual, by stage and for the iteration; empty without a prediction.

    Stages of pools wait for each other in the middle: of them what they compute is compared.
    """
    plan = Plan.read(run.folder)
    predicted = plan.predicted
    if predicted is None:
        return []
    times = actual(run)
    lines = []
    for stage, entry in predicted.stages.items():
        if stage not in times:
            continue
        expected, took = entry.seconds, times[stage]
        if plan.grain == "segment":
            if WORK not in entry.parts_s:
                continue
            expected, took = entry.parts_s[WORK], Times(times[stage].busy_s)
        waits = entry.seconds - expected
        low, high = max(0.0, entry.low_s - waits), entry.high_s - waits
        lines.append(Comparison(stage, expected, low, high, took))
    if "iteration" in times:
        whole = predicted.iteration_s, predicted.low_s, predicted.high_s
        lines.append(Comparison("iteration", *whole, times["iteration"]))
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
