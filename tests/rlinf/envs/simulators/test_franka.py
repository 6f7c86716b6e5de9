"""A Franka arm, really driven where its environment is made (``make env NAME=franka``): franky-sim
answers in the robot's own protocol, over the network of this machine."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.data.trajectory import Trajectory
from rlinf.data.transitions import to_transitions
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.subprocess_env import SubprocessVectorEnv
from rlinf.errors import ConfigError, InputError
from rlinf.interpreters import resolve_interpreter
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from stages.rollout import local_rollout_iter
from tests.environments import need_environment

HERE = Path(__file__).parent
BOX = [[0.46, -0.06, 0.42], [0.58, 0.06, 0.54]]
SPEED, RATE_HZ = 0.15, 10
UNIT_M = SPEED / np.sqrt(3) / RATE_HZ
"""Of an action, for a step."""
TOLERANCE_M, STILL = 0.002, 0.003
ADDRESSES = itertools.count(2)


class Arm:
    """franky-sim in a process; see :mod:`tests.rlinf.envs.simulators.franka_server`."""

    def __init__(self) -> None:
        # The whole of 127/8 is this machine; processes of one test run have addresses of their own.
        pid = os.getpid()
        self.address = f"127.{16 + pid % 128}.{pid // 128 % 250}.{next(ADDRESSES)}"
        self.start()

    def start(self) -> None:
        python = resolve_interpreter("franka", "this test")
        self.process = subprocess.Popen(
            [python, str(HERE / "franka_server.py"), self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.tell("speed 0")

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()

    def measure(self) -> dict[str, Any]:
        self.tell("measure")
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def settle(self) -> None:
        """Wait until it rests, whatever it was doing, and measure from then on."""
        latest = time.monotonic() + 20
        while self.measure()["speed"] > STILL and time.monotonic() < latest:
            time.sleep(0.1)

    @property
    def rests(self) -> bool:
        """Whether it did so since it was last measured, a moment at least."""
        time.sleep(0.2)
        return bool(self.measure()["speed"] <= STILL)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def arm() -> Iterator[Arm]:
    need_environment("franka")
    found = Arm()
    yield found
    found.kill()


def task(arm: Arm, **kwargs: Any) -> GymConfig:
    own = {
        "host": arm.address,
        "box": BOX,
        "speed": SPEED,
        "rate_hz": RATE_HZ,
        "steps": 40,
        "realtime": False,
    }
    return GymConfig.model_validate(
        {
            "simulator": "franka",
            "id": "reach",
            "python": "franka",
            "observation": 12,
            "action": {"kind": "box", "size": 3},
            "score_by_success": True,
            "kwargs": {**own, **kwargs},
        }
    )


@contextlib.contextmanager
def driven(arm: Arm, **kwargs: Any) -> Iterator[SubprocessVectorEnv]:
    with contextlib.closing(create_simulator_process(task(arm, **kwargs))) as process:
        yield process


def towards(state: np.ndarray) -> np.ndarray:
    """A proportional controller: from where the hand was sent to the point, in units of actions."""
    left = (state[:, :3] - state[:, 3:6]) / 10
    return np.clip(left / UNIT_M, -1, 1)


def inside(measured: dict[str, Any]) -> bool:
    """Whether the hand was in its box, and no faster than allowed."""
    low, high = np.array(BOX)
    return bool(
        (np.array(measured["least"]) > low - TOLERANCE_M).all()
        and (np.array(measured["greatest"]) < high + TOLERANCE_M).all()
        and measured["speed"] < SPEED * 1.03
    )


def test_a_proportional_controller_reaches_the_point(arm: Arm) -> None:
    """The reward is how much nearer the hand came, and 1 for having arrived."""
    with driven(arm) as process:
        for seed in (1, 2):
            seen = process.reset([0], [seed])["state"]
            away = np.linalg.norm(seen[0, :3])
            total = 0.0
            for _ in range(40):
                came, errors = process.step([0], towards(seen))
                assert not errors
                seen = came["seen.state"]
                total += came["reward"][0]
                if came["success"][0]:
                    break
            assert came["success"].tolist() == came["terminated"].tolist() == [1]
            assert np.linalg.norm(seen[0, :3]) <= 0.2
            assert total == pytest.approx(1 + away - np.linalg.norm(seen[0, :3]), abs=1e-4)
            assert came["intervened"].tolist() == [0]
    assert inside(arm.measure())


def test_an_arm_that_is_at_its_point_is_cut_off_by_the_limit_of_time_too(arm: Arm) -> None:
    """With task.ignore_terminations that alone ends its episodes."""
    with driven(arm, reached_m=1.0, steps=2) as process:
        process.reset([0], [1])
        cut = [process.step([0], np.zeros((1, 3)))[0]["truncated"][0] for _ in range(2)]
    assert cut == [0, 1]


def test_the_hand_stays_in_its_box_and_below_its_speed_whatever_is_asked(arm: Arm) -> None:
    random = np.random.default_rng(0)
    with driven(arm) as process:
        process.reset([0], [0])
        arm.measure()
        for k in range(24):
            # Into a corner, and out of it again, and anywhere.
            action = np.ones(3) if k < 10 else random.choice([-100.0, 100.0], 3)
            came, errors = process.step([0], action[None])
            assert not errors
            if k == 9:
                np.testing.assert_allclose(came["seen.state"][0, 9:], 0.97, atol=0.05)
                np.testing.assert_array_equal(came["performed"], [[0, 0, 0]])
    assert inside(arm.measure())


def test_steps_take_their_time_by_the_arms_clock_and_late_ones_are_said(arm: Arm) -> None:
    with driven(arm) as process:
        process.reset([0], [0])
        arm.measure()
        late = []
        for k in range(12):
            if k == 8:
                # The policy thinks, and the arm, which came to rest, counts on.
                arm.tell("speed 1")
                time.sleep(1.5)
                paused = arm.measure()["ms"]
                arm.tell("speed 0")
            way = np.array([[0.3, -0.3, 0.3 if k % 2 else -0.3]])
            came, _ = process.step([0], way)
            late.append(came["late"][0])
        took = arm.measure()["ms"]
    assert late[8] == 1
    assert sum(late[:8] + late[9:]) <= 2, "beside what a busy machine keeps from it"
    assert paused >= 800
    assert 390 <= took <= 1000, "four steps of 100 ms"


def test_nothing_moves_before_the_first_reset_nor_after_the_stop_button(
    arm: Arm, tmp_path: Path
) -> None:
    file = tmp_path / "pressed"
    reader = f"{HERE / 'franka_readers.py'}:Button"
    with driven(arm, reader=reader, reader_args={"file": str(file)}) as process:
        arm.settle()
        process.spaces()
        assert arm.rests
        process.reset([0], [0])
        for _ in range(3):
            assert not process.step([0], np.ones((1, 3)))[1]
        file.touch()
        came, errors = process.step([0], np.ones((1, 3)))
        assert "kwargs.reader: its stop button is pressed" in errors[0]
        assert came["terminated"].tolist() == [1]
        with pytest.raises(InputError, match=r"cannot begin: .*its stop button is pressed; find"):
            process.reset([0], [0])
        arm.settle()
        assert arm.rests
        file.unlink()
        assert np.isfinite(process.reset([0], [0])["state"]).all()


@pytest.mark.parametrize("known_s", [0.0, 0.3])
def test_an_arm_that_stopped_recovers_once_in_an_episode(arm: Arm, known_s: float) -> None:
    """Whether the end of its motion or its state is the first to tell of it."""
    with driven(arm) as process:
        process.reset([0], [0])
        process.step([0], np.ones((1, 3)))
        arm.tell("reflex")
        time.sleep(known_s)
        came, errors = process.step([0], np.ones((1, 3)))
        assert not errors
        seen = came["seen.state"]
        came, errors = process.step([0], np.array([[-1.0, 0, 0]]))
        assert not errors
        assert came["seen.state"][0, 0] > seen[0, 0], "it moves again, away from the point"
        arm.tell("reflex")
        time.sleep(0.2)
        came, errors = process.step([0], np.ones((1, 3)))
        assert "the arm has stopped by itself" in errors[0]
        assert came["terminated"].tolist() == [1]
        process.reset([0], [0])
        assert not process.step([0], np.ones((1, 3)))[1]


def test_the_arms_own_stop_button_ends_the_episode_until_it_is_released(arm: Arm) -> None:
    with driven(arm) as process:
        process.reset([0], [0])
        process.step([0], np.ones((1, 3)))
        arm.tell("press")
        time.sleep(0.2)
        _, errors = process.step([0], np.ones((1, 3)))
        assert "in mode UserStopped; its stop button is pressed" in errors[0]
        with pytest.raises(InputError, match="mode UserStopped"):
            process.reset([0], [0])
        arm.tell("release")
        process.reset([0], [0])
        assert not process.step([0], np.ones((1, 3)))[1]


def test_a_lost_connection_ends_the_episode_and_the_next_one_has_another(arm: Arm) -> None:
    mine = Arm()
    try:
        with driven(mine) as process:
            process.reset([0], [0])
            process.step([0], np.ones((1, 3)))
            mine.process.send_signal(signal.SIGSTOP)
            _, errors = process.step([0], np.ones((1, 3)))
            assert f"the connection to {mine.address} is lost" in errors[0]
            mine.kill()
            mine.start()
            seen = process.reset([0], [1])["state"]
            _, errors = process.step([0], towards(seen))
            assert not errors
    finally:
        mine.kill()


def test_a_reader_that_answers_nonsense_loses_the_episode_and_is_closed(
    arm: Arm, tmp_path: Path
) -> None:
    """And the end of the process closes the world, which stops the arm, and the reader."""
    file = tmp_path / "closed"
    reader = f"{HERE / 'franka_readers.py'}:Broken"
    with driven(arm, reader=reader, reader_args={"file": str(file)}) as process:
        process.reset([0], [0])
        assert not process.step([0], np.ones((1, 3)))[1]
        came, errors = process.step([0], np.ones((1, 3)))
        assert "kwargs.reader: [nan, nan, nan] is no action" in errors[0]
        assert np.isfinite(came["performed"]).all()
        assert file.read_text() == "closed\n"
        process.reset([0], [0])
        assert not process.step([0], np.ones((1, 3)))[1]
    assert file.read_text() == "closed\n" * 2
    arm.settle()
    assert arm.rests


def test_an_arm_outside_of_its_box_is_not_moved(arm: Arm) -> None:
    with driven(arm, box=[[0.3, -0.3, 0.2], [0.4, -0.2, 0.3]]) as process:
        arm.settle()
        with pytest.raises(InputError, match=r"outside of kwargs\.box; put it inside by hand"):
            process.reset([0], [0])
        assert arm.rests


def test_a_person_takes_over_and_it_is_learned_from(arm: Arm, tmp_path: Path) -> None:
    """Samples are collected one after the other, and the arm is free after them."""
    reader = f"{HERE / 'franka_readers.py'}:Takes"
    config = task(arm, reader=reader, reader_args={"steps": [1, 2], "action": [0.5, 0, -0.5]})
    small = MLPConfig(hidden=(8,))
    MLPPolicy.create(small, GymEnvironment.model_spec(config), 0, tmp_path)
    engine = DirectEngine(DirectConfig(), MLPPolicy, small)
    engine.load(tmp_path, 0)
    with contextlib.closing(GymEnvironment(config, None)) as environment:
        episodes = RolloutRequest(0, 0, "train", range(2), 2, 1, 4, 1.0)
        records: list[Trajectory] = list(
            local_rollout_iter(environment, engine, episodes, "rollout")
        )
        assert environment.pids == []
    np.testing.assert_array_equal(records[0].intervened, [0, 1, 1, 0])
    np.testing.assert_array_equal(records[1].intervened, [1, 1, 0, 1])
    for record in records:
        acted = record.intervened != 0
        np.testing.assert_allclose(
            record.executed_actions[acted], np.tile([0.5, 0, -0.5], (acted.sum(), 1)), atol=1e-6
        )
        rows = to_transitions(record, record.rewards)
        np.testing.assert_array_equal(rows["actions"][acted], record.executed_actions[acted])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"box": None}, r"task\.kwargs\.box: is not set; give the corners"),
        ({"host": ""}, r"task\.kwargs\.host: is not set"),
        ({"box": [[0, 0, 1], [1, 1, 0]]}, r"task\.kwargs\.box: .*; expected .*rising"),
        ({"home": [0, 0, 0]}, r"task\.kwargs\.home: .* is not in kwargs\.box"),
        ({"speed": 2}, r"task\.kwargs\.speed: 2; expected m/s, above 0, to 0\.5"),
        ({"rate_hz": 0}, r"task\.kwargs\.rate_hz: 0; expected more than 0"),
        ({"sped": 1}, r"task\.kwargs\.sped: no such key; near it: speed"),
        ({"reader": "nowhere:Reader"}, r"task\.kwargs\.reader: 'nowhere:Reader': ModuleNotFound"),
    ],
)
def test_what_cannot_be_is_refused_without_an_arm(
    arm: Arm, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        GymEnvironment.read_spec(task(arm, **changed))


def test_one_arm_is_one_world(arm: Arm) -> None:
    config = task(arm)
    GymEnvironment.verify_spec(config)
    for name, value in (("num_processes", 2), ("double_buffer", True)):
        with pytest.raises(ConfigError, match=rf"task\.{name}: franka has one environment at a"):
            GymEnvironment.task_size(config.model_copy(update={name: value}), None)
