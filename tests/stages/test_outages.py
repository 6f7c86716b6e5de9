"""A batch of which an outage of a tool took too much fails; what it took is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlinf.config import RunConfig, validate
from rlinf.data.record import Identity, Record
from rlinf.errors import StageError
from stages.outages import Outages

Compose = Callable[..., dict[str, Any]]


class Metrics:
    """What a stage records."""

    def __init__(self) -> None:
        self.found = dict[str, tuple[float, float]]()

    def metric(self, name: str, value: float, weight: float = 1.0) -> None:
        self.found[name] = (value, weight)


def dialogue(number: int, stop_reason: str, errors: int = 0, retries: int = 0) -> Record:
    info = {"stop_reason": stop_reason, "tool_errors": errors, "tool_retries": retries}
    return Record(Identity(0, number), {"actions": np.zeros(2, np.int64)}, info=info)


def outages(compose: Compose, *more: str) -> Outages:
    values = compose("task.name=calculator", *more)
    for key in ("digits", "operations", "least_significant_first", "rambling"):
        values["task"].pop(key, None)
    return Outages(validate(RunConfig, values))


def test_outages_are_metrics(compose: Compose) -> None:
    counted, ctx = outages(compose), Metrics()
    for record in (dialogue(0, "stop", 2, 1), dialogue(1, "error", 0, 2), dialogue(2, "length")):
        counted.add(record)
    counted.record(ctx)  # type: ignore[arg-type]
    assert ctx.found == {
        "tool_errors": (2, 0),
        "tool_retries": (3, 0),
        "failed_share": (pytest.approx(1 / 3), 3),
    }


@pytest.mark.parametrize(
    ("most", "failed", "fails"), [(0.5, 2, False), (0.5, 3, True), (0, 1, True)]
)
def test_too_many_of_them_fail_the_stage(
    compose: Compose, most: float, failed: int, fails: bool
) -> None:
    counted = outages(compose, f"task.max_failed_share={most}")
    for number in range(4):
        counted.add(dialogue(number, "error" if number < failed else "stop"))
    if not fails:
        counted.record(Metrics())  # type: ignore[arg-type]
        return
    said = rf"{failed} of 4 dialogues failed, .*max_failed_share={most:g}"
    with pytest.raises(StageError, match=said):
        counted.record(Metrics())  # type: ignore[arg-type]


def test_other_tasks_have_none(compose: Compose) -> None:
    counted, ctx = Outages(validate(RunConfig, compose())), Metrics()
    counted.add(dialogue(0, "error"))
    counted.record(ctx)  # type: ignore[arg-type]
    assert not ctx.found
