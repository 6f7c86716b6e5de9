"""The user's cache folder, for tables that were converted to JSON lines.

The folder is ``rlinf/rows`` in ``XDG_CACHE_HOME``, ``~/.cache`` by default. Only the user can
access folder and files. Files that were not used for :data:`MAX_AGE_S` are removed. Above
:data:`MAX_CACHE_BYTES` in total, so are the least recently used files.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

PARTIAL_PREFIX = ".partial-"
"""Prefix of files that are being written."""
MAX_CACHE_BYTES = 4 << 30
"""Total size of the cache; the least recently used files beyond it are removed."""
MAX_AGE_S = 30 * 86400
"""Seconds after its last use until a file is removed."""


def cache_folder() -> Path:
    """Return the folder of the cache; it need not exist.

    Raises:
        RuntimeError: the user has no home folder.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "rlinf" / "rows"


def private_folder() -> Path:
    """Return the folder, created if necessary and private to the user.

    Raises:
        OSError: the folder cannot be created, or another user owns it or can access it.
        RuntimeError: the user has no home folder.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
        if folder.stat().st_mode & 0o077:
            raise PermissionError(f"{folder} stays open to other users")
    return folder


def remove_old_files(folder: Path, newest: Path) -> None:
    """Remove files that are too old or exceed the total size, except ``newest``."""
    now, total = time.time(), newest.stat().st_size
    others = [(file.lstat(), file) for file in folder.iterdir() if file != newest]
    for stat, file in sorted(others, key=lambda other: -other[0].st_mtime):
        total += stat.st_size
        exceeds_total = total > MAX_CACHE_BYTES and not file.name.startswith(PARTIAL_PREFIX)
        if exceeds_total or now - stat.st_mtime > MAX_AGE_S:
            with contextlib.suppress(OSError):
                file.unlink()
