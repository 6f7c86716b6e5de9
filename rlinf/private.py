"""Files that are this user's alone: what others put in shared places is not believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def is_private(file: int) -> bool:
    """Whether an open file is a regular one of this user that nobody else may read or write."""
    info = os.fstat(file)
    own = info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077
    return own and stat.S_ISREG(info.st_mode)


def places_of(folder: Path) -> list[Path]:
    """Where links in a folder may lead: into it, and in a cache of Hugging Face
    (``models--*/snapshots/REVISION``) into ``blobs`` beside it."""
    home = folder.resolve()
    return [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
