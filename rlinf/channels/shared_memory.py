"""Shared-memory transport: processes of one node, one copy by the writer, none by the reader.

A channel is one segment in ``/dev/shm``: a head, a table of participants, a table of slots, and
the bytes of the records. A pointer file in the run directory names the segment. There is no server:
the processes change the tables under a file lock, which the kernel frees when its holder dies. A
slot is free, being written, ready, or taken; its state is written last, so a process may die
anywhere.

``multiprocessing.shared_memory`` is not used because its resource tracker (Python < 3.13) removes
the segment when any one of the processes ends; this is the same ``mmap`` of the same kind of file.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import json
import mmap
import os
import platform
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from rlinf.alive import DEAD, boot, is_alive, own_start, process
from rlinf.artifacts import write_atomic
from rlinf.channels.base import DEFAULT_KEY, Channel, ChannelClosed, ChannelFailed
from rlinf.channels.queue import Batch, Seen
from rlinf.channels.wire import ALIGN, decode, encode
from rlinf.data.record import Record
from rlinf.errors import DataError, InputError, StorageError
from rlinf.private import is_private
from rlinf.threads import Malformed

SHM = Path("/dev/shm")
PREFIX = "rlinf-channel-"
SLOTS = 1024
PEERS = 64
REASON_BYTES = 4096
FREE, WRITING, READY, TAKEN = range(4)
HOST = 0
"""Row of the maker among the participants."""
HOST_TIMEOUT_S = 30.0
"""How long the one reader may make no room, alive: it is stopped, or its node does not answer."""

HEAD = np.dtype(
    [
        ("bytes", "i8"),  # of the records' area
        ("capacity", "i8"),
        ("unique", "i8"),
        ("fail_on_death", "i8"),
        ("hosted", "i8"),
        ("closed", "i8"),
        ("order", "i8"),  # of the next record
        ("gap", "i8", 2),  # where the next record may lie
        ("reason_bytes", "i8"),
        ("reason", "u1", REASON_BYTES),
    ]
)
PEER = np.dtype([("pid", "i8"), ("started", "i8")])
COLUMNS = ("key", "order", "weight", "start", "size", "room", "owner", "done")
SLOT_TABLE = np.dtype([*((name, "i8", SLOTS) for name in COLUMNS), ("state", "u1", SLOTS)])
"""Column by column: whoever waits looks at all states, which together are a few cache lines."""
LOCK_TIMEOUT_S = 10.0
LOCK_YIELDS = 64
LEAST_TURNS = 1000
STORES_IN_ORDER = platform.machine() == "x86_64"
"""Whether a process that sees a slot ready sees its bytes too, without the lock's barrier."""
CHECK_S = 0.5
SHORTEST_NAP_S = 2e-5
LONGEST_NAP_S = 1e-3
SLOTS_START = HEAD.itemsize + PEERS * PEER.itemsize
SEEN_START = SLOTS_START + SLOT_TABLE.itemsize
DATA_START = -(-(SEEN_START + Seen.ROWS * 16) // mmap.PAGESIZE) * mmap.PAGESIZE
T = TypeVar("T")


class SharedMemoryChannel(Channel):
    """One process's end of a channel between processes of one node; any number of threads.

    Arrays of a record that was taken are read-only views into the segment. Their memory is reused
    when the last view is gone and the next record was taken, so copy what must stay long. What a
    process took since its last ``get`` goes back to its place when the process dies; what it was
    writing vanishes. Open one in each process; a handle does not survive a fork.
    """

    @classmethod
    def create(
        cls,
        folder: Path,
        name: str,
        *,
        size: int = 64 << 20,
        capacity: int = 0,
        unique: bool = False,
        fail_on_death: bool = False,
        hosted: bool = False,
    ) -> SharedMemoryChannel:
        """Make the channel ``name`` in a run's ``folder`` and take part in it.

        Args:
            folder: the run's folder for channels; made with mode 0700.
            size: bytes for records that are waiting or in use.
            capacity: most records a key may hold before ``put`` blocks; 0 is unbounded.
            unique: drop a record whose (iteration, sample) was already accepted.
            fail_on_death: fail for everybody when a participant dies, instead of waiting for
                another to do its work.
            hosted: the maker alone reads, and the channel ends with it: when it dies or leaves,
                all that writers do fails. A writer that finds no room for ``HOST_TIMEOUT_S`` gives
                up, without failing the channel for others.

        Raises:
            InputError: a channel of this name is in use.
            StorageError: not so much shared memory is free.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep()
        pointer = folder / f"{name}.shm.json"
        try:
            in_use = not _remove_unused(_segment(pointer))
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
            head["bytes"], head["capacity"], head["unique"] = size, capacity, unique
            head["fail_on_death"], head["hosted"], head["gap"] = fail_on_death, hosted, (0, size)
            os.pwrite(file, head.tobytes(), 0)
            channel = cls(segment, pointer)
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
        return channel

    @classmethod
    def open(cls, folder: Path, name: str) -> SharedMemoryChannel:
        """Take part in the channel that another process of this node made.

        Raises:
            InputError: there is no such channel on this node.
        """
        pointer = folder / f"{name}.shm.json"
        try:
            return cls(_segment(pointer), pointer)
        except FileNotFoundError:
            raise InputError(
                f"{pointer}: no such channel on this node; its maker has not started or has ended"
            ) from None

    def __init__(self, segment: Path, pointer: Path) -> None:
        self._segment, self._pointer = segment, pointer
        self._file = os.open(segment, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        weakref.finalize(self, os.close, self._file).atexit = False
        _check_owner(self._file, segment)
        if os.fstat(self._file).st_size < DATA_START:
            raise InputError(f"{segment}: not a segment of a channel; {_REMOVE}")
        memory = mmap.mmap(self._file, 0, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._lock = _Lock(self._file)
        self._head = np.frombuffer(memory, HEAD, 1)
        self._peers = np.frombuffer(memory, PEER, PEERS, HEAD.itemsize)
        table = np.frombuffer(memory, SLOT_TABLE, 1, SLOTS_START)[0]
        self._slots = {name: table[name] for name in SLOT_TABLE.names or ()}
        self._key, self._state = self._slots["key"], self._slots["state"]
        if not 0 <= self._head["bytes"][0] <= len(memory) - DATA_START:
            raise InputError(f"{segment}: its head is damaged; {_REMOVE}")
        self._data = np.frombuffer(memory, np.uint8, self._head["bytes"][0], DATA_START)
        self._readable = memoryview(memory).toreadonly()
        rows = np.frombuffer(memory, np.int64, Seen.ROWS * 2, SEEN_START).reshape(-1, 2)
        self._seen = Seen(rows) if self._head["unique"][0] else None
        self._malformed = Malformed(f"channel {pointer.name}")
        self._in_hand: deque[tuple[int, list[None]]] = deque()
        self._next_check = 0.0
        self._left = False
        self._me = self._join()
        atexit.register(self.leave)

    @property
    def malformed(self) -> int:
        """Records that were dropped because they could not be read."""
        return self._malformed.count

    def put(self, record: Record, weight: int = 1, *, key: str = DEFAULT_KEY) -> None:
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
        name = _digest(key)
        deadline = time.monotonic() + HOST_TIMEOUT_S

        def reserve() -> int | None:
            slot = self._reserve(name, weight, size)
            if slot is None and self._head["hosted"][0] and time.monotonic() > deadline:
                raise ChannelFailed(
                    f"{self._pointer.name}: no room for {HOST_TIMEOUT_S:.0f} s: its one reader is "
                    "stopped or hangs; kill it (see peers())"
                )
            return slot

        slot = self._wait(reserve)
        start = int(self._slots["start"][slot])
        try:
            encoded.write(self._data[start : start + size])
        except BaseException:
            self._state[slot] = FREE
            raise
        if self._seen is None and STORES_IN_ORDER:
            self._state[slot] = READY
            return
        with self._lock:
            new = self._seen is None or self._seen.add(record.identity)
            self._state[slot] = READY if new else FREE

    def get(self, *, key: str = DEFAULT_KEY) -> Record:
        return self._take(0, key)[0]

    def get_batch(self, target_weight: int, *, key: str = DEFAULT_KEY) -> list[Record]:
        return self._take(target_weight, key)

    def close(self) -> None:
        with self._lock:
            self._head["closed"] = 1

    def fail(self, reason: str) -> None:
        with self._lock:
            self._fail(reason)

    def leave(self) -> None:
        """As the interface says; the last one removes the segment."""
        if self._left:
            return
        self._left = True
        atexit.unregister(self.leave)
        self._finish_in_hand()
        with self._lock:
            self._bury()
            if self._head["hosted"][0] and self._me == HOST:
                self._fail("the only reader has left the channel")
            held = (self._state == TAKEN) & (self._slots["owner"] == self._me)
            # A negative number: gone, but views of records are still in use.
            self._peers["pid"][self._me] = -os.getpid() if held.any() else 0
            if not (self._peers["pid"] > 0).any():
                self._segment.unlink(missing_ok=True)
                self._pointer.unlink(missing_ok=True)

    def peers(self) -> dict[int, str]:
        """State letter of every living participant by process id, as in proc(5); ``T`` is stopped.

        Nothing is taken from a participant that is stopped: it would write and read where others
        do when it goes on. Kill it to have its work redone.
        """
        pids = [int(peer["pid"]) for peer in self._peers]
        states = {pid: process(pid)[0] for pid in pids if pid > 0}
        return {pid: state for pid, state in states.items() if state not in DEAD}

    def __len__(self) -> int:
        return int((self._state == READY).sum())

    def _take(self, target: int, key: str) -> list[Record]:
        name = _digest(key)
        while True:
            self._finish_in_hand()
            batch = Batch(target)
            self._wait(partial(self._fill, batch, name), partial(self._anything, name))
            records = []
            for slot in batch.items:
                try:
                    records.append(self._view(slot))
                except (DataError, ValueError) as error:  # whatever a broken writer left
                    self._malformed.drop(error)
            if records:
                return records

    def _fill(self, batch: Batch, name: int) -> bool | None:
        """Take what is there; True when the batch is complete. Needs the lock, as all below."""
        slots = self._slots
        mine = self._key == name
        ready = np.flatnonzero(mine & (self._state == READY))
        for slot in ready[slots["order"][ready].argsort()].tolist():
            weight = int(slots["weight"][slot])
            if not batch.takes(weight):
                return True
            slots["owner"][slot], slots["done"][slot] = self._me, 0
            self._state[slot] = TAKEN
            batch.add(slot, weight)
            if batch.full:
                return True
        if self._head["closed"][0] and not (mine & (self._state == WRITING)).any():
            if not batch.items:
                raise ChannelClosed("channel is closed and empty")
            return True
        return None

    def _anything(self, name: int) -> bool:
        """Whether it is worth taking the lock: something is ready, or the channel ended."""
        ready = (self._key == name) & (self._state == READY)
        return bool(self._head["closed"][0]) or bool(ready.any())

    def _reserve(self, name: int, weight: int, size: int) -> int | None:
        """A slot and room for a record; None when there is none now."""
        head, slots, state = self._head, self._slots, self._state
        if head["closed"][0]:
            raise ChannelClosed("put on a closed channel")
        if capacity := head["capacity"][0]:
            waiting = (self._key == name) & ((state == READY) | (state == WRITING))
            if waiting.sum() >= capacity:
                return None
        slot = state.tobytes().find(FREE)
        if slot < 0 or not self._place(slot, -(-size // ALIGN) * ALIGN):
            return None
        order = head["order"][0] + 1
        head["order"] = order
        slots["key"][slot], slots["order"][slot], slots["weight"][slot] = name, order, weight
        slots["size"][slot], slots["owner"][slot], slots["done"][slot] = size, self._me, 0
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

    def _view(self, slot: int) -> Record:
        """The record in a slot of ours; the slot is free once it is done with and out of sight."""
        start, size = DATA_START + int(self._slots["start"][slot]), int(self._slots["size"][slot])
        uses: list[None] = [None]
        self._in_hand.append((slot, uses))
        if not DATA_START <= start < start + size <= len(self._readable):
            uses.clear()  # nobody will look at it
            raise DataError("malformed record: not in the segment")
        block = np.frombuffer(self._readable[start : start + size], np.uint8)
        weakref.finalize(block, _end_use, self._state, slot, uses).atexit = False
        return decode(block)

    def _finish_in_hand(self) -> None:
        while self._in_hand:
            slot, uses = self._in_hand.popleft()
            self._slots["done"][slot] = 1
            _end_use(self._state, slot, uses)

    def _wait(
        self, attempt: Callable[[], T | None], worthwhile: Callable[[], bool] = lambda: True
    ) -> T:
        """Try under the lock until there is a result; looks after the dead meanwhile."""
        nap = SHORTEST_NAP_S
        while True:
            if self._left:
                raise ChannelClosed("this process has left the channel")
            due = time.monotonic() > self._next_check
            if not due and not worthwhile():
                time.sleep(nap)
                nap = min(nap * 1.5, LONGEST_NAP_S)
                continue
            with self._lock:
                if due:
                    # First: there may be room for much that nobody will read.
                    self._bury()
                    self._next_check = time.monotonic() + CHECK_S
                if length := int(self._head["reason_bytes"][0]):
                    raise ChannelFailed(
                        self._head["reason"][0, :length].tobytes().decode(errors="replace")
                    )
                result = attempt()
                if result is not None:
                    return result
            time.sleep(nap)
            nap = min(nap * 1.5, LONGEST_NAP_S)

    def _join(self) -> int:
        with self._lock:
            if not os.fstat(self._file).st_nlink:
                raise FileNotFoundError(self._segment)
            self._bury()
            free = np.flatnonzero(self._peers["pid"] == 0)
            if not len(free):
                raise InputError(f"{self._pointer}: a channel has at most {PEERS} participants")
            me = int(free[0])
            self._peers[me] = (os.getpid(), own_start())
            return me

    def _bury(self) -> None:
        """Undo what dead participants had begun."""
        for peer in np.flatnonzero(self._peers["pid"]).tolist():
            if _joined(self._peers[peer]):
                continue
            owned, state = self._slots["owner"] == peer, self._state
            state[owned & (state == WRITING)] = FREE
            state[owned & (state == TAKEN) & (self._slots["done"] == 1)] = FREE
            state[owned & (state == TAKEN)] = READY
            fails = self._head["fail_on_death"][0] or (peer == HOST and self._head["hosted"][0])
            if fails and self._peers["pid"][peer] > 0:
                self._fail(f"process {self._peers['pid'][peer]} died without leaving the channel")
            self._peers["pid"][peer] = 0

    def _fail(self, reason: str) -> None:
        if not self._head["reason_bytes"][0]:
            text = np.frombuffer(reason.encode()[:REASON_BYTES] or b"?", np.uint8)
            self._head["reason"][0, : len(text)] = text
            self._head["reason_bytes"] = len(text)
        self._head["closed"] = 1


class _Lock:
    """Between processes by the kernel, which frees it when the holder dies; between threads too."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._threads = threading.Lock()

    def __enter__(self) -> None:
        self._threads.acquire()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._insist()
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, *error: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._threads.release()

    def _insist(self) -> None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        for turn in itertools.count():
            # An operation takes microseconds, a nap many more.
            os.sched_yield() if turn < LOCK_YIELDS else time.sleep(SHORTEST_NAP_S)
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Turns count too: this process may itself have been stopped.
                if time.monotonic() > deadline and turn > LEAST_TURNS:
                    self._threads.release()
                    raise ChannelFailed(
                        f"the channel's lock was held for {LOCK_TIMEOUT_S:.0f} s: a participant is "
                        "stopped inside an operation; kill it (see peers())"
                    ) from None


def sweep(older_than_s: float = 60.0) -> None:
    """Remove this user's segments on this node that no living process takes part in."""
    for segment in abandoned(older_than_s):
        with contextlib.suppress(OSError, InputError):
            _remove_unused(segment)


def abandoned(older_than_s: float = 60.0) -> Iterator[Path]:
    """They: whoever made one more recently may still be about to take part."""
    for segment in SHM.glob(f"{PREFIX}{os.getuid()}-*"):
        # Gone meanwhile, or another user's by a name of ours.
        with contextlib.suppress(OSError, InputError):
            old = time.time() - segment.lstat().st_ctime >= older_than_s
            if old and _remove_unused(segment, dry_run=True):
                yield segment


def _remove_unused(segment: Path, *, dry_run: bool = False) -> bool:
    file = os.open(segment, os.O_RDWR | os.O_NOFOLLOW)
    try:
        _check_owner(file, segment)
        with _Lock(file):
            table = os.pread(file, PEERS * PEER.itemsize, HEAD.itemsize)
            peers = np.frombuffer(table[: len(table) // PEER.itemsize * PEER.itemsize], PEER)
            if any(peer["pid"] > 0 and _joined(peer) for peer in peers):
                return False
            if not dry_run:
                segment.unlink(missing_ok=True)
            return True
    finally:
        os.close(file)


_REMOVE = "end the processes that use it, remove it and start the run again"


def _check_owner(file: int, segment: Path) -> None:
    """Refuse what another user has put there, or may read or write.

    Raises:
        InputError: it is not a file of this user alone.
    """
    if not is_private(file):
        raise InputError(
            f"{segment}: not a segment of this user alone (owner {os.fstat(file).st_uid}, mode "
            "other than 0600); have its owner remove it and start the run again"
        )


def _segment(pointer: Path) -> Path:
    """The segment a pointer file names.

    Raises:
        FileNotFoundError: no pointer, or its node is another one.
        InputError: the pointer is damaged.
    """
    text = pointer.read_text(encoding="utf-8")
    try:
        values = json.loads(text)
        name, node = str(values["segment"]), values["node"]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{pointer}: damaged ({error!r}); delete it and start again") from None
    if node != boot() or not name.startswith(PREFIX) or "/" in name:
        raise FileNotFoundError(pointer)
    return SHM / name


def _joined(peer: np.void) -> bool:
    return is_alive(abs(int(peer["pid"])), int(peer["started"]))


def _digest(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode()) >> 1


def _end_use(state: np.ndarray, slot: int, uses: list[None]) -> None:
    """One of two uses of a slot ended; the second to end frees it.

    Called by the garbage collector too, so it takes no lock: popping is atomic, and a slot that is
    taken is changed by its owner alone.
    """
    try:
        uses.pop()
    except IndexError:
        state[slot] = FREE
