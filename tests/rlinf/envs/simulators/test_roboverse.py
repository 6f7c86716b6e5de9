"""The adapter of RoboVerse, against a recording of MetaSim, which is on no package registry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.errors import ConfigError
from tests.rlinf.envs.simulators.adapters import RECORDED, simulation

SUM: dict[str, Any] = {
    "simulator": "roboverse",
    "id": "sum.base",
    "observation": 2,
    "action": {"kind": "box", "size": 1},
}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECORDED))


def test_spaces_are_those_of_the_task() -> None:
    found = GymEnvironment.read_spec(GymConfig.model_validate(SUM))
    bounds = {"low": [-1.0] * 1, "high": [1.0] * 1, "dtype": "float32"}
    assert found == {"observation": 2, "action": {"kind": "box", "size": 1, **bounds}}


@pytest.mark.parametrize(
    ("id", "last"), [("sum.base", [2, 2]), ("sum.learning", [1, 1])], ids=["base", "learning"]
)
def test_episodes_begin_and_end_one_by_one_whether_the_class_resets_or_not(
    id: str, last: list[float]
) -> None:
    with simulation(SUM, id=id) as process:
        assert process.reset([0, 1], [3, 4])["state"].tolist() == [[0, 0], [0, 0]]
        for _ in range(2):
            came, errors = process.step([0, 1], np.array([[0.5], [1.0]]))
        assert not errors
        assert came["seen.state"].tolist() == [[1, 2], last]
        assert came["terminated"].tolist() == came["success"].tolist() == [0, 1]
        assert came["reward"].tolist() == [1, 2]
        assert process.reset([1], [5])["state"].tolist() == [[0, 0]]
        came, _ = process.step([0, 1], np.full((2, 1), 0.25))
        assert came["seen.state"][1].tolist() == [0.25, 1]
        assert came["truncated"].tolist() == [1, 0]


def test_an_unknown_task_is_refused_with_the_one_near_it() -> None:
    with pytest.raises(ConfigError, match=r"no task 'sum\.bases'; near it: sum\.base"):
        GymEnvironment.read_spec(GymConfig.model_validate({**SUM, "id": "sum.bases"}))
