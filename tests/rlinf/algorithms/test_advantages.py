"""Advantages equal their definitions, written out slowly."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algorithms.advantages import generalised, group_relative, whiten


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(2, 6), st.integers(0, 1000))
def test_group_relative_is_the_standard_score_in_each_group(n: int, g: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    scores = torch.tensor(random.normal(size=n * g))
    groups = torch.tensor(random.permutation(np.repeat(np.arange(n), g)))
    got = group_relative(scores, groups)
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
    got = group_relative(scores, groups, normalise=normalise)
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
    got, returns = generalised(rewards, values, terminated, truncated, bootstrap, mask, gamma, lam)
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


def test_whitening_ignores_padding() -> None:
    values, mask = (
        torch.tensor([[1.0, 2.0, 99.0], [3.0, 4.0, 99.0]]),
        torch.tensor([[1.0, 1, 0]] * 2),
    )
    got = whiten(values, mask)
    kept = got[mask == 1]
    assert abs(float(kept.mean())) < 1e-6
    assert abs(float(kept.std()) - 1) < 1e-5
    assert torch.all(got[mask == 0] == 0)
