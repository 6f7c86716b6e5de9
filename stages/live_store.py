"""Stage outputs in memory, which other stages read before the outputs are on disk.

Every pool worker has a :class:`LiveStore` with one :class:`LiveOutput` per stage instance (a stage
of one iteration) that runs in the worker or whose records it fetches from other workers. An output
has a :class:`RecordStream` per channel. A stream keeps all records, because several stages read
them, and a stage may read them again. An output is dropped when it is committed and no running
stage of this worker reads it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from rlinf.artifacts import Manifest
from rlinf.data.record import Record, digest_records
from rlinf.errors import RequeueRequested, UpstreamFailed

STREAM_DIGESTS = "streams"
"""Key of a manifest's ``extra``: digest of the records of each channel, by channel."""
POLL_S = 0.5
"""Seconds between two checks whether a waiting stage should stop."""


def evict_oldest(entries: dict[Any, Any], max_entries: int) -> None:
    """Drop the oldest entries of a mapping until it has at most ``max_entries``."""
    while len(entries) > max_entries:
        entries.pop(next(iter(entries)), None)


class StreamEnd(NamedTuple):
    """The end of the records that one rank of a stage has produced."""

    num_records: int
    rank: int = 0
    num_ranks: int = 1


class OwnRecords(NamedTuple):
    """Some records that this worker has produced."""

    records: list[Record]
    is_end: bool = False
    """Whether no more records come, because the reader has all of them or the stream is closed."""
    end: StreamEnd | None = None
    """None: there are more records, or the stream is closed."""


@dataclass(eq=False)
class FetchProgress:
    """The progress of fetching the records of another worker."""

    stream: str | None = None
    """Identity of the stream in the worker that produces the records; None: not known yet."""
    cursor: int = 0
    """Number of records that were fetched from this stream."""
    end: StreamEnd | None = None
    """None: there may be more records."""


