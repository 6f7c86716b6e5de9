"""Who has which share of the data, however processes share a model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.channels.process_group import LAYOUT_VARIABLE, ParallelLayout, ProcessGroupInfo
from rlinf.errors import ConfigError

LAYOUTS = st.builds(
    ParallelLayout, tp=st.integers(1, 4), pp=st.integers(1, 3), cp=st.integers(1, 3)
)


@given(layout=LAYOUTS, copies=st.integers(1, 5), count=st.integers(0, 20))
def test_each_share_has_one_speaker_and_all_of_a_copy_have_its_work(
    layout: ParallelLayout, copies: int, count: int
) -> None:
    size = copies * layout.model_parallel_size
    worlds = [ProcessGroupInfo(rank, size, layout=layout) for rank in range(size)]
    assert Counter(world.data_parallel_rank for world in worlds) == dict.fromkeys(
        range(copies), layout.model_parallel_size
    )
    speakers = [world for world in worlds if world.is_primary]
    assert [world.rank for world in speakers] == worlds[0].primary_ranks
    assert [world.data_parallel_rank for world in speakers] == list(range(copies))
    assert worlds[0].is_primary
    assert sorted(n for world in speakers for n in world.shard(count)) == list(range(count))
    for world in worlds:
        assert world.shard(count) == worlds[world.primary_ranks[world.data_parallel_rank]].shard(
            count
        )


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_stages_are_far() -> None:
    layout = ParallelLayout(tp=2, pp=2)
    worlds = [ProcessGroupInfo(rank, 8, layout=layout) for rank in range(8)]
    assert [world.data_parallel_rank for world in worlds] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert worlds[0].primary_ranks == [0, 2]


def test_a_copy_is_as_quick_as_its_slowest_process() -> None:
    world = ProcessGroupInfo(0, 4, speed_weights=(3.0, 1.0, 2.0, 2.0), layout=ParallelLayout(tp=2))
    assert world.data_parallel_speeds == (1.0, 2.0)
    assert [
        len(
            ProcessGroupInfo(rank, 4, speed_weights=world.speed_weights, layout=world.layout).shard(
                9
            )
        )
        for rank in range(4)
    ] == [3, 3, 6, 6]


def test_it_is_read_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ParallelLayout(tp=2, pp=3)
    assert ParallelLayout.parse(str(layout)) == layout
    assert ParallelLayout.parse("") == ParallelLayout()
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv(LAYOUT_VARIABLE, str(layout))
    assert ProcessGroupInfo.from_environment().layout == layout
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="no multiple"):
        ProcessGroupInfo.from_environment()


@pytest.mark.parametrize("text", ["tp=0", "tq=2", "tp=two"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=LAYOUT_VARIABLE):
        ParallelLayout.parse(text)


def test_experts_are_shared_by_processes_with_different_data() -> None:
    ParallelLayout(tp=2, ep=4).check(8, "here")
    with pytest.raises(ConfigError, match="ep=4 does not divide the 2 processes"):
        ParallelLayout(tp=2, ep=4).check(4, "here")
