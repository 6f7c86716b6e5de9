"""What the launcher makes of a job that neither queue nor accounting knows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from launchers.backlog import Entry
from launchers.base import Job
from launchers.submitit import SubmititLauncher
from rlinf.errors import SlurmError
from slurm.client import SlurmClient
from slurm.jobs import State, Status


class Empty(SlurmClient):
    """A controller that has lost all jobs, and its accounting too."""

    def queue(self) -> dict[str, Status]:  # type: ignore[override]
        return {}

    def accounting(self, jobs: Iterable[str]) -> dict[str, Status]:
        return {}


def test_a_job_that_is_gone_is_given_up_though_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = SubmititLauncher(Empty(), grace_s=0.3)
    job = Job("train/0", (sys.executable,), tmp_path, tmp_path)
    launcher._watched["69"] = Entry(job, "69")
    launcher._backlog = SimpleNamespace(admit=lambda queue: None)  # type: ignore[assignment]
    assert launcher.poll(["69"])["69"].state is State.RUNNING
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    time.sleep(0.4)
    assert launcher.poll(["69"])["69"].state is State.VANISHED


class Restarting(SlurmClient):
    """A controller that answers nothing, until it does."""

    silent = True

    def queue(self) -> dict[str, Status]:  # type: ignore[override]
        if self.silent:
            raise SlurmError("squeue: Unable to contact slurm controller")
        return {"69": Status(State.RUNNING)}


def test_a_controller_that_restarts_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = Restarting()
    launcher = SubmititLauncher(client, silence_s=0.3)
    job = Job("train/0", (sys.executable,), tmp_path, tmp_path)
    launcher._watched["69"] = Entry(job, "69")
    launcher._backlog = SimpleNamespace(admit=lambda queue: None)  # type: ignore[assignment]
    assert launcher.poll(["69"])["69"].state.active
    assert launcher.poll(["69"])["69"].state.active
    assert caplog.text.count("Slurm does not answer") == 1
    client.silent = False
    assert launcher.poll(["69"])["69"].state is State.RUNNING
    client.silent = True
    assert launcher.poll(["69"])["69"].state is State.RUNNING, "what was known last"
    time.sleep(0.4)
    with pytest.raises(SlurmError, match="Unable to contact"):
        launcher.poll(["69"])
    (tmp_path / "manifest.json").touch()
    assert launcher.poll(["69"])["69"].state is State.DONE, "which the filesystem tells"
