"""Python interpreters of other environments, for components that cannot share packages.

A configuration names an interpreter by its path or by an environment's name. The site file may map
names to paths (``interpreters``); otherwise ``make env NAME=...`` has created the environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlinf.config import RunConfig
from rlinf.errors import ConfigError

INTERPRETERS_VARIABLE = "RLINF_INTERPRETERS"
"""Environment variable that passes the site file's paths by name to job processes, as JSON."""
ENVIRONMENTS_VARIABLE = "RLINF_ENVS"
"""Environment variable with the folder of environments; ``~/.cache/rlinf/envs`` by default."""
PROBE_TIMEOUT_S = 120.0
MIN_TORCH = (2, 13)
"""Oldest torch with which stages run. Before it, sharded tensors crash in threads, in which pools
compute their stages."""
ANY_TORCH_VARIABLE = "RLINF_ANY_TORCH"
"""If this environment variable is set, older versions of torch are accepted."""
STAGE_PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "msgpack",
    "zmq",
    "h5py",
    "safetensors",
    "xxhash",
    "yaml",
)
"""Packages that every stage imports."""


def resolve_interpreter(name: str, key: str) -> str:
    """Return the path of an interpreter that a configuration names.

    Args:
        key: the configuration key, for error messages.

    Raises:
        ConfigError: the interpreter does not exist.
    """
    if not name:
        raise ConfigError(f"{key}: is empty; name an interpreter, or leave it out")
    try:
        configured = dict(json.loads(os.environ.get(INTERPRETERS_VARIABLE, "{}")))
    except ValueError as error:
        raise ConfigError(
            f"{INTERPRETERS_VARIABLE}: no JSON object of paths by name ({error})"
        ) from None
    folder = Path(os.environ.get(ENVIRONMENTS_VARIABLE, "~/.cache/rlinf/envs")).expanduser()
    if os.sep in name:
        path = Path(name).expanduser().absolute()
    else:
        path = Path(configured.get(name, folder / name / "bin" / "python")).expanduser()
    if not os.access(path, os.X_OK) or path.is_dir():
        hint = "" if os.sep in name else f"; make env NAME={name} makes it, or name a path"
        raise ConfigError(f"{key}: there is no interpreter {path}{hint}")
    # Links are not resolved, because Python finds its environment by the path of the link.
    return str(path)


def configured_interpreter(config: RunConfig, section: str) -> str | None:
    """Return the ``python`` key of a section of a run."""
    python: str | None = (getattr(config, section).model_extra or {}).get("python")
    return python


def set_interpreters(interpreters: Mapping[str, str]) -> dict[str, str]:
    """Register interpreters by name in this process; returns the variables for child processes."""
    variables = {INTERPRETERS_VARIABLE: json.dumps(dict(interpreters))} if interpreters else {}
    os.environ.update(variables)
    return variables


def check_interpreter(name: str, key: str, modules: Sequence[str]) -> None:
    """Check that an interpreter exists and has some modules, without running their code.

    Raises:
        ConfigError: the interpreter does not exist or run, or lacks a module.
    """
    missing, torch_version = _probe_interpreter(name, key, modules)
    path = resolve_interpreter(name, key)
    if missing:
        raise ConfigError(f"{key}: {path} lacks the package {missing[0]}; install it there")
    if torch_version is not None and "torch" in modules:
        check_torch_version(torch_version, f"{key}: {path}")


def check_torch_version(version: str, where: str) -> None:
    """Check that a version of torch is :data:`MIN_TORCH` or newer.

    Args:
        where: the interpreter that has it, for the error message.

    Raises:
        ConfigError: it is older, and :data:`ANY_TORCH_VARIABLE` is not set.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < MIN_TORCH and not os.environ.get(ANY_TORCH_VARIABLE):
        needed = ".".join(map(str, MIN_TORCH))
        raise ConfigError(
            f"{where} has torch {version}, but stages need {needed} or newer: before it, sharded "
            f"models crash in pools. Install torch {needed}, or set {ANY_TORCH_VARIABLE}=1 to try "
            "this version"
        )


def check_own_torch() -> None:
    """Check torch's version in this interpreter, without importing torch.

    Raises:
        ConfigError: torch is missing or too old.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{sys.executable} has no torch; install rlinf there") from None
    check_torch_version(version, sys.executable)


def missing_modules(name: str, key: str, modules: Sequence[str]) -> list[str]:
    """Return the modules that an interpreter does not have.

    Raises:
        ConfigError: the interpreter does not exist, or does not run.
    """
    return _probe_interpreter(name, key, modules)[0]


def _probe_interpreter(name: str, key: str, modules: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the modules that an interpreter does not have, and its version of torch (None: it has
    no torch)."""
    path = resolve_interpreter(name, key)
    program = (
        "import importlib.util as u, json, sys\n"
        "from importlib import metadata as m\n"
        "missing = [n for n in sys.argv[1:] if u.find_spec(n) is None]\n"
        "torch = [d.version for d in m.distributions(name='torch')]\n"
        "print(json.dumps([missing, torch[0] if torch else None]))"
    )
    try:
        probe = subprocess.run(
            [path, "-c", program, *modules],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"no answer within {PROBE_TIMEOUT_S:g} s"
        if isinstance(error, subprocess.CalledProcessError):
            reason = f"it ended with {error.returncode}: {error.stderr.strip()[-200:]}"
        elif isinstance(error, OSError):
            reason = str(error)
        message = f"{key}: {path} does not run as a Python interpreter ({reason})"
        raise ConfigError(message) from None
    missing, torch_version = json.loads(probe.stdout)
    return missing, torch_version
