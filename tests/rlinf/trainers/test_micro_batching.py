"""Cuts lose no row, and bring rows together that share a prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.models.causal_lm import CausalLM
from rlinf.trainers.minibatch import MicroBatches, split_micro_batches

GROUPS = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1, max_size=8)),
    min_size=1,
    max_size=8,
)


class Shares(CausalLM):
    """Its counting of positions, without a network."""

    def __init__(self) -> None:
        self._shares_prompts = True


def records(groups: list[tuple[int, list[int]]]) -> list[Trajectory]:
    return [
        Trajectory(
            identity=RecordId(0, 0),
            actions=np.zeros(length, np.int64),
            prompt=np.full(prompt, number),
        )
        for number, (prompt, lengths) in enumerate(groups)
        for length in lengths
    ]


def size(data: list[Trajectory], rows: list[int]) -> int:
    prompts = {data[row].prompt.tobytes(): data[row].prompt for row in rows}
    return sum(map(len, prompts.values())) + sum(len(data[row]) for row in rows)


def cut_of(data: list[Trajectory], budget: int, ranks: int, lanes: int) -> list[MicroBatches]:
    speeds = [1.0] * ranks
    return [
        one
        for rank in range(ranks)
        for one in split_micro_batches(
            Shares(),
            data,
            None,
            max_tokens=budget,
            padded=False,
            speeds=speeds,
            rank=rank,
            num_threads=lanes,
        )
    ]


@settings(deadline=None)
@given(GROUPS, st.integers(20, 200), st.integers(1, 3), st.integers(1, 2))
def test_every_row_is_in_one_micro_batch_within_the_budget(
    groups: list[tuple[int, list[int]]], budget: int, ranks: int, lanes: int
) -> None:
    data = records(groups)
    cuts = cut_of(data, budget, ranks, lanes)
    batches = [
        [span.row for span in spans]
        for one in cuts
        for spans, real in zip(one.spans, one.is_real, strict=True)
        if real
    ]
    assert sorted(row for rows in batches for row in rows) == list(range(len(data)))
    if ranks == 1:
        assert all(len(rows) == 1 or size(data, rows) <= budget for rows in batches)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_one_prompt_stay_together_and_no_worker_idles(ranks: int) -> None:
    data = records([(256, [64] * 8)] * 1 + [(256, [64] * 8)] * 1)
    for one in cut_of(data, 8192, ranks, 1):
        rows = [span.row for spans in one.spans for span in spans]
        assert size(data, rows) == (2 // ranks) * (256 + 8 * 64)


def test_one_group_is_shared_out_over_two_workers() -> None:
    data = records([(64, [32] * 8)])
    for one in cut_of(data, 8192, 1, 2):
        assert sum(len(spans) for spans in one.spans) == 4
