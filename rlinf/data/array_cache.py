"""Arrays about large data files, computed once for all processes of a user.

They lie in ``rlinf/rows`` of the user's cache folder (``XDG_CACHE_HOME``, ``~/.cache`` by default),
each under the digest of all that it follows from. Nothing depends on them: where the folder cannot
be used, or holds something else, they are computed again.

The folder and its files are the user's alone. A file is believed only if its checksum is right, and
files that were not used for long, or are too large together, are removed.
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
"""Part of every address; raised when the meaning of the arrays changes."""
Arrays = dict[str, np.ndarray]
CHECKSUM = "checksum"
"""Array of a file beside those that it is made for."""
PARTIAL_PREFIX = ".partial-"
"""What names of files begin with that are being written."""
MAX_CACHE_BYTES = 4 << 30
"""Bytes of all files together; of more, those that were not used for longest are removed."""
MAX_AGE_S = 30 * 86400
"""Seconds after its last use until a file is removed."""
MAX_IN_MEMORY = 8
_known: dict[str, Arrays] = {}
"""The newest that this process made or read."""


def cached_arrays(kind: str, address: str, compute: Callable[[], Arrays], *, large: bool) -> Arrays:
    """Return what ``make`` gives, unless this process knows it or the cache folder has it.

    Args:
        kind: of the arrays, part of their address.
        address: text of all that they follow from.
        large: whether it is worth a file.
    """
    text = f"{FORMAT_VERSION} {__version__} {kind} {address}".encode(errors="surrogatepass")
    name = f"{kind}-{xxhash.xxh3_128_hexdigest(text)}"
    found = _known.get(name)
    if found is None:
        found = _known[name] = _from_folder(name, compute) if large else compute()
        while len(_known) > MAX_IN_MEMORY:
            _known.pop(next(iter(_known)))
    return found


def _from_folder(name: str, make: Callable[[], Arrays]) -> Arrays:
    try:
        folder = _private_folder()
    except (OSError, RuntimeError) as error:
        _warn(str(error))
        return make()
    path = folder / f"{name}.npz"
    if (found := _load(path)) is not None:
        return found
    arrays = make()
    try:
        _save(arrays, path)
    except OSError as error:
        _warn(f"{folder}: {error.strerror or error}")
    else:
        with contextlib.suppress(OSError):  # Another process removes files as well.
            _prune(folder, path)
    return arrays


def cache_folder() -> Path:
    """Return the folder of the cache; it need not be there.

    Raises:
        RuntimeError: the user has no home folder.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "rlinf" / "rows"


def _private_folder() -> Path:
    """Return the folder, made if need be and private to the user.

    Raises:
        OSError: it cannot be made, or is or stays open to another user.
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
    """Warn once in a process that nothing can be kept."""
    log.warning(
        "the cache of large data files cannot be used (%s), so each process reads and counts them "
        "anew; set XDG_CACHE_HOME to a folder of yours that can be written",
        reason,
    )


def _load(path: Path) -> Arrays | None:
    """Return the arrays of a file; None if there is none, or it is not what was written there."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not is_owner_only(file.fileno()):
                return None
            with np.load(file, allow_pickle=False) as archive:
                arrays = {key: archive[key] for key in archive.files}
            if not np.array_equal(arrays.pop(CHECKSUM), _checksum(arrays, path)):
                return None
            with contextlib.suppress(OSError):
                os.utime(file.fileno())
    except Exception:
        # Damaged archives raise errors of many types, and whatever is there can be made again.
        return None
    return arrays


def _open_at_once(path: str, flags: int) -> int:
    """Open a file of this name, not what a link leads to, and wait for no writer of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _save(arrays: Arrays, path: Path) -> None:
    """Write the arrays whole, then give the file its name."""
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
    """Return ``[16]`` uint8 that follow from the name of the file and all that is in the arrays."""
    digest = xxhash.xxh3_128(path.name.encode())
    for key, array in sorted(arrays.items()):
        digest.update(f"{key} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return np.frombuffer(digest.digest(), np.uint8)


def _prune(folder: Path, newest: Path) -> None:
    """Remove files that were not used for long, and what is above the largest size, but not the
    newest one."""
    now, total = time.time(), newest.stat().st_size
    others = [(file.lstat(), file) for file in folder.iterdir() if file != newest]
    for found, file in sorted(others, key=lambda other: -other[0].st_mtime):
        total += found.st_size
        too_much = total > MAX_CACHE_BYTES and not file.name.startswith(PARTIAL_PREFIX)
        if too_much or now - found.st_mtime > MAX_AGE_S:
            with contextlib.suppress(OSError):
                file.unlink()
