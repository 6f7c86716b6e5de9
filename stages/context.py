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

from rlinf.artifacts import Manifest, read_manifest, verify_output
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.channels.record_files import RecordFileReader, RecordFileWriter
from rlinf.config import RunConfig
from rlinf.data.record import Record, digest_records
from rlinf.errors import RequeueRequested
from stages.device_schedule import DeviceSlot, Unscheduled
from stages.identity import stage_code_digest, stage_key
from stages.live_store import LiveOutput
from stages.worker_state import COMPUTING, DEVICE_TURN, WorkerState

if TYPE_CHECKING:
    from rlinf.envs.base import Environment, RolloutRequest

T = TypeVar("T")
MetricReduction = Literal["mean", "max", "std"]
COMMIT_POLL_S = 0.02
MIN_WAIT_SPAN_S = 0.002
"""Waits shorter than this are not recorded, nor what is shorter between two equal spans."""
MERGEABLE_SPAN_S = 0.05
"""Of many equal spans in a row, those that are shorter are one."""
WAIT_SPAN = "wait"
IDLE_SPANS = frozenset({WAIT_SPAN, "offload", "onload"})
"""Spans in which a stage computes nothing: it waits, or moves things from and to its device."""
log = logging.getLogger("rlinf")


@dataclass
class StageInput:
    """An output of an earlier stage: committed, or still in memory (``output``)."""

    folder: Path
    known_manifest: Manifest | None = None
    live_output: LiveOutput | None = None
    should_stop: Callable[[], bool] = lambda: False
    wait_scope: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Entered while waiting, so that it can be seen."""
    used_live: bool = False
    """Whether something of it was taken from memory."""
    used_disk_fallback: bool = False
    """Whether it was to come by memory, and was read from disk."""

    @property
    def manifest(self) -> Manifest:
        """Its commit; waits for that."""
        if self.known_manifest is None:
            with self.wait_scope():
                while not self.is_committed():
                    if self.should_stop():
                        raise RequeueRequested(f"asked to stop while waiting for {self.folder}")
                    if self.live_output is not None:
                        self.live_output.raise_if_failed()
                    time.sleep(COMMIT_POLL_S)
        assert self.known_manifest is not None
        return self.known_manifest

    def is_committed(self) -> bool:
        """Whether it is committed by now."""
        if self.known_manifest is None:
            self.known_manifest = read_manifest(self.folder)
        return self.known_manifest is not None

    @property
    def data_folder(self) -> Path:
        """Folder of its files; waits for the commit."""
        return self.folder / self.manifest.data

    @property
    def content_id(self) -> str:
        """Names its content: the same output folder and attempt always hold the same."""
        if self.known_manifest is None and self.live_output is not None:
            # What is sent by another worker may be lost on the way; the commit is not.
            with self.wait_scope():
                attempt = self.live_output.wait_for_attempt(self.should_stop, self.is_committed)
            if attempt is not None:
                self.used_live = True
                return f"{self.folder}/{attempt}"
            self.live_output, self.used_disk_fallback = None, True
        return f"{self.folder}/{self.manifest.data}"

    def live_object(self, name: str) -> Any:
        """What it handed on in memory besides records; None: it is to be read from disk."""
        if self.known_manifest is None and self.live_output is not None:
            return self.live_output.objects.get(name)
        return None


class DialogueFailure(NamedTuple):
    """Why dialogues of one process were lost."""

    error: str
    """What ended the last of them."""
    is_user_bug: bool
    """Whether each ended by an error of the user's code that another try would meet again."""


class RecordWriter(Protocol):
    """Takes the records of an output channel."""

    def put(self, record: Record) -> None: ...

    def close(self) -> None: ...


class RemotePolicy(Protocol):
    """The way from the simulators of a stage to the policy, where that is in other workers."""

    def rollout_iter(
        self, ctx: StageContext, environment: Environment, episodes: RolloutRequest
    ) -> Generator[Record]: ...


class LiveContext:
    """What a stage in a pool has besides files; one in a job of its own has none of it."""

    def __init__(
        self,
        output: LiveOutput,
        slot: DeviceSlot | Unscheduled,
        open_sink: Callable[[str], RecordWriter],
        num_chunks: int,
    ) -> None:
        self.output, self.slot, self.open_sink, self.num_chunks = (
            output,
            slot,
            open_sink,
            num_chunks,
        )
        self.deferred_writes: list[Callable[[], None]] = []
        self.stream_digests: dict[str, int] = {}
        """Of the records this attempt wrote, by channel."""


class _Nowhere:
    """Of a process that does not speak: another one writes the same."""

    def put(self, record: Record) -> None: ...

    def close(self) -> None: ...


