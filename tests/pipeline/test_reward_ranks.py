"""Rewards judged by several processes, as a model that judges would be: the same for training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import run_experiment
from pipeline.metrics import stage_manifest
from rlinf.channels.record_files import RecordFileReader
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
RANKS = {"reward": {"processes": 2}}
POOLS = {
    "stages": RANKS,
    "pools": [
        {"stages": ["rollout", "train", "inference"], "devices": {"local": 1}},
        {"stages": ["reward"], "devices": {"local": 2}},
    ],
}


def rewards(run: Path) -> dict[int, int]:
    """Digests by sample."""
    folder = run / "it/0000/reward"
    (data,) = folder.glob("data-*")
    records = RecordFileReader(data.glob("rewards-*.h5"))
    return {record.identity.sample: record.digest() for record in records}


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"stages": RANKS}, id="jobs", marks=pytest.mark.slow),
        pytest.param(POOLS, id="pools"),
    ],
)
def test_several_processes_judge_as_one_does(
    plan: dict[str, Any], tiny_run: Path, compose: Compose, tmp_path: Path
) -> None:
    values = {**compose("run.name=two", "cluster=local", "iterations=1"), "plan": plan}
    run_experiment(values)
    manifest = stage_manifest(tmp_path / "two", "reward", 0)
    assert manifest is not None
    assert manifest.world == 2
    assert rewards(tmp_path / "two") == rewards(tiny_run)
    one, two = contents(tiny_run), contents(tmp_path / "two")
    for stage in ("train", "sync"):
        assert two[f"it/0000/{stage}"] == one[f"it/0000/{stage}"]
