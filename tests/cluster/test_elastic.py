"""One rollout on the devices of two partitions, in one run on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.pipeline import test_elastic as single
from tests.pipeline.helpers import run_here, same_samples, start_driver, until

pytestmark = pytest.mark.cluster


def test_generators_of_two_partitions_make_the_run_of_one_process(
    cluster: Path, tmp_path: Path
) -> None:
    """Each kind has a worker, and both do a part of what the trainer leaves."""
    longer = ["rollout.horizon=96", "engine.max_num_seqs=4", "checkpoint.keep_trajectories=500"]
    longer += ["optimizer.lr_decay_iterations=500"]  # however many iterations there are
    log, run = tmp_path / "log", tmp_path / "tiny"
    train = {"partition": "h100", "gpus": 1}
    plan = {
        "num_chunks": 2,
        "defaults": {"mem_mb": 1500},
        "stages": {"rollout": train, "reward": train, "inference": train, "train": train},
        "pools": [
            {"stages": ["rollout"], "workers": 2, "devices": {"a100": 1, "h100": 1}},
            {
                "stages": ["reward", "inference", "train"],
                "devices": {"h100": 1},
                "also_generates": True,
            },
        ],
    }
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    call = [*longer, "cluster=slurm", "cluster.poll_interval_s=0.2", f"plan={path}"]
    # The cluster decides when a worker comes: the run goes on until each has had a part.
    driver = start_driver(single.words(tmp_path, *call, "iterations=500"), log)
    until(lambda: len(hosts(run)) == 3, driver, log)
    driver.terminate()
    driver.wait(timeout=60)
    count = f"iterations={1 + max(int(row['node'].partition('/')[2]) for row in single.rows(run))}"
    single.finish(start_driver(single.words(tmp_path, *call, count), log), log)
    run_here(single.words(tmp_path / "one", *longer, count))
    same_samples(run, tmp_path / "one" / "tiny", range(int(count.partition("=")[2])))
    assert hosts(run) == {
        "pool-0w0-0-r0": "a100",
        "pool-0w1-0-r0": "h100",
        "pool-1-0-r0": "h100",
    }


def hosts(run: Path) -> dict[str, str]:
    """Kind of node of each worker that generated samples."""
    return {r["worker"]: r["host"].partition("-")[0] for r in single.rows(run) if r["starts"]}
