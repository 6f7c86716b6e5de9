"""One rollout on the devices of two partitions, in one run on a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pipeline.pools.generators import CLAIMS
from stages.layout import POOLS
from tests.pipeline import test_elastic as single
from tests.pipeline.helpers import run_here, same_samples, start_driver

pytestmark = pytest.mark.cluster


def test_generators_of_two_partitions_make_the_run_of_one_process(
    cluster: Path, tmp_path: Path
) -> None:
    """Each kind has a worker, and both do a part of what the trainer leaves."""
    longer = ["rollout.horizon=96", "engine.max_rows=4", "iterations=8", "retention.trajectories=8"]
    log = tmp_path / "log"
    run_here(single.words(tmp_path / "one", *longer))
    train = {"partition": "h100", "gpus": 1}
    plan = {
        "grain": "segment",
        "chunks": 2,
        "defaults": {"mem_mb": 1500},
        "stages": {"rollout": train, "reward": train, "inference": train, "train": train},
        "pools": [
            {"stages": ["rollout"], "workers": 2, "gpus": {"a100": 1, "h100": 1}},
            {
                "stages": ["reward", "inference", "train"],
                "gpus": {"h100": 1},
                "helps_rollout": True,
            },
        ],
    }
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    call = [*longer, "cluster=slurm", "cluster.poll_s=0.2", f"plan={path}"]
    single.finish(start_driver(single.words(tmp_path, *call), log), log)
    run = tmp_path / "tiny"
    same_samples(run, tmp_path / "one" / "tiny", range(8))
    lines = (run / POOLS / CLAIMS).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    hosts = {row["worker"]: row["host"].partition("-")[0] for row in rows if row["starts"]}
    assert hosts == {
        "pool-0w0-0-r0": "a100",
        "pool-0w1-0-r0": "h100",
        "pool-1-0-r0": "h100",
    }
