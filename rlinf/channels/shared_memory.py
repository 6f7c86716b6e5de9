"""Shared-memory transport: processes of one node, one copy by a writer, none by the one reader.

A channel is one segment in ``/dev/shm``: a head, a table of participants, a table of slots, and
the bytes of the records. A pointer file in the run directory names the segment. The processes
change the tables under a file lock, which the kernel frees when its holder dies. A slot is free,
being written, ready, or taken; its state is written last, so a process may die anywhere.

``multiprocessing.shared_memory`` is not used because its resource tracker (Python < 3.13) removes
the segment when any one of the processes ends; this is the same ``mmap`` of the same kind of file.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
import weakref
from pathlib import Path

import numpy as np

from rlinf.alive import boot
from rlinf.artifacts import write_atomic
from rlinf.channels.base import ChannelFailed, Sink, Source
from rlinf.channels.segment import (
    DATA_START,
    FREE,
    HEAD,
    PREFIX,
    READER,
    READY,
    SHM,
    TAKEN,
    WRITING,
    End,
    named,
    remove_unused,
    sweep,
)
from rlinf.channels.wire import ALIGN, decode, encode
from rlinf.data.record import Record
from rlinf.errors import DataError, InputError, StorageError
from rlinf.threads import Malformed

READER_TIMEOUT_S = 30.0
"""How long the one reader may make no room, alive: it is stopped, or its node does not answer."""
STORES_IN_ORDER = platform.machine() == "x86_64"
"""Whether a process that sees a slot ready sees its bytes too, without the lock's barrier."""


