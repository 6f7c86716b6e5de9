"""The context of a stage. It is the same for every driver, launcher and execution mode."""

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

from rlinf.artifacts import FileEntry, Manifest, read_manifest, verify_output
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.channels.record_files import RecordFileReader, RecordFileWriter
from rlinf.config import RunConfig
from rlinf.data.record import Record, digest_records
from rlinf.data.trajectory import ChannelItem, Trajectory
from rlinf.errors import RequeueRequested
from rlinf.progress import PROGRESS
from stages.device_schedule import DeviceSlot, Unscheduled
from stages.identity import stage_code_digest, stage_key
from stages.live_store import LiveOutput, StreamEnd
from stages.worker_state import COMPUTING, WAITING_FOR_DEVICE, WorkerState

if TYPE_CHECKING:
    from rlinf.envs.base import Environment, RolloutRequest
Item = TypeVar("Item", bound=ChannelItem)
MetricReduction = Literal["mean", "max", "std"]
COMMIT_POLL_S = 0.02
"""Seconds between two checks for the commit of an input."""
MIN_WAIT_SPAN_S = 0.002
"""Minimum seconds of a wait to be recorded, and of a gap that keeps two spans separate."""
MERGEABLE_SPAN_S = 0.05
"""Seconds; only a shorter span is merged into the previous span of the same name."""
WAIT_SPAN = "wait"
COMPUTE = "compute"
"""Key of a manifest's ``extra``: data type and device of the stage's engine and trainer."""
IDLE_SPANS = frozenset({WAIT_SPAN, "offload", "onload"})
"""Names of spans without computation: waits, and transfers to and from the device."""
log = logging.getLogger("rlinf")


@dataclass
class StageInput:
    """An input of a stage: a committed output, or an output in memory (``live_output``)."""

    folder: Path
    """The output folder of the stage that produces the input."""
    known_manifest: Manifest | None = None
    """None: not read yet, or the output was not committed when that was last checked."""
    live_output: LiveOutput | None = None
    """None: the input is read from disk."""
    should_stop: Callable[[], bool] = lambda: False
    wait_scope: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Returns a context manager that surrounds each wait and records it as a span."""
    used_live: bool = False
    """Whether any part of the input was read from memory."""
    used_disk_fallback: bool = False
    """Whether the input was expected in memory but was read from disk."""

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
        if self.known_manifest is None:
            self.known_manifest = read_manifest(self.folder)
        return self.known_manifest is not None

    @property
    def data_folder(self) -> Path:
        """The folder with the committed files; waits for the commit."""
        return self.folder / self.manifest.data

    @property
    def content_id(self) -> str:
        """Id of the content: ``OUTPUT_FOLDER/ATTEMPT``. Equal ids mean equal content."""
        if self.known_manifest is None and self.live_output is not None:
            # The commit ends the wait too, because data from another worker may be lost.
            with self.wait_scope():
                attempt = self.live_output.wait_for_attempt(self.should_stop, self.is_committed)
            if attempt is not None:
                self.used_live = True
                return f"{self.folder}/{attempt}"
            self.live_output, self.used_disk_fallback = None, True
        return f"{self.folder}/{self.manifest.data}"

    def live_object(self, name: str) -> Any:
        """Return an object of the live output by name, or None if it must be read from disk."""
        if self.known_manifest is None and self.live_output is not None:
            return self.live_output.objects.get(name)
        return None


class DialogueFailure(NamedTuple):
    """A summary of the failed dialogues of one process."""

    error: str
    """The error that ended the last failed dialogue."""
    is_user_bug: bool
    """Whether errors in the user's code ended all failed dialogues, so that a retry would fail."""


class RecordWriter(Protocol):
    """A writer for the records of an output channel."""

    def put(self, record: Record) -> None: ...

    def close(self) -> None: ...


class RemotePolicy(Protocol):
    """A policy in another worker, used by the simulators of a stage."""

    def rollout_iter(
        self, ctx: StageContext, environment: Environment, request: RolloutRequest
    ) -> Generator[Trajectory]: ...


class LiveContext:
    """The in-memory part of a context in a pool worker; a stage in its own job has none.

    Args:
        output: the output of the stage in memory.
        slot: the right of the stage to use the device, by its position in the device schedule.
        num_chunks: number of chunks in which the batch is read and written.
    """

    def __init__(
        self,
        output: LiveOutput,
        slot: DeviceSlot | Unscheduled,
        num_chunks: int,
    ) -> None:
        self.output, self.slot, self.num_chunks = output, slot, num_chunks
        self.deferred_writes: list[Callable[[], None]] = []
        """Writes to disk that run when the stage commits."""
        self.stream_digests: dict[str, int] = {}
        """The digest of the records that this attempt wrote, by channel."""


class _NullWriter:
    """A writer that drops records, for ranks whose primary rank writes the same records."""

    def put(self, record: Record) -> None: ...

    def close(self) -> None: ...


