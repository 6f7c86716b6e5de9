"""Rollouts a fixed number of updates behind: the same result in every grain, at the same time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import run_experiment
from pipeline.metrics import stage_manifest
from rlinf.channels.record_files import RecordFileReader
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]
STALE = ["rollout.staleness=1", "iterations=4", "algorithm.rollout_is_threshold=2.0"]
POOLS = {
    "pools": [
        {"stages": ["rollout"], "devices": {"local": 1}},
        {"stages": ["reward", "inference", "train"], "devices": {"local": 1}},
    ],
}


def test_stale_rollouts_go_on_during_the_update_and_give_the_same_run(
    compose: Compose, tmp_path: Path
) -> None:
    alone = compose(*STALE, "run.name=alone")
    run_experiment(alone)
    pools = compose(*STALE, "run.name=pools") | {"plan": POOLS}
    pools["cluster"] = {"launcher": "local"}
    run_experiment(pools)
    assert contents(tmp_path / "alone") == contents(tmp_path / "pools")
    early = []
    for i in range(1, 4):
        rollout = stage_manifest(tmp_path / "pools", "rollout", i)
        before = stage_manifest(tmp_path / "pools", "sync", i - 1)
        assert rollout is not None
        assert before is not None
        early.append(rollout.timing["start"] < before.timing["end"])
    # On a busy machine one may begin late for a reason of its own.
    assert any(early), "rollouts do not wait for the update just before them"


@pytest.mark.usefixtures("undrawn")
def test_samples_under_way_take_on_weights_that_were_published_meanwhile(
    compose: Compose, tmp_path: Path
) -> None:
    """The weights of the update just before are there when a rollout is made late."""
    settings = [*STALE, "rollout.in_flight_updates=true", "engine.ignore_eos=true"]
    values = compose(*settings, "run.name=late")
    run_experiment(values)
    run = tmp_path / "late"
    # Made again, after everything else: all versions up to its own are there from the start.
    shutil.rmtree(run / "it/0003/rollout")
    run_experiment(values)
    manifest = stage_manifest(run, "rollout", 3)
    assert manifest is not None
    folder = run / "it/0003/rollout" / manifest.data
    seen = [
        r.steps["versions"].tolist() for r in RecordFileReader(folder.glob("trajectories-r*.h5"))
    ]
    assert seen
    assert all(versions[0] == 2 and versions[-1] == 3 for versions in seen)
    assert all(versions == sorted(versions) for versions in seen)
    assert 0 < manifest.metrics["staleness_mean"] < 1


def test_samples_take_on_weights_while_another_pool_trains(
    compose: Compose, tmp_path: Path
) -> None:
    settings = [*STALE, "rollout.in_flight_updates=true", "engine.ignore_eos=true"]
    # Training is over long before the next rollout is.
    settings += ["rollout.horizon=64", "engine.max_num_seqs=2", "evaluate.every=0"]
    pools = compose(*settings, "run.name=live") | {"plan": POOLS}
    pools["cluster"] = {"launcher": "local"}
    run_experiment(pools)
    changed = 0
    for i in range(4):
        manifest = stage_manifest(tmp_path / "live", "rollout", i)
        assert manifest is not None
        folder = tmp_path / "live" / f"it/{i:04d}/rollout" / manifest.data
        for record in RecordFileReader(folder.glob("trajectories-r*.h5")):
            versions = record.steps["versions"].tolist()
            assert versions == sorted(versions)
            assert {max(i - 1, 0), i} >= set(versions), "no older than staleness allows"
            changed += len(set(versions)) > 1
    assert changed, "some samples have tokens of two versions"


def test_newer_weights_are_refused_where_there_can_be_none(compose: Compose) -> None:
    with pytest.raises(ConfigError, match="in_flight_updates: there are no newer weights"):
        validate(RunConfig, compose("rollout.in_flight_updates=true"))
