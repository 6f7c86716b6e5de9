"""What the report shows, read from a run's manifests and kept trajectories."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.generators import claimed
from pipeline.metrics import collect, iterations, manifest_of
from pipeline.report.idle import Piece, Span, pieces
from pipeline.run import Run
from rlinf.artifacts import Manifest, is_pruned
from rlinf.channels.file import FileReader
from stages.layout import PER_ITERATION, stage_folder


@dataclass
class ReportData:
    """Everything the charts and the page need."""

    run: Run
    warm_start: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    samples: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    lengths: dict[str, np.ndarray] = field(default_factory=dict)
    rewards: dict[str, np.ndarray] = field(default_factory=dict)

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

    @property
    def pooled(self) -> bool:
        """Whether stages ran in resident pools."""
        return any(span.lane.startswith("pool ") for span in self.spans)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The stages of every worker, cut where they paused."""
        return pieces(self.spans)

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Iterations and values of a metric, where it was recorded."""
        found = [(row["iteration"] + 1, row[name]) for row in self.rows if name in row]
        x, y = zip(*found, strict=True) if found else ((), ())
        return np.array(x, dtype=float), np.array(y, dtype=float)


def read(folder: Path) -> ReportData:
    """Collect what is there; missing, unfinished and pruned parts are left out."""
    run = Run.open(folder)
    data = ReportData(run, rows=collect(run.folder))
    warm = manifest_of(run.folder, "warm_start", 0)
    if warm is not None:
        data.warm_start = list(warm.extra.get("curve", []))
    instances = [("warm_start", 0)]
    instances += [(stage, i) for i in iterations(run.folder) for stage in PER_ITERATION]
    versions = sorted(int(p.name) for p in (run.folder / "evaluate").glob("[0-9]*"))
    instances += [("evaluate", version) for version in versions]
    generated = claimed(run.folder)
    for stage, iteration in instances:
        manifest = manifest_of(run.folder, stage, iteration)
        if manifest is None:
            continue
        if stage == "evaluate":
            data.scores.append((iteration, manifest.metrics["score"]))
        known = manifest.timing["spans"]
        if stage == "rollout":
            known = known + generated[iteration]
        spans = [
            Span(stage, s["name"], iteration, _lane(s), s["start"], s["end"], s.get("claim"))
            for s in known
        ]
        data.spans += spans
        data.stages.append(
            {
                "stage": stage,
                "iteration": iteration,
                "host": manifest.host,
                "job": manifest.job,
                "world": manifest.world,
                "seconds": _seconds(manifest, spans),
            }
        )
    _read_trajectories(data)
    return data


def _lane(span: dict[str, Any]) -> str:
    """Workers of a pool keep theirs from one lease to the next."""
    pool = re.fullmatch(r"pool-(\d+)(?:w(\d+))?-\d+-r\d+", span.get("worker", ""))
    if pool is None:
        return f"{span['host']} · rank {span['rank']}"
    who = f"rank {span['rank']}" if pool[2] is None else f"worker {pool[2]}"
    return f"pool {pool[1]} · {who} · {span['host']}"


def _seconds(manifest: Manifest, spans: list[Span]) -> float:
    """What a stage took; in a pool, where others have turns meanwhile, what it computed."""
    if not any(span.get("worker") for span in manifest.timing["spans"]):
        return float(manifest.timing["end"] - manifest.timing["start"])
    computed: dict[str, float] = {}
    for piece in pieces(spans):
        if piece.computes:
            computed[piece.lane] = computed.get(piece.lane, 0.0) + piece.seconds
    return max(computed.values(), default=0.0)


def _read_trajectories(data: ReportData) -> None:
    """Transcripts and distributions of the first and the last iteration still on disk."""
    kept = []
    for iteration in iterations(data.run.folder):
        folder = stage_folder(data.run.folder, "rollout", iteration)
        manifest = manifest_of(data.run.folder, "reward", iteration)
        if manifest is not None and not is_pruned(folder) and (folder / "manifest.json").exists():
            kept.append(iteration)
    chosen = dict.fromkeys([*kept[:1], *kept[-1:]])
    for iteration in chosen:
        records = _records(data.run.folder, "rollout", iteration, "trajectories")
        rewards = {
            r.identity.key: r for r in _records(data.run.folder, "reward", iteration, "rewards")
        }
        label = f"iteration {iteration + 1}"
        data.lengths[label] = np.array([len(record) for record in records])
        scores = [
            rewards[r.identity.key].info["score"] for r in records if r.identity.key in rewards
        ]
        data.rewards[label] = np.array(scores, dtype=float)
        texts = [
            {
                "prompt": record.info["prompt_text"],
                "text": record.info["text"],
                "answer": record.info["answer"],
                "stop": record.info["stop_reason"],
                "score": rewards[record.identity.key].info["score"],
            }
            for record in records
            if "text" in record.info and record.identity.key in rewards
        ]
        if texts:
            step = max(1, len(texts) // 8)
            data.samples.append((label, texts[::step][:8]))


def _records(run: Path, stage: str, iteration: int, channel: str) -> list[Any]:
    folder = stage_folder(run, stage, iteration)
    manifest = manifest_of(run, stage, iteration)
    if manifest is None or is_pruned(folder):
        return []
    return list(FileReader((folder / manifest.data).glob(f"{channel}-r*.h5")))
