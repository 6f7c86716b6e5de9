"""Requeue the job of this process; also a program: ``python -m slurm.requeue``."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping

from rlinf.errors import SlurmError
from slurm.client import run_command
from slurm.jobs import current_job_id
from slurm.records import parse_job

log = logging.getLogger("rlinf")

# scontrol's message for a job that another rank has just requeued.
_ALREADY_REQUEUED = re.compile("pending execution", re.IGNORECASE)


def requeue(
    environment: Mapping[str, str] = os.environ,
    run_command: Callable[[list[str]], str] = run_command,
) -> bool:
    """Requeue this job, which ends all of its ranks. Returns True if Slurm will run it again.

    Every rank calls this, because any rank may be the first to stop while the others wait for it.
    A job that is being cancelled is not requeued: scontrol would revive it.
    """
    job_id = str(current_job_id(environment))
    try:
        current = parse_job(run_command(["scontrol", "show", "job", "-o", job_id]))
        if current.restarts > int(environment.get("SLURM_RESTART_COUNT", "0")):
            return True
        # A job that somebody ended has another state; one at its time limit may already be ending.
        if current.state != "RUNNING" and current.reason != "TimeLimit":
            log.warning("job %s was ended (%s): not requeued", job_id, current.state)
            return False
        run_command(["scontrol", "requeue", job_id])
    except SlurmError as error:
        if _ALREADY_REQUEUED.search(str(error)):
            return True
        log.warning("job %s cannot be requeued: %s", job_id, error)
        return False
    return True


if __name__ == "__main__":
    sys.exit(not requeue())
