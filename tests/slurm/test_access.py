"""Partitions that take jobs of some accounts and QOS alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.errors import PlanError
from slurm.discovery import build_partition
from slurm.job_limits import ClusterLimits
from slurm.jobs import JobResources
from slurm.records import AccountingLimits, Association, QosLimits, parse_partition_records

TEXT = Path(__file__).parent / "samples" / "22.05-inventory-partitions.txt"
RECORDS = {r["PartitionName"]: r for r in parse_partition_records(TEXT.read_text())}
TEAM = Association(cluster="dev", account="team", qos=("low", "normal"), default_qos="low")


def quotas(*associations: Association, version: str = "22.05.8") -> ClusterLimits:
    qos = {"normal": QosLimits(), "low": QosLimits(), "high": QosLimits()}
    return ClusterLimits(
        cluster="dev",
        accounting=AccountingLimits(associations=associations, qos=qos),
        partitions={name: build_partition(values) for name, values in RECORDS.items()},
        slurm_version=version,
    )


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        (
            JobResources("gpu", account="team", qos="normal"),
            "stages.train.partition: partition 'gpu' takes no jobs of account team, only of root",
        ),
        (JobResources("gpu", qos="normal"), "of account team"),
        (JobResources("gpu", account="root", qos="low"), "of QOS low, only of high, normal"),
        (JobResources("a100", qos="high"), "'a100' takes no jobs of QOS high; choose another"),
        (JobResources("cpu,gpu"), "'gpu' takes no jobs of account team"),
    ],
)
def test_a_partition_that_takes_no_such_job_is_refused(resources: JobResources, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        quotas(TEAM).check(resources, "stages.train")


def test_what_is_allowed_or_not_known_is_let_through() -> None:
    for request in (
        JobResources("gpu", account="ROOT", qos="high"),
        JobResources("a100", qos="normal"),
        JobResources(),
    ):
        quotas(TEAM).check(request, "stages.train")
    other = TEAM.model_copy(update={"account": "other"})
    quotas(TEAM, other).check(JobResources("gpu", qos="high"), "stages.train")


def test_later_versions_mean_accounts_below_those_listed_too() -> None:
    request = JobResources("gpu", account="team", qos="normal")
    quotas(TEAM, version="24.05.1").check(request, "stages.train")


def test_denied_accounts_count_where_none_are_allowed() -> None:
    denied = {"PartitionName": "gpu", "AllowAccounts": "ALL", "DenyAccounts": "guests"}
    request = JobResources("gpu", account="guests")
    limits = ClusterLimits(partitions={"gpu": build_partition(denied)}, slurm_version="25.05")
    with pytest.raises(PlanError, match="'gpu' takes no jobs of account guests; choose"):
        limits.check(request, "stages.train")
    for allowed in ("guests", "team"):
        partition = build_partition({**denied, "AllowAccounts": allowed})
        replace(limits, partitions={"gpu": partition}).check(request, "stages.train")
