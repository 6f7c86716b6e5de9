"""What the launcher makes of jobs that Slurm does not tell of, and of a Slurm that is silent."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import launchers.submission_queue
from launchers.launcher import JobSpec
from launchers.slurm_launcher import SlurmLauncher
from launchers.submission_queue import TrackedJob, read_submitted_job
from rlinf.errors import SlurmError, SlurmUnresponsiveError
from slurm.client import SlurmClient, classify_failure
from slurm.job_limits import ClusterLimits
from slurm.jobs import JobState, JobStatus
from slurm.records import QueuedJob


class Empty(SlurmClient):
    """A controller that has lost all jobs, and its accounting too."""

    def queue(self) -> dict[str, JobStatus]:  # type: ignore[override]
        return {}

    def accounting(self, jobs: Iterable[str]) -> dict[str, JobStatus]:
        return {}


def test_a_job_that_is_gone_is_given_up_though_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = SlurmLauncher(Empty(), unknown_job_timeout_s=0.3)
    job = JobSpec("train/0", (sys.executable,), tmp_path, tmp_path)
    launcher._watched["69"] = TrackedJob(job, "69")
    launcher._queue = SimpleNamespace(submit_ready=lambda queue: None)  # type: ignore[assignment]
    assert launcher.poll(["69"])["69"].state is JobState.RUNNING
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    time.sleep(0.4)
    assert launcher.poll(["69"])["69"].state is JobState.VANISHED


class Restarting(SlurmClient):
    """A controller that answers nothing, until it does."""

    silent = True

    def queue(self) -> dict[str, JobStatus]:  # type: ignore[override]
        if self.silent:
            raise SlurmError("squeue: Unable to contact slurm controller")
        return {"69": JobStatus(JobState.RUNNING)}


def test_a_controller_that_restarts_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = Restarting()
    launcher = SlurmLauncher(client, no_answer_timeout_s=0.3)
    job = JobSpec("train/0", (sys.executable,), tmp_path, tmp_path)
    launcher._watched["69"] = TrackedJob(job, "69")
    launcher._queue = SimpleNamespace(submit_ready=lambda queue: None)  # type: ignore[assignment]
    assert launcher.poll(["69"])["69"].state.is_active
    assert launcher.poll(["69"])["69"].state.is_active
    assert caplog.text.count("Slurm does not answer") == 1
    client.silent = False
    assert launcher.poll(["69"])["69"].state is JobState.RUNNING
    client.silent = True
    assert launcher.poll(["69"])["69"].state is JobState.RUNNING, "what was known last"
    time.sleep(0.4)
    with pytest.raises(SlurmError, match="Unable to contact"):
        launcher.poll(["69"])
    (tmp_path / "manifest.json").touch()
    assert launcher.poll(["69"])["69"].state is JobState.DONE, "which the filesystem tells"


class Controller(SlurmClient):
    """A controller that may be silent, and what was submitted to it."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = self.deaf = False
        self.jobs: dict[str, JobSpec] = {}
        self.tags: dict[str, str] = {}
        self.cancelled: list[str] = []

    def answers(self) -> None:
        if self.silent:
            raise SlurmUnresponsiveError("Unable to contact slurm controller")

    def queue(self) -> dict[str, QueuedJob]:
        self.answers()
        there = {i: i in self.cancelled for i in self.jobs}
        return {
            i: QueuedJob(JobState.CANCELLED if over else JobState.RUNNING)
            for i, over in there.items()
        }

    def find_by_comment(self, text: str) -> list[str]:
        self.answers()
        return [job_id for job_id, tag in self.tags.items() if tag == text]

    def cancel(self, ids: Collection[str]) -> None:
        self.answers()
        self.cancelled += [i for i in ids if i not in self.cancelled]

    def sbatch(self, jobs: Sequence[JobSpec], tag: str) -> list[str]:
        """Deaf: the job is taken, and the answer lost."""
        self.answers()
        ids = [str(len(self.jobs) + n) for n in range(len(jobs))]
        self.jobs.update(zip(ids, jobs, strict=True))
        self.tags.update(dict.fromkeys(ids, tag))
        if self.deaf:
            raise SlurmUnresponsiveError("Socket timed out on send/recv operation")
        return ids


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller()
    monkeypatch.setattr(launchers.submission_queue, "submit_jobs", made.sbatch)
    return made


def launcher_of(controller: Controller) -> SlurmLauncher:
    launcher = SlurmLauncher(controller, ClusterLimits(()))
    launcher._queue.visibility_timeout_s = 0.2
    return launcher


def wanted(folder: Path, number: int = 0, **values: str) -> JobSpec:
    out = folder / str(number)
    out.mkdir(exist_ok=True)
    return JobSpec(f"train/{number}", (), out, folder, **values)  # type: ignore[arg-type]


