"""Outages of tools in a batch of dialogues: how many there were, and how many are too many.

A dialogue that an outage ended trains nothing, so that what is learnt does not depend on it. Only
its absence does, which is why a batch that lost too many fails. Each process counts its own; how
many are too many is decided once, where the metrics of all of them are merged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from rlinf.config import RunConfig
from rlinf.data.trajectory import Trajectory
from rlinf.envs.dialogue import TOOL_METRICS, DialogueConfig, is_failed
from rlinf.errors import StageError, UserCodeError
from stages.context import DialogueFailure, MetricReduction, StageContext
from stages.factory import environment_class

FAILED_RATIO = "failed_ratio"
MergedMetric = tuple[float, float, MetricReduction]
"""Value and weight of a metric."""


class DialogueFailures:
    """Counts over the trajectories of a stage; of other tasks than dialogues there are none."""

    def __init__(self, config: RunConfig) -> None:
        _, options = environment_class(config)
        self._options = options if isinstance(options, DialogueConfig) else None
        self._samples = self._failed = self._bugs = 0
        self._error = ""
        self._counts = Counter[str]()

    def add(self, trajectory: Trajectory) -> None:
        """Count one trajectory."""
        if self._options is None:
            return
        self._samples += 1
        if is_failed(trajectory):
            self._failed += 1
            self._bugs += trajectory.require("failed_in_user_code")
            self._error = trajectory.require("error")
        for name in TOOL_METRICS:
            self._counts[name] += trajectory.require(name)

    def metrics(self) -> dict[str, MergedMetric]:
        """``tool_errors`` and ``tool_retries`` (sums), and ``failed_share``, the share lost."""
        if not self._samples:
            return {}
        counts: dict[str, MergedMetric] = {n: (self._counts[n], 0.0, "mean") for n in TOOL_METRICS}
        return {**counts, FAILED_RATIO: (self._failed / self._samples, self._samples, "mean")}

    @property
    def failures(self) -> list[DialogueFailure]:
        """Return the reasons of the losses; empty if there are none."""
        return [DialogueFailure(self._error, self._bugs == self._failed)] if self._failed else []

    def log_metrics(self, ctx: StageContext) -> None:
        """Record the metrics and why dialogues were lost; the commit judges those of all ranks."""
        for name, (value, weight, _) in self.metrics().items():
            ctx.log_metric(name, value, weight=weight)
        ctx.dialogue_failures = self.failures


def mean_eval_score(
    config: RunConfig, trajectories: Sequence[Trajectory], scores: Sequence[float]
) -> float:
    """The mean score of a held-out set that one process has as a whole.

    Raises:
        StageError, UserCodeError: as of :func:`check_failure_limits`.
    """
    outages, scored = DialogueFailures(config), [score for score in scores if not math.isnan(score)]
    for trajectory in trajectories:
        outages.add(trajectory)
    score = float(np.mean(scored)) if scored else math.nan
    metrics = {**outages.metrics(), "score": (score, float(len(scored)), "mean")}
    check_failure_limits(config, metrics, outages.failures)
    return score


def check_failure_limits(
    config: RunConfig, metrics: Mapping[str, MergedMetric], failures: Sequence[DialogueFailure]
) -> None:
    """See that a stage did not lose too much; the numbers are those of all its processes.

    Raises:
        UserCodeError: the user's own code ended every dialogue, and would again.
        StageError: more than ``task.max_failed_share`` of the dialogues were lost, or all, or no
            held-out episode could be scored.
    """
    _, options = environment_class(config)
    if failures and isinstance(options, DialogueConfig):
        share, samples, _ = metrics[FAILED_RATIO]
        failed, most = round(share * samples), options.max_failed_share
        if failed == samples and all(fault.is_user_bug for fault in failures):
            raise UserCodeError(failures[-1].error)
        if failed == samples or failed > most * samples:
            raise StageError(
                f"{failed} of {samples:.0f} dialogues failed, more than task.max_failed_share="
                f"{most:g} or all; the log names what each raised. Mend the tool, and let it raise "
                "rlinf.envs.dialogue.ToolInputError where the policy is at fault. One ended with\n"
                f"{failures[-1].error}"
            )
    score, scored, _ = metrics.get("score", (0.0, 0.0, "mean"))
    if math.isnan(score) and not scored:
        raise StageError(
            "none of the held-out episodes could be scored; the log says why each failed"
        )
