"""Slurm jobs: ids, requested resources, states and the reasons why they are pending.

Ids are ``12``, an array's element ``12_3``, several of them ``12_[3-5]``, or a component of a
heterogeneous job ``12+1`` (manual pages of squeue, JOBID, and sbatch, ``--array``; Slurm's page on
heterogeneous jobs).

States: https://slurm.schedmd.com/job_state_codes.html (states and flags up to 25.05) and the manual
pages of squeue and sacct of 20.11 and later.

Reasons: https://slurm.schedmd.com/job_reason_codes.html ("All Reasons", 25.05); the names are those
of src/common/job_state_reason.c, which earlier versions share. Limits on the total of several jobs
(Grp, PerUser, PerAccount, MaxJobs, SubmitJob) end when other jobs end, and a node that is down or
reserved (ReqNodeNotAvail) may return; limits on a single job stay. A job that requests more than
such a total is refused before submission (:mod:`slurm.job_limits`).
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

JOB_NOTE = "job.json"
"""File beside the output of a submitted job: its Slurm id, name and tag."""
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
"""Signals by which Slurm announces the end of a job."""
HET_GROUPS_VARIABLE = "RLINF_HET_GROUPS"
"""Variable with the component numbers of a heterogeneous job that this process belongs to."""
_ID = re.compile(r"\d+(?:_(?:\d+|\[[\d,:%.-]*\]?)|\+\d+)?")
_SEVERAL = re.compile(r"(\d+)_\[([^\]%]*)(?:%\d+)?\]?")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def expand_job_ids(text: str) -> list[str]:
    """Expand ``12_[0,3-5,8-12:2%4]`` into ids of single elements; other ids are unchanged.

    ``%4`` limits how many elements run at once. A truncated list (``12_[1,3,...]``) expands to the
    elements that it names.
    """
    several = _SEVERAL.fullmatch(text)
    if several is None:
        return [text]
    found = []
    for part in several[2].split(","):
        if span := _RANGE.fullmatch(part):
            first = int(span[1])
            last = int(span[2] or first)
            found += [f"{several[1]}_{i}" for i in range(first, last + 1, int(span[3] or 1))]
    return found


def is_job_id(text: str) -> bool:
    """Return True if a text is a job id, and not a word of a banner."""
    return _ID.fullmatch(text) is not None


def parent_job_id(identity: str) -> str:
    """Return the id of the array or heterogeneous job of an element; a plain id is unchanged."""
    return re.split("[_+]", identity, maxsplit=1)[0]


def current_job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return an unambiguous id of this process's job; None outside of jobs.

    SLURM_JOB_ID of an array's last element is the id of the array, so ``scontrol requeue`` with it
    would requeue all elements. In every component of a heterogeneous job it is the id of the first
    one (measured on 22.05).
    """
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array is not None and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    components = current_het_components(environment)
    return components[0] if components else environment.get("SLURM_JOB_ID")


