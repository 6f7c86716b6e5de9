"""robosuite, really stepped and rendered, where its environment is made (``make env
NAME=robosuite``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.subprocess_env import SubprocessVectorEnv
from rlinf.errors import ConfigError
from tests.environments import need_environment

LIFT: dict[str, Any] = {
    "simulator": "robosuite",
    "id": "Lift",
    "python": "robosuite",
    "observation": 60,
    "action": {"kind": "box", "size": 7},
    "images": {"agentview": [48, 64], "robot0_eye_in_hand": [32, 32]},
    "score_by_success": True,
}
TO_CUBE = {"state": ["gripper_to_cube_pos", "robot0_eef_pos"]}
OPENS, CLOSES = -1.0, 1.0


@pytest.fixture(scope="module", autouse=True)
def made() -> None:
    need_environment("robosuite")


@contextlib.contextmanager
def world(**changed: Any) -> Iterator[SubprocessVectorEnv]:
    config = GymConfig.model_validate({**LIFT, **changed})
    with contextlib.closing(create_simulator_process(config)) as process:
        yield process


@pytest.fixture(scope="module")
def process(made: None) -> Iterator[SubprocessVectorEnv]:
    with world() as found:
        yield found


def test_a_hand_that_grasps_and_lifts_succeeds_and_one_that_rests_does_not() -> None:
    """Success is the simulator's own, and both outcomes are seen."""
    with world(images={}, observation=6, kwargs=TO_CUBE) as process:
        seen = process.reset([0, 1], [5, 5])["state"]
        grasped = 0
        for _ in range(150):
            actions = np.zeros((2, 7))
            away = seen[0, :3]
            grasped = grasped + 1 if grasped or np.linalg.norm(away) < 0.012 else 0
            actions[0, :3] = np.clip(15 * away, -1, 1)
            actions[:, 6] = OPENS
            if grasped:
                actions[0, 6] = CLOSES
                actions[0, 2] = 1.0 if grasped > 10 else 0.0
            came, errors = process.step([0, 1], actions)
            seen = came["seen.state"]
            assert not errors
            if came["success"][0]:
                break
    assert came["success"].tolist() == [1, 0]
    assert came["reward"][0] == 1


def test_the_seed_alone_chooses_the_episode(process: SubprocessVectorEnv) -> None:
    """To the bit, also after other episodes."""

    def episode() -> list[dict[str, np.ndarray]]:
        random = np.random.default_rng(2)
        seen = [process.reset([0], [3])]
        return seen + [process.step([0], random.uniform(-1, 1, (1, 7)))[0] for _ in range(8)]

    first = episode()
    other = process.reset([0], [4])
    for _ in range(4):
        process.step([0], np.ones((1, 7)))
    again = episode()
    assert (first[0]["state"] != other["state"]).any()
    for moment, wanted in zip(again, first, strict=True):
        for name, column in wanted.items():
            np.testing.assert_array_equal(moment[name], column, err_msg=name)


def test_another_process_has_the_same_episode(process: SubprocessVectorEnv) -> None:
    """Also what is drawn when the model is created, such as the size of the cube."""
    with world() as other:
        first, second = (each.reset([0], [3]) for each in (process, other))
        for name, column in first.items():
            np.testing.assert_array_equal(second[name], column, err_msg=name)


def test_an_action_moves_the_hand_and_pictures_follow(process: SubprocessVectorEnv) -> None:
    before = process.reset([0], [0])
    for _ in range(6):
        came, errors = process.step([0], np.array([[0, 1.0, 0, 0, 0, 0, -1]]))
    assert not errors
    for camera, size in (("agentview", (48, 64)), ("robot0_eye_in_hand", (32, 32))):
        assert came[f"seen.{camera}"].shape == (1, *size, 3)
        assert (came[f"seen.{camera}"] != before[camera]).mean() > 0.01
        assert before[camera].std() > 20, "a picture of something"


def test_pictures_follow_a_model_that_a_reset_makes_anew(process: SubprocessVectorEnv) -> None:
    """As RoboCasa's kitchens do."""
    with world(kwargs={"hard_reset": True}) as other:
        first = [other.reset([0], [seed]) for seed in (1, 2, 1)]
    np.testing.assert_array_equal(first[0]["agentview"], first[2]["agentview"])
    assert (first[0]["agentview"] != first[1]["agentview"]).any()


def test_an_episode_is_cut_off_after_its_steps() -> None:
    with world(images={}, kwargs={"steps": 3}) as process:
        process.reset([0], [0])
        ends = [process.step([0], np.zeros((1, 7)))[0]["truncated"][0] for _ in range(3)]
    assert ends == [0, 0, 1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": "Lfit"}, "no environment 'Lfit'; near it: Lift"),
        ({"kwargs": {"robots": "Pandas"}}, "cannot make 'Lift'"),
        ({"kwargs": {"colour": 1}}, r"cannot make 'Lift'.*colour"),
        ({"kwargs": {"state": ["cube_position"]}}, r"task\.kwargs\.state: no observation 'cube_po"),
        (
            {"images": {"topview": [8, 8]}},
            r"task\.images\.topview: no such camera; there are .*agen",
        ),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymEnvironment.read_spec(GymConfig.model_validate({**LIFT, **changed}))


def test_spaces_are_as_the_configuration_says() -> None:
    GymEnvironment.verify_spec(GymConfig.model_validate(LIFT))
