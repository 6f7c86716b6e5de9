"""Meta-World, really stepped, where its environment is made (``make env NAME=metaworld``)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlinf.data.episodes import INSTRUCTION_COLUMN, decode_instruction
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.episode_runner import EPISODE_METRICS
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.simulators import metaworld as maker
from rlinf.envs.simulators import simulators
from rlinf.envs.subprocess_env import SubprocessVectorEnv
from rlinf.errors import ConfigError, InputError
from rlinf.interpreters import resolve_interpreter
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.seeding import generator
from stages.rollout import local_rollout_iter
from tests.environments import need_environment

REACH = {
    "simulator": "metaworld",
    "id": "reach-v3",
    "python": "metaworld",
    "observation": 39,
    "action": {"kind": "box", "size": 4},
    "score_by_success": True,
}


@pytest.fixture(autouse=True)
def made() -> None:
    need_environment("metaworld")


@pytest.fixture
def process(made: None) -> Iterator[SubprocessVectorEnv]:
    python = resolve_interpreter("metaworld", "task.python")
    values = {"id": "reach-v3", "kwargs": {}}
    with contextlib.closing(
        SubprocessVectorEnv(f"{maker.__file__}:make", values, python, 60)
    ) as found:
        yield found


def test_task_sets_are_those_of_the_package_and_observations_end_with_the_task() -> None:
    program = (
        "import json, metaworld.env_dict as d; "
        "print(json.dumps({'MT10': list(d.MT10_V3), 'MT50': list(d.ALL_V3_ENVIRONMENTS)}))"
    )
    python = resolve_interpreter("metaworld", "task.python")
    ran = subprocess.run([python, "-c", program], stdout=subprocess.PIPE, check=True)
    assert json.loads(ran.stdout) == {name: list(ids) for name, ids in maker.TASK_SETS.items()}
    several = {"id": "MT10", "append_task_one_hot": True, "observation": 49}
    with contextlib.closing(
        create_simulator_process(GymConfig.model_validate({**REACH, **several}))
    ) as process:
        seen = process.reset([0, 1], [5, 5], None, [0, 12])["state"]
        assert seen[:, 39:].tolist() == np.eye(10)[[0, 2]].tolist()
        moved, errors = process.step([0, 1], np.ones((2, 4)))
        assert not errors
        assert moved["seen.state"].shape == (2, 49)
        assert (moved["seen.state"] != seen).any(1).all()


def towards(seen: np.ndarray) -> np.ndarray:
    """Moves the hand (the first three of an observation) to the goal (the last three)."""
    return np.concatenate([np.clip(10 * (seen[:, -3:] - seen[:, :3]), -1, 1), seen[:, :1] * 0], 1)


def test_a_hand_that_goes_to_the_goal_succeeds_and_one_that_rests_does_not(
    process: SubprocessVectorEnv,
) -> None:
    """Success is the simulator's own, and both outcomes are seen."""
    seen = process.reset([0, 1], [5, 5])["state"]
    for _ in range(100):
        actions = towards(seen)
        actions[1] = 0
        came, errors = process.step([0, 1], actions)
        seen = came["seen.state"]
        assert not errors
    assert came["success"].tolist() == [1, 0]
    assert not came["terminated"].any()


def test_the_seed_alone_chooses_the_goal(process: SubprocessVectorEnv) -> None:
    first = process.reset([0, 1, 2], [3, 3, 4])["state"]
    for _ in range(5):
        process.step([0, 1, 2], np.ones((3, 4)))
    again = process.reset([2, 0], [3, 4])["state"]
    np.testing.assert_array_equal(first[0], first[1])
    np.testing.assert_array_equal(again, first[[1, 2]])
    assert (first[0] != first[2]).any()


def test_an_episode_is_cut_off_after_500_steps(process: SubprocessVectorEnv) -> None:
    process.reset([0], [0])
    ends = [process.step([0], np.zeros((1, 4)))[0]["truncated"][0] for _ in range(500)]
    assert ends == [0] * 499 + [1]


def test_episodes_are_scored_by_success_and_measured(tmp_path: Path) -> None:
    config = GymConfig.model_validate(REACH)
    GymEnvironment.verify_spec(config)
    small = MLPConfig(hidden=(8,))
    MLPPolicy.create(small, GymEnvironment.model_spec(config), 0, tmp_path)
    engine = DirectEngine(DirectConfig(), MLPPolicy, small)
    engine.load(tmp_path, 0)
    with contextlib.closing(GymEnvironment(config, None)) as environment:
        episodes = RolloutRequest(0, 0, "test", range(2), 2, 1, 20, 0.0)
        records = list(local_rollout_iter(environment, engine, episodes, "evaluate"))
        scores = environment.score(records, Counter())
        found = environment.episode_metrics(records)
    assert set(found) == set(EPISODE_METRICS)
    assert scores == [record.success_once for record in records] == [0.0, 0.0]
    assert found["episode_length"] == 20
    assert found["return"] > 0


