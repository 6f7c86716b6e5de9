"""A limit on retries of a stage that reaches its time limit without progress.

A job that reaches its time limit is requeued, and its stage resumes from :data:`PROGRESS_FOLDER`.
A stage that saves no progress and takes longer than the time limit would be requeued for ever.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from rlinf.artifacts import write_atomic
from rlinf.errors import PlanError

PROGRESS_FOLDER = "progress"
"""Folder in the output folder with the saved progress of a stage; the stage's commit removes it."""
TIMEOUTS_FILE = "timeouts.json"
"""File in the output folder: names of the attempts that timed out without progress."""
MAX_TIMEOUTS = 3
"""Number of attempts without progress after which the stage fails."""
log = logging.getLogger("rlinf")


class NoProgressGuard:
    """Counts the attempts at one output that timed out without progress; too many are an error.

    Args:
        out: output folder of the stage.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._initial_progress = out, _modification_times(out / PROGRESS_FOLDER)

    def record_timeout(self, stage: str, attempt: str) -> None:
        """Record that this attempt stops at its time limit.

        Raises:
            PlanError: :data:`MAX_TIMEOUTS` attempts have timed out without progress.
        """
        path = self._out / TIMEOUTS_FILE
        if _modification_times(self._out / PROGRESS_FOLDER) != self._initial_progress:
            path.unlink(missing_ok=True)
            return
        # Any rank may stop first, so each rank writes the same list.
        attempts = sorted({*_read_attempts(path), attempt})
        if len(attempts) < MAX_TIMEOUTS:
            write_atomic(path, json.dumps(attempts))
            log.warning(
                "%s: stopped at its time limit without saved progress; it starts again",
                stage,
            )
            return
        path.unlink(missing_ok=True)
        raise PlanError(
            f"plan: stages.{stage}: {MAX_TIMEOUTS} attempts reached their job's time limit "
            f"without saved progress: allow more time (stages.{stage}.time_limit_min), a partition "
            "with a longer limit, or less work"
        )


def _read_attempts(path: Path) -> list[str]:
    try:
        return [str(entry) for entry in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        return []


def _modification_times(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))
