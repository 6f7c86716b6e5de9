"""Who has which share of the data, however processes share a model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.channels.world import LAYOUT, ParallelLayout, World
from rlinf.errors import ConfigError

LAYOUTS = st.builds(
    ParallelLayout, tp=st.integers(1, 4), pp=st.integers(1, 3), cp=st.integers(1, 3)
)


@given(layout=LAYOUTS, copies=st.integers(1, 5), count=st.integers(0, 20))
def test_each_share_has_one_speaker_and_all_of_a_copy_have_its_work(
    layout: ParallelLayout, copies: int, count: int
) -> None:
    size = copies * layout.ranks
    worlds = [World(rank, size, layout=layout) for rank in range(size)]
    assert Counter(world.data_rank for world in worlds) == dict.fromkeys(
        range(copies), layout.ranks
    )
    speakers = [world for world in worlds if world.speaks]
    assert [world.rank for world in speakers] == worlds[0].speakers
    assert [world.data_rank for world in speakers] == list(range(copies))
    assert worlds[0].speaks
    assert sorted(n for world in speakers for n in world.mine(count)) == list(range(count))
    for world in worlds:
        assert world.mine(count) == worlds[world.speakers[world.data_rank]].mine(count)


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_stages_are_far() -> None:
    layout = ParallelLayout(tp=2, pp=2)
    worlds = [World(rank, 8, layout=layout) for rank in range(8)]
    assert [world.data_rank for world in worlds] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert worlds[0].speakers == [0, 2]


def test_a_copy_is_as_quick_as_its_slowest_process() -> None:
    world = World(0, 4, shares=(3.0, 1.0, 2.0, 2.0), layout=ParallelLayout(tp=2))
    assert world.speeds == (1.0, 2.0)
    assert [
        len(World(rank, 4, shares=world.shares, layout=world.layout).mine(9)) for rank in range(4)
    ] == [3, 3, 6, 6]


def test_it_is_read_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ParallelLayout(tp=2, pp=3)
    assert ParallelLayout.parse(str(layout)) == layout
    assert ParallelLayout.parse("") == ParallelLayout()
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv(LAYOUT, str(layout))
    assert World.from_environment().layout == layout
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="no multiple"):
        World.from_environment()


@pytest.mark.parametrize("text", ["tp=0", "tq=2", "tp=two"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=LAYOUT):
        ParallelLayout.parse(text)


def test_experts_are_shared_by_processes_with_different_data() -> None:
    ParallelLayout(tp=2, ep=4).check(8, "here")
    with pytest.raises(ConfigError, match="ep=4 does not divide the 2 processes"):
        ParallelLayout(tp=2, ep=4).check(4, "here")
