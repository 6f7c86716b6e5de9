"""What never ends by itself is told from what passes."""

from __future__ import annotations

import pytest

from slurm.jobs import diagnose_pending


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("BadConstraints", "constraint"),
        ("(BadConstraints)", "constraint"),
        ("InvalidAccount", "account"),
        ("InvalidQOS", "qos"),
        ("PartitionConfig", "scontrol show partition"),
        ("PartitionTimeLimit", "time_limit_min"),
        ("PartitionNodeLimit", "fewer nodes"),
        ("AccountNotAllowed", "account"),
        ("DependencyNeverSatisfied", "depends"),
        ("QOSMaxGRESPerJob", "gpus"),
        ("QOSMaxCpuPerJobLimit", "cpus"),
        ("QOSMaxNodePerJobLimit", "nodes"),
        ("QOSMaxWallDurationPerJobLimit", "time_limit_min"),
        ("QOSMaxGRESPerNode", "gpus"),
        ("QOSMinCpuNotSatisfied", "QOS"),
        ("QOSMinGRES", "QOS"),
        ("AssocMaxCpuPerJobLimit", "account"),
        ("AssocMaxWallDurationPerJobLimit", "time_limit_min"),
        ("MaxMemPerLimit", "mem_mb"),
        ("ReservationDeleted", "reservation"),
    ],
)
def test_what_never_starts(reason: str, words: str) -> None:
    found = diagnose_pending(reason, "12")
    assert found is not None
    assert not found.is_on_hold
    assert words in found.advice


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("JobHeldUser", "scontrol release 12_3"),
        ("JobHeldAdmin", "administrator"),
        ("JobHoldMaxRequeue", "scontrol release 12_3"),
        ("launch failed requeued held", "scontrol release 12_3"),
        ("launch_failed_requeued_held", "scontrol release 12_3"),
        ("job requeued in held state", "scontrol release 12_3"),
    ],
)
def test_what_somebody_holds(reason: str, words: str) -> None:
    found = diagnose_pending(reason, "12_3")
    assert found is not None
    assert found.is_on_hold
    assert words in found.advice


@pytest.mark.parametrize(
    "reason",
    [
        "",
        "None",
        "Priority",
        "Resources",
        "Dependency",
        "BeginTime",
        "Licenses",
        "Reservation",
        "ReqNodeNotAvail, UnavailableNodes:a100-[1-2]",
        "ReqNodeNotAvail, May be reserved for other job",
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority",
        "PartitionDown",
        "PartitionInactive",
        "JobArrayTaskLimit",
        "QOSGrpCpuLimit",
        "QOSGrpGRES",
        "QOSMaxGRESPerUser",
        "QOSMaxJobsPerUserLimit",
        "QOSMaxSubmitJobPerUserLimit",
        "QOSMaxCpuPerUserLimit",
        "MaxGRESPerAccount",
        "AssocGrpCpuLimit",
        "AssocGrpCPUMinutesLimit",
        "AssocGrpJobsLimit",
        "AssocMaxJobsLimit",
        "a reason of a later version",
    ],
)
def test_what_passes(reason: str) -> None:
    assert diagnose_pending(reason, "12") is None