def test_what_is_submitted_to_a_silent_controller_waits(
    controller: Controller, tmp_path: Path
) -> None:
    launcher, controller.silent = launcher_of(controller), True
    (name,) = launcher.submit_array([wanted(tmp_path)])
    assert launcher.poll([name])[name].state is JobState.PENDING
    controller.silent = False
    assert launcher.poll([name])[name].state.is_active
    assert launcher.poll([name])[name].state is JobState.RUNNING
    assert list(controller.jobs) == ["0"]
    controller.silent = True
    launcher.no_answer_timeout_s = 0.0
    launcher.poll([name])
    with pytest.raises(SlurmUnresponsiveError):
        launcher.submit(wanted(tmp_path, 1))


def test_a_submission_without_an_answer_leaves_one_job(
    controller: Controller, tmp_path: Path
) -> None:
    """The controller may have taken it; what it took cannot run, for its files have no name yet."""
    launcher, controller.deaf = launcher_of(controller), True
    name = launcher.submit(wanted(tmp_path))
    assert not controller.cancelled
    controller.deaf = False
    assert launcher.poll([name])[name].state is JobState.PENDING
    assert list(controller.jobs) == ["0"], "it may show later"
    time.sleep(0.3)
    launcher.poll([name])
    assert (list(controller.jobs), controller.cancelled) == (["0", "1"], ["0"])
    assert launcher.poll([name])[name].state is JobState.RUNNING
    note = read_submitted_job(tmp_path / "0")
    assert note is not None
    assert note.id == "1"


@pytest.mark.parametrize("how", ["submitted again", "withdrawn"])
def test_a_job_whose_submitter_died_before_it_had_the_id_is_not_left(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def dies(jobs: Sequence[JobSpec], tag: str) -> list[str]:
        controller.sbatch(jobs, tag)
        raise KeyboardInterrupt

    monkeypatch.setattr(launchers.submission_queue, "submit_jobs", dies)
    with pytest.raises(KeyboardInterrupt):
        launcher_of(controller).submit_array([wanted(tmp_path, n) for n in (0, 1)])
    monkeypatch.setattr(launchers.submission_queue, "submit_jobs", controller.sbatch)
    launcher = launcher_of(controller)
    if how == "withdrawn":
        launcher.cancel_for_outputs([tmp_path / "0"])
        assert sorted(controller.cancelled) == ["0", "1"], "one submission has one mark"
        return
    ids = launcher.submit_array([wanted(tmp_path, n) for n in (0, 1)])
    assert sorted(controller.cancelled) == ["0", "1"]
    assert ids == ["2", "3"]
    assert [read_submitted_job(tmp_path / name).id for name in "01"] == ids  # type: ignore[union-attr]


def test_a_job_is_found_again_unless_it_is_of_another_key(
    controller: Controller, tmp_path: Path
) -> None:
    first = launcher_of(controller).submit_array(
        [wanted(tmp_path, n, content_key="a") for n in (0, 1)]
    )
    again = launcher_of(controller)
    assert again.submit_array(
        [wanted(tmp_path, 0, content_key="a"), wanted(tmp_path, 1, content_key="b")]
    ) == [
        first[0],
        "2",
    ]
    assert controller.cancelled == [first[1]]


def test_found_jobs_may_be_many_while_the_controller_is_silent(
    controller: Controller, tmp_path: Path
) -> None:
    first = launcher_of(controller).submit(wanted(tmp_path))
    controller.silent = True
    launcher = launcher_of(controller)
    name = launcher.submit(wanted(tmp_path))
    controller.silent = False
    for _ in range(2):
        status = launcher.poll([name])[name]
    assert status.state is JobState.RUNNING
    assert list(controller.jobs) == [first], "the job of the driver before"


def test_what_cannot_be_cancelled_now_is_cancelled_later(
    controller: Controller, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = launcher_of(controller)
    ids = launcher.submit_array([wanted(tmp_path, n) for n in (0, 1)])
    controller.silent = True
    launcher.cancel(ids[:1])
    launcher.close()
    assert "scancel 0" in caplog.text
    controller.silent = False
    launcher.poll(ids[1:])
    assert controller.cancelled == ids[:1]
    launcher.cancel_for_outputs([tmp_path / "1", tmp_path / "other"])
    assert controller.cancelled == ids


@pytest.mark.parametrize(
    ("text", "silent"),
    [
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", 1),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1),
        ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", 1),
        ("sbatch: error: Batch job submission failed: Invalid account or partition", 0),
        ("sbatch: error: invalid partition specified: standby", 0),
    ],
)
def test_silence_is_no_refusal(text: str, silent: bool) -> None:
    assert (classify_failure(text) is SlurmUnresponsiveError) == silent
