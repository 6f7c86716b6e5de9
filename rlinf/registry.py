"""Registries of named components, which are imported only when they are used.

A registry maps a name in the configuration to ``module:attribute``. Listing the names imports
nothing; :meth:`Registry.get` imports the module behind a name. A name with ``:`` is a target
itself: ``reward.name=mypkg.rewards:Mine`` needs no entry (docs/howto/own-parts.md).
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from types import ModuleType
from typing import Any

from rlinf.errors import ConfigError, RlinfError, did_you_mean
from rlinf.user_code import register_user_component


class Registry:
    """Components of one kind by name."""

    def __init__(
        self, kind: str, entries: dict[str, str], base: str, *, instances: bool = False
    ) -> None:
        """
        Args:
            base: ``module:class`` that every part is a subclass of.
            instances: parts are instances of it instead.
        """
        self.kind, self._instances = kind, instances
        self._entries = dict(entries)
        self._base = base

    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        return sorted(self._entries)

    def target(self, name: str, key: str | None = None) -> str:
        """``module:attribute`` of the part called ``name``; nothing is imported.

        Args:
            key: of the configuration, where the name stands; ``kind.name`` by default.

        Raises:
            ConfigError: no such part; names the nearest one.
        """
        if ":" in name:
            return name
        if name not in self._entries:
            hint = did_you_mean(name, self._entries)
            raise ConfigError(f"{key or self.kind + '.name'}: unknown {self.kind} {name!r}{hint}")
        return self._entries[name]

    def get(self, name: str, key: str | None = None) -> Any:
        """Import and return the part called ``name``.

        Args:
            key: as for :meth:`target`.

        Raises:
            ConfigError: no such part, names the nearest one; its module cannot be imported; or it
                is not what the registry's parts are.
        """
        target = self.target(name, key)
        if ":" not in name:
            return _attribute(target)
        key = key or f"{self.kind}.name"
        module, _, attribute = target.partition(":")
        part = import_user_attribute(module, attribute, key)
        base, shown = _attribute(self._base), self._base.replace(":", ".")
        if self._instances:
            if not isinstance(part, base):
                raise ConfigError(
                    f"{key}: {name} is no {self.kind} but of type {type(part).__name__}; expected "
                    f"a variable of type {shown}"
                )
        elif not (inspect.isclass(part) and issubclass(part, base)):
            raise ConfigError(f"{key}: {name} is no {self.kind}: make it a subclass of {shown}")
        elif missing := sorted(getattr(part, "__abstractmethods__", ())):
            raise ConfigError(
                f"{key}: {name} lacks {', '.join(missing)}, part of every {self.kind}; see {shown}"
            )
        return part


def _attribute(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def import_user_attribute(module: str, attribute: str, key: str) -> Any:
    """Import the attribute that a user's target names.

    Raises:
        ConfigError: the module cannot be imported, or does not have the attribute.
    """
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ConfigError(
            f"{key}: {module}:{attribute} names no class; expected MODULE:CLASS, such as "
            "mypkg.rewards:Mine"
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _broken(module, key, error) from error
        raise ConfigError(
            f"{key}: no module {error.name!r}; start in the folder that holds it, or name that "
            "folder in PYTHONPATH"
        ) from None
    except RlinfError:
        raise
    except Exception as error:  # a module of the user's may raise anything
        raise _broken(module, key, error) from error
    if not hasattr(found, attribute):
        raise ConfigError(
            f"{key}: {found.__file__} has no {attribute!r}"
            f"{did_you_mean(attribute, _defined(found))}"
        )
    part = getattr(found, attribute)
    register_user_component(f"{key}: {module}:{attribute}", found, part)
    return part


def _broken(module: str, key: str, error: Exception) -> ConfigError:
    """Return the error for a module whose import fails, with the location of the failure."""
    if isinstance(error, SyntaxError):
        where, what = f"{error.filename}, line {error.lineno}", error.msg
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where, what = f"{last.filename}, line {last.lineno}", str(error)
    text = f"{type(error).__name__}: {what}".splitlines()[0]
    return ConfigError(f"{key}: importing {module} failed in {where}: {text}")


def _defined(module: ModuleType) -> list[str]:
    """Return the public names that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", module.__name__) == module.__name__
    ]
