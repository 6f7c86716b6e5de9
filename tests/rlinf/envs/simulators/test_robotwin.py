"""The adapter of RoboTwin, against a recording of its interface: no GPU of the kind is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.errors import InputError
from tests.rlinf.envs.simulators.adapters import simulation

FOLDER = Path(__file__).with_name("recorded_robotwin")
HAMMER: dict[str, Any] = {
    "simulator": "robotwin",
    "id": "beat_block_hammer",
    "observation": 14,
    "action": {"kind": "box", "size": 14},
    "kwargs": {"folder": str(FOLDER), "config": str(FOLDER / "config.yml")},
}


def test_arms_go_where_they_are_sent_and_success_ends_an_episode() -> None:
    with simulation(HAMMER, images={"full_image": [4, 5]}) as process:
        seen = process.reset([0, 1], [6, 8])
        assert seen["state"][:, 0].tolist() == [1, 3]
        assert (seen["full_image"] == seen["state"][:, :1, None, None]).all()
        came, errors = process.step([0, 1], np.array([[2.0] * 14, [9.0] * 14]))
        assert not errors
        np.testing.assert_allclose(came["seen.state"][:, 3], [2, np.pi], rtol=1e-6)
        assert came["terminated"].tolist() == came["success"].tolist() == [0, 1]
        assert came["reward"].tolist() == [0, 1]
        assert process.reset([1], [4])["state"][:, 0].tolist() == [4]
        for _ in range(2):
            came, _ = process.step([0], np.full((1, 14), 1.0))
        assert came["truncated"].tolist() == [1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": "beat_blok_hammer"}, r"no task 'beat_blok_hammer'; near it: beat_block_hammer"),
        ({"kwargs": {"folder": str(FOLDER)}}, r"task\.kwargs\.config: is not set; give a task"),
        (
            {"kwargs": {**HAMMER["kwargs"], "folder": str(FOLDER / "envs")}},
            r"task\.kwargs\.folder: there is no \S+vector_env\.py; give a clone of",
        ),
        ({"images": {"left_wrist_image": [4, 5]}}, r"images\.left_wrist_image: no such camera"),
    ],
)
def test_what_is_missing_is_told_by_its_key(changed: dict[str, Any], message: str) -> None:
    config = GymConfig.model_validate({**HAMMER, **changed})
    with pytest.raises(InputError, match=message):
        GymEnvironment.task_size(config, None)
        GymEnvironment.read_spec(config)
        with simulation(HAMMER, **changed) as process:
            process.reset([0], [0])
