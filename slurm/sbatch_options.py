"""Options of sbatch and srun: built from a job's resources and a site file, with checks.

Options have the long names of sbatch's manual page, without leading dashes. Every batch script is
written from :func:`sbatch_options`, so that a job has the same options however it is submitted, and
each option once.

A script quotes text of the configuration for the shell, which accepts any character in quotes.
sbatch parses its own lines of a script differently: a line break ends the line, and a backslash
escapes the next quote or backslash, even in quotes (observed with 22.05).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from rlinf.errors import PlanError
from slurm.jobs import JobResources

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_option_text(value: str) -> str:
    """Return a value of an sbatch option, or a part of it, unchanged.

    Raises:
        ValueError: the value does not fit into a line of a batch script.
    """
    if control := _CONTROL_CHARACTER.search(value):
        raise ValueError(
            f"{value!r} contains the control character {control[0]!r}, which would end or garble "
            "the option's line of the batch script; write the value on one line (in YAML without | "
            "and >)"
        )
    if "\\" in value:
        raise ValueError(f"{value!r} contains a backslash, which sbatch would drop; remove it")
    return value


def check_shell_text(value: str) -> str:
    """Return a word of a command line, a shell line or the value of a variable unchanged.

    Raises:
        ValueError: the text contains a null character.
    """
    if "\0" in value:
        raise ValueError(f"{value!r} contains a null character, which no command accepts")
    return value


def check_variable_name(name: str) -> str:
    """Return the name of an environment variable unchanged.

    Raises:
        ValueError: the name is not valid in a shell.
    """
    if not _VARIABLE_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a name of an environment variable: use letters, digits and _, with "
            "no digit first"
        )
    return name


def check_log_folder(folder: Path) -> None:
    """Check that jobs can write their logs below a folder.

    Raises:
        PlanError: sbatch or srun would change its path.
    """
    try:
        check_option_text(str(folder))
        if "%" in str(folder):
            raise ValueError(f"{str(folder)!r} contains %, which Slurm replaces in paths of logs")
    except ValueError as error:
        raise PlanError(f"folder of Slurm jobs (run.root): {error}; choose another one") from None


OptionText = Annotated[str, AfterValidator(check_option_text)]
ShellText = Annotated[str, AfterValidator(check_shell_text)]
EnvironmentVariables = dict[Annotated[str, AfterValidator(check_variable_name)], ShellText]


OptionValue = str | int | bool
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
"""Mutually exclusive options (manual page of sbatch)."""
_PLAN_KEYS = {
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
"""Options that the plan sets, with their keys in the plan."""
_DRIVER_KEYS = {
    "partition": "partition",
    "cpus-per-task": "cpus",
    **dict.fromkeys(MEMORY_OPTIONS, "mem_mb"),
    "time": "time_limit_min",
    "mail-user": "mail",
}
"""Options that have a separate key under ``cluster.driver``, with that key."""
_SITE_KEYS = ("account", "qos", "constraint", "exclude", "reservation")
"""Options that have a separate key in the site file."""
# fmt: off
_RESERVED_OPTIONS = frozenset(
    {
        "job-name", "output", "error", "array", "signal", "requeue", "no-requeue", "open-mode",
        "parsable", "quiet", "verbose", "wait", "wrap", "test-only", "hetjob", "clusters",
    }
)
"""Options that this program sets, or with which it could not find its jobs."""
_SIZE_OPTIONS = frozenset(
    {
        *MEMORY_OPTIONS, *_PLAN_KEYS, "gres", "gpu-bind", "gpu-freq", "exclusive", "oversubscribe",
        "overcommit", "mincpus", "tmp", "core-spec", "thread-spec", "cores-per-socket",
        "sockets-per-node", "threads-per-core", "extra-node-info", "hint", "distribution",
        "licenses", "bb", "bbf", "network", "tres-per-task", "tres-bind", "contiguous",
        "use-min-nodes", "spread-job",
    }
)
"""Options that set the size of a job."""
_CONTAINER_OPTION = re.compile(r"(?:no-)?container(?:-[a-z-]+)?")
"""Options of Slurm and of the plugin Pyxis that start processes in a container."""
_SRUN_KEYS = {
    **_PLAN_KEYS,
    **dict.fromkeys(MEMORY_OPTIONS, "mem_mb"),
    "time": "time_limit_min",
    "constraint": "constraint",
}
"""Options of srun that the job already has from the plan, with their keys in the plan."""
_SRUN_RESERVED_OPTIONS = frozenset(
    {
        "chdir", "export", "het-group", "input", "jobid", "kill-on-bad-exit", "label",
        "multi-prog", "pty", "relative", "signal", "unbuffered", "wait",
    }
)
"""Options of srun that this program sets, or that would break the start of its processes."""
_PLACEMENT_OPTIONS = frozenset(
    {
        "nodelist", "nodefile", "prefer", "cluster-constraint", "switches", "constraint", "qos",
        "reservation", "partition", "time", "time-min", "deadline", "begin", "dependency",
        "hold", "delay-boot", "priority", "array", "mail-user", "mail-type", "output", "error",
    }
)
"""Options that set where and when a job runs, its mail and its output."""
# fmt: on


def option_name(key: str) -> str:
    """Return sbatch's long option name for a key with dashes or underscores."""
    return key.lstrip("-").replace("_", "-")


