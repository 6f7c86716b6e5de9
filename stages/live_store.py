"""Stage outputs in memory, which other stages read before they are on disk.

Every pool worker has a :class:`LiveStore` with one :class:`LiveOutput` per stage instance that runs
on it or that sends records to it. A stream keeps all records of its iteration, because several
stages read them and a stage may read them again. It is dropped when it is committed and no stage
of this worker will read it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from rlinf.artifacts import Manifest
from rlinf.data.record import Record, digest_records
from rlinf.errors import RequeueRequested, UpstreamFailed

STREAM_DIGESTS = "streams"
"""Key of a manifest's ``extra``: the digest of each channel's records."""
POLL_S = 0.5
"""Seconds between the checks of a waiting stage whether it should stop."""


def evict_oldest(entries: dict[Any, Any], max_entries: int) -> None:
    """Drop the oldest entries of a mapping until it has at most ``max_entries``."""
    while len(entries) > max_entries:
        entries.pop(next(iter(entries)), None)


class RecordStream:
    """The records of one output channel, one per sample; repeated records are dropped."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._records: dict[int, Record] = {}
        self._ends: dict[int, int] = {}
        """By rank that has finished: how many records it produced."""
        self._due: int | None = None
        """The final number of records; None: some rank has not finished."""
        self._reached: dict[int, int] = {}
        """By start of a range: its first sample that may still be missing."""
        self._untaken: set[int] = set()

    def put(self, record: Record) -> None:
        """Add a record, unless its sample is already present."""
        with self._changed:
            if record.identity.sample not in self._records:
                self._records[record.identity.sample] = record
                self._changed.notify_all()

    def finish_rank(self, num_records: int, rank: int = 0, num_ranks: int = 1) -> None:
        """Record that a rank has produced all its records; some samples may have none.

        Args:
            num_records: how many the rank produced. Some may be lost or still on their way.
        """
        with self._changed:
            self._ends[rank] = num_records
            self._due = sum(self._ends.values()) if len(self._ends) >= num_ranks else None
            self._changed.notify_all()

    def is_complete(self, samples: range) -> bool:
        """Return whether every record that a range of samples will have is present."""
        if self._due is not None and len(self._records) >= self._due:
            return True
        reached = self._reached.get(samples.start, samples.start)
        while reached < samples.stop and reached in self._records:
            reached += 1
        self._reached[samples.start] = reached
        return reached >= samples.stop

    def put_remote(self, record: Record) -> None:
        """Add a record from another worker; it is unread until a stage reads it."""
        with self._changed:
            if record.identity.sample not in self._records:
                self._untaken.add(record.identity.sample)
            self.put(record)

    @property
    def num_unread(self) -> int:
        """Number of records from other workers that no stage here has read."""
        return len(self._untaken)

    def has_more_than(self, count: int) -> bool:
        """Return whether more than ``count`` records are present."""
        return len(self._records) > count

    def all_records(self) -> list[Record]:
        """Return all records in order of arrival."""
        return list(self._records.values())

    def read(self, samples: range) -> list[Record]:
        """Return the records of a range, by sample number, and mark them as read."""
        self.mark_read(samples)
        return [self._records[sample] for sample in samples if sample in self._records]

    def mark_read(self, samples: Iterable[int]) -> None:
        """Mark samples as read by a stage of this worker."""
        self._untaken.difference_update(samples)

    def __len__(self) -> int:
        return len(self._records)


