"""``rlinf doctor``: checks of this machine, the cluster and simulators. Each finding has a
remedy."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from pipeline.commands.experiment import compose_words
from pipeline.commands.node_probe import list_gpus
from pipeline.console import create_console
from rlinf import package_paths
from rlinf.config import RunConfig, validate
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.simulators.requirements import SimulatorRequirements, get_requirements
from rlinf.errors import ConfigError, RlinfError
from rlinf.interpreters import missing_modules, resolve_interpreter
from slurm.client import SlurmClient
from slurm.discovery import discover_partitions
from slurm.inventory import PartitionInventory
from stages.factory import environment_class


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    level: Literal["ok", "warn", "fail"]
    check: str
    """Name of the check."""
    detail: str
    """Result, with a remedy if there is a problem."""


def show_findings(findings: Iterable[Finding]) -> int:
    """Print findings; returns 0 if none is a failure, else 1."""
    table = Table(title="rlinf doctor", title_justify="left", show_header=False)
    levels = Counter[str]()
    for finding in findings:
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
        table.add_row(Text(finding.level, style=colour), finding.check, Text(finding.detail))
        levels[finding.level] += 1
    console = create_console()
    console.print(table)
    console.print(
        f"not fit: {levels['fail']} of {levels.total()} checks failed"
        if levels["fail"]
        else f"fit: no check of {levels.total()} failed, {levels['warn']} with a warning"
    )
    return int(levels["fail"] > 0)


PACKAGES = {
    "submitit": "slurm",
    "snakemake": "slurm",
    "gymnasium": "sims",
    "mujoco": "sims",
    "math_verify": "math",
    "tensorboard": "core",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "vllm": "vllm",
    "deepspeed": "deepspeed",
    "megatron": "megatron",
}
"""Optional packages, each with the extra of rlinf that installs it."""
INSTALL_EXTRA = "to add one: pip install 'rlinf-slurm[NAME]'"
SLOW_FSYNC_S = 0.2
"""Median seconds of a write, sync and rename from which the run folder is reported as slow."""


def check_machine(folder: Path) -> Iterator[Finding]:
    """Yield the findings of all checks, in order. No job is started."""
    yield Finding("ok", "python", f"{sys.version.split()[0]} ({sys.executable})")
    yield from check_packages()
    yield check_storage(folder)
    client = SlurmClient()
    try:
        version, partitions = client.version(), discover_partitions(client)
    except RlinfError as error:
        yield Finding("warn", "slurm", f"{error}")
        return
    yield Finding("ok", "slurm", version)
    for partition in partitions.values():
        yield describe_partition(partition)


def check_packages() -> Iterator[Finding]:
    """Yield the installed optional packages, and the missing ones with their extra."""
    installed = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    yield Finding("ok", "packages", ", ".join(installed))
    extras = dict.fromkeys(extra for name, extra in PACKAGES.items() if name not in installed)
    if extras:
        yield Finding("warn", "optional", f"not installed: {', '.join(extras)}; {INSTALL_EXTRA}")


def check_storage(folder: Path) -> Finding:
    """Check that the run folder is writable, and time a synced write and a rename."""
    folder = folder.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".doctor-{secrets.token_hex(4)}"
        times = []
        for _ in range(5):
            start = time.perf_counter()
            with probe.open("wb") as file:
                file.write(b"x" * 65536)
                file.flush()
                os.fsync(file.fileno())
            probe.replace(probe.with_suffix(".moved"))
            times.append(time.perf_counter() - start)
        probe.with_suffix(".moved").unlink()
    except OSError as error:
        text = f"{folder}: {error.strerror}; choose another run.root"
        return Finding("fail", "run folder", text)
    median_s = sorted(times)[2]
    level: Literal["ok", "warn"] = "ok" if median_s < SLOW_FSYNC_S else "warn"
    text = f"{folder}: write, sync and rename in {median_s * 1e3:.1f} ms"
    return Finding(level, "run folder", text)


def describe_partition(partition: PartitionInventory) -> Finding:
    """Return one line that describes a partition."""
    gpus = ", ".join(f"{count} x {kind or 'gpu'}" for kind, count in partition.gpus.items())
    limit = partition.time_limit_min
    parts = [
        f"{partition.nodes} node{'s' * (partition.nodes != 1)}",
        f"{gpus} per node" if gpus else "no GPUs",
        "no time limit" if limit is None else f"jobs of up to {limit} min",
    ]
    text = ", ".join(parts)
    return Finding("ok" if partition.is_available else "warn", f"partition {partition.name}", text)


WITHOUT_RT = ("V100", "A30", "A100", "A800", "H100", "H200", "H800", "H20", "B200", "GB200")
"""Data-centre GPUs without the ray-tracing cores that NVIDIA's renderer needs."""


