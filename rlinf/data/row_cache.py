"""Arrays about large data files, computed once for all processes of a user.

They lie in ``rlinf/rows`` of the user's cache folder (``XDG_CACHE_HOME``, ``~/.cache`` by default),
each under the digest of all that it follows from. Nothing depends on them: where the folder cannot
be written, or holds something else, they are computed again.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from rlinf import __version__

FORMAT = "2"
"""Part of every address; raised when the meaning of the arrays changes."""
Arrays = dict[str, np.ndarray]
REMEMBERED = 8
_known: dict[str, Arrays] = {}
"""The newest that this process made or read."""


def cached_arrays(kind: str, address: str, make: Callable[[], Arrays], *, large: bool) -> Arrays:
    """Return what ``make`` gives, unless this process knows it or the cache folder has it.

    Args:
        kind: of the arrays, part of their address.
        address: text of all that they follow from.
        large: whether it is worth a file.
    """
    text = f"{FORMAT} {__version__} {kind} {address}".encode(errors="surrogatepass")
    name = f"{kind}-{xxhash.xxh3_128_hexdigest(text)}"
    found = _known.get(name)
    if found is None:
        found = _known[name] = _from_folder(name, make) if large else make()
        while len(_known) > REMEMBERED:
            _known.pop(next(iter(_known)))
    return found


def _from_folder(name: str, make: Callable[[], Arrays]) -> Arrays:
    path = cache_folder() / f"{name}.npz"
    try:
        if path.stat().st_uid == os.getuid():
            with np.load(path, allow_pickle=False) as held:
                return {name: held[name] for name in held.files}
    except (OSError, ValueError, zipfile.BadZipFile, KeyError, EOFError):
        pass
    made = make()
    with contextlib.suppress(OSError):
        _save(made, path)
    return made


def cache_folder() -> Path:
    """Return the folder of the cache; it need not be there."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "rlinf" / "rows"


def _save(arrays: Arrays, path: Path) -> None:
    """Write the arrays whole, then give the file its name."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        Path(partial).rename(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
