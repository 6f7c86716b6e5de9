"""What a job asks for, and how it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from slurm.ids import own_id


@dataclass(frozen=True)
class Resources:
    """What one job asks for; None leaves it to the cluster."""

    partition: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    gpu_type: str | None = None
    shares: Mapping[str, float] | tuple[float, ...] | None = None
    """Relative speeds, of processes or by kind of node (a GPU's GRES name, a feature)."""
    cpus_per_task: int = 1
    mem_mb: int | None = None
    """Memory per node, MiB."""
    time_min: int | None = None
    """Wall-time limit, minutes."""
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    setup: tuple[str, ...] = ()
    """Shell lines run before the job's command: ``module load cuda``."""
    python: tuple[str, ...] = ()
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
    def prefix(self) -> tuple[str, ...]:
        """Words before the command of a process: the throttle where there is one, a container."""
        duty = self.duty_cycle
        if isinstance(duty, Mapping):
            text = ",".join(f"{kind}={share}" for kind, share in duty.items())
        else:
            text = "" if duty == 1 else str(duty)
        throttle = (sys.executable, "-m", "launchers.throttle", text) if text else ()
        return (*throttle, *self.python)

    @property
    def tasks(self) -> int:
        """Processes of the job."""
        return self.nodes * self.tasks_per_node


def own_job(environment: Mapping[str, str] = os.environ) -> Resources | None:
    """What the job asks for that this process runs in; None outside of jobs.

    Variables: manual pages of sbatch and salloc, "OUTPUT ENVIRONMENT VARIABLES". A step of a job
    may see fewer CPUs and GPUs than the job has.
    """
    if own_id(environment) is None:
        return None

    def number(name: str) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdigit() else 0

    return Resources(
        partition=environment.get("SLURM_JOB_PARTITION"),
        nodes=number("SLURM_JOB_NUM_NODES") or 1,
        gpus_per_node=number("SLURM_GPUS_ON_NODE"),
        cpus_per_task=number("SLURM_CPUS_ON_NODE") or 1,
        mem_mb=number("SLURM_MEM_PER_NODE") or None,
        account=environment.get("SLURM_JOB_ACCOUNT"),
        qos=environment.get("SLURM_JOB_QOS"),
    )


class State(Enum):
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
    def active(self) -> bool:
        """Whether it may still finish by itself."""
        return self in (State.PENDING, State.RUNNING)


@dataclass(frozen=True)
class Status:
    """What is known of a job."""

    state: State
    exit_code: int | None = None
    reason: str = ""
    """Why it waits, or how it failed, with the end of its error output."""
    partition: str = ""
    node: str = ""
