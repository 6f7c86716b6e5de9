"""The adapter of BEHAVIOR, against a recording of OmniGibson: no GPU of the kind is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.envs.subprocess_env import SimulatorError
from rlinf.errors import ConfigError
from tests.rlinf.envs.simulators.adapters import RECORDED, simulation


@pytest.fixture
def radio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(RECORDED))
    (tmp_path / "config.yaml").write_text("robots: [{type: R1Pro, name: robot_r1}]\n")
    return {
        "simulator": "behavior",
        "id": "turning_on_radio",
        "observation": 2,
        "action": {"kind": "box", "size": 2},
        "kwargs": {"data": str(tmp_path), "config": str(tmp_path / "config.yaml")},
    }


def test_spaces_are_those_of_the_robot(radio: dict[str, Any]) -> None:
    found = GymEnvironment.read_spec(GymConfig.model_validate(radio))
    bounds = {"low": [-1.0] * 2, "high": [1.0] * 2, "dtype": "float32"}
    assert found == {"observation": 2, "action": {"kind": "box", "size": 2, **bounds}}


def test_scenes_begin_one_by_one_and_end_with_the_goal_or_the_time(radio: dict[str, Any]) -> None:
    with simulation(radio, images={"zed": [4, 5]}) as process:
        assert process.reset([0, 1], [3, 4])["state"].tolist() == [[0, 0], [0, 0]]
        for _ in range(2):
            came, errors = process.step([0, 1], np.array([[0.5, 0.5], [1.0, 1.0]]))
        assert not errors
        assert came["seen.state"].tolist() == [[2, 2], [4, 2]]
        assert came["seen.zed"].shape == (2, 4, 5, 3), "without transparency"
        assert came["seen.zed"][:, 0, 0, 0].tolist() == [2, 4]
        assert came["terminated"].tolist() == came["success"].tolist() == [0, 1]
        assert process.reset([1], [5])["state"].tolist() == [[0, 0]]
        came, _ = process.step([0, 1], np.zeros((2, 2)))
        assert came["truncated"].tolist() == [1, 0]
        with pytest.raises(SimulatorError, match=r"set task\.kwargs\.num_envs to the most"):
            process.reset([0, 1, 2], [0, 0, 0])


def test_what_is_missing_is_told_by_its_key(radio: dict[str, Any], tmp_path: Path) -> None:
    for changed, message in (
        ({"id": "turning_on_radios"}, r"no activity 'turning_on_radios'; near it: turning_on"),
        ({"kwargs": {"config": str(tmp_path)}}, r"task\.kwargs\.data: is not set; give the folder"),
        ({"kwargs": {**radio["kwargs"], "scene": 1}}, r"task\.kwargs\.scene: there are data"),
    ):
        config = GymConfig.model_validate({**radio, **changed})
        with pytest.raises(ConfigError, match=message):
            GymEnvironment.task_size(config, None)
            GymEnvironment.read_spec(config)
