"""What a worker is doing at this moment, for whoever asks how the run is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TURN = "its turn"
COMPUTES, COMMITS, WAITS = "computes", "commits", f"waits for {TURN}"


@dataclass(eq=False)
class Doing:
    """One stage that is under way."""

    stage: str
    since: float
    """Its first turn; before that, when it was ordered."""
    watch: Callable[[], str]
    done: int = 0
    total: int = 0
    what: str = ""
    took_s: float | None = None
    """How long it computed, once it is through."""


class Activity:
    """The stages of a worker that are under way, by their node's name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doing: dict[str, Doing] = {}

    def ordered(self, node: str, stage: str) -> None:
        with self._lock:
            self._doing[node] = Doing(stage, time.time(), lambda: WAITS)

    def begins(self, node: str, watch: Callable[[], str]) -> None:
        """It has its first turn; ``watch`` says what it does."""
        with self._lock:
            if node in self._doing:
                self._doing[node].since = time.time()
                self._doing[node].watch = watch

    def progress(self, stage: str, done: int, total: int, what: str) -> None:
        """How far the present instance of a stage is: of one stage, one computes at a time."""
        with self._lock:
            now = [doing for doing in self._doing.values() if doing.stage == stage]
            for doing in now:
                if doing.took_s is None:
                    doing.done, doing.total, doing.what = done, total, what
                    break

    def computed(self, node: str) -> None:
        """What is left is writing files."""
        with self._lock:
            if node in self._doing:
                self._doing[node].took_s = time.time() - self._doing[node].since
                self._doing[node].watch = lambda: COMMITS

    def ended(self, node: str) -> None:
        with self._lock:
            self._doing.pop(node, None)

    def rows(self) -> list[dict[str, Any]]:
        """As plain values, in the order in which they were ordered."""
        with self._lock:
            return [
                {
                    "node": node,
                    "stage": doing.stage,
                    "doing": doing.watch(),
                    "since": doing.since,
                    "done": doing.done,
                    "total": doing.total,
                    "what": doing.what,
                    "took_s": doing.took_s,
                }
                for node, doing in self._doing.items()
            ]
