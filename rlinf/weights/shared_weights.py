"""Weights in shared memory between processes of one node: one writer, many readers.

Two slots alternate, so a version is written while readers use the previous one. A slot is a segment
of its own. Readers hold a shared lock on it, and the writer an exclusive one while it writes, so no
reader sees a partial version, and the kernel releases the lock of a dead process. Readers map a
slot read-only and use the tensors in place. A waiting reader verifies buckets as they arrive.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from rlinf.errors import WeightTransferError
from rlinf.verified_io import is_owner_only
from rlinf.weights.buckets import BucketLayout, bucket_checksum

_FOLDER = Path("/dev/shm")
_HEADER = struct.Struct("<8sqqqQ")
"""Magic; version (-1: none, or being written); version that is being, or was, written and how many
of its buckets are there; length of the layout's JSON, which follows."""
_VERSION, _PROGRESS = 8, 16
_MAGIC = b"rlinfwt3"
_PAGE = 4096


class SharedWeightsWriter:
    """The writing end; the memory is freed by :meth:`close`, or when the process ends.

    Args:
        name: name of the shared memory, unique on the node; readers need it.
        layout: layout of the weights; it cannot change.
        timeout_s: how long to wait for readers of the version before the last.

    Raises:
        WeightTransferError: the node has no room for two copies.
    """

    def __init__(self, name: str, layout: BucketLayout, timeout_s: float = 60) -> None:
        self._layout, self._timeout_s, self._name = layout, timeout_s, name
        self._newest = -1
        self._slots: list[SharedMemory] = []
        try:
            for slot in (0, 1):
                self._make(f"{name}-{slot}")
        except WeightTransferError:
            self.close()
            raise

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a version into the older slot; readers see it once it is complete.

        Raises:
            WeightTransferError: the version is not newer, the tensors do not match the layout, or
                readers did not release the slot.
        """
        if version <= self._newest:
            raise WeightTransferError(
                f"shared memory {self._name!r}: version {version} is not newer than {self._newest}"
            )
        for entry in self._layout.entries:
            if entry.name not in tensors or tuple(tensors[entry.name].shape) != entry.shape:
                raise WeightTransferError(
                    f"shared memory {self._name!r}: {entry.name!r} is missing or not of shape "
                    f"{entry.shape}; a state of another layout needs another writer"
                )
        slot = min(self._slots, key=_version)
        with self._alone(slot):
            buffer = _buffer(slot)
            struct.pack_into("<qqq", buffer, _VERSION, -1, version, 0)
            sums, flat = _parts(buffer, self._layout)
            for bucket in range(self._layout.num_buckets):
                part = flat[self._layout.bucket_slice(bucket)]
                self._layout.pack_bucket(bucket, tensors, part)
                sums[bucket : bucket + 1] = bucket_checksum(part)
                struct.pack_into("<qq", buffer, _PROGRESS, version, bucket + 1)
            struct.pack_into("<q", buffer, _VERSION, version)
        self._newest = version

    def close(self) -> None:
        """Free the memory; readers keep what they have mapped."""
        while self._slots:
            memory = self._slots.pop()
            memory.unlink()
            # Where a tensor still points into it, it goes with the last one.
            with suppress(BufferError):
                memory.close()

    def _make(self, name: str) -> None:
        text = self._layout.to_json().encode()
        size = _data_start(len(text), self._layout.num_buckets) + self._layout.nbytes
        with ExitStack() as undo:
            try:
                memory = SharedMemory(name, create=True, size=size)
                undo.callback(memory.unlink)
                with (_FOLDER / memory.name).open("r+b") as file:
                    # Else a full /dev/shm would show only in the middle of writing, as a SIGBUS.
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise WeightTransferError(
                    f"shared memory {self._name!r}: cannot make two slots of {size} bytes in "
                    f"{_FOLDER} ({error}); enlarge it, or send weights another way"
                ) from None
            buffer = _buffer(memory)
            _HEADER.pack_into(buffer, 0, _MAGIC, -1, -1, 0, len(text))
            buffer[_HEADER.size : _HEADER.size + len(text)] = text
            self._slots.append(memory)
            undo.pop_all()

    @contextmanager
    def _alone(self, memory: SharedMemory) -> Iterator[None]:
        lock = os.open(_FOLDER / memory.name, os.O_RDWR)
        deadline = time.monotonic() + self._timeout_s
        try:
            while not _locked(lock, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise WeightTransferError(
                        f"shared memory {self._name!r}: after {self._timeout_s:g} s a reader still "
                        f"uses version {_version(memory)}; is one stopped?"
                    )
                time.sleep(0.001)
            yield
        finally:
            os.close(lock)


@dataclass
class SharedWeightsView:
    """A version in shared memory, kept from being overwritten until released.

    ``tensors`` are in place. Do not write to them: that ends the process. The writer can publish
    one further version while this one is held, not two.
    """

    version: int
    tensors: dict[str, Tensor]
    _lock: int

    def release(self) -> None:
        """Release the slot to the writer; the tensors must not be used afterwards."""
        if self._lock >= 0:
            self.tensors = {}
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> SharedWeightsView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class SharedWeightsReader:
    """The reading end.

    Raises:
        WeightTransferError: no writer of this user has created memory of this name on this node.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._slots = [_MappedSlot(f"{name}-{slot}") for slot in (0, 1)]

    @property
    def is_closed(self) -> bool:
        """True if the writer has closed it: no version will come, and the mapped memory stays
        allocated until it is released here."""
        return not all(slot.path.exists() for slot in self._slots)

    def newest(self, after: int = -1) -> SharedWeightsView | None:
        """Return the newest version if it is newer than ``after``.

        Raises:
            WeightTransferError: a checksum differs, or the writer has ended.
        """
        for slot in self._slots:
            if slot.version() == -1:
                # A bucket may just be about to change: a damaged one is looked at again.
                slot.check()
        while (slot := max(self._slots, key=_MappedSlot.version)).version() > after:
            try:
                lock = os.open(slot.path, os.O_RDONLY)
            except FileNotFoundError:
                raise WeightTransferError(
                    f"shared memory {self._name!r}: its writer has closed it, or ended"
                ) from None
            try:
                # A slot that is locked, or has changed since, is being written anew: look again.
                if _locked(lock, fcntl.LOCK_SH) and (version := slot.version()) > after:
                    if (damaged := slot.check()) is not None:
                        raise WeightTransferError(
                            f"shared memory {self._name!r}: bucket {damaged} of version {version} "
                            "is damaged; it is not served"
                        )
                    view = SharedWeightsView(version, slot.tensors, lock)
                    lock = -1
                    return view
            finally:
                if lock >= 0:
                    os.close(lock)
            time.sleep(0.001)
        return None


