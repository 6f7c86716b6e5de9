"""The segment of a channel in shared memory (:mod:`rlinf.channels.shared_memory`)."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import json
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from rlinf.alive import boot, is_alive, own_start
from rlinf.channels.base import ChannelClosed, ChannelFailed
from rlinf.errors import InputError
from rlinf.private import is_private

SHM = Path("/dev/shm")
PREFIX = "rlinf-channel-"
SLOTS = 1024
PEERS = 64
REASON_BYTES = 4096
FREE, WRITING, READY, TAKEN = range(4)
READER = 0
"""Row of the maker among the participants."""

HEAD = np.dtype(
    [
        ("bytes", "i8"),  # of the records' area
        ("order", "i8"),  # of the next record
        ("gap", "i8", 2),  # where the next record may lie
        ("reason_bytes", "i8"),
        ("reason", "u1", REASON_BYTES),
    ]
)
PEER = np.dtype([("pid", "i8"), ("started", "i8")])
COLUMNS = ("order", "start", "size", "room", "owner")
SLOT_TABLE = np.dtype([*((name, "i8", SLOTS) for name in COLUMNS), ("state", "u1", SLOTS)])
"""Column by column: whoever waits looks at all states, which together are a few cache lines."""
LOCK_TIMEOUT_S = 10.0
LOCK_YIELDS = 64
LEAST_TURNS = 1000
CHECK_S = 0.5
SHORTEST_NAP_S = 2e-5
LONGEST_NAP_S = 1e-3
SLOTS_START = HEAD.itemsize + PEERS * PEER.itemsize
DATA_START = -(-(SLOTS_START + SLOT_TABLE.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
T = TypeVar("T")


class End:
    """One process's end of a channel: the tables of its segment, and its row among participants.

    Open one in each process; a handle does not survive a fork.
    """

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
        self._state = self._slots["state"]
        if not 0 <= self._head["bytes"][0] <= len(memory) - DATA_START:
            raise InputError(f"{segment}: its head is damaged; {_REMOVE}")
        self._data = np.frombuffer(memory, np.uint8, self._head["bytes"][0], DATA_START)
        self._readable = memoryview(memory).toreadonly()
        self._next_check = 0.0
        self._left = False
        self._me = self._join()
        atexit.register(self.close)

    def close(self) -> None:
        """Leave; the last one removes the segment."""
        if self._left:
            return
        self._left = True
        atexit.unregister(self.close)
        with self._lock:
            self._undo_the_dead()
            self._peers["pid"][self._me] = self._leaving()
            if not (self._peers["pid"] > 0).any():
                self._segment.unlink(missing_ok=True)
                self._pointer.unlink(missing_ok=True)

    def _leaving(self) -> int:
        """What is to stand in the row of a participant that leaves: 0 frees it."""
        return 0

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
                    self._undo_the_dead()
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
            self._undo_the_dead()
            free = np.flatnonzero(self._peers["pid"] == 0)
            if not len(free):
                raise InputError(f"{self._pointer}: a channel has at most {PEERS} participants")
            me = int(free[0])
            self._peers[me] = (os.getpid(), own_start())
            return me

    def _undo_the_dead(self) -> None:
        """Undo what dead participants had begun. Needs the lock, as all below."""
        for peer in np.flatnonzero(self._peers["pid"]).tolist():
            if _joined(self._peers[peer]):
                continue
            owned, state = self._slots["owner"] == peer, self._state
            state[owned & (state == WRITING)] = FREE
            if peer == READER and self._peers["pid"][peer] > 0:
                self._fail(f"process {self._peers['pid'][peer]} died without leaving the channel")
            self._peers["pid"][peer] = 0

    def _fail(self, reason: str) -> None:
        if not self._head["reason_bytes"][0]:
            text = np.frombuffer(reason.encode()[:REASON_BYTES] or b"?", np.uint8)
            self._head["reason"][0, : len(text)] = text
            self._head["reason_bytes"] = len(text)


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
                        "stopped inside an operation; kill it"
                    ) from None


def sweep(older_than_s: float = 60.0) -> None:
    """Remove this user's segments on this node that no living process takes part in."""
    for segment in abandoned(older_than_s):
        with contextlib.suppress(OSError, InputError):
            remove_unused(segment)


def abandoned(older_than_s: float = 60.0) -> Iterator[Path]:
    """They: whoever made one more recently may still be about to take part."""
    for segment in SHM.glob(f"{PREFIX}{os.getuid()}-*"):
        # Gone meanwhile, or another user's by a name of ours.
        with contextlib.suppress(OSError, InputError):
            old = time.time() - segment.lstat().st_ctime >= older_than_s
            if old and remove_unused(segment, dry_run=True):
                yield segment


def remove_unused(segment: Path, *, dry_run: bool = False) -> bool:
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


def named(pointer: Path) -> Path:
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
