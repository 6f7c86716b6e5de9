"""A run that learns nothing says so, once, in words that name the iteration and what to do."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.commands.status import read_status, status_view
from pipeline.health_checks import HealthCheckCallback, evaluate_rules, run_warnings
from pipeline.run import Run
from pipeline.validate_config import validate_config
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError
from stages.layout import METRICS_FILE

Compose = Callable[..., dict[str, Any]]
WELL = {"reward/used_fraction": 1.0, "reward/group_std": 0.3, "train/grad_norm": 0.5}


def rows(*changes: dict[str, float]) -> list[dict[str, Any]]:
    return [{"iteration": i, **WELL, **change} for i, change in enumerate(changes)]


def kinds(*changes: dict[str, float], needs_groups: bool = True, iterations: int = 50) -> list[str]:
    found = evaluate_rules(rows(*changes), needs_groups=needs_groups, iterations=iterations)
    return [notice.rule for notice in found]


EQUAL = {"reward/group_std": 0.0, "train/grad_norm": 0.0}
FLAT = {"train/grad_norm": 0.0}
LEFT_OUT = {"reward/used_fraction": 0.0, "reward/group_std": 0.0}
SKIPPED = {"train/skipped_steps": 1.0}


def test_a_run_that_learns_has_no_notice() -> None:
    assert kinds({}, {}, EQUAL, {}, FLAT, {}, LEFT_OUT) == []
    assert kinds(SKIPPED, SKIPPED, *[{"train/skipped_steps": 0.5}] * 5) == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (EQUAL, "equal_groups"),
        (FLAT, "zero_gradient"),
        (LEFT_OUT, "nothing_kept"),
        (SKIPPED, "skipped_steps"),
    ],
)
def test_three_iterations_without_a_gradient_are_one_notice_of_their_cause(
    change: dict[str, float], kind: str
) -> None:
    assert kinds({}, *[change] * 3, {}, *[change] * 5) == [kind]


def test_what_nobody_could_judge_is_not_put_down_to_equal_scores() -> None:
    row = {"reward/used_fraction": 0.0, "train/grad_norm": 0.0, "reward/unanswered": 4.0}
    found = evaluate_rules(
        [{"iteration": i, **row} for i in range(3)], needs_groups=True, iterations=50
    )
    (notice,) = [
        notice for notice in found if "advantages" in notice.text or "valid reward" in notice.text
    ]
    assert notice.rule == "nothing_judged"


def test_a_short_run_needs_less_patience() -> None:
    assert kinds(EQUAL, EQUAL, iterations=2) == ["equal_groups"]


def test_equal_groups_mean_nothing_to_an_algorithm_without_groups() -> None:
    change = {"reward/group_std": 0.0}
    assert kinds(*[change] * 5, needs_groups=False) == []


def test_a_notice_says_which_iterations() -> None:
    found = evaluate_rules(rows({}, *[FLAT] * 3, {}), needs_groups=True, iterations=50)
    assert found[0].text.startswith("in iterations 2 to 4 the gradient is zero")
    found = evaluate_rules(rows({}, *[FLAT] * 3), needs_groups=True, iterations=50)
    assert found[0].text.startswith("since iteration 2 the gradient is zero")


@pytest.mark.parametrize(
    "name", ["timeouts", "parse_failures", "unfinished_thoughts", "grader_deaths"]
)
def test_what_the_grader_could_not_do_is_a_notice_at_once(name: str) -> None:
    assert kinds({}, {f"reward/{name}": 2.0}, {}) == [name]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_groups_of_one_are_refused_where_samples_are_compared(
    compose: Compose, algorithm: str
) -> None:
    values = compose("rollout.group_size=1", f"algorithm={algorithm}")
    message = r"needs several samples of each start \(rollout\.group_size above 1\)"
    with pytest.raises(ConfigError, match=message):
        validate_config(validate(RunConfig, values))


def test_a_run_tells_each_notice_once_and_shows_it(
    tiny_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "flat"
    shutil.copytree(tiny_run, folder)
    (folder / METRICS_FILE).unlink()
    run, flat = Run.open(folder), rows(*[FLAT] * 3)
    teller = HealthCheckCallback(run)
    with caplog.at_level(logging.WARNING, logger="rlinf"):
        for row in flat:
            teller.on_iteration_end(row["iteration"], row)
        (folder / METRICS_FILE).write_text(
            "".join(json.dumps(row) + "\n" for row in flat) + '{"iter'
        )
        later = HealthCheckCallback(run)
        later.on_resume(flat)
        later.on_iteration_end(3, {"iteration": 3, **WELL, **FLAT})
    assert len(caplog.records) == 1
    assert caplog.records[0].message == run_warnings(run)[0]
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(status_view(read_status(folder)))
    assert run_warnings(run)[0] in console.export_text()
