"""Options of sbatch: from a job's resources and a site file, with checks of their text.

Names are the long ones of the manual page of sbatch, without the leading dashes. Every batch script
is written from :func:`sbatch_options`, so that a job has the same options whoever submits it, and
none of them twice.

A script quotes text of the configuration for the shell, which accepts any character in quotes.
sbatch parses its own lines of a script differently: a line break ends the line, and a backslash
takes the next quote or backslash literally, in quotes too (observed with 22.05).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from rlinf.errors import PlanError
from slurm.jobs import JobResources

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_option_text(value: str) -> str:
    """Return a value of an sbatch option, or a part of it, unchanged.

    Raises:
        ValueError: the value does not fit into a line of a batch script.
    """
    if found := _CONTROL.search(value):
        raise ValueError(
            f"{value!r} holds the control character {found[0]!r}, which would end or garble the "
            "option's line of the batch script; write the value on one line (in YAML without | "
            "and >)"
        )
    if "\\" in value:
        raise ValueError(f"{value!r} holds a backslash, which sbatch would leave out; do without")
    return value


def check_shell_text(value: str) -> str:
    """Return a word of a command line, a shell line or the value of a variable unchanged.

    Raises:
        ValueError: the text contains a null character.
    """
    if "\0" in value:
        raise ValueError(f"{value!r} holds a null character, which no command can be given")
    return value


def check_variable_name(name: str) -> str:
    """Return the name of an environment variable unchanged.

    Raises:
        ValueError: the name is not valid in a shell.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name of an environment variable: letters, digits and _, and no digit "
            "first"
        )
    return name


def check_log_folder(folder: Path) -> None:
    """Check that jobs can write their logs below a folder.

    Raises:
        PlanError: sbatch, srun or submitit would change its path.
    """
    try:
        check_option_text(str(folder))
        if "%" in str(folder):
            raise ValueError(f"{str(folder)!r} holds %, which Slurm replaces in paths of logs")
    except ValueError as error:
        raise PlanError(f"folder of Slurm jobs (run.root): {error}; choose another one") from None


OptionText = Annotated[str, AfterValidator(check_option_text)]
ShellText = Annotated[str, AfterValidator(check_shell_text)]
EnvironmentVariables = dict[Annotated[str, AfterValidator(check_variable_name)], ShellText]


OptionValue = str | int | bool
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
"""Options that exclude each other (manual page of sbatch)."""
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
"""Options that the plan sets, with the plan's key."""
_DRIVER = {
    "partition": "partition",
    "cpus-per-task": "cpus",
    **dict.fromkeys(MEMORY_OPTIONS, "mem_mb"),
    "time": "time_limit_min",
    "mail-user": "mail",
}
"""Options that have their own key for the driver's job, with that key."""
_SITE = ("account", "qos", "constraint", "exclude", "reservation")
"""Options that have their own key in the site file."""
# fmt: off
_OWN = frozenset(
    {
        "job-name", "output", "error", "array", "signal", "requeue", "no-requeue", "open-mode",
        "parsable", "quiet", "verbose", "wait", "wrap", "test-only", "hetjob", "clusters",
    }
)
"""Options that the program sets, or with which it could not find its own jobs."""
_SIZE = frozenset(
    {
        *MEMORY_OPTIONS, *_PLAN, "gres", "gpu-bind", "gpu-freq", "exclusive", "oversubscribe",
        "overcommit", "mincpus", "tmp", "core-spec", "thread-spec", "cores-per-socket",
        "sockets-per-node", "threads-per-core", "extra-node-info", "hint", "distribution",
        "licenses", "bb", "bbf", "network", "tres-per-task", "tres-bind", "contiguous",
        "use-min-nodes", "spread-job",
    }
)
"""Options that set the size of a job."""
_PLACE = frozenset(
    {
        "nodelist", "nodefile", "prefer", "cluster-constraint", "switches", "constraint", "qos",
        "reservation", "partition", "time", "time-min", "deadline", "begin", "dependency",
        "hold", "delay-boot", "priority", "array", "mail-user", "mail-type", "output", "error",
    }
)
"""Options that set where and when a job runs, and its mail and output."""
# fmt: on


def option_name(key: str) -> str:
    """Return sbatch's long option name of a key with dashes or underscores."""
    return key.lstrip("-").replace("_", "-")


