"""sbatch's options: which of them a job's resources give, and which a site file may add.

Names are the long ones of the manual page of sbatch, without the leading dashes. Every batch script
of the product is written from :func:`sbatch_options`, so that a job has the same options whoever
submits it, and none of them twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlinf.errors import PlanError
from slurm.jobs import Resources
from slurm.words import check_option

Value = str | int | bool
MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
"""They exclude each other (manual page of sbatch)."""
_PLAN = {
    "partition": "partition",
    "nodes": "nodes",
    "ntasks": "processes",
    "ntasks-per-node": "processes",
    "ntasks-per-socket": "processes",
    "ntasks-per-core": "processes",
    "ntasks-per-gpu": "processes",
    "cpus-per-task": "cpus",
    "cpus-per-gpu": "cpus",
    "gpus": "gpus",
    "gpus-per-node": "gpus",
    "gpus-per-task": "gpus",
    "gpus-per-socket": "gpus",
}
"""Options that the plan decides, with its key."""
_DRIVER = {
    "partition": "partition",
    "cpus-per-task": "cpus",
    **dict.fromkeys(MEMORY, "mem_mb"),
    "time": "time_min",
    "mail-user": "mail",
}
"""Options that have a key of their own for the driver's job, with that key."""
_SITE = ("account", "qos", "constraint", "exclude", "reservation")
"""Options with a key of their own in the site file."""
# fmt: off
_OWN = frozenset(
    {
        "job-name", "output", "error", "array", "signal", "requeue", "no-requeue", "open-mode",
        "parsable", "quiet", "verbose", "wait", "wrap", "test-only", "hetjob", "clusters",
    }
)
"""Options that the program decides, or by which it would not know its own jobs."""
_SIZE = frozenset(
    {
        *MEMORY, *_PLAN, "gres", "gpu-bind", "gpu-freq", "exclusive", "oversubscribe",
        "overcommit", "mincpus", "tmp", "core-spec", "thread-spec", "cores-per-socket",
        "sockets-per-node", "threads-per-core", "extra-node-info", "hint", "distribution",
        "licenses", "bb", "bbf", "network", "tres-per-task", "tres-bind", "contiguous",
        "use-min-nodes", "spread-job",
    }
)
"""Options that say how much a job takes."""
_PLACE = frozenset(
    {
        "nodelist", "nodefile", "prefer", "cluster-constraint", "switches", "constraint", "qos",
        "reservation", "partition", "time", "time-min", "deadline", "begin", "dependency",
        "hold", "delay-boot", "priority", "array", "mail-user", "mail-type", "output", "error",
    }
)
"""Options that say where and when a job runs, and what is told of it."""
# fmt: on


def option_name(key: str) -> str:
    """Return an option's long name as sbatch has it, of a key with dashes or underscores."""
    return key.lstrip("-").replace("_", "-")


