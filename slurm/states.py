"""Slurm's job states as ours. A state nobody has heard of counts as running, and is logged.

Sources: https://slurm.schedmd.com/job_state_codes.html (states and flags up to 25.05) and the
manual pages of squeue and sacct of 20.11 and later.
"""

from __future__ import annotations

import logging

from slurm.jobs import State

log = logging.getLogger("rlinf")

STATES = {
    "PENDING": State.PENDING,
    "CONFIGURING": State.PENDING,
    "POWER_UP_NODE": State.PENDING,
    "EXPEDITING": State.PENDING,
    # A flag: Slurm requeues the job, or its end follows.
    "LAUNCH_FAILED": State.PENDING,
    "REQUEUED": State.PENDING,
    "REQUEUE_FED": State.PENDING,
    "REQUEUE_HOLD": State.PENDING,
    "RESV_DEL_HOLD": State.PENDING,
    "SPECIAL_EXIT": State.PENDING,
    "RUNNING": State.RUNNING,
    "COMPLETING": State.RUNNING,
    "RESIZING": State.RUNNING,
    "SIGNALING": State.RUNNING,
    "STAGE_OUT": State.RUNNING,
    "STOPPED": State.RUNNING,
    "SUSPENDED": State.RUNNING,
    "UPDATE_DB": State.RUNNING,
    "COMPLETED": State.DONE,
    "FAILED": State.FAILED,
    "RECONFIG_FAIL": State.FAILED,
    "CANCELLED": State.CANCELLED,
    "REVOKED": State.CANCELLED,
    "TIMEOUT": State.TIMEOUT,
    "DEADLINE": State.TIMEOUT,
    "PREEMPTED": State.PREEMPTED,
    "NODE_FAIL": State.NODE_FAIL,
    "BOOT_FAIL": State.NODE_FAIL,
    "OUT_OF_MEMORY": State.OUT_OF_MEMORY,
}
_unknown: set[str] = set()


def parse_state(text: str) -> State:
    """``CANCELLED by 1000``, ``NODE_FAIL``, ``COMPLETED+`` and the like."""
    words = text.split()
    name = words[0].rstrip("+").upper() if words else ""
    if name not in STATES:
        if name not in _unknown:
            _unknown.add(name)
            log.warning("Slurm reports the unknown job state %r; treated as running", text)
        return State.RUNNING
    return STATES[name]
