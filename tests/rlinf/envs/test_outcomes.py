"""What came of an episode is its own: on its last step, in a sample of several."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.data.trajectory import StepRewards

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.algorithms.ppo import PPO, PPOConfig
from rlinf.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusConfig
from rlinf.config import Section
from rlinf.data.batch import StepBatch, TrainingSample, build_step_batch
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.data.transitions import to_transitions
from rlinf.envs.base import RolloutRequest
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.envs.subprocess_env import SimulatorError
from rlinf.errors import InputError
from rlinf.rewards.base import Reward, RewardResources
from rlinf.rewards.task_rewards import ScoreConfig, ScoreReward
from stages.rollout import local_rollout_iter
from tests.rlinf.envs.test_lost_episodes import BREAKING, engine_for

HORIZON = 10
"""Episodes of this world have four steps: two end, and the third is open."""


def played(folder: Path, *, starts: int = 1, size: int = 1, **changed: Any) -> list[Trajectory]:
    horizon = changed.pop("horizon", HORIZON)
    left: Any = {} if changed.pop("goes_on", False) else None
    config = GymConfig.model_validate({**BREAKING, **changed})
    episodes = RolloutRequest(
        0, 0, "train", range(starts), starts, size, horizon, 1.0, open_episodes=left
    )
    with contextlib.closing(GymEnvironment(config, None)) as environment:
        records = list(
            local_rollout_iter(environment, engine_for(config, folder), episodes, "rollout")
        )
        assert len(environment.score(records, Counter())) == starts * size
    return records


def environment_rewards(record: Trajectory, **settings: Any) -> np.ndarray:
    reward = ScoreReward(ScoreConfig(**settings), RewardResources())
    return reward.compute_step_rewards([record], [float("inf")])[0]


def batch_of(record: Trajectory, **settings: Any) -> StepBatch:
    return build_step_batch([TrainingSample(record, outcomes_of(record, **settings))])


def outcomes_of(record: Trajectory, **settings: Any) -> StepRewards:
    """What the reward stage says of it."""
    reward = ScoreReward(ScoreConfig(**settings), RewardResources())
    (one,) = reward.compute_results([record], [float("inf")])
    ends = np.asarray(one.episode_ends, np.uint8)
    rewards = np.asarray(one.reward)
    return StepRewards(identity=record.identity, rewards=rewards, episode_ends=ends)


@pytest.mark.parametrize(("success", "each"), [(True, 1.0), (False, 4.0)])
def test_each_episode_has_its_own_score_on_its_own_last_step(
    success: bool, each: float, tmp_path: Path
) -> None:
    """The sample's mean lay on the last step of the open episode before."""
    (record,) = played(tmp_path, score_by_success=success)
    assert record.outcome_steps.tolist() == [3, 7]
    assert record.outcomes.tolist() == [each, each]
    wanted = np.zeros(HORIZON)
    wanted[[3, 7]] = 2 * each + 0.5
    assert environment_rewards(record, scale=2.0, offset=0.5).tolist() == wanted.tolist()


def test_a_later_episode_is_no_merit_of_the_one_before(tmp_path: Path) -> None:
    """Without a critic's values, and with discounts near one, what is to come of a step is what
    comes in its own episode."""
    (record,) = played(tmp_path, score_by_success=True)
    record.outcomes[:] = [1.0, 0.0]
    batch = batch_of(record)
    batch.values[:], batch.bootstrap_values[:] = 0, 0  # type: ignore[index]
    plain = PPO(PPOConfig(gae_lambda=1.0, gamma=1.0, whiten_advantages=False))
    assert plain.compute_advantages(batch)[0].tolist() == [[1.0] * 4 + [0.0] * 6]
    relative = (
        ReinforcePlusPlus(ReinforcePlusPlusConfig()).with_advantages(batch).require("advantages")
    )
    assert (relative[0, :4] > 0).all()
    assert (relative[0, 4:] < 0).all()


def test_transitions_have_the_reward_of_their_own_episode(tmp_path: Path) -> None:
    (record,) = played(tmp_path, score_by_success=True)
    rows = to_transitions(record, environment_rewards(record))
    assert rows["rewards"].tolist() == rows["terminated"].tolist() == [0, 0, 0, 1] * 2 + [0, 0]


