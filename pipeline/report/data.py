"""The data of the report, from the manifests and trajectories of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.metrics import folder_manifest, list_iterations, metrics_row, stage_manifest
from pipeline.report.theme import stage_colours
from pipeline.report.transcripts import TranscriptSample, iterations_on_disk, read_samples
from pipeline.report.worker_timeline import StageSpan, TimelineSegment, timeline_segments
from pipeline.run import Run
from rlinf.artifacts import Manifest
from stages.flow import EVALUATE, flow_of
from stages.layout import POOLS_FOLDER, VIDEOS_FOLDER, offline_folder, stage_folder

REPORT_FOLDER = "report"
"""Folder of the report in a run; links are relative to it."""


@dataclass
class ReportData:
    """The data of all charts and tables of a report."""

    run: Run
    manifests: list[Manifest] = field(default_factory=list)
    sft: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluated: list[dict[str, Any]] = field(default_factory=list)
    spans: list[StageSpan] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
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
        """Return iterations and values of a metric, where it was recorded."""
        points = [(row["iteration"] + 1, row[name]) for row in self.rows if name in row]
        x, y = zip(*points, strict=True) if points else ((), ())
        return np.array(x, dtype=float), np.array(y, dtype=float)


def read_report_data(folder: Path) -> ReportData:
    """Read the data of a run. Missing, unfinished and pruned parts are left out."""
    run = Run.open(folder)
    data = ReportData(run)
    flow = flow_of(run.config)
    for stage in flow.offline:
        if (offline_manifest := folder_manifest(offline_folder(run.folder, stage))) is not None:
            data.sft += offline_manifest.extra.get("curve", [])
            data.manifests.append(offline_manifest)
    iterations = list_iterations(run.folder)
    for iteration in iterations:
        row = [stage_manifest(run.folder, stage, iteration) for stage in data.stage_names]
        data.manifests += [manifest for manifest in row if manifest is not None]
        values = metrics_row(iteration, row)
        if values is not None:
            data.rows.append(values)
    for version in sorted(int(p.name) for p in (run.folder / EVALUATE).glob("[0-9]*")):
        manifest = stage_manifest(run.folder, EVALUATE, version)
        if manifest is not None:
            data.manifests.append(manifest)
            scores = {f"evaluate/{name}": value for name, value in manifest.metrics.items()}
            data.evaluated.append({"version": version, **scores})
            folder = stage_folder(run.folder, EVALUATE, version) / manifest.data / VIDEOS_FOLDER
            if videos := sorted(folder.glob("*.mp4")):
                page = run.folder / REPORT_FOLDER
                data.videos[version] = [Path(os.path.relpath(film, page)) for film in videos]
    generated: Mapping[int, list[dict[str, Any]]] = {}
    if (run.folder / POOLS_FOLDER).is_dir():
        from pipeline.pools.rollout_scheduler import read_work_spans

        generated = read_work_spans(run.folder)
    for manifest in data.manifests:
        is_elastic = manifest.stage == flow.elastic_stage
        extra = generated.get(manifest.iteration, []) if is_elastic else []
        spans = [_span(manifest, span) for span in [*manifest.timing["spans"], *extra]]
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
    """Return the seconds of a stage; in pools only its computing time, because stages
    interleave."""
    if not any(span.get("worker") for span in manifest.timing["spans"]):
        return float(manifest.timing["end"] - manifest.timing["start"])
    computed: dict[str, float] = {}
    for segment in timeline_segments(spans):
        if segment.is_computing:
            computed[segment.lane] = computed.get(segment.lane, 0.0) + segment.seconds
    return max(computed.values(), default=0.0)
