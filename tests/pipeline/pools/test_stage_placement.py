"""Which positions stages have in their pools, and in how many chunks they go through a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.graph import StageNode
from tests.pipeline.pools.helpers import HELD, STAGES, Pools, checked

SIDE_BY_SIDE = {"rollout": [0], "reward": [1]}


@pytest.mark.parametrize(
    ("pools", "late", "chunks"),
    [
        # All take turns on all devices: chunk by chunk.
        ([{"stages": HELD, "devices": {"local": 2}}], {"sync"}, [4, 4, 4, 4]),
        # The rollout has a pool to itself: the engine gets the whole batch.
        (
            [
                {"stages": HELD[:1], "devices": {"local": 1}},
                {"stages": HELD[1:], "devices": {"local": 1}},
            ],
            {"sync"},
            [1, 4, 4, 4],
        ),
        # Side by side: a stage with all processes comes after, or the next chunk would wait for it.
        (
            [{"stages": HELD, "devices": {"local": 2}, "stage_ranks": SIDE_BY_SIDE}],
            {"inference", "train", "sync"},
            [1, 4, 4, 4],
        ),
        # A stage that waits for such a one in another pool comes late there too.
        (
            [
                {"stages": HELD[:3], "devices": {"local": 2}, "stage_ranks": SIDE_BY_SIDE},
                {"stages": HELD[3:], "devices": {"local": 1}},
            ],
            {"inference", "train", "sync"},
            [1, 4, 4, 4],
        ),
        # An evaluation on some ranks waits for the rollout, and holds nothing up.
        (
            [{"stages": HELD, "devices": {"local": 2}, "stage_ranks": {"evaluate": [1]}}],
            {"sync"},
            [4, 4, 4, 4],
        ),
    ],
)
def test_stages_with_all_processes_come_after_those_side_by_side(
    pools: list[dict[str, Any]],
    late: set[str],
    chunks: list[int],
    compose: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    sizes = {stage: sum(p["devices"].values()) for p in pools for stage in p["stages"]}
    needs = {s: {"processes": sizes[s]} for s in ("rollout", "inference", "train")}
    plan = {"num_chunks": 4, "stages": needs, "pools": pools}
    values = compose("cluster=local", "rollout.batch_size=8")
    placement = Pools(*checked(values, plan), tmp_path).placement
    positions = {stage: placement.position(StageNode(stage, 3)) for stage in STAGES}
    assert {stage for stage, (_, chunk, _) in positions.items() if chunk} == late
    assert [placement.num_chunks(stage) for stage in HELD] == chunks
