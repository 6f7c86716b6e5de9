"""What a stage is given: the same in every driver, launcher and grain."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from rlinf.artifacts import Manifest, read_manifest, verify
from rlinf.channels.file import FileReader, FileWriter
from rlinf.channels.world import World
from rlinf.config import RunConfig
from rlinf.data.record import Record, digest_of
from rlinf.errors import RequeueRequested
from stages.activity import COMPUTES, TURN
from stages.board import Output
from stages.code import stage_code
from stages.identity import stage_key
from stages.resident import Resident
from stages.turns import Aside, Turn

if TYPE_CHECKING:
    from rlinf.envs.base import Environment, Episodes

T = TypeVar("T")
How = Literal["mean", "max", "std"]
COMMIT_LOOK_S = 0.02
BRIEF_S = 0.002
"""Waits shorter than this are not recorded, nor what is shorter between two equal spans."""
SHORT_S = 0.05
"""Of many equal spans in a row, those that are shorter are one."""
WAIT = "wait"
PAUSES = frozenset({WAIT, "offload", "onload"})
"""Spans in which a stage computes nothing: it waits, or moves things from and to its device."""
log = logging.getLogger("rlinf")


@dataclass
class Input:
    """An output of an earlier stage: committed, or still in memory (``output``)."""

    folder: Path
    committed: Manifest | None = None
    output: Output | None = None
    stopping: Callable[[], bool] = lambda: False
    waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Entered while waiting, so that it can be seen."""
    taken: bool = False
    """Whether something of it was taken from memory."""
    fell: bool = False
    """Whether it was to come by memory, and was read from disk."""

    @property
    def manifest(self) -> Manifest:
        """Its commit; waits for that."""
        if self.committed is None:
            with self.waiting():
                while not self.on_disk():
                    if self.stopping():
                        raise RequeueRequested(f"asked to stop while waiting for {self.folder}")
                    if self.output is not None:
                        self.output.check()
                    time.sleep(COMMIT_LOOK_S)
        assert self.committed is not None
        return self.committed

    def on_disk(self) -> bool:
        """Whether it is committed by now."""
        if self.committed is None:
            self.committed = read_manifest(self.folder)
        return self.committed is not None

    @property
    def data(self) -> Path:
        """Folder of its files; waits for the commit."""
        return self.folder / self.manifest.data

    @property
    def state(self) -> str:
        """Names its content: the same output folder and attempt always hold the same."""
        if self.committed is None and self.output is not None:
            # What is sent by another worker may be lost on the way; the commit is not.
            with self.waiting():
                attempt = self.output.attempt(self.stopping, self.on_disk)
            if attempt is not None:
                self.taken = True
                return f"{self.folder}/{attempt}"
            self.output, self.fell = None, True
        return f"{self.folder}/{self.manifest.data}"

    def held(self, name: str) -> Any:
        """What it handed on in memory besides records; None: it is to be read from disk."""
        if self.committed is None and self.output is not None:
            return self.output.objects.get(name)
        return None


class Fault(NamedTuple):
    """Why dialogues of one process were lost."""

    error: str
    """What ended the last of them."""
    bug: bool
    """Whether each ended by an error of the user's code that another try would meet again."""


