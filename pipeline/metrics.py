"""Metrics of a run, read from its manifests.

Equal runs have equal ``metrics.jsonl``; hosts and times are in ``timings.jsonl``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlinf.artifacts import Manifest, read_manifest, write_atomic
from rlinf.config import RunConfig, json_digest
from rlinf.errors import ArtifactError
from stages.context import IDLE_SPANS
from stages.flow import Flow, flow_of, get_flow, on_policy
from stages.layout import CONFIG_FILE, METRICS_FILE, TIMINGS_FILE, stage_folder
from stages.runner import read_config_values


def list_iterations(run: Path) -> list[int]:
    """Return the iterations that have a folder, ascending."""
    folder = run / "it"
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def stage_manifest(run: Path, stage: str, iteration: int) -> Manifest | None:
    """Return the manifest of a stage of an iteration, or of an evaluation; None if absent or
    damaged."""
    return folder_manifest(stage_folder(run, stage, iteration))


def folder_manifest(out: Path) -> Manifest | None:
    """Return the manifest of an output folder; None if absent or damaged."""
    try:
        return read_manifest(out)
    except ArtifactError:
        return None


def run_flow(run: Path) -> Flow:
    """Return the flow of a run directory; without a configuration, ``on_policy``.

    Raises:
        ConfigError: the configuration of the run is damaged.
    """
    path = run / CONFIG_FILE
    return _read_flow(path, path.stat().st_mtime_ns) if path.exists() else on_policy


@lru_cache(maxsize=8)
def _read_flow(path: Path, modified_ns: int) -> Flow:
    """Read the flow in a configuration; ``modified_ns`` only distinguishes cache entries."""
    return get_flow(
        str(read_config_values(path).get("flow", RunConfig.model_fields["flow"].default))
    )


def busy_s(run: Path, stage: str, iteration: int) -> float:
    """Return the seconds that the busiest worker of a stage computed; 0 without a manifest."""
    manifest = stage_manifest(run, stage, iteration)
    seconds: dict[str, float] = defaultdict(float)
    for span in manifest.timing["spans"] if manifest is not None else ():
        # The span named after the stage includes the idle spans.
        sign = (span["name"] == stage) - (span["name"] in IDLE_SPANS)
        seconds[span.get("worker", "")] += sign * (span["end"] - span["start"])
    return max(seconds.values(), default=0.0)


def iteration_metrics(run: Path, iteration: int) -> dict[str, Any] | None:
    """Return the metrics of a finished iteration, named ``stage/metric``; None before it is
    finished."""
    return metrics_row(
        iteration, (stage_manifest(run, stage, iteration) for stage in run_flow(run).stages)
    )


def metrics_row(iteration: int, manifests: Iterable[Manifest | None]) -> dict[str, Any] | None:
    """Return the metrics in the manifests of an iteration; None if one manifest is missing."""
    values: dict[str, Any] = {"iteration": iteration}
    for manifest in manifests:
        if manifest is None:
            return None
        stage = manifest.stage
        values.update({f"{stage}/{name}": value for name, value in manifest.metrics.items()})
    return values


def uses_simulator(config: RunConfig) -> bool:
    """Return whether the task has a simulator, so that steps are actions and not tokens."""
    return "action" in (config.task.model_extra or {})


def step_unit(config: RunConfig) -> str:
    """Return the unit of ``rollout/steps``."""
    return "steps" if uses_simulator(config) else "tokens"


def headline_metrics(config: RunConfig, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an iteration that show whether the run learns, by their short names.

    The mean score of the samples is left out if it equals the reward. With simulators the score is
    the mean return of episodes, or the share of episodes that solved the task;
    ``completion_length`` is left out, because a sample may have several episodes.
    """
    task, simulator, flow = config.task.model_extra or {}, uses_simulator(config), flow_of(config)
    score = "success_once" if task.get("score_by_success") else "return" if simulator else "score"
    rollout, reward, train = flow.rollout_stage, flow.producer_of("rewards"), flow.train_stage
    names = {
        "reward": f"{reward}/mean",
        score: f"{reward}/score",
        "loss": f"{train}/loss",
        "kl": f"{train}/kl" if f"{train}/kl" in row else f"{train}/reward_kl_penalty",
        "approx_kl": f"{train}/approx_kl",
        "entropy": f"{train}/entropy",
        "completion_length": f"{rollout}/completion_length",
    }
    metrics = {name: row[key] for name, key in names.items() if key in row}
    if metrics.get(score) == metrics.get("reward"):
        metrics.pop(score, None)
    if simulator:
        metrics.pop("completion_length", None)
    return metrics


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return one row of metrics per finished iteration."""
    rows = (iteration_metrics(run, iteration) for iteration in list_iterations(run))
    return [values for values in rows if values is not None]


def rewrite_metrics(run: Path) -> list[dict[str, Any]]:
    """Rewrite ``metrics.jsonl`` and ``timings.jsonl`` from the manifests; returns the rows."""
    return MetricsLog(run).rewrite()


class MetricsLog:
    """Writes ``metrics.jsonl`` and ``timings.jsonl``: each finished iteration once, in order."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._digests: dict[int, str] = {}
        """Digest of the lines that were written to both files, by iteration."""

    def rewrite(self) -> list[dict[str, Any]]:
        """Rewrite both files from the manifests; returns the rows."""
        rows = read_metrics(self._run)
        timings = {i: self._timings(i) for i in list_iterations(self._run)}
        write_atomic(self._run / METRICS_FILE, "".join(_json_line(values) for values in rows))
        write_atomic(self._run / TIMINGS_FILE, "".join(timings.values()))
        self._digests = {r["iteration"]: json_digest([r, timings[r["iteration"]]]) for r in rows}
        return rows

    def append(self, iteration: int) -> dict[str, Any] | None:
        """Append an iteration; returns its row, or None if it is unfinished or already written.

        For a recomputed iteration, or one that is not the newest, both files are rewritten.
        """
        row = iteration_metrics(self._run, iteration)
        if row is None:
            return None
        timings = self._timings(iteration)
        digest = json_digest([row, timings])
        if self._digests.get(iteration) == digest:
            return None
        if self._digests and iteration <= max(self._digests):
            self.rewrite()
            return row
        self._digests[iteration] = digest
        for name, text in ((METRICS_FILE, _json_line(row)), (TIMINGS_FILE, timings)):
            with (self._run / name).open("a", encoding="utf-8") as file:
                file.write(text)
        return row

    def _timings(self, iteration: int) -> str:
        timings = (_timing(self._run, stage, iteration) for stage in run_flow(self._run).stages)
        return "".join(_json_line(timing) for timing in timings if timing is not None)


def _timing(run: Path, stage: str, iteration: int) -> dict[str, Any] | None:
    manifest = stage_manifest(run, stage, iteration)
    if manifest is None:
        return None
    return {
        "stage": stage,
        "iteration": iteration,
        "host": manifest.host,
        "job": manifest.job,
        "world": manifest.world,
        **manifest.timing,
    }


def _json_line(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True) + "\n"
