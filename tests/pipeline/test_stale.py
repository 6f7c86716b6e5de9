"""Rollouts a fixed number of updates behind: the same result in every grain, at the same time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.experiment import execute
from pipeline.metrics import manifest_of
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]
STALE = ["rollout.staleness=1", "iterations=4", "algorithm.behaviour_weight_cap=2.0"]
POOLS = {
    "grain": "segment",
    "pools": [
        {"stages": ["rollout"], "gpus": {"local": 1}},
        {"stages": ["reward", "inference", "train"], "gpus": {"local": 1}},
    ],
}


def test_stale_rollouts_go_on_during_the_update_and_give_the_same_run(
    compose: Compose, tmp_path: Path
) -> None:
    alone = compose(*STALE, "run.name=alone")
    execute(alone)
    pools = compose(*STALE, "run.name=pools") | {"plan": POOLS}
    pools["cluster"] = {"launcher": "local"}
    execute(pools)
    assert contents(tmp_path / "alone") == contents(tmp_path / "pools")
    versions = []
    for i in range(4):
        manifest = manifest_of(tmp_path / "pools", "rollout", i)
        assert manifest is not None
        sync = manifest_of(tmp_path / "pools", "sync", i - 1) if i else None
        versions.append(sync is None or manifest.timing["start"] < sync.timing["end"])
    assert all(versions), "no rollout waits for the update just before it"
