"""The launcher on a real Slurm: every way a job can end is noticed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launchers.slurm_launcher import SlurmLauncher
from rlinf.errors import SlurmError
from slurm.client import SlurmClient
from slurm.jobs import JobState
from tests.cluster.helpers import finish, job, wait_until

pytestmark = pytest.mark.cluster


def notes(folder: Path, ranks: int = 1, restart: int = 0) -> list[dict[str, str]]:
    """What each rank found; a job is done with its first rank, the others may write after it."""
    paths = [folder / "out" / f"rank-{rank}.{restart}.json" for rank in range(ranks)]
    for path in paths:
        wait_until(path)
    return [json.loads(path.read_text()) for path in paths]


def test_ranks_on_two_nodes_agree_where_to_meet(launcher: SlurmLauncher, tmp_path: Path) -> None:
    wanted = job(
        tmp_path,
        "pass",
        partition="h100",
        nodes=2,
        tasks_per_node=2,
        gpus_per_node=2,
        gpu_type="h100",
    )
    assert finish(launcher, launcher.submit(wanted)).state is JobState.DONE
    found = notes(tmp_path, ranks=4)
    assert [note["RANK"] for note in found] == ["0", "1", "2", "3"]
    assert {note["node"] for note in found} == {"h100-1", "h100-2"}
    assert len({(n["RLINF_GROUP"], n["RLINF_ATTEMPT"]) for n in found}) == 1
    assert all(note["gpus"] for note in found)


def test_ranks_on_unlike_nodes_know_the_speeds_of_all(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    wanted = job(
        tmp_path,
        "pass",
        partition="gpu",
        nodes=2,
        tasks_per_node=2,
        constraint="[a100*1&h100*1]",
        speed_weights={"h100": 2.0, "a100": 1.0},
    )
    assert finish(launcher, launcher.submit(wanted)).state is JobState.DONE
    found = notes(tmp_path, ranks=4)
    speeds = [2.0 if note["node"].startswith("h100") else 1.0 for note in found]
    assert sorted(speeds) == [1.0, 1.0, 2.0, 2.0]
    assert {note["shares"] for note in found} == {",".join(map(str, speeds))}


def test_a_failure_brings_its_code_and_its_words(launcher: SlurmLauncher, tmp_path: Path) -> None:
    status = finish(launcher, launcher.submit(job(tmp_path, "fail")))
    assert (status.state, status.exit_code) == (JobState.FAILED, 65)
    assert "the reason of the failure" in status.reason


def test_a_cancelled_job_is_noticed(launcher: SlurmLauncher, tmp_path: Path) -> None:
    identity = launcher.submit(job(tmp_path, "sleep"))
    wait_until(tmp_path / "out" / "rank-0.0.json")
    subprocess.run(["scancel", identity], check=True)
    assert finish(launcher, identity).state is JobState.CANCELLED


def test_a_cancelled_stage_that_stops_by_itself_stays_cancelled(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    """The end of a job begins with TERM, which makes stages ask to be started again."""
    identity = launcher.submit(job(tmp_path, "stoppable"))
    wait_until(tmp_path / "out" / "ready")
    subprocess.run(["scancel", identity], check=True)
    assert finish(launcher, identity).state is JobState.CANCELLED
    assert "not requeued" in (tmp_path / "logs" / f"{identity}_0_log.err").read_text()
    time.sleep(1)
    assert SlurmClient().queue()[identity].state is JobState.CANCELLED


def test_any_rank_may_be_the_first_to_stop(launcher: SlurmLauncher, tmp_path: Path) -> None:
    """The others wait for it, so it alone can have the job requeued."""
    identity = launcher.submit(job(tmp_path, "last-stops", nodes=1, tasks_per_node=2))
    assert finish(launcher, identity, 60).state is JobState.DONE
    first, second = notes(tmp_path, ranks=2, restart=1)
    assert first["RLINF_ATTEMPT"] == second["RLINF_ATTEMPT"] == f"{identity}-1"


def test_a_job_nobody_knows_has_vanished(launcher: SlurmLauncher, tmp_path: Path) -> None:
    identity = launcher.submit(job(tmp_path, "sleep"))
    ghost = "999999"
    launcher._watched[ghost] = replace(launcher._watched[identity], id=ghost)
    assert finish(launcher, ghost).state is JobState.VANISHED
    launcher.cancel([identity])


def test_a_job_that_asks_for_it_is_requeued_once(launcher: SlurmLauncher, tmp_path: Path) -> None:
    identity = launcher.submit(job(tmp_path, "requeue"))
    assert finish(launcher, identity, 60).state is JobState.DONE
    (note,) = notes(tmp_path, restart=1)
    assert note["RLINF_ATTEMPT"] == f"{identity}-1"


def test_the_warning_signal_reaches_the_stage(launcher: SlurmLauncher, tmp_path: Path) -> None:
    identity = launcher.submit(job(tmp_path, "warned"))
    wait_until(tmp_path / "out" / "ready")
    subprocess.run(["scancel", "--signal=USR2", identity], check=True)
    assert finish(launcher, identity, 60).state is JobState.DONE
    assert notes(tmp_path, restart=1)


def test_a_preempted_job_runs_again(launcher: SlurmLauncher, tmp_path: Path) -> None:
    where = {"sbatch": {"nodelist": "a100-1", "exclusive": True}}
    low = launcher.submit(job(tmp_path / "low", "warned", partition="spot", **where))
    # It gets the whole node only when what ran there before has ended.
    wait_until(tmp_path / "low" / "out" / "ready", 90)
    high = launcher.submit(job(tmp_path / "high", "pass", partition="a100", **where))
    assert finish(launcher, high, 60).state is JobState.DONE
    assert finish(launcher, low, 90).state is JobState.DONE
    assert notes(tmp_path / "low", restart=1)


def test_what_slurm_refuses_is_said_in_its_words(launcher: SlurmLauncher, tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="invalid partition specified: nowhere"):
        launcher.submit(job(tmp_path, "pass", partition="nowhere"))


def test_a_new_driver_finds_the_job_of_the_old_one(launcher: SlurmLauncher, tmp_path: Path) -> None:
    first = launcher.submit(job(tmp_path, "sleep"))
    again = SlurmLauncher(SlurmClient(poll_interval_s=0.2))
    assert again.submit(job(tmp_path, "sleep")) == first
    again.cancel([first])
    assert finish(again, first).state is JobState.CANCELLED
    assert again.submit(job(tmp_path, "pass")) != first, "a dead job is not adopted"
    assert os.environ["SLURM_CONF"], "submitting keeps the environment"


def test_a_submission_to_a_controller_that_stands_still_leaves_one_job(
    cluster: Path, launcher: SlurmLauncher, tmp_path: Path
) -> None:
    """It takes the request when it goes on; nobody waits for its answer any more."""
    launcher._queue.visibility_timeout_s = 5.0
    warm = launcher.submit(job(tmp_path / "warm", "pass"))
    assert finish(launcher, warm).state is JobState.DONE
    controller = int((cluster / "run" / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        name = launcher.submit(job(tmp_path, "pass", time_limit_min=4))
        assert name.startswith("waiting-")
        assert launcher.poll([name])[name].state is JobState.PENDING
    finally:
        os.kill(controller, signal.SIGCONT)
    assert finish(launcher, name, 90).state is JobState.DONE
    own = launcher._watched[name].id  # its manifest shows before Slurm has seen its end
    others = [i for i, job in launcher.client.queue().items() if job.state.is_active and i != own]
    assert not others, "what the controller took while nobody listened is cancelled"
