"""On a cluster that binds tasks to CPUs, each process may use all CPUs that its job asks for.

A small cluster of its own: on the one of the other tests nodes claim more CPUs than there are, and
Slurm then binds nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launchers.sbatch import new_tag, submit_restarting
from launchers.slurm_launcher import SlurmLauncher
from rlinf import package_paths
from slurm.client import SlurmClient
from slurm.jobs import JobState
from tests.cluster.helpers import finish_all, job, several, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: nothing to bind"),
]
SCRIPTS = package_paths.ROOT / "slurm" / "devcluster"
STATE = Path("/tmp/rlinf-binding")
SETTINGS = {
    "RLINF_DEVCLUSTER_DIR": str(STATE),
    "RLINF_DEVCLUSTER_PORT": "28800",
    "RLINF_DEVCLUSTER_NODES": "cpu-1::0 cpu-2::0",
    "RLINF_DEVCLUSTER_BIND": "yes",
}


@pytest.fixture(scope="module")
def binding(cluster: Path) -> Iterator[Path]:
    """The Slurm configuration of the cluster that binds; ``cluster`` has installed Slurm."""
    environment = {**os.environ, **SETTINGS}
    run = {"env": environment, "capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run([SCRIPTS / "up.sh"], check=False, **run)  # type: ignore[call-overload]
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        yield STATE / "etc" / "slurm.conf"
    finally:
        subprocess.run([SCRIPTS / "down.sh", "--purge"], check=False, **run)  # type: ignore[call-overload]


@pytest.fixture
def launcher(binding: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmLauncher:
    monkeypatch.setenv("SLURM_CONF", str(binding))
    monkeypatch.setenv("PYTHONPATH", str(package_paths.ROOT))
    return SlurmLauncher(SlurmClient(poll_interval_s=0.2), unknown_job_timeout_s=3.0)


def cpus(out: Path, ranks: int = 1) -> list[set[int]]:
    """The CPUs that each rank of a job may use."""
    paths = [out / f"rank-{rank}.0.json" for rank in range(ranks)]
    for path in paths:
        wait_until(path)
    notes = [json.loads(path.read_text()) for path in paths]
    return [{int(cpu) for cpu in note["cpus"].split(",")} for note in notes]


def test_a_task_without_its_number_of_cpus_would_have_one(launcher: SlurmLauncher) -> None:
    """The cluster shows the fault: srun takes nothing over from its job."""
    count = "import os; print(len(os.sched_getaffinity(0)))"
    command = f"srun python3 -c '{count}'; srun --cpus-per-task=2 python3 -c '{count}'"
    log = STATE / "bare.out"
    options = ["-W", "-c2", "--mem=300", "-o", str(log), "--wrap", command]
    subprocess.run(["sbatch", *options], check=True, capture_output=True, timeout=60)
    assert log.read_text().split() == ["1", "2"]


def test_every_way_to_start_a_process_gives_it_all_of_its_cpus(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    """A stage's job, those of an array, pools that start together, and a driver's job."""
    stage = job(tmp_path / "stage", "pass", cpus_per_task=2)
    array = several(tmp_path / "array", "pass", 2, cpus_per_task=2)
    pools = [job(tmp_path / name, "pass", cpus_per_task=2) for name in ("one", "other")]
    driver = job(tmp_path / "driver", "pass", cpus_per_task=2)
    ids = [launcher.submit(stage), *launcher.submit_array(array), *launcher.submit_hetjob(pools)]
    submit_restarting(driver, new_tag())
    assert {status.state for status in finish_all(launcher, ids, 90)} == {JobState.DONE}
    wait_until(driver.output_dir / "manifest.json")
    for wanted in (stage, *array, *pools, driver):
        (own,) = cpus(wanted.output_dir)
        assert len(own) == 2, wanted.log_dir


def test_ranks_of_a_node_have_cpus_of_their_own(launcher: SlurmLauncher, tmp_path: Path) -> None:
    wanted = job(tmp_path, "pass", tasks_per_node=2)
    assert finish_all(launcher, [launcher.submit(wanted)])[0].state is JobState.DONE
    first, second = cpus(wanted.output_dir, ranks=2)
    assert len(first) == len(second) == 1
    assert first != second


def test_an_environment_of_an_interactive_job_changes_nothing(
    launcher: SlurmLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables would break srun, or make another job of this one."""
    foreign = {"MEM_PER_CPU": "77", "MEM_PER_NODE": "99", "NTASKS": "7", "NPROCS": "7"}
    for name, value in {
        **foreign,
        "JOB_ID": "3",
        "CPUS_PER_TASK": "1",
        "EXPORT_ENV": "NONE",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name, value in {"EXPORT": "NONE", "QOS": "none-such", "EXCLUSIVE": "1"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    stage = job(tmp_path / "stage", "pass", cpus_per_task=2)
    driver = job(tmp_path / "driver", "pass", cpus_per_task=2)
    identity = launcher.submit(stage)
    resources = replace(driver.resources, sbatch={"export": "NONE"})
    submit_restarting(replace(driver, resources=resources), new_tag())
    assert finish_all(launcher, [identity])[0].state is JobState.DONE
    wait_until(driver.output_dir / "manifest.json")
    for wanted in (stage, driver):
        assert [len(own) for own in cpus(wanted.output_dir)] == [2]
