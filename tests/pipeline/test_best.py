"""The weights with the best held-out score: kept by default, said where they are, exported."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from pipeline.commands.cli import app
from pipeline.commands.experiment import run_experiment
from pipeline.commands.results import best_version, weight_versions
from pipeline.commands.status import read_status, status_view
from pipeline.console import create_console
from pipeline.report.data import read_report_data
from pipeline.report.page import report_html
from pipeline.resume import OnMismatch
from rlinf.artifacts import read_manifest
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, InputError

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.envs.gym import GymEnvironment

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
HELD_OUT = 3


class Peaked(GymEnvironment):
    """CartPole whose held-out scores rise and fall again, in the order of the evaluations."""

    scores: ClassVar[list[float]] = []

    def score(self, trajectories: Sequence[Trajectory], counts: Counter[str]) -> list[float]:
        found = super().score(trajectories, counts)
        return [self.scores.pop(0)] * HELD_OUT if len(found) == HELD_OUT else found


class Shuffled(GymEnvironment):
    """CartPole whose held-out score is a fixed but arbitrary function of the weights."""

    def score(self, trajectories: Sequence[Trajectory], counts: Counter[str]) -> list[float]:
        found = super().score(trajectories, counts)
        if len(found) != HELD_OUT:
            return found
        text = b"".join(trajectory.logprobs.tobytes() for trajectory in trajectories)
        return [hashlib.sha256(text).digest()[0] / 256] * HELD_OUT


POOL = "{stages: [rollout, reward, inference, train], devices: {local: 1}}"
EXECUTIONS = {
    "jobs": ["cluster=local"],
    "pools": ["cluster=local", f"++plan={{pools: [{POOL}]}}"],
}
SMALL = [
    "task.name=tests.pipeline.test_best:Peaked",
    "run.name=best",
    "iterations=6",
    "rollout.batch_size=2",
    "rollout.horizon=8",
    "algorithm.epochs=1",
    "algorithm.minibatches=1",
    "evaluate.every=1",
    f"evaluate.samples={HELD_OUT}",
    "evaluate.horizon=4",
    "checkpoint.keep_last=1",
]


def go(
    compose: Compose, scores: list[float], *words: str, choice: OnMismatch = OnMismatch.ERROR
) -> Path:
    Peaked.scores[:] = scores
    values = compose(*SMALL, *words, experiment="cartpole_ppo")
    run_experiment(values, choice)
    assert not Peaked.scores
    return Path(values["run"]["root"]) / "best"


def weights(folder: Path) -> bytes:
    (file,) = folder.glob("*.safetensors")
    return file.read_bytes()


def test_the_best_weights_stay_through_restarts_keep_and_redo(
    compose: Compose, tmp_path: Path
) -> None:
    run = go(compose, [0.0, 0.1, 0.5, 0.3, 0.2, 0.1, 0.1])
    assert best_version(run) == (2, 0.5)
    assert sorted(weight_versions(run)) == [0, 2, 5, 6]
    go(compose, [0.2, 0.2], "iterations=8")
    assert 2 in weight_versions(run)
    go(compose, [0.4], "iterations=9", "optimizer.lr=0.5", choice=OnMismatch.KEEP)
    assert 2 in weight_versions(run)
    # Version 0 does not depend on the rate, and stays as it was evaluated.
    scores = [0.1, 0.2, 0.3, 0.75, 0.2, 0.2, 0.2, 0.2, 0.2]
    go(compose, scores, "iterations=9", "optimizer.lr=0.9", choice=OnMismatch.RECOMPUTE)
    assert best_version(run) == (4, 0.75)
    assert sorted(weight_versions(run)) == [0, 4, 8, 9]


def test_the_best_weights_are_said_and_exported(compose: Compose, tmp_path: Path) -> None:
    run = go(compose, [0.0, 0.1, 0.5, 0.3, 0.2, 0.1, 0.1])
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out"), "--best"])
    assert "version 2 (after iteration 2, the best held-out score: 0.5)" in done.stdout
    manifest = read_manifest(run / "it/0001/sync")
    assert manifest is not None
    assert weights(tmp_path / "out") == weights(run / "it/0001/sync" / manifest.data / "weights")
    console = create_console()
    console.width = 400
    with console.capture() as shown:
        console.print(status_view(read_status(run)))
    assert f"0.5 after iteration 2: {run / 'it/0001/sync'}" in shown.get()
    text = report_html(read_report_data(run))
    assert "best held-out score (iteration 2)" in text
    assert "after iteration 2, held-out score 0.5: it/0001/sync of the run" in text
    both = CliRunner().invoke(app, ["export", str(run), "new", "--best", "--version", "6"])
    assert isinstance(both.exception, ConfigError)


def test_best_weights_that_were_removed_are_not_passed_off(compose: Compose) -> None:
    run = go(compose, [0.0, 0.1, 0.5, 0.3, 0.2, 0.1, 0.1], "checkpoint.keep_best=0")
    assert sorted(weight_versions(run)) == [0, 5, 6]
    with pytest.raises(InputError, match=r"version 2 .* removed it .*: 0, 5, 6"):
        best_version(run)
    assert "removed by the retention policy" in report_html(read_report_data(run))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_every_way_to_run_keeps_the_same_best_weights(
    compose: Compose, tmp_path: Path, execution: str
) -> None:
    found = {}
    for name, words in (("process", []), (execution, EXECUTIONS[execution])):
        own = ["task.name=tests.pipeline.test_best:Shuffled", f"run.name={name}", *words]
        run_experiment(compose(*SMALL, *own, "iterations=5", experiment="cartpole_ppo"))
        found[name] = best_version(tmp_path / name)
        assert found[name][0] in weight_versions(tmp_path / name)
        assert len(weight_versions(tmp_path / name)) <= 5
    assert found[execution] == found["process"]
