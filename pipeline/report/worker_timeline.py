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
    """Return the spans of stages, split at their pauses; parts of pauses outside of a stage are
    dropped."""
    spans = list(spans)
    pauses: dict[tuple[str, int, str, int | None], list[StageSpan]] = defaultdict(list)
    for span in spans:
        if span.name in IDLE_SPANS:
            pauses[span.stage, span.iteration, span.lane, span.work_item].append(span)
    found = []
    for whole in spans:
        if whole.name != whole.stage:
            continue
        where = (whole.stage, whole.iteration, whole.lane)
        at = whole.start
        for pause in sorted(pauses[*where, whole.work_item], key=lambda pause: pause.start):
            start, end = max(pause.start, at), min(pause.end, whole.end)
            if end > start:
                found += [
                    TimelineSegment(*where, at, start, True),
                    TimelineSegment(*where, start, end, False),
                ]
                at = end
        found.append(TimelineSegment(*where, at, whole.end, True))
    return [piece for piece in found if piece.end > piece.start]


def iteration_windows(spans: Iterable[StageSpan]) -> dict[int, tuple[float, float]]:
    """Return start and end of iterations: each ends when its weights are published."""
    spans = list(spans)
    ends: dict[int, float] = {}
    for span in spans:
        if span.name == span.stage == "sync":
            ends[span.iteration] = max(span.end, ends.get(span.iteration, 0.0))
    starts = [s.start for s in spans if s.name == s.stage == "rollout" and s.iteration == 0]
    before = {iteration + 1: end for iteration, end in ends.items()}
    if starts:
        before[0] = min(starts)
    return {i: (before[i], end) for i, end in sorted(ends.items()) if i in before}


def worker_idle_times(spans: Iterable[StageSpan]) -> list[WorkerIdleTime]:
    """Return the idle time by worker. The first iteration, which loads everything, counts only if
    it is the only one."""
    spans = list(spans)
    known = iteration_windows(spans)
    if len(known) > 1:
        known.pop(0, None)
    counted = _union(known.values())
    total_s = sum(end - start for start, end in counted)
    if not total_s:
        return []
    lanes: dict[str, list[TimelineSegment]] = defaultdict(list)
    for piece in timeline_segments(spans):
        lanes[piece.lane].append(piece)
    starts = [start for start, _ in counted]
    rows = []
    for lane in sort_lanes(lanes):
        segments = lanes[lane]
        seconds: dict[str, list[float]] = {}
        for piece in segments:
            inside = _shared_s(piece.start, piece.end, counted, starts) / len(known)
            if inside:
                seconds.setdefault(piece.stage, [0.0, 0.0])[not piece.is_computing] += inside
        computing = _union((piece.start, piece.end) for piece in segments if piece.is_computing)
        covered = sum(_shared_s(start, end, counted, starts) for start, end in computing)
        stages = {stage: (pair[0], pair[1]) for stage, pair in seconds.items()}
        rows.append(WorkerIdleTime(lane, 1 - covered / total_s, stages))
    return rows


def _union(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals, as disjoint intervals in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start:
            found.append((start, end))
    return found


def _shared_s(
    start: float, end: float, counted: Sequence[tuple[float, float]], starts: Sequence[float]
) -> float:
    """Return the length of an interval within the ``counted`` ones, which begin at ``starts``."""
    shared, at = 0.0, max(0, bisect_right(starts, start) - 1)
    while at < len(counted) and counted[at][0] < end:
        shared += max(0.0, min(end, counted[at][1]) - max(start, counted[at][0]))
        at += 1
    return shared
