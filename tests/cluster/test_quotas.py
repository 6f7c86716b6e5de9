"""Limits of a real Slurm: jobs over them wait in the launcher, those they forbid are given up."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from launchers.slurm_launcher import SlurmLauncher
from rlinf.errors import EXIT_BAD_INPUT, PlanError
from slurm.client import SlurmClient
from slurm.discovery import discover_partitions
from slurm.inventory import default_partition
from slurm.job_limits import ClusterLimits, read_cluster_limits
from slurm.jobs import JobState
from tests.cluster.helpers import finish, finish_all, job, several

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def nothing_queued(cluster: Path) -> None:
    """Jobs of this user count against its limits."""
    subprocess.run(["scancel", "-u", "root"], check=True)
    client, deadline = SlurmClient(), time.monotonic() + 30
    while any(status.state.is_active for status in client.queue().values()):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@contextmanager
def limited(kind: str, name: str, *limits: str) -> Iterator[None]:
    """Accounting with these limits on a user, account or QOS of the dev cluster."""
    command = ["sacctmgr", "-i", "modify", kind, name, "set"]
    subprocess.run([*command, *limits], check=True)
    try:
        yield
    finally:
        gone = [f"{limit.rpartition('=')[0]}=-1" for limit in limits]
        subprocess.run([*command, *gone], check=True)


def test_jobs_over_max_submit_jobs_wait_and_all_are_run(
    launcher: SlurmLauncher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with limited("user", "root", "MaxSubmitJobs=2"):
        ids = launcher.submit_array(several(tmp_path, "pass", 5))
        array = ids[0].split("_")[0]
        assert ids[:2] == [f"{array}_0", f"{array}_1"]
        assert ids[2:] == ["waiting-0", "waiting-1", "waiting-2"]
        assert "waits to be submitted: MaxSubmitJobs of account root is 2" in caplog.text
        found = finish_all(launcher, ids, 90)
    assert [status.state for status in found] == [JobState.DONE] * 5
    assert caplog.text.count("waits to be submitted") <= 3, "said once of each"


def test_a_refusal_for_now_is_tried_again(
    launcher: SlurmLauncher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GrpSubmitJobs counts jobs of others too, so only Slurm knows when there is room."""
    launcher.cluster_limits = launcher._queue.cluster_limits = ClusterLimits()
    with limited("account", "root", "GrpSubmitJobs=1"):
        ids = launcher.submit_array(several(tmp_path, "pass", 2))
        assert ids[0].isdigit(), "an array of both was refused, one alone was not"
        assert ids[1] == "waiting-0"
        assert "AssocGrpSubmitJobsLimit" in caplog.text
        found = finish_all(launcher, ids, 90)
    assert [status.state for status in found] == [JobState.DONE] * 2


def test_what_waits_here_can_be_cancelled(launcher: SlurmLauncher, tmp_path: Path) -> None:
    with limited("user", "root", "MaxSubmitJobs=1"):
        first, waiting = launcher.submit_array(several(tmp_path, "sleep", 2))
        launcher.cancel([waiting])
        launcher.cancel([first])
        states = [status.state for status in finish_all(launcher, [first, waiting])]
    assert states == [JobState.CANCELLED] * 2
    assert not (tmp_path / "out-1" / "job.json").exists()


def test_no_array_is_larger_than_allowed(launcher: SlurmLauncher, tmp_path: Path) -> None:
    launcher._queue.cluster_limits = replace(read_cluster_limits(launcher.client), max_array_size=2)
    ids = launcher.submit_array(several(tmp_path, "pass", 3))
    assert [identity.count("_") for identity in ids] == [1, 1, 0]
    assert [status.state for status in finish_all(launcher, ids)] == [JobState.DONE] * 3


def test_the_limits_of_this_cluster_are_read(cluster: Path) -> None:
    with limited("user", "root", "MaxSubmitJobs=7", "MaxWall=01:00:00"):
        quotas = read_cluster_limits(SlurmClient())
    assert quotas.max_array_size == 10001
    assert default_partition(quotas.partitions) == "cpu"
    needs = job(cluster, "pass").resources
    assert [quota.max_jobs for quota in quotas.job_count_limits(needs)] == [7, 20000]
    with pytest.raises(PlanError, match="61 minutes requested, account root allows 60"):
        quotas.check(replace(needs, time_limit_min=61), "stages.train")


def test_the_rules_and_the_unlike_nodes_of_a_partition_are_read(cluster: Path) -> None:
    change = ["scontrol", "update", "PartitionName=gpu"]
    subprocess.run([*change, "MaxNodes=2", "DenyQos=high"], check=True)
    try:
        client = SlurmClient()
        partition, quotas = discover_partitions(client)["gpu"], read_cluster_limits(client)
    finally:
        subprocess.run([*change, "MaxNodes=UNLIMITED", "DenyQos="], check=True)
    assert partition.max_nodes_per_job == 2
    assert [(group.count, group.gpus) for group in partition.groups] == [
        (2, {"a100": 4}),
        (2, {"h100": 4}),
    ]
    assert discover_partitions(client)["gpu"].max_nodes_per_job is None
    needs = replace(job(cluster, "pass").resources, partition="gpu")
    quotas.check(needs, "stages.train")
    with pytest.raises(PlanError, match="partition 'gpu' takes no jobs of QOS high"):
        quotas.check(replace(needs, qos="high"), "stages.train")


def test_a_job_that_can_never_start_is_given_up_with_words(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    launcher.stuck_timeout_s = 0.5
    with limited("qos", "normal", "MaxTRESPerJob=cpu=1"):
        identity = launcher.submit(job(tmp_path, "pass", cpus_per_task=2))
        status = finish(launcher, identity)
        assert (status.state, status.exit_code) == (JobState.FAILED, EXIT_BAD_INPUT)
        assert "could never start and was cancelled: QOSMaxCpuPerJobLimit" in status.reason
        assert "ask for less" in status.reason
        assert SlurmClient().queue()[identity].state is JobState.CANCELLED


def test_a_held_job_is_given_up_but_stays_and_is_found_again(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    launcher.hold_timeout_s = 0.5
    wanted = job(tmp_path, "pass", sbatch={"hold": True})
    identity = launcher.submit(wanted)
    status = finish(launcher, identity)
    assert (status.state, status.exit_code) == (JobState.FAILED, EXIT_BAD_INPUT)
    assert "JobHeldUser: held by you" in status.reason
    assert f"scontrol release {identity}" in status.reason
    subprocess.run(["scontrol", "release", identity], check=True)
    again = SlurmLauncher(SlurmClient(poll_interval_s=0.2))
    assert again.submit(wanted) == identity
    assert finish(again, identity).state is JobState.DONE


def test_cancelling_tolerates_jobs_that_are_gone(launcher: SlurmLauncher, tmp_path: Path) -> None:
    ids = launcher.submit_array(several(tmp_path, "sleep", 3))
    array = ids[0].split("_")[0]
    client = SlurmClient()
    client.cancel(["999998", "999999_3", f"{array}_[0-1]"])
    launcher.cancel(ids)
    launcher.cancel(ids)
    assert {status.state for status in finish_all(launcher, ids)} == {JobState.CANCELLED}