def check_site_options(values: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return a site file's sbatch options under their long names.

    Raises:
        ValueError: an option would have no effect, does not fit into its line of a batch script,
            is set twice, or excludes another one. The message says what to write instead.
    """
    options = _read_options(values, "sbatch", "mem", _advice, check_option_text)
    memory_options = [name for name in MEMORY_OPTIONS if options.get(name, False) is not False]
    if len(memory_options) > 1:
        raise ValueError(f"{' and '.join(memory_options)} exclude each other; keep one of them")
    return options


def check_srun_options(values: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return a site file's srun options under their long names.

    Raises:
        ValueError: an option would change what the plan or the program decides, or is set twice.
            The message says what to write instead.
    """
    return _read_options(values, "srun", "mpi", _srun_advice, check_shell_text)


def _read_options(
    values: Mapping[str, OptionValue],
    command: str,
    example: str,
    advice: Callable[[str, OptionValue], str | None],
    check_text: Callable[[str], str],
) -> dict[str, OptionValue]:
    """Return options under their long names.

    Args:
        example: a long option of the command, for messages.
        advice: returns what to write instead of an option that cannot be set here, else None.
        check_text: raises ValueError if a value cannot be passed to the command.

    Raises:
        ValueError: an option is not a long one, is set twice, or cannot be set here.
    """
    options: dict[str, OptionValue] = {}
    for key, value in values.items():
        name = option_name(key)
        if len(name) < 2 or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ValueError(
                f"{key!r} is not a long {command} option; write the long name, like {example}"
            )
        if name in options:
            raise ValueError(f"{name} is set twice; remove {key!r} or the other key")
        if instead := advice(name, value):
            raise ValueError(instead)
        try:
            check_text(str(value))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        options[name] = value
    return options


def check_driver_options(values: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return the sbatch options of the driver's job under their long names.

    Raises:
        ValueError: as :func:`check_site_options`; or the option has a separate key under
            ``cluster.driver``, or does not fit a job of one process without GPUs.
    """
    for key, value in values.items():
        name = option_name(key)
        if name in _DRIVER_KEYS:
            instead = f"cluster.driver.{_DRIVER_KEYS[name]}"
            raise ValueError(f"{name} has a key of its own beside sbatch; set {instead}")
        if name in _PLAN_KEYS or _has_gpus(name, value):
            raise ValueError(f"the driver's job is one process without GPUs; leave {name} out")
    return check_site_options(values)


def portable_options(values: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return the options that set neither the size nor the placement of a job.

    The options that remain set how a job starts and is accounted: comment, wckey, container.
    """
    excluded = _SIZE_OPTIONS | _PLACEMENT_OPTIONS
    return {k: v for k, v in values.items() if option_name(k) not in excluded}


def _advice(name: str, value: OptionValue) -> str | None:
    """Return advice for an option that cannot be set here; None if it can."""
    if name in _SITE_KEYS:
        return f"{name} has a key of its own beside sbatch; write {name}: {value}"
    if name in _PLAN_KEYS:
        return f"the plan decides {name}; set {_PLAN_KEYS[name]} there, under stages or defaults"
    if name in _RESERVED_OPTIONS:
        return f"the program decides {name} itself; leave it out"
    if _CONTAINER_OPTION.fullmatch(name):
        return (
            f"{name} would put the batch script into the container, which has no srun; write it "
            "under srun, so that each process starts in the container"
        )
    if _has_gpus(name, value):
        return "the plan decides how many GPUs a job has; set gpus there, and leave gpu out of gres"
    return None


def _srun_advice(name: str, value: OptionValue) -> str | None:
    """Return advice for an option of srun that cannot be set here; None if it can."""
    if name in _SRUN_KEYS:
        return f"the plan decides {name}; set {_SRUN_KEYS[name]} there"
    if _has_gpus(name, value):
        return "the plan decides how many GPUs a job has; set gpus there"
    if name in _RESERVED_OPTIONS | _SRUN_RESERVED_OPTIONS | {*_SITE_KEYS}:
        return f"the job itself has {name}, or the program decides it; leave it out"
    return None


def _has_gpus(name: str, value: OptionValue) -> bool:
    return name == "gres" and re.search(r"(?:^|[,/])gpu\b", str(value)) is not None


def sbatch_options(
    name: str, resources: JobResources, *, allow_requeue: bool = True, warning_s: int | None = None
) -> dict[str, OptionValue]:
    """Return the options of a job's batch script. True is a flag; False and None are omitted.

    The site file's ``sbatch`` options are defaults; the fields of the resources override them. At
    most one of ``mem``, ``mem-per-cpu`` and ``mem-per-gpu`` is written.

    Args:
        name: the job's name.
        allow_requeue: whether Slurm itself restarts the job after preemption or a node failure.
        warning_s: seconds between the warning signal and the end; None: as in the resources.

    Raises:
        PlanError: a value does not fit into its line of a batch script.
    """
    site_options = {option_name(key): value for key, value in resources.sbatch.items()}
    site_gres = site_options.pop("gres", None)
    values: dict[str, Any] = {
        "open-mode": "append",
        "signal": f"USR2@{resources.signal_delay_s if warning_s is None else warning_s}",
        **site_options,
        **_mem_options(resources, site_options),
        "job-name": name.replace("/", "-"),
        "nodes": resources.nodes,
        "ntasks-per-node": resources.tasks_per_node,
        "cpus-per-task": resources.cpus_per_task,
        "gres": ",".join(filter(None, [_gpu_gres(resources), str(site_gres or "")])) or None,
        "requeue": allow_requeue,
        "no-requeue": not allow_requeue,
    }
    for key in ("partition", "account", "qos", "constraint", "exclude", "reservation"):
        values[key] = getattr(resources, key) or site_options.get(key)
    values["time"] = resources.time_limit_min or site_options.get("time")
    options = {key: v for key, v in sorted(values.items()) if v is not None and v is not False}
    check_script_options(options, name)
    return options


def check_script_options(values: Mapping[str, Any], source: str) -> None:
    """Check that options fit into lines of a batch script.

    Args:
        source: the job or the section of the configuration, for error messages.

    Raises:
        PlanError: an option does not fit.
    """
    for key, value in values.items():
        try:
            check_option_text(key)
            check_option_text(str(value))
        except ValueError as error:
            raise PlanError(f"{source}: {key!r} of sbatch: {error}") from None


def _gpu_gres(resources: JobResources) -> str:
    type_prefix = f"{resources.gpu_type}:" if resources.gpu_type else ""
    return f"gpu:{type_prefix}{resources.gpus_per_node}" if resources.gpus_per_node else ""


def _mem_options(
    resources: JobResources, site_options: Mapping[str, OptionValue]
) -> dict[str, Any]:
    """Return the memory options; at most one of them has a value."""
    options: dict[str, Any] = {key: site_options.get(key) for key in MEMORY_OPTIONS}
    if resources.mem_mb:
        options = {"mem": f"{resources.mem_mb}M"}
    elif not resources.gpus_per_node:
        # Without GPUs this option has no effect, and Slurm's default would apply.
        options.pop("mem-per-gpu")
    chosen = next((key for key in MEMORY_OPTIONS if options.get(key) not in (None, False)), None)
    return {key: options[key] if key == chosen else None for key in MEMORY_OPTIONS}


def srun_options(resources: JobResources) -> list[str]:
    """Return srun's options for a step that has all resources of its job.

    From 22.05 on, srun no longer inherits ``--cpus-per-task`` from the job and would bind a task to
    one CPU (manual page of srun). If the site or its sbatch sets ``--export=NONE``, srun would
    start tasks without the variables that the script sets.

    Tasks with GPUs are distributed in blocks: the first tasks of a node get the CPUs of its first
    socket. So a task is near the GPU that has the number of its local rank, because GPUs are
    numbered by socket too. By default Slurm would distribute them over the sockets in turn.
    """
    options: dict[str, OptionValue] = {
        "cpus-per-task": resources.cpus_per_task,
        "export": "ALL",
        "kill-on-bad-exit": 1,
    }
    if resources.gpus_per_node and resources.tasks_per_node > 1:
        options["distribution"] = "block:block"
    options |= {option_name(key): value for key, value in resources.srun.items()}
    return [
        f"--{name}" + f"={value}" * (value is not True)
        for name, value in options.items()
        if value is not False
    ]
