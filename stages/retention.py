"""The retention policy: which outputs of a run stay on disk, and which weights are best."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rlinf.artifacts import MANIFEST, is_pruned, read_manifest
from rlinf.config import RunConfig
from rlinf.errors import ArtifactError
from stages.flow import EVALUATE, Flow, flow_of
from stages.layout import setup_stage_folder, stage_folder

SEARCH_WINDOW = 50
"""Number of iterations before the oldest retained one that are searched for outputs to remove."""


def is_checkpoint_saved(config: RunConfig, iteration: int) -> bool:
    """Return whether the trainer's checkpoint of an iteration (from 0) is written to disk.

    With LoRA, each version that is evaluated has one, because it may become the best version, and
    only checkpoints have the adapters alone.
    """
    version, settings = iteration + 1, config.checkpoint
    if version % settings.save_every == 0 or version == config.iterations:
        return True
    return settings.keep_best > 0 and _trains_adapters(config) and _is_evaluated(config, version)


def _trains_adapters(config: RunConfig) -> bool:
    return bool((config.trainer.model_extra or {}).get("lora"))


def _is_evaluated(config: RunConfig, version: int) -> bool:
    interval = config.evaluate.every
    return interval > 0 and version % interval == 0


class RetentionPolicy:
    """The retention policy of a run while an iteration is being published.

    Args:
        iteration: the iteration that is published, counted from 0.
    """

    def __init__(self, config: RunConfig, run: Path, iteration: int) -> None:
        self._config, self._settings = config, config.checkpoint
        self._run, self._iteration, self._flow = run, iteration, flow_of(config)
        stages = self._flow.stages
        # Stages whose output is records, and stages whose output is weights or other state.
        self._stream_stages = [name for name, stage in stages.items() if stage.output_stream]
        self._state_stages = [name for name in stages if name not in self._stream_stages]
        num_retained = self._flow.num_retained_outputs
        # Outputs are kept until later stages have read them. The two newest checkpoints are
        # always kept, because a damaged checkpoint is computed again from the previous one.
        num_newest = max(2, self._settings.keep_last, *map(num_retained, self._state_stages))
        num_reads = [num_retained(stage) for stage in self._stream_stages]
        self._num_record_iterations = max([self._settings.keep_trajectories, *num_reads])
        """Number of newest iterations whose records are kept."""
        self._oldest_retained = iteration + 1 - num_newest - config.rollout.staleness
        """Oldest iteration whose checkpoints and weights are kept in any case."""
        if self._settings.save_every > 1:
            # The updates since the last but one checkpoint may have to be computed again.
            self._num_record_iterations = max(
                self._num_record_iterations, 2 * self._settings.save_every + max(num_reads)
            )
        saved = (i for i in range(iteration, -1, -1) if is_checkpoint_saved(config, i))
        self._newest_checkpoints = set(itertools.islice(saved, 2))
        """The two newest iterations with a checkpoint on disk."""
        self._search_range = SEARCH_WINDOW + max(num_newest, self._num_record_iterations)
        self._scores = evaluation_scores(self._flow, run)
        self._best = best_versions(self._scores, self._settings.keep_best)
        self._stages_of_best = {self._flow.publish_stage}
        """Stages whose outputs stay for the versions with the best scores."""
        if _trains_adapters(config):
            # The published weights have the adapters merged; only checkpoints have them alone.
            self._stages_of_best.add(self._flow.train_stage)

    def should_keep(self, stage: str, iteration: int) -> bool:
        """Return whether the output of a stage of this or an earlier iteration stays on disk.

        Old weights stay until they are evaluated, and while their held-out score is among the best.
        """
        if stage in self._stream_stages:
            # Iteration 0 is kept, because the report compares its records with the last ones.
            return not 0 < iteration < self._iteration + 1 - self._num_record_iterations
        version = iteration + 1
        if stage == self._flow.train_stage and iteration in self._newest_checkpoints:
            return True
        if iteration >= self._oldest_retained or self._awaits_evaluation(version):
            return True
        if self._settings.keep_every and version % self._settings.keep_every == 0:
            return True
        return stage in self._stages_of_best and version in self._best

    def expired_outputs(self) -> list[Path]:
        """Return the output folders whose data must be removed now."""
        window = range(max(0, self._iteration - self._search_range), self._iteration)
        # Weights that are no longer among the best may be older than the window.
        scored = {version - 1 for version in self._scores if 0 < version <= self._iteration}
        return [
            stage_folder(self._run, stage, iteration)
            for iteration in sorted(scored.union(window))
            for stage in (*self._stream_stages, *self._state_stages)
            if not self.should_keep(stage, iteration)
        ]

    def _awaits_evaluation(self, version: int) -> bool:
        return _is_evaluated(self._config, version) and version not in self._scores


@dataclass(frozen=True)
class BestWeights:
    """The version of the weights with the highest held-out score, and this score."""

    version: int
    score: float
    folder: Path | None
    """The output folder with the weights; None: the retention policy has removed the data."""


def best_weights(config: RunConfig, run: Path) -> BestWeights | None:
    """Return the best weights of a run; None before the first evaluation."""
    flow = flow_of(config)
    scores = evaluation_scores(flow, run)
    for version in best_versions(scores, 1):
        folder, score = weights_folder(flow, run, version), scores[version]
        assert score is not None
        return BestWeights(version, score, None if is_pruned(folder) else folder)
    return None


def best_versions(scores: Mapping[int, float | None], count: int) -> list[int]:
    """Return the ``count`` versions with the highest scores, best first, then oldest first."""
    scored = [(-score, version) for version, score in scores.items() if score is not None]
    return [version for _, version in sorted(scored)[:count]]


def evaluation_scores(flow: Flow, run: Path) -> dict[int, float | None]:
    """Return the held-out score of each evaluated version, ascending by version.

    Evaluations of weights that were replaced later are ignored. The score is None if a
    user-defined evaluation has none.
    """
    scores = {}
    for folder in sorted((run / EVALUATE).glob("[0-9]*"), key=lambda path: int(path.name)):
        evaluation = _commit_of(folder)
        weights = _commit_of(weights_folder(flow, run, int(folder.name)))
        if evaluation is None or weights is None:
            continue
        evaluated_contents = [
            evaluation.inputs.get(name)
            for name, source in flow.evaluate.inputs.items()
            if source.stage == flow.publish_stage
        ]
        if all(content == weights.content for content in evaluated_contents):
            scores[int(folder.name)] = evaluation.score
    return scores


def weights_folder(flow: Flow, run: Path, version: int) -> Path:
    """Return the output folder with a version of the weights; 0: before the first iteration."""
    if not version:
        return setup_stage_folder(run, flow.initial_stage)
    return stage_folder(run, flow.publish_stage, version - 1)


@dataclass(frozen=True)
class _Commit:
    """The fields of a manifest that retention needs."""

    content: str
    inputs: Mapping[str, str]
    score: float | None


def _commit_of(out: Path) -> _Commit | None:
    try:
        file_state = (out / MANIFEST).stat()
        return _read_commit(out, (file_state.st_mtime_ns, file_state.st_ino, file_state.st_size))
    except FileNotFoundError:
        return None


@lru_cache(maxsize=1 << 15)
def _read_commit(out: Path, file_state: tuple[int, ...]) -> _Commit | None:
    """Read a manifest; cached, because every iteration reads those of all evaluations again."""
    try:
        manifest = read_manifest(out)
    except ArtifactError:
        return None
    if manifest is None:
        return None
    return _Commit(manifest.content, manifest.inputs, manifest.metrics.get("score"))