class RecordStream:
    """The records of one output channel, one per sample; repeated records are dropped.

    Other workers fetch the records that this worker has produced (its *own* records) by a cursor,
    the number of own records that they have.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._own: list[Record] = []
        self._own_samples: set[int] = set()
        self._own_end: StreamEnd | None = None
        """None: this worker has not produced all its records."""
        self._callbacks: list[Callable[[], None]] = []
        """Called once there are more own records."""
        self._is_closed = False
        self._is_fetched = False
        self._last_progress = time.monotonic()
        """When a reader last had more than any reader before."""
        self._most_received = (0, 0)
        """Number of records, and of bytes of the next one, that a reader has at most."""
        self.identity = secrets.token_hex(8)
        """Another stream has the records in another order."""
        self._records: dict[int, Record] = {}
        """Records by sample, in order of arrival."""
        self._rank_counts: dict[int, int] = {}
        """Number of records of each rank that has finished."""
        self._num_expected: int | None = None
        """Number of records of all ranks; None: some rank has not finished."""
        self._first_missing: dict[int, int] = {}
        """For the first sample of a range that was checked: the sample from which the next check
        continues. All earlier records of the range are present."""
        self.fetched_from: dict[tuple[str, str], FetchProgress] = defaultdict(FetchProgress)
        """Progress by worker and channel in that worker."""
        self._unread: set[int] = set()
        """Samples from other workers that no stage of this worker has read."""

    def put(self, record: Record) -> None:
        """Add a record that this worker has produced, unless it has produced the sample before."""
        sample = record.identity.sample
        with self._changed:
            if sample in self._own_samples:
                return
            self._own_samples.add(sample)
            self._own.append(record)
            self._records.setdefault(sample, record)
            self._changed.notify_all()
            has_callbacks = bool(self._callbacks)
        if has_callbacks:
            self._run_callbacks()

    def finish(self, end: StreamEnd) -> None:
        """Record that this worker, one rank of the stage, has produced all its records."""
        self.finish_rank(*end)
        with self._changed:
            self._own_end = end
        self._run_callbacks()

    def read_own(
        self,
        cursor: int,
        max_records: int,
        received: tuple[int, int],
        on_available: Callable[[], None],
    ) -> OwnRecords | None:
        """Return own records from ``cursor`` on, at most ``max_records``.

        Args:
            received: the number of records, and of bytes of the next one, that the reader has. Only
                a reader that has all records gets the end; to others, no records are returned.
            on_available: if None is returned because there are no new records yet, this function is
                called once, from any thread, when there are some.
        """
        with self._changed:
            if received > self._most_received:
                self._most_received, self._last_progress = received, time.monotonic()
            if self._is_closed:
                return OwnRecords([], is_end=True)
            if cursor < len(self._own):
                return OwnRecords(self._own[cursor : cursor + max_records])
            if self._own_end is None:
                self._callbacks.append(on_available)
                return None
            if received[0] < len(self._own):
                return OwnRecords([])
            self._is_fetched = True
            self._changed.notify_all()
            return OwnRecords([], is_end=True, end=self._own_end)

    def wait_until_fetched(self, should_stop: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until some worker has all own records, after :meth:`finish`.

        Returns False if ``should_stop`` returns True, or if no worker gets any further record for
        ``timeout_s``.
        """
        start = time.monotonic()
        with self._changed:
            while not self._is_fetched:
                if should_stop() or time.monotonic() - max(start, self._last_progress) > timeout_s:
                    return False
                self._changed.wait(POLL_S)
        return True

    def close(self) -> None:
        """Let no further records be fetched, because the output is on disk or invalid."""
        with self._changed:
            self._is_closed = True
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        with self._changed:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def finish_rank(self, num_records: int, rank: int = 0, num_ranks: int = 1) -> None:
        """Record that a rank has produced all its records. A sample may have no record.

        Args:
            num_records: number of records that the rank produced; some may not have arrived.
        """
        with self._changed:
            self._rank_counts[rank] = num_records
            counts = self._rank_counts.values()
            self._num_expected = sum(counts) if len(counts) >= num_ranks else None
            self._changed.notify_all()

    def is_complete(self, samples: range) -> bool:
        """Return whether all expected records of a range of samples are present."""
        if self._num_expected is not None and len(self._records) >= self._num_expected:
            return True
        sample = self._first_missing.get(samples.start, samples.start)
        while sample < samples.stop and sample in self._records:
            sample += 1
        self._first_missing[samples.start] = sample
        return sample >= samples.stop

    def put_remote(self, *records: Record) -> None:
        """Add records of another worker; a record counts as unread until a stage reads it."""
        with self._changed:
            for record in records:
                if record.identity.sample not in self._records:
                    self._records[record.identity.sample] = record
                    self._unread.add(record.identity.sample)
            self._changed.notify_all()

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def has_more_than(self, count: int) -> bool:
        return len(self._records) > count

    def records_after(self, count: int) -> list[Record]:
        """Return the records that came after the first ``count``, in order of arrival."""
        return list(islice(self._records.values(), count, None))

    def read(self, samples: range) -> list[Record]:
        """Return the records of a range, by sample number, and mark them as read."""
        self.mark_read(samples)
        return [self._records[sample] for sample in samples if sample in self._records]

    def mark_read(self, samples: Iterable[int]) -> None:
        """Mark samples as read by a stage of this worker."""
        self._unread.difference_update(samples)

    def __len__(self) -> int:
        return len(self._records)