class LiveOutput:
    """The live output of one stage instance. The next attempt adds to that of a failed one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._streams: dict[str, RecordStream] = {}
        self.objects: dict[str, Any] = {}
        """Objects other than records by name, such as the weights."""
        self._attempt: str | None = None
        self._failure: str | None = None
        self._source_attempts: set[str] = set()
        self.invalidated = False
        """Whether readers must give up; the store then replaces this output by a new one."""

    def stream(self, channel: str) -> RecordStream:
        """Return the stream of a channel; created on first use."""
        with self._changed:
            return self._streams.setdefault(channel, RecordStream(self._changed))

    @property
    def num_unread(self) -> int:
        """Number of records from other workers that no stage here has read."""
        with self._changed:
            return sum(stream.num_unread for stream in self._streams.values())

    def mark_complete(self, attempt: str) -> None:
        """Mark the output as complete; ``attempt`` names the folder of its commit."""
        with self._changed:
            self._attempt = attempt
            self._changed.notify_all()

    def put(self, attempt: str, name: str, value: Any) -> None:
        """Add an object from another worker and mark the output of its attempt as complete."""
        with self._changed:
            self.objects[name] = value
            self.mark_complete(attempt)

    def get_object(self, name: str, attempt: str) -> Any:
        """Return an object of exactly this attempt; None if it is absent."""
        with self._changed:
            there = self._attempt == attempt and self._failure is None
            return self.objects.get(name) if there else None

    def depends_on(self, attempt: str) -> None:
        """Note that a record was computed from an attempt that was not yet committed."""
        with self._changed:
            self._source_attempts.add(attempt)

    def fail(self, reason: str) -> None:
        """Fail the output; every waiting reader gives up."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def raise_if_failed(self) -> None:
        """Raise if the output has failed.

        Raises:
            UpstreamFailed: the stage has failed.
        """
        if self._failure is not None:
            raise UpstreamFailed(self._failure)

    def reset(self) -> None:
        """Clear the failure and the attempt, because a new attempt begins."""
        with self._changed:
            self._failure = self._attempt = None

    def wait_for_attempt(
        self, should_stop: Callable[[], bool], is_committed: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Wait until the output is complete; return its attempt. None: it is on disk.

        Args:
            is_committed: whether the output is on disk; called now and then while waiting, because
                records in memory can be lost with the worker that produced them.

        Raises:
            UpstreamFailed: it failed.
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
        """Wait until a range of samples is complete; return its records. None: read the disk.

        Args, Raises: as :meth:`wait_for_attempt`.
        """
        stream = self.stream(channel)
        is_live = self._wait(lambda: stream.is_complete(samples), should_stop, is_committed)
        return stream.read(samples) if is_live else None

    def available_records(self, channel: str) -> list[Record]:
        """Return all present records of a channel in order of arrival."""
        stream = self.stream(channel)
        with self._changed:
            return stream.all_records()

    def iter_records(
        self,
        channel: str,
        count: int,
        should_stop: Callable[[], bool],
        source_attempt: str | None = None,
    ) -> Iterator[Record]:
        """Yield ``count`` records of a channel as they arrive.

        Args:
            source_attempt: the committed attempt of the source that they were computed from.

        Raises:
            UpstreamFailed: as :meth:`wait_for_attempt`; or a record was computed from another
                attempt, which invalidates all of them.
            RequeueRequested: as :meth:`wait_for_attempt`.
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
                new = stream.all_records()[num_yielded:]
                stream.mark_read(record.identity.sample for record in new)
            num_yielded += len(new)
            yield from new

    def drop_stream(self, channel: str) -> None:
        """Drop the stream of a channel."""
        with self._changed:
            self._streams.pop(channel, None)

    def has_stream(self, channel: str) -> bool:
        """Return whether the output has a stream of this name."""
        return channel in self._streams

    def matches_commit(self, channel: str, manifest: Manifest) -> bool:
        """Return whether the live content equals the committed content."""
        if channel in self._streams:
            records = self.available_records(channel)
            return manifest.extra.get(STREAM_DIGESTS, {}).get(channel) == digest_records(records)
        return manifest.data == self._attempt

    def compare_with_commit(self, channel: str, committed: Iterable[Record]) -> None:
        """Check that every live record of a channel is among the committed ones.

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
            # A shared filesystem may be slow; records must be able to arrive meanwhile.
            if is_committed():
                return False
            deadline = time.monotonic() + POLL_S


class LiveStore:
    """The live outputs of this process, by output folder relative to the run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: dict[str, LiveOutput] = {}
        self._pinned: dict[str, frozenset[str]] = {}
        """By running stage: the output folders that it writes or reads in memory."""

    def output(self, folder: str) -> LiveOutput:
        """Return the live output of a stage instance; created on first use."""
        with self._lock:
            if folder not in self._outputs or self._outputs[folder].invalidated:
                self._outputs[folder] = LiveOutput()
            return self._outputs[folder]

    def pin(self, stage: str, folders: Iterable[str]) -> None:
        """Pin the outputs that a running stage writes or reads."""
        with self._lock:
            self._pinned[stage] = frozenset(folders)

    def unpin(self, stage: str) -> None:
        """Unpin the outputs of a stage that has ended."""
        with self._lock:
            self._pinned.pop(stage, None)

    def release_committed(self, is_committed: Callable[[str], bool]) -> set[str]:
        """Drop committed outputs that no stage has pinned; return their folders.

        Uncommitted outputs stay, pinned or not, because records may arrive before the order to read
        them. Weights stay as well: the newest versions serve later work items.
        """
        with self._lock:
            idle = self._idle()
        # Not under the lock: records must be able to arrive while a shared filesystem is slow.
        committed = {folder for folder in idle if is_committed(folder)}
        with self._lock:
            dropped = committed & self._idle()
            for folder in dropped:
                del self._outputs[folder]
        return dropped

    def _idle(self) -> set[str]:
        idle = {folder for folder, output in self._outputs.items() if not output.objects}
        return idle.difference(*self._pinned.values())

    @property
    def num_unread(self) -> int:
        """Number of records from other workers that no stage here has read."""
        with self._lock:
            outputs = list(self._outputs.values())
        return sum(output.num_unread for output in outputs)

    def evict_objects(self, num_newest: int) -> None:
        """Drop the objects of all but the newest outputs that have some, because they are large."""
        with self._lock:
            holders = [output for output in self._outputs.values() if output.objects]
        for output in holders[:-num_newest]:
            output.objects.clear()

    def __contains__(self, folder: object) -> bool:
        return folder in self._outputs
