"""Files that are this user's alone: what others put in shared places is not believed."""

from __future__ import annotations

import os
import stat


def is_private(file: int) -> bool:
    """Whether an open file is a regular one of this user that nobody else may read or write."""
    info = os.fstat(file)
    own = info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077
    return own and stat.S_ISREG(info.st_mode)
