"""An on-disk cache of arrays computed from large data files, shared by all processes of a user.

The arrays are in ``rlinf/rows`` of the user's cache folder (``XDG_CACHE_HOME``, ``~/.cache`` by
default). A file is named by the digest of all that its arrays depend on. The cache is optional: if
the folder cannot be used, or a file is damaged (its checksum is wrong), the arrays are computed
again.

Only the user can access folder and files. Files that were not used for :data:`MAX_AGE_S` are
removed. Above :data:`MAX_CACHE_BYTES` in total, so are the least recently used files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from rlinf import __version__
from rlinf.verified_io import is_owner_only

log = logging.getLogger(__name__)
FORMAT_VERSION = "2"
"""Part of every digest; incremented when the meaning of the arrays changes."""
Arrays = dict[str, np.ndarray]
CHECKSUM = "checksum"
"""Name of the checksum array in a file."""
PARTIAL_PREFIX = ".partial-"
"""Prefix of files that are being written."""
MAX_CACHE_BYTES = 4 << 30
"""Total size of the cache; the least recently used files beyond it are removed."""
MAX_AGE_S = 30 * 86400
"""Seconds after its last use until a file is removed."""
MAX_IN_MEMORY = 8
"""Maximum number of results that a process keeps in memory."""
_in_memory: dict[str, Arrays] = {}
"""The newest results that this process computed or read, by file name."""


def cached_arrays(
    kind: str, address: str, compute: Callable[[], Arrays], *, use_file: bool
) -> Arrays:
    """Return the result of ``compute``, from memory or the cache folder if possible.

    Args:
        kind: kind of the arrays, part of the file's name.
        address: text of everything on which the arrays depend.
        use_file: whether the result is also stored in a file; small results need none.
    """
    cache_key = f"{FORMAT_VERSION} {__version__} {kind} {address}".encode(errors="surrogatepass")
    name = f"{kind}-{xxhash.xxh3_128_hexdigest(cache_key)}"
    arrays = _in_memory.get(name)
    if arrays is None:
        arrays = _in_memory[name] = _from_folder(name, compute) if use_file else compute()
        while len(_in_memory) > MAX_IN_MEMORY:
            _in_memory.pop(next(iter(_in_memory)))
    return arrays


def _from_folder(name: str, compute: Callable[[], Arrays]) -> Arrays:
    try:
        folder = private_folder()
    except (OSError, RuntimeError) as error:
        _warn(str(error))
        return compute()
    path = folder / f"{name}.npz"
    if (cached := _load(path)) is not None:
        return cached
    arrays = compute()
    try:
        _save(arrays, path)
    except OSError as error:
        _warn(f"{folder}: {error.strerror or error}")
    else:
        with contextlib.suppress(OSError):  # Another process removes files as well.
            _prune(folder, path)
    return arrays


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


@cache
def _warn(reason: str) -> None:
    """Warn once per process and reason that nothing can be cached."""
    log.warning(
        "the cache of large data files cannot be used (%s), so each process indexes them "
        "again; set XDG_CACHE_HOME to a folder that you can write to",
        reason,
    )


def _load(path: Path) -> Arrays | None:
    """Return the arrays of a file. None: the file is missing or invalid."""
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            if not is_owner_only(file.fileno()):
                return None
            with np.load(file, allow_pickle=False) as archive:
                arrays = {key: archive[key] for key in archive.files}
            if not np.array_equal(arrays.pop(CHECKSUM), _checksum(arrays, path)):
                return None
            with contextlib.suppress(OSError):
                os.utime(file.fileno())
    except Exception:
        # Damaged archives raise errors of many types, and the arrays can be computed again.
        return None
    return arrays


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file that is no symbolic link. If it is a pipe, do not wait for its writer."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _save(arrays: Arrays, path: Path) -> None:
    """Write the arrays to a temporary file, then rename it."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=PARTIAL_PREFIX)
    try:
        with os.fdopen(descriptor, "wb") as file:
            checksum = {CHECKSUM: _checksum(arrays, path)}
            np.savez(file, **arrays, **checksum)  # type: ignore[arg-type]
        Path(partial).rename(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _checksum(arrays: Arrays, path: Path) -> np.ndarray:
    """Return a digest, uint8 ``[16]``, of the file's name and the arrays."""
    digest = xxhash.xxh3_128(path.name.encode())
    for key, array in sorted(arrays.items()):
        digest.update(f"{key} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return np.frombuffer(digest.digest(), np.uint8)


def _prune(folder: Path, newest: Path) -> None:
    """Remove files that are too old or exceed the total size, except ``newest``."""
    now, total = time.time(), newest.stat().st_size
    others = [(file.lstat(), file) for file in folder.iterdir() if file != newest]
    for stat, file in sorted(others, key=lambda other: -other[0].st_mtime):
        total += stat.st_size
        exceeds_total = total > MAX_CACHE_BYTES and not file.name.startswith(PARTIAL_PREFIX)
        if exceeds_total or now - stat.st_mtime > MAX_AGE_S:
            with contextlib.suppress(OSError):
                file.unlink()
