"""Submission: jobs as one call of sbatch, by way of submitit.

submitit writes the batch script, pickles what to call, and starts it on the nodes.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launchers.base import Job, Resources
from launchers.job import ModuleCall
from rlinf import machine
from rlinf.errors import SlurmError
from rlinf.tree import python_path
from slurm.deadline import MARGIN

EARLY_S = 30
"""Slurm looks at the time of jobs so rarely, and sends a signal that much too early (measured on
22.05; the manual page of sbatch says up to 60)."""


def sbatch(jobs: Sequence[Job]) -> list[str]:
    """Submit jobs that differ in their arguments and outputs only; returns their ids.

    Several become one job array, a single one does not.

    Raises:
        SlurmError: it was refused; carries Slurm's message.
    """
    import submitit
    from submitit.core.utils import FailedJobError

    first, needs = jobs[0], jobs[0].resources
    first.logs.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        job.out.mkdir(parents=True, exist_ok=True)
    path = tuple(python_path().split(os.pathsep))
    options: dict[str, Any] = {}
    if needs.prefix:
        own = () if needs.python else (sys.executable,)
        options["slurm_python"] = " ".join([*needs.prefix, *own])
    executor = submitit.AutoExecutor(folder=first.logs, cluster="slurm", **options)
    at_once = {"slurm_array_parallelism": len(jobs)}
    executor.update_parameters(**at_once | parameters(first.name, needs, path))
    shares = needs.shares or ()
    pairs = tuple(shares.items() if isinstance(shares, Mapping) else (("", s) for s in shares))
    calls = [
        ModuleCall(job.module, job.argv, path, str(job.logs), pairs, job.requeues) for job in jobs
    ]
    configuration = {k: v for k, v in os.environ.items() if k == "SLURM_CONF"}
    try:
        # Inside another job, sbatch would inherit that job's settings.
        with submitit.helpers.clean_env():
            os.environ.update(configuration)
            with executor.batch():
                submitted = [executor.submit(call) for call in calls]
            return [str(entry.job_id) for entry in submitted]
    except FailedJobError as error:
        raise SlurmError(f"{first.name}: sbatch refused the job: {_cause(error)}") from None


def parameters(name: str, needs: Resources, path: tuple[str, ...]) -> dict[str, Any]:
    """submitit's keywords for what a job asks for: the one place that translates them."""
    delay_s = needs.signal_delay_s
    if needs.time_min is not None:
        # Before Python runs the signal would kill the job; and a short job gets something done.
        delay_s = min(delay_s, (60 * needs.time_min - EARLY_S) // 2)
    env = {
        **machine.environment(),
        "PYTHONPATH": os.pathsep.join(path),
        MARGIN: str(delay_s),
        **needs.env,
    }
    exports = [f"export {key}={shlex.quote(value)}" for key, value in sorted(env.items())]
    further: dict[str, Any] = {"requeue": True, "open-mode": "append", **needs.sbatch}
    if needs.reservation:
        further["reservation"] = needs.reservation
    if needs.gpus_per_node:
        kind = f"{needs.gpu_type}:" if needs.gpu_type else ""
        further["gres"] = f"gpu:{kind}{needs.gpus_per_node}"
    wanted: dict[str, Any] = {
        "name": name.replace("/", "-"),
        "nodes": needs.nodes,
        "tasks_per_node": needs.tasks_per_node,
        "cpus_per_task": needs.cpus_per_task,
        "timeout_min": needs.time_min,
        "slurm_mem": f"{needs.mem_mb}M" if needs.mem_mb else None,
        "slurm_partition": needs.partition,
        "slurm_account": needs.account,
        "slurm_qos": needs.qos,
        "slurm_constraint": needs.constraint,
        "slurm_exclude": needs.exclude,
        "slurm_signal_delay_s": delay_s,
        "slurm_array_parallelism": needs.parallel_tasks,
        "slurm_setup": [*exports, *needs.setup],
        # One dead rank must not leave the others waiting for it.
        "slurm_srun_args": ["--kill-on-bad-exit=1"],
        "slurm_additional_parameters": further,
    }
    return {key: value for key, value in wanted.items() if value is not None}


def _cause(error: Exception) -> str:
    """Slurm's own words out of submitit's error."""
    lines = [line for line in str(error).splitlines() if "sbatch: error" in line]
    return "; ".join(line.split("sbatch: error:")[-1].strip() for line in lines) or str(error)
