"""A batch of which an outage of a tool took too much fails; what it took is counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlinf.config import RunConfig, validate
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, info_fields
from rlinf.errors import StageError, UserCodeError
from stages.context import DialogueFailure
from stages.dialogue_failures import DialogueFailures, check_failure_limits, mean_eval_score

Compose = Callable[..., dict[str, Any]]


class Metrics:
    """What a stage records."""

    def __init__(self) -> None:
        self.found = dict[str, tuple[float, float]]()
        self.dialogue_failures = list[DialogueFailure]()

    def log_metric(self, name: str, value: float, weight: float = 1.0) -> None:
        self.found[name] = (value, weight)


def dialogue(
    number: int, stop_reason: str, errors: int = 0, retries: int = 0, bug: int = 0
) -> Trajectory:
    info = {"stop_reason": stop_reason, "tool_errors": errors, "tool_retries": retries}
    info |= {"error": f"no {number}" if stop_reason == "error" else "", "bug": bug}
    return Trajectory(
        identity=RecordId(0, number), actions=np.zeros(2, np.int64), **info_fields(info)
    )


def configured(compose: Compose, *more: str) -> RunConfig:
    values = compose("task.name=calculator", *more)
    for key in ("digits", "operations", "least_significant_first", "rambling_fraction"):
        values["task"].pop(key, None)
    return validate(RunConfig, values)


def test_outages_are_metrics() -> None:
    counted, ctx = DialogueFailures(), Metrics()
    for record in (dialogue(0, "stop", 2, 1), dialogue(1, "error", 0, 2), dialogue(2, "length")):
        counted.add(record)
    counted.log_metrics(ctx)  # type: ignore[arg-type]
    assert ctx.found == {
        "tool_errors": (2, 0),
        "tool_retries": (3, 0),
        "failed_ratio": (pytest.approx(1 / 3), 3),
    }


def judge(counted: DialogueFailures, config: RunConfig) -> None:
    check_failure_limits(config, counted.metrics(), counted.failures)


@pytest.mark.parametrize(
    ("most", "failed", "fails"), [(0.5, 2, False), (0.5, 3, True), (0, 1, True), (1, 4, True)]
)
def test_too_many_of_them_fail_the_stage(
    compose: Compose, most: float, failed: int, fails: bool
) -> None:
    counted = DialogueFailures()
    config = configured(compose, f"task.max_failed_share={most}")
    for number in range(4):
        counted.add(dialogue(number, "error" if number < failed else "stop"))
    if not fails:
        judge(counted, config)
        return
    message = (
        rf"{failed} of 4 dialogues failed, .*max_failed_share={most:g}.*(?s:.)*no {failed - 1}"
    )
    with pytest.raises(StageError, match=message):
        judge(counted, config)


def test_an_error_of_the_users_ends_the_run_if_it_took_every_dialogue(compose: Compose) -> None:
    counted, config = DialogueFailures(), configured(compose)
    counted.add(dialogue(0, "error", bug=1))
    with pytest.raises(UserCodeError, match="no 0"):
        judge(counted, config)
    counted.add(dialogue(1, "error", bug=0))
    with pytest.raises(StageError, match="2 of 2 dialogues failed"):
        judge(counted, config)
    counted.add(dialogue(2, "stop"))
    counted.add(dialogue(3, "stop"))
    judge(counted, config)


def test_trajectories_of_other_tasks_are_not_counted() -> None:
    counted, ctx = DialogueFailures(), Metrics()
    counted.add(replace(dialogue(0, "length"), tool_errors=None, tool_retries=None))
    counted.log_metrics(ctx)  # type: ignore[arg-type]
    assert not ctx.found


def test_an_evaluation_without_a_score_fails(compose: Compose) -> None:
    """One process that has all of it, as several that have parts."""
    config = configured(compose)
    records = [dialogue(0, "stop"), dialogue(1, "error")]
    assert mean_eval_score(config, records, [0.5, math.nan]) == 0.5
    with pytest.raises(StageError, match="none of the held-out episodes could be scored"):
        mean_eval_score(config, records, [math.nan, math.nan])