def check_options(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return further sbatch options under their long names.

    Raises:
        ValueError: an option would not be obeyed, does not fit into its line of a batch script, is
            given twice, or excludes another; says what to write instead.
    """
    found: dict[str, Value] = {}
    for key, value in values.items():
        name = option_name(key)
        if len(name) < 2 or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ValueError(f"{key!r} is no long option of sbatch; write its long name, as in mem")
        if name in found:
            raise ValueError(f"{name} is given twice; leave out {key!r} or the other")
        if advice := _advice(name, value):
            raise ValueError(advice)
        try:
            check_option(str(value))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        found[name] = value
    given = [name for name in MEMORY if found.get(name, False) is not False]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other; leave one of them")
    return found


def check_driver_options(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return further sbatch options of the driver's job under their long names.

    Raises:
        ValueError: as :func:`check_options`; or the job has a key of its own for it, or no use.
    """
    for key, value in values.items():
        name = option_name(key)
        if name in _DRIVER:
            raise ValueError(
                f"{name} has a key of its own beside sbatch; set cluster.driver.{_DRIVER[name]}"
            )
        if name in _PLAN or _has_gpus(name, value):
            raise ValueError(f"the driver's job is one process without GPUs; leave {name} out")
    return check_options(values)


def small_job_options(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return those of further options that make a job neither large nor bound to some nodes.

    What remains concerns how a job starts and is accounted: a comment, a wckey, a container.
    """
    return {k: v for k, v in values.items() if option_name(k) not in _SIZE | _PLACE}


def _advice(name: str, value: Value) -> str | None:
    """Return what to write instead of an option that would not be obeyed; None: it is."""
    if name in _SITE:
        return f"{name} has a key of its own beside sbatch; write {name}: {value}"
    if name in _PLAN:
        return f"the plan decides {name}; set {_PLAN[name]} there, under stages or defaults"
    if name in _OWN:
        return f"the program decides {name} itself; leave it out"
    if _has_gpus(name, value):
        return "the plan decides how many GPUs a job has; set gpus there, and leave gpu out of gres"
    return None


def _has_gpus(name: str, value: Value) -> bool:
    return name == "gres" and re.search(r"(?:^|[,/])gpu\b", str(value)) is not None


def sbatch_options(
    name: str, needs: Resources, *, requeues: bool = True, warning_s: int | None = None
) -> dict[str, Value]:
    """Return the options of a job's batch script; true is a flag, false and None are left out.

    What the resources say comes before what a site file says under ``sbatch``, which is a default:
    of ``mem``, ``mem-per-cpu`` and ``mem-per-gpu`` exactly one is written, or none.

    Args:
        name: of the job.
        requeues: whether Slurm starts it again itself after preemption or the loss of a node.
        warning_s: seconds between the warning signal and the end; None: those of the resources.

    Raises:
        PlanError: a value does not fit into its line of a batch script.
    """
    further = {option_name(key): value for key, value in needs.sbatch.items()}
    site_gres = further.pop("gres", None)
    values: dict[str, Any] = {
        "open-mode": "append",
        "signal": f"USR2@{needs.signal_delay_s if warning_s is None else warning_s}",
        **further,
        **_memory(needs, further),
        "job-name": name.replace("/", "-"),
        "nodes": needs.nodes,
        "ntasks-per-node": needs.tasks_per_node,
        "cpus-per-task": needs.cpus_per_task,
        "gres": ",".join(filter(None, [_gpus(needs), str(site_gres or "")])) or None,
        "requeue": requeues,
        "no-requeue": not requeues,
    }
    for key in ("partition", "account", "qos", "constraint", "exclude", "reservation"):
        values[key] = getattr(needs, key) or further.get(key)
    values["time"] = needs.time_min or further.get("time")
    written = {key: v for key, v in sorted(values.items()) if v is not None and v is not False}
    check_written(written, name)
    return written


def check_written(values: Mapping[str, Any], where: str) -> None:
    """See that options fit into lines of a batch script, whoever gave them.

    Args:
        where: the job, or the section of a configuration.

    Raises:
        PlanError: one does not.
    """
    for key, value in values.items():
        try:
            check_option(key)
            check_option(str(value))
        except ValueError as error:
            raise PlanError(f"{where}: {key!r} of sbatch: {error}") from None


def _gpus(needs: Resources) -> str:
    kind = f"{needs.gpu_type}:" if needs.gpu_type else ""
    return f"gpu:{kind}{needs.gpus_per_node}" if needs.gpus_per_node else ""


def _memory(needs: Resources, further: Mapping[str, Value]) -> dict[str, Any]:
    """Return all three options for memory, of which at most one has a value."""
    given: dict[str, Any] = {key: further.get(key) for key in MEMORY}
    if needs.mem_mb:
        given = {"mem": f"{needs.mem_mb}M"}
    elif not needs.gpus_per_node:
        # Without GPUs it would say nothing, and Slurm's default would hold.
        given.pop("mem-per-gpu")
    first = next((key for key in MEMORY if given.get(key) not in (None, False)), None)
    return {key: given[key] if key == first else None for key in MEMORY}


def step_options(needs: Resources) -> list[str]:
    """Return srun's options for the step of a job, which has all of what its job has.

    From 22.05 on srun does not take ``--cpus-per-task`` over from the job, so that a task would be
    bound to one CPU; earlier versions do (manual page of srun). Where the site, or its sbatch, sets
    ``--export=NONE``, srun would start tasks without the variables that the script sets.
    """
    return [f"--cpus-per-task={needs.cpus_per_task}", "--export=ALL", "--kill-on-bad-exit=1"]
