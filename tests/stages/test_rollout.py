"""What a rollout takes of the one before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf.channels.file import FileWriter
from rlinf.channels.world import ParallelLayout, World
from rlinf.data.left_open import OPEN
from rlinf.data.record import Identity, Record
from stages.rollout import left_by_last

BATCH = 8


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What two processes left open: of each sample but the fifth, an episode."""
    for rank in range(2):
        writer = FileWriter(tmp_path, OPEN, rank)
        for sample in World(rank, 2).mine(BATCH):
            if sample != 5:
                state = np.full(3, sample, np.uint8)
                writer.put(Record(Identity(0, sample), context={"open_state": state}))
        writer.close()
    return tmp_path


def taken(folder: Path, world: World) -> Any:
    ctx: Any = SimpleNamespace(
        config=SimpleNamespace(
            task=SimpleNamespace(model_extra={"continues": True}),
            rollout=SimpleNamespace(batch=BATCH, group_size=1),
        ),
        inputs={OPEN: None},
        verified=lambda _: folder,
        world=world,
    )
    return left_by_last(ctx)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_process_takes_the_episodes_of_its_own_samples(left: Path, size: int) -> None:
    found = [taken(left, World(rank, size)) for rank in range(size)]
    for rank, some in enumerate(found):
        assert sorted(some) == [s for s in World(rank, size).mine(BATCH) if s != 5]
        for sample, record in some.items():
            assert record.context["open_state"].tolist() == [sample] * 3


def test_a_process_that_does_not_speak_takes_none(left: Path) -> None:
    layout = ParallelLayout(tp=2)
    assert sorted(taken(left, World(0, 2, layout=layout))) == [0, 1, 2, 3, 4, 6, 7]
    assert taken(left, World(1, 2, layout=layout)) == {}
