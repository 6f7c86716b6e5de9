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
"""In a manifest's ``extra``: the digest of each channel's records."""
POLL_S = 0.5
"""How often a waiting stage looks whether it has been asked to stop."""


def evict_oldest(entries: dict[Any, Any], max_entries: int) -> None:
    """Drop the oldest entries of what would grow for ever."""
    while len(entries) > max_entries:
        entries.pop(next(iter(entries)), None)


class RecordStream:
    """The records of one output channel: each (iteration, sample) once, whatever comes twice."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._records: dict[int, Record] = {}
        self._ends: dict[int, int] = {}
        """By rank of the stage that has ended: how many records it made."""
        self._due: int | None = None
        """How many records there are in the end; None: not all ranks have ended."""
        self._reached: dict[int, int] = {}
        """By start of a range: the first sample of it that is not known to be here."""
        self._untaken: set[int] = set()

    def put(self, record: Record) -> None:
        """Add a record; a sample that is here already is dropped."""
        with self._changed:
            if record.identity.sample not in self._records:
                self._records[record.identity.sample] = record
                self._changed.notify_all()

    def finish_rank(self, num_records: int, rank: int = 0, num_ranks: int = 1) -> None:
        """A rank of the stage has made all its records; not every sample need have one.

        Args:
            count: how many they are. Some may have been lost on their way, or still be.
        """
        with self._changed:
            self._ends[rank] = num_records
            self._due = sum(self._ends.values()) if len(self._ends) >= num_ranks else None
            self._changed.notify_all()

    def is_complete(self, samples: range) -> bool:
        """Whether all records of a range of samples are here that ever will be."""
        if self._due is not None and len(self._records) >= self._due:
            return True
        reached = self._reached.get(samples.start, samples.start)
        while reached < samples.stop and reached in self._records:
            reached += 1
        self._reached[samples.start] = reached
        return reached >= samples.stop

    def put_remote(self, record: Record) -> None:
        """Add one that another worker sent; it waits until a stage takes it."""
        with self._changed:
            if record.identity.sample not in self._records:
                self._untaken.add(record.identity.sample)
            self.put(record)

    @property
    def num_unread(self) -> int:
        """Records from other workers that no stage here has taken."""
        return len(self._untaken)

    def has_more_than(self, count: int) -> bool:
        """Whether more records are here."""
        return len(self._records) > count

    def all_records(self) -> list[Record]:
        """All records that are here, in the order they came."""
        return list(self._records.values())

    def read(self, samples: range) -> list[Record]:
        """The records of a range, by sample number."""
        self.mark_read(samples)
        return [self._records[sample] for sample in samples if sample in self._records]

    def mark_read(self, samples: Iterable[int]) -> None:
        """Some samples do not wait any more."""
        self._untaken.difference_update(samples)

    def __len__(self) -> int:
        return len(self._records)


class LiveOutput:
    """What one stage instance hands on; it survives a failed attempt, for the next adds to it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._streams: dict[str, RecordStream] = {}
        self.objects: dict[str, Any] = {}
        """Other than records: the weights, by name."""
        self._attempt: str | None = None
        self._failure: str | None = None
        self._source_attempts: set[str] = set()
        self.invalidated = False
        """Nothing of it counts: its readers give up, another one takes its place on the board."""

    def stream(self, channel: str) -> RecordStream:
        """The stream of a channel."""
        with self._changed:
            return self._streams.setdefault(channel, RecordStream(self._changed))

    @property
    def num_unread(self) -> int:
        """Records from other workers that no stage here has taken."""
        with self._changed:
            return sum(stream.num_unread for stream in self._streams.values())

    def mark_complete(self, attempt: str) -> None:
        """All is here; ``attempt`` names the folder it will be committed in."""
        with self._changed:
            self._attempt = attempt
            self._changed.notify_all()

    def put(self, attempt: str, name: str, value: Any) -> None:
        """All is here, from another worker: an object, and the attempt that it is of."""
        with self._changed:
            self.objects[name] = value
            self.mark_complete(attempt)

    def get_object(self, name: str, attempt: str) -> Any:
        """An object of just this attempt, None if it is not here."""
        with self._changed:
            there = self._attempt == attempt and self._failure is None
            return self.objects.get(name) if there else None

    def depends_on(self, attempt: str) -> None:
        """A record comes that was made of what this attempt had not committed yet."""
        with self._changed:
            self._source_attempts.add(attempt)

    def fail(self, reason: str) -> None:
        """Nothing more will come: whoever waits for it gives up."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def raise_if_failed(self) -> None:
        """
        Raises:
            UpstreamFailed: nothing more will come.
        """
        if self._failure is not None:
            raise UpstreamFailed(self._failure)

    def reset(self) -> None:
        """Another attempt has begun."""
        with self._changed:
            self._failure = self._attempt = None

    def wait_for_attempt(
        self, should_stop: Callable[[], bool], is_committed: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Waits until all is here; the folder it will be committed in. None: see it on disk.

        Args:
            is_committed: whether the output is on disk; called now and then while waiting, because
                records in memory can be lost with the worker that produced them.

        Raises:
            UpstreamFailed: it failed.
            RequeueRequested: asked to stop while waiting.
        """
        there = self._wait(lambda: self._attempt is not None, should_stop, is_committed)
        return self._attempt if there else None

    def wait_for_records(
        self,
        channel: str,
        samples: range,
        should_stop: Callable[[], bool],
        is_committed: Callable[[], bool] = lambda: False,
    ) -> list[Record] | None:
        """Waits until a range of samples is complete; None: they are to be read from disk.

        Args, Raises: as :meth:`wait_for_attempt`.
        """
        stream = self.stream(channel)
        there = self._wait(lambda: stream.is_complete(samples), should_stop, is_committed)
        return stream.read(samples) if there else None

    def available_records(self, channel: str) -> list[Record]:
        """All records of a channel that are here, in the order they came."""
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
        """``count`` records of a channel, as they come.

        Args:
            depends_on: the attempt that was committed of what they are made of.

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
                    raise UpstreamFailed(f"{channel} were made of what was never committed")
                new = stream.all_records()[num_yielded:]
                stream.mark_read(record.identity.sample for record in new)
            num_yielded += len(new)
            yield from new

    def drop_stream(self, channel: str) -> None:
        """Drop a channel that was read."""
        with self._changed:
            self._streams.pop(channel, None)

    def has_stream(self, channel: str) -> bool:
        """Whether it hands on records by this name."""
        return channel in self._streams

    def matches_commit(self, channel: str, manifest: Manifest) -> bool:
        """Whether what was handed on here is what was committed, maybe by another attempt."""
        if channel in self._streams:
            records = self.available_records(channel)
            return manifest.extra.get(STREAM_DIGESTS, {}).get(channel) == digest_records(records)
        return manifest.data == self._attempt

    def compare_with_commit(self, channel: str, committed: Iterable[Record]) -> None:
        """
        Raises:
            UpstreamFailed: a record that is here is none of those that were committed.
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
        there: Callable[[], bool],
        stopping: Callable[[], bool],
        on_disk: Callable[[], bool] = lambda: False,
    ) -> bool:
        look = time.monotonic() + POLL_S
        while True:
            with self._changed:
                while not there():
                    self.raise_if_failed()
                    if stopping():
                        raise RequeueRequested("asked to stop while waiting for an input")
                    remaining_s = look - time.monotonic()
                    if remaining_s <= 0:
                        break
                    self._changed.wait(remaining_s)
                else:
                    return True
            # A shared filesystem may be slow; records must be able to arrive meanwhile.
            if on_disk():
                return False
            look = time.monotonic() + POLL_S


