"""What Slurm does to the jobs of pools, and what the run makes of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launchers.slurm_launcher import SlurmLauncher
from pipeline.commands.experiment import prepare_run
from pipeline.driver import Driver
from pipeline.plan import Plan
from pipeline.pools.executor import PoolExecutor
from pipeline.resources import ClusterConfig
from rlinf.errors import InputError
from slurm.client import SlurmClient
from slurm.jobs import JOB_FILE
from stages.layout import POOLS_FOLDER
from tests.cluster.test_chaos import POOLS as PLAN
from tests.cluster.test_runs import words
from tests.pipeline.helpers import contents, run_here, start_driver, until

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.cluster


def test_a_preempted_pool_has_a_successor_at_once(cluster: Path, tmp_path: Path) -> None:
    """Were it requeued instead, the run would stand still until Slurm starts it again."""
    longer = "iterations=40"
    run_here(words(tmp_path / "reference", longer))
    path = tmp_path / "plan.yaml"
    where = {"partition": "spot", "gpus": 1, "gpu_type": "a100"}
    on_spot = [{"stages": ["rollout"], "devices": {"spot:a100": 1}}, PLAN["pools"][1]]
    path.write_text(
        yaml.safe_dump({**PLAN, "pools": on_spot, "stages": {**PLAN["stages"], "rollout": where}})
    )
    log, run = tmp_path / "log", tmp_path / "tiny"
    call = words(tmp_path, longer, "cluster=slurm", "cluster.poll_interval_s=0.2", f"plan={path}")
    driver = start_driver([*call, "cluster.max_retries=0"], log)
    try:
        until((run / "it/0002/sync/manifest.json").exists, driver, log)
        (job,) = shown("squeue", "-p", "spot", "-n", "pool-pool-0-0", "-o", "%A")
        (node,) = shown("squeue", "-j", job, "-o", "%N")
        where = ["-p", "gpu", "-w", node, "--exclusive", "-o", "/dev/null"]
        shown("sbatch", *where, "--wrap", "sleep 1")
        assert driver.wait(timeout=200) == 0, log.read_text()
    finally:
        driver.kill()
    assert contents(run) == contents(tmp_path / "reference" / "tiny")
    assert sorted(p.name for p in (run / POOLS_FOLDER / "0").glob("[0-9]*")) == ["0", "1"]
    assert shown("sacct", "-n", "-X", "-D", "-j", job, "-o", "jobid") == [job], "one life"
    # A driver that dies after the last commit leaves a pool; the next one has nothing to do.
    (left,) = shown("sbatch", "--parsable", "-p", "cpu", "-o", "/dev/null", "--wrap", "sleep 600")
    note = run / POOLS_FOLDER / "0" / "1" / JOB_FILE
    note.write_text(json.dumps({**json.loads(note.read_text()), "id": left}))
    try:
        again = start_driver(call, log)
        assert again.wait(timeout=60) == 0, log.read_text()
        assert not shown("squeue", "-j", left, "-t", "R,PD", "-o", "%A")
    finally:
        subprocess.run(["scancel", left], check=True)
    assert f"remaining from an earlier driver: job {left}" in log.read_text()


def test_a_resumed_driver_ends_the_pool_of_another_plan_and_takes_over_the_other(
    cluster: Path, tmp_path: Path
) -> None:
    """Workers have in memory what they were started with."""
    longer = "iterations=40"
    run_here(words(tmp_path / "reference", longer))
    path, log, run = tmp_path / "plan.yaml", tmp_path / "log", tmp_path / "tiny"
    path.write_text(yaml.safe_dump(PLAN))
    call = words(tmp_path, longer, "cluster=slurm", "cluster.poll_interval_s=0.2", f"plan={path}")
    driver = start_driver(call, log)
    until((run / "it/0000/sync/manifest.json").exists, driver, log)
    driver.kill()
    driver.wait()
    before = [json.loads((run / POOLS_FOLDER / n / "0" / JOB_FILE).read_text())["id"] for n in "01"]
    stages = {**PLAN["stages"], "rollout": {**PLAN["stages"]["rollout"], "mem_mb": 1100}}
    path.write_text(yaml.safe_dump({**PLAN, "stages": stages}))
    driver = start_driver(call, log)
    assert driver.wait(timeout=200) == 0, log.read_text()
    assert contents(run) == contents(tmp_path / "reference" / "tiny")
    leases = {n: sorted(p.name for p in (run / POOLS_FOLDER / n).glob("[0-9]*")) for n in "01"}
    assert leases == {"0": ["0", "1"], "1": ["0"]}
    ends = [shown("sacct", "-n", "-X", "-j", job, "-o", "end")[0] for job in before]
    assert ends[0] < ends[1], "the one at once, the other with the run"


def test_a_pool_whose_job_is_held_ends_the_run_and_stays_in_the_queue(
    cluster: Path, compose: Compose, tmp_path: Path
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(yaml.safe_dump({"defaults": {"sbatch": {"hold": True}}}))
    run = prepare_run({**compose("cluster=slurm", f"cluster.site={site}"), "plan": PLAN})
    settings = ClusterConfig(**run.config.cluster)
    launcher = SlurmLauncher(SlurmClient(poll_interval_s=0.2), hold_timeout_s=1.0)
    executor = PoolExecutor(run, launcher, Plan.from_run(run.folder), settings)
    try:
        with pytest.raises(InputError, match=r"pool 0: .*left in the queue.*JobHeldUser"):
            Driver(run, executor).drive()
        assert shown("squeue", "-t", "PENDING", "-n", "pool-pool-0-0", "-o", "%r") == [
            "JobHeldUser"
        ]
        assert not shown("squeue", "-n", "pool-pool-1-0", "-o", "%A"), "the others are cancelled"
    finally:
        subprocess.run(["scancel", "-n", "pool-pool-0-0"], check=True)


def shown(*command: str) -> list[str]:
    """The words that Slurm answers, without a header."""
    flags = ["-h"] if command[0] == "squeue" else []
    done = subprocess.run([*command, *flags], check=True, capture_output=True, text=True)
    return done.stdout.split()