def check_simulator(task: str, overrides: Sequence[str]) -> Iterator[Finding]:
    """Check the simulator of ``task=NAME``: interpreter, packages, GPU and files. If nothing is
    missing, start an episode and render the configured images.

    Args:
        task: name of the task.
        overrides: further keys, such as ``task.kwargs.folder=...``.

    Raises:
        ConfigError: the task does not exist, or has no simulator.
    """
    config = validate(RunConfig, compose_words([f"task={task}", *overrides]))
    cls, options = environment_class(config)
    if not issubclass(cls, GymEnvironment):
        raise ConfigError(f"--env {task}: task {config.task.name!r} has no simulator")
    assert isinstance(options, GymConfig)
    yield Finding("ok", "simulator", f"{options.simulator}, {options.id}")
    requirements = get_requirements(options.simulator)
    findings = [*_check_simulator_packages(options, requirements), *_check_gpu(requirements)]
    missing_assets = requirements.missing_assets(options.kwargs)
    findings += [Finding("fail", "files", text) for text in missing_assets]
    yield from findings
    if any(finding.level == "fail" for finding in findings):
        yield Finding("warn", "episode", "not started, because of the failures above")
        return
    yield _check_episode(options)


def _check_simulator_packages(
    options: GymConfig, requirements: SimulatorRequirements
) -> Iterator[Finding]:
    name = options.python or sys.executable
    try:
        path = resolve_interpreter(name, "task.python")
        missing = missing_modules(name, "task.python", ("numpy", *requirements.packages))
    except ConfigError as error:
        hint = f"; it needs: {requirements.install}" if requirements.install else ""
        yield Finding("fail", "interpreter", f"{error}{hint}")
        return
    yield Finding("ok", "interpreter", path)
    if missing:
        text = f"{', '.join(missing)} not found{_install_hint(name, requirements)}"
        yield Finding("fail", "packages", text)
    else:
        yield Finding("ok", "packages", ", ".join(requirements.packages))


def _install_hint(name: str, requirements: SimulatorRequirements) -> str:
    if requirements.install:
        return f"; install them there: {requirements.install}"
    has_environment = (package_paths.ROOT / "configs" / "environments" / f"{name}.txt").is_file()
    return f"; make env NAME={name} installs them" if has_environment else "; install them there"


def _check_gpu(requirements: SimulatorRequirements) -> Iterator[Finding]:
    if not requirements.gpu:
        return
    gpus = list_gpus()
    if not gpus:
        text = f"nvidia-smi lists none; the simulator needs {requirements.gpu}"
        yield Finding("fail", "GPU", f"{text}. Run this on a node with a GPU: srun --gpus=1 ...")
    elif "RTX" in requirements.gpu and all(any(name in gpu for name in WITHOUT_RT) for gpu in gpus):
        text = f"{gpus[0]} has no RT cores; the simulator needs {requirements.gpu}"
        yield Finding("fail", "GPU", text)
    else:
        yield Finding("ok", "GPU", "; ".join(gpus))


def _check_episode(options: GymConfig) -> Finding:
    started_at = time.perf_counter()
    try:
        mismatches = GymEnvironment.spec_mismatches(options, GymEnvironment.read_spec(options))
        if mismatches:
            return Finding("fail", "episode", "; ".join(mismatches))
        with contextlib.closing(create_simulator_process(options)) as simulator:
            observations = simulator.reset([0], [0])
    except RlinfError as error:
        lines = str(error).strip().splitlines()
        return Finding(
            "fail", "episode", lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
        )
    shapes = ", ".join(f"{name} {list(column.shape[1:])}" for name, column in observations.items())
    note = "" if options.images else "; no images configured (task.images), renderer not tested"
    duration_s = time.perf_counter() - started_at
    return Finding("ok", "episode", f"starts in {duration_s:.1f} s: {shapes}{note}")
