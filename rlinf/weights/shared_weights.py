"""Weights in shared memory of one node, with one writer and many readers.

The writer alternates between two slots, so that it writes a version while readers use the previous
version. Each slot is a separate shared-memory segment. A reader has a shared lock on the slot that
it uses, and the writer has an exclusive lock while it writes, so no reader sees a partial version.
The kernel releases the lock of a dead process. Readers map a slot read-only and use its tensors in
place. A waiting reader verifies buckets as they arrive.
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
"""Magic; complete version (-1: none); version of the last write, and number of its buckets that are
written; length of the layout's JSON, which follows."""
_VERSION_OFFSET, _PROGRESS_OFFSET = 8, 16
"""Offsets in the header: of the complete version, and of the last write."""
_MAGIC = b"rlinfwt3"
_PAGE = 4096


class SharedWeightsWriter:
    """The writing end; the memory is freed by :meth:`close`, or when the process ends.

    Args:
        name: name of the shared memory, unique on the node; readers need it.
        layout: layout of all versions of the weights.
        timeout_s: maximum wait until readers release the slot that is written next.

    Raises:
        WeightTransferError: the node has not enough shared memory for two copies.
    """

    def __init__(self, name: str, layout: BucketLayout, timeout_s: float = 60) -> None:
        self._layout, self._timeout_s, self._name = layout, timeout_s, name
        self._newest = -1
        self._slots: list[SharedMemory] = []
        try:
            for slot in (0, 1):
                self._create_slot(f"{name}-{slot}")
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
        slot = min(self._slots, key=_read_version)
        with self._exclusive_lock(slot):
            buffer = _buffer(slot)
            struct.pack_into("<qqq", buffer, _VERSION_OFFSET, -1, version, 0)
            checksums, flat_buffer = _slot_views(buffer, self._layout)
            for bucket in range(self._layout.num_buckets):
                data = flat_buffer[self._layout.bucket_slice(bucket)]
                self._layout.pack_bucket(bucket, tensors, data)
                checksums[bucket : bucket + 1] = bucket_checksum(data)
                struct.pack_into("<qq", buffer, _PROGRESS_OFFSET, version, bucket + 1)
            struct.pack_into("<q", buffer, _VERSION_OFFSET, version)
        self._newest = version

    def close(self) -> None:
        """Free the memory; readers keep what they have mapped."""
        while self._slots:
            memory = self._slots.pop()
            memory.unlink()
            # If tensors still use the memory, it is freed with the last tensor.
            with suppress(BufferError):
                memory.close()

    def _create_slot(self, name: str) -> None:
        layout_json = self._layout.to_json().encode()
        size = _data_start(len(layout_json), self._layout.num_buckets) + self._layout.nbytes
        with ExitStack() as undo:
            try:
                memory = SharedMemory(name, create=True, size=size)
                undo.callback(memory.unlink)
                with (_FOLDER / memory.name).open("r+b") as file:
                    # Without this, a full /dev/shm would cause a SIGBUS during a write.
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise WeightTransferError(
                    f"shared memory {self._name!r}: cannot make two slots of {size} bytes in "
                    f"{_FOLDER} ({error}); enlarge it, or send weights another way"
                ) from None
            buffer = _buffer(memory)
            _HEADER.pack_into(buffer, 0, _MAGIC, -1, -1, 0, len(layout_json))
            buffer[_HEADER.size : _HEADER.size + len(layout_json)] = layout_json
            self._slots.append(memory)
            undo.pop_all()

    @contextmanager
    def _exclusive_lock(self, memory: SharedMemory) -> Iterator[None]:
        lock = os.open(_FOLDER / memory.name, os.O_RDWR)
        deadline = time.monotonic() + self._timeout_s
        try:
            while not _try_lock(lock, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise WeightTransferError(
                        f"shared memory {self._name!r}: after {self._timeout_s:g} s a reader still "
                        f"uses version {_read_version(memory)}; is one stopped?"
                    )
                time.sleep(0.001)
            yield
        finally:
            os.close(lock)


@dataclass
class SharedWeightsView:
    """A version in shared memory that is not overwritten before :meth:`release`.

    ``tensors`` are views of the read-only memory; writing to them ends the process. Until the
    release, the writer can publish only one further version.
    """

    version: int
    tensors: dict[str, Tensor]
    _lock: int
    """File descriptor of the lock; -1 after the release."""

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
        """True if the writer has closed the memory.

        No further version will appear, and this reader keeps the mapped memory allocated.
        """
        return not all(slot.path.exists() for slot in self._slots)

    def newest(self, after: int = -1) -> SharedWeightsView | None:
        """Return the newest version if it is newer than ``after``, else None.

        Raises:
            WeightTransferError: a checksum differs, or the writer has ended.
        """
        for slot in self._slots:
            if slot.version() == -1:
                # Verify in advance. A damaged bucket may be changing now; it is verified again.
                slot.find_damaged_bucket()
        while (slot := max(self._slots, key=_MappedSlot.version)).version() > after:
            try:
                lock = os.open(slot.path, os.O_RDONLY)
            except FileNotFoundError:
                raise WeightTransferError(
                    f"shared memory {self._name!r}: its writer has closed it, or ended"
                ) from None
            try:
                # If the slot is locked or has changed, it is being written: try again.
                if _try_lock(lock, fcntl.LOCK_SH) and (version := slot.version()) > after:
                    if (bucket := slot.find_damaged_bucket()) is not None:
                        raise WeightTransferError(
                            f"shared memory {self._name!r}: bucket {bucket} of version {version} "
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
    """A slot that a reader has mapped."""

    def __init__(self, name: str) -> None:
        # Not SharedMemory: it maps memory writable, and before Python 3.13 the end of the first
        # reader would remove the memory.
        self.path = _FOLDER / name
        try:
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                if not is_owner_only(file.fileno()):
                    raise WeightTransferError(
                        f"shared memory {name!r} is not this user's alone; have its owner (user "
                        f"{os.fstat(file.fileno()).st_uid}) remove {self.path}"
                    )
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise WeightTransferError(
                f"no weights in shared memory {name!r} ({error}); is their writer on this node?"
            ) from None
        if len(self._mapping) < _HEADER.size or self._mapping[:8] != _MAGIC:
            raise WeightTransferError(f"shared memory {name!r} holds no weights")
        *_, length = _HEADER.unpack_from(self._mapping)
        self._layout = BucketLayout.from_json(self._mapping[_HEADER.size : _HEADER.size + length])
        available_bytes = len(self._mapping) - _data_start(length, self._layout.num_buckets)
        if available_bytes < self._layout.nbytes:
            raise WeightTransferError(f"shared memory {name!r} is smaller than its layout")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._checksums, self._flat_buffer = _slot_views(self._mapping, self._layout)
        self.tensors = self._layout.tensor_views(self._flat_buffer)
        self._verified_version, self._verified_buckets = -1, 0

    def version(self) -> int:
        return _read_int64(self._mapping, _VERSION_OFFSET)

    def find_damaged_bucket(self) -> int | None:
        """Verify the buckets that are new since the last call. Return a damaged one, or None."""
        version, num_ready = struct.unpack_from("<qq", self._mapping, _PROGRESS_OFFSET)
        if version != self._verified_version:
            self._verified_version, self._verified_buckets = version, 0
        for bucket in range(self._verified_buckets, num_ready):
            if (
                bucket_checksum(self._flat_buffer[self._layout.bucket_slice(bucket)])
                != self._checksums[bucket]
            ):
                return bucket
            self._verified_buckets = bucket + 1
        return None


def _read_version(memory: SharedMemory) -> int:
    return _read_int64(_buffer(memory), _VERSION_OFFSET)


def _buffer(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None, "closed"
    return memory.buf


def _read_int64(buffer: memoryview | mmap.mmap, offset: int) -> int:
    return int(struct.unpack_from("<q", buffer, offset)[0])


def _data_start(layout_bytes: int, num_buckets: int) -> int:
    """Return the page-aligned offset of the flat buffer after header, layout and checksums."""
    return math.ceil((_HEADER.size + layout_bytes + 7 + 8 * num_buckets) / _PAGE) * _PAGE


def _slot_views(buffer: memoryview | mmap.mmap, layout: BucketLayout) -> tuple[Tensor, Tensor]:
    """Return views of checksums, int64 ``[buckets]``, and flat buffer, uint8 ``[nbytes]``."""
    *_, length = _HEADER.unpack_from(buffer)
    start = _data_start(length, layout.num_buckets)
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    checksums = data[start - 8 * layout.num_buckets : start].view(torch.int64)
    return checksums, data[start : start + layout.nbytes]


def _try_lock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
