"""Slurm jobs: ids, requested resources, states and the reasons why they are pending.

An id is ``12``, an array's element ``12_3``, several elements ``12_[3-5]``, or a component of a
heterogeneous job ``12+1`` (manual pages of squeue, JOBID, and sbatch, ``--array``; Slurm's page on
heterogeneous jobs).

States: https://slurm.schedmd.com/job_state_codes.html (states and flags up to 25.05) and the manual
pages of squeue and sacct of 20.11 and later.

Reasons: https://slurm.schedmd.com/job_reason_codes.html ("All Reasons", 25.05); the names are those
of src/common/job_state_reason.c, which earlier versions share. Waiting can help with limits over
several jobs (Grp, PerUser, PerAccount, MaxJobs, SubmitJob) and with a node that is down or reserved
(ReqNodeNotAvail). It cannot help with limits on a single job. A job that alone exceeds a limit over
several jobs is refused before submission (:mod:`slurm.job_limits`).
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
from pathlib import Path

JOB_FILE = "job.json"
"""Job file: a file beside the output of a submitted job, with its Slurm id, name, key and tag."""
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
"""Signals by which Slurm announces the end of a job."""
HET_GROUPS_VARIABLE = "RLINF_HET_GROUPS"
"""Environment variable with the numbers of the components of a heterogeneous job on which this
process's ranks run, separated by commas."""
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that a process may use."""
_ID = re.compile(r"\d+(?:_(?:\d+|\[[\d,:%.-]*\]?)|\+\d+)?")
_ARRAY_IDS = re.compile(r"(\d+)_\[([^\]%]*)(?:%\d+)?\]?")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def expand_job_ids(text: str) -> list[str]:
    """Expand ``12_[0,3-5,8-12:2%4]`` into ids of single elements; other ids are unchanged.

    ``%4`` limits how many elements run at once. A truncated list (``12_[1,3,...]``) expands to the
    elements that it names.
    """
    array_match = _ARRAY_IDS.fullmatch(text)
    if array_match is None:
        return [text]
    ids = []
    for part in array_match[2].split(","):
        if range_match := _RANGE.fullmatch(part):
            first = int(range_match[1])
            last, step = int(range_match[2] or first), int(range_match[3] or 1)
            ids += [f"{array_match[1]}_{i}" for i in range(first, last + 1, step)]
    return ids


def is_job_id(text: str) -> bool:
    """Return True if ``text`` is a job id. Slurm's commands may print a site's banner around it."""
    return _ID.fullmatch(text) is not None


def parent_job_id(job_id: str) -> str:
    """Return the id of the array or heterogeneous job of an element; a plain id is unchanged."""
    return re.split("[_+]", job_id, maxsplit=1)[0]


def current_job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return an unambiguous id of this process's job; None outside of jobs.

    SLURM_JOB_ID of an array's last element is the id of the array, so ``scontrol requeue`` with it
    would requeue all elements. In every component of a heterogeneous job it is the id of the first
    component (measured on 22.05).
    """
    array_id = environment.get("SLURM_ARRAY_JOB_ID")
    if array_id is not None and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{array_id}_{environment['SLURM_ARRAY_TASK_ID']}"
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
    """The resources and settings of one job; None stands for the cluster's default.

    A field with the name of an sbatch option has the value of this option.
    """

    partition: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    gpu_type: str | None = None
    speed_weights: Mapping[str, float] | tuple[float, ...] | None = None
    """Relative speeds: one per process, or by kind of node (its GPUs' GRES name, or a feature)."""
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
    """Prefix of the Python command, for containers: ``("apptainer", "exec", "image.sif")``."""
    interpreter: str | None = None
    """Path of the Python interpreter; None: the one of this process, or the container's."""
    env: Mapping[str, str] = field(default_factory=dict)
    sbatch: Mapping[str, str | int | bool] = field(default_factory=dict)
    """Further sbatch options, name to value; True is a flag without a value."""
    srun: Mapping[str, str | int | bool] = field(default_factory=dict)
    """Further options of the srun that starts the job's processes, as in ``sbatch``."""
    signal_delay_s: int = 90
    """Seconds between the warning signal and the end of the job."""
    array_parallelism: int | None = None
    """Maximum number of array elements that run at the same time."""
    duty_cycle: float | Mapping[str, float] = 1.0
    """Share of the time that processes may run: one number, or by kind of node as in
    ``speed_weights``. It is below 1 on dev clusters only."""

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """The prefix of a process's command: the throttle, if any, and the container."""
        duty = self.duty_cycle
        if isinstance(duty, Mapping):
            duty_text = ",".join(f"{kind}={share}" for kind, share in duty.items())
        else:
            duty_text = "" if duty == 1 else str(duty)
        throttle = (sys.executable, "-m", "launchers.throttle", duty_text) if duty_text else ()
        return (*throttle, *self.python_command)

    @property
    def tasks(self) -> int:
        """The number of processes of the job."""
        return self.nodes * self.tasks_per_node


