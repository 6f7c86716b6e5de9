"""Shared memory that processes of this user left behind when they were killed.

Nothing frees a segment in ``/dev/shm`` whose whole process group was killed, and two copies of a
7 B model are 28 GB of the node's memory. A segment's name, or its table of participants, says which
process it belongs to; once that is gone any process of the same user may remove it. The next one
does, and ``rlinf clean``.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlinf.alive import is_alive, own_start, space

SHM = Path("/dev/shm")
PREFIX = "rlinf-weights-"
SEGMENT = re.compile(PREFIX + r"(\d+)-(\d+)-(\d+)-(\d+)-[0-9a-f]{16}")
"""User, space of process numbers, process, its start, and what tells its segments apart."""


def segment_name() -> str:
    """A new name for shared memory that is of no use once this process has ended."""
    owner = (os.getuid(), space(), os.getpid(), own_start())
    return PREFIX + "-".join(map(str, owner)) + f"-{secrets.token_hex(8)}"


def abandoned() -> Iterator[Path]:
    """Segments of weights whose process is gone, of this user alone."""
    for path in SHM.glob(f"{PREFIX}{os.getuid()}-*"):
        found = SEGMENT.match(path.name)
        if found is None or int(found[2]) != space():
            continue  # of a container with numbers of its own: they say nothing here
        with contextlib.suppress(OSError):
            info = path.lstat()
            if info.st_uid == os.getuid() and not is_alive(int(found[3]), int(found[4])):
                yield path


def sweep() -> None:
    """Remove them."""
    for path in abandoned():
        with contextlib.suppress(OSError):
            remove(path)


def remove(path: Path) -> None:
    """Remove one: a file, or the folder of an engine's server."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
