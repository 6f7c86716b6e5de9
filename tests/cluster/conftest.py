"""Brings the dev cluster up once for all tests of this folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchers.slurm_launcher import SlurmLauncher
from rlinf import package_paths
from slurm.client import SlurmClient

SCRIPTS = package_paths.ROOT / "slurm" / "devcluster"
LIMITS = (
    (("user", "root"), "MaxSubmitJobs=-1", "MaxWall=-1"),
    (("account", "root"), "GrpSubmitJobs=-1"),
    (("qos", "normal"), "MaxTRESPerJob=cpu=-1"),
)
"""Those that tests set, as they are without."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """The state folder of a running dev cluster; environment variables point to it.

    A cluster that was already up is used and left up. Skips with the reason where none can be
    started, unless RLINF_REQUIRE_SLURM is set.
    """
    state = Path(os.environ.get("RLINF_DEVCLUSTER_DIR", "/tmp/rlinf-devcluster"))
    was_up = runs(state / "run" / "slurmctld.pid")
    done = subprocess.run(
        [SCRIPTS / "up.sh"], capture_output=True, text=True, timeout=280, check=False
    )
    if done.returncode:
        reason = f"the dev cluster does not start: {(done.stderr or done.stdout).strip()[-300:]}"
        if os.environ.get("RLINF_REQUIRE_SLURM"):
            pytest.fail(reason)
        pytest.skip(reason)
    for name, value in re.findall(r"export (\w+)=(\S+)", (state / "env.sh").read_text()):
        os.environ[name] = value
    assert shutil.which("sbatch")
    # Limits of test_quotas stay in the accounting where a suite was killed: nothing runs then.
    for entity, *limits in LIMITS:
        subprocess.run(["sacctmgr", "-i", "modify", *entity, "set", *limits], check=False)
    yield state
    if not was_up:
        subprocess.run([SCRIPTS / "down.sh"], capture_output=True, timeout=120, check=False)


def runs(pid_file: Path) -> bool:
    """Whether a controller runs; a machine that was switched off leaves the file behind."""
    try:
        return Path("/proc", pid_file.read_text().strip(), "comm").read_text() == "slurmctld\n"
    except OSError:
        return False


@pytest.fixture
def launcher(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmLauncher:
    monkeypatch.setenv("PYTHONPATH", str(package_paths.ROOT))
    return SlurmLauncher(SlurmClient(poll_interval_s=0.2), unknown_job_timeout_s=3.0)
