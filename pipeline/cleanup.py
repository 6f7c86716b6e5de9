"""Removal of what killed processes left: shared memory, lock files and temporary files of runs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline.lock import LOCK_FILE, file_age_s, orphaned_lock_files
from rlinf import shared_memory
from rlinf.errors import InputError
from stages.layout import CONFIG_FILE

TEMPORARY_NAME = re.compile(r"\..+\.(\d+\.)?[0-9a-f]{8}(\.clock-[0-9a-f]{8})?")
"""Pattern of the temporary name that a file has until it is complete."""
MIN_AGE_S = 600.0
"""Age in seconds from which a temporary file counts as abandoned."""


def orphans(runs: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Yield removable files with their sizes in bytes: shared memory of this user on this node, and
    lock and temporary files of these runs.

    Raises:
        InputError: a folder is no run directory.
    """
    folders = [folder.expanduser().absolute() for folder in runs]
    for folder in folders:
        if not (folder / CONFIG_FILE).is_file():
            raise InputError(f"{folder}: no run directory (it has no {CONFIG_FILE})")
    paths = list(shared_memory.orphaned_segments())
    for folder in folders:
        paths += [*orphaned_lock_files(folder), *temporary_files(folder)]
    for path in dict.fromkeys(paths):
        with contextlib.suppress(OSError):
            yield path, path.lstat().st_size


def temporary_files(run: Path) -> Iterator[Path]:
    """Yield temporary files of a run that were never completed."""
    # os.walk skips folders that jobs of an earlier driver remove meanwhile.
    for folder, _, names in os.walk(run):
        for name in names:
            if not TEMPORARY_NAME.fullmatch(name) or name.startswith(f".{LOCK_FILE}."):
                continue
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                if path.is_file() and file_age_s(path) > MIN_AGE_S:
                    yield path


def remove_orphans(run: Path) -> None:
    """Remove unfinished files of earlier drivers. The caller must own the driver lock."""
    for path in [*orphaned_lock_files(run), *temporary_files(run)]:
        path.unlink(missing_ok=True)


def clean_up(runs: Iterable[Path], *, dry_run: bool) -> list[str]:
    """Remove all orphans, or only list them; returns one line per file."""
    lines, total = [], 0
    for path, size in orphans(runs):
        lines.append(f"{size / 1e6:10.1f} MB  {path}")
        total += size
        if not dry_run:
            shared_memory.remove_orphan(path)
    outcome = "would be removed" if dry_run else "removed"
    return [*lines, f"{len(lines)} files, {total / 1e6:.1f} MB, {outcome}"]