class _Both:
    """Hands records on at once and writes them to a file when the stage commits."""

    def __init__(
        self, file: RecordFileWriter, live: LiveContext, channel: str, world: ProcessGroupInfo
    ) -> None:
        self._file, self._live, self._world = file, live, world
        self._channel = channel
        self._stream = live.output.stream(channel)
        self._records: dict[int, Record] = {}
        self._sinks = live.open_sink(channel)

    def put(self, record: Record) -> None:
        self._records.setdefault(record.identity.sample, record)
        self._stream.put(record)
        self._sinks.put(record)
        self._file.put(record)

    def close(self) -> None:
        self._stream.finish_rank(
            len(self._records), self._world.data_parallel_rank, self._world.data_parallel_size
        )
        self._sinks.close()
        self._live.deferred_writes.append(self._write)

    def _write(self) -> None:
        self._live.stream_digests[self._channel] = digest_records(self._records.values())
        self._file.close()


@dataclass
class StageContext:
    """Configuration, place in the run, channels, metrics; see the fields."""

    config: RunConfig
    stage: str
    iteration: int
    run_folder: Path
    output_folder: Path
    data_folder: Path
    """Private folder of this attempt; what is written here is committed with the manifest."""
    world: ProcessGroupInfo
    inputs: Mapping[str, StageInput]
    worker_state: WorkerState = field(default_factory=WorkerState)
    """Lives as long as the process: loaded engines and trainers between calls."""
    should_stop: Callable[[], bool] = lambda: False
    live: LiveContext | None = None
    remote_policy: RemotePolicy | None = None
    """None: the policy is in this process."""
    metrics: dict[str, tuple[float, float, MetricReduction]] = field(default_factory=dict)
    """Value, weight, and how ranks are put together."""
    dialogue_failures: list[DialogueFailure] = field(default_factory=list)
    """One at most of this process; once the reports of all ranks are merged, those of all."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    """What it used of its machine; see ``stages.resource_usage``."""
    manifest_extra: dict[str, Any] = field(default_factory=dict)
    worker: str = ""
    """Name of the resident worker; empty in a job of the stage's own."""
    status: str = COMPUTING
    """For whoever watches."""
    _logged_at: float = 0.0
    _read: dict[str, list[Record]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, entry in self.inputs.items():
            entry.wait_scope = partial(self.waiting, name)

    @property
    def key(self) -> str:
        """Identity of this work; what an interrupted attempt left counts only under the same key.

        Waits until all inputs are committed.
        """
        # No cached_property: before Python 3.12 all instances wait while one computes its value.
        contents = {name: entry.manifest.content for name, entry in self.inputs.items()}
        code = stage_code_digest(self.run_folder, self.config, self.stage)
        return stage_key(self.config, self.stage, self.iteration, contents, code)

    def chunks(self) -> Iterator[range]:
        """The samples of the batch, in as many ranges as the plan passes it on in.

        Whole groups, always the same ones: a result does not depend on what came first. Other
        stages of the pool have their turns in between. After the last one it keeps its turn until
        it ends, which takes little: so it is committed while later stages compute.
        """
        starts, size = self.config.rollout.batch_size, self.config.rollout.group_size
        count = 1 if self.live is None else min(self.live.num_chunks, starts)
        bounds = [starts * k // count * size for k in range(count + 1)]
        for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            self.yield_device(number)
            yield range(start, stop)

    def yield_device(self, chunk: int) -> None:
        """Let other stages of this worker have theirs; waits for its own."""
        if self.live is not None:
            with self._timed(DEVICE_TURN):
                self.live.slot.start_chunk(chunk)

    def read_records(self, channel: str, samples: range) -> list[Record]:
        """The records that input ``channel`` has of these samples, by sample number.

        Raises:
            ArtifactError: the input is damaged.
            UpstreamFailed: its stage failed, or committed other records than it sent.
        """
        entry = self.inputs[channel]
        if entry.live_output is not None and channel not in self._read:
            with self.waiting(channel):
                here = entry.live_output.wait_for_records(
                    channel, samples, self.should_stop, entry.is_committed
                )
            if here is not None:
                entry.used_live = True
                return here
        if channel not in self._read:
            source = self.verified_folder(channel)
            # Of a window ``NAME.1`` and so on are the same channel of earlier outputs.
            stem = channel.partition(".")[0]
            records = list(RecordFileReader(source.glob(f"{stem}-r*.h5")))
            if entry.live_output is not None and entry.used_live:
                entry.live_output.compare_with_commit(channel, records)
            # Some of it may be missing in memory for ever, and need not be compared again.
            entry.used_disk_fallback |= entry.live_output is not None
            entry.live_output = None
            self._read[channel] = records
        return [r for r in self._read[channel] if r.identity.sample in samples]

    def receive_records(self, channel: str, count: int, source_input: str) -> Iterator[Record]:
        """``count`` records of an output channel that others send here, as they come.

        Args:
            depends_on: name of the input that they are made of.

        Raises:
            UpstreamFailed: they were made of an attempt at it that was not committed in the end.
        """
        assert self.live is not None, "records arrive at resident workers alone"
        committed = self.inputs[source_input].manifest.data
        return self.live.output.iter_records(channel, count, self.should_stop, committed)

    def verified_folder(self, name: str) -> Path:
        """Data folder of an input whose files are all there, of their sizes.

        Their content is checked as it is read, by :mod:`rlinf.verified_io`.

        Raises:
            ArtifactError: a file is missing or truncated.
        """
        entry = self.inputs[name]
        with self.span("verify"):
            verify_output(entry.folder, entry.manifest, checksums=False)
        return entry.data_folder

    def open_writer(self, channel: str) -> RecordWriter:
        """An output channel; its files are visible once the stage has committed."""
        if not self.world.is_primary:
            return _Nowhere()
        file = RecordFileWriter(self.data_folder, channel, self.world.rank)
        return file if self.live is None else _Both(file, self.live, channel, self.world)

    def publish_live(self, name: str, value: Any) -> None:
        """Give later stages of this process something else than records."""
        if self.live is not None:
            self.live.output.objects[name] = value

    def defer(self, work: Callable[[], None]) -> None:
        """Write files: at once, or in a pool while the next stage computes."""
        if self.live is None:
            work()
        else:
            self.live.deferred_writes.append(work)

    def release(self) -> None:
        """End what refers back to this one, so that it is freed at once with all that it holds.

        A cycle stays until Python's collector looks through all objects: after many iterations in
        a large process, each of which would leave a copy of the weights and the optimizer.
        """
        for entry in self.inputs.values():
            entry.wait_scope = contextlib.nullcontext
        if self.live is not None:
            self.live.deferred_writes.clear()

    def log_metric(
        self, name: str, value: float, weight: float = 1.0, reduction: MetricReduction = "mean"
    ) -> None:
        """Record a deterministic number; of several ranks it is their mean by weight (weight 0: the
        sum), the largest (``max``), or (``std``) the deviation of all from the metric ``mean``."""
        if self.world.is_primary:
            self.metrics[name] = (float(value), float(weight), reduction)

    def log_counts(self, counts: Mapping[str, int], total: int, unit: str) -> None:
        """Record numbers of things out of ``total``; those that are there are said in the log."""
        for name, number in counts.items():
            self.log_metric(name, number, weight=0)
        if nonzero := [f"{number} {name}" for name, number in counts.items() if number]:
            nonzero = [text.replace("_", " ") for text in nonzero]
            log.info(
                "%s %d: %s of %d %s", self.stage, self.iteration, ", ".join(nonzero), total, unit
            )

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of the stage."""
        start = time.time()
        try:
            yield
        finally:
            self.add_span(name, start)

    @contextlib.contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Wait for an input: others may compute meanwhile. Begins and ends in this one's turn."""
        rest = contextlib.nullcontext() if self.live is None else self.live.slot.released()
        with self._timed(name), rest:
            yield

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Time a wait, as a span, unless it is too short to matter."""
        before, self.status = self.status, f"waits for {what}"
        start = time.time()
        try:
            yield
        finally:
            self.status = before
            if time.time() - start > MIN_WAIT_SPAN_S:
                self.add_span(WAIT_SPAN, start)

    def add_span(self, name: str, start: float) -> None:
        """A part of the stage that began at ``start`` ends now.

        A short one goes on with the last one, where that had its name and ended just before.
        """
        if self.spans and time.time() - start < MERGEABLE_SPAN_S:
            last = self.spans[-1]
            if last["name"] == name and 0 <= start - last["end"] < MIN_WAIT_SPAN_S:
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

    def report_progress(self, done: int, total: int, unit: str) -> None:
        """Say how far the stage is, at most every few seconds, and stop here when asked to.

        Raises:
            RequeueRequested: the allocation is about to end.
        """
        if self.should_stop():
            raise RequeueRequested(f"{self.stage}: stopping after {done} of {total} {unit}")
        hook = self.worker_state.on_progress
        if hook is not None:
            hook(self.stage, done, total, unit)
        elif time.monotonic() - self._logged_at > 5:
            self._logged_at = time.monotonic()
            log.info("%s %d: %d of %d %s", self.stage, self.iteration, done, total, unit)
