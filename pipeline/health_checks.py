"""Health checks: warnings derived from the metrics of a run, such as no gradient or a failing
grader.

Each warning is one sentence (problem, since when, remedy). It is shown once in the driver's log,
and in ``rlinf status`` and the report.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.graph import StageNode
from pipeline.run import Run
from rlinf.artifacts import Manifest
from stages.layout import METRICS_FILE

PATIENCE = 3
"""Consecutive iterations without a gradient before a warning; a single small batch may have no
gradient."""
MetricsRow = Mapping[str, Any]
"""Metrics of one finished iteration, named ``stage/metric``; see :mod:`pipeline.metrics`."""

log = logging.getLogger("rlinf")


@dataclass(frozen=True)
class HealthWarning:
    """A warning about a run."""

    rule: str
    """Name of the rule; a run has at most one warning of each rule."""
    text: str


@dataclass(frozen=True)
class HealthRule:
    """A condition on metrics, and the text of its warning."""

    name: str
    condition: Callable[[MetricsRow], bool]
    description: str
    advice: str
    patience: int = PATIENCE
    """Number of consecutive iterations in which the condition must hold before a warning."""
    only_groups: bool = False
    """Whether the rule applies only to algorithms that compare the samples of a group."""


def _equals(name: str, value: float) -> Callable[[MetricsRow], bool]:
    return lambda row: row.get(name) == value


def _is_positive(name: str) -> Callable[[MetricsRow], bool]:
    return lambda row: row.get(name, 0) > 0


has_equal_groups = _equals("reward/group_std", 0)
NO_LEARNING_RULES = (
    HealthRule(
        "nothing_judged",
        lambda row: row.get("reward/used_fraction") == 0 and "reward/group_std" not in row,
        "no sample has a valid reward, so none is trained on",
        "see the log of the reward stage, which counts the causes, such as a judge that does not "
        "answer or samples that are too long",
    ),
    HealthRule(
        "nothing_kept",
        _equals("reward/used_fraction", 0),
        "no sample is trained on, because all samples of each group score the same",
        "choose easier or harder prompts, a larger rollout.group_size or SFT",
    ),
    HealthRule(
        "equal_groups",
        has_equal_groups,
        "all samples of each group get the same reward, so that advantages are zero",
        "choose easier or harder prompts, a larger rollout.group_size or SFT",
        only_groups=True,
    ),
    HealthRule(
        "zero_gradient",
        _equals("train/grad_norm", 0),
        "the gradient is zero, so that the weights do not change",
        "check the rewards and the loss mask of the samples",
    ),
    HealthRule(
        "skipped_steps",
        _equals("train/skipped_steps", 1),
        "every optimizer step was skipped because its gradient overflowed float16, so that the "
        "weights do not change",
        "the loss scale is halved each time, which may end this without a change; "
        "a lower trainer.initial_loss_scale ends it sooner, trainer.param_dtype=bfloat16 avoids it",
    ),
)
"""Ordered by cause: the first rule that applies to an iteration explains the later ones."""
GRADER_RULES = tuple(
    HealthRule(name, _is_positive(f"reward/{name}"), text, advice, patience=1)
    for name, text, advice in (
        (
            "fully_masked",
            "samples have a loss mask of 0 at every step, so nothing is learned from them",
            "check the masks that the task returns",
        ),
        (
            "timeouts",
            "answers exceeded the time limit of the grader and score 0",
            "check them in the report",
        ),
        (
            "parse_failures",
            "answers could not be parsed and score 0",
            "check them in the report, and the format that the prompt requires",
        ),
        (
            "unfinished_thoughts",
            "responses end inside a thought and score 0",
            "raise rollout.horizon if they are cut off",
        ),
        (
            "grader_deaths",
            "workers of the grader died and were replaced",
            "give the reward stage more memory, or check the answers that crashed them",
        ),
    )
)


def evaluate_rules(
    rows: Sequence[MetricsRow], *, needs_groups: bool, iterations: int
) -> list[HealthWarning]:
    """Return the warnings of a run from the metrics of its finished iterations.

    Args:
        rows: metrics in the order of iterations, each with its number (from 0) under ``iteration``.
        needs_groups: whether the algorithm compares the samples of a group.
        iterations: number of iterations of the run, which limits the patience of a short run.
    """
    warnings: list[HealthWarning] = []
    if not rows:
        return warnings
    rules = [rule for rule in NO_LEARNING_RULES if needs_groups or not rule.only_groups]
    causes = [next((rule.name for rule in rules if rule.condition(row)), "") for row in rows]
    for rule in NO_LEARNING_RULES:
        streak = _streak([cause == rule.name for cause in causes], min(rule.patience, iterations))
        warnings += _warnings_of_rule(rule, rows, streak)
    for rule in GRADER_RULES:
        streak = _streak([rule.condition(row) for row in rows], rule.patience)
        warnings += _warnings_of_rule(rule, rows, streak)
    return warnings


def _streak(values: Sequence[bool], patience: int) -> tuple[int, int] | None:
    """Return first and last index of the first streak of at least ``patience`` true values; None
    without such a streak."""
    start = 0
    for index, value in enumerate([*values, False]):
        if not value:
            if index - start >= patience:
                return start, index - 1
            start = index + 1
    return None


def _warnings_of_rule(
    rule: HealthRule, rows: Sequence[MetricsRow], streak: tuple[int, int] | None
) -> Iterator[HealthWarning]:
    if streak is None:
        return
    # Iterations are shown starting at 1.
    first, last = (int(rows[index]["iteration"]) + 1 for index in streak)
    if streak[1] == len(rows) - 1:
        when = f"since iteration {first}"
    else:
        when = f"in iteration {first}" if first == last else f"in iterations {first} to {last}"
    yield HealthWarning(rule.name, f"{when} {rule.description}: {rule.advice}")


def run_warnings(run: Run) -> list[str]:
    """Return the warnings of a run on disk, from ``metrics.jsonl``."""
    return [warning.text for warning in _evaluate_run(run, read_metrics_rows(run))]


def read_metrics_rows(run: Run) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl``, without lines that a crash left incomplete."""
    try:
        text = (run.folder / METRICS_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("iteration"), int):
            rows.append(row)
    return rows


def _evaluate_run(run: Run, rows: Sequence[MetricsRow]) -> list[HealthWarning]:
    # Only the rule ``equal_groups`` depends on the algorithm, whose import is slow.
    needs_groups = any(map(has_equal_groups, rows)) and _needs_groups(run)
    return evaluate_rules(rows, needs_groups=needs_groups, iterations=run.config.iterations)


def _needs_groups(run: Run) -> bool:
    from stages.factory import create_algorithm  # imports PyTorch

    return create_algorithm(run.config).needs_groups


class HealthCheckCallback:
    """Logs each warning when its rule first applies. Warnings of earlier drivers are not
    repeated."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rows: list[MetricsRow] = []
        self._logged_rules: set[str] = set()

    def on_resume(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = [*rows]
        self._logged_rules = {warning.rule for warning in _evaluate_run(self._run, self._rows)}

    def on_node_start(self, node: StageNode) -> None: ...

    def on_node_end(self, node: StageNode, manifest: Manifest) -> None: ...

    def on_iteration_end(self, iteration: int, metrics: dict[str, Any]) -> None:
        self._rows.append(metrics)
        for warning in _evaluate_run(self._run, self._rows):
            if warning.rule not in self._logged_rules:
                self._logged_rules.add(warning.rule)
                log.warning("%s", warning.text)
