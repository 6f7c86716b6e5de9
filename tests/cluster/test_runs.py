"""Whole runs on a real Slurm give the bytes of a run on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlinf import package_paths
from tests.conftest import TINY
from tests.pipeline.helpers import contents, start_driver

pytestmark = pytest.mark.cluster
PLAN = package_paths.ROOT / "configs" / "plans" / "devcluster.yaml"


def words(root: Path, *more: str) -> list[str]:
    plain = [word.removeprefix("++") for word in TINY]
    return ["experiment=arithmetic_grpo", f"run.root={root}", "log.trackers=[]", *plain, *more]


@pytest.fixture(scope="module")
def reference(tiny_run: Path) -> dict[str, str]:
    return contents(tiny_run)


def test_slurm_jobs_give_the_same_bytes_though_the_driver_is_killed(
    cluster: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    call = words(tmp_path, "cluster=slurm", "cluster.poll_interval_s=0.2", f"plan={PLAN}")
    driver = start_driver(call, tmp_path / "log")
    time.sleep(12)
    driver.kill()
    driver.wait()
    subprocess.run(["scancel", "-u", "root", "--state=RUNNING"], check=False)
    driver = start_driver(call, tmp_path / "log")
    assert driver.wait(timeout=250) == 0, (tmp_path / "log").read_text()
    assert contents(tmp_path / "tiny") == reference


@pytest.mark.timeout(600)
def test_a_killed_snakemake_goes_on_with_the_same_command(
    cluster: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    """And gives the same bytes, and a report."""
    settings = [word.replace(".", "__", word.split("=")[0].count(".")) for word in words(tmp_path)]
    call = [sys.executable, "-m", "snakemake", "--profile", "slurm", "--config", *settings]
    call.append(f"plan={PLAN}")
    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(call, cwd=package_paths.ROOT, stdout=log, stderr=log)
        deadline = time.monotonic() + 240
        notes = tmp_path / "tiny/logs/snakemake/slurm/rollout"
        while not notes.exists() and time.monotonic() < deadline:
            assert first.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        second = subprocess.run(
            call, cwd=package_paths.ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert second.returncode != 0
        assert "driven by process" in second.stdout + second.stderr
        first.kill()
        first.wait()
    done = subprocess.run(
        call, cwd=package_paths.ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert contents(tmp_path / "tiny") == reference
    assert (tmp_path / "tiny" / "report" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("profile", ["slurm", "slurm/plugin"])
def test_snakemake_survives_a_cancelled_job(cluster: Path, tmp_path: Path, profile: str) -> None:
    words = ["experiment=cartpole_ppo", "iterations=1", f"run__root={tmp_path}", "run__name=cp"]
    words += ["rollout__batch=4", "rollout__horizon=16", "evaluate__samples=2", f"plan={PLAN}"]
    with (tmp_path / "log").open("w") as log:
        workflow = subprocess.Popen(
            [sys.executable, "-m", "snakemake", "--profile", profile, "--config", *words],
            cwd=package_paths.ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    cancelled = False
    deadline = time.monotonic() + 500
    while workflow.poll() is None and time.monotonic() < deadline:
        running = subprocess.run(
            ["squeue", "-h", "-t", "RUNNING", "-o", "%i"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        if running and not cancelled:
            subprocess.run(["scancel", *running], check=True)
            cancelled = True
        time.sleep(0.2)
    assert cancelled
    assert workflow.poll() == 0, (tmp_path / "log").read_text()[-3000:]
    assert (tmp_path / "cp/it/0000/sync/manifest.json").exists()


@pytest.mark.parametrize(
    "launcher", [pytest.param("submitit_local", marks=pytest.mark.slow), "submitit_slurm"]
)
def test_a_sweep_runs_its_points_as_jobs(
    cluster: Path, reference: dict[str, str], tmp_path: Path, launcher: str
) -> None:
    plain = words(
        tmp_path,
        "optimizer.lr=1e-2,1e-3",
        f"hydra/launcher={launcher}",
    )
    call = [word for word in plain if word != "optimizer.lr=1e-2" and "run.name" not in word]
    done = subprocess.run(
        [sys.executable, "-m", "rlinf.launch", "-m", *call],
        cwd=package_paths.ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "HYDRA_FULL_ERROR": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert contents(tmp_path / "arithmetic_grpo-lr-0.01") == reference
    other = contents(tmp_path / "arithmetic_grpo-lr-0.001")
    assert other.keys() == reference.keys()
    assert other["it/0000/train"] != reference["it/0000/train"]


def test_doctor_finds_the_cluster_fit(cluster: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlinf", "doctor", "--folder", str(tmp_path)],
        cwd=package_paths.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "200"},  # A narrow table breaks lines within a message.
    )
    assert done.returncode == 0, done.stdout
    assert "2 nodes, 4 x a100 per node, no time limit" in done.stdout
    assert "1 node, no GPUs, no time limit" in done.stdout
