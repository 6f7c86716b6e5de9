"""EnvPool, really stepped, in its environment (``make env NAME=envpool``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.data.trajectory import Trajectory
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.subprocess_env import SubprocessVectorEnv
from rlinf.errors import ConfigError
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from stages.rollout import local_rollout_iter
from tests.environments import need_environment

CARTPOLE: dict[str, Any] = {"simulator": "envpool", "id": "CartPole-v1", "python": "envpool"}


@pytest.fixture(scope="module", autouse=True)
def made() -> None:
    need_environment("envpool")


@contextlib.contextmanager
def pool(**changed: Any) -> Iterator[SubprocessVectorEnv]:
    config = GymConfig.model_validate({**CARTPOLE, **changed})
    with contextlib.closing(create_simulator_process(config)) as process:
        yield process


def collect(folder: Path, samples: range, *, split: str = "train") -> list[Trajectory]:
    spec = {"observation": 4, "action": {"kind": "discrete", "size": 2}}
    config = GymConfig.model_validate({**CARTPOLE, **spec})
    MLPPolicy.create(MLPConfig(hidden=(4,)), GymEnvironment.model_spec(config), 0, folder)
    engine = DirectEngine(DirectConfig(), MLPPolicy, MLPConfig(hidden=(4,)))
    engine.load(folder, 0)
    with contextlib.closing(GymEnvironment(config, None)) as environment:
        request = RolloutRequest(3, 1, split, samples, 8, 1, 60, 1.0)
        return list(local_rollout_iter(environment, engine, request, "rollout"))


def test_the_seed_determines_the_first_episode_and_those_after_it() -> None:
    def play(process: SubprocessVectorEnv, seeds: list[int]) -> tuple[np.ndarray, np.ndarray]:
        envs = list(range(len(seeds)))
        first = process.reset(envs, seeds, starts_samples=True)["state"]
        for _ in range(20):
            columns, errors = process.step(envs, np.ones(len(envs), np.int64))
            assert not errors
            if columns["terminated"][0]:
                break
        return first, process.reset([0], [99])["state"]

    with pool() as process:
        first, second = play(process, [5, 6, 5])
        np.testing.assert_array_equal(first[0], first[2])
        assert (first[0] != first[1]).all()
        assert (first[0] != second[0]).all(), "the next episode begins elsewhere"
        again, second_again = play(process, [5, 7, 8])
        np.testing.assert_array_equal(again[0], first[0])
        np.testing.assert_array_equal(second_again, second)
        assert (again[1] != first[1]).all()


def test_trajectories_do_not_depend_on_which_samples_share_a_pool(tmp_path: Path) -> None:
    together = collect(tmp_path, range(8))
    assert sum(int(t.num_episodes or 0) for t in together) > 8, "poles fall several times"
    apart = collect(tmp_path, range(5)) + collect(tmp_path, range(5, 8))
    assert len(together) == len(apart) == 8
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_array_equal(one.require("observations"), other.require("observations"))
        np.testing.assert_array_equal(one.require("rewards"), other.require("rewards"))


def test_an_evaluation_has_one_episode_per_sample(tmp_path: Path) -> None:
    episodes = collect(tmp_path, range(4), split="test")
    for episode in episodes:
        assert episode.require("terminated").tolist()[:-1] == [0] * (len(episode) - 1)
        assert episode.num_episodes == 1
        # Gymnasium's CartPole: a reward of 1 until the pole falls.
        assert episode.require("rewards").tolist() == [1.0] * len(episode)


def test_physics_are_those_of_gymnasium() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    with pool() as process:
        env.state = process.reset([0], [3], starts_samples=True)["state"][0].astype(np.float64)
        for action in (1, 0, 1, 1, 0, 0, 0, 1):
            state, reward, terminated, *_ = env.step(action)
            columns, _ = process.step([0], np.array([action]))
            np.testing.assert_allclose(columns["seen.state"][0], state, rtol=1e-4, atol=1e-6)
            assert (columns["reward"][0], columns["terminated"][0]) == (reward, terminated)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": "CartPole-v9"}, r"^task\.id: EnvPool has no 'CartPole-v9'"),
        ({"kwargs": {"seed": 3}}, r"^task\.kwargs\.seed: the run sets it"),
        ({"images": {"top": [8, 8]}}, r"^task\.id: EnvPool renders no cameras"),
        ({"kwargs": {"no_such": 3}}, r"cannot make 'CartPole-v1': .*no_such"),
    ],
)
def test_what_it_cannot_make_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymEnvironment.read_spec(GymConfig.model_validate({**CARTPOLE, **changed}))
