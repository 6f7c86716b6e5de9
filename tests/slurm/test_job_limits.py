"""Limits on the number of jobs, and on what one may ask for, are those that Slurm would apply."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlinf.errors import PlanError
from slurm.client import SlurmClient
from slurm.discovery import build_partition
from slurm.inventory import MAX_ARRAY_SIZE, MAX_JOB_COUNT, default_partition
from slurm.job_limits import (
    ClusterLimits,
    is_queue_full,
    read_cluster_limits,
)
from slurm.jobs import JobResources, JobState
from slurm.records import AccountingLimits, Association, QosLimits, QueuedJob

SAMPLES = Path(__file__).parent / "samples"
TEAM = Association(
    cluster="dev", account="team", qos=("normal",), max_submit=10, max_wall_min=600, max_jobs=5
)


def quotas(*associations: Association, qos: dict[str, QosLimits] | None = None) -> ClusterLimits:
    return ClusterLimits(
        cluster="dev",
        max_jobs=1000,
        accounting=AccountingLimits(
            associations=associations or (TEAM,), qos=qos or {"normal": QosLimits()}
        ),
        partitions={
            name: build_partition({"PartitionName": name, "QoS": qos, "Default": default})
            for name, qos, default in (
                ("Short", "part", "NO"),
                ("Shorter", "part", "NO"),
                ("cpu", "N/A", "YES"),
            )
        },
    )


def queued(account: str = "team", qos: str = "normal", partition: str = "cpu") -> QueuedJob:
    return QueuedJob(JobState.PENDING, None, "", partition, "", account, qos)


def test_an_account_counts_its_own_jobs_that_have_not_ended() -> None:
    quota = quotas().job_count_limits(JobResources())[0]
    assert (quota.max_jobs, quota.description) == (10, "MaxSubmitJobs of account team")
    assert quota.counts(queued())
    assert not quota.counts(queued(account="other"))
    assert not quota.counts(QueuedJob(JobState.DONE, 0, "", "cpu", "", "team", "normal"))


def test_a_qos_comes_before_the_account() -> None:
    """Hierarchy of Slurm's resource limits: the first that sets a limit is right."""
    found = quotas(qos={"normal": QosLimits(max_submit_per_user=50)}).job_count_limits(
        JobResources()
    )
    assert [quota.description for quota in found] == [
        "MaxSubmitJobsPerUser of QOS normal",
        "MaxJobCount of the cluster",
    ]
    assert found[0].counts(queued(account="other"))
    assert not found[0].counts(queued(qos="high"))


def test_a_partition_qos_comes_first_and_counts_jobs_of_all_its_partitions() -> None:
    limits = {"part": QosLimits(max_submit_per_user=3), "normal": QosLimits(max_submit_per_user=2)}
    found = quotas(qos=limits).job_count_limits(JobResources(partition="Short"))[0]
    assert (found.max_jobs, found.description) == (3, "MaxSubmitJobsPerUser of QOS part")
    assert found.counts(queued(partition="cpu,shorter"))
    assert not found.counts(queued(partition="cpu"))


def test_a_job_for_several_partitions_counts_against_the_limits_of_each() -> None:
    limits = {"part": QosLimits(max_submit_per_user=3), "normal": QosLimits()}
    found = quotas(qos=limits).job_count_limits(JobResources(partition="cpu,Short"))
    assert [quota.max_jobs for quota in found] == [3, 10, 1000]


def test_an_association_of_the_partition_is_nearer_than_the_general_one() -> None:
    special = TEAM.model_copy(update={"partition": "gpu", "max_submit": 4})
    found = quotas(TEAM, special).job_count_limits(JobResources(partition="GPU"))[0]
    assert found.max_jobs == 4
    assert found.counts(queued(partition="gpu"))
    assert not found.counts(queued(partition="cpu"))
    assert quotas(TEAM, special).job_count_limits(JobResources(partition="cpu"))[0].max_jobs == 10


def test_with_several_accounts_and_none_named_nothing_is_guessed() -> None:
    other = TEAM.model_copy(update={"account": "other", "max_submit": 1})
    assert [quota.max_jobs for quota in quotas(TEAM, other).job_count_limits(JobResources())] == [
        1000
    ]
    assert quotas(TEAM, other).job_count_limits(JobResources(account="other"))[0].max_jobs == 1


@pytest.mark.parametrize(
    ("account", "qos", "requested", "message"),
    [
        ({"max_submit": 0}, {}, {}, "MaxSubmitJobs of account team is 0"),
        ({"max_jobs": 0}, {}, {}, "MaxJobs of account team is 0"),
        (
            {},
            {},
            {"time_limit_min": 601},
            r"time_limit_min: 601 minutes requested, account team allows 600",
        ),
        ({}, {"max_wall_min": 60}, {"time_limit_min": 61}, "QOS normal allows 60"),
        (
            {"max_tres_per_job": {"gres/gpu": 3}},
            {},
            {"gpus_per_node": 2, "nodes": 2},
            r"gpus: 4 requested in all, account team allows a job 3 \(gres/gpu\)",
        ),
        (
            {"max_tres_all_jobs": {"cpu": 8}},
            {},
            {"cpus_per_task": 9},
            r"cpus: 9 requested in all, account team allows all jobs together 8 \(cpu\)",
        ),
        (
            {},
            {"max_tres_per_user": {"gres/gpu:h100": 1}, "max_tres_all_jobs": {"gres/gpu:h100": 9}},
            {"gpus_per_node": 2, "gpu_type": "h100"},
            r"QOS normal allows all jobs together 1 \(gres/gpu:h100\)",
        ),
    ],
)
def test_what_accounting_never_allows_is_refused_before_submission(
    account: dict[str, Any], qos: dict[str, Any], requested: dict[str, Any], message: str
) -> None:
    own = quotas(TEAM.model_copy(update=account), qos={"normal": QosLimits(**qos)})
    own.check(JobResources(), "stages.train") if "is 0" not in message else None
    with pytest.raises(PlanError, match=message):
        own.check(JobResources(**requested), "stages.train")


