"""Why a job waits: what passes by itself, and what does not.

Source: https://slurm.schedmd.com/job_reason_codes.html ("All Reasons", 25.05); the names are those
of src/common/job_state_reason.c, which earlier versions share. Limits on what jobs may use together
(Grp, PerUser, PerAccount, MaxJobs, SubmitJob) pass when other jobs end, and a node that is down or
reserved (ReqNodeNotAvail) may come back; limits on what one job asks for stay. A job that asks for
more than such a limit grants in all is refused before submission (:mod:`slurm.quotas`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LOWER = "ask for less (plan: nodes, gpus, cpus, mem_mb, time_min) or use another QOS or account"
_HOPELESS = {
    "BadConstraints": "no node has all it asks for: look at constraint, gpu_type, gpus, cpus, "
    "mem_mb and exclude",
    "InvalidAccount": "set account in the site file to one of: sacctmgr show assoc user=$USER",
    "InvalidQOS": "set qos in the site file to one of: sacctmgr show assoc user=$USER format=qos",
    "AccountNotAllowed": "the partition does not take this account: choose another of the two",
    "QOSNotAllowed": "neither account nor partition may use this QOS: set qos in the site file",
    "PartitionTimeLimit": "lower time_min or choose another partition",
    "PartitionNodeLimit": "ask for fewer nodes or choose another partition",
    "PartitionConfig": "it breaks a rule of the partition: see scontrol show partition",
    "MaxMemPerLimit": "ask for less memory (mem_mb) or for more CPUs",
    "DependencyNeverSatisfied": "the job it depends on failed: take out the dependency",
    "DeadLine": "it cannot end before its deadline: take out sbatch.deadline",
    "ReservationDeleted": "set reservation in the site file to one that exists",
    "ReservationInvalid": "set reservation in the site file to one that you may use",
    "BurstBufferOperation": "its burst buffer failed: look at its burst buffer options",
}
_PER_JOB = re.compile(
    r"(?:Assoc|QOS)Max\w+?Per(?:Job|Node)(?:Limit)?|QOSMin(?:\w+NotSatisfied|[A-Z]\w*)"
)
_RELEASE = "release it with: scontrol release {id}"
_HELD = {
    "JobHeldUser": f"held by you or a coordinator of the account; {_RELEASE}",
    "JobHeldAdmin": "held by an administrator; ask why",
    "JobHoldMaxRequeue": f"held after too many requeues; look at its logs, then {_RELEASE}",
}
# Texts that stand in the place of a reason, words parted by blanks or underscores.
_HELD_TEXT = re.compile(r"(?:launch.failed.)?requeued.(?:in.)?held", re.IGNORECASE)


@dataclass(frozen=True)
class Stuck:
    """Why a job will not start however long it waits, and what to do."""

    reason: str
    advice: str
    held: bool = False
    """Somebody may release it; else nothing helps."""


def stuck(reason: str, identity: str) -> Stuck | None:
    """What is wrong with a job that waits for this reason; None where waiting helps.

    Args:
        reason: What squeue's ``%r`` shows.
        identity: The job's id, for the advice.
    """
    word = reason.strip("()").split(",")[0].strip()
    if word in _HOPELESS:
        return Stuck(word, _HOPELESS[word])
    if _PER_JOB.fullmatch(word):
        return Stuck(word, _LOWER)
    if word in _HELD:
        return Stuck(word, _HELD[word].format(id=identity), held=True)
    if _HELD_TEXT.search(word):
        advice = f"Slurm could not start it and holds it; look at its logs, then {_RELEASE}"
        return Stuck(word, advice.format(id=identity), held=True)
    return None
