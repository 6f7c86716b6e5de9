"""Removal of files that killed processes left: shared memory and temporary files of runs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline import lock
from rlinf import shared_memory
from rlinf.errors import InputError
from stages.layout import CONFIG_FILE

TEMPORARY_NAME = re.compile(r"\..+\.(\d+\.)?[0-9a-f]{8}(\.clock-[0-9a-f]{8})?")
"""Names of temporary files that are renamed when they are complete."""
MIN_AGE_S = 600.0
"""Younger files may still be in use."""


def orphans(runs: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Yield files that can be removed, with their size: of this user, on this node and in these
    runs.

    Raises:
        InputError: a folder is no run directory.
    """
    folders = [folder.expanduser().absolute() for folder in runs]
    for folder in folders:
        if not (folder / CONFIG_FILE).is_file():
            raise InputError(f"{folder}: no run directory (it has no {CONFIG_FILE})")
    paths = list(shared_memory.orphaned_segments())
    for folder in folders:
        paths += [*lock.orphaned_lock_files(folder), *temporary_files(folder)]
    for path in dict.fromkeys(paths):
        with contextlib.suppress(OSError):
            yield path, path.lstat().st_size


def temporary_files(run: Path) -> Iterator[Path]:
    """Yield temporary files of a run that were never completed."""
    # os.walk skips folders that jobs of an earlier driver remove meanwhile.
    for folder, _, names in os.walk(run):
        for name in names:
            if not TEMPORARY_NAME.fullmatch(name) or name.startswith(f".{lock.LOCK_FILE}."):
                continue
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                if path.is_file() and lock.file_age_s(path) > MIN_AGE_S:
                    yield path


def remove_orphans(run: Path) -> None:
    """Remove unfinished files of earlier drivers. The caller must own the driver lock."""
    for path in [*lock.orphaned_lock_files(run), *temporary_files(run)]:
        path.unlink(missing_ok=True)


def clean_up(runs: Iterable[Path], *, dry_run: bool) -> list[str]:
    """Remove all orphans, or only list them; returns one line per file."""
    lines, total = [], 0
    for path, size in orphans(runs):
        lines.append(f"{size / 1e6:10.1f} MB  {path}")
        total += size
        if not dry_run:
            shared_memory.remove_orphan(path)
    what = "would be removed" if dry_run else "removed"
    return [*lines, f"{len(lines)} files, {total / 1e6:.1f} MB, {what}"]
