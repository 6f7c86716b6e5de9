"""``rlinf resume RUN key=value`` does what ``rlinf run`` does with the run's first command."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from pipeline.commands import driver_job
from pipeline.commands.cli import app
from pipeline.commands.experiment import apply_overrides, load_configuration, run_experiment
from pipeline.run import Run
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError, MismatchError
from stages.layout import CONFIG_FILE, METRICS_FILE, PLAN_FILE
from tests.pipeline.helpers import contents, no_report

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
SMALL = [
    "rollout.batch_size=2",
    "rollout.horizon=8",
    "algorithm.epochs=1",
    "algorithm.minibatches=1",
    "evaluate.every=1",
    "evaluate.samples=2",
    "evaluate.horizon=4",
    "checkpoint.keep_last=9",
    "log.trackers=[]",
]


def go(root: Path, *words: str) -> Path:
    from pipeline.commands.experiment import compose

    given = [f"++{word}" for word in [*SMALL, f"run.root={root}", "run.name=small", *words]]
    with no_report():
        run_experiment(compose(["experiment=cartpole_ppo", *given]))
    return root / "small"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go(tmp_path_factory.mktemp("made"), "iterations=2")


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A finished run of two iterations, in another place than where it was made."""
    return Path(shutil.copytree(made, tmp_path / "small"))


def resume(run: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["resume", str(run), *words])


def test_further_iterations_are_those_that_the_first_command_would_add(
    run: Path, made: Path, tmp_path: Path
) -> None:
    again = Path(shutil.copytree(made, tmp_path / "again" / "small"))
    done = resume(run, "iterations=4")
    assert done.exit_code == 0, done.output
    go(again.parent, "iterations=4")
    assert contents(run) == contents(again)
    assert (run / METRICS_FILE).read_bytes() == (again / METRICS_FILE).read_bytes()
    assert Run.open(run).config.iterations == 4
    assert Run.open(run).config.semantic_values() == Run.open(again).config.semantic_values()


def test_a_change_of_what_is_there_needs_a_choice(run: Path, tmp_path: Path) -> None:
    before = contents(run)
    frozen = (run / CONFIG_FILE).read_bytes()
    refused = resume(run, "optimizer.lr=0.5")
    assert isinstance(refused.exception, MismatchError)
    assert "optimizer.lr: 0.001 -> 0.5" in str(refused.exception)
    assert (contents(run), (run / CONFIG_FILE).read_bytes()) == (before, frozen)
    kept = resume(run, "optimizer.lr=0.5", "--keep")
    assert kept.exit_code == 0, kept.output
    assert contents(run) == before
    redone = resume(run, "optimizer.lr=0.25", "iterations=3", "--redo")
    assert redone.exit_code == 0, redone.output
    fresh = go(tmp_path / "fresh", "iterations=3", "optimizer.lr=0.25")
    assert contents(run) == contents(fresh), "the schedule spans three iterations too"


def test_a_span_that_was_given_stays(tmp_path: Path) -> None:
    words = ("iterations=1", "optimizer.lr_decay_iterations=7")
    run = go(tmp_path / "one", *words)
    done = resume(run, "iterations=2", "optimizer.lr=0.25", "--redo")
    assert done.exit_code == 0, done.output
    fresh = go(tmp_path / "two", "iterations=2", "optimizer.lr=0.25", words[1])
    assert contents(run) == contents(fresh)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run.name=other", "run.name=other: cannot change in a resumed run"),
        ("++run.root=/tmp", "cannot change in a resumed run"),
        ("experiment=cartpole_ppo", "start another run with rlinf run"),
        ("optimizer.lrr=1", "optimizer.lrr: unknown key"),
        ("iterations=many", "iterations: "),
        ("algorithm=gropo", "algorithm=gropo: no such algorithm"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(run: Path, word: str, message: str) -> None:
    before = (run / CONFIG_FILE).read_bytes()
    refused = resume(run, word)
    assert isinstance(refused.exception, ConfigError)
    assert message in str(refused.exception)
    assert (run / CONFIG_FILE).read_bytes() == before


def test_the_plan_of_the_run_stays_unless_another_is_named(run: Path) -> None:
    own = "# by hand\ndefaults: {cpus: 1, mem_mb: 1500}\n"
    (run / PLAN_FILE).write_text(own)
    assert resume(run, "evaluate.every=2").exit_code == 0
    assert (run / PLAN_FILE).read_text() == own
    assert Run.open(run).config.plan is None
    assert resume(run, "plan={defaults: {cpus: 1, mem_mb: 900}}").exit_code == 0
    assert yaml.safe_load((run / PLAN_FILE).read_text())["defaults"]["mem_mb"] == 900


def test_a_section_can_be_chosen_by_its_name(run: Path) -> None:
    values = apply_overrides(run, ["algorithm=async_ppo", "algorithm.epochs=2", "cluster=local"])
    assert (values["algorithm"]["name"], values["algorithm"]["epochs"]) == ("async_ppo", 2)
    assert "entropy_coeff" not in values["algorithm"]
    assert values["rollout"]["staleness"] == 1
    assert values["cluster"] == {"launcher": "local"}


def test_without_overrides_the_values_are_those_that_are_frozen(run: Path) -> None:
    values = yaml.safe_load((run / CONFIG_FILE).read_text())
    values["cluster"]["env"] = {"PLACE": "${HOME}/a", "WORD": "yes"}
    (run / CONFIG_FILE).write_text(yaml.safe_dump(values))
    found = apply_overrides(run, [])
    assert found.pop("run")["root"] == str(run.parent)
    values["optimizer"]["lr_decay_iterations"] = None  # nobody gave it
    assert found == {key: value for key, value in values.items() if key != "run"}


def test_planning_and_submitting_take_the_same_words(run: Path) -> None:
    words = [str(run), "iterations=9", "optimizer.lr=0.5"]
    expected = validate(RunConfig, apply_overrides(run, words[1:]))
    assert load_configuration(words) == expected
    found, _, chosen = driver_job._run_and_plan(words)
    assert found.folder == run
    assert (found.config.iterations, found.config.optimizer.lr) == (9, 0.5)
    assert not chosen
