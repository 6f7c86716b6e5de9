"""How worlds are made: what a module of :mod:`rlinf.envs.worlds` says, found and called.

Loaded by :mod:`rlinf.envs.simulator`, also in its process: the standard library and numpy alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from .cameras import Pictured, quiet_mujoco
from .seen import Refused, Shown
from .structured_spaces import flattened, leaves
from .tasks import Tasks


def maker(target: str) -> Callable[..., Any]:
    """What ``FILE:attribute`` or ``module:attribute`` names; Refused for what is not there."""
    module, _, name = target.rpartition(":")
    try:
        found = _module(module)
    except (ImportError, OSError, SyntaxError) as error:
        raise Refused(f"task.world: {module}: {error} ({sys.executable})") from None
    if not hasattr(found, name):
        raise Refused(f"task.world: {module} has no {name!r}")
    make: Callable[..., Any] = getattr(found, name)
    return make


def _module(module: str) -> Any:
    """One by its name or its file."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    # It may import files beside it, as a part of their package: ours would bring more.
    folder, file = os.path.split(os.path.abspath(module))  # noqa: PTH100
    beside: Any = types.ModuleType("rlinf_worlds")
    beside.__path__ = [folder]
    sys.modules[beside.__name__] = beside
    name_of_file = f"{beside.__name__}.{file[: -len('.py')]}"
    spec = importlib.util.spec_from_file_location(name_of_file, module)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name_of_file] = found
    spec.loader.exec_module(found)
    return found


def says(make: Callable[..., Any], name: str) -> bool:
    """Whether the module of a maker says ``BATCHED``, or ``SINGLE``."""
    return bool(getattr(make, "__globals__", {}).get(name))


def made(make: Callable[[], Any], shown: Shown, *, batched: bool = False) -> Any:
    """A world with plain spaces; raises Refused where its maker says that it can never be, or a
    part of its spaces cannot be used.

    Args:
        batched: it steps many environments together, and has its pictures itself.
    """
    quiet_mujoco()
    try:
        world = make()
    except (ImportError, ValueError) as error:
        raise Refused(f"{_refusal(error)} ({sys.executable})") from None
    own = {"_".join(path) or "pixels" for path, _ in leaves(world.observation_space)}
    world = flattened(world, shown, batched=batched)
    rendered = {name: size for name, size in shown.images.items() if name not in own}
    return Pictured(world, rendered) if rendered and not batched else world


def world_of(make: Callable[..., Any], values: dict[str, Any], shown: Shown) -> Any:
    """A world, of several tasks where ``id`` is a list; Refused as of :func:`made`.

    Args:
        values: the arguments of ``make``; of several tasks also ``one_hot``, see :class:`Tasks`.
    """
    if isinstance(values["id"], str):
        return made(functools.partial(make, **values), shown)
    ids, kwargs = values["id"], values["kwargs"]
    each = [functools.partial(make, id=id, kwargs=kwargs) for id in ids]
    return Tasks([functools.partial(made, one, shown) for one in each], ids, values["one_hot"])


def _refusal(error: Exception) -> str:
    """What a maker refused, with the key that it is about."""
    return f"task.{error}" if str(error).startswith("kwargs.") else f"task.id: {error}"
