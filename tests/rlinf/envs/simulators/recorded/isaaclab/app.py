"""Starts the application, before which nothing else can be imported."""

from __future__ import annotations

import sys
from typing import Any

launched: list[dict[str, Any]] = []


class _App:
    def close(self) -> None:
        launched.clear()


class AppLauncher:
    def __init__(self, launcher_args: Any = None, **kwargs: Any) -> None:
        assert sys.argv[1:] == [], "it would read the arguments of the simulator process"
        launched.append(kwargs)
        self.app = _App()
