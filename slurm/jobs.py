"""What a job asks for, and how it is."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

HET_GROUPS_VARIABLE = "RLINF_HET_GROUPS"
"""Variable with the numbers of the components of a heterogeneous job that are a process's own."""
_ID = re.compile(r"\d+(?:_(?:\d+|\[[\d,:%.-]*\]?)|\+\d+)?")
_SEVERAL = re.compile(r"(\d+)_\[([^\]%]*)(?:%\d+)?\]?")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def expand_job_ids(text: str) -> list[str]:
    """``12_[0,3-5,8-12:2%4]`` as ids of single elements; other ids as they are.

    ``%4`` is how many may run at once. A list that Slurm cut short (``12_[1,3,...]``) gives the
    elements it names.
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
    """Return whether a text is an id of one of these forms, and no word of a banner."""
    return _ID.fullmatch(text) is not None


def parent_job_id(identity: str) -> str:
    """The id of the array or heterogeneous job that a part belongs to; of another job its own."""
    return re.split("[_+]", identity, maxsplit=1)[0]


def current_job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """This process's job, by a name that means it alone; None outside of jobs.

    SLURM_JOB_ID of an array's last element is the id of the whole array, so that ``scontrol
    requeue`` with it would requeue all of its elements. In all components of a heterogeneous job it
    is the id of the first (measured on 22.05).
    """
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array is not None and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    components = current_het_components(environment)
    return components[0] if components else environment.get("SLURM_JOB_ID")


def current_het_components(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The components of a heterogeneous job that this process's ranks are on; else none."""
    if "SLURM_JOB_ID" not in environment or HET_GROUPS_VARIABLE not in environment:
        return []
    return [
        f"{environment['SLURM_JOB_ID']}+{n}" for n in environment[HET_GROUPS_VARIABLE].split(",")
    ]


@dataclass(frozen=True)
class JobResources:
    """What one job asks for; None leaves it to the cluster."""

    partition: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    gpu_type: str | None = None
    speed_weights: Mapping[str, float] | tuple[float, ...] | None = None
    """Relative speeds, of processes or by kind of node (a GPU's GRES name, a feature)."""
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
    """Shell lines run before the job's command: ``module load cuda``."""
    python_command: tuple[str, ...] = ()
    """Command prefix of Python, for containers: ``("apptainer", "exec", "--nv", "image.sif")``."""
    interpreter: str | None = None
    """Path of the Python that runs the command; None: this one, or that of the container."""
    env: Mapping[str, str] = field(default_factory=dict)
    sbatch: Mapping[str, str | int | bool] = field(default_factory=dict)
    """Further sbatch options, name to value; true is a flag without one."""
    signal_delay_s: int = 90
    """How long before the end the warning signal comes."""
    parallel_tasks: int | None = None
    """Most jobs of an array that run at once."""
    duty_cycle: float | Mapping[str, float] = 1.0
    """Share of the time that the processes may run, of all or by kind of node as in ``shares``;
    below 1 on dev clusters only."""

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """Words before the command of a process: the throttle where there is one, a container."""
        duty = self.duty_cycle
        if isinstance(duty, Mapping):
            text = ",".join(f"{kind}={share}" for kind, share in duty.items())
        else:
            text = "" if duty == 1 else str(duty)
        throttle = (sys.executable, "-m", "launchers.throttle", text) if text else ()
        return (*throttle, *self.python_command)

    @property
    def tasks(self) -> int:
        """Processes of the job."""
        return self.nodes * self.tasks_per_node


def current_job_resources(environment: Mapping[str, str] = os.environ) -> JobResources | None:
    """What the job asks for that this process runs in; None outside of jobs.

    Variables: manual pages of sbatch and salloc, "OUTPUT ENVIRONMENT VARIABLES". A step of a job
    may see fewer CPUs and GPUs than the job has.
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
    """Where a job is in its life."""

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
        """Whether it may still finish by itself."""
        return self in (JobState.PENDING, JobState.RUNNING)


@dataclass(frozen=True)
class JobStatus:
    """What is known of a job."""

    state: JobState
    exit_code: int | None = None
    reason: str = ""
    """Why it waits, or how it failed, with the end of its error output."""
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
    """``CANCELLED by 1000``, ``NODE_FAIL``, ``COMPLETED+`` and the like."""
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
_HELD = {
    "JobHeldUser": f"held by you or a coordinator of the account; {_RELEASE}",
    "JobHeldAdmin": "held by an administrator; ask why",
    "JobHoldMaxRequeue": f"held after too many requeues; look at its logs, then {_RELEASE}",
}
# Texts that stand in the place of a reason, words parted by blanks or underscores.
_HELD_TEXT = re.compile(r"(?:launch.failed.)?requeued.(?:in.)?held", re.IGNORECASE)


@dataclass(frozen=True)
class PendingProblem:
    """Why a job will not start however long it waits, and what to do."""

    reason: str
    advice: str
    is_on_hold: bool = False
    """Somebody may release it; else nothing helps."""


def diagnose_pending(reason: str, identity: str) -> PendingProblem | None:
    """What is wrong with a job that waits for this reason; None where waiting helps.

    Args:
        reason: What squeue's ``%r`` shows.
        identity: The job's id, for the advice.
    """
    word = reason.strip("()").split(",")[0].strip()
    if word in _HOPELESS:
        return PendingProblem(word, _HOPELESS[word])
    if _PER_JOB.fullmatch(word):
        return PendingProblem(word, _LOWER)
    if word in _HELD:
        return PendingProblem(word, _HELD[word].format(id=identity), is_on_hold=True)
    if _HELD_TEXT.search(word):
        advice = f"Slurm could not start it and holds it; look at its logs, then {_RELEASE}"
        return PendingProblem(word, advice.format(id=identity), is_on_hold=True)
    return None
