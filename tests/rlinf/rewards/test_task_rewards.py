"""The penalty for overlong samples needs both of its ends."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from rlinf.algorithms.group_relative import DAPO, DAPOConfig
from rlinf.config import validate
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError
from rlinf.rewards.base import RewardResources
from rlinf.rewards.task_rewards import ScoreConfig, ScoreReward
from stages.reward import compute_rewards


@pytest.mark.parametrize(
    "given",
    [
        {"overlong_penalty_start": 8},
        {"overlong_penalty_end": 8},
        {"overlong_penalty_start": 9, "overlong_penalty_end": 8},
        {"overlong_penalty_start": 8, "overlong_penalty_end": 8},
    ],
)
def test_half_a_penalty_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match="set both, overlong_penalty_start below overlong_penalty_end"
    ):
        validate(ScoreConfig, given, "reward")


def penalising() -> ScoreReward:
    """A reward that takes more the longer a sample is, from two steps to six."""
    config = ScoreConfig(overlong_penalty_start=2, overlong_penalty_end=6)
    return ScoreReward(config, RewardResources())


def test_the_penalty_grows_linearly_between_its_ends() -> None:
    reward = penalising()
    samples = [
        Trajectory(identity=RecordId(0, n), actions=np.zeros(n, np.int64)) for n in (1, 2, 5, 6, 9)
    ]
    got = [float(steps[-1]) for steps in reward.compute_step_rewards(samples, [1.0] * 5)]
    assert got == pytest.approx([1.0, 1.0, 0.25, 0.0, 0.0])


def test_what_a_tool_says_is_no_part_of_a_samples_length() -> None:
    reward = penalising()
    mask = np.array([1, 0, 0, 0, 0, 1, 0, 1, 0])
    sample = Trajectory(identity=RecordId(0, 0), actions=np.zeros(9, np.int64), mask=mask)
    (got,) = reward.compute_step_rewards([sample], [1.0])
    assert got.tolist() == [0, 0, 0, 0, 0, 0, 0, 0.75, 0]


def test_wrong_answers_of_unlike_lengths_teach_nothing() -> None:
    """Nor do right ones: dynamic sampling asks what was right (arXiv 2503.14476, eq. 11)."""
    reward = penalising()
    lengths = (2, 3, 6, 2, 2, 5)
    group = [1, 1, 1, 2, 2, 2]
    samples = [
        Trajectory(identity=RecordId(0, n), actions=np.zeros(length, np.int64), group=group[n])
        for n, length in enumerate(lengths)
    ]
    result = reward.compute_results(samples, [0.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    assert [np.sum(one.reward) for one in result] == [0, -0.25, -1, 1, 0, 0.25]
    scored = SimpleNamespace(score=lambda *_: [0.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    batch = compute_rewards(reward, DAPO(DAPOConfig()), scored, samples, Counter())  # type: ignore[arg-type]
    assert [one.is_included for one in batch.step_rewards] == [False] * 3 + [True] * 3
    assert batch.reward_sums.tolist() == [0, -0.25, -1, 1, 0, 0.25], "what is learned from"
