"""Profiles of eight kinds of sites: a Slurm configuration, its inventory, a site file and a plan.

Each folder has ``slurm.conf`` (what differs from :data:`COMMON`), ``inventory.json`` as ``rlinf
inventory --save`` writes it there, ``site.yaml``, ``plan.yaml``, and the batch scripts of ``rlinf
submit --dry-run --from inventory.json`` in ``scripts``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pipeline.commands.driver_job import write_dry_run
from rlinf import package_paths, process_tuning
from slurm.client import SlurmClient
from slurm.discovery import discover_inventory
from slurm.inventory import Inventory
from slurm.site import SiteConfig
from tests.conftest import TINY

FOLDER = Path(__file__).parent
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/slurm.conf"))
RECORDED_AT = datetime(2026, 11, 27, tzinfo=UTC)
"""The time in each inventory, so that two recordings are equal."""
RUNS, CODE, PYTHON = "/scratch/ada/runs", "/home/ada/rlinf", "/home/ada/rlinf/.venv/bin/python"
"""Paths in the scripts, instead of those of the machine that wrote them."""
ACCOUNTING = ("AccountingStorageHost", "AccountingStoragePort", "AccountingStoragePass")
COMMON = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SchedulerType=sched/backfill
EnforcePartLimits=ALL
# Nodes of a cloud may be down: the controller plans with them as it knows them from here.
PrivateData=cloud
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=86400
"""


def write_scripts(name: str, folder: Path) -> dict[str, str]:
    """Return the batch scripts of a profile by file name, written below a folder."""
    profile = FOLDER / name
    words = [
        *("experiment=arithmetic_grpo", "cluster=slurm", f"run.root={folder}", "log.trackers=[]"),
        *(word.removeprefix("++") for word in TINY),
        *(f"cluster.site={profile}/site.yaml", f"plan={profile}/plan.yaml", f"run.name={name}"),
    ]
    hidden = ("PYTHONPATH", *process_tuning.DEFAULT_ENVIRONMENT)
    before = {key: os.environ.pop(key) for key in hidden if key in os.environ}
    try:
        with contextlib.chdir(package_paths.ROOT):
            write_dry_run(words, {}, profile / "inventory.json")
    finally:
        os.environ.update(before)
    target = folder / f"{name}.dry-run"
    texts = {path.name: path.read_text() for path in sorted(target.glob("*.sh"))}
    for here, there in (
        (str(folder), RUNS),
        (sys.executable, PYTHON),
        (str(package_paths.ROOT), CODE),
    ):
        texts = {key: text.replace(here, there) for key, text in texts.items()}
    return texts


def save_scripts(name: str, folder: Path) -> None:
    """Write the batch scripts of a profile into its folder, in place of the former ones."""
    target = FOLDER / name / "scripts"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file, text in write_scripts(name, folder).items():
        (target / file).write_text(text)


def inventory_of_controller() -> Inventory:
    """Return the inventory of the controller that SLURM_CONF names, as it is saved."""
    found = discover_inventory(SlurmClient(), RECORDED_AT)
    return found.with_site_settings(SiteConfig())


@contextlib.contextmanager
def controller(name: str, devcluster: Path, folder: Path) -> Iterator[None]:
    """Run the controller of a profile, to which SLURM_CONF points meanwhile. It has no nodes.

    Args:
        devcluster: state folder of a running dev cluster, whose munge and accounting are used.
        folder: an empty folder for the controller's files.
    """
    cluster = name.replace("_", "")
    (folder / "state").mkdir()
    config = folder / "slurm.conf"
    config.write_text(_configuration(name, cluster, devcluster, folder))
    if (accounting := FOLDER / name / "accounting.txt").exists():
        _sacctmgr(f"add cluster {cluster}", check=False)
        for line in accounting.read_text().splitlines():
            _sacctmgr(line.replace("CLUSTER", cluster), check=not line.startswith("add"))
    previous = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(config)
    log = (folder / "slurmctld.out").open("w")
    process = subprocess.Popen(["slurmctld", "-D", "-c"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while subprocess.run(["scontrol", "ping"], capture_output=True, check=False).returncode:
            assert process.poll() is None, (folder / "slurmctld.log").read_text()
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)
        log.close()
        if previous is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = previous


def _configuration(name: str, cluster: str, devcluster: Path, folder: Path) -> str:
    """Return the whole slurm.conf of a profile."""
    own = (FOLDER / name / "slurm.conf").read_text()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host = socket.gethostname().partition(".")[0]
    lines = [COMMON.format(name=cluster, host=host, port=port, folder=folder)]
    taken_over = ("AuthInfo", *ACCOUNTING) if "AccountingStorageEnforce" in own else ("AuthInfo",)
    dev = (devcluster / "etc" / "slurm.conf").read_text().splitlines()
    lines += [f"{line}\n" for line in dev if line.partition("=")[0] in taken_over]
    if "AccountingStorageEnforce" in own:
        lines.append("AccountingStorageType=accounting_storage/slurmdbd\n")
    for line in own.splitlines():
        lines.append(f"{line} State=CLOUD\n" if line.startswith("NodeName=") else f"{line}\n")
    return "".join(lines)


def _sacctmgr(line: str, *, check: bool) -> None:
    """Change the accounting of the dev cluster. What exists already cannot be added."""
    subprocess.run(["sacctmgr", "-i", *line.split()], capture_output=True, check=check)
