"""Failed dialogues of a batch: their number, and the limit above which the stage fails.

The loss excludes a dialogue that ended with an error of a tool. If too many are excluded, the batch
is biased, so the stage fails. Each process counts its failed dialogues; the limit is checked where
the metrics of all processes are merged.
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
"""Metric: failed dialogues as a share of all dialogues."""
TOOL_METRICS = ("tool_errors", "tool_retries")
"""Metrics: tool calls that were rejected, and tool calls that were repeated."""
WeightedMetric = tuple[float, float, MetricReduction]
"""Value, weight and reduction of a metric, as in :attr:`StageContext.metrics`."""


class DialogueFailures:
    """Counts the failed dialogues of a stage; trajectories that are no dialogues are ignored."""

    def __init__(self) -> None:
        self._samples = self._failed = self._failed_in_user_code = 0
        self._last_error = ""
        self._counts = Counter[str]()

    def add(self, trajectory: Trajectory) -> None:
        if trajectory.tool_errors is None:
            return
        self._samples += 1
        if trajectory.is_failed:
            self._failed += 1
            self._failed_in_user_code += trajectory.require("failed_in_user_code")
            self._last_error = trajectory.require("error")
        for name in TOOL_METRICS:
            self._counts[name] += trajectory.require(name)

    def metrics(self) -> dict[str, WeightedMetric]:
        """Return ``tool_errors`` and ``tool_retries`` (sums), and ``failed_ratio``."""
        if not self._samples:
            return {}
        counts: dict[str, WeightedMetric] = {
            n: (self._counts[n], 0.0, "mean") for n in TOOL_METRICS
        }
        return {**counts, FAILED_RATIO: (self._failed / self._samples, self._samples, "mean")}

    @property
    def failures(self) -> list[DialogueFailure]:
        """The failures of this process: one entry; empty if no dialogue failed."""
        if not self._failed:
            return []
        is_user_bug = self._failed_in_user_code == self._failed
        return [DialogueFailure(self._last_error, is_user_bug)]

    def log_metrics(self, ctx: StageContext) -> None:
        """Record the metrics and failures of this rank; the commit checks those of all ranks."""
        for name, (value, weight, _) in self.metrics().items():
            ctx.log_metric(name, value, weight=weight)
        ctx.dialogue_failures = self.failures


def mean_eval_score(
    config: RunConfig, trajectories: Sequence[Trajectory], scores: Sequence[float]
) -> float:
    """Return the mean score of held-out trajectories, all of which this process has scored.

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
    config: RunConfig, metrics: Mapping[str, WeightedMetric], failures: Sequence[DialogueFailure]
) -> None:
    """Check that not too many dialogues of all processes of a stage have failed.

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
        failed_share, samples, _ = metrics[FAILED_RATIO]
        failed, max_share = round(failed_share * samples), options.max_failed_share
        if failed == samples and all(failure.is_user_bug for failure in failures):
            raise UserCodeError(failures[-1].error)
        if failed == samples or failed > max_share * samples:
            raise StageError(
                f"{failed} of {samples:.0f} dialogues failed, more than task.max_failed_share="
                f"{max_share:g} or all; the log has the error of each. Fix the tool; it must raise "
                "rlinf.envs.dialogue.ToolInputError for errors of the policy. The last error was\n"
                f"{failures[-1].error}"
            )
    score, scored, _ = metrics.get("score", (0.0, 0.0, "mean"))
    if math.isnan(score) and not scored:
        raise StageError(
            "none of the held-out episodes could be scored; the log says why each failed"
        )
