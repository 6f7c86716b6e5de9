"""Shared-memory segments of this user: create, open, and clean up after killed processes.

The system does not free a segment in ``/dev/shm`` when its process group is killed, and two copies
of a 7 B model take 28 GB of the node's memory. The name of a segment identifies its process. After
the process has ended, the user's next stage, or ``rlinf clean``, removes the segment.

``multiprocessing.shared_memory`` is not used because its resource tracker (Python < 3.13) removes
the segment when any of the processes ends. This module maps the same kind of file with ``mmap``.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rlinf.errors import InputError, StorageError
from rlinf.verified_io import is_owner_only

SHM_FOLDER = Path("/dev/shm")
SEGMENT_PREFIX = "rlinf-"
SEGMENT_NAME = re.compile(SEGMENT_PREFIX + r"(\d+)-(\d+)-(\d+)-(\d+)-[0-9a-f]{8,16}(-[01])?")
"""Parts of a name: user, PID namespace, process, the process's start time, a random suffix, and (if
the segment is one of two copies of weights) the number of the copy."""


def new_segment_name() -> str:
    """Return a new name for shared memory that can be removed when this process has ended.

    The name is short, because servers create sockets in folders with such names, and paths of
    sockets are limited to 107 bytes.
    """
    owner = (os.getuid(), pid_namespace(), os.getpid(), own_start_time())
    return SEGMENT_PREFIX + "-".join(map(str, owner)) + f"-{secrets.token_hex(4)}"


def create_segment(name: str, size: int) -> mmap.mmap:
    """Create a segment, which is removed when Python ends.

    Raises:
        StorageError: the node does not have enough free shared memory.
    """
    _created[name] = os.getpid()
    file = os.open(SHM_FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Reserve memory now, because writing to a full /dev/shm later would kill the process.
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    except OSError as error:
        remove_segment(name)
        raise StorageError(
            f"{SHM_FOLDER}: no segment of {size} bytes could be created ({error}); enlarge it, or "
            "free some"
        ) from None
    finally:
        os.close(file)


def attach_segment(name: str) -> mmap.mmap:
    """Map another process's segment.

    Raises:
        InputError: the name is not that of a segment, or other users can access the file.
        OSError: it does not exist.
    """
    if not SEGMENT_NAME.fullmatch(name):
        raise InputError(f"no name of shared memory: {name[:80]!r}")
    file = os.open(SHM_FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not is_owner_only(file):
            raise InputError(
                f"other users can access shared memory {name!r}; have its owner (user "
                f"{os.fstat(file).st_uid}) remove {SHM_FOLDER / name}"
            )
        return mmap.mmap(file, 0)
    finally:
        os.close(file)


def remove_segment(name: str) -> None:
    """Remove a segment of this process; open mappings stay valid. May be called twice."""
    if _created.pop(name, None) == os.getpid():  # not a segment of the parent before a fork
        (SHM_FOLDER / name).unlink(missing_ok=True)


def shared_memory_id() -> str:
    """Return an id that is equal for processes that see each other's segments."""
    return f"{boot_id()} {SHM_FOLDER.stat().st_dev}"


def orphaned_segments() -> Iterator[Path]:
    """Yield segments, and folders of engine servers, of this user whose process has ended."""
    for path in SHM_FOLDER.glob(f"{SEGMENT_PREFIX}{os.getuid()}-*"):
        match = SEGMENT_NAME.match(path.name)
        if match is None or int(match[2]) != pid_namespace():
            continue  # of another container, whose process ids are not valid here
        with contextlib.suppress(OSError):
            info = path.lstat()
            if info.st_uid == os.getuid() and not is_alive(int(match[3]), int(match[4])):
                yield path


def remove_orphaned_segments() -> None:
    for path in orphaned_segments():
        with contextlib.suppress(OSError):
            remove_orphan(path)


def remove_orphan(path: Path) -> None:
    """Remove an orphaned segment, or the folder of an engine's server."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_created: dict[str, int] = {}
"""Id of the process that created each segment: this process, or its parent before a fork."""


@atexit.register
def _remove_all() -> None:
    for name in list(_created):
        remove_segment(name)


DEAD_STATES = "ZX"
"""State letters of ended processes."""


def process_state_and_start(pid: int) -> tuple[str, int]:
    """Return the state letter and start time in ticks; ``("X", 0)`` if there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X", 0
    # The process name before these fields may contain anything, also brackets.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def is_alive(pid: int, start_time: int) -> bool:
    """Return whether the process with this id and start time runs."""
    state, start = process_state_and_start(pid)
    return state not in DEAD_STATES and start == start_time


def own_start_time() -> int:
    """Return the start time of this process in ticks."""
    return process_state_and_start(os.getpid())[1]


@cache
def boot_id() -> str:
    """Return the id of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


@cache
def pid_namespace() -> int:
    """Return the id of the PID namespace of this process."""
    return Path("/proc/self/ns/pid").stat().st_ino