def check_site_options(values: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return a site file's sbatch options under their long names.

    Raises:
        ValueError: an option would have no effect, does not fit into its line of a batch script,
            is set twice, or excludes another one; says what to write instead.
    """
    found: dict[str, OptionValue] = {}
    for key, value in values.items():
        name = option_name(key)
        if len(name) < 2 or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ValueError(f"{key!r} is no long option of sbatch; write its long name, as in mem")
        if name in found:
            raise ValueError(f"{name} is given twice; leave out {key!r} or the other")
        if advice := _advice(name, value):
            raise ValueError(advice)
        try:
            check_option_text(str(value))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        found[name] = value
    present = [name for name in MEMORY_OPTIONS if found.get(name, False) is not False]
    if len(present) > 1:
        raise ValueError(f"{' and '.join(present)} exclude each other; leave one of them")
    return found


def check_driver_options(values: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return the sbatch options of the driver's job under their long names.

    Raises:
        ValueError: as :func:`check_site_options`; or the option has its own key, or no use here.
    """
    for key, value in values.items():
        name = option_name(key)
        if name in _DRIVER:
            raise ValueError(
                f"{name} has a key of its own beside sbatch; set cluster.driver.{_DRIVER[name]}"
            )
        if name in _PLAN or _has_gpus(name, value):
            raise ValueError(f"the driver's job is one process without GPUs; leave {name} out")
    return check_site_options(values)


def portable_options(values: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return the options that set neither the size nor the place of a job.

    They concern how a job starts and is accounted: a comment, a wckey, a container.
    """
    return {k: v for k, v in values.items() if option_name(k) not in _SIZE | _PLACE}


def _advice(name: str, value: OptionValue) -> str | None:
    """Return what to write instead of an option that would have no effect; None if it has one."""
    if name in _SITE:
        return f"{name} has a key of its own beside sbatch; write {name}: {value}"
    if name in _PLAN:
        return f"the plan decides {name}; set {_PLAN[name]} there, under stages or defaults"
    if name in _OWN:
        return f"the program decides {name} itself; leave it out"
    if _has_gpus(name, value):
        return "the plan decides how many GPUs a job has; set gpus there, and leave gpu out of gres"
    return None


def _has_gpus(name: str, value: OptionValue) -> bool:
    return name == "gres" and re.search(r"(?:^|[,/])gpu\b", str(value)) is not None


def sbatch_options(
    name: str, resources: JobResources, *, allow_requeue: bool = True, warning_s: int | None = None
) -> dict[str, OptionValue]:
    """Return the options of a job's batch script; True is a flag, False and None are omitted.

    The fields of the resources override the site file's ``sbatch`` options, which are defaults. At
    most one of ``mem``, ``mem-per-cpu`` and ``mem-per-gpu`` is written.

    Args:
        name: the job's name.
        allow_requeue: whether Slurm itself restarts the job after preemption or a node failure.
        warning_s: seconds between the warning signal and the end; None: those of the resources.

    Raises:
        PlanError: a value does not fit into its line of a batch script.
    """
    further = {option_name(key): value for key, value in resources.sbatch.items()}
    site_gres = further.pop("gres", None)
    values: dict[str, Any] = {
        "open-mode": "append",
        "signal": f"USR2@{resources.signal_delay_s if warning_s is None else warning_s}",
        **further,
        **_memory(resources, further),
        "job-name": name.replace("/", "-"),
        "nodes": resources.nodes,
        "ntasks-per-node": resources.tasks_per_node,
        "cpus-per-task": resources.cpus_per_task,
        "gres": ",".join(filter(None, [_gpus(resources), str(site_gres or "")])) or None,
        "requeue": allow_requeue,
        "no-requeue": not allow_requeue,
    }
    for key in ("partition", "account", "qos", "constraint", "exclude", "reservation"):
        values[key] = getattr(resources, key) or further.get(key)
    values["time"] = resources.time_limit_min or further.get("time")
    written = {key: v for key, v in sorted(values.items()) if v is not None and v is not False}
    check_script_options(written, name)
    return written


def check_script_options(values: Mapping[str, Any], where: str) -> None:
    """Check that options fit into lines of a batch script.

    Args:
        where: the job or the section of the configuration, for error messages.

    Raises:
        PlanError: an option does not fit.
    """
    for key, value in values.items():
        try:
            check_option_text(key)
            check_option_text(str(value))
        except ValueError as error:
            raise PlanError(f"{where}: {key!r} of sbatch: {error}") from None


def _gpus(needs: JobResources) -> str:
    kind = f"{needs.gpu_type}:" if needs.gpu_type else ""
    return f"gpu:{kind}{needs.gpus_per_node}" if needs.gpus_per_node else ""


def _memory(needs: JobResources, further: Mapping[str, OptionValue]) -> dict[str, Any]:
    """Return the three memory options, of which at most one has a value."""
    options: dict[str, Any] = {key: further.get(key) for key in MEMORY_OPTIONS}
    if needs.mem_mb:
        options = {"mem": f"{needs.mem_mb}M"}
    elif not needs.gpus_per_node:
        # Without GPUs this option has no effect, and Slurm's default would apply.
        options.pop("mem-per-gpu")
    first = next((key for key in MEMORY_OPTIONS if options.get(key) not in (None, False)), None)
    return {key: options[key] if key == first else None for key in MEMORY_OPTIONS}


def srun_options(needs: JobResources) -> list[str]:
    """Return srun's options for a step that has all resources of its job.

    From 22.05 on srun does not inherit ``--cpus-per-task`` from the job, so a task would be bound
    to one CPU; earlier versions do (manual page of srun). If the site or its sbatch sets
    ``--export=NONE``, srun would start tasks without the variables that the script sets.
    """
    return [f"--cpus-per-task={needs.cpus_per_task}", "--export=ALL", "--kill-on-bad-exit=1"]