class SharedMemorySource(End, Source):
    """The end of the process that makes the channel and reads it; the channel ends with it.

    Arrays of a record that was taken are read-only views into the segment. Their memory is reused
    when the last view is gone and the next record was taken, so copy what must stay long.

    Args:
        folder: the run's folder for channels; made with mode 0700.
        size: bytes for records that are waiting or in use.

    Raises:
        InputError: a channel of this name is in use.
        StorageError: not so much shared memory is free.
    """

    def __init__(self, folder: Path, name: str, *, size: int = 64 << 20) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep()
        pointer = folder / f"{name}.shm.json"
        try:
            in_use = not remove_unused(named(pointer))
        except FileNotFoundError:
            in_use = False
        if in_use:
            raise InputError(f"{pointer}: this channel is in use; choose another name or end it")
        segment = SHM / f"{PREFIX}{os.getuid()}-{secrets.token_hex(8)}"
        file = os.open(segment, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Reserved now: writing to a full /dev/shm later would kill the process.
            os.posix_fallocate(file, 0, DATA_START + size)
            head = np.zeros(1, HEAD)
            head["bytes"], head["gap"] = size, (0, size)
            os.pwrite(file, head.tobytes(), 0)
            super().__init__(segment, pointer)
            write_atomic(pointer, json.dumps({"node": boot(), "segment": segment.name}))
            pointer.chmod(0o600)
        except OSError as error:
            segment.unlink(missing_ok=True)
            raise StorageError(
                f"{SHM}: no channel of {size >> 20} MiB could be made ({error}); "
                "make the channel smaller or free shared memory"
            ) from None
        finally:
            os.close(file)
        self._malformed = Malformed(f"channel {pointer.name}")
        self._in_hand: tuple[int, list[None]] | None = None

    @property
    def malformed(self) -> int:
        """Records that were dropped because they could not be read."""
        return self._malformed.count

    def get(self) -> Record:
        while True:
            self._finish_in_hand()
            slot = self._wait(self._oldest, lambda: bool((self._state == READY).any()))
            try:
                return self._view(slot)
            except (DataError, ValueError) as error:  # whatever a broken writer left
                self._malformed.drop(error)

    def close(self) -> None:
        """Leave: all that writers do fails."""
        if not self._left:
            self._finish_in_hand()
            with self._lock:
                self._fail("the only reader has left the channel")
        super().close()

    def __len__(self) -> int:
        return int((self._state == READY).sum())

    def _leaving(self) -> int:
        # A negative number: gone, but views of records are still in use.
        return -os.getpid() if (self._state == TAKEN).any() else 0

    def _oldest(self) -> int | None:
        ready = np.flatnonzero(self._state == READY)
        if not len(ready):
            return None
        slot = int(ready[self._slots["order"][ready].argmin()])
        self._state[slot] = TAKEN
        return slot

    def _view(self, slot: int) -> Record:
        """The record in a slot of ours; the slot is free once it is done with and out of sight."""
        start, size = DATA_START + int(self._slots["start"][slot]), int(self._slots["size"][slot])
        uses: list[None] = [None]
        self._in_hand = (slot, uses)
        if not DATA_START <= start < start + size <= len(self._readable):
            uses.clear()  # nobody will look at it
            raise DataError("malformed record: not in the segment")
        block = np.frombuffer(self._readable[start : start + size], np.uint8)
        weakref.finalize(block, _end_use, self._state, slot, uses).atexit = False
        return decode(block)

    def _finish_in_hand(self) -> None:
        if self._in_hand is not None:
            _end_use(self._state, *self._in_hand)
            self._in_hand = None


class SharedMemorySink(End, Sink):
    """The end of a process that writes; any number of threads.

    What it was writing when it died vanishes. One that finds no room for ``READER_TIMEOUT_S``
    gives up, without failing the channel for others.

    Raises:
        InputError: there is no such channel on this node.
    """

    def __init__(self, folder: Path, name: str) -> None:
        pointer = folder / f"{name}.shm.json"
        try:
            super().__init__(named(pointer), pointer)
        except FileNotFoundError:
            raise InputError(
                f"{pointer}: no such channel on this node; its maker has not started or has ended"
            ) from None

    def put(self, record: Record) -> None:
        """As the interface says.

        Raises:
            DataError: the record cannot be sent or is larger than the whole channel.
        """
        encoded = encode(record)
        size = encoded.size
        if size > len(self._data):
            raise DataError(
                f"record {tuple(record.identity)} takes {size} bytes, the channel "
                f"{self._pointer.name} has {len(self._data)}; make the channel larger"
            )
        deadline = time.monotonic() + READER_TIMEOUT_S

        def reserve() -> int | None:
            slot = self._reserve(size)
            if slot is None and time.monotonic() > deadline:
                raise ChannelFailed(
                    f"{self._pointer.name}: no room for {READER_TIMEOUT_S:.0f} s: its reader, "
                    f"process {self._peers['pid'][READER]}, is stopped or hangs; kill it"
                )
            return slot

        slot = self._wait(reserve)
        start = int(self._slots["start"][slot])
        try:
            encoded.write(self._data[start : start + size])
        except BaseException:
            self._state[slot] = FREE
            raise
        if STORES_IN_ORDER:
            self._state[slot] = READY
            return
        with self._lock:
            self._state[slot] = READY

    def _reserve(self, size: int) -> int | None:
        """A slot and room for a record; None when there is none now."""
        head, slots, state = self._head, self._slots, self._state
        slot = state.tobytes().find(FREE)
        if slot < 0 or not self._place(slot, -(-size // ALIGN) * ALIGN):
            return None
        order = head["order"][0] + 1
        head["order"] = order
        slots["order"][slot], slots["size"][slot], slots["owner"][slot] = order, size, self._me
        state[slot] = WRITING
        return slot

    def _place(self, slot: int, size: int) -> bool:
        """Give a free slot room for ``size`` bytes; whether there is so much.

        A slot keeps its room when it is free, so the next record lies where one was written a
        moment ago: the first free slot is almost always the same few. Rooms and the gap never
        overlap, wherever the process dies.
        """
        slots, gap = self._slots, self._head["gap"][0]
        starts, rooms = slots["start"], slots["room"]
        if rooms[slot] >= size:
            return True
        start, end = gap.tolist()
        if end - start < size:
            used = self._state != FREE
            rooms[:] = np.where(used, -(-slots["size"] // ALIGN) * ALIGN, 0)
            gaps_start = np.concatenate([[0], np.sort((starts + rooms)[used])])
            gaps_end = np.concatenate([np.sort(starts[used]), [len(self._data)]])
            enough = np.flatnonzero(gaps_end - gaps_start >= size)
            if not len(enough):
                return False
            start, end = int(gaps_start[enough[0]]), int(gaps_end[enough[0]])
            gap[1] = 0
        gap[0] = start + size
        gap[1] = end
        starts[slot] = start
        rooms[slot] = size
        return True


def _end_use(state: np.ndarray, slot: int, uses: list[None]) -> None:
    """One of two uses of a slot ended; the second to end frees it.

    Called by the garbage collector too, so it takes no lock: popping is atomic, and a slot that is
    taken is changed by its owner alone.
    """
    try:
        uses.pop()
    except IndexError:
        state[slot] = FREE
