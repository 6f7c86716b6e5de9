"""The results of an evaluation, and the comparison of two of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from pipeline.evaluation.robot_suite import ResultModel, SuiteResult, suite_result
from pipeline.evaluation.statistics import (
    Estimate,
    average_at_k,
    majority_at_k,
    paired_difference,
    pass_at_k,
)
from pipeline.metrics import stage_manifest
from pipeline.run import Run
from rlinf import __version__
from rlinf.artifacts import Manifest, read_manifest, verify_output, write_atomic
from rlinf.channels.record_files import RecordFileReader
from rlinf.config import SuiteSet, json_digest
from rlinf.data.trajectory import Trajectory
from rlinf.envs.suite import FINAL_ANSWER, SETS_KEY, set_class
from rlinf.errors import ConfigError, InputError
from rlinf.rewards.math_grader import CROSS_CHECK_DISAGREEMENTS, CROSS_CHECKS
from stages.flow import EVALUATE, flow_of
from stages.identity import FILE_PREFIX, CodeSnapshot
from stages.layout import VIDEOS_FOLDER, setup_stage_folder, stage_folder

RESULT_FILE = "evaluation.json"
"""The file with the results, in the run directory."""
FORMAT = 1
PROTOCOL_KEYS_LEFT_OUT = frozenset({"train", "train_sets", "test", "grader_workers", "timeout_s"})
"""Keys of a set's task that are no part of its protocol: places, and limits of the grader. The
contents of the test file, and of the file with few-shot examples, are part of it."""
CROSS_CHECK_METRICS = (CROSS_CHECKS, CROSS_CHECK_DISAGREEMENTS)
"""Counts that are no failures."""


class SetResult(ResultModel):
    """The results of one set of problems."""

    num_problems: int
    samples_per_problem: int
    average: Estimate
    """avg@k: the mean score of all samples."""
    pass_at_k: dict[int, Estimate]
    """Unbiased estimates for powers of two up to the number of samples, and for that number."""
    majority: Estimate | None
    """maj@k; None: one sample per problem, or the task has no normalised answers."""
    truncated_share: float
    """Share of samples that reached the maximum length. They score 0."""
    mean_tokens: float
    """Mean number of tokens of a response."""
    failures: dict[str, int]
    """Number of responses that the grader could not grade, by kind; they score 0."""
    protocol: dict[str, Any]
    """The settings of the set, without paths, and the digests of its files."""
    protocol_digest: str
    """Digest of ``protocol``; results are comparable only if it is equal."""
    prompts_digest: str
    """Digest of the token ids of all prompts. It differs between models with different tokenizers
    or chat templates."""
    scores: list[list[float]]
    """Score of each sample, by problem."""

    def score_array(self) -> np.ndarray:
        """Return the scores, float64 ``[N, k]``."""
        return np.array(self.scores, dtype=np.float64)


class EvaluationResult(ResultModel):
    """The results of one model on one or several sets of problems."""

    format: int = FORMAT
    rlinf_version: str
    model: str
    """The model folder."""
    model_digest: str
    """Digest of the weights and all other files of the model folder."""
    engine: str
    generation_s: float
    """Seconds of generation, the longest of all processes."""
    tokens_per_s: float
    """Tokens of all responses (or decisions of a robot policy) per second of generation."""
    sets: dict[str, SetResult] = {}
    """Results on sets of problems, by name."""
    suites: dict[str, SuiteResult] = {}
    """Results on suites of robot tasks, by name."""

    @property
    def all_results(self) -> dict[str, SetResult | SuiteResult]:
        """The results on sets of problems and on suites of robot tasks."""
        return {**self.sets, **self.suites}

    def save(self, folder: Path) -> Path:
        """Write the results into a run directory; returns the file."""
        path = folder / RESULT_FILE
        write_atomic(path, self.model_dump_json(indent=1) + "\n")
        return path

    @classmethod
    def load(cls, folder: Path) -> EvaluationResult:
        """Read the results in a run directory, or of a file.

        Raises:
            InputError: there are none, or the file is damaged.
        """
        path = folder / RESULT_FILE if folder.is_dir() else folder
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise InputError(
                f"{path}: no such file; name the run directory of an rlinf evaluate"
            ) from None
        except (ValidationError, OSError) as error:
            reason = " ".join(str(error).split())[:120]
            raise InputError(f"{path}: damaged ({reason}); run rlinf evaluate again") from None


class SetComparison(ResultModel):
    """The comparison of two models on one set."""

    left: Estimate
    right: Estimate
    difference: Estimate
    """Left minus right, paired by problem."""


def read_evaluation(run: Run, suite: str = "", protocol_episodes: int = 0) -> EvaluationResult:
    """Compute the results of a finished evaluation run.

    Args:
        suite: name of the suite of robot tasks; empty: the run has sets of problems.
        protocol_episodes: number of episodes of the suite's protocol.

    Raises:
        InputError: the evaluation is not finished, or the run has no sets of problems.
        ArtifactError: its samples are damaged on disk.
    """
    if not suite and not run.config.evaluate.sets:
        raise InputError(f"{run.folder}: its configuration has no {SETS_KEY} to report")
    manifest = stage_manifest(run.folder, EVALUATE, 0)
    if manifest is None:
        raise InputError(f"{run.folder}: the evaluation is not finished; run the command again")
    output = stage_folder(run.folder, EVALUATE, 0)
    verify_output(output, manifest, checksums=False)
    files = (output / manifest.data).glob("trajectories-r*.h5")
    trajectories = [Trajectory.from_record(record) for record in RecordFileReader(files)]
    snapshot = CodeSnapshot.current(run.config, EVALUATE)
    sets = {}
    for name, settings in run.config.evaluate.sets.items():
        own = [trajectory for trajectory in trajectories if trajectory.task == name]
        prefix = f"{FILE_PREFIX}{SETS_KEY}.{name}.task."
        digests = {key: snapshot.files.get(f"{prefix}{key}", "") for key in ("test", "train")}
        sets[name] = _set_result(name, settings, own, manifest, digests)
    suites = {}
    if suite:
        paths = sorted((output / manifest.data / VIDEOS_FOLDER).glob("*.mp4"))
        videos = [str(path.relative_to(run.folder)) for path in paths]
        suites[suite] = suite_result(run.config, trajectories, protocol_episodes, videos)
    generation_s = _longest_span(manifest, "generate")
    tokens = sum(len(trajectory) for trajectory in trajectories)
    return EvaluationResult(
        rlinf_version=__version__,
        model=str((run.config.model.model_extra or {}).get("path", "")),
        model_digest=_model_digest(run),
        engine=run.config.engine.name,
        generation_s=generation_s,
        tokens_per_s=tokens / generation_s if generation_s else 0.0,
        sets=sets,
        suites=suites,
    )


def _model_digest(run: Run) -> str:
    manifest = _initial_output(run)[1]
    return json_digest({name: entry.checksum for name, entry in sorted(manifest.files.items())})


def _initial_output(run: Run) -> tuple[Path, Manifest]:
    """Return data folder and manifest of the copy of the model."""
    folder = setup_stage_folder(run.folder, flow_of(run.config).initial_stage)
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(f"{run.folder}: the evaluation is not finished; run the command again")
    return folder / manifest.data, manifest


def _set_result(
    name: str,
    settings: SuiteSet,
    trajectories: Sequence[Trajectory],
    manifest: Manifest,
    file_digests: Mapping[str, str],
) -> SetResult:
    """Return the results of a set; ``file_digests`` are those of its files by their keys."""
    size = settings.samples_per_problem
    num_problems = len(trajectories) // size
    ordered = sorted(trajectories, key=lambda t: (t.extra["problem"], t.extra["attempt"]))
    scores = np.array([t.score for t in ordered], np.float64).reshape(num_problems, size)
    failures = {
        key.removeprefix(f"{name}/"): int(value)
        for key, value in manifest.metrics.items()
        if key.startswith(f"{name}/") and value and not key.endswith(CROSS_CHECK_METRICS)
    }
    if unscored := int(np.isnan(scores).sum()):
        failures["unscored"] = unscored
        scores = np.nan_to_num(scores)
    answers = [str(trajectory.extra[FINAL_ANSWER]) or None for trajectory in ordered]
    votes = [answers[row * size : (row + 1) * size] for row in range(num_problems)]
    has_votes = size > 1 and any(answer is not None for answer in answers)
    _, options = set_class(f"{SETS_KEY}.{name}", settings)
    protocol = {
        **settings.model_dump(mode="json", exclude={"task"}),
        "task": {
            "name": settings.task.name,
            **{
                key: value
                for key, value in options.model_dump(mode="json").items()
                if key not in PROTOCOL_KEYS_LEFT_OUT
            },
        },
        "num_problems": num_problems,
        "test_file": file_digests["test"],
    }
    if options.num_fewshot:
        protocol["train_file"] = file_digests["train"]  # has the examples
    prompts = hashlib.blake2b(digest_size=16)
    for trajectory in ordered[::size]:
        prompts.update(np.asarray(trajectory.require("prompt"), np.int64).tobytes())
    return SetResult(
        num_problems=num_problems,
        samples_per_problem=size,
        average=average_at_k(scores),
        pass_at_k={k: pass_at_k(scores, k) for k in _reported_ks(size)},
        majority=majority_at_k(scores, votes) if has_votes else None,
        truncated_share=float(np.mean([t.stop_reason == "length" for t in ordered])),
        mean_tokens=float(np.mean([len(t) for t in ordered])),
        failures=failures,
        protocol=protocol,
        protocol_digest=json_digest(protocol),
        prompts_digest=prompts.hexdigest(),
        scores=scores.tolist(),
    )


def _reported_ks(size: int) -> list[int]:
    """Return the powers of two up to the number of samples, and that number."""
    powers = [1 << i for i in range(size.bit_length())]
    return sorted({*powers, size}) if size > 1 else []


def _longest_span(manifest: Manifest, name: str) -> float:
    """Return the longest total time of a span among the processes of a stage, in seconds."""
    seconds: dict[int, float] = {}
    for span in manifest.timing["spans"]:
        if span["name"] == name:
            seconds[span["rank"]] = seconds.get(span["rank"], 0.0) + span["end"] - span["start"]
    return max(seconds.values(), default=0.0)


def compare_results(left: EvaluationResult, right: EvaluationResult) -> dict[str, SetComparison]:
    """Compare two models on the sets that both were evaluated on, paired by problem.

    Raises:
        ConfigError: they share no set, or their protocols for a set differ; the message names the
            keys.
    """
    all_left, all_right = left.all_results, right.all_results
    shared = [name for name in all_left if name in all_right]
    if not shared:
        raise ConfigError(
            f"no set in common: {', '.join(all_left)} and {', '.join(all_right)}; evaluate both "
            "models on the same sets"
        )
    comparisons = {}
    for name in shared:
        a, b = all_left[name], all_right[name]
        if a.protocol_digest != b.protocol_digest:
            keys = ", ".join(_differences(a.protocol, b.protocol))
            raise ConfigError(
                f"{name}: the two evaluations are not comparable, because their protocols differ "
                f"in {keys}; evaluate one of the models again with the settings of the other"
            )
        comparisons[name] = SetComparison(
            left=a.average,
            right=b.average,
            difference=paired_difference(a.score_array(), b.score_array()),
        )
    return comparisons


def _differences(left: dict[str, Any], right: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys whose values differ."""
    keys: list[str] = []
    for key in sorted(left.keys() | right.keys()):
        a, b = left.get(key), right.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            keys += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            keys.append(f"{prefix}{key}")
    return keys
