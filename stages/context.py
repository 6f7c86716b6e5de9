"""The context of a stage: the same under every driver, launcher and execution mode."""

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
from rlinf.data.trajectory import ChannelItem, Trajectory
from rlinf.errors import RequeueRequested
from stages.device_schedule import DeviceSlot, Unscheduled
from stages.identity import stage_code_digest, stage_key
from stages.live_store import LiveOutput
from stages.worker_state import COMPUTING, WAITING_FOR_DEVICE, WorkerState

if TYPE_CHECKING:
    from rlinf.envs.base import Environment, RolloutRequest
T = TypeVar("T")
Item = TypeVar("Item", bound=ChannelItem)
MetricReduction = Literal["mean", "max", "std"]
COMMIT_POLL_S = 0.02
MIN_WAIT_SPAN_S = 0.002
"""Shorter waits are not recorded, and a shorter gap does not separate two equal spans."""
MERGEABLE_SPAN_S = 0.05
"""Equal spans in a row that are shorter than this are merged into one."""
WAIT_SPAN = "wait"
IDLE_SPANS = frozenset({WAIT_SPAN, "offload", "onload"})
"""Names of spans without computation: waits and transfers to or from the device."""
log = logging.getLogger("rlinf")


@dataclass
class StageInput:
    """An input of a stage: a committed output, or one still in memory (``live_output``)."""

    folder: Path
    known_manifest: Manifest | None = None
    live_output: LiveOutput | None = None
    should_stop: Callable[[], bool] = lambda: False
    wait_scope: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """The context manager entered while waiting; it records the wait as a span."""
    used_live: bool = False
    """Whether any of it was read from memory."""
    used_disk_fallback: bool = False
    """Whether it was expected in memory and was read from disk."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the committed output; waits for the commit."""
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
        """Return whether the output is committed by now."""
        if self.known_manifest is None:
            self.known_manifest = read_manifest(self.folder)
        return self.known_manifest is not None

    @property
    def data_folder(self) -> Path:
        """The folder with the committed files; waits for the commit."""
        return self.folder / self.manifest.data

    @property
    def content_id(self) -> str:
        """The identity of the content: output folder and attempt. Equal ids mean equal content."""
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
        """Return an object of the live output by name. None: read it from disk."""
        if self.known_manifest is None and self.live_output is not None:
            return self.live_output.objects.get(name)
        return None


class DialogueFailure(NamedTuple):
    """Failures of the dialogues of one process."""

    error: str
    """The error that ended the last of them."""
    is_user_bug: bool
    """Whether an error in the user's code ended each of them; a retry would fail as well."""


class RecordWriter(Protocol):
    """A writer for the records of an output channel."""

    def put(self, record: Record) -> None: ...

    def close(self) -> None: ...


class RemotePolicy(Protocol):
    """A policy in another worker, used by the simulators of a stage."""

    def rollout_iter(
        self, ctx: StageContext, environment: Environment, episodes: RolloutRequest
    ) -> Generator[Trajectory]: ...


class LiveContext:
    """The in-memory part of a context in a pool worker; a stage in its own job has none."""

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
        """The digest of the records this attempt wrote, by channel."""


class _Nowhere:
    """A writer that drops records, on ranks whose primary rank writes the same."""

    def put(self, record: Record) -> None: ...

    def close(self) -> None: ...


