"""ManiSkill, really stepped and rendered, where its environment and Mesa's Vulkan are (``make env
NAME=maniskill``, ``make vulkan``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.subprocess_env import SimulatorError, SubprocessVectorEnv
from rlinf.errors import ConfigError
from tests.environments import need_environment, need_vulkan

CUBE: dict[str, Any] = {
    "simulator": "maniskill",
    "id": "PickCube-v1",
    "python": "maniskill",
    "observation": 42,
    "action": {"kind": "box", "size": 8},
    "images": {"base_camera": [48, 64]},
    "score_by_success": True,
    "kwargs": {"sensor_configs": {"height": 48, "width": 64}},
}


@pytest.fixture(scope="module", autouse=True)
def made() -> Iterator[None]:
    need_environment("maniskill")
    with pytest.MonkeyPatch.context() as patch:
        need_vulkan(patch)
        yield


@pytest.fixture(scope="module")
def process(made: None) -> Iterator[SubprocessVectorEnv]:
    with contextlib.closing(create_simulator_process(GymConfig.model_validate(CUBE))) as found:
        yield found


def test_the_seed_alone_chooses_the_episode(process: SubprocessVectorEnv) -> None:
    """To the bit, also after other episodes."""

    def episode() -> list[dict[str, np.ndarray]]:
        random = np.random.default_rng(2)
        seen = [process.reset([0], [3])]
        return seen + [process.step([0], random.uniform(-1, 1, (1, 8)))[0] for _ in range(8)]

    first = episode()
    other = process.reset([0], [4])
    for _ in range(4):
        process.step([0], np.ones((1, 8)))
    again = episode()
    assert (first[0]["state"] != other["state"]).any()
    for moment, wanted in zip(again, first, strict=True):
        for name, column in wanted.items():
            np.testing.assert_array_equal(moment[name], column, err_msg=name)


def test_an_action_moves_the_arm_and_pictures_follow(process: SubprocessVectorEnv) -> None:
    before = process.reset([0], [0])
    for _ in range(10):
        came, errors = process.step([0], np.array([[1.0, 0, 0, 0, 0, 0, 0, 1]]))
    assert not errors
    assert came["seen.state"][0, 0] - before["state"][0, 0] > 0.2, "the first joint turns"
    assert came["seen.base_camera"].shape == (1, 48, 64, 3)
    assert (came["seen.base_camera"] != before["base_camera"]).mean() > 0.01
    assert before["base_camera"].std() > 20, "a picture of something"


def test_an_episode_is_cut_off_after_the_steps_of_the_task(process: SubprocessVectorEnv) -> None:
    process.reset([0], [0])
    ends = [process.step([0], np.zeros((1, 8)))[0] for _ in range(50)]
    assert [end["truncated"][0] for end in ends] == [0] * 49 + [1]
    assert not any(end["terminated"][0] or end["success"][0] for end in ends)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": "PickCubes-v1"}, "no task 'PickCubes-v1'; near it: PickCube-v1"),
        ({"images": {"top": [8, 8]}}, r"task\.images\.top: no such camera; there are base_camera"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymEnvironment.read_spec(GymConfig.model_validate({**CUBE, **changed}))


def test_environments_that_are_stepped_together_play_the_same_episodes(
    process: SubprocessVectorEnv,
) -> None:
    """One of them, for a CPU has no more: by the calls that many of them on a GPU take too."""
    kwargs = {**CUBE["kwargs"], "sim_backend": "physx_cpu", "render_backend": "cpu"}
    kwargs["max_episode_steps"] = 4
    task = {**CUBE, "simulator": "maniskill_gpu", "kwargs": kwargs}
    random = np.random.default_rng(2)
    actions = random.uniform(-1, 1, (3, 1, 8))
    with contextlib.closing(create_simulator_process(GymConfig.model_validate(task))) as together:
        for seed in (3, 4):
            wanted, seen = (p.reset([0], [seed]) for p in (process, together))
            for name, column in wanted.items():
                np.testing.assert_array_equal(seen[name], column, err_msg=name)
            for action in actions:
                wanted, came = (p.step([0], action)[0] for p in (process, together))
                for name in ("reward", "truncated", "terminated", "success", "seen.state"):
                    np.testing.assert_allclose(came[name], wanted[name], rtol=1e-6, err_msg=name)
        came, errors = together.step([0], np.zeros((1, 8)))
        assert not errors
        assert came["truncated"].tolist() == [1]


def test_physics_on_a_gpu_are_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    task = {**CUBE, "simulator": "maniskill_gpu"}
    with pytest.raises(ConfigError, match=r"sim_backend: physx_cuda needs .* task=maniskill"):
        GymEnvironment.read_spec(GymConfig.model_validate(task))


def test_without_a_vulkan_device_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VK_ICD_FILENAMES", "/none.json")
    with pytest.raises(ConfigError, match=r"no Vulkan device .* which make vulkan unpacks"):
        GymEnvironment.read_spec(GymConfig.model_validate(CUBE))


def test_pictures_of_another_size_are_refused() -> None:
    config = GymConfig.model_validate({**CUBE, "images": {"base_camera": [32, 32]}})
    with (
        contextlib.closing(create_simulator_process(config)) as process,
        pytest.raises(
            SimulatorError, match=r"task\.kwargs\.sensor_configs: \{height: 32, width: 32\}"
        ),
    ):
        process.reset([0], [0])


def test_spaces_are_as_the_configuration_says() -> None:
    GymEnvironment.verify_spec(GymConfig.model_validate(CUBE))


PLATE: dict[str, Any] = {
    "simulator": "maniskill",
    "id": "PutOnPlateInScene25VisionImage-v1",
    "python": "maniskill",
    "observation": 9,
    "action": {"kind": "box", "size": 8},
    "images": {"3rd_view_camera": [48, 64]},
    "instruction": True,
    "score_by_success": True,
    "kwargs": {
        "module": str(Path(__file__).with_name("put_on_plate_tasks.py")),
        "objects": "test",
        "obs_mode": "rgb+segmentation",
        "reward_mode": "none",
    },
}


def test_tasks_of_a_file_have_its_instructions_and_initial_states() -> None:
    config = GymConfig.model_validate(PLATE)
    assert GymEnvironment.read_spec(config)["observation"] == 9
    with contextlib.closing(create_simulator_process(config)) as process:
        first, again, other = (process.reset([0], [seed]) for seed in (3, 3, 4))
        columns, errors = process.step([0], np.zeros((1, 8)))
    assert not errors
    text = first["instruction"][0].tobytes().rstrip(b"\0").decode()
    assert text == "put the test cube on the plate"
    image = "3rd_view_camera"
    np.testing.assert_array_equal(first[image], again[image])
    assert (first[image] != other[image]).any()
    assert columns[f"seen.{image}"].shape == (1, 48, 64, 3)


def test_tasks_that_no_file_registers_are_named() -> None:
    kwargs = {name: value for name, value in PLATE["kwargs"].items() if name != "module"}
    message = r"kwargs\.module: does not register PutOnPlateInScene25VisionImage-v1, .*give a Py"
    with pytest.raises(ConfigError, match=message):
        GymEnvironment.read_spec(GymConfig.model_validate({**PLATE, "kwargs": kwargs}))
