"""What the report shows, read from a run's manifests and kept trajectories."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.metrics import iterations, manifest_in, manifest_of, named
from pipeline.pools.generators import claimed
from pipeline.report.colours import colours
from pipeline.report.idle import Piece, Span, pieces
from pipeline.report.transcripts import Sample, kept, samples_of
from pipeline.run import Run
from rlinf.artifacts import Manifest
from stages.flow import EVALUATE, flow_of
from stages.layout import VIDEOS, offline_folder, stage_folder

FOLDER = "report"
"""Where the page of a run is, within it; links start there."""


@dataclass
class ReportData:
    """Everything the charts and the page need."""

    run: Run
    manifests: list[Manifest] = field(default_factory=list)
    warm_start: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluated: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """Of the iterations whose trajectories are on disk."""
    videos: dict[int, list[Path]] = field(default_factory=dict)
    """Of held-out episodes by version of the weights, as paths in the run directory."""

    @property
    def scores(self) -> list[tuple[int, float]]:
        """Held-out score by version of the weights."""
        return [(row["version"], row["evaluate/score"]) for row in self.evaluated]

    @property
    def wall_s(self) -> float:
        """From the start of the first stage to the end of the last, interruptions included."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def busy_s(self) -> float:
        """Sum of the stages' own times, less their pauses."""
        return sum(piece.seconds for piece in self.pieces if piece.computes)

    @cached_property
    def pooled(self) -> bool:
        """Whether stages ran in resident pools."""
        return any(span.lane.startswith("pool ") for span in self.spans)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The stages of every worker, cut where they paused."""
        return pieces(self.spans)

    @cached_property
    def stage_names(self) -> tuple[str, ...]:
        """The stages of an iteration, in order."""
        return tuple(flow_of(self.run.config).stages)

    @cached_property
    def colours(self) -> dict[str, str]:
        """Of every stage of the run."""
        return colours(flow_of(self.run.config).table)

    @property
    def ends(self) -> dict[str, list[Sample]]:
        """Samples of the first and the last iteration that are there."""
        chosen = dict.fromkeys([*list(self.samples)[:1], *list(self.samples)[-1:]])
        return {f"iteration {i + 1}": self.samples[i] for i in chosen}

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Iterations and values of a metric, where it was recorded."""
        found = [(row["iteration"] + 1, row[name]) for row in self.rows if name in row]
        x, y = zip(*found, strict=True) if found else ((), ())
        return np.array(x, dtype=float), np.array(y, dtype=float)


def read(folder: Path) -> ReportData:
    """Collect what is there; missing, unfinished and pruned parts are left out."""
    run = Run.open(folder)
    data = ReportData(run)
    flow = flow_of(run.config)
    for stage in flow.offline:
        if (before := manifest_in(offline_folder(run.folder, stage))) is not None:
            data.warm_start += before.extra.get("curve", [])
            data.manifests.append(before)
    known = iterations(run.folder)
    for iteration in known:
        row = [manifest_of(run.folder, stage, iteration) for stage in data.stage_names]
        data.manifests += [manifest for manifest in row if manifest is not None]
        values = named(iteration, row)
        if values is not None:
            data.rows.append(values)
    for version in sorted(int(p.name) for p in (run.folder / EVALUATE).glob("[0-9]*")):
        manifest = manifest_of(run.folder, EVALUATE, version)
        if manifest is not None:
            data.manifests.append(manifest)
            scores = {f"evaluate/{name}": value for name, value in manifest.metrics.items()}
            data.evaluated.append({"version": version, **scores})
            folder = stage_folder(run.folder, EVALUATE, version) / manifest.data / VIDEOS
            if films := sorted(folder.glob("*.mp4")):
                page = run.folder / FOLDER
                data.videos[version] = [Path(os.path.relpath(film, page)) for film in films]
    generated = claimed(run.folder)
    for manifest in data.manifests:
        more = generated[manifest.iteration] if manifest.stage == flow.elastic else []
        spans = [_span(manifest, span) for span in [*manifest.timing["spans"], *more]]
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
    data.samples = {i: samples_of(run.folder, i) for i in kept(run.folder, known)}
    return data


def _span(manifest: Manifest, span: dict[str, Any]) -> Span:
    times = span["start"], span["end"]
    return Span(
        manifest.stage, span["name"], manifest.iteration, lane(span), *times, span.get("claim")
    )


def lane(span: dict[str, Any]) -> str:
    """Of a span: workers of a pool keep theirs from one lease to the next."""
    pool = re.fullmatch(r"pool-(\d+)(?:w(\d+))?-\d+-r(\d+)", span.get("worker", ""))
    if pool is None:
        return f"{span['host']} · rank {span['rank']}"
    worker = f"rank {pool[3]}" if pool[2] is None else f"worker {pool[2]}"
    return f"pool {pool[1]} · {worker} · {span['host']}"


def _seconds(manifest: Manifest, spans: Iterable[Span]) -> float:
    """What a stage took; in a pool, where others have turns meanwhile, what it computed."""
    if not any(span.get("worker") for span in manifest.timing["spans"]):
        return float(manifest.timing["end"] - manifest.timing["start"])
    computed: dict[str, float] = {}
    for piece in pieces(spans):
        if piece.computes:
            computed[piece.lane] = computed.get(piece.lane, 0.0) + piece.seconds
    return max(computed.values(), default=0.0)
