"""The data of the report, from the manifests and trajectories of a run.

It includes a timeline of each worker and a selection of samples as transcripts.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.metrics import folder_manifest, list_iterations, metrics_row, stage_manifest
from pipeline.report.theme import stage_colours
from pipeline.run import Run, read_problem_sets
from pipeline.transcripts import (
    HEAD,
    TAIL,
    TranscriptSample,
    iterations_on_disk,
    read_samples,
    select_samples,
    shorten,
)
from rlinf.artifacts import Manifest
from rlinf.envs.base import ProblemSetSize
from rlinf.errors import ConfigError
from stages.context import IDLE_SPANS
from stages.flow import EVALUATE, flow_of
from stages.layout import POOLS_FOLDER, VIDEOS_FOLDER, setup_stage_folder, stage_folder

REPORT_FOLDER = "report"
"""Folder of the report in a run; links are relative to it."""


@dataclass
class ReportData:
    """The data of all charts and tables of a report."""

    run: Run
    manifests: list[Manifest] = field(default_factory=list)
    problem_sets: list[ProblemSetSize] = field(default_factory=list)
    """Sizes of the sets of problems of a language task."""
    sft: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the SFT stage: ``step``, ``loss`` and, if measured, ``score`` and ``eval_loss``."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Metrics of each finished iteration (:func:`pipeline.metrics.metrics_row`)."""
    evaluated: list[dict[str, Any]] = field(default_factory=list)
    """Version of the weights and metrics of each evaluation."""
    spans: list[StageSpan] = field(default_factory=list)
    """Time spans of stages and of their parts, on every rank."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """Host, job, seconds and resource usage of each committed stage."""
    samples: dict[int, list[TranscriptSample]] = field(default_factory=dict)
    """Samples by iteration, for iterations whose trajectories are on disk."""
    videos: dict[int, list[Path]] = field(default_factory=dict)
    """Videos of held-out episodes by version of the weights, as paths relative to the report."""

    @property
    def scores(self) -> list[tuple[int, float]]:
        """Held-out score by version of the weights."""
        return [(row["version"], row["evaluate/score"]) for row in self.evaluated]

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the first stage to the end of the last one, including
        interruptions."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def busy_s(self) -> float:
        """Sum of the computing times of all stages."""
        return sum(segment.seconds for segment in self.segments if segment.is_computing)

    @cached_property
    def uses_pools(self) -> bool:
        """Whether stages ran in resident pools."""
        return any(span.lane.startswith("pool ") for span in self.spans)

    @cached_property
    def segments(self) -> list[TimelineSegment]:
        """The stages of every worker, split at pauses."""
        return timeline_segments(self.spans)

    @cached_property
    def stage_names(self) -> tuple[str, ...]:
        """The stages of an iteration, in order."""
        return tuple(flow_of(self.run.config).stages)

    @cached_property
    def colours(self) -> dict[str, str]:
        """Colour by stage."""
        return stage_colours(flow_of(self.run.config).all_stages)

    @property
    def first_and_last_samples(self) -> dict[str, list[TranscriptSample]]:
        """Samples of the first and the last iteration on disk."""
        iterations = dict.fromkeys([*list(self.samples)[:1], *list(self.samples)[-1:]])
        return {f"iteration {i + 1}": self.samples[i] for i in iterations}

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return iterations (from 1) and values of a metric; iterations without it are left out."""
        points = [(row["iteration"] + 1, row[name]) for row in self.rows if name in row]
        x, y = zip(*points, strict=True) if points else ((), ())
        return np.array(x, dtype=float), np.array(y, dtype=float)


