"""``rlinf doctor --env NAME``: what a simulator lacks on this machine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from pipeline.commands.experiment import composed
from pipeline.commands.findings import Finding
from rlinf import tree
from rlinf.config import RunConfig, validate
from rlinf.envs.gym import GymEnvironment, simulator_process
from rlinf.envs.gym_config import GymConfig
from rlinf.envs.worlds.needs import Needs, needs_of
from rlinf.errors import ConfigError, RlinfError
from rlinf.interpreters import interpreter, missing_modules
from stages.parts import environment_class

GPUS = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
GPUS_S = 30.0
WITHOUT_RT = ("V100", "A30", "A100", "A800", "H100", "H200", "H800", "H20", "B200", "GB200")
"""Data-centre GPUs that have no cores for ray tracing, which NVIDIA's renderer needs."""


def findings(task: str, overrides: Sequence[str]) -> Iterator[Finding]:
    """Checks of the simulator of ``task=NAME``: interpreter, packages, GPU, files; and where none
    of these is missing, an episode that begins, with its pictures.

    Args:
        overrides: further keys, such as ``task.kwargs.folder=...``.

    Raises:
        ConfigError: there is no such task, or it steps no simulator.
    """
    config = validate(RunConfig, composed([f"task={task}", *overrides]))
    cls, options = environment_class(config)
    if not issubclass(cls, GymEnvironment):
        raise ConfigError(f"--env {task}: task {config.task.name!r} steps no simulator")
    assert isinstance(options, GymConfig)
    yield Finding("ok", "world", f"{options.world}, {options.id}")
    needs = needs_of(options.world)
    found = [*_packages(options, needs), *_gpu(needs)]
    found += [Finding("fail", "files", text) for text in needs.missing_assets(options.kwargs)]
    yield from found
    if any(finding.level == "fail" for finding in found):
        yield Finding("warn", "episode", "not tried")
        return
    yield _episode(options)


def _packages(options: GymConfig, needs: Needs) -> Iterator[Finding]:
    """Whether the interpreter is there and finds what the simulator consists of."""
    name = options.python or sys.executable
    try:
        path = interpreter(name, "task.python")
        missing = missing_modules(name, "task.python", ("numpy", *needs.packages))
    except ConfigError as error:
        further = f"; it is to have: {needs.install}" if needs.install else ""
        yield Finding("fail", "interpreter", f"{error}{further}")
        return
    yield Finding("ok", "interpreter", path)
    if missing:
        text = f"{', '.join(missing)} not found{_install(name, needs)}"
        yield Finding("fail", "packages", text)
    else:
        yield Finding("ok", "packages", ", ".join(needs.packages))


def _install(name: str, needs: Needs) -> str:
    """How packages are had that are not there."""
    if needs.install:
        return f"; install them there: {needs.install}"
    made = (tree.ROOT / "configs" / "environments" / f"{name}.txt").is_file()
    return f"; make env NAME={name} installs them" if made else "; install them there"


def _gpu(needs: Needs) -> Iterator[Finding]:
    if not needs.gpu:
        return
    try:
        said = subprocess.run(GPUS, capture_output=True, text=True, timeout=GPUS_S, check=True)
        here = [line.strip() for line in said.stdout.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError):
        here = []
    if not here:
        text = f"none here (nvidia-smi names none); it needs {needs.gpu}"
        yield Finding("fail", "GPU", f"{text}. Ask on a node that has one: srun --gpus=1 ...")
    elif "RTX" in needs.gpu and all(any(name in gpu for name in WITHOUT_RT) for gpu in here):
        yield Finding("fail", "GPU", f"{here[0]} has no RT cores; it needs {needs.gpu}")
    else:
        yield Finding("ok", "GPU", "; ".join(here))


def _episode(options: GymConfig) -> Finding:
    """Whether an episode begins as the configuration says."""
    begun = time.perf_counter()
    try:
        differing = GymEnvironment.differing(options, GymEnvironment.measured(options))
        if differing:
            return Finding("fail", "episode", "; ".join(differing))
        with contextlib.closing(simulator_process(options)) as process:
            seen = process.reset([0], [0])
    except RlinfError as error:
        lines = str(error).strip().splitlines()
        return Finding(
            "fail", "episode", lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
        )
    shapes = ", ".join(f"{name} {list(column.shape[1:])}" for name, column in seen.items())
    pictures = "" if options.images else "; no pictures asked (task.images), no renderer tried"
    took = time.perf_counter() - begun
    return Finding("ok", "episode", f"begins after {took:.1f} s: {shapes}{pictures}")
