"""What a rollout takes of the one before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.channels.record_files import RecordFileWriter
from rlinf.data.episodes import OPEN_EPISODES
from rlinf.data.record import Record, RecordId
from stages.rollout import load_open_episodes

BATCH = 8


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What two processes left open: of each sample but the fifth, an episode."""
    for rank in range(2):
        writer = RecordFileWriter(tmp_path, OPEN_EPISODES, rank)
        for sample in ProcessGroupInfo(rank, 2).shard(BATCH):
            if sample != 5:
                state = np.full(3, sample, np.uint8)
                writer.put(Record(RecordId(0, sample), context={"open_state": state}))
        writer.close()
    return tmp_path


def open_episodes_of(folder: Path, world: ProcessGroupInfo) -> Any:
    ctx: Any = SimpleNamespace(
        config=SimpleNamespace(
            task=SimpleNamespace(model_extra={"carry_over_episodes": True}),
            rollout=SimpleNamespace(batch_size=BATCH, group_size=1),
        ),
        inputs={OPEN_EPISODES: None},
        verified_folder=lambda _: folder,
        world=world,
    )
    return load_open_episodes(ctx)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_process_takes_the_episodes_of_its_own_samples(left: Path, size: int) -> None:
    found = [open_episodes_of(left, ProcessGroupInfo(rank, size)) for rank in range(size)]
    for rank, some in enumerate(found):
        assert sorted(some) == [s for s in ProcessGroupInfo(rank, size).shard(BATCH) if s != 5]
        for sample, record in some.items():
            assert record.context["open_state"].tolist() == [sample] * 3


def test_a_process_that_does_not_speak_takes_none(left: Path) -> None:
    layout = ParallelLayout(tp=2)
    assert sorted(open_episodes_of(left, ProcessGroupInfo(0, 2, layout=layout))) == [
        0,
        1,
        2,
        3,
        4,
        6,
        7,
    ]
    assert open_episodes_of(left, ProcessGroupInfo(1, 2, layout=layout)) == {}