def current_het_components(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return ids of the heterogeneous components that this process's ranks use; empty if none."""
    if "SLURM_JOB_ID" not in environment or HET_GROUPS_VARIABLE not in environment:
        return []
    return [
        f"{environment['SLURM_JOB_ID']}+{n}" for n in environment[HET_GROUPS_VARIABLE].split(",")
    ]


@dataclass(frozen=True)
class JobResources:
    """The resources and settings that one job requests; None is the cluster's default."""

    partition: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    gpu_type: str | None = None
    speed_weights: Mapping[str, float] | tuple[float, ...] | None = None
    """Relative speeds of processes, or by kind of node (a GPU's GRES name or a feature)."""
    cpus_per_task: int = 1
    mem_mb: int | None = None
    """Memory per node, MiB."""
    time_limit_min: int | None = None
    """Wall-time limit, minutes."""
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    setup: tuple[str, ...] = ()
    """Shell lines that run before the job's command: ``module load cuda``."""
    python_command: tuple[str, ...] = ()
    """Words before the Python command, for containers: ``("apptainer", "exec", "image.sif")``."""
    interpreter: str | None = None
    """Path of the Python that runs the command; None: this one, or the container's."""
    env: Mapping[str, str] = field(default_factory=dict)
    sbatch: Mapping[str, str | int | bool] = field(default_factory=dict)
    """Further sbatch options, name to value; True is a flag without a value."""
    signal_delay_s: int = 90
    """Seconds between the warning signal and the end of the job."""
    parallel_tasks: int | None = None
    """Maximum elements of an array that run at once."""
    duty_cycle: float | Mapping[str, float] = 1.0
    """Share of the time that processes may run, for all or by kind of node as in
    ``speed_weights``; below 1 on dev clusters only."""

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """The words before a process's command: the throttle, if any, and the container."""
        duty = self.duty_cycle
        if isinstance(duty, Mapping):
            text = ",".join(f"{kind}={share}" for kind, share in duty.items())
        else:
            text = "" if duty == 1 else str(duty)
        throttle = (sys.executable, "-m", "launchers.throttle", text) if text else ()
        return (*throttle, *self.python_command)

    @property
    def tasks(self) -> int:
        """The number of processes of the job."""
        return self.nodes * self.tasks_per_node


def current_job_resources(environment: Mapping[str, str] = os.environ) -> JobResources | None:
    """Return the resources of the job around this process; None outside of jobs.

    Variables: manual pages of sbatch and salloc, "OUTPUT ENVIRONMENT VARIABLES". A step may see
    fewer CPUs and GPUs than its job has.
    """
    if current_job_id(environment) is None:
        return None

    def number(name: str) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdigit() else 0

    return JobResources(
        partition=environment.get("SLURM_JOB_PARTITION"),
        nodes=number("SLURM_JOB_NUM_NODES") or 1,
        gpus_per_node=number("SLURM_GPUS_ON_NODE"),
        cpus_per_task=number("SLURM_CPUS_ON_NODE") or 1,
        mem_mb=number("SLURM_MEM_PER_NODE") or None,
        account=environment.get("SLURM_JOB_ACCOUNT"),
        qos=environment.get("SLURM_JOB_QOS"),
    )


class JobState(Enum):
    """The state of a job, with Slurm's many states reduced to ten."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    OUT_OF_MEMORY = "out_of_memory"
    VANISHED = "vanished"

    @property
    def is_active(self) -> bool:
        """True if the job is pending or running."""
        return self in (JobState.PENDING, JobState.RUNNING)


@dataclass(frozen=True)
class JobStatus:
    """The state of a job with its exit code, reason and place."""

    state: JobState
    exit_code: int | None = None
    reason: str = ""
    """Why the job is pending, or how it failed, with the end of its error output."""
    partition: str = ""
    node: str = ""


log = logging.getLogger("rlinf")

SLURM_STATES = {
    "PENDING": JobState.PENDING,
    "CONFIGURING": JobState.PENDING,
    "POWER_UP_NODE": JobState.PENDING,
    "EXPEDITING": JobState.PENDING,
    # A flag: Slurm requeues the job, or its end follows.
    "LAUNCH_FAILED": JobState.PENDING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "COMPLETING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "UPDATE_DB": JobState.RUNNING,
    "COMPLETED": JobState.DONE,
    "FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED,
    "REVOKED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIMEOUT,
    "DEADLINE": JobState.TIMEOUT,
    "PREEMPTED": JobState.PREEMPTED,
    "NODE_FAIL": JobState.NODE_FAIL,
    "BOOT_FAIL": JobState.NODE_FAIL,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
}
_unknown: set[str] = set()


def parse_job_state(text: str) -> JobState:
    """Return the state for Slurm's text, such as ``CANCELLED by 1000`` or ``COMPLETED+``.

    An unknown state counts as running and is logged once.
    """
    words = text.split()
    name = words[0].rstrip("+").upper() if words else ""
    if name not in SLURM_STATES:
        if name not in _unknown:
            _unknown.add(name)
            log.warning("Slurm reports the unknown job state %r; treated as running", text)
        return JobState.RUNNING
    return SLURM_STATES[name]


_LOWER = (
    "ask for less (plan: nodes, gpus, cpus, mem_mb, time_limit_min) or use another QOS or account"
)
_HOPELESS = {
    "BadConstraints": "no node has all it asks for: look at constraint, gpu_type, gpus, cpus, "
    "mem_mb and exclude",
    "InvalidAccount": "set account in the site file to one of: sacctmgr show assoc user=$USER",
    "InvalidQOS": "set qos in the site file to one of: sacctmgr show assoc user=$USER format=qos",
    "AccountNotAllowed": "the partition does not take this account: choose another of the two",
    "QOSNotAllowed": "neither account nor partition may use this QOS: set qos in the site file",
    "PartitionTimeLimit": "lower time_limit_min or choose another partition",
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
_ON_HOLD = {
    "JobHeldUser": f"held by you or a coordinator of the account; {_RELEASE}",
    "JobHeldAdmin": "held by an administrator; ask why",
    "JobHoldMaxRequeue": f"held after too many requeues; look at its logs, then {_RELEASE}",
}
# Texts that squeue prints instead of a reason, with blanks or underscores between words.
_ON_HOLD_TEXT = re.compile(r"(?:launch.failed.)?requeued.(?:in.)?held", re.IGNORECASE)


@dataclass(frozen=True)
class PendingProblem:
    """A reason why a pending job will never start by itself, with advice."""

    reason: str
    advice: str
    is_on_hold: bool = False
    """True if somebody may release the job; otherwise it can never start."""


def diagnose_pending(reason: str, identity: str) -> PendingProblem | None:
    """Return the problem of a job that is pending for a reason; None if waiting helps.

    Args:
        reason: squeue's ``%r``.
        identity: the job's id, for the advice.
    """
    word = reason.strip("()").split(",")[0].strip()
    if word in _HOPELESS:
        return PendingProblem(word, _HOPELESS[word])
    if _PER_JOB.fullmatch(word):
        return PendingProblem(word, _LOWER)
    if word in _ON_HOLD:
        return PendingProblem(word, _ON_HOLD[word].format(id=identity), is_on_hold=True)
    if _ON_HOLD_TEXT.search(word):
        advice = f"Slurm could not start it and holds it; look at its logs, then {_RELEASE}"
        return PendingProblem(word, advice.format(id=identity), is_on_hold=True)
    return None
