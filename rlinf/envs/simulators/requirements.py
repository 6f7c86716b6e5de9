"""The requirements of a simulator, read from its module without importing the simulator.

A module of :mod:`rlinf.envs.simulators` has ``PACKAGES``, modules that the interpreter must find,
and optionally ``INSTALL``, how to install them if no file of ``configs/environments`` does;
``GPU``, the GPU that is needed; ``ASSETS``, required files and folders that no package contains, by
their key of ``kwargs``, with a description and their source; ``OPTIONAL``, the same for keys that
may be left out; and ``TASK_SETS`` and the flags ``BATCHED``, ``SINGLE_INSTANCE``,
``SUPPORTS_STATE_SAVING`` and ``NONDETERMINISTIC``.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlinf.envs.simulators import simulators


class SimulatorRequirements(NamedTuple):
    """The requirements and flags of one simulator."""

    packages: tuple[str, ...] = ()
    install: str = ""
    gpu: str = ""
    assets: Mapping[str, str] = {}
    optional: Mapping[str, str] = {}
    batched: bool = False
    single_instance: bool = False
    supports_state_saving: bool = False
    nondeterministic: bool = False
    task_sets: Mapping[str, tuple[str, ...]] = {}

    def missing_assets(self, kwargs: Mapping[str, Any]) -> list[str]:
        """Return a message for each missing file or folder: its key, what it is, and its source.

        Args:
            kwargs: ``task.kwargs``.
        """
        errors = []
        for key, what in {**self.assets, **self.optional}.items():
            path = kwargs.get(key)
            if path is None and key in self.optional:
                continue
            if path is None:
                errors.append(f"task.kwargs.{key}: is not set; give {what}")
            elif not Path(str(path)).expanduser().exists():
                errors.append(f"task.kwargs.{key}: there is no {path}; give {what}")
        return errors


def get_requirements(simulator: str) -> SimulatorRequirements:
    """Return the requirements of a simulator. The module of a user's ``module:function`` is parsed,
    not imported, and only its literals count.

    Raises:
        ConfigError: it is unknown; names the nearest.
    """
    target = simulators.target(simulator, "task.simulator")
    if ":" in simulator:
        return SimulatorRequirements(**_literals_of(target.rpartition(":")[0]))
    module = importlib.import_module(target.partition(":")[0])
    values = {
        name: getattr(module, name.upper())
        for name in SimulatorRequirements._fields
        if hasattr(module, name.upper())
    }
    return SimulatorRequirements(**values)


def _literals_of(module: str) -> dict[str, Any]:
    """Return the requirements that a user's module or file states at its top; none if it does not
    exist here."""
    try:
        spec = None if module.endswith(".py") else importlib.util.find_spec(module)
        file = Path(module) if spec is None else Path(str(spec.origin))
        body = ast.parse(file.read_text()).body
    except (ImportError, OSError, ValueError, SyntaxError):
        return {}
    values = {}
    for line in body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            name = line.targets[0].id
            if name == name.upper() and name.lower() in SimulatorRequirements._fields:
                with contextlib.suppress(ValueError):
                    values[name.lower()] = ast.literal_eval(line.value)
    return values
