"""The submitit launcher on a real Slurm: every way a job can end is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from launchers.base import Job, Resources, State, Status
from launchers.submitit import SubmititLauncher
from rlinf import tree
from rlinf.errors import SlurmError
from slurm.client import SlurmClient

pytestmark = pytest.mark.cluster


@pytest.fixture
def launcher(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> SubmititLauncher:
    monkeypatch.setenv("PYTHONPATH", str(tree.ROOT))
    return SubmititLauncher(SlurmClient(poll_s=0.2), grace_s=3.0)


def job(folder: Path, what: str, **resources: object) -> Job:
    needs = {"partition": "cpu", "mem_mb": 300, "time_min": 5, **resources}
    out = folder / "out"
    return Job(
        f"test/{what}",
        (what, str(out)),
        out,
        folder / "logs",
        Resources(**needs),  # type: ignore[arg-type]
        "tests.cluster.probe",
    )


def finish(launcher: SubmititLauncher, identity: str, timeout_s: float = 40) -> Status:
    deadline = time.monotonic() + timeout_s
    while (status := launcher.poll([identity])[identity]).state.active:
        assert time.monotonic() < deadline, status
        time.sleep(0.2)
    return status


def notes(folder: Path) -> list[dict[str, str]]:
    return [json.loads(p.read_text()) for p in sorted((folder / "out").glob("rank-*.json"))]


def wait_until(path: Path, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def test_ranks_on_two_nodes_agree_where_to_meet(launcher: SubmititLauncher, tmp_path: Path) -> None:
    wanted = job(
        tmp_path,
        "pass",
        partition="h100",
        nodes=2,
        tasks_per_node=2,
        gpus_per_node=2,
        gpu_type="h100",
    )
    assert finish(launcher, launcher.submit(wanted)).state is State.DONE
    wait_until(tmp_path / "out" / "rank-3.json")
    found = notes(tmp_path)
    assert [note["RANK"] for note in found] == ["0", "1", "2", "3"]
    assert {note["node"] for note in found} == {"h100-1", "h100-2"}
    assert len({(n["MASTER_ADDR"], n["MASTER_PORT"], n["RLINF_ATTEMPT"]) for n in found}) == 1
    assert all(note["gpus"] for note in found)


def test_ranks_on_unlike_nodes_know_the_speeds_of_all(
    launcher: SubmititLauncher, tmp_path: Path
) -> None:
    wanted = job(
        tmp_path,
        "pass",
        partition="gpu",
        nodes=2,
        tasks_per_node=2,
        constraint="[a100*1&h100*1]",
        shares={"h100": 2.0, "a100": 1.0},
    )
    assert finish(launcher, launcher.submit(wanted)).state is State.DONE
    wait_until(tmp_path / "out" / "rank-3.json")
    found = notes(tmp_path)
    speeds = [2.0 if note["node"].startswith("h100") else 1.0 for note in found]
    assert sorted(speeds) == [1.0, 1.0, 2.0, 2.0]
    assert {note["shares"] for note in found} == {",".join(map(str, speeds))}


def test_a_failure_brings_its_code_and_its_words(
    launcher: SubmititLauncher, tmp_path: Path
) -> None:
    status = finish(launcher, launcher.submit(job(tmp_path, "fail")))
    assert (status.state, status.exit_code) == (State.FAILED, 65)
    assert "the reason of the failure" in status.reason


def test_a_cancelled_job_is_noticed(launcher: SubmititLauncher, tmp_path: Path) -> None:
    identity = launcher.submit(job(tmp_path, "sleep"))
    wait_until(tmp_path / "out" / "rank-0.json")
    subprocess.run(["scancel", identity], check=True)
    assert finish(launcher, identity).state is State.CANCELLED


def test_a_job_nobody_knows_has_vanished(launcher: SubmititLauncher, tmp_path: Path) -> None:
    identity = launcher.submit(job(tmp_path, "sleep"))
    ghost = "999999"
    launcher._watched[ghost] = launcher._watched[identity]
    assert finish(launcher, ghost).state is State.VANISHED
    launcher.cancel([identity])


def test_a_job_that_asks_for_it_is_requeued_once(
    launcher: SubmititLauncher, tmp_path: Path
) -> None:
    identity = launcher.submit(job(tmp_path, "requeue"))
    assert finish(launcher, identity, 60).state is State.DONE
    (note,) = notes(tmp_path)
    assert note["restart"] == "1"
    assert note["RLINF_ATTEMPT"] == f"{identity}-1"


def test_the_warning_signal_reaches_the_stage(launcher: SubmititLauncher, tmp_path: Path) -> None:
    identity = launcher.submit(job(tmp_path, "warned"))
    wait_until(tmp_path / "out" / "ready")
    subprocess.run(["scancel", "--signal=USR2", identity], check=True)
    assert finish(launcher, identity, 60).state is State.DONE
    assert notes(tmp_path)[0]["restart"] == "1"


def test_a_preempted_job_runs_again(launcher: SubmititLauncher, tmp_path: Path) -> None:
    where = {"sbatch": {"nodelist": "a100-1", "exclusive": True}}
    low = launcher.submit(job(tmp_path / "low", "warned", partition="spot", **where))
    wait_until(tmp_path / "low" / "out" / "ready")
    high = launcher.submit(job(tmp_path / "high", "pass", partition="a100", **where))
    assert finish(launcher, high, 60).state is State.DONE
    assert finish(launcher, low, 90).state is State.DONE
    assert notes(tmp_path / "low")[0]["restart"] == "1"


def test_what_slurm_refuses_is_said_in_its_words(
    launcher: SubmititLauncher, tmp_path: Path
) -> None:
    with pytest.raises(SlurmError, match="invalid partition specified: nowhere"):
        launcher.submit(job(tmp_path, "pass", partition="nowhere"))


def test_a_new_driver_finds_the_job_of_the_old_one(
    launcher: SubmititLauncher, tmp_path: Path
) -> None:
    first = launcher.submit(job(tmp_path, "sleep"))
    again = SubmititLauncher(SlurmClient(poll_s=0.2))
    assert again.submit(job(tmp_path, "sleep")) == first
    again.cancel([first])
    assert finish(again, first).state is State.CANCELLED
    assert again.submit(job(tmp_path, "pass")) != first, "a dead job is not adopted"
    assert os.environ["SLURM_CONF"], "submitting keeps the environment"
