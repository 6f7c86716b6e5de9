"""Requeue the job of this process; also a program: ``python -m slurm.requeue``."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlinf.errors import SlurmError
from slurm.client import run_command
from slurm.jobs import current_job_id

log = logging.getLogger("rlinf")

_FIELD = re.compile(r"\b(JobState|Reason|Restarts)=(\S+)")
# scontrol's message for a job that another rank has just requeued.
_ALREADY_REQUEUED = re.compile("pending execution", re.IGNORECASE)


@dataclass(frozen=True)
class RequeueState:
    """The state, reason and restart count of a job, from ``scontrol show job``."""

    state: str
    reason: str
    restarts: int

    @property
    def can_requeue(self) -> bool:
        """True if the job runs or reached its time limit; False if somebody ended it."""
        return self.state == "RUNNING" or self.reason == "TimeLimit"


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
        current = parse_requeue_state(run_command(["scontrol", "show", "job", "-o", job_id]))
        if current.restarts > int(environment.get("SLURM_RESTART_COUNT", "0")):
            return True
        if not current.can_requeue:
            log.warning("job %s was ended (%s): not requeued", job_id, current.state)
            return False
        run_command(["scontrol", "requeue", job_id])
    except SlurmError as error:
        if _ALREADY_REQUEUED.search(str(error)):
            return True
        log.warning("job %s cannot be requeued: %s", job_id, error)
        return False
    return True


def parse_requeue_state(text: str) -> RequeueState:
    """Parse ``scontrol show job -o``.

    Raises:
        SlurmError: the text describes no job.
    """
    # The user's texts may contain such fields. Slurm prints the job's name before UserId and the
    # other texts after its own fields, so the first match after UserId is Slurm's.
    fields = dict(reversed(_FIELD.findall(text.partition("UserId=")[2])))
    try:
        return RequeueState(fields["JobState"], fields["Reason"], int(fields["Restarts"]))
    except (KeyError, ValueError):
        raise SlurmError(f"scontrol show job: cannot read {text.strip()[:200]!r}") from None


if __name__ == "__main__":
    sys.exit(not requeue())
