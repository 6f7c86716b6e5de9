"""Collectives and paths by latency and bandwidth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.cost.hardware import (
    LinkModel,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    path_seconds,
)
from rlinf.errors import PlanError

links = st.builds(LinkModel, st.floats(0, 1e-3), st.floats(1e6, 1e12))
sizes = st.floats(0, 1e12, allow_subnormal=False).map(lambda size: size if size >= 1e-6 else 0.0)
"""Bytes; what is smaller than any message is none, for there floating point is coarse."""
processes = st.integers(1, 512)


def stepped_ring(link: LinkModel, count: int, size: float) -> float:
    """An all-gather piece by piece: every step each process passes one piece on."""
    return sum(link.send_seconds(size / count) for _ in range(count - 1))


@given(links, st.integers(1, 64), sizes)
def test_the_ring_is_the_sum_of_its_steps(link, count, size):
    assert all_gather_seconds(link, count, size) == pytest.approx(stepped_ring(link, count, size))
    assert all_to_all_seconds(link, count, size) == pytest.approx(stepped_ring(link, count, size))


@given(links, processes, sizes)
def test_an_all_reduce_costs_no_more_than_ring_or_tree_and_no_less_than_its_bytes(link, n, size):
    time = all_reduce_seconds(link, n, size)
    assert time <= 2 * stepped_ring(link, n, size) * (1 + 1e-9)
    assert time >= 2 * (n - 1) / n * size / link.bytes_per_s * (1 - 1e-9)


@given(links, sizes)
def test_one_process_talks_to_nobody(link, size):
    assert all_reduce_seconds(link, 1, size) == all_gather_seconds(link, 1, size) == 0


@given(links, processes, sizes, st.floats(1, 10))
def test_more_bytes_never_take_less(link, n, size, factor):
    assert all_reduce_seconds(link, n, factor * size) >= all_reduce_seconds(link, n, size) * (
        1 - 1e-12
    )


@given(st.lists(links, min_size=1, max_size=5), st.integers(1, 10**8), st.integers(1, 100))
def test_pieces_flow_like_a_pipeline_over_a_path(path, chunk, count):
    """Against the recurrence: a link takes a piece when it has it and is done with the last."""
    free = [0.0] * len(path)
    end = 0.0
    for _ in range(count):
        end = 0.0
        for i, link in enumerate(path):
            end = max(end, free[i]) + link.send_seconds(chunk)
            free[i] = end
    assert path_seconds(path, count * chunk, chunk) == pytest.approx(end)


@given(st.lists(links, min_size=1, max_size=5), sizes)
def test_a_file_is_read_when_it_is_written(path, size):
    assert path_seconds(path, size) == pytest.approx(sum(link.send_seconds(size) for link in path))


def test_impossible_links_and_empty_paths_are_refused():
    with pytest.raises(PlanError, match="bandwidths above 0"):
        LinkModel(0.0, 0.0)
    with pytest.raises(PlanError, match="at least one link"):
        path_seconds((), 1.0)