class Writer(Protocol):
    """Takes the records of an output channel."""

    def put(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Asks(Protocol):
    """The way from the simulators of a stage to the policy, where that is in other workers."""

    def collect(
        self, ctx: Context, environment: Environment, episodes: Episodes
    ) -> Generator[Record]: ...


class Live:
    """What a stage in a pool has besides files; one in a job of its own has none of it."""

    def __init__(
        self,
        output: Output,
        turn: Turn | Aside,
        sinks: Callable[[str], Writer],
        parts: int,
    ) -> None:
        self.output, self.turn, self.sinks, self.parts = output, turn, sinks, parts
        self.later: list[Callable[[], None]] = []
        self.digests: dict[str, int] = {}
        """Of the records this attempt wrote, by channel."""


class _Nowhere:
    """Of a process that does not speak: another one writes the same."""

    def put(self, record: Record) -> None: ...

    def close(self) -> None: ...


class _Both:
    """Hands records on at once and writes them to a file when the stage commits."""

    def __init__(self, file: FileWriter, live: Live, channel: str, world: World) -> None:
        self._file, self._live, self._world = file, live, world
        self._channel = channel
        self._stream = live.output.stream(channel)
        self._made: dict[int, Record] = {}
        self._sinks = live.sinks(channel)

    def put(self, record: Record) -> None:
        self._made.setdefault(record.identity.sample, record)
        self._stream.put(record)
        self._sinks.put(record)
        self._file.put(record)

    def close(self) -> None:
        self._stream.end(len(self._made), self._world.data_rank, self._world.data_size)
        self._sinks.close()
        self._live.later.append(self._write)

    def _write(self) -> None:
        self._live.digests[self._channel] = digest_of(self._made.values())
        self._file.close()


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
    inputs: Mapping[str, Input]
    resident: Resident = field(default_factory=Resident)
    """Lives as long as the process: loaded engines and trainers between calls."""
    stopping: Callable[[], bool] = lambda: False
    live: Live | None = None
    asks: Asks | None = None
    """None: the policy is in this process."""
    metrics: dict[str, tuple[float, float, How]] = field(default_factory=dict)
    """Value, weight, and how ranks are put together."""
    faults: list[Fault] = field(default_factory=list)
    """One at most of this process; once the reports of all ranks are merged, those of all."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    """What it used of its machine; see ``stages.usage``."""
    extra: dict[str, Any] = field(default_factory=dict)
    worker: str = ""
    """Name of the resident worker; empty in a job of the stage's own."""
    doing: str = COMPUTES
    """For whoever watches."""
    _said: float = 0.0
    _read: dict[str, list[Record]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, entry in self.inputs.items():
            entry.waiting = partial(self.waiting, name)

    @property
    def key(self) -> str:
        """Identity of this work; what an interrupted attempt left counts only under the same key.

        Waits until all inputs are committed.
        """
        # No cached_property: before Python 3.12 all instances wait while one computes its value.
        contents = {name: entry.manifest.content for name, entry in self.inputs.items()}
        code = stage_code(self.run, self.config, self.stage)
        return stage_key(self.config, self.stage, self.iteration, contents, code)

    def parts(self) -> Iterator[range]:
        """The samples of the batch, in as many ranges as the plan passes it on in.

        Whole groups, always the same ones: a result does not depend on what came first. Other
        stages of the pool have their turns in between. After the last one it keeps its turn until
        it ends, which takes little: so it is committed while later stages compute.
        """
        starts, size = self.config.rollout.batch, self.config.rollout.group_size
        count = 1 if self.live is None else min(self.live.parts, starts)
        bounds = [starts * k // count * size for k in range(count + 1)]
        for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            self.turn(number)
            yield range(start, stop)

    def turn(self, part: int) -> None:
        """Let other stages of this worker have theirs; waits for its own."""
        if self.live is not None:
            with self._timed(TURN):
                self.live.turn.part(part)

    def records(self, channel: str, samples: range) -> list[Record]:
        """The records that input ``channel`` has of these samples, by sample number.

        Raises:
            ArtifactError: the input is damaged.
            InputFailed: the stage that makes it failed, or committed something else than it sent.
        """
        entry = self.inputs[channel]
        if entry.output is not None and channel not in self._read:
            with self.waiting(channel):
                here = entry.output.records(channel, samples, self.stopping, entry.on_disk)
            if here is not None:
                entry.taken = True
                return here
        if channel not in self._read:
            source = self.verified(channel)
            # Of a window ``NAME.1`` and so on are the same channel of earlier outputs.
            stem = channel.partition(".")[0]
            records = list(FileReader(source.glob(f"{stem}-r*.h5")))
            if entry.output is not None and entry.taken:
                entry.output.compare(channel, records)
            # Some of it may be missing in memory for ever, and need not be compared again.
            entry.fell |= entry.output is not None
            entry.output = None
            self._read[channel] = records
        return [r for r in self._read[channel] if r.identity.sample in samples]

    def arriving(self, channel: str, count: int, made_of: str) -> Iterator[Record]:
        """``count`` records of an output channel that others send here, as they come.

        Args:
            made_of: name of the input that they are made of.

        Raises:
            InputFailed: they were made of an attempt at it that was not committed in the end.
        """
        assert self.live is not None, "records arrive at resident workers alone"
        committed = self.inputs[made_of].manifest.data
        return self.live.output.arriving(channel, count, self.stopping, committed)

    def verified(self, name: str) -> Path:
        """Data folder of an input whose files are all there, of their sizes.

        Their content is checked as it is read, by :mod:`rlinf.checked`.

        Raises:
            ArtifactError: a file is missing or truncated.
        """
        entry = self.inputs[name]
        with self.span("verify"):
            verify(entry.folder, entry.manifest, checksums=False)
        return entry.data

    def writer(self, channel: str) -> Writer:
        """An output channel; its files are visible once the stage has committed."""
        if not self.world.speaks:
            return _Nowhere()
        file = FileWriter(self.data, channel, self.world.rank)
        return file if self.live is None else _Both(file, self.live, channel, self.world)

    def hand_on(self, name: str, value: Any) -> None:
        """Give later stages of this process something else than records."""
        if self.live is not None:
            self.live.output.objects[name] = value

    def later(self, work: Callable[[], None]) -> None:
        """Write files: at once, or in a pool while the next stage computes."""
        if self.live is None:
            work()
        else:
            self.live.later.append(work)

    def let_go(self) -> None:
        """End what refers back to this one, so that it is freed at once with all that it holds.

        A cycle stays until Python's collector looks through all objects: after many iterations in
        a large process, each of which would leave a copy of the weights and the optimizer.
        """
        for entry in self.inputs.values():
            entry.waiting = contextlib.nullcontext
        if self.live is not None:
            self.live.later.clear()

    def metric(self, name: str, value: float, weight: float = 1.0, how: How = "mean") -> None:
        """Record a deterministic number; of several ranks it is their mean by weight (weight 0: the
        sum), the largest (``max``), or (``std``) the deviation of all from the metric ``mean``."""
        if self.world.speaks:
            self.metrics[name] = (float(value), float(weight), how)

    def count(self, counts: Mapping[str, int], total: int, what: str) -> None:
        """Record numbers of things out of ``total``; those that are there are said in the log."""
        for name, number in counts.items():
            self.metric(name, number, weight=0)
        if said := [f"{number} {name}" for name, number in counts.items() if number]:
            said = [text.replace("_", " ") for text in said]
            log.info("%s %d: %s of %d %s", self.stage, self.iteration, ", ".join(said), total, what)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of the stage."""
        start = time.time()
        try:
            yield
        finally:
            self.took(name, start)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Wait for an input: others may compute meanwhile. Begins and ends in this one's turn."""
        rest = contextlib.nullcontext() if self.live is None else self.live.turn.resting()
        with self._timed(what), rest:
            yield

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Time a wait, as a span, unless it is too short to matter."""
        before, self.doing = self.doing, f"waits for {what}"
        start = time.time()
        try:
            yield
        finally:
            self.doing = before
            if time.time() - start > BRIEF_S:
                self.took(WAIT, start)

    def took(self, name: str, start: float) -> None:
        """A part of the stage that began at ``start`` ends now.

        A short one goes on with the last one, where that had its name and ended just before.
        """
        if self.spans and time.time() - start < SHORT_S:
            last = self.spans[-1]
            if last["name"] == name and 0 <= start - last["end"] < BRIEF_S:
                last["end"] = time.time()
                return
        self.spans.append(
            {
                "name": name,
                "worker": self.worker,
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
        hook = self.resident.progress
        if hook is not None:
            hook(self.stage, done, total, what)
        elif time.monotonic() - self._said > 5:
            self._said = time.monotonic()
            log.info("%s %d: %d of %d %s", self.stage, self.iteration, done, total, what)
