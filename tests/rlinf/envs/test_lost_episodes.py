"""An episode that a simulator lost leaves nothing behind: no reward, no score, no action."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.config import EvaluateSection
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.observations import InvalidEnvConfig
from rlinf.envs.simulators.requirements import SimulatorRequirements, get_requirements
from rlinf.envs.subprocess_env import SimulatorError
from rlinf.envs.vector_env import BatchedVectorEnv, SyncVectorEnv
from rlinf.errors import ConfigError
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.rewards.base import RewardResources
from rlinf.rewards.task_rewards import EnvironmentReward
from stages.evaluate import eval_policy_runner, run_eval_episodes
from stages.rollout import local_rollout_iter
from tests.rlinf.envs import batched_worlds, breaking_worlds

BREAKING: dict[str, Any] = {
    "simulator": "tests.rlinf.envs.breaking_worlds:make",
    "id": "any",
    "observation": 1,
    "action": {"kind": "box", "size": 2},
}
POLICY = MLPConfig(hidden=(4,))


def engine_for(config: GymConfig, folder: Path) -> DirectEngine:
    bare = config.model_copy(update={"images": {}})
    MLPPolicy.create(POLICY, GymEnvironment.model_spec(bare), 0, folder)
    engine = DirectEngine(DirectConfig(), MLPPolicy, POLICY)
    engine.load(folder, 0)
    return engine


def played(split: str, starts: int, folder: Path, **changed: Any) -> tuple[Any, list[Trajectory]]:
    config = GymConfig.model_validate({**BREAKING, **changed})
    engine = engine_for(config, folder)
    episodes = RolloutRequest(0, 0, split, range(starts), starts, 1, 10, 1.0)  # type: ignore[arg-type]
    with contextlib.closing(GymEnvironment(config, None)) as environment:
        return environment, list(local_rollout_iter(environment, engine, episodes, "rollout"))


def test_its_rewards_are_nobodys(tmp_path: Path) -> None:
    """They would be credited to the last step that counts, which is of another episode."""
    _, (record,) = played("train", 1, tmp_path, kwargs={"fails": [2]})
    assert loss_mask(record).tolist() == [True] * 4 + [False] * 3 + [True] * 3
    assert record.rewards.tolist() == [1] * 4 + [0] * 3 + [1] * 3
    reward = EnvironmentReward(EnvironmentReward.Config(), RewardResources())
    (found,) = reward.compute_results([record], [])
    assert np.asarray(found.reward).tolist() == record.rewards.tolist()


@pytest.mark.parametrize("success", [True, False])
def test_it_is_not_scored(success: bool, tmp_path: Path) -> None:
    """It had success before the simulator failed."""
    changed = {"kwargs": {"fails": [1]}, "score_by_success": success}
    environment, records = played("test", 2, tmp_path, **changed)
    assert all(not loss_mask(record).any() for record in records)
    counts = Counter[str]()
    assert all(math.isnan(score) for score in environment.score(records, counts))
    assert counts["failed_episodes"] == 2
    assert environment.episode_metrics(records) == {}
    environment, (whole,) = played("test", 1, tmp_path, score_by_success=success)
    assert environment.score([whole], counts) == [1.0 if success else 4.0]
    assert environment.episode_metrics([*records, whole])["return"] == 4


def test_an_evaluation_in_which_all_is_lost_has_no_score(tmp_path: Path) -> None:
    config = GymConfig.model_validate({**BREAKING, "kwargs": {"fails": [1]}})
    policy = eval_policy_runner(engine_for(config, tmp_path))
    sampling = SimpleNamespace(non_default_settings=dict)
    rollout = SimpleNamespace(horizon=10, sampling=sampling)
    evaluate = EvaluateSection(samples=2, temperature=1.0)
    values: Any = SimpleNamespace(
        config=SimpleNamespace(evaluate=evaluate, rollout=rollout),
        report_progress=lambda *_: None,
        should_stop=lambda: False,
    )
    with contextlib.closing(GymEnvironment(config, None)) as environment:
        _, scores = run_eval_episodes(values, environment, policy, range(2), Counter())
        assert np.isnan(scores).tolist() == [True, True]


def test_what_a_pictured_world_tells_is_kept(tmp_path: Path) -> None:
    _, (record,) = played(
        "train", 1, tmp_path, kwargs={"reports": True}, images={"side": [2, 2]}, num_processes=1
    )
    assert record.intervened.all()
    clipped = np.clip(record.actions, -1, 1)
    np.testing.assert_array_equal(record.executed_actions, -clipped)


def test_demonstrations_of_a_world_with_one_buffer_are_what_it_showed() -> None:
    worlds = SyncVectorEnv(lambda: breaking_worlds.make("any", {}))
    shown = worlds.demonstrate(0, 10)
    assert shown["seen.state"].tolist() == [[0]], "to its first success"
    seen = [worlds.reset([0], [0])["state"]]
    seen += [worlds.step([0], np.zeros((1, 2)))[0]["seen.state"] for _ in range(3)]
    assert np.concatenate(seen)[:, 0].tolist() == [0, 1, 2, 3]


def test_what_a_module_of_the_users_says_is_read_without_importing_it() -> None:
    found = get_requirements("tests.rlinf.envs.single_worlds:make")
    assert found.single_instance
    assert not found.batched
    assert found.assets == {"file": "the robot's description"}
    assert found.packages == ()
    assert get_requirements("tests.rlinf.envs.batched_worlds:make").batched
    assert get_requirements("not.here:make") == SimulatorRequirements()


def test_a_robot_of_the_users_has_one_world(tmp_path: Path) -> None:
    world = "tests.rlinf.envs.single_worlds:make"
    config = GymConfig.model_validate({**BREAKING, "simulator": world, "kwargs": {"file": "here"}})
    with pytest.raises(ConfigError, match=r"task\.double_buffer: .* has one environment at a time"):
        GymEnvironment.task_size(
            config.model_copy(update={"double_buffer": True, "kwargs": {"file": str(tmp_path)}}),
            None,
        )
    _, records = played("train", 3, tmp_path, simulator=world)
    assert len(records) == 3
    with pytest.raises(InvalidEnvConfig, match=r"task\.simulator: its module sets SINGLE_INSTANCE"):
        SyncVectorEnv(lambda: breaking_worlds.make("any", {}), single_instance=True).reset(
            [0, 1], [0, 0]
        )


def test_of_a_batch_the_episode_that_is_not_finite_is_lost() -> None:
    batch = BatchedVectorEnv(lambda **of: batched_worlds.make("any", {"nan_at": 4.0}, **of))
    batch.reset([0, 1], [2, 3])
    came, errors = batch.step([0, 1], np.array([[0.5], [1.0]]))
    assert list(errors) == [1]
    assert "not finite" in errors[1]
    assert came["terminated"].tolist() == [0, 1]
    assert came["reward"].tolist() == [2.5, 0.0]
    assert came["seen.state"][1].tolist() == [3.0, 2.0], "what it showed last"


def test_an_environment_of_a_batch_that_begins_with_no_number_is_reset_once_more() -> None:
    class Twice(batched_worlds.Counters):
        requested_envs: ClassVar[list[list[int]]] = []

        def reset(self, numbers: list[int], seeds: list[int]) -> Any:
            self.requested_envs.append(numbers)
            seen = super().reset(numbers, seeds)
            if len(self.requested_envs) == 1:
                seen["state"][1] = np.nan
            return seen

    batch = BatchedVectorEnv(lambda count, images: Twice(count, images, 1e9, 1e9, 1e9))
    assert batch.reset([0, 1], [2, 3])["state"].tolist() == [[2, 2], [3, 2]]
    assert Twice.requested_envs == [[0, 1], [1]]
    assert not batch.step([0, 1], np.ones((2, 1)))[1]


def test_where_it_cannot_begin_its_episode_is_lost_and_no_other() -> None:
    batch = BatchedVectorEnv(lambda **of: batched_worlds.make("any", {"nan_at": 4.0}, **of))
    assert batch.reset([0, 1], [2, 4])["state"].tolist() == [[2, 2], [0, 0]]
    came, errors = batch.step([0, 1], np.array([[0.5], [1.0]]))
    assert list(errors) == [1]
    assert "not finite after two resets" in errors[1]
    assert came["terminated"].tolist() == [0, 1]
    assert came["reward"].tolist() == [2.5, 0.0]
    batch.reset([1], [3])
    assert not batch.step([0, 1], np.array([[0.5], [0.5]]))[1]


MANY: dict[str, Any] = {
    "simulator": "tests.rlinf.envs.batched_worlds:make",
    "observation": 2,
    "action": {"kind": "box", "size": 1},
}
BEGINS: dict[str, Any] = {
    "simulator": "tests.rlinf.envs.breaking_worlds:make",
    "kwargs": {"begins_not": [2, 3]},
}


@pytest.mark.parametrize(
    ("task", "starts"),
    [
        ({**MANY, "kwargs": {"nan_at": 3.0}}, 3),
        (BEGINS, 3),
        # Before any other has shown what an observation is like.
        ({**BEGINS, "kwargs": {"begins_not": [1, 2]}}, 3),
        ({**BEGINS, "kwargs": {"begins_not": [1, 2]}}, 1),
    ],
)
def test_a_rollout_goes_on_where_an_episode_cannot_begin(
    task: dict[str, Any], starts: int, tmp_path: Path
) -> None:
    environment, records = played("train", starts, tmp_path, **task, num_processes=1)
    counts = Counter[str]()
    environment.score(records, counts)
    lost = [record for record in records if not loss_mask(record).all()]
    assert counts["failed_episodes"] == sum(int(record.num_failed_episodes) for record in lost) > 0
    assert all(len(record.rewards) == 10 for record in records)
    assert all(np.isfinite(record.observations).all() for record in records)


def test_a_simulator_that_begins_nothing_is_an_error(tmp_path: Path) -> None:
    task = {**BEGINS, "kwargs": {"begins_not": [1, 2, 3]}}
    with pytest.raises(SimulatorError, match="ZeroDivisionError: a reset"):
        played("train", 1, tmp_path, **task, num_processes=1)


def test_a_simulation_that_raised_gets_a_new_process() -> None:
    task = GymConfig.model_validate(
        {**BREAKING, **MANY, "kwargs": {"raises_at": 8.0, "fails_at": 5.0, "once": True}}
    )
    with contextlib.closing(create_simulator_process(task)) as process:
        process.reset([0, 1, 2], [6, 0, 1])
        first = process.pid
        assert list(process.step([0, 1, 2], np.full((3, 1), 2.0))[1]) == [0, 1, 2]
        assert process.reset([0, 1, 2], [6, 0, 1])["state"].tolist() == [[6, 3], [0, 3], [1, 3]]
        assert process.pid != first
        with pytest.raises(SimulatorError, match="2 processes before it failed too") as found:
            process.reset([1], [5])
        assert "ZeroDivisionError: a sum that it cannot begin with" in str(found.value)
        assert process.reset([1], [4])["state"].tolist() == [[4, 3]], "room for all"
        came, errors = process.step([0, 1, 2], np.zeros((3, 1)))
        assert list(errors) == [0, 2], "they were of the process before"
        assert came["terminated"].tolist() == [1, 0, 1]
        assert process.reset([0, 2], [2, 3])["state"].tolist() == [[2, 3], [3, 3]]


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (
            "tests.rlinf.envs.breaking_worlds:maker",
            r"task\.simulator: .*breaking_worlds has no 'maker'",
        ),
        ("tests.not_there:make", r"task\.simulator: tests\.not_there: No module named"),
    ],
)
@pytest.mark.parametrize("apart", [{}, {"images": {"side": [2, 2]}}])
def test_a_world_that_is_not_there_is_refused_by_its_key(
    world: str, message: str, apart: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=message):
        GymEnvironment.read_spec(
            GymConfig.model_validate({**BREAKING, **apart, "simulator": world})
        )
