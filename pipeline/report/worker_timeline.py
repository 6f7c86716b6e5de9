"""The timeline of each worker: when it computed and when it waited, from the spans of a run."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stages.context import IDLE_SPANS


@dataclass(frozen=True)
class StageSpan:
    """A stage, or a part of one, on one rank."""

    stage: str
    name: str
    iteration: int
    lane: str
    """Name of the worker: pool and rank, or only the rank, and the host."""
    start: float
    end: float
    work_item: int | None = None
    """Number of the work item in an elastic rollout; its worker may wait for others meanwhile."""


@dataclass(frozen=True)
class TimelineSegment:
    """An interval in which a stage computed, or waited or moved data."""

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
    """The idle time of one worker over all counted iterations."""

    lane: str
    idle_share: float
    """Share of the time in which the worker computed no stage."""
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Computing and waiting seconds per iteration, by stage."""


def sort_lanes(lanes: Iterable[str]) -> list[str]:
    """Return unique lanes in natural order: rank 10 after rank 9."""
    return sorted(set(lanes), key=lambda lane: [w.zfill(6) for w in re.split(r"(\d+)", lane)])


def timeline_segments(spans: Iterable[StageSpan]) -> list[TimelineSegment]:
    """Return the spans of stages, split at their pauses. The parts of a pause outside its stage are
    ignored."""
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
    starts = [s.start for s in spans if s.name == s.stage == "rollout" and s.iteration == 0]
    begins = {iteration + 1: end for iteration, end in ends.items()}
    if starts:
        begins[0] = min(starts)
    return {i: (begins[i], end) for i, end in sorted(ends.items()) if i in begins}


def worker_idle_times(spans: Iterable[StageSpan]) -> list[WorkerIdleTime]:
    """Return the idle time by worker. The first iteration, which loads everything, counts only if
    it is the only one."""
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