class _MappedSlot:
    def __init__(self, name: str) -> None:
        # Not SharedMemory: it maps for writing, and before Python 3.13 the memory would go when
        # the first reader ends.
        self.path = _FOLDER / name
        try:
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                if not is_owner_only(file.fileno()):
                    raise WeightTransferError(
                        f"shared memory {name!r} is not this user's alone; have its owner (user "
                        f"{os.fstat(file.fileno()).st_uid}) remove {self.path}"
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise WeightTransferError(
                f"no weights in shared memory {name!r} ({error}); is their writer on this node?"
            ) from None
        if len(self._map) < _HEADER.size or self._map[:8] != _MAGIC:
            raise WeightTransferError(f"shared memory {name!r} holds no weights")
        *_, length = _HEADER.unpack_from(self._map)
        self._layout = BucketLayout.from_json(self._map[_HEADER.size : _HEADER.size + length])
        room = len(self._map) - _data_start(length, self._layout.num_buckets)
        if room < self._layout.nbytes:
            raise WeightTransferError(f"shared memory {name!r} is smaller than its layout")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._sums, self._flat = _parts(self._map, self._layout)
        self.tensors = self._layout.tensor_views(self._flat)
        self._checked_version, self._checked_buckets = -1, 0

    def version(self) -> int:
        return _number(self._map, _VERSION)

    def check(self) -> int | None:
        """Check the buckets that came since the last look; the first damaged one."""
        version, ready = struct.unpack_from("<qq", self._map, _PROGRESS)
        if version != self._checked_version:
            self._checked_version, self._checked_buckets = version, 0
        for bucket in range(self._checked_buckets, ready):
            if bucket_checksum(self._flat[self._layout.bucket_slice(bucket)]) != self._sums[bucket]:
                return bucket
            self._checked_buckets = bucket + 1
        return None


def _version(memory: SharedMemory) -> int:
    return _number(_buffer(memory), _VERSION)


def _buffer(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None, "closed"
    return memory.buf


def _number(buffer: memoryview | mmap.mmap, offset: int) -> int:
    return int(struct.unpack_from("<q", buffer, offset)[0])


def _data_start(text: int, buckets: int) -> int:
    """Return the offset of the flat state, at a page after header, text and checksums."""
    return math.ceil((_HEADER.size + text + 7 + 8 * buckets) / _PAGE) * _PAGE


def _parts(buffer: memoryview | mmap.mmap, layout: BucketLayout) -> tuple[Tensor, Tensor]:
    """Return checksums, int64 ``[buckets]``, and flat state, uint8 ``[nbytes]``, in place."""
    *_, length = _HEADER.unpack_from(buffer)
    start = _data_start(length, layout.num_buckets)
    buffer_bytes = torch.frombuffer(buffer, dtype=torch.uint8)
    sums = buffer_bytes[start - 8 * layout.num_buckets : start].view(torch.int64)
    return sums, buffer_bytes[start : start + layout.nbytes]


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