class _TeeWriter:
    """A writer whose records can be read at once; it writes their file at the commit."""

    def __init__(
        self, file: RecordFileWriter, live: LiveContext, channel: str, world: ProcessGroupInfo
    ) -> None:
        self._file, self._live, self._world = file, live, world
        self._channel = channel
        self._stream = live.output.stream(channel)
        self._records: dict[int, Record] = {}

    def put(self, record: Record) -> None:
        self._records.setdefault(record.identity.sample, record)
        self._stream.put(record)
        self._file.put(record)

    def close(self) -> None:
        rank, num_ranks = self._world.data_parallel_rank, self._world.data_parallel_size
        self._stream.finish(StreamEnd(len(self._records), rank, num_ranks))
        self._live.deferred_writes.append(self._write_file)

    def _write_file(self) -> None:
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
    """The folder of this attempt in ``output_folder``; the manifest commits the files in it."""
    world: ProcessGroupInfo
    inputs: Mapping[str, StageInput]
    worker_state: WorkerState = field(default_factory=WorkerState)
    """The engines and trainers that stay loaded between stages of the same process."""
    should_stop: Callable[[], bool] = lambda: False
    live: LiveContext | None = None
    """None: the stage has its own job and shares nothing in memory."""
    remote_policy: RemotePolicy | None = None
    """None: the policy is in this process."""
    metrics: dict[str, tuple[float, float, MetricReduction]] = field(default_factory=dict)
    """Value, weight and reduction over ranks of each metric."""
    dialogue_failures: list[DialogueFailure] = field(default_factory=list)
    """At most one entry for this process; after the rank reports are merged, those of all ranks."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    """Parts of the stage with name, rank, host and times; see :meth:`add_span`."""
    usage: list[dict[str, Any]] = field(default_factory=list)
    """CPU, memory and GPU use of each rank; see ``stages.resource_usage``."""
    discarded_files: dict[str, FileEntry] | None = None
    """Files of the output that were described and not kept, by path below ``data_folder``; None:
    all files are kept."""
    manifest_extra: dict[str, Any] = field(default_factory=dict)
    """Additional values for the manifest."""
    worker: str = ""
    """Name of the resident worker; empty if the stage has its own job."""
    activity: str = COMPUTING
    """Current activity of the stage, for the status of the run."""
    _last_log: float = 0.0
    """Time of the last progress line in the log (monotonic, s)."""
    _records_by_channel: dict[str, list[Record]] = field(default_factory=dict)
    """Records that were read from disk, by input channel."""

    def __post_init__(self) -> None:
        for name, stage_input in self.inputs.items():
            stage_input.wait_scope = partial(self.waiting, name)

    @property
    def key(self) -> str:
        """The identity of the output; waits until all inputs are committed.

        Saved progress is valid only for the same key.
        """
        # Not a cached_property: before Python 3.12 it locks all instances while one computes it.
        contents = {name: stage_input.manifest.content for name, stage_input in self.inputs.items()}
        code = stage_code_digest(self.run_folder, self.config, self.stage)
        return stage_key(self.config, self.stage, self.iteration, contents, code)

    def chunks(self) -> Iterator[range]:
        """Yield the sample numbers of each chunk of the batch; the plan sets the number of chunks.

        A chunk consists of complete groups with fixed indices, so the result does not depend on
        arrival order. Other stages of the pool use the device between chunks. After the last chunk
        the stage keeps the device until it has computed; later stages compute while it commits.
        """
        num_starts, size = self.config.rollout.batch_size, self.config.rollout.group_size
        num_chunks = 1 if self.live is None else min(self.live.num_chunks, num_starts)
        bounds = [num_starts * k // num_chunks * size for k in range(num_chunks + 1)]
        for number, (first, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            self.yield_device(number)
            yield range(first, stop)

    def yield_device(self, chunk: int) -> None:
        """Yield the device to other stages of this worker and wait for the next slot."""
        if self.live is not None:
            with self._wait_span(WAITING_FOR_DEVICE):
                self.live.slot.start_chunk(chunk)

    def read(self, item_class: type[Item], channel: str, samples: range) -> list[Item]:
        """Return the items of input ``channel`` for these samples, ordered by sample number.

        Raises:
            ArtifactError, UpstreamFailed: as for :meth:`read_records`.
        """
        return [item_class.from_record(record) for record in self.read_records(channel, samples)]

    def read_records(self, channel: str, samples: range) -> list[Record]:
        """Return the records of input ``channel`` for these samples, ordered by sample number.

        Raises:
            ArtifactError: the input is damaged.
            UpstreamFailed: the stage of the input failed, or committed other records than it sent.
        """
        stage_input = self.inputs[channel]
        if stage_input.live_output is not None and channel not in self._records_by_channel:
            with self.waiting(channel):
                live_records = stage_input.live_output.wait_for_records(
                    channel, samples, self.should_stop, stage_input.is_committed
                )
            if live_records is not None:
                stage_input.used_live = True
                return live_records
        if channel not in self._records_by_channel:
            source = self.verified_folder(channel)
            # In a history, ``NAME.1`` and so on are the same channel of earlier outputs.
            stem = channel.partition(".")[0]
            records = list(RecordFileReader(source.glob(f"{stem}-r*.h5")))
            if stage_input.live_output is not None and stage_input.used_live:
                stage_input.live_output.compare_with_commit(channel, records)
            # Some live records may be lost, so read only from disk from now on.
            stage_input.used_disk_fallback |= stage_input.live_output is not None
            stage_input.live_output = None
            self._records_by_channel[channel] = records
        return [r for r in self._records_by_channel[channel] if r.identity.sample in samples]

    def receive_records(self, channel: str, count: int, source_input: str) -> Iterator[Record]:
        """Yield ``count`` records of an output channel that other workers produce, as they arrive.

        Args:
            source_input: name of the input from which the records are computed.

        Raises:
            UpstreamFailed: the records were computed from an attempt that was not committed.
        """
        assert self.live is not None, "only resident workers receive records"
        committed = self.inputs[source_input].manifest.data
        return self.live.output.iter_records(channel, count, self.should_stop, committed)

    def verified_folder(self, name: str) -> Path:
        """Return the data folder of an input, after checking that all files have their sizes.

        :mod:`rlinf.verified_io` verifies their content when it is read.

        Raises:
            ArtifactError: a file is missing or truncated.
        """
        stage_input = self.inputs[name]
        with self.span("verify"):
            verify_output(stage_input.folder, stage_input.manifest, checksums=False)
        return stage_input.data_folder

    def open_writer(self, channel: str) -> RecordWriter:
        """Open an output channel. Its files become part of the output when the stage commits."""
        if not self.world.is_primary:
            return _NullWriter()
        file = RecordFileWriter(self.data_folder, channel, self.world.rank)
        return file if self.live is None else _TeeWriter(file, self.live, channel, self.world)

    def publish_live(self, name: str, value: Any) -> None:
        """Make an object, such as the weights, available in memory to later stages."""
        if self.live is not None:
            self.live.output.objects[name] = value

    def defer(self, work: Callable[[], None]) -> None:
        """Run a write to disk now; in a pool worker at the commit, while other stages compute."""
        if self.live is None:
            work()
        else:
            self.live.deferred_writes.append(work)

    def release(self) -> None:
        """Break reference cycles, so that the context and its tensors are freed at once.

        Python's garbage collector finds cycles only after many iterations in a large process. Until
        then each iteration would leave a copy of the weights and the optimizer.
        """
        for stage_input in self.inputs.values():
            stage_input.wait_scope = contextlib.nullcontext
        if self.live is not None:
            self.live.deferred_writes.clear()

    def log_metric(
        self, name: str, value: float, weight: float = 1.0, reduction: MetricReduction = "mean"
    ) -> None:
        """Record a metric. It must be deterministic, because it is part of the content digest.

        Args:
            weight: weight of this rank in the mean; 0: the values of the ranks are added.
            reduction: over ranks: mean, maximum, or the standard deviation of all ranks' values
                (``std``), for which the stage must also log the metric named ``mean``.
        """
        if self.world.is_primary:
            self.metrics[name] = (float(value), float(weight), reduction)

    def log_counts(self, counts: Mapping[str, int], total: int, unit: str) -> None:
        """Record counts out of ``total``, and log the nonzero counts."""
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
        device_scope = contextlib.nullcontext() if self.live is None else self.live.slot.released()
        with self._wait_span(f"waiting for {name}"), device_scope:
            yield

    @contextlib.contextmanager
    def _wait_span(self, activity: str) -> Iterator[None]:
        """Show a wait as ``activity`` in the status; record it as a span unless it is too short."""
        previous, self.activity = self.activity, activity
        start = time.time()
        try:
            yield
        finally:
            self.activity = previous
            if time.time() - start > MIN_WAIT_SPAN_S:
                self.add_span(WAIT_SPAN, start)

    def add_span(self, name: str, start: float) -> None:
        """Record a span from ``start`` until now.

        A short span extends the previous one if that has the same name and has just ended.
        """
        PROGRESS.mark()
        if self.spans and time.time() - start < MERGEABLE_SPAN_S:
            last_span = self.spans[-1]
            if last_span["name"] == name and 0 <= start - last_span["end"] < MIN_WAIT_SPAN_S:
                last_span["end"] = time.time()
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
        """Report progress, at most every few seconds, and stop if requested.

        Args:
            note: an additional text, such as ``loss 0.5``.

        Raises:
            RequeueRequested: the allocation is about to end.
        """
        PROGRESS.mark()
        if self.should_stop():
            raise RequeueRequested(f"{self.stage}: stopping after {done} of {total} {unit}")
        hook = self.worker_state.on_progress
        if hook is not None:
            hook(self.stage, done, total, unit, note)
        elif time.monotonic() - self._last_log > 5:
            self._last_log = time.monotonic()
            progress = f"{done}/{total} {unit}" + (f", {note}" if note else "")
            log.info("%s/%d: %s", self.stage, self.iteration, progress)
