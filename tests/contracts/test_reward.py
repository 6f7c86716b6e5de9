"""What every reward of the registry must do; a new one passes this or does not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.commands.experiment import compose
from pipeline.validate_config import load_components
from rlinf.algorithms.advantages import compute_gae, group_relative_advantages
from rlinf.config import RunConfig, Section, validate
from rlinf.data.batch import TrainingSample, build_step_batch, join_by_identity
from rlinf.data.record import RecordId
from rlinf.data.trajectory import (
    PolicyOutputs,
    StepRewards,
    Trajectory,
    info_fields,
    loss_mask,
    step_fields,
)
from rlinf.errors import InputError
from rlinf.rewards import rewards
from rlinf.rewards.base import Reward, RewardResources, RewardResult
from tests.rlinf.rewards.chat_server import Reply, chat_server
from tests.rlinf.rewards.folders import write_reward_model

SCORES = [1.0, 0.0, 0.25, 1.0]
MASKS: list[list[int] | None] = [None, [1, 1, 0], [0, 1, 0, 1, 0, 0], [1, 0, 0]]


@pytest.fixture(scope="module")
def needed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Callable[[], dict[str, Any]]]]:
    """What those are configured with that have no defaults, by name."""

    def answer(question: str) -> Reply:
        return Reply(text=f"Score: 0.{len(question)}")

    def judge() -> dict[str, Any]:
        return {"endpoint": {"base_url": server.url}, "model": "tiny", "prompt": "{response}"}

    def reward_model() -> dict[str, Any]:
        return {"path": write_reward_model(tmp_path_factory.mktemp("reward_model"))}

    with chat_server() as server:
        server.answer = answer
        function = {"function": "tests.rlinf.rewards.own_functions:by_length"}
        yield {
            "reward_model": cache(reward_model),
            "judge": judge,
            "function": lambda: function,
        }


@pytest.fixture(params=rewards.names())
def reward(
    request: pytest.FixtureRequest, needed: dict[str, Callable[[], dict[str, Any]]]
) -> Iterator[Reward]:
    cls = rewards.get(request.param)
    config = cls.Config(**needed.get(request.param, dict)())
    words = ["experiment=arithmetic_short", "run.name=contract"]
    cls.check(config, load_components(validate(RunConfig, compose(words))))
    made: Reward = cls(config, RewardResources())
    yield made
    made.close()


def trajectories(first: int = 0) -> list[Trajectory]:
    """Of two groups, as simulators and text tasks make them; most end on a masked step."""
    out = []
    for number, mask in enumerate(MASKS):
        length = len(mask) if mask is not None else 4
        steps: dict[str, np.ndarray] = {
            "actions": np.zeros(length, np.int64),
            "logprobs": np.zeros(length, np.float32),
            "rewards": np.arange(1, length + 1, dtype=np.float32) + number,
        }
        if mask is not None:
            steps["mask"] = np.array(mask, np.float32)
        text = "12345"[: number + 1]
        info = {"group": number // 2, "text": text, "answer": "12345", "prompt_text": "1+2="}
        out.append(
            Trajectory(
                identity=RecordId(0, first + number), **step_fields(steps), **info_fields(info)
            )
        )
    return out


def scores(reward: Reward) -> list[float]:
    return SCORES if reward.needs_score else []


def batch_of(given: Sequence[Trajectory], rewards: Sequence[np.ndarray]) -> Any:
    columns = [
        StepRewards(identity=t.identity, rewards=r) for t, r in zip(given, rewards, strict=True)
    ]
    rows = join_by_identity(given, columns, [PolicyOutputs(identity=t.identity) for t in given])
    return build_step_batch([TrainingSample(*row) for row in rows])


def test_there_is_one_float32_for_each_step(reward: Reward) -> None:
    given = trajectories()
    for trajectory, steps in zip(
        given, reward.compute_step_rewards(given, scores(reward)), strict=True
    ):
        assert steps.dtype == np.float32
        assert steps.shape == (len(trajectory),)


def test_nothing_lies_on_a_step_that_does_not_count(reward: Reward) -> None:
    given = trajectories()
    rewards = reward.compute_step_rewards(given, scores(reward))
    for trajectory, steps in zip(given, rewards, strict=True):
        assert not steps[~loss_mask(trajectory)].any()
    batch_of(given, rewards)  # raises where one is masked away


def test_a_reward_for_the_whole_is_on_the_last_step_that_counts(reward: Reward) -> None:
    given = trajectories()
    rewards = reward.compute(given, scores(reward))
    placed = reward.compute_step_rewards(given, scores(reward))
    for trajectory, result, steps in zip(given, rewards, placed, strict=True):
        worth = result.reward if isinstance(result, RewardResult) else result
        assert float(steps.sum()) == pytest.approx(float(np.sum(worth)))
        if not np.ndim(worth):
            assert steps[np.flatnonzero(loss_mask(trajectory))[-1]] == np.float32(worth)


def test_the_algorithms_see_all_of_it(reward: Reward) -> None:
    given = trajectories()
    rewards = reward.compute_step_rewards(given, scores(reward))
    batch = batch_of(given, rewards)
    # In the gradient of GRPO the masked steps count nothing: the score must be on the others.
    assert (batch.rewards * batch.mask).sum(-1).tolist() == pytest.approx(
        [float(steps.sum()) for steps in rewards]
    )
    assert group_relative_advantages(batch.rewards.sum(-1), batch.groups).any()
    zero = torch.zeros_like(batch.mask)
    gae, _ = compute_gae(batch.rewards, zero, zero, zero, zero, batch.mask, 1.0, 1.0)
    firsts = [int(np.flatnonzero(loss_mask(trajectory))[0]) for trajectory in given]
    # Undiscounted and without a critic the first choice is credited with everything behind it.
    assert [float(row[at]) for row, at in zip(gae, firsts, strict=True)] == pytest.approx(
        [float(steps.sum()) for steps in rewards]
    )


def test_a_sample_is_judged_alike_beside_others(reward: Reward) -> None:
    given, every = trajectories(), scores(reward)
    whole = reward.compute_step_rewards(given, every)
    halves = [
        *reward.compute_step_rewards(given[:2], every[:2]),
        *reward.compute_step_rewards(given[2:], every[2:]),
    ]
    for one, other in zip(whole, halves, strict=True):
        # A network rounds otherwise where other rows are computed beside it.
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_a_trajectory_without_a_step_that_counts_earns_nothing(reward: Reward) -> None:
    none = trajectories()[0]
    none.mask = np.zeros(len(none))
    (steps,) = reward.compute_step_rewards([none], scores(reward)[:1])
    assert steps.tolist() == [0.0] * len(none)


class Given(Reward):
    """Gives what it was made with."""

    Config = Section
    needs_score = False

    def __init__(self, *judgements: Any) -> None:
        super().__init__(Section(), RewardResources())
        self.given = judgements

    def compute(self, trajectories: Sequence[Trajectory], scores: Sequence[float]) -> Sequence[Any]:
        return self.given


@pytest.mark.parametrize(
    ("judgements", "message"),
    [
        ([1.0], "1 rewards for 2 trajectories"),
        ([1.0, float("nan")], "sample 8 got nan"),
        ([np.zeros(3), 1.0], r"sample 7 got rewards of shape \[3\].*its 4 steps"),
        ([1.0, None], "sample 8 got None, which is no number"),
        ([1.0, "0.5"], "sample 8 got str '0.5', which is no number"),
        ([RewardResult("good"), 1.0], "sample 7 got str 'good', which is no number"),  # type: ignore[arg-type]
        ([{"score": 1.0}, 1.0], "sample 7 got dict .*, which is no number"),
        ([[0.0, [1.0], 0.0, 0.0], 1.0], r"sample 7 got list .*, which is no number"),
        ([1j, 1.0], "sample 7 got complex 1j, which is no number"),
    ],
)
def test_what_is_no_reward_is_refused_by_the_samples_name(judgements: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Given(*judgements).compute_step_rewards(trajectories(7)[:2], [])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "compute returned None; it must return a list"),
        ("ab", "compute returned str 'ab'; it must return a list"),
        ({7: 1.0, 8: 0.0}, "compute returned dict .*; it must return a list"),
        ((1.0 for _ in range(2)), "compute returned generator .*; it must return a list"),
        (1.0, "compute returned float 1.0; it must return a list"),
    ],
)
def test_what_is_no_list_of_rewards_is_refused(returned: Any, message: str) -> None:
    reward = Given()
    reward.given = returned
    with pytest.raises(InputError, match=message):
        reward.compute_step_rewards(trajectories(7)[:2], [])


@pytest.mark.parametrize(
    "number",
    [1, True, Fraction(1, 2), Decimal("0.5"), np.float16(0.5), torch.tensor(0.5), np.array(0.5)],
)
def test_whatever_is_a_number_is_a_reward(number: Any) -> None:
    found = Given(number, 0.0).compute_step_rewards(trajectories(7)[:2], [])
    assert found[0].sum() == float(number)


def test_an_error_of_a_reward_says_which_fields_there_are() -> None:
    class Broken(Given):
        def compute(
            self, trajectories: Sequence[Trajectory], scores: Sequence[float]
        ) -> Sequence[Any]:
            return [trajectory.extra["nowhere"] for trajectory in trajectories]

    with pytest.raises(KeyError) as caught:
        Broken().compute_step_rewards(trajectories(7)[:2], [])
    (note,) = caught.value.__notes__
    assert note.startswith("a trajectory has the fields identity, actions, ")
    assert "prompt_text, text, answer" in note


def test_what_could_not_be_judged_says_so_beside_its_worth() -> None:
    given = Given(RewardResult(0.0, valid=False, failure="late"), 2.0)
    first, second = given.compute_results(trajectories()[:2], [])
    assert (first.valid, first.failure, np.sum(first.reward)) == (False, "late", 0)
    assert (second.valid, second.failure, np.sum(second.reward)) == (True, "", 2)