def current_job_resources(environment: Mapping[str, str] = os.environ) -> JobResources | None:
    """Return the resources of the job that this process runs in; None outside of jobs.

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


def visible_gpus() -> list[str]:
    """Return the GPUs that processes on this machine see, as names for CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get(CUDA_VISIBLE_DEVICES)
    if visible is not None:
        return [name for name in map(str.strip, visible.split(",")) if name]
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


class JobState(Enum):
    """Slurm's job states in nine groups; VANISHED: neither queue nor accounting knows the job."""

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
    """The state of a job with its exit code, reason, partition and node."""

    state: JobState
    exit_code: int | None = None
    """None: unknown, or the job has not ended."""
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
    # A flag, not a state: Slurm then requeues the job or reports its end.
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
_logged_unknown_states: set[str] = set()


def parse_job_state(text: str) -> JobState:
    """Return the state for Slurm's text, such as ``CANCELLED by 1000`` or ``COMPLETED+``.

    An unknown state counts as running and is logged once.
    """
    words = text.split()
    name = words[0].rstrip("+").upper() if words else ""
    if name not in SLURM_STATES:
        if name not in _logged_unknown_states:
            _logged_unknown_states.add(name)
            log.warning("Slurm reports the unknown job state %r; treated as running", text)
        return JobState.RUNNING
    return SLURM_STATES[name]


_ASK_FOR_LESS = (
    "ask for less (plan: nodes, gpus, cpus, mem_mb, time_limit_min) or use another QOS or account"
)
_PERMANENT_REASON_ADVICE = {
    "BadConstraints": "no node satisfies the request: check constraint, gpu_type, gpus, cpus, "
    "mem_mb and exclude",
    "InvalidAccount": "set account in the site file; list: sacctmgr show assoc user=$USER",
    "InvalidQOS": "set qos in the site file; list: sacctmgr show assoc user=$USER format=qos",
    "AccountNotAllowed": "the partition does not accept this account: change account or partition",
    "QOSNotAllowed": "account or partition does not allow this QOS: set qos in the site file",
    "PartitionTimeLimit": "lower time_limit_min or choose another partition",
    "PartitionNodeLimit": "ask for fewer nodes or choose another partition",
    "PartitionConfig": "it violates a rule of the partition: see scontrol show partition",
    "MaxMemPerLimit": "ask for less memory (mem_mb) or for more CPUs",
    "DependencyNeverSatisfied": "the job it depends on failed: remove the dependency",
    "DeadLine": "it cannot end before its deadline: remove sbatch.deadline",
    "ReservationDeleted": "set reservation in the site file to one that exists",
    "ReservationInvalid": "set reservation in the site file to one that you may use",
    "BurstBufferOperation": "its burst buffer failed: check its burst buffer options",
}
_PER_JOB_REASON = re.compile(
    r"(?:Assoc|QOS)Max\w+?Per(?:Job|Node)(?:Limit)?|QOSMin(?:\w+NotSatisfied|[A-Z]\w*)"
)
_RELEASE = "release it with: scontrol release {id}"
_ON_HOLD_ADVICE = {
    "JobHeldUser": f"held by you or a coordinator of the account; {_RELEASE}",
    "JobHeldAdmin": "held by an administrator; ask them for the reason",
    "JobHoldMaxRequeue": f"held after too many requeues; read its logs, then {_RELEASE}",
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


def diagnose_pending(reason: str, job_id: str) -> PendingProblem | None:
    """Return why a job with this pending reason never starts by itself; None if it may start.

    Args:
        reason: squeue's ``%r``.
        job_id: the job's id, for the advice.
    """
    reason_code = reason.strip("()").split(",")[0].strip()
    if reason_code in _PERMANENT_REASON_ADVICE:
        return PendingProblem(reason_code, _PERMANENT_REASON_ADVICE[reason_code])
    if _PER_JOB_REASON.fullmatch(reason_code):
        return PendingProblem(reason_code, _ASK_FOR_LESS)
    if reason_code in _ON_HOLD_ADVICE:
        advice = _ON_HOLD_ADVICE[reason_code]
        return PendingProblem(reason_code, advice.format(id=job_id), is_on_hold=True)
    if _ON_HOLD_TEXT.search(reason_code):
        advice = f"Slurm could not start it and holds it; read its logs, then {_RELEASE}"
        return PendingProblem(reason_code, advice.format(id=job_id), is_on_hold=True)
    return None


def partition_names(text: str) -> tuple[str, ...]:
    """Split ``a100,h100`` into names; the job runs in the first partition with free nodes."""
    return tuple(name.strip() for name in text.split(","))
