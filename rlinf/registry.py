"""Named parts, imported only when they are used.

A registry maps a name in the configuration to ``module:attribute``. Listing names costs nothing;
the module behind a name is imported by :meth:`Registry.get`.
"""

from __future__ import annotations

import importlib
from typing import Any

from rlinf.errors import ConfigError, nearest


class Registry:
    """Parts of one kind by name."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def names(self) -> list[str]:
        """Registered names, sorted."""
        return sorted(self._entries)

    def register(self, name: str, target: str) -> None:
        """Add a part from outside; ``target`` is ``module:attribute``.

        Raises:
            ConfigError: the name is taken by another target.
        """
        if self._entries.get(name, target) != target:
            raise ConfigError(f"{self.kind} {name!r} is already registered")
        self._entries[name] = target

    def target(self, name: str, key: str | None = None) -> str:
        """``module:attribute`` of the part called ``name``; nothing is imported.

        Args:
            key: of the configuration, where the name stands; ``kind.name`` by default.

        Raises:
            ConfigError: no such part; names the nearest one.
        """
        if name not in self._entries:
            hint = nearest(name, self._entries)
            raise ConfigError(f"{key or self.kind + '.name'}: unknown {self.kind} {name!r}{hint}")
        return self._entries[name]

    def get(self, name: str, key: str | None = None) -> Any:
        """Import and return the part called ``name``.

        Args:
            key: as for :meth:`target`.

        Raises:
            ConfigError: no such part; names the nearest one.
        """
        module, _, attribute = self.target(name, key).partition(":")
        return getattr(importlib.import_module(module), attribute)