class _Both:
    """A writer that streams records at once and writes their file when the stage commits."""

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
    """Everything a stage works with: configuration, inputs, output folder, metrics, state."""

    config: RunConfig
    stage: str
    iteration: int
    run_folder: Path
    output_folder: Path
    data_folder: Path
    """The private folder of this attempt; its files are committed with the manifest."""
    world: ProcessGroupInfo
    inputs: Mapping[str, StageInput]
    worker_state: WorkerState = field(default_factory=WorkerState)
    """The engines and trainers that stay loaded between stages of the same process."""
    should_stop: Callable[[], bool] = lambda: False
    live: LiveContext | None = None
    remote_policy: RemotePolicy | None = None
    """None: the policy is in this process."""
    metrics: dict[str, tuple[float, float, MetricReduction]] = field(default_factory=dict)
    """By name: value, weight, and how the values of several ranks are reduced."""
    dialogue_failures: list[DialogueFailure] = field(default_factory=list)
    """At most one of this process; after the rank reports are merged, those of all ranks."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    """CPU, memory and GPU use of each rank; see ``stages.resource_usage``."""
    manifest_extra: dict[str, Any] = field(default_factory=dict)
    worker: str = ""
    """Name of the resident worker; empty in a job of the stage's own."""
    activity: str = COMPUTING
    """Activity of the stage, for the status of the run."""
    _logged_at: float = 0.0
    _read: dict[str, list[Record]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, entry in self.inputs.items():
            entry.wait_scope = partial(self.waiting, name)

    @property
    def key(self) -> str:
        """The identity of this stage instance. Saved progress counts only under the same key.

        Waits until all inputs are committed.
        """
        # No cached_property: before Python 3.12 all instances wait while one computes its value.
        contents = {name: entry.manifest.content for name, entry in self.inputs.items()}
        code = stage_code_digest(self.run_folder, self.config, self.stage)
        return stage_key(self.config, self.stage, self.iteration, contents, code)

    def chunks(self) -> Iterator[range]:
        """Yield the samples of the batch in the plan's number of chunks.

        A chunk consists of complete groups, always the same ones, so the result does not depend on
        arrival order. Other stages of the pool use the device between chunks. After the last chunk
        the stage keeps its device slot until it ends, so its commit overlaps with later stages.
        """
        starts, size = self.config.rollout.batch_size, self.config.rollout.group_size
        count = 1 if self.live is None else min(self.live.num_chunks, starts)
        bounds = [starts * k // count * size for k in range(count + 1)]
        for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            self.yield_device(number)
            yield range(start, stop)

    def yield_device(self, chunk: int) -> None:
        """Yield the device to other stages of this worker and wait for the next slot."""
        if self.live is not None:
            with self._timed(WAITING_FOR_DEVICE):
                self.live.slot.start_chunk(chunk)

    def read(self, item: type[Item], channel: str, samples: range) -> list[Item]:
        """Return the typed items of input ``channel`` for these samples, by sample number.

        Raises:
            ArtifactError, UpstreamFailed: as of :meth:`read_records`.
        """
        return [item.from_record(record) for record in self.read_records(channel, samples)]

    def read_records(self, channel: str, samples: range) -> list[Record]:
        """Return the records of input ``channel`` for these samples, by sample number.

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
        """Yield ``count`` records of an output channel that other workers send, as they arrive.

        Args:
            source_input: name of the input from which they are computed.

        Raises:
            UpstreamFailed: they were computed from an attempt that was not committed in the end.
        """
        assert self.live is not None, "only resident workers receive records"
        committed = self.inputs[source_input].manifest.data
        return self.live.output.iter_records(channel, count, self.should_stop, committed)

    def verified_folder(self, name: str) -> Path:
        """Return the data folder of an input; all its files exist and have their sizes.

        Their content is checked as it is read, by :mod:`rlinf.verified_io`.

        Raises:
            ArtifactError: a file is missing or truncated.
        """
        entry = self.inputs[name]
        with self.span("verify"):
            verify_output(entry.folder, entry.manifest, checksums=False)
        return entry.data_folder

    def open_writer(self, channel: str) -> RecordWriter:
        """Open an output channel; its files are visible once the stage has committed."""
        if not self.world.is_primary:
            return _Nowhere()
        file = RecordFileWriter(self.data_folder, channel, self.world.rank)
        return file if self.live is None else _Both(file, self.live, channel, self.world)

    def publish_live(self, name: str, value: Any) -> None:
        """Publish an object other than records to later stages of this process."""
        if self.live is not None:
            self.live.output.objects[name] = value

    def defer(self, work: Callable[[], None]) -> None:
        """Run a write now, or in a pool worker while the next stage computes."""
        if self.live is None:
            work()
        else:
            self.live.deferred_writes.append(work)

    def release(self) -> None:
        """Break reference cycles, so that the context and its tensors are freed at once.

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
        """Record a deterministic number. Ranks are reduced to the mean by weight (weight 0: the
        sum), to the maximum (``max``), or (``std``) to the deviation from the metric ``mean``."""
        if self.world.is_primary:
            self.metrics[name] = (float(value), float(weight), reduction)

    def log_counts(self, counts: Mapping[str, int], total: int, unit: str) -> None:
        """Record counts out of ``total``, and log those above zero."""
        for name, number in counts.items():
            self.log_metric(name, number, weight=0)
        if nonzero := [f"{number} {name}" for name, number in counts.items() if number]:
            nonzero = [text.replace("_", " ") for text in nonzero]
            log.info(
                "%s/%d: %s of %d %s", self.stage, self.iteration, ", ".join(nonzero), total, unit
            )

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record a span around a part of the stage."""
        start = time.time()
        try:
            yield
        finally:
            self.add_span(name, start)

    @contextlib.contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Release the device while waiting for an input, and acquire it again afterwards."""
        rest = contextlib.nullcontext() if self.live is None else self.live.slot.released()
        with self._timed(f"waiting for {name}"), rest:
            yield

    @contextlib.contextmanager
    def _timed(self, activity: str) -> Iterator[None]:
        """Record a wait as a span, unless it is too short to matter."""
        before, self.activity = self.activity, activity
        start = time.time()
        try:
            yield
        finally:
            self.activity = before
            if time.time() - start > MIN_WAIT_SPAN_S:
                self.add_span(WAIT_SPAN, start)

    def add_span(self, name: str, start: float) -> None:
        """Record a span from ``start`` until now.

        A short span extends the previous one if that has the same name and has just ended.
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

    def report_progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        """Report progress, at most every few seconds, and stop here if requested.

        Args:
            note: a further text, such as ``loss 0.5``.

        Raises:
            RequeueRequested: the allocation is about to end.
        """
        if self.should_stop():
            raise RequeueRequested(f"{self.stage}: stopping after {done} of {total} {unit}")
        hook = self.worker_state.on_progress
        if hook is not None:
            hook(self.stage, done, total, unit, note)
        elif time.monotonic() - self._logged_at > 5:
            self._logged_at = time.monotonic()
            progress = f"{done}/{total} {unit}" + (f", {note}" if note else "")
            log.info("%s/%d: %s", self.stage, self.iteration, progress)
