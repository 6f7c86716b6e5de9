"""Local jobs: ranks, exit codes, and no process left behind."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from launchers.launcher import JobSpec
from launchers.local import LocalLauncher
from launchers.sbatch import batch_script
from slurm.jobs import JobResources, JobState, JobStatus

PROGRAM = """
import os, sys, time, pathlib
what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
rank = os.environ["RANK"]
(folder / f"rank-{rank}").write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']} "
                                     f"{os.environ['RLINF_ATTEMPT']} {os.environ['RLINF_GROUP']}")
if what == "fail" and rank == "1":
    print("the reason"); sys.exit(66)
if what in ("sleep", "fail"):
    time.sleep(60)
if what == "gpus":
    (folder / "gpus").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "program_of_test.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def job(folder: Path, what: str, ranks: int = 1) -> JobSpec:
    return JobSpec(
        what,
        (what, str(folder)),
        folder,
        folder / "logs",
        JobResources(tasks_per_node=ranks),
        "program_of_test",
    )


def finish(launcher: LocalLauncher, identity: str, timeout_s: float = 20) -> JobStatus:
    deadline = time.monotonic() + timeout_s
    while (status := launcher.poll([identity])[identity]).state.is_active:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return status


def test_ranks_share_the_names_of_their_attempt_and_group(program: Path) -> None:
    launcher = LocalLauncher()
    status = finish(launcher, launcher.submit(job(program, "pass", ranks=2)))
    assert status.state is JobState.DONE
    notes = [(program / f"rank-{r}").read_text().split() for r in range(2)]
    assert notes[0][1:] == notes[1][1:]
    assert notes[0][1] == "2"


def test_a_failing_rank_takes_the_others_down_and_says_why(program: Path) -> None:
    launcher = LocalLauncher()
    status = finish(launcher, launcher.submit(job(program, "fail", ranks=2)))
    assert (status.state, status.exit_code) == (JobState.FAILED, 66)
    assert "the reason" in status.reason
    assert not psutil.pid_exists(int((program / "rank-0").read_text().split()[0]))


def test_closing_ends_what_runs(program: Path) -> None:
    launcher = LocalLauncher()
    launcher.submit(job(program, "sleep"))
    deadline = time.monotonic() + 20
    while not (program / "rank-0").exists() or not (program / "rank-0").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.close()
    assert not psutil.pid_exists(int((program / "rank-0").read_text().split()[0]))


def test_settings_are_quoted_for_the_batch_script() -> None:
    resources = JobResources(env={"X": "a b; rm -rf /"}, gpus_per_node=2, gpu_type="h100")
    lines = batch_script([JobSpec("a/b", (), Path("o"), Path("l"), resources, "m")]).splitlines()
    assert "export X='a b; rm -rf /'" in lines
    assert "#SBATCH --gres=gpu:h100:2" in lines
    assert "#SBATCH --job-name=a-b" in lines
    assert not any("--time" in line for line in lines), "the partition's own limit"


def test_jobs_at_the_same_time_get_different_gpus(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    launcher = LocalLauncher()

    def gpus(ranks: int) -> str:
        assert finish(launcher, launcher.submit(job(program, "gpus", ranks))).exit_code == 0
        return (program / "gpus").read_text()

    assert gpus(1) == "3"
    other = launcher.submit(job(program, "sleep", ranks=2))
    assert gpus(1) == "6", "the sleeping processes have 3 and 5"
    assert gpus(5) == "3,5,6", "there are no more"
    launcher.cancel([other])
    assert gpus(2) == "3,5"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus(1) == ""


def test_a_job_gets_the_gpus_that_it_asks_for(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    launcher = LocalLauncher()
    three = replace(job(program, "gpus"), resources=JobResources(gpus_per_node=3))
    finish(launcher, launcher.submit(three))
    assert (program / "gpus").read_text() == "0,1,2"
