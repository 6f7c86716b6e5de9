"""The penalty for overlong samples needs both of its ends."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from rlinf.algorithms.grpo import DAPO, DAPOConfig
from rlinf.config import validate
from rlinf.data.record import Identity, Record
from rlinf.errors import ConfigError
from rlinf.rewards.base import Resources
from rlinf.rewards.score import ScoreConfig, ScoreReward
from stages.reward import judged


@pytest.mark.parametrize(
    "given",
    [
        {"overlong_from": 8},
        {"overlong_to": 8},
        {"overlong_from": 9, "overlong_to": 8},
        {"overlong_from": 8, "overlong_to": 8},
    ],
)
def test_half_a_penalty_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="set both, overlong_from below overlong_to"):
        validate(ScoreConfig, given, "reward")


def test_the_penalty_grows_linearly_between_its_ends() -> None:
    reward = ScoreReward(ScoreConfig(overlong_from=2, overlong_to=6), Resources())
    samples = [Record(Identity(0, n), {"actions": np.zeros(n, np.int64)}) for n in (1, 2, 5, 6, 9)]
    got = [float(steps[-1]) for steps in reward.rewards(samples, [1.0] * 5)]
    assert got == pytest.approx([1.0, 1.0, 0.25, 0.0, 0.0])


def test_what_a_tool_says_is_no_part_of_a_samples_length() -> None:
    reward = ScoreReward(ScoreConfig(overlong_from=2, overlong_to=6), Resources())
    steps = {"actions": np.zeros(9, np.int64), "mask": np.array([1, 0, 0, 0, 0, 1, 0, 1, 0])}
    (got,) = reward.rewards([Record(Identity(0, 0), steps)], [1.0])
    assert got.tolist() == [0, 0, 0, 0, 0, 0, 0, 0.75, 0]


def test_wrong_answers_of_unlike_lengths_teach_nothing() -> None:
    """Nor do right ones: dynamic sampling asks what was right (arXiv 2503.14476, eq. 11)."""
    reward = ScoreReward(ScoreConfig(overlong_from=2, overlong_to=6), Resources())
    lengths = (2, 3, 6, 2, 2, 5)
    group = [1, 1, 1, 2, 2, 2]
    samples = [
        Record(Identity(0, n), {"actions": np.zeros(length, np.int64)}, info={"group": group[n]})
        for n, length in enumerate(lengths)
    ]
    said = reward.judgements(samples, [0.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    assert [np.sum(one.worth) for one in said] == [0, -0.25, -1, 1, 0, 0.25]
    scored = SimpleNamespace(score=lambda *_: [0.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    verdict = judged(reward, DAPO(DAPOConfig()), scored, samples, Counter())  # type: ignore[arg-type]
    assert verdict.kept.tolist() == [False] * 3 + [True] * 3
    assert verdict.totals.tolist() == [0, -0.25, -1, 1, 0, 0.25], "what is learned from"