class LiveStore:
    """The outputs that are in the memory of this process, by folder relative to the run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: dict[str, LiveOutput] = {}
        self._pinned: dict[str, frozenset[str]] = {}
        """By stage under way here: what it makes and takes from memory."""

    def output(self, folder: str) -> LiveOutput:
        """The output of a stage instance; made when first asked for."""
        with self._lock:
            if folder not in self._outputs or self._outputs[folder].invalidated:
                self._outputs[folder] = LiveOutput()
            return self._outputs[folder]

    def pin(self, stage: str, folders: Iterable[str]) -> None:
        """A stage makes or reads some outputs: they stay until it is through."""
        with self._lock:
            self._pinned[stage] = frozenset(folders)

    def unpin(self, stage: str) -> None:
        """A stage is through with what it held."""
        with self._lock:
            self._pinned.pop(stage, None)

    def release_committed(self, is_committed: Callable[[str], bool]) -> set[str]:
        """Let go of outputs that are committed and that nobody holds; returns their folders.

        What is not committed stays, held or not: records may come before the order to read them.
        So do weights, the last versions of which wait for the claims that will be made of them.
        """
        with self._lock:
            idle = self._idle()
        # Not under the lock: records must be able to arrive while a shared filesystem is slow.
        there = {folder for folder in idle if is_committed(folder)}
        with self._lock:
            dropped = there & self._idle()
            for folder in dropped:
                del self._outputs[folder]
        return dropped

    def _idle(self) -> set[str]:
        idle = {folder for folder, output in self._outputs.items() if not output.objects}
        return idle.difference(*self._pinned.values())

    @property
    def num_unread(self) -> int:
        """Records from other workers that no stage here has taken."""
        with self._lock:
            outputs = list(self._outputs.values())
        return sum(output.num_unread for output in outputs)

    def evict_objects(self, num_newest: int) -> None:
        """Let go of the objects of all but the newest outputs that have some: they are large."""
        with self._lock:
            holders = [output for output in self._outputs.values() if output.objects]
        for output in holders[:-num_newest]:
            output.objects.clear()

    def __contains__(self, folder: object) -> bool:
        return folder in self._outputs
