"""The weights of steps add up over the parts of a batch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.algorithms.losses import LossAggMode, loss_agg_weights

WIDTH = 5
MASKS = st.lists(st.lists(st.integers(0, 1), min_size=WIDTH, max_size=WIDTH), max_size=8)


@pytest.mark.parametrize("aggregation", get_args(LossAggMode))
@given(masks=MASKS, cut=st.integers(0, 8))
def test_parts_have_the_loss_of_the_whole(
    aggregation: LossAggMode, masks: list[list[int]], cut: int
) -> None:
    mask = torch.tensor(masks, dtype=torch.float64).reshape(-1, WIDTH)
    losses = torch.arange(mask.numel(), dtype=torch.float64).reshape(mask.shape) + 1
    total, divisor = 0.0, 0.0
    for part in (slice(0, cut), slice(cut, None)):
        weights, mass = loss_agg_weights(mask[part], aggregation)
        total += float((weights * losses[part]).sum())
        divisor += mass
    weights, mass = loss_agg_weights(mask, aggregation)
    assert divisor == pytest.approx(mass)
    assert total == pytest.approx(float((weights * losses).sum()))
