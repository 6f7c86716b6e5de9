"""What a world needs of a machine, as its module says it, for checks that import no simulator.

A module of :mod:`rlinf.envs.worlds` has ``PACKAGES``, modules that the interpreter must find, and
where there is something to say: ``INSTALL``, how they are had where no file of
``configs/environments`` has them; ``GPU``, which one is asked for; ``ASSETS``, files and folders
that no package brings, by their key of ``kwargs``, with what they are and where they are had;
``BATCHED``, where a world steps many environments; ``SINGLE``, where there can be one world alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlinf.envs.worlds import worlds


class Needs(NamedTuple):
    """Of one kind of world."""

    packages: tuple[str, ...] = ()
    install: str = ""
    gpu: str = ""
    assets: Mapping[str, str] = {}
    batched: bool = False
    single: bool = False

    def missing_assets(self, kwargs: Mapping[str, Any]) -> list[str]:
        """Of each file or folder that is not there: its key, what it is, where it is had.

        Args:
            kwargs: ``task.kwargs``.
        """
        found = []
        for key, what in self.assets.items():
            given = kwargs.get(key)
            if given is None:
                found.append(f"task.kwargs.{key}: is not set; give {what}")
            elif not Path(str(given)).expanduser().exists():
                found.append(f"task.kwargs.{key}: there is no {given}; give {what}")
        return found


def needs_of(world: str) -> Needs:
    """What a world needs; of a function of the user's own (``module:function``) nothing is known.

    Raises:
        ConfigError: it is unknown; names the nearest.
    """
    target = worlds.target(world, "task.world")
    if ":" in world:
        return Needs()
    module = importlib.import_module(target.partition(":")[0])
    told = {
        name: getattr(module, name.upper())
        for name in Needs._fields
        if hasattr(module, name.upper())
    }
    return Needs(**told)