def read_report_data(folder: Path) -> ReportData:
    """Read the data of a run. Missing, unfinished and pruned parts are left out."""
    run = Run.open(folder)
    data = ReportData(run)
    with contextlib.suppress(ConfigError):
        data.problem_sets = read_problem_sets(folder)
    flow = flow_of(run.config)
    for stage in flow.setup_stages:
        if (setup_manifest := folder_manifest(setup_stage_folder(run.folder, stage))) is not None:
            data.sft += setup_manifest.extra.get("curve", [])
            data.manifests.append(setup_manifest)
    iterations = list_iterations(run.folder)
    for iteration in iterations:
        manifests = [stage_manifest(run.folder, stage, iteration) for stage in data.stage_names]
        data.manifests += [manifest for manifest in manifests if manifest is not None]
        values = metrics_row(iteration, manifests)
        if values is not None:
            data.rows.append(values)
    for version in sorted(int(p.name) for p in (run.folder / EVALUATE).glob("[0-9]*")):
        manifest = stage_manifest(run.folder, EVALUATE, version)
        if manifest is not None:
            data.manifests.append(manifest)
            scores = {f"evaluate/{name}": value for name, value in manifest.metrics.items()}
            data.evaluated.append({"version": version, **scores})
            mp4_folder = stage_folder(run.folder, EVALUATE, version) / manifest.data / VIDEOS_FOLDER
            if videos := sorted(mp4_folder.glob("*.mp4")):
                report = run.folder / REPORT_FOLDER
                data.videos[version] = [Path(os.path.relpath(video, report)) for video in videos]
    generator_spans: Mapping[int, list[dict[str, Any]]] = {}
    if (run.folder / POOLS_FOLDER).is_dir():
        from pipeline.pools.work_log import read_work_spans

        generator_spans = read_work_spans(run.folder)
    for manifest in data.manifests:
        is_elastic = manifest.stage == flow.elastic_stage
        item_spans = generator_spans.get(manifest.iteration, []) if is_elastic else []
        spans = [_span(manifest, span) for span in [*manifest.timing["spans"], *item_spans]]
        data.spans += spans
        data.stages.append(
            {
                "stage": manifest.stage,
                "iteration": manifest.iteration,
                "host": manifest.host,
                "job": manifest.job,
                "world": manifest.world,
                "seconds": _seconds(manifest, spans),
                "usage": manifest.timing.get("usage", []),
            }
        )
    on_disk = iterations_on_disk(run.folder, iterations)
    data.samples = {i: read_samples(run.folder, i) for i in on_disk}
    return data


def _span(manifest: Manifest, span: dict[str, Any]) -> StageSpan:
    times = span["start"], span["end"]
    return StageSpan(
        manifest.stage,
        span["name"],
        manifest.iteration,
        lane_name(span),
        *times,
        span.get("work_item"),
    )


def lane_name(span: dict[str, Any]) -> str:
    """Return the chart lane of a span. A worker of a pool has the same lane in every lease."""
    pool = re.fullmatch(r"pool-(\d+)(?:w(\d+))?-\d+-r(\d+)", span.get("worker", ""))
    if pool is None:
        return f"{span['host']} · rank {span['rank']}"
    worker = f"rank {pool[3]}" if pool[2] is None else f"worker {pool[2]}"
    return f"pool {pool[1]} · {worker} · {span['host']}"


def _seconds(manifest: Manifest, spans: Iterable[StageSpan]) -> float:
    """Return the seconds of a stage. In pools, stages interleave, so only computing counts."""
    if not any(span.get("worker") for span in manifest.timing["spans"]):
        return float(manifest.timing["end"] - manifest.timing["start"])
    computed: dict[str, float] = {}
    for segment in timeline_segments(spans):
        if segment.is_computing:
            computed[segment.lane] = computed.get(segment.lane, 0.0) + segment.seconds
    return max(computed.values(), default=0.0)


MAX_SAMPLES, MAX_CHARACTERS = 3000, 4_000_000
"""Maximum number of samples, and of characters of their texts, on a page."""


def transcript_columns(samples: Mapping[int, Sequence[TranscriptSample]]) -> dict[str, Any]:
    """Return transcripts as columns for the page, with each prompt stored once.

    ``total`` counts all samples, including those left out. ``unreadable`` lists the iterations with
    damaged files.
    """
    usable = {i: [s for s in candidates if s.text is not None] for i, candidates in samples.items()}
    usable = {i: candidates for i, candidates in usable.items() if candidates}
    total = sum(len(candidates) for candidates in usable.values())
    max_samples = max(4, MAX_SAMPLES // max(1, len(usable)))
    max_characters = MAX_CHARACTERS / max(1, len(usable))
    prompts: dict[str, int] = {}
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("iteration", "sample", "prompt", "text", "answer", "stop", "score", "length")
    }
    for iteration, candidates in usable.items():
        selected, used = list[TranscriptSample](), 0
        for sample in select_samples(candidates, max_samples):
            used += min(len(sample.text or ""), HEAD + TAIL) + min(len(sample.prompt), HEAD + TAIL)
            if used > max_characters and selected:
                break
            selected.append(sample)
        for sample in sorted(selected):
            prompt, text = shorten(sample.prompt), shorten(sample.text or "")
            score = sample.score if math.isfinite(sample.score) else None
            prompt_index = prompts.setdefault(prompt, len(prompts))
            values = (iteration + 1, sample.number, prompt_index, text, shorten(sample.answer))
            for name, value in zip(
                columns, (*values, sample.stop, score, sample.length), strict=True
            ):
                columns[name].append(value)
    return {
        "unreadable": [i + 1 for i, candidates in samples.items() if not candidates],
        "prompts": list(prompts),
        "columns": columns,
        "total": total,
        "iterations": [i + 1 for i in usable],
    }


