"""What a world needs of a machine, as its module says it, for checks that import no simulator.

A module of :mod:`rlinf.envs.simulators` has ``PACKAGES``, modules that the interpreter must find,
and where there is something to say: ``INSTALL``, how they are had where no file of
``configs/environments`` has them; ``GPU``, which one is asked for; ``ASSETS``, files and folders
that no package brings, by their key of ``kwargs``, with what they are and where they are had;
``OPTIONAL``, likewise of keys that may be left out;
``BATCHED``, where a world steps many environments; ``SINGLE``, where there can be one world alone;
``SAVES``, where it can go on with an episode of another one; ``UNSEEDED``, where the seed of a
reset does not say where an episode begins; ``SETS``, names for several tasks, with their ids.
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
    """Of one kind of world."""

    packages: tuple[str, ...] = ()
    install: str = ""
    gpu: str = ""
    assets: Mapping[str, str] = {}
    optional: Mapping[str, str] = {}
    batched: bool = False
    single: bool = False
    saves: bool = False
    unseeded: bool = False
    sets: Mapping[str, tuple[str, ...]] = {}

    def missing_assets(self, kwargs: Mapping[str, Any]) -> list[str]:
        """Of each file or folder that is not there: its key, what it is, where it is had.

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


def get_requirements(world: str) -> SimulatorRequirements:
    """What a world needs; of a function of the user's own (``module:function``), whose module is
    read and not imported, what it says by literals.

    Raises:
        ConfigError: it is unknown; names the nearest.
    """
    target = simulators.target(world, "task.simulator")
    if ":" in world:
        return SimulatorRequirements(**_literals_of(target.rpartition(":")[0]))
    module = importlib.import_module(target.partition(":")[0])
    values = {
        name: getattr(module, name.upper())
        for name in SimulatorRequirements._fields
        if hasattr(module, name.upper())
    }
    return SimulatorRequirements(**values)


def _literals_of(module: str) -> dict[str, Any]:
    """What a module or file of the user's says at its top; nothing of one that is not here."""
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