GPUS = JobResources(gpus_per_node=8, tasks_per_node=8)


@pytest.mark.parametrize(
    ("account", "qos", "message"),
    [
        (
            {},
            {"max_tres_per_user": {"gres/gpu": 8}},
            r"plan: pools\[0\] and pools\[1\]: .* 16 gpus in all, QOS normal allows 8 \(gres/gpu\)",
        ),
        ({"max_tres_all_jobs": {"cpu": 15}}, {}, r"16 cpus in all, account team allows 15"),
        ({"max_tres_all_jobs": {"mem": 1999}}, {}, r"2000 mem_mb in all, .* allows 1999 \(mem\)"),
        ({}, {"max_jobs_per_user": 1}, r"2 jobs in all, QOS normal allows 1 \(MaxJobs\)"),
        ({"max_submit": 1}, {}, r"2 jobs in all, account team allows 1 \(MaxSubmitJobs\)"),
    ],
)
def test_jobs_that_need_each_other_are_counted_together(
    account: dict[str, Any], qos: dict[str, Any], message: str
) -> None:
    own = quotas(TEAM.model_copy(update=account), qos={"normal": QosLimits(**qos)})
    jobs = {"pools[0]": [replace(GPUS, mem_mb=1000)], "pools[1]": [replace(GPUS, mem_mb=1000)]}
    for key, (needs,) in jobs.items():
        own.check(needs, key)
        own.check_concurrent({key: [needs]})
    with pytest.raises(PlanError, match=message):
        own.check_concurrent(jobs)
    elsewhere = replace(GPUS, account="other")
    own.check_concurrent({"pools[0]": [GPUS], "pools[1]": [GPUS, elsewhere]})


def test_a_job_of_several_partitions_counts_where_all_of_them_count_it() -> None:
    own = quotas(qos={"normal": QosLimits(), "part": QosLimits(max_jobs_per_user=1)})
    first = {"pools[0]": [JobResources(partition="Short")]}
    own.check_concurrent(first | {"pools[1]": [JobResources(partition="cpu,Short")]})
    with pytest.raises(PlanError, match="2 jobs in all, QOS part allows 1"):
        own.check_concurrent(first | {"pools[1]": [JobResources(partition="Shorter,Short")]})


def test_a_wider_qos_lifts_the_limits_of_the_account() -> None:
    own = quotas(qos={"normal": QosLimits(max_wall_min=6000)})
    own.check(JobResources(time_limit_min=700), "stages.train")


def test_refusals_that_pass_are_told_from_others() -> None:
    assert is_queue_full("sbatch: error: AssocMaxSubmitJobLimit")
    assert is_queue_full("QOSMaxSubmitJobPerUserLimit; Batch job submission failed")
    assert is_queue_full("AssocGrpSubmitJobsLimit")
    assert is_queue_full("Slurm temporarily unable to accept job, sleeping and retrying")
    assert not is_queue_full("invalid partition specified: nowhere")
    assert not is_queue_full("Requested time limit is invalid (missing or exceeds some limit)")


class Recorded(SlurmClient):
    """Answers with what the dev cluster said, its settings aside."""

    config = ""

    def run(self, *command: str) -> str:
        if "config" in command:
            return self.config
        if "--version" in command:
            return "slurm-wlm 22.05.8\n"
        name = {"scontrol": "partitions", "sacctmgr": "qos" if "qos" in command else "assoc"}
        return (SAMPLES / f"22.05-inventory-{name.get(command[0], 'sinfo')}.txt").read_text()


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("MaxArraySize            = 1001", 1001),
        ("MaxArraySize            = 0", 1),
        ("", MAX_ARRAY_SIZE),
        ("SchedulerParameters     = bf_continue,max_array_tasks=100\nMaxArraySize = 500", 100),
    ],
)
def test_the_size_of_arrays(line: str, want: int) -> None:
    client = Recorded()
    client.config = line
    assert read_cluster_limits(client).max_array_size == want


def test_limits_that_nobody_enforces_do_not_count() -> None:
    client = Recorded()
    client.config = "AccountingStorageEnforce = none\nClusterName = dev\n"
    assert [
        quota.max_jobs for quota in read_cluster_limits(client).job_count_limits(JobResources())
    ] == [MAX_JOB_COUNT]
    client.config = "AccountingStorageEnforce = associations,limits,qos\nClusterName = dev\n"
    found = read_cluster_limits(client)
    assert default_partition(found.partitions) == "cpu"
    assert found.job_count_limits(JobResources())[0].description == "MaxSubmitJobs of account root"
    assert (
        found.job_count_limits(JobResources(qos="high"))[0].description
        == "MaxSubmitJobsPerUser of QOS high"
    )