@dataclass(frozen=True)
class StageSpan:
    """A stage, or a part of one, on one rank."""

    stage: str
    name: str
    """Name of the part, or of the stage for a whole stage."""
    iteration: int
    lane: str
    """Row of the Gantt chart; one per worker (:func:`lane_name`)."""
    start: float
    end: float
    """Unix times."""
    work_item: int | None = None
    """Number of the work item in an elastic rollout; work items of a worker may overlap."""


@dataclass(frozen=True)
class TimelineSegment:
    """An interval in which a stage computed (``is_computing``), or else waited or moved data."""

    stage: str
    iteration: int
    lane: str
    start: float
    end: float
    is_computing: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class WorkerIdleTime:
    """The idle time of one worker (:func:`worker_idle_times`)."""

    lane: str
    idle_share: float
    """Share of the time in which the worker computed no stage."""
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Computing and waiting seconds per iteration, by stage."""


def sort_lanes(lanes: Iterable[str]) -> list[str]:
    """Return unique lanes in natural order: rank 10 after rank 9."""
    return sorted(set(lanes), key=lambda lane: [w.zfill(6) for w in re.split(r"(\d+)", lane)])


def timeline_segments(spans: Iterable[StageSpan]) -> list[TimelineSegment]:
    """Return the spans of whole stages, split at the pauses within them."""
    spans = list(spans)
    pauses: dict[tuple[str, int, str, int | None], list[StageSpan]] = defaultdict(list)
    for span in spans:
        if span.name in IDLE_SPANS:
            pauses[span.stage, span.iteration, span.lane, span.work_item].append(span)
    segments = []
    for stage_span in spans:
        if stage_span.name != stage_span.stage:
            continue
        key = (stage_span.stage, stage_span.iteration, stage_span.lane)
        cursor = stage_span.start
        for pause in sorted(pauses[*key, stage_span.work_item], key=lambda pause: pause.start):
            start, end = max(pause.start, cursor), min(pause.end, stage_span.end)
            if end > start:
                segments += [
                    TimelineSegment(*key, cursor, start, True),
                    TimelineSegment(*key, start, end, False),
                ]
                cursor = end
        segments.append(TimelineSegment(*key, cursor, stage_span.end, True))
    return [segment for segment in segments if segment.end > segment.start]


def iteration_windows(spans: Iterable[StageSpan]) -> dict[int, tuple[float, float]]:
    """Return start and end of each iteration, which ends when its weights are published."""
    spans = list(spans)
    ends: dict[int, float] = {}
    for span in spans:
        if span.name == span.stage == "sync":
            ends[span.iteration] = max(span.end, ends.get(span.iteration, 0.0))
    # Pools generate ahead of time: an iteration begins when the previous one ends.
    starts = {iteration + 1: end for iteration, end in ends.items()}
    rollouts = [s.start for s in spans if s.name == s.stage == "rollout" and s.iteration == 0]
    if rollouts:
        starts[0] = min(rollouts)
    return {i: (starts[i], end) for i, end in sorted(ends.items()) if i in starts}


def worker_idle_times(spans: Iterable[StageSpan]) -> list[WorkerIdleTime]:
    """Return the idle time of each worker over all iterations. If there are several, the first one
    is left out, because it loads everything."""
    spans = list(spans)
    windows = iteration_windows(spans)
    if len(windows) > 1:
        windows.pop(0, None)
    intervals = _union(windows.values())
    total_s = sum(end - start for start, end in intervals)
    if not total_s:
        return []
    lanes: dict[str, list[TimelineSegment]] = defaultdict(list)
    for segment in timeline_segments(spans):
        lanes[segment.lane].append(segment)
    starts = [start for start, _ in intervals]
    rows = []
    for lane in sort_lanes(lanes):
        segments = lanes[lane]
        seconds: dict[str, list[float]] = {}
        for segment in segments:
            overlap_s = _overlap_s(segment.start, segment.end, intervals, starts) / len(windows)
            if overlap_s:
                seconds.setdefault(segment.stage, [0.0, 0.0])[not segment.is_computing] += overlap_s
        computing = _union((s.start, s.end) for s in segments if s.is_computing)
        computing_s = sum(_overlap_s(start, end, intervals, starts) for start, end in computing)
        stages = {stage: (pair[0], pair[1]) for stage, pair in seconds.items()}
        rows.append(WorkerIdleTime(lane, 1 - computing_s / total_s, stages))
    return rows


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals, as disjoint intervals in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def _overlap_s(
    start: float, end: float, intervals: Sequence[tuple[float, float]], starts: Sequence[float]
) -> float:
    """Return the length of an interval's overlap with ``intervals``, which begin at ``starts``."""
    overlap, index = 0.0, max(0, bisect_right(starts, start) - 1)
    while index < len(intervals) and intervals[index][0] < end:
        overlap += max(0.0, min(end, intervals[index][1]) - max(start, intervals[index][0]))
        index += 1
    return overlap
