"""What the tests on a real Slurm share."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from launchers.launcher import JobSpec
from launchers.slurm_launcher import SlurmLauncher
from slurm.jobs import JobResources, JobStatus


def job(folder: Path, what: str, **resources: object) -> JobSpec:
    needs = {"partition": "cpu", "mem_mb": 300, "time_limit_min": 5, **resources}
    out = folder / "out"
    return JobSpec(
        f"test/{what}",
        (what, str(out)),
        out,
        folder / "logs",
        JobResources(**needs),  # type: ignore[arg-type]
        "tests.cluster.probe",
    )


def finish(launcher: SlurmLauncher, identity: str, timeout_s: float = 40) -> JobStatus:
    deadline = time.monotonic() + timeout_s
    while (status := launcher.poll([identity])[identity]).state.is_active:
        assert time.monotonic() < deadline, status
        time.sleep(0.2)
    return status


def wait_until(path: Path, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def several(folder: Path, what: str, count: int, **resources: object) -> list[JobSpec]:
    """Jobs that may be one array: they differ in their outputs only."""
    first = job(folder, what, **resources)
    outs = [folder / f"out-{i}" for i in range(count)]
    return [replace(first, argv=(what, str(out)), output_dir=out) for out in outs]


def finish_all(launcher: SlurmLauncher, ids: list[str], timeout_s: float = 60) -> list[JobStatus]:
    """Poll all together until none is active."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = launcher.poll(ids)
        if not any(status.state.is_active for status in found.values()):
            return [found[identity] for identity in ids]
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
