"""``rlinf world-model``: from recorded episodes to a policy that was trained inside the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pipeline.commands.cli import app
from pipeline.commands.experiment import run_experiment
from pipeline.commands.export import export_weights
from pipeline.commands.results import RunResults
from pipeline.commands.world_model import check, recorded_episodes
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import DataError, InputError
from tests.rlinf.envs.moving_square import frame

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
TASK = [
    *("task.id=square", "task.images={corner: [40, 40]}"),
    *("task.observation=2", "task.action.size=1"),
]
SMALL = [
    *("iterations=1", "evaluate.every=0", "evaluate.samples=2", "evaluate.horizon=6"),
    *("model.hidden=[8]", "model.features_dim=8", "algorithm.minibatches=2", "rollout.horizon=6"),
]


def record(compose: Compose, *words: str) -> Path:
    """Record ten episodes of the square; returns the run."""
    values = compose(
        *TASK,
        *SMALL,
        *("task.simulator=tests.rlinf.envs.moving_square:make", "task.python=null"),
        *("task.num_processes=1", "run.name=recorded", "rollout.batch_size=10", *words),
        experiment="metaworld_pixels",
    )
    run_experiment(values)
    return Path(values["run"]["root"]) / "recorded"


def test_a_policy_is_trained_inside_a_model_of_recorded_episodes(
    compose: Compose, tmp_path: Path
) -> None:
    recorded, file = record(compose), tmp_path / "models" / "square.safetensors"
    done = CliRunner().invoke(app, ["world-model", str(recorded), str(file), "--steps", "3"])
    assert done.exit_code == 0, done.output
    assert re.search(r"^frame_rmse: \d+", done.output, re.MULTILINE)
    assert "step 3 of 3: frames " in done.output
    export_weights(recorded, tmp_path / "weak", None)
    values = compose(
        *TASK,
        *SMALL,
        *(f"task.kwargs.model={file}", f"model.path={tmp_path / 'weak'}", "task.num_processes=1"),
        *("run.name=inside", "rollout.batch_size=2", "rollout.group_size=2"),
        experiment="metaworld_world_model",
    )
    run_experiment(values)
    inside = RunResults.open(tmp_path / "inside")
    weak, first = RunResults.open(recorded).weights(1), inside.weights(0)
    assert all((weak[name] == first[name]).all() for name in weak), "it begins with model.path"
    # The samples of a group begin with the same recorded frame.
    frames = {t.group: t.images["corner"][0].tobytes() for t in inside.trajectories()}
    starts = {t.images["corner"][0].tobytes() for t in RunResults.open(recorded).trajectories()}
    assert set(frames.values()) <= starts
    assert all(t.images["corner"][0].tobytes() == frames[t.group] for t in inside.trajectories())
    # The policy is measured where it was not trained.
    checked = CliRunner().invoke(app, ["world-model", str(recorded), str(file), "--check"])
    assert checked.exit_code == 0, checked.output
    assert "false_positive_share: " in checked.output
    with pytest.raises(InputError, match=r"inside: its episodes are not those of a simulator"):
        check(tmp_path / "inside", file)
    with pytest.raises(DataError, match=r"weak is not a world model"):
        check(recorded, tmp_path / "weak")
    again = CliRunner().invoke(app, ["world-model", str(recorded), str(file)])
    assert isinstance(again.exception, InputError)
    assert "exists already" in str(again.exception)


def test_too_few_episodes_are_refused(compose: Compose, tmp_path: Path) -> None:
    recorded = record(compose, "rollout.batch_size=4")
    failed = CliRunner().invoke(app, ["world-model", str(recorded), str(tmp_path / "a")])
    assert isinstance(failed.exception, InputError)
    assert "has 4 episodes on disk, and 5 are needed" in str(failed.exception)
    assert not (tmp_path / "a").exists()


def test_trajectories_are_cut_where_episodes_ended_and_lost_ones_are_left_out() -> None:
    positions = np.arange(8.0)
    trajectory = Trajectory(
        identity=RecordId(0, 0),
        actions=np.full((8, 1), 2.0, np.float32),
        action_low=-np.ones(1),
        action_high=np.ones(1),
        images={"front": np.stack([frame(position) for position in positions])},
        success=np.array([0, 0, 1, 0, 0, 0, 1, 1], np.uint8),
        terminated=np.array([0, 0, 1, 0, 0, 0, 0, 0], np.uint8),
        truncated=np.array([0, 0, 0, 0, 1, 0, 0, 0], np.uint8),
        mask=np.array([1, 1, 1, 1, 0, 1, 1, 1], np.float32),
    )
    first, last = recorded_episodes([trajectory], "front")
    assert [len(first.frames), len(last.frames)] == [3, 3]
    assert first.labels().tolist() == [0, 0, 0], "a frame shows what the action before it did"
    assert last.labels().tolist() == [0, 0, 1]
    assert (last.frames[0] == frame(5)).all()
    assert (first.actions == 1).all(), "as they were executed"
