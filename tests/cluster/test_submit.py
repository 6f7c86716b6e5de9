"""The driver as a job: killed, requeued, stopped, it goes on, and so do its pools without it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from pipeline.run import Run
from pipeline.run_control import last_driver_job_id
from rlinf import package_paths
from tests.cluster.helpers import wait_until
from tests.cluster.test_chaos import POOLS as PLAN
from tests.cluster.test_pools import shown
from tests.cluster.test_runs import words
from tests.pipeline.helpers import contents, run_here, start_driver, until

pytestmark = pytest.mark.cluster
ON_SPOT = {**PLAN["stages"], "rollout": {"partition": "spot", "gpus": 1, "gpu_type": "a100"}}
LONGER = "iterations=64"
"""More than pools do while the commands of the test start."""


def rlinf(*command: str, code: int = 0) -> str:
    """What a command says; its process and session end with it."""
    done = subprocess.run(
        [sys.executable, "-m", "rlinf", *command],
        cwd=package_paths.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def call(root: Path, *more: str) -> list[str]:
    path = root / "plan.yaml"
    path.write_text(yaml.safe_dump({**PLAN, "stages": ON_SPOT}))
    return words(root, "cluster=slurm", "cluster.poll_interval_s=0.2", f"plan={path}", *more)


def queued(run: Path) -> set[str]:
    """Ids of the run's jobs that wait or run."""
    jobs = shown("squeue", "-t", "PENDING,RUNNING", "-o", "%A")
    return {job for job in jobs if str(run) in " ".join(shown("scontrol", "show", "job", job))}


def mailed() -> list[str]:
    """What Slurm had its mail program send, one line each: subject and address."""
    config = " ".join(shown("scontrol", "show", "config"))
    path = Path(re.search(r"MailProg\s*=\s*(\S+)", config)[1])  # type: ignore[index]
    log = path.parents[1] / "log" / "mail.log"
    return log.read_text().splitlines() if log.exists() else []


def iteration(run: Path, number: int) -> None:
    wait_until(run / f"it/{number:04d}/sync/manifest.json", 150)


@pytest.mark.timeout(600)
def test_a_submitted_run_ends_as_the_undisturbed_one(cluster: Path, tmp_path: Path) -> None:
    """The driver is killed, requeued and killed, a pool preempted meanwhile, and all is stopped."""
    tell = tmp_path / "tell"
    tell.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n')
    tell.chmod(0o700)
    run = tmp_path / "tiny"
    rlinf(
        "submit", *call(tmp_path, LONGER, f"cluster.notify_command=[{tell}]"), "--partition", "cpu"
    )
    job = str(last_driver_job_id(Run.open(run)))
    strikes = [["scancel", "-s", "KILL", f"{job}.0"], ["scontrol", "requeue", job]]
    for number, strike in [(2, strikes[0]), (7, strikes[1]), (12, strikes[0])]:
        iteration(run, number)
        subprocess.run(strike, check=True)
        if number == 7:
            (node,) = shown("squeue", "-p", "spot", "-t", "RUNNING", "-o", "%N")
            where = ["-p", "gpu", "-w", node, "--exclusive", "-o", "/dev/null"]
            shown("sbatch", *where, "--wrap", "sleep 1")
    assert "another" not in rlinf("status", str(run))
    assert f"job {job}" in rlinf("resume", str(run), code=65)
    iteration(run, 17)
    assert f"job {job} (driver) cancelled" in rlinf("stop", str(run))
    assert not queued(run)
    values = tmp_path / "told"
    assert not values.exists(), f"who stops a run knows that it ended: {values.read_text()}"
    rlinf("submit", str(run), "--partition", "cpu", "--mail", "owner@example.org")
    run_here(words(tmp_path / "reference", LONGER))
    wait_until(tmp_path / "told", 150)
    assert (tmp_path / "told").read_text() == "tiny finished\n"
    assert contents(run) == contents(tmp_path / "reference" / "tiny")
    assert (run / "report" / "report.html").exists()
    last = str(last_driver_job_id(Run.open(run)))
    deadline = time.monotonic() + 60
    while not (mails := [line for line in mailed() if f"Job_id={last} " in line]):
        assert time.monotonic() < deadline, mailed()
        time.sleep(0.5)
    assert len(mails) == 1, mails
    assert "Ended" in mails[0], mails
    assert mails[0].endswith("owner@example.org")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_driver_at_the_end_of_its_time_is_requeued_and_goes_on(
    cluster: Path, tmp_path: Path
) -> None:
    """A minute is the shortest limit of a job; its second life finds its pools as they were."""
    run = tmp_path / "tiny"
    rlinf(
        "submit", *call(tmp_path, "iterations=400"), "--partition", "cpu", "--time-limit-min", "1"
    )
    job = str(last_driver_job_id(Run.open(run)))
    iteration(run, 2)
    leases = sorted((run / "pools").glob("*/*/job.json"))
    deadline = time.monotonic() + 120
    while "Restarts=1" not in " ".join(shown("scontrol", "show", "job", job)):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    log = "".join(path.read_text() for path in (run / "logs" / "driver").glob("*.err"))
    assert "asked to stop" in log
    done = sum(1 for _ in run.glob("it/*/sync/manifest.json"))
    assert done < 400, "there is something left to do"
    iteration(run, done + 2)
    assert sorted((run / "pools").glob("*/*/job.json")) == leases, "no pool was started again"
    rlinf("stop", str(run))


def test_pools_without_a_driver_end_when_their_grace_is_over(cluster: Path, tmp_path: Path) -> None:
    log, run = tmp_path / "log", tmp_path / "tiny"
    driver = start_driver(
        call(tmp_path, "iterations=2000", "cluster.driver_reconnect_timeout_s=6"), log
    )
    until((run / "it/0002/sync/manifest.json").exists, driver, log)
    driver.kill()
    driver.wait()
    time.sleep(3)
    assert len(queued(run)) == 2, "they wait for another driver"
    deadline = time.monotonic() + 60
    while queued(run):
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_a_dry_run_writes_what_slurm_would_take(cluster: Path, tmp_path: Path) -> None:
    result = rlinf("submit", *call(tmp_path), "--dry-run")
    folder = tmp_path / "tiny.dry-run"
    assert str(folder) in result
    assert {path.name for path in folder.iterdir()} == {
        *("config.yaml", "plan.yaml"),
        *("driver.sh", "pool-0.sh", "pool-1.sh"),
    }
    for script in folder.glob("*.sh"):
        subprocess.run(["sbatch", "--test-only", script], check=True, capture_output=True)
    assert not (tmp_path / "tiny").exists()
    plan = package_paths.ROOT / "configs" / "plans" / "devcluster.yaml"
    rlinf("run", *words(tmp_path, "cluster=slurm", f"plan={plan}", "run.name=stages"), "--dry-run")
    scripts = (tmp_path / "stages.dry-run").glob("*.sh")
    assert {path.stem for path in scripts} >= {"sft", "rollout", "train", "evaluate"}


@pytest.mark.parametrize("option", [["--partition", "cpus"], ["--mem-mb", "99999999"]])
def test_a_driver_that_cannot_be_had_is_refused_before_anything_is_written(
    cluster: Path, tmp_path: Path, option: list[str]
) -> None:
    assert "cluster.driver" in rlinf("submit", *call(tmp_path), *option, code=65)
    assert not (tmp_path / "tiny").exists()
