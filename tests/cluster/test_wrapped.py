"""On a real Slurm whose commands are wrapped, as some sites do it: banners around every answer."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launchers.sbatch import new_tag, submit_restarting
from launchers.slurm_launcher import SlurmLauncher
from slurm.client import SlurmClient
from slurm.discovery import build_inventory, query_slurm
from slurm.jobs import JobState
from tests.cluster.helpers import finish_all, job, several, wait_until
from tests.slurm.test_discovery import NOW
from tests.slurm.wrapped import BANNER, FOOTER, write_command

pytestmark = pytest.mark.cluster
COMMANDS = ("sbatch", "squeue", "sacct", "sinfo", "scontrol", "sacctmgr", "scancel")


@pytest.fixture
def wrapped(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the wrappers, which jobs have in their PATH too."""
    at = tmp_path / "wrapped"
    for name in COMMANDS:
        real = shutil.which(name)
        script = f'cat {at}/banner\n{real} "$@"\ncode=$?\ncat {at}/footer\nexit $code'
        write_command(at, name, script)
    (at / "banner").write_text(BANNER)
    (at / "footer").write_text(FOOTER)
    monkeypatch.setenv("PATH", f"{at}{os.pathsep}{os.environ['PATH']}")
    return at


def test_jobs_are_submitted_watched_and_cancelled(
    launcher: SlurmLauncher, wrapped: Path, tmp_path: Path
) -> None:
    one = job(tmp_path / "one", "pass", partition="a100")
    two = job(tmp_path / "two", "pass", partition="h100")
    ranks = {"partition": "gpu", "nodes": 2, "constraint": "[a100*1&h100*1]"}
    unlike = job(tmp_path / "unlike", "pass", speed_weights={"h100": 2.0, "a100": 1.0}, **ranks)
    ids = [
        *launcher.submit_array(several(tmp_path / "array", "pass", 2)),
        *launcher.submit_hetjob([one, two]),
        launcher.submit(job(tmp_path / "requeue", "requeue")),
        launcher.submit(unlike),
    ]
    driver = job(tmp_path / "driver", "pass")
    assert submit_restarting(driver, new_tag()).isdigit()
    sleeps = launcher.submit(replace(job(tmp_path / "sleep", "sleep"), name="test/sleep"))
    assert {status.state for status in finish_all(launcher, ids, 120)} == {JobState.DONE}
    wait_until(driver.output_dir / "manifest.json")
    launcher.cancel([sleeps])
    assert finish_all(launcher, [sleeps])[0].state is JobState.CANCELLED
    assert '"shares": "2.0,1.0"' in (unlike.output_dir / "rank-0.0.json").read_text().replace(
        "1.0,2.0", "2.0,1.0"
    )


def test_the_inventory_is_that_of_the_plain_commands(
    cluster: Path, wrapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = build_inventory(query_slurm(SlurmClient()), NOW)
    monkeypatch.setenv("PATH", os.environ["PATH"].removeprefix(f"{wrapped}{os.pathsep}"))
    assert "Welcome" not in subprocess.check_output(["sinfo"], text=True)
    plain = build_inventory(query_slurm(SlurmClient()), NOW)
    assert set(found.partitions) == set(plain.partitions)
    for name, partition in plain.partitions.items():
        shapes = [(g.description, g.nodes) for g in partition.groups]
        assert [(g.description, g.nodes) for g in found.partitions[name].groups] == shapes
    assert found.limits == plain.limits
    assert found.slurm_version == plain.slurm_version