def test_nothing_comes_after_an_episode_that_was_judged(tmp_path: Path) -> None:
    """A critic's word for the state in which it was cut off would be its outcome again, and again
    in the values of the next update."""
    (record,) = played(tmp_path, horizon=3)
    assert record.bootstrap_values[-1] != 0
    plain = PPO(PPOConfig(gae_lambda=1.0, gamma=1.0, whiten_advantages=False))
    _, returns = plain.compute_advantages(batch_of(record))
    assert returns.tolist() == [[pytest.approx(3.0)] * 3]
    result = outcomes_of(record)
    rows = to_transitions(record, result.rewards, result.episode_ends)
    assert rows["terminated"].tolist() == [0, 0, 1]
    assert rows["truncated"].tolist() == [0, 0, 0]
    (record,) = played(tmp_path)
    assert batch_of(record).terminated.tolist() == [[0, 0, 0, 1] * 2 + [0, 0]], "the third goes on"


def test_a_sample_of_one_open_episode_is_judged_as_far_as_it_came(tmp_path: Path) -> None:
    (record,) = played(tmp_path, horizon=3)
    assert environment_rewards(record).tolist() == [0, 0, 3]
    (record,) = played(tmp_path, horizon=3, goes_on=True, simulator=KEEPING)
    assert environment_rewards(record).tolist() == [0, 0, 0], "its score comes when it ends"


KEEPING = "tests.rlinf.envs.test_outcomes:make_keeping"


def make_keeping(id: str, kwargs: dict[str, Any]) -> Any:
    from tests.rlinf.envs.breaking_worlds import World

    class Keeping(World):
        def save(self) -> dict[str, np.ndarray]:
            return {"steps": np.array(self._steps)}

    return Keeping([], reports=False)


def test_a_lost_episode_has_no_score(tmp_path: Path) -> None:
    (record,) = played(tmp_path, kwargs={"fails": [2]})
    assert environment_rewards(record).tolist() == [0, 0, 0, 4] + [0] * 6


def test_an_overlong_episode_is_penalised_by_its_own_length(tmp_path: Path) -> None:
    (record,) = played(tmp_path, score_by_success=True)
    rewards = environment_rewards(record, overlong_penalty_start=2, overlong_penalty_end=6)
    assert rewards[[3, 7]].tolist() == [0.5, 0.5]


class Same(Reward):
    Config = Section
    needs_score = False

    def compute(self, trajectories: Sequence[Trajectory], scores: Sequence[float]) -> list[float]:
        return [1.0] * len(trajectories)


def test_one_number_for_several_episodes_is_refused(tmp_path: Path) -> None:
    reward = Same(Section(), RewardResources())
    (several,), (whole,) = played(tmp_path), played(tmp_path, horizon=4)
    with pytest.raises(InputError, match=r"sample 0 holds several episodes.*rollout\.group_size"):
        reward.compute_step_rewards([several], [])
    assert torch.tensor(reward.compute_step_rewards([whole], [])[0]).tolist() == [0, 0, 0, 1]


def test_a_sample_of_a_group_is_one_episode(tmp_path: Path) -> None:
    """What comes after it is no part of what the group is compared by, and would be reinforced."""
    records = played(tmp_path, starts=2, size=2, score_by_success=True)
    assert [len(record) for record in records] == [4] * 4
    assert [record.outcomes.tolist() for record in records] == [[1.0]] * 4
    (first,) = played(tmp_path, starts=1, size=1, score_by_success=True)
    np.testing.assert_array_equal(records[0].observations, first.observations[:4])


def test_a_lost_episode_costs_its_sample_of_a_group(tmp_path: Path) -> None:
    """Another one would begin elsewhere than those that it is compared with."""
    with pytest.raises(SimulatorError, match=r"fails in each of 6 episodes, of 3 groups"):
        played(tmp_path, starts=3, size=2, kwargs={"fails": [1]})
    with pytest.raises(SimulatorError, match=r"fails in each of 6 episodes, of 3 groups"):
        played(tmp_path, starts=3, size=2, kwargs={"fails": [1]}, max_parallel_envs=2)
    records = played(tmp_path, starts=2, size=4, kwargs={"fails": [1]})
    assert not any(loss_mask(record).any() for record in records), "two starts may be at fault"
