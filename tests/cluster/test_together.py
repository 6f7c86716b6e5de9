"""Jobs that start together, as one heterogeneous job of a real Slurm, and pools that do."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launchers.launcher import JobSpec
from launchers.slurm_launcher import SlurmLauncher
from rlinf.errors import EXIT_REQUEUE
from slurm.client import SlurmClient
from slurm.jobs import JobState, parent_job_id
from stages.layout import POOLS_FOLDER
from tests.cluster.helpers import finish_all, job, wait_until
from tests.cluster.test_quotas import limited, nothing_queued  # noqa: F401
from tests.cluster.test_runs import words
from tests.pipeline.helpers import contents, run_here, start_driver, until
from tests.pipeline.pools.test_executor import assert_like

pytestmark = pytest.mark.cluster
A100 = {"partition": "a100", "gpus_per_node": 1, "gpu_type": "a100"}
H100 = {"partition": "h100", "gpus_per_node": 2, "gpu_type": "h100", "tasks_per_node": 2}


def both(folder: Path, *what: str) -> list[JobSpec]:
    """One process on an a100, two on h100, with the logs of one run."""
    jobs = [job(folder, what[0], **A100), job(folder, what[-1], **H100)]
    outs = [folder / f"out-{i}" for i in range(2)]
    return [
        replace(one, argv=(one.argv[0], str(out)), output_dir=out)
        for one, out in zip(jobs, outs, strict=True)
    ]


def test_each_component_has_its_own_ranks_devices_and_way_to_meet(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    ids = launcher.submit_hetjob(both(tmp_path, "pass"))
    leader = parent_job_id(ids[0])
    assert ids == [f"{leader}+0", f"{leader}+1"]
    assert [status.state for status in finish_all(launcher, ids)] == [JobState.DONE] * 2
    notes = []
    for path in ("out-0/rank-0.0.json", "out-1/rank-0.0.json", "out-1/rank-1.0.json"):
        wait_until(tmp_path / path)
        notes.append(json.loads((tmp_path / path).read_text()))
    assert [(n["RANK"], n["WORLD_SIZE"]) for n in notes] == [("0", "1"), ("0", "2"), ("1", "2")]
    assert [note["node"].partition("-")[0] for note in notes] == ["a100", "h100", "h100"]
    assert [len(note["gpus"].split(",")) for note in notes] == [1, 2, 2]
    assert notes[1]["RLINF_GROUP"] == notes[2]["RLINF_GROUP"] != notes[0]["RLINF_GROUP"]


def test_they_are_found_again(launcher: SlurmLauncher, tmp_path: Path) -> None:
    ids = launcher.submit_hetjob(both(tmp_path, "sleep"))
    wait_until(tmp_path / "out-1/rank-1.0.json")
    again = SlurmLauncher(SlurmClient(poll_interval_s=0.2), unknown_job_timeout_s=3.0)
    assert again.submit_hetjob(both(tmp_path, "sleep")) == ids
    again.cancel(ids)
    assert [status.state for status in finish_all(again, ids)] == [JobState.CANCELLED] * 2


def test_when_one_fails_the_other_ends_and_both_are_failures(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    jobs = both(tmp_path, "sleep", "fail")
    patient = [replace(one, resources=replace(one.resources, signal_delay_s=2)) for one in jobs]
    ids = launcher.submit_hetjob(patient)
    first, second = finish_all(launcher, ids)
    assert first.state is JobState.FAILED
    assert (second.state, second.exit_code) == (JobState.FAILED, 65)
    assert "the reason of the failure" in second.reason


def test_when_one_fails_the_other_may_end_what_it_does(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    ids = launcher.submit_hetjob(both(tmp_path, "slow", "fail"))
    finish_all(launcher, ids)
    wait_until(tmp_path / "out-0" / "manifest.json")


def test_one_that_waits_is_cancelled_with_the_other(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    """Slurm refuses to cancel a component alone while it waits."""
    held = [
        replace(one, resources=replace(one.resources, sbatch={"hold": True}))
        for one in both(tmp_path, "pass")
    ]
    ids = launcher.submit_hetjob(held)
    launcher.cancel([ids[1]])
    assert [status.state for status in finish_all(launcher, ids)] == [JobState.CANCELLED] * 2


def test_one_that_is_asked_to_stop_leaves_the_other_its_time(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    ids = launcher.submit_hetjob(
        [replace(one, allow_requeue=False) for one in both(tmp_path, "requeue", "slow")]
    )
    first, second = finish_all(launcher, ids, 60)
    assert first.exit_code == EXIT_REQUEUE
    assert second.state is JobState.DONE


@pytest.mark.usefixtures("nothing_queued")
def test_they_wait_until_there_is_room_for_all(
    launcher: SlurmLauncher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with limited("user", "root", "MaxSubmitJobs=2"):
        first = launcher.submit(job(tmp_path / "first", "pass"))
        ids = launcher.submit_hetjob(both(tmp_path, "pass"))
        assert ids == ["waiting-0", "waiting-1"]
        assert "waits to be submitted: MaxSubmitJobs of account root is 2" in caplog.text
        found = finish_all(launcher, [first, *ids], 90)
    assert [status.state for status in found] == [JobState.DONE] * 3


def test_ranks_of_one_job_go_on_in_another_partition(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    """Two on an h100 node, then one on an a100, all in one world that knows its speeds."""
    first, second = both(tmp_path, "pass")
    shares = {"h100": 2.0, "a100": 1.0}
    resources = replace(second.resources, speed_weights=shares)
    wanted = replace(second, resources=resources, extra_components=(first.resources,))
    identity = launcher.submit(wanted)
    assert [status.state for status in finish_all(launcher, [identity])] == [JobState.DONE]
    notes = []
    for rank in range(3):
        wait_until(tmp_path / f"out-1/rank-{rank}.0.json")
        notes.append(json.loads((tmp_path / f"out-1/rank-{rank}.0.json").read_text()))
    assert [note["node"].partition("-")[0] for note in notes] == ["h100", "h100", "a100"]
    assert [note["LOCAL_RANK"] for note in notes] == ["0", "1", "0"]
    assert {note["shares"] for note in notes} == {"2.0,2.0,1.0"}
    assert {note["WORLD_SIZE"] for note in notes} == {"3"}
    assert len({note["RLINF_GROUP"] for note in notes}) == 1


def test_one_model_is_trained_on_two_partitions(cluster: Path, tmp_path: Path) -> None:
    """With unequal shares, in a pool that is a heterogeneous job, beside one that is not."""
    run_here(words(tmp_path / "reference"))
    train = {
        "partition": "h100",
        "processes": 2,
        "gpus": 2,
        "speed_weights": {"h100": 2.0, "a100": 1.0},
    }
    plan = {
        "defaults": {"mem_mb": 1500},
        "stages": {
            "rollout": {"partition": "cpu"},
            "reward": train,
            "inference": train,
            "train": train,
        },
        "pools": [
            {"stages": ["rollout"], "devices": {"cpu": 1}},
            {"stages": ["reward", "inference", "train"], "devices": {"h100": 2, "a100": 1}},
        ],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    call = words(tmp_path, "cluster=slurm", "cluster.poll_interval_s=0.2")
    driver = start_driver([*call, f"plan={tmp_path / 'plan.yaml'}"], tmp_path / "log")
    assert driver.wait(timeout=250) == 0, (tmp_path / "log").read_text()
    assert_like(tmp_path / "tiny", tmp_path / "reference" / "tiny")
    assert identity(tmp_path / "tiny", "1", 0).endswith("+0")


def test_pools_of_two_partitions_start_together_and_again_when_one_is_lost(
    cluster: Path, tmp_path: Path
) -> None:
    run_here(words(tmp_path / "reference", "iterations=12"))
    plan = {
        "hetjob": True,
        "defaults": {"mem_mb": 1500},
        "stages": {
            "rollout": {"partition": "a100", "gpus": 1},
            "reward": {"partition": "h100", "gpus": 1},
            "inference": {"partition": "h100", "gpus": 1},
            "train": {"partition": "h100", "gpus": 1},
        },
        "pools": [
            {"stages": ["rollout"], "devices": {"a100": 1}},
            {"stages": ["reward", "inference", "train"], "devices": {"h100": 1}},
        ],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    site = tmp_path / "site.yaml"
    # Long enough to be struck.
    site.write_text(yaml.safe_dump({"defaults": {"duty_cycle": 0.5}}))
    call = words(tmp_path, "iterations=12", "cluster=slurm", "cluster.poll_interval_s=0.2")
    call += [f"plan={tmp_path / 'plan.yaml'}", f"cluster.site={site}"]
    run, log = tmp_path / "tiny", tmp_path / "log"
    driver = start_driver(call, log)
    until((run / "it/0002/sync/manifest.json").exists, driver, log)
    leases = [identity(run, pool, 0) for pool in "01"]
    assert leases == [f"{parent_job_id(leases[0])}+0", f"{parent_job_id(leases[0])}+1"]
    subprocess.run(["scancel", leases[1]], check=True)
    assert driver.wait(timeout=250) == 0, log.read_text()
    assert contents(run) == contents(tmp_path / "reference" / "tiny")
    later = [identity(run, pool, 1) for pool in "01"]
    assert parent_job_id(later[0]) == parent_job_id(later[1]) != parent_job_id(leases[0])


def identity(run: Path, pool: str, lease: int) -> str:
    return str(json.loads((run / POOLS_FOLDER / pool / str(lease) / "job.json").read_text())["id"])
