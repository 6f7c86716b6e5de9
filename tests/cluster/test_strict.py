"""On a cluster with the rules of strict sites.

Memory and CPUs are enforced, partitions of GPUs want a QOS and GPUs, jobs must name their time, and
one partition gives whole nodes.

A small cluster of its own, because other tests submit jobs that break these rules.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rlinf import package_paths
from tests.cluster.test_pools import shown
from tests.cluster.test_runs import words
from tests.cluster.test_submit import rlinf
from tests.pipeline.helpers import contents

pytestmark = pytest.mark.cluster
SCRIPTS = package_paths.ROOT / "slurm" / "devcluster"
STATE = Path("/tmp/rlinf-strict")
SETTINGS = {
    "RLINF_DEVCLUSTER_DIR": str(STATE),
    "RLINF_DEVCLUSTER_PORT": "29800",
    # A driver on one node, so that a job may have the whole other one.
    "RLINF_DEVCLUSTER_NODES": "cpu-1::0 cpu-2::0 gpu-1:a100:2",
    "RLINF_DEVCLUSTER_STRICT": "yes",
}
PLAN = {
    "defaults": {"mem_mb": 1500, "time_limit_min": 10},
    "stages": {
        "rollout": {"partition": "a100", "gpus": 1, "gpu_type": "a100"},
        "evaluate": {"partition": "whole"},
    },
}
SITE = {"partitions": {"a100": {"qos": "gpu"}, "whole": {}}}


@pytest.fixture(scope="module")
def strict(cluster: Path) -> Iterator[None]:
    """SLURM_CONF points to the strict cluster; ``cluster`` has installed Slurm."""
    environment = {**os.environ, **SETTINGS}
    run = {"env": environment, "capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run([SCRIPTS / "up.sh"], check=False, **run)  # type: ignore[call-overload]
    before = os.environ["SLURM_CONF"]
    os.environ["SLURM_CONF"] = str(STATE / "etc" / "slurm.conf")
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        yield
    finally:
        os.environ["SLURM_CONF"] = before
        subprocess.run([SCRIPTS / "down.sh", "--purge"], check=False, **run)  # type: ignore[call-overload]


def call(root: Path, plan: dict[str, object] = PLAN, site: object = SITE) -> list[str]:
    """Words of a command that runs the tiny experiment there."""
    for name, values in (("plan", plan), ("site", site)):
        (root / f"{name}.yaml").write_text(yaml.safe_dump(values))
    files = [f"plan={root}/plan.yaml", f"cluster.site={root}/site.yaml"]
    return words(root, "cluster=slurm", "cluster.poll_interval_s=0.2", *files)


def test_the_cluster_has_the_rules(strict: None, tmp_path: Path) -> None:
    """Otherwise the other tests would show nothing."""
    hog = "python3 -c 'x = bytearray(600 << 20)'"
    options = ["--parsable", "-t", "5", "-o", "/dev/null", "--mem=200"]
    (job,) = shown("sbatch", *options, "--wrap", f"srun --mem=200 {hog}")
    deadline = time.monotonic() + 60
    while shown("squeue", "-t", "PENDING,RUNNING,COMPLETING", "-j", job, "-o", "%A"):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    assert "OUT_OF_ME" in " ".join(shown("sacct", "-n", "-j", job, "-o", "state"))
    for wrong, reason in (
        (["-p", "cpu"], "time limit"),
        (["-p", "a100", "-t", "5", "--gres=gpu:1"], "qos"),
        (["-p", "a100", "-t", "5", "--qos=gpu"], "gres|min"),
    ):
        command = ["sbatch", *wrong, "--wrap", "true"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode, f"{wrong}: {reason}"


def test_a_dry_run_shows_the_answers_of_slurm(strict: None, tmp_path: Path) -> None:
    output = rlinf("submit", *call(tmp_path), "--dry-run")
    assert "  driver.sh: Job " in output
    assert output.count("to start at") == len(list((tmp_path / "tiny.dry-run").glob("*.sh")))
    timeless = {**PLAN, "defaults": {"mem_mb": 1500}}
    output = rlinf("submit", *call(tmp_path, timeless), "--dry-run", code=1)
    assert "sbatch would refuse" in output
    assert "rollout.sh: refused: " in output
    assert "driver.sh: Job " in output, "the others are shown too"
    output = rlinf("submit", *call(tmp_path, site={}), "--dry-run", code=65)
    assert "takes no jobs of QOS normal, only of gpu" in output


def test_a_plan_that_rlinf_chose_is_accepted(strict: None, tmp_path: Path) -> None:
    """Its pools name their time, which the cluster demands."""
    own = [word for word in call(tmp_path) if not word.startswith("plan=")]
    plan = tmp_path / "chosen.yaml"
    rlinf("plan", *own, "--partition", "a100", "--execution", "pools", "--out", str(plan))
    output = rlinf("submit", *own, f"plan={plan}", "--dry-run")
    assert "  pool-0.sh: Job " in output
    assert "refused" not in output


@pytest.mark.timeout(600)
def test_a_run_passes(strict: None, tiny_run: Path, tmp_path: Path) -> None:
    rlinf("submit", *call(tmp_path))
    run, deadline = tmp_path / "tiny", time.monotonic() + 400
    while not (run / "report" / "report.html").exists():
        assert time.monotonic() < deadline, shown("squeue")
        time.sleep(1)
    assert contents(run) == contents(tiny_run)
