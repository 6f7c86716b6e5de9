"""Advantages equal their definitions, written out slowly."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algorithms import algorithms
from rlinf.algorithms.advantages import (
    compute_gae,
    group_means,
    group_relative_advantages,
    masked_whiten,
)
from rlinf.algorithms.group_relative import GRPO, GRPOConfig
from rlinf.data.batch import StepBatch
from tests.contracts.test_algorithm import batch_of


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(2, 6), st.integers(0, 1000))
def test_group_relative_is_the_standard_score_in_each_group(n: int, g: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    scores = torch.tensor(random.normal(size=n * g))
    groups = torch.tensor(random.permutation(np.repeat(np.arange(n), g)))
    got = group_relative_advantages(scores, groups)
    for group in range(n):
        mine = scores[groups == group]
        want = (mine - mine.mean()) / (mine.std() + 1e-6)
        torch.testing.assert_close(got[groups == group], want)


@settings(deadline=None)
@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9), st.booleans())
def test_a_group_of_equal_scores_has_no_signal(score: float, size: int, normalise: bool) -> None:
    """Also where their mean, rounded, is not one of them."""
    scores = torch.tensor([score] * size + [1.0, 3.0])
    groups = torch.tensor([4] * size + [9, 9])
    got = group_relative_advantages(scores, groups, norm_by_std=normalise)
    assert torch.all(got[:size] == 0)
    assert torch.all(got[size:] != 0)


@settings(deadline=None)
@given(st.integers(0, 500), st.floats(0.5, 1), st.floats(0, 1))
def test_generalised_equals_the_sum_of_discounted_errors(
    seed: int, gamma: float, lam: float
) -> None:
    random = np.random.default_rng(seed)
    n, t = 3, 7
    rewards, values, bootstrap = (torch.tensor(random.normal(size=(n, t))) for _ in range(3))
    terminated = torch.tensor((random.random((n, t)) < 0.2).astype(float))
    truncated = torch.tensor((random.random((n, t)) < 0.2).astype(float)) * (1 - terminated)
    lengths = random.integers(1, t + 1, size=n)
    mask = torch.tensor((np.arange(t) < lengths[:, None]).astype(float))
    # Padding is zero: flags and values of states behind the last step that counts are its own.
    terminated, truncated, bootstrap = terminated * mask, truncated * mask, bootstrap * mask
    got, returns = compute_gae(rewards, values, terminated, truncated, bootstrap, mask, gamma, lam)
    for i in range(n):
        last = int(lengths[i]) - 1
        for start in range(last + 1):
            total, factor = 0.0, 1.0
            for k in range(start, last + 1):
                cut = bool(terminated[i, k] or truncated[i, k]) or k == last
                following = bootstrap[i, k] if cut else values[i, k + 1]
                following = following * (1 - terminated[i, k])
                total += factor * float(rewards[i, k] + gamma * following - values[i, k])
                if cut:
                    break
                factor *= gamma * lam
            assert abs(float(got[i, start]) - total) < 1e-9
    torch.testing.assert_close(returns, (got + values) * mask)
    assert torch.all(got[mask == 0] == 0)


@given(st.integers(0, 500), st.floats(0.5, 1), st.floats(0, 1))
def test_steps_that_do_not_count_take_no_time(seed: int, gamma: float, lam: float) -> None:
    """As if they were not there: what a tool says stands between two choices, or behind the last.

    An episode may end on one of them, and be cut off there.
    """
    random = np.random.default_rng(seed)
    t = 5
    rewards, values = random.normal(size=(2, t))
    terminated, truncated, bootstrap = np.zeros((3, t))
    for at in range(t):
        how = random.integers(4) if at + 1 < t else random.integers(1, 4)
        terminated[at], truncated[at] = how == 1, how == 2
        bootstrap[at] = random.normal() if how == 2 or (how == 3 and at + 1 == t) else 0.0
    given = [rewards, values, terminated, truncated, bootstrap]
    want, _ = compute_gae(*(torch.tensor(c)[None] for c in given), torch.ones(1, t), gamma, lam)

    # Behind each step up to two that do not count; how an episode ends is said on the last of them.
    wide: list[list[float]] = [[] for _ in given]
    mask: list[float] = []
    for at in range(t):
        gap = int(random.integers(3))
        mask += [1.0] + [0.0] * gap
        for number, column in enumerate(wide):
            put = [given[number][at]]
            fill = [float(random.normal()) if number == 1 else 0.0] * gap
            column.extend([*fill, *put] if number >= 2 else [*put, *fill])
    got, _ = compute_gae(
        *(torch.tensor(c, dtype=torch.float64)[None] for c in wide),
        torch.tensor(mask, dtype=torch.float64)[None],
        gamma,
        lam,
    )
    counts = torch.tensor(mask) != 0
    torch.testing.assert_close(got[:, counts], want)
    assert not got[:, ~counts].any()


@given(st.integers(0, 500), st.integers(1, 4), st.floats(0.5, 1), st.floats(0, 1), st.booleans())
def test_actions_of_chunks_are_as_if_each_were_a_step(
    seed: int, length: int, gamma: float, lam: float, open_: bool
) -> None:
    """What was carried out of each chunk, one action after another; against the sum of discounted
    errors over that list (arXiv 1506.02438, eq. 16)."""
    random = np.random.default_rng(seed)
    n, t = 3, 5
    rewards, values = random.normal(size=(2, n, t, length))
    done = np.full((n, t), length)
    terminated, truncated, bootstrap = np.zeros((3, n, t))
    steps = random.integers(1, t + 1, n)
    for row, count in enumerate(steps):
        for at in range(count):
            last = at + 1 == count
            how = random.integers(3) if not last or open_ else random.integers(1, 3)
            terminated[row, at], truncated[row, at] = how == 1, how == 2
            if how:
                done[row, at] = random.integers(1, length + 1)
            if how == 2 or (last and how == 0):
                bootstrap[row, at] = random.normal()
    counts = np.arange(length) < done[..., None]
    counts &= (np.arange(t) < steps[:, None])[..., None]
    rewards *= counts
    given = [rewards, values, terminated, truncated, bootstrap, counts.astype(float)]
    got, returns = compute_gae(*map(torch.tensor, given), gamma, lam)
    assert got.shape == returns.shape == rewards.shape

    for row in range(n):
        places = list(zip(*np.nonzero(counts[row]), strict=True))
        for first, begin in enumerate(places):
            total, factor = 0.0, 1.0
            for number, (at, action) in enumerate(places[first:], first):
                end = action + 1 == done[row, at]
                ends = end and (terminated[row, at] or truncated[row, at])
                final = number + 1 == len(places)
                ahead = bootstrap[row, at] if ends or final else values[row][places[number + 1]]
                ahead = 0.0 if end and terminated[row, at] else ahead
                error = rewards[row, at, action] + gamma * ahead - values[row, at, action]
                total += factor * error
                if ends:
                    break
                factor *= gamma * lam
            assert abs(float(got[(row, *begin)]) - total) < 1e-9
    torch.testing.assert_close(returns, (got + torch.tensor(values)) * torch.tensor(counts))
    assert not got[torch.tensor(~counts)].any()
    if length == 1:
        flat = [column[..., 0] if column.ndim > 2 else column for column in given]
        same, _ = compute_gae(*map(torch.tensor, flat), gamma, lam)
        torch.testing.assert_close(got[..., 0], same)


@given(
    st.floats(-1e3, 1e3, width=32),
    st.lists(st.integers(0, 5), min_size=1, max_size=9),
    st.integers(1, 3),
)
def test_equal_rewards_teach_nothing_whatever_is_made_of_them(
    score: float, lengths: list[int], size: int
) -> None:
    """Also where their mean, rounded, is not one of them; also where no step counts at all."""
    lengths = [length for length in lengths for _ in range(size)]
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).float()
    last = mask * (mask.cumsum(1) == torch.tensor(lengths)[:, None])
    zeros, groups = torch.zeros_like(mask), torch.arange(len(lengths)) // size
    batch = StepBatch(
        mask=mask,
        rewards=score * last,
        groups=groups,
        old_logprobs=zeros,
        terminated=last,
        truncated=zeros,
        bootstrap_values=zeros,
    )
    assert not masked_whiten(score * mask, mask).any()
    counted = mask.any(1)
    assert torch.equal(
        group_means(batch.rewards.sum(-1), groups)[counted], batch.rewards.sum(-1)[counted]
    )
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "grpo"):
        cls = algorithms.get(name)
        found = cls(cls.Config(whiten_advantages=True)).with_advantages(batch).require("advantages")
        assert not found.any(), name


def test_whitening_is_a_setting_of_every_algorithm_and_done_in_one_place() -> None:
    batch = batch_of(5)
    for name in ("grpo", "rloo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        cls = algorithms.get(name)
        plain = cls(cls.Config(whiten_advantages=False))
        advantages, returns = plain.compute_advantages(batch)
        raw, white = (
            plain.with_advantages(batch),
            cls(cls.Config(whiten_advantages=True)).with_advantages(batch),
        )
        assert torch.equal(raw.require("advantages"), advantages)
        assert torch.equal(white.require("advantages"), masked_whiten(advantages, batch.mask))
        if returns is not None:
            assert torch.equal(white.require("returns"), returns)
    # What is made of the whole batch cannot begin with a part of it.
    assert GRPO(GRPOConfig()).supports_streaming
    assert not GRPO(GRPOConfig(whiten_advantages=True)).supports_streaming


def test_whitening_ignores_padding() -> None:
    values, mask = (
        torch.tensor([[1.0, 2.0, 99.0], [3.0, 4.0, 99.0]]),
        torch.tensor([[1.0, 1, 0]] * 2),
    )
    got = masked_whiten(values, mask)
    kept = got[mask == 1]
    assert abs(float(kept.mean())) < 1e-6
    assert abs(float(kept.std()) - 1) < 1e-5
    assert torch.all(got[mask == 0] == 0)
