"""Failed dialogues of a batch: their number, and the limit above which the stage fails.

A dialogue that ended with an error of a tool is not trained on, so its content does not matter.
Too many missing dialogues would bias the batch, so the stage then fails. Each process counts its
failures; the limit is checked where the metrics of all processes are merged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from rlinf.config import RunConfig
from rlinf.data.trajectory import Trajectory
from rlinf.errors import StageError, UserCodeError
from stages.context import DialogueFailure, MetricReduction, StageContext
from stages.factory import environment_class

FAILED_RATIO = "failed_ratio"
TOOL_METRICS = ("tool_errors", "tool_retries")
"""Counts of each trajectory: rejected calls, and retried calls."""
MergedMetric = tuple[float, float, MetricReduction]
"""Value and weight of a metric."""


class DialogueFailures:
    """Counts the failed dialogues of a stage; trajectories of other tasks are ignored."""

    def __init__(self) -> None:
        self._samples = self._failed = self._bugs = 0
        self._error = ""
        self._counts = Counter[str]()

    def add(self, trajectory: Trajectory) -> None:
        """Count one trajectory."""
        if trajectory.tool_errors is None:
            return
        self._samples += 1
        if trajectory.is_failed:
            self._failed += 1
            self._bugs += trajectory.require("failed_in_user_code")
            self._error = trajectory.require("error")
        for name in TOOL_METRICS:
            self._counts[name] += trajectory.require(name)

    def metrics(self) -> dict[str, MergedMetric]:
        """Return ``tool_errors`` and ``tool_retries`` (sums), and ``failed_ratio``."""
        if not self._samples:
            return {}
        counts: dict[str, MergedMetric] = {n: (self._counts[n], 0.0, "mean") for n in TOOL_METRICS}
        return {**counts, FAILED_RATIO: (self._failed / self._samples, self._samples, "mean")}

    @property
    def failures(self) -> list[DialogueFailure]:
        """The failures of this process: one entry, or none."""
        return [DialogueFailure(self._error, self._bugs == self._failed)] if self._failed else []

    def log_metrics(self, ctx: StageContext) -> None:
        """Record the metrics and failures of this rank; the commit checks those of all ranks."""
        for name, (value, weight, _) in self.metrics().items():
            ctx.log_metric(name, value, weight=weight)
        ctx.dialogue_failures = self.failures


def mean_eval_score(
    config: RunConfig, trajectories: Sequence[Trajectory], scores: Sequence[float]
) -> float:
    """Return the mean score of a held-out set that one process has scored completely.

    Raises:
        StageError, UserCodeError: as for :func:`check_failure_limits`.
    """
    failures = DialogueFailures()
    valid_scores = [score for score in scores if not math.isnan(score)]
    for trajectory in trajectories:
        failures.add(trajectory)
    score = float(np.mean(valid_scores)) if valid_scores else math.nan
    metrics = {**failures.metrics(), "score": (score, float(len(valid_scores)), "mean")}
    check_failure_limits(config, metrics, failures.failures)
    return score


def check_failure_limits(
    config: RunConfig, metrics: Mapping[str, MergedMetric], failures: Sequence[DialogueFailure]
) -> None:
    """Check that not too many dialogues of a stage, over all its processes, have failed.

    Raises:
        UserCodeError: errors in the user's code ended every dialogue, so a retry would fail.
        StageError: more than ``task.max_failed_share`` of the dialogues failed, or all of them, or
            no held-out episode could be scored.
    """
    if failures:
        # Only tasks with dialogues need the module.
        from rlinf.envs.dialogue import DialogueConfig

        _, options = environment_class(config)
        assert isinstance(options, DialogueConfig)
        share, samples, _ = metrics[FAILED_RATIO]
        failed, max_ratio = round(share * samples), options.max_failed_share
        if failed == samples and all(failure.is_user_bug for failure in failures):
            raise UserCodeError(failures[-1].error)
        if failed == samples or failed > max_ratio * samples:
            raise StageError(
                f"{failed} of {samples:.0f} dialogues failed, more than task.max_failed_share="
                f"{max_ratio:g} or all; the log has the error of each. Fix the tool; it must raise "
                "rlinf.envs.dialogue.ToolInputError for errors of the policy. The last error was\n"
                f"{failures[-1].error}"
            )
    score, scored, _ = metrics.get("score", (0.0, 0.0, "mean"))
    if math.isnan(score) and not scored:
        raise StageError(
            "none of the held-out episodes could be scored; the log says why each failed"
        )
