"""The adapter of Isaac Lab, against a recording of its interface: no GPU of the kind is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from pipeline.commands.doctor import check_simulator
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.envs.subprocess_env import SimulatorError
from rlinf.errors import ConfigError
from tests.rlinf.envs.simulators.adapters import RECORDED, simulation

SUM: dict[str, Any] = {
    "simulator": "isaaclab",
    "id": "Isaac-Sum-v0",
    "observation": 2,
    "action": {"kind": "box", "size": 2},
    "kwargs": {"device": "cpu"},
}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECORDED))


def test_spaces_are_those_of_one_environment() -> None:
    found = GymEnvironment.read_spec(GymConfig.model_validate(SUM))
    bounds = {"low": [None] * 2, "high": [None] * 2, "dtype": "float32"}
    assert found == {"observation": 2, "action": {"kind": "box", "size": 2, **bounds}}


def test_an_ended_episode_shows_its_last_state_and_the_next_starts_at_its_reset() -> None:
    with simulation(SUM) as process:
        assert process.reset([0, 1], [3, 4])["state"].tolist() == [[3, 0], [3, 0]]
        came, errors = process.step([0, 1], np.array([[1.0, 1.0], [4.0, 4.0]]))
        assert not errors
        assert came["reward"].tolist() == [5, 11]
        assert came["seen.state"].tolist() == [[5, 1], [3, 0]], "of the second, what went before"
        assert came["terminated"].tolist() == came["success"].tolist() == [0, 1]
        assert process.reset([1], [9])["state"].tolist() == [[-1, 0]]
        for _ in range(3):
            came, _ = process.step([0, 1], np.zeros((2, 2)))
        assert came["truncated"].tolist() == [1, 0]
        assert came["terminated"].tolist() == came["success"].tolist() == [0, 0]
        assert process.reset([0, 1], [7, 8])["state"].tolist() == [[7, 0], [7, 0]]


@pytest.mark.parametrize("task", ["Isaac-Sum-v0", "Isaac-Sum-Direct-v0"])
def test_where_one_episode_is_lost_the_others_go_on(task: str) -> None:
    with simulation(SUM, id=task) as process:
        process.reset([0, 1], [3, 4])
        came, errors = process.step([0, 1], np.array([[1.0, 1.0], [99.0, 0.0]]))
        assert list(errors) == [1]
        assert process.reset([1], [8])["state"].tolist() == [[3, 0]], "where the simulator begins"
        came, errors = process.step([0, 1], np.ones((2, 2)))
        assert not errors
        assert came["seen.state"].tolist() == [[7, 2], [5, 1]]
        assert not came["terminated"].any()
        assert not came["truncated"].any()


def test_vectors_among_apart_terms_are_the_state_and_pictures_go_by_their_names() -> None:
    images = {"table_cam": [4, 5]}
    with simulation(SUM, id="Isaac-Sum-Visuomotor-v0", images=images) as process:
        seen = process.reset([0, 1], [6, 6])
        assert seen["state"].tolist() == [[6, 0], [6, 0]]
        assert seen["table_cam"].shape == (2, 4, 5, 3)
        assert (seen["table_cam"] == 6).all()
        came, _ = process.step([1], np.ones((1, 2)))
        assert (came["seen.table_cam"] == 8).all()


def test_a_simulation_is_made_once_in_a_process_for_as_many_as_are_set() -> None:
    with simulation(SUM) as process:
        process.reset([0], [0])
        with pytest.raises(SimulatorError, match=r"set task\.kwargs\.num_envs to the most"):
            process.reset([0, 1], [0, 0])
    with simulation(SUM, kwargs={"device": "cpu", "num_envs": 3}) as process:
        process.reset([0], [0])
        assert process.reset([0, 1, 2], [1, 0, 0])["state"].shape == (3, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": "Isaac-Sun-v0"}, r"no task 'Isaac-Sun-v0'; near it: Isaac-Sum-v0"),
        ({"kwargs": {"envs": 3}}, r"task\.kwargs\.envs: there are num_envs, device"),
        (
            {"double_buffer": True},
            r"task\.double_buffer: true, but isaaclab steps all environments together; set it to",
        ),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    config = GymConfig.model_validate({**SUM, **changed})
    with pytest.raises(ConfigError, match=message):
        GymEnvironment.task_size(config, None)
        GymEnvironment.read_spec(config)


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (None, "nvidia-smi lists none; the simulator needs an NVIDIA RTX GPU"),
        (
            "NVIDIA A100-SXM4-80GB, 570.1",
            "A100-SXM4-80GB, 570.1 has no RT cores; the simulator needs",
        ),
        ("NVIDIA L40S, 570.1", "NVIDIA L40S, 570.1"),
    ],
)
def test_doctor_tells_the_gpu_and_how_packages_are_had(
    gpus: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpus is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {gpus}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {
        f.check: (f.level, f.detail) for f in check_simulator("isaaclab", ["task.python=null"])
    }
    level, detail = found["GPU"]
    assert message in detail
    assert level == ("ok" if "L40S" in message else "fail")
    level, detail = found["packages"]
    assert level == "fail"
    assert "isaaclab_tasks not found; install them there: pip install 'isaaclab[isaacsim" in detail
    assert found["episode"] == ("warn", "not started, because of the failures above")
