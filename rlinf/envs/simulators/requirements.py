"""The requirements of a simulator, read from its module without importing the simulator.

A module of :mod:`rlinf.envs.simulators` has these constants:

- ``PACKAGES``: modules that the interpreter must be able to import;
- ``INSTALL``: how to install these, if ``configs/environments`` has no file for the simulator;
- ``GPU``: a description of the required GPU;
- ``ASSETS``: descriptions and sources of required files and folders that no package contains, by
  their key of ``kwargs``; ``OPTIONAL``: the same for keys that may be left out;
- ``TASK_SETS`` and the flags ``BATCHED``, ``SINGLE_INSTANCE``, ``SUPPORTS_STATE_SAVING`` and
  ``NONDETERMINISTIC``.

All but ``PACKAGES`` are optional.
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
        """Return a message for each missing file or folder: its key, a description, and its source.

        Args:
            kwargs: ``task.kwargs``.
        """
        errors = []
        for key, description in {**self.assets, **self.optional}.items():
            path = kwargs.get(key)
            if path is None and key in self.optional:
                continue
            if path is None:
                errors.append(f"task.kwargs.{key}: is not set; give {description}")
            elif not Path(str(path)).expanduser().exists():
                errors.append(f"task.kwargs.{key}: there is no {path}; give {description}")
        return errors


def get_requirements(simulator: str) -> SimulatorRequirements:
    """Return the requirements of a simulator. The module of a user's ``module:function`` is parsed
    and not imported, so its constants must be literals.

    Raises:
        ConfigError: the simulator is unknown; names the most similar one.
    """
    target = simulators.target(simulator, "task.simulator")
    if ":" in simulator:
        return SimulatorRequirements(**_parse_constants(target.rpartition(":")[0]))
    module = importlib.import_module(target.partition(":")[0])
    values = {
        name: getattr(module, name.upper())
        for name in SimulatorRequirements._fields
        if hasattr(module, name.upper())
    }
    return SimulatorRequirements(**values)


def _parse_constants(module: str) -> dict[str, Any]:
    """Return the constants of a user's module or file; empty if this machine does not have it."""
    try:
        spec = None if module.endswith(".py") else importlib.util.find_spec(module)
        file = Path(module) if spec is None else Path(str(spec.origin))
        body = ast.parse(file.read_text()).body
    except (ImportError, OSError, ValueError, SyntaxError):
        return {}
    values = {}
    for statement in body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name == name.upper() and name.lower() in SimulatorRequirements._fields:
                with contextlib.suppress(ValueError):
                    values[name.lower()] = ast.literal_eval(statement.value)
    return values