def test_demonstrations_are_solved_episodes_of_the_simulators_expert() -> None:
    """Carried out again from the same start, their actions give what they say was seen."""
    config = GymConfig.model_validate({**REACH, "demonstrations": 2, "instruction": True})
    with contextlib.closing(GymEnvironment(config, None)) as environment:
        records = environment.demonstrations(3, 0, 2)
        drawn = [environment.demonstrations(3, step, 2) for step in (4, 4, *range(5, 12))]
    assert [len({len(a) for a in records}), len(records[0].to_record().steps)] == [2, 4]
    lengths = [[len(record) for record in each] for each in drawn]
    assert lengths[0] == lengths[1]
    assert len({tuple(each) for each in lengths}) == 2, "the order is drawn anew at each step"
    with contextlib.closing(create_simulator_process(config)) as process:
        for number in range(2):
            begin = int(generator(3, "demonstration", number).integers(2**31))
            first = process.reset([0], [begin])["state"][0].astype(np.float32)
            (steps,) = [r.to_record().steps for r in records if (r.observations[0] == first).all()]
            chunk = steps["actions"][None]
            came, errors = process.step([0], chunk)
            assert not errors
            assert came["success"].tolist() == came["solved"].tolist() == [1]
            assert came["executed"].tolist() == [chunk.shape[1]]
            assert came["reward"][0] == pytest.approx(steps["rewards"].sum(), rel=1e-5)
            assert decode_instruction(steps[INSTRUCTION_COLUMN][0]) == "reach"
            assert np.abs(chunk).max() <= 1


def test_an_unknown_task_is_refused_with_those_near_it() -> None:
    config = GymConfig.model_validate({**REACH, "id": "reech-v3"})
    with pytest.raises(ConfigError, match=r"no task 'reech-v3'; near it: reach-v3"):
        GymEnvironment.read_spec(config)


def test_an_unknown_simulator_is_refused_with_the_one_near_it() -> None:
    with pytest.raises(InputError, match=r"unknown simulator 'metawrld'.*metaworld"):
        simulators.target("metawrld", "task.simulator")


def test_worlds_of_one_process_share_a_renderer_and_not_their_pictures() -> None:
    """A picture is that of a world alone in its process, whatever was rendered before."""
    config = GymConfig.model_validate(
        {**REACH, "images": {"corner": [48, 64], "topview": [48, 64]}}
    )
    with contextlib.closing(create_simulator_process(config)) as process:
        together = process.reset([0, 1], [3, 4])
    for number, seed in enumerate([3, 4]):
        with contextlib.closing(create_simulator_process(config)) as process:
            alone = process.reset([0], [seed])
        for name, array in alone.items():
            np.testing.assert_array_equal(together[name][number], array[0], err_msg=name)
    assert together["corner"].shape == (2, 48, 64, 3)
    assert (together["corner"][0] != together["corner"][1]).any()
    assert (together["corner"][0] != together["topview"][0]).any()


def test_published_images_are_of_the_nearer_camera_rotated_by_half_a_turn() -> None:
    """As LeRobot makes them: Meta-World's own rendering, with both axes reversed."""
    program = """
import sys, metaworld, numpy as np
benchmark = metaworld.MT1("reach-v3", seed=42)
options = {"render_mode": "rgb_array", "camera_name": "corner2", "width": 64, "height": 48}
env = benchmark.train_classes["reach-v3"](**options)
env.model.camera("corner2").pos[:] = [0.75, 0.075, 0.7]
env.set_task(benchmark.train_tasks[int(np.random.default_rng(3).integers(50))])
env.reset(seed=3)
sys.stdout.buffer.write(np.ascontiguousarray(env.render()).tobytes())
"""
    python = resolve_interpreter("metaworld", "task.python")
    ran = subprocess.run(
        [python, "-c", program],
        env={**os.environ, "MUJOCO_GL": "egl"},
        stdout=subprocess.PIPE,
        check=True,
    )
    raw = np.frombuffer(ran.stdout[-48 * 64 * 3 :], np.uint8).reshape(48, 64, 3).astype(float)
    values = {**REACH, "images": {"corner2": [48, 64]}, "kwargs": {"benchmark_images": True}}
    config = GymConfig.model_validate(values)
    with contextlib.closing(create_simulator_process(config)) as process:
        published = process.reset([0], [3])["corner2"][0]
    assert abs(published - raw[::-1, ::-1]).mean() < 1
    assert abs(published - raw).mean() > 10