class LiveOutput:
    """The live output of one stage instance. A new attempt adds to the records of a failed one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._streams: dict[str, RecordStream] = {}
        self.objects: dict[str, Any] = {}
        """Objects other than records by name, such as the weights."""
        self._attempt: str | None = None
        """Data folder's name of the attempt that completed the output; None: it is incomplete."""
        self._failure: str | None = None
        """Why the stage failed; None: it did not fail."""
        self._source_attempts: set[str] = set()
        """Attempts of another stage, not yet committed when records were computed from them."""
        self.invalidated = False
        """Whether readers must fail; the store then replaces this output by a new one."""

    def stream(self, channel: str) -> RecordStream:
        """Return the stream of a channel; created on first use."""
        with self._changed:
            return self._streams.setdefault(channel, RecordStream(self._changed))

    @property
    def num_unread(self) -> int:
        with self._changed:
            return sum(stream.num_unread for stream in self._streams.values())

    def mark_complete(self, attempt: str) -> None:
        """Mark the output as complete; ``attempt`` names the folder of its commit."""
        with self._changed:
            self._attempt = attempt
            self._changed.notify_all()

    def put_object(self, attempt: str, name: str, value: Any) -> None:
        """Add an object that an attempt in another worker produced; mark the output as complete."""
        with self._changed:
            self.objects[name] = value
            self.mark_complete(attempt)

    def get_object(self, name: str, attempt: str) -> Any:
        """Return an object of exactly this attempt; None if it is absent."""
        with self._changed:
            is_present = self._attempt == attempt and self._failure is None
            return self.objects.get(name) if is_present else None

    def add_source_attempt(self, attempt: str) -> None:
        """Register an attempt that was uncommitted when a record was computed from it."""
        with self._changed:
            self._source_attempts.add(attempt)

    def fail(self, reason: str) -> None:
        """Fail the output; every waiting reader raises."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def raise_if_failed(self) -> None:
        """Raise UpstreamFailed if the stage has failed."""
        if self._failure is not None:
            raise UpstreamFailed(self._failure)

    def reset(self) -> None:
        """Clear the failure and the attempt, because a new attempt begins."""
        with self._changed:
            self._failure = self._attempt = None

    def wait_for_attempt(
        self, should_stop: Callable[[], bool], is_committed: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Wait until the output is complete and return its attempt; None: read it from disk.

        Args:
            is_committed: returns whether the output is on disk; called every ``POLL_S`` s,
                because records in memory can be lost with the worker that produced them.

        Raises:
            UpstreamFailed: the output failed.
            RequeueRequested: the process must stop.
        """
        is_live = self._wait(lambda: self._attempt is not None, should_stop, is_committed)
        return self._attempt if is_live else None

    def wait_for_records(
        self,
        channel: str,
        samples: range,
        should_stop: Callable[[], bool],
        is_committed: Callable[[], bool] = lambda: False,
    ) -> list[Record] | None:
        """Wait for a range of samples and return its records; None: read them from disk.

        Args, Raises: as :meth:`wait_for_attempt`.
        """
        stream = self.stream(channel)
        is_live = self._wait(lambda: stream.is_complete(samples), should_stop, is_committed)
        return stream.read(samples) if is_live else None

    def available_records(self, channel: str) -> list[Record]:
        """Return the records of a channel that have arrived, in order of arrival."""
        stream = self.stream(channel)
        with self._changed:
            return stream.records_after(0)

    def iter_records(
        self,
        channel: str,
        count: int,
        should_stop: Callable[[], bool],
        source_attempt: str | None = None,
    ) -> Iterator[Record]:
        """Yield ``count`` records of a channel as they arrive.

        Args:
            source_attempt: the committed attempt from which the records must have been computed;
                None: any.

        Raises:
            UpstreamFailed: as for :meth:`wait_for_attempt`; or a record was computed from another
                attempt, which invalidates the output.
            RequeueRequested: as for :meth:`wait_for_attempt`.
        """
        stream, num_yielded = self.stream(channel), 0
        while num_yielded < count:
            self._wait(partial(stream.has_more_than, num_yielded), should_stop)
            with self._changed:
                if source_attempt is not None and self._source_attempts - {source_attempt}:
                    self.invalidated = True
                    raise UpstreamFailed(
                        f"{channel} were computed from an attempt that was never committed"
                    )
                new = stream.records_after(num_yielded)
                stream.mark_read(record.identity.sample for record in new)
            num_yielded += len(new)
            yield from new

    def drop_stream(self, channel: str) -> None:
        """Close the stream of a channel and forget its records."""
        with self._changed:
            stream = self._streams.pop(channel, None)
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """Close all streams."""
        with self._changed:
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()

    def has_stream(self, channel: str) -> bool:
        return channel in self._streams

    def matches_commit(self, channel: str, manifest: Manifest) -> bool:
        """Return whether the live content equals the committed content."""
        if channel in self._streams:
            records = self.available_records(channel)
            return manifest.extra.get(STREAM_DIGESTS, {}).get(channel) == digest_records(records)
        return manifest.data == self._attempt  # an attempt is named after its data folder

    def compare_with_commit(self, channel: str, committed: Iterable[Record]) -> None:
        """Check that every live record of a channel equals a committed record.

        Raises:
            UpstreamFailed: a live record differs from the committed record.
        """
        digests = {record.identity.sample: record.digest() for record in committed}
        for record in self.available_records(channel):
            if record.digest() != digests.get(record.identity.sample):
                raise UpstreamFailed(
                    f"{channel}: sample {record.identity.sample} was committed by another attempt, "
                    "with other content"
                )

    def _wait(
        self,
        is_available: Callable[[], bool],
        should_stop: Callable[[], bool],
        is_committed: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait; return True if the data is available in memory, False if it is committed."""
        deadline = time.monotonic() + POLL_S
        while True:
            with self._changed:
                while not is_available():
                    self.raise_if_failed()
                    if should_stop():
                        raise RequeueRequested("stopping while waiting for an input")
                    remaining_s = deadline - time.monotonic()
                    if remaining_s <= 0:
                        break
                    self._changed.wait(remaining_s)
                else:
                    return True
            # Check without the lock, so that records can arrive if the filesystem is slow.
            if is_committed():
                return False
            deadline = time.monotonic() + POLL_S


class LiveStore:
    """The live outputs of this process, by output folder relative to the run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: dict[str, LiveOutput] = {}
        self._pinned: dict[str, frozenset[str]] = {}
        """The output folders that a running stage writes or reads in memory, by node."""

    def output(self, folder: str) -> LiveOutput:
        """Return the live output of a stage instance; created on first use."""
        with self._lock:
            output = self._outputs.get(folder)
            if output is not None and not output.invalidated:
                return output
            new_output = self._outputs[folder] = LiveOutput()
        if output is not None:
            output.close()
        return new_output

    def pin(self, node: str, folders: Iterable[str]) -> None:
        """Pin the outputs that a running stage (``node``: ``rollout/3``) writes or reads."""
        with self._lock:
            self._pinned[node] = frozenset(folders)

    def unpin(self, node: str) -> None:
        """Unpin the outputs of a stage that has ended."""
        with self._lock:
            self._pinned.pop(node, None)

    def release_committed(self, is_committed: Callable[[str], bool]) -> set[str]:
        """Drop committed outputs that no stage has pinned; return their folders.

        Uncommitted outputs are kept, because records may arrive before the driver orders the stage
        that reads them. Weights are kept as well, because later work items use the newest versions.
        """
        with self._lock:
            unpinned = self._unpinned()
        # Check without the lock, so that records can arrive if the filesystem is slow.
        committed = {folder for folder in unpinned if is_committed(folder)}
        with self._lock:
            dropped = committed & self._unpinned()
            outputs = [self._outputs.pop(folder) for folder in dropped]
        for output in outputs:
            output.close()
        return dropped

    def _unpinned(self) -> set[str]:
        """Return the folders of outputs that have no objects and are pinned by no stage."""
        unpinned = {folder for folder, output in self._outputs.items() if not output.objects}
        return unpinned.difference(*self._pinned.values())

    @property
    def num_unread(self) -> int:
        """Number of records from other workers that no stage of this worker has read."""
        with self._lock:
            outputs = list(self._outputs.values())
        return sum(output.num_unread for output in outputs)

    def evict_objects(self, num_newest: int) -> None:
        """Drop the objects, which are large, except those of the ``num_newest`` newest outputs."""
        with self._lock:
            with_objects = [output for output in self._outputs.values() if output.objects]
        for output in with_objects[:-num_newest]:
            output.objects.clear()

    def __contains__(self, folder: object) -> bool:
        return folder in self._outputs
