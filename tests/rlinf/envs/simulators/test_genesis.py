"""Genesis, really stepped on a CPU, where its environment is made (``make env NAME=genesis``)."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.simulators import genesis
from rlinf.envs.subprocess_env import SubprocessVectorEnv
from rlinf.errors import ConfigError
from rlinf.interpreters import resolve_interpreter
from tests.environments import need_environment

REACH: dict[str, Any] = {
    "simulator": "genesis",
    "id": "reach",
    "python": "genesis",
    "observation": 24,
    "action": {"kind": "box", "size": 7},
    "score_by_success": True,
    "timeout_s": 900,
    "kwargs": {"steps": 6},
}


@pytest.fixture(scope="module", autouse=True)
def made() -> None:
    need_environment("genesis")


@pytest.fixture(scope="module")
def process(made: None) -> Iterator[SubprocessVectorEnv]:
    config = GymConfig.model_validate(REACH)
    with contextlib.closing(create_simulator_process(config)) as found:
        yield found


def test_arms_begin_and_end_one_by_one(process: SubprocessVectorEnv) -> None:
    seen = process.reset([0, 1, 2], [3, 4, 3])["state"]
    np.testing.assert_array_equal(seen[0], seen[2])
    assert (seen[0, 21:] != seen[1, 21:]).all(), "the seed draws the point"
    moves = np.array([[1.0] * 7, [-1.0] * 7, [1.0] * 7])
    came, errors = process.step([0, 1, 2], moves)
    assert not errors
    for _ in range(2):
        came, _ = process.step([0, 1], moves[:2])
    assert came["seen.state"][0, 0] > 0.02
    assert came["seen.state"][1, 0] < -0.02
    again = process.reset([1], [4])["state"]
    np.testing.assert_array_equal(again[0], seen[1])
    ends = []
    for _ in range(3):
        came, _ = process.step([0, 1], moves[:2])
        ends.append(came["truncated"].tolist())
    assert ends == [[0, 0], [0, 0], [1, 0]]


def test_the_reward_is_how_much_nearer_the_hand_came(process: SubprocessVectorEnv) -> None:
    def away(state: np.ndarray) -> np.ndarray:
        return np.linalg.norm(state[:, 18:21] - state[:, 21:], axis=1)

    before = process.reset([0, 1], [1, 2])["state"]
    came, _ = process.step([0, 1], np.ones((2, 7)))
    wanted = 10 * (away(before) - away(came["seen.state"]))
    np.testing.assert_allclose(came["reward"], wanted, atol=1e-4)
    assert (came["success"] == 0).all()


def test_a_hand_at_its_point_ends_the_episode_with_success() -> None:
    assert genesis.__file__ is not None
    ran = subprocess.run(
        [
            resolve_interpreter("genesis", "task.python"),
            str(Path(__file__).with_name("genesis_solved.py")),
            genesis.__file__,
        ],
        stdout=subprocess.PIPE,
        check=True,
    )
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["ends"] == [[False, True], [False, False], [False, True]]
    assert result["reward"][1] > 0.5 > result["reward"][0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": "reech"}, "no task 'reech'; near it: reach"),
        ({"kwargs": {"step": 1}}, r"task\.kwargs\.step: there are backend and steps"),
        ({"kwargs": {"backend": "tpu"}}, r"task\.kwargs\.backend: 'tpu'; expected cpu or gpu"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymEnvironment.read_spec(GymConfig.model_validate({**REACH, **changed}))


def test_spaces_are_as_the_configuration_says() -> None:
    GymEnvironment.verify_spec(GymConfig.model_validate(REACH))
