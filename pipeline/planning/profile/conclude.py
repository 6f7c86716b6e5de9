"""What the end of a job of a profile pass says: a failure for want of memory is data too."""

from __future__ import annotations

import json
import logging
import re
import time

from pipeline.planning.profile.trial import Task, load_trial
from rlinf.artifacts import MANIFEST
from rlinf.errors import EXIT_BAD_INPUT, InputError, StageError
from slurm.jobs import State, Status

log = logging.getLogger("rlinf")

MEMORY = re.compile(r"out.?of.?memory|MemoryError|cannot allocate|SIGKILL", re.IGNORECASE)
LOST = frozenset({State.CANCELLED, State.TIMEOUT, State.PREEMPTED, State.NODE_FAIL, State.VANISHED})


def conclude(task: Task, status: Status) -> None:
    """Note how late the end of a job was noticed, or keep a failure for want of memory as data.

    Raises:
        InputError, StageError: the job failed for another reason.
    """
    if status.state is State.DONE:
        if trial := load_trial(task.trial):
            ended = json.loads((task.folder / MANIFEST).read_text())["ended"]
            trial.with_overhead("completion", time.time() - ended).save(task.trial)
        return
    reason = status.reason.strip() or status.state.value
    trial = load_trial(task.trial)
    if status.state is State.OUT_OF_MEMORY or MEMORY.search(reason):
        if trial is not None and trial.running is not None:
            line = next((r for r in reason.splitlines() if MEMORY.search(r)), "out of memory")
            trial.after_death(line.strip()).save(task.trial)
        return
    where = f"profile of {' - '.join(task.kinds)} on {task.processes} processes"
    if status.state in LOST:
        log.warning("%s: job ended early (%s)", where, status.state.value)
    elif status.exit_code == EXIT_BAD_INPUT:
        raise InputError(f"{where}: {reason}")
    else:
        raise StageError(f"{where}: {reason}")
