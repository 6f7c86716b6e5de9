"""What a world may have beside the methods of a Gymnasium environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.data.trajectory import Trajectory
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.simulators.requirements import SimulatorRequirements
from rlinf.envs.subprocess_env import SubprocessVectorEnv
from rlinf.errors import ConfigError, InputError
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from stages.rollout import local_rollout_iter

THREE: dict[str, Any] = {
    "simulator": "tests.rlinf.envs.numbered_worlds:make",
    "id": "any",
    "kwargs": {"starts": 3},
    "observation": 1,
    "action": {"kind": "discrete", "size": 2},
}


def played(task: dict[str, Any], split: str, folder: Path) -> list[Trajectory]:
    config = GymConfig.model_validate(task)
    small = MLPConfig(hidden=(4,))
    folder.mkdir(exist_ok=True)
    MLPPolicy.create(
        small, GymEnvironment.model_spec(config.model_copy(update={"images": {}})), 0, folder
    )
    engine = DirectEngine(DirectConfig(), MLPPolicy, small)
    engine.load(folder, 0)
    episodes = RolloutRequest(0, 0, split, range(1, 6), 6, 1, 4, 1.0)  # type: ignore[arg-type]
    with contextlib.closing(GymEnvironment(config, None)) as environment:
        return list(local_rollout_iter(environment, engine, episodes, "evaluate"))


@pytest.mark.parametrize("processes", [0, 2])
def test_evaluation_uses_numbered_initial_states_and_training_seeded_ones(
    processes: int, tmp_path: Path
) -> None:
    task = {**THREE, "num_processes": processes}
    held_out = played(task, "test", tmp_path / "test")
    assert [record.observations[0, 0] for record in held_out] == [1, 2, 0, 1, 2]
    trained = played(task, "train", tmp_path / "train")
    assert {float(seen) for record in trained for seen in record.observations[:, 0]} == {2}


def test_a_world_renders_its_own_cameras(tmp_path: Path) -> None:
    records = played({**THREE, "images": {"side": [2, 3]}}, "test", tmp_path)
    for record in records:
        pictures = record.images["side"]
        assert pictures.shape == (2, 2, 3, 3)
        begun = int(record.observations[0, 0])
        assert pictures[:, 0, 0, 0].tolist() == [10 * begun, 10 * begun + 1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"images": {"sidewards": [2, 3]}},
            r"task\.images\.sidewards: no such camera; there are side",
        ),
        ({"kwargs": {"starts": -2}}, r"^task\.kwargs\.starts: -2 is below 0"),
    ],
)
@pytest.mark.parametrize("processes", [{}, {"images": {"side": [2, 3]}}])
def test_what_is_refused_is_told_by_its_key(
    changed: dict[str, Any], processes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        GymEnvironment.read_spec(GymConfig.model_validate({**THREE, **processes, **changed}))


MANY: dict[str, Any] = {
    "simulator": "tests.rlinf.envs.batched_worlds:make",
    "id": "any",
    "observation": 2,
    "action": {"kind": "box", "size": 1},
    "num_processes": 1,
}


@contextlib.contextmanager
def batch(**changed: Any) -> Iterator[SubprocessVectorEnv]:
    config = GymConfig.model_validate({**MANY, **changed})
    with contextlib.closing(create_simulator_process(config)) as process:
        yield process


def test_environments_that_are_stepped_together_begin_and_end_one_by_one() -> None:
    with batch() as process:
        assert process.reset([0, 1, 2], [3, 4, 12])["state"].tolist() == [[3, 3], [4, 3], [5, 3]]
        came, errors = process.step([0, 2], np.array([[1.0], [9.0]]))
        assert not errors
        assert came["seen.state"][:, 0].tolist() == [4, 7], "clipped to the space"
        assert came["reward"].tolist() == [4, 7]
        assert process.reset([2], [6])["state"].tolist() == [[6, 3]]
        for _ in range(2):
            came, _ = process.step([0, 1, 2], np.full((3, 1), 2.0))
        assert came["seen.state"][:, 0].tolist() == [8, 8, 10], "the second rested for a step"
        assert came["success"].tolist() == came["terminated"].tolist() == [0, 0, 1]
        for _ in range(2):
            came, _ = process.step([0, 1], np.zeros((2, 1)))
        assert came["truncated"].tolist() == [1, 1]


def test_a_batch_grows_with_the_episodes_but_not_while_some_go_on() -> None:
    with batch() as process:
        process.reset([0, 1], [0, 0])
        assert process.reset([0], [1])["state"].tolist() == [[1, 2]]
        assert process.reset([0, 1, 2], [1, 2, 3])["state"][:, 1].tolist() == [3, 3, 3]
        with pytest.raises(InputError, match=r"task\.double_buffer: .* set it to false"):
            process.reset([3], [0])


def test_where_a_batch_raises_all_its_episodes_are_lost_and_the_next_begin() -> None:
    with batch(kwargs={"raises_at": 6.0}) as process:
        process.reset([0, 1], [5, 2])
        came, errors = process.step([0, 1], np.ones((2, 1)))
        assert list(errors) == [0, 1]
        assert "ZeroDivisionError: a sum that it cannot bear" in errors[0]
        assert came["terminated"].tolist() == [1, 1]
        assert process.reset([0, 1], [0, 1])["state"].tolist() == [[0, 2], [1, 2]]


def test_a_batch_collects_and_has_pictures(tmp_path: Path) -> None:
    records = played({**MANY, "images": {"top": [2, 3]}}, "test", tmp_path)
    assert [record.identity.sample for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        sums = record.observations[:, 0]
        np.testing.assert_array_equal(record.images["top"][:, 0, 0, 0], sums.astype(np.uint8))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"images": {"top": [2, 2]}}, r"task\.images\.top: its images are \[2, 3\]"),
        ({"images": {"side": [2, 3]}}, r"task\.images\.side: no such camera; there are top"),
    ],
)
def test_pictures_that_a_batch_does_not_make_are_refused(
    changed: dict[str, Any], message: str
) -> None:
    with batch(**changed) as process, pytest.raises(InputError, match=message):
        process.reset([0], [0])


def test_a_batch_has_a_process_of_its_own_whatever_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GymConfig.model_validate({**MANY, "num_processes": 0})
    GymEnvironment.verify_spec(config)
    # Where its module cannot be read beforehand, making it says so.
    monkeypatch.setattr("rlinf.envs.gym.get_requirements", lambda _: SimulatorRequirements())
    with pytest.raises(ConfigError, match=r"task\.num_processes: 0, but .* set 1"):
        GymEnvironment.verify_spec(config)
