"""What a stage is given: the same in every driver, launcher and grain."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlinf.artifacts import Manifest, verify
from rlinf.channels.base import Channel
from rlinf.channels.file import FileReader, FileWriter
from rlinf.config import RunConfig
from rlinf.errors import RequeueRequested
from rlinf.trainers.world import World

T = TypeVar("T")
log = logging.getLogger("rlinf")


@dataclass(frozen=True)
class Input:
    """A committed output of an earlier stage."""

    folder: Path
    manifest: Manifest

    @property
    def data(self) -> Path:
        """Folder of its files."""
        return self.folder / self.manifest.data


@dataclass
class Context:
    """Configuration, place in the run, channels, metrics; see the fields."""

    config: RunConfig
    stage: str
    iteration: int
    run: Path
    out: Path
    data: Path
    """Private folder of this attempt; what is written here is committed with the manifest."""
    world: World
    key: str
    """Identity of this work; what an interrupted attempt left counts only under the same key."""
    inputs: Mapping[str, Input]
    resident: dict[str, Any] = field(default_factory=dict)
    """Lives as long as the process: loaded engines and trainers between calls."""
    stopping: Callable[[], bool] = lambda: False
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    spans: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    _said: float = 0.0

    def reader(self, name: str, channel: str) -> Channel:
        """The records of one channel of an input, verified.

        Raises:
            ArtifactError: the input is damaged.
        """
        source = self.verified(name)
        return FileReader(source.glob(f"{channel}-r*.h5"))

    def verified(self, name: str) -> Path:
        """Data folder of an input after checking sizes and checksums, once per process.

        Raises:
            ArtifactError: a file is missing or altered.
        """
        entry = self.inputs[name]
        done: set[tuple[str, str]] = self.resident.setdefault("verified", set())
        mark = (str(entry.folder), entry.manifest.data)
        if mark not in done:
            with self.span("verify"):
                verify(entry.folder, entry.manifest, checksums=True)
            done.add(mark)
        return entry.data

    def writer(self, channel: str) -> FileWriter:
        """An output channel; its records are visible once the stage has committed."""
        return FileWriter(self.data, channel, self.world.rank)

    def keep(self, name: str, token: str, make: Callable[[], T]) -> T:
        """A resident object for one state of the world: ``make`` runs when ``token`` changed."""
        held = self.resident.get(name)
        if held is None or held[0] != token:
            self.resident.pop(name, None)
            held = (token, make())
            self.resident[name] = held
        value: T = held[1]
        return value

    def metric(self, name: str, value: float, weight: float = 1.0) -> None:
        """Record a deterministic number; ranks are averaged by weight. Weight 0 sums instead."""
        self.metrics[name] = (float(value), float(weight))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of the stage."""
        start = time.time()
        try:
            yield
        finally:
            self.spans.append(
                {
                    "name": name,
                    "rank": self.world.rank,
                    "host": socket.gethostname(),
                    "start": start,
                    "end": time.time(),
                }
            )

    def progress(self, done: int, total: int, what: str) -> None:
        """Say how far the stage is, at most every few seconds, and stop here when asked to.

        Raises:
            RequeueRequested: the allocation is about to end.
        """
        if self.stopping():
            raise RequeueRequested(f"{self.stage}: stopping after {done} of {total} {what}")
        hook = self.resident.get("progress")
        if hook is not None:
            hook(self.stage, done, total, what)
        elif time.monotonic() - self._said > 5:
            self._said = time.monotonic()
            log.info("%s %d: %d of %d %s", self.stage, self.iteration, done, total, what)
