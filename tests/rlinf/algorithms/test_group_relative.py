"""What algorithms that judge by groups share: which of them take part, and what is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.validate_config import validate_config
from rlinf.algorithms import algorithms
from rlinf.algorithms.advantages import (
    group_relative_advantages,
    leave_one_out_advantages,
    turn_level_advantages,
)
from rlinf.algorithms.group_relative import (
    GRPO,
    RLOO,
    GroupFilterConfig,
    GRPOConfig,
    RLOOConfig,
    select_groups,
)
from rlinf.config import RunConfig, validate
from rlinf.data.batch import StepBatch, build_step_batch
from rlinf.errors import ConfigError
from tests.contracts.test_algorithm import Update, alike, batch_of, seeds

Compose = Callable[..., dict[str, Any]]
BY_GROUP = ("grpo", "dapo", "rloo", "reinforce_plus_plus_baseline")
SCORES = np.array([0.0, 1, 1, 1, 0, 0, 1, 0])
GROUPS = np.array([7, 7, 3, 3, 9, 9, 7, 7])
bounds = st.one_of(st.none(), st.floats(-1, 1))


def slow(
    scores: list[float], groups: list[int], drop: bool, low: float | None, high: float | None
) -> list[bool]:
    found = []
    for group in groups:
        mine = [s for s, g in zip(scores, groups, strict=True) if g == group]
        mean = sum(mine) / len(mine)
        fits = (low is None or mean >= low) and (high is None or mean <= high)
        found.append(fits and not (drop and min(mine) == max(mine)))
    return found


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(0, 4)), max_size=20),
    st.booleans(),
    bounds,
    bounds,
    st.randoms(use_true_random=False),
)
def test_groups_are_kept_whole_by_what_their_scores_are(
    rows: list[tuple[float, int]], drop: bool, low: float | None, high: float | None, random: Any
) -> None:
    scores, groups = [score for score, _ in rows], [group for _, group in rows]
    settings: dict[str, Any] = {"filter_zero_variance": drop, "min_reward": low, "max_reward": high}
    kept = select_groups(np.array(scores), np.array(groups, int), **settings)
    assert kept.dtype == bool
    assert kept.tolist() == slow(scores, groups, drop, low, high)
    order = list(range(len(rows)))
    random.shuffle(order)
    moved = select_groups(
        np.array([scores[i] for i in order]), np.array([groups[i] for i in order], int), **settings
    )
    assert moved.tolist() == [kept[i] for i in order]


@pytest.mark.parametrize("name", BY_GROUP)
@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"filter_zero_variance_groups": False}, {3, 7, 9}),
        ({"filter_zero_variance_groups": True}, {7}),
        ({"filter_zero_variance_groups": False, "min_group_reward": 0.5}, {3, 7}),
        ({"filter_zero_variance_groups": False, "max_group_reward": 0.5}, {7, 9}),
        (
            {
                "filter_zero_variance_groups": False,
                "min_group_reward": 0.1,
                "max_group_reward": 0.9,
            },
            {7},
        ),
        ({"filter_zero_variance_groups": True, "max_group_reward": 0.4}, set()),
    ],
)
def test_every_algorithm_of_groups_has_the_same_filters(
    name: str, settings: dict[str, Any], groups: set[int]
) -> None:
    cls = algorithms.get(name)
    kept = cls(cls.Config(**settings)).select_samples(SCORES, GROUPS)
    assert kept.tolist() == np.isin(GROUPS, list(groups)).tolist()


def test_bounds_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"min_group_reward 0\.9 is above max_group_reward 0\.1"):
        GroupFilterConfig(min_group_reward=0.9, max_group_reward=0.1)


def dialogues(seed: int) -> StepBatch:
    """Samples of unlike lengths and unlike numbers of turns; rewards anywhere in them."""
    batch = batch_of(seed)
    random = np.random.default_rng(seed)
    turns = np.cumsum(random.random(batch.mask.shape) < 0.4, axis=1)
    # From the first step that counts on, so that each has a turn 0.
    turns -= turns[np.arange(len(turns)), batch.mask.argmax(1)][:, None]
    rewards = torch.tensor(random.integers(-2, 3, batch.mask.shape), dtype=torch.float32)
    return replace(
        batch, turns=torch.tensor(turns, dtype=torch.float32), rewards=rewards * batch.mask
    )


def turns_slowly(batch: StepBatch, normalise: bool) -> list[list[float]]:
    """For each step of each sample, from the formula."""
    turns, mask, rewards = batch.require("turns"), batch.mask, batch.rewards

    def to_go(sample: int, turn: float) -> float | None:
        """What came from a turn on; None: the sample has no such turn."""
        mine = [t for t in range(mask.shape[1]) if mask[sample, t]]
        if turn not in [float(turns[sample, t]) for t in mine]:
            return None
        return sum(float(rewards[sample, t]) for t in mine if turns[sample, t] >= turn)

    found = []
    for sample in range(len(batch)):
        row = []
        for t in range(mask.shape[1]):
            own = to_go(sample, float(turns[sample, t])) if mask[sample, t] else None
            if own is None:
                row.append(0.0)
                continue
            others = [i for i in range(len(batch)) if batch.groups[i] == batch.groups[sample]]
            came = [to_go(i, float(turns[sample, t])) for i in others]
            values = torch.tensor([value for value in came if value is not None])
            gain = own - float(values.mean())
            if normalise:
                gain /= float(values.std()) + 1e-6 if len(values) > 1 else 1.0
            row.append(gain)
        found.append(row)
    return found


@given(seed=seeds, normalise=st.booleans())
def test_a_turn_is_compared_with_the_same_turn_of_its_group(seed: int, normalise: bool) -> None:
    batch = dialogues(seed)
    algorithm = GRPO(GRPOConfig(advantage_level="turn", norm_adv_by_std=normalise))
    found, none = algorithm.compute_advantages(batch)
    assert none is None
    want = torch.tensor(turns_slowly(batch, normalise))
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)


@given(seed=seeds, more=st.integers(0, 3))
def test_turns_do_not_depend_on_padding_order_or_other_groups(seed: int, more: int) -> None:
    batch = dialogues(seed)
    algorithm = RLOO(RLOOConfig(advantage_level="turn"))
    whole, _ = algorithm.compute_advantages(batch)
    order = np.random.default_rng(seed).permutation(len(batch)).tolist()
    columns = ("mask", "rewards", "turns")
    padded = {
        name: torch.nn.functional.pad(batch.require(name)[order], (0, more)) for name in columns
    }
    moved, _ = algorithm.compute_advantages(replace(batch, groups=batch.groups[order], **padded))
    torch.testing.assert_close(moved[:, : whole.shape[1]], whole[order])
    assert not moved[:, whole.shape[1] :].any()
    for group in batch.groups.unique():
        mine = batch.groups == group
        part = {name: batch.require(name)[mine] for name in (*columns, "groups")}
        alone, _ = algorithm.compute_advantages(replace(batch, **part))
        torch.testing.assert_close(alone, whole[mine])


@given(seed=seeds)
def test_samples_of_one_turn_have_the_advantages_of_trajectories(seed: int) -> None:
    batch = batch_of(seed)
    one = replace(batch, turns=torch.zeros_like(batch.mask))
    for cls in (GRPO, RLOO):
        by_sample, _ = cls(cls.Config()).compute_advantages(batch)
        found, _ = cls(cls.Config(advantage_level="turn")).compute_advantages(one)
        torch.testing.assert_close(found, by_sample, atol=1e-5, rtol=1e-4)


def test_an_outcome_that_comes_a_turn_later_is_worth_no_less() -> None:
    """Two right answers after one search, one after two, and one that is wrong after one."""
    turns = torch.tensor([[0.0, 1, 0], [0, 1, 2], [0, 1, 0], [0, 1, 0]])
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0]])
    rewards = torch.tensor([[0.0, 1, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0]])
    groups = torch.zeros(4, dtype=torch.int64)
    found = turn_level_advantages(rewards, mask, turns, groups, leave_one_out_advantages)
    third = 1 / 3
    want = [[third, third, 0], [third, third, 0], [third, third, 0], [-1, -1, 0]]
    torch.testing.assert_close(found, torch.tensor(want))
    # What a search itself was worth is its own turn's alone.
    rewards[3, 0] = 1.0
    found = turn_level_advantages(rewards, mask, turns, groups, leave_one_out_advantages)
    assert not found[:, 0].any()
    assert found[:, 1].tolist() == pytest.approx([third, third, third, -1])


def test_turns_of_which_none_counts_have_no_advantage() -> None:
    zeros = torch.zeros(2, 3)
    for relative in (group_relative_advantages, leave_one_out_advantages):
        found = turn_level_advantages(zeros, zeros, zeros, torch.tensor([0, 0]), relative)
        assert torch.equal(found, zeros)


def test_an_update_by_turns_follows_from_the_samples_alone(tmp_path: Path) -> None:
    """In parts, as they arrive, it is the same to rounding; by trajectories it is another one."""
    update = Update("grpo", tmp_path, advantage_level="turn")
    for sample in update.samples:
        count = len(sample.trajectory)
        sample.trajectory.turns = np.arange(count, dtype=np.int32) // 2
    turns = build_step_batch(update.samples).require("turns")
    assert turns[0, : len(update.samples[0].trajectory)].tolist() == [
        step // 2 for step in range(len(update.samples[0].trajectory))
    ]
    whole = update.weights([update.samples])
    parts = [update.samples[:4], update.samples[4:8], update.samples[8:]]
    alike(whole, update.weights(parts), 1e-2 / 50)
    update.algorithm = GRPO(GRPOConfig())
    other = update.weights([update.samples])
    assert any(not torch.equal(other[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (
            ["task.name=calculator", "task.digits=1"],
            r"advantage_level: .*'score' gives one number",
        ),
        ([], r"advantage_level: turn is for dialogues, but task 'arithmetic'"),
    ],
)
def test_turns_without_rewards_of_their_own_are_refused(
    words: list[str], match: str, compose: Compose
) -> None:
    made = compose(*words, "algorithm.advantage_level=turn")
    for key in ("operations", "least_significant_first", "rambling_fraction"):
        if words:
            made["task"].pop(key, None)
    with pytest.raises(ConfigError, match=match):
        validate_config(validate(RunConfig, made))
