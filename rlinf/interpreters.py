"""Interpreters of other environments, for parts that cannot share one set of packages.

A configuration names one by its path, or by the name of an environment: the site file may say where
that is (``interpreters``), else it is where ``make env NAME=...`` has made it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlinf.config import RunConfig
from rlinf.errors import ConfigError

INTERPRETERS_VARIABLE = "RLINF_INTERPRETERS"
"""Environment variable: paths by name, JSON; what a site file says, for the processes of a job."""
ENVIRONMENTS_VARIABLE = "RLINF_ENVS"
"""Environment variable: the folder of environments; ``~/.cache/rlinf/envs`` by default."""
PROBE_TIMEOUT_S = 120.0
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
"""What the package imports in every stage."""


def resolve_interpreter(name: str, key: str) -> str:
    """The path of an interpreter that a configuration names.

    Raises:
        ConfigError: it is not there.
    """
    if not name:
        raise ConfigError(f"{key}: is empty; name an interpreter, or leave it out")
    try:
        known = dict(json.loads(os.environ.get(INTERPRETERS_VARIABLE, "{}")))
    except ValueError as error:
        raise ConfigError(
            f"{INTERPRETERS_VARIABLE}: no JSON object of paths by name ({error})"
        ) from None
    folder = Path(os.environ.get(ENVIRONMENTS_VARIABLE, "~/.cache/rlinf/envs")).expanduser()
    if os.sep in name:
        path = Path(name).expanduser().absolute()
    else:
        path = Path(known.get(name, folder / name / "bin" / "python")).expanduser()
    if not os.access(path, os.X_OK) or path.is_dir():
        made = "" if os.sep in name else f"; make env NAME={name} makes it, or name a path"
        raise ConfigError(f"{key}: there is no interpreter {path}{made}")
    # Not resolved: an environment is known by the link in its own folder.
    return str(path)


def configured_interpreter(config: RunConfig, section: str) -> str | None:
    """What a section of a run says under ``python``."""
    found: str | None = (getattr(config, section).model_extra or {}).get("python")
    return found


def set_interpreters(interpreters: Mapping[str, str]) -> dict[str, str]:
    """Find interpreters by these names in this process; returns the variables for other ones."""
    variables = {INTERPRETERS_VARIABLE: json.dumps(dict(interpreters))} if interpreters else {}
    os.environ.update(variables)
    return variables


def check_interpreter(name: str, key: str, modules: Sequence[str]) -> None:
    """See that an interpreter is there and finds some modules, without running any of their code.

    Raises:
        ConfigError: it is not, does not run, or lacks one.
    """
    if missing := missing_modules(name, key, modules):
        path = resolve_interpreter(name, key)
        raise ConfigError(f"{key}: {path} lacks the package {missing[0]}; install it there")


def missing_modules(name: str, key: str, modules: Sequence[str]) -> list[str]:
    """Those of some modules that an interpreter does not find.

    Raises:
        ConfigError: it is not there, or does not run.
    """
    path = resolve_interpreter(name, key)
    program = (
        "import importlib.util as u, sys; "
        "print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    )
    try:
        done = subprocess.run(
            [path, "-c", program, *modules],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )
    except (OSError, subprocess.SubprocessError) as error:
        why = f"no answer within {PROBE_TIMEOUT_S:g} s"
        if isinstance(error, subprocess.CalledProcessError):
            why = f"it ended with {error.returncode}: {error.stderr.strip()[-200:]}"
        elif isinstance(error, OSError):
            why = str(error)
        raise ConfigError(f"{key}: {path} does not run as a Python interpreter ({why})") from None
    return done.stdout.split()
