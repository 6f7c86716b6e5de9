"""Stop flag of a job: set by warning signals or by the clock, and checked by the running work.

Slurm sends USR2 some time before the wall-time limit or a preemption (NCCL uses USR1) and TERM at
the end. The handler only sets a flag, because Python runs it between bytecodes, possibly in the
middle of a write. Python drops a KeyboardInterrupt that arrives in a finalizer or in a callback of
a weak reference, for example in its import system; the next check of the flag raises it again.

The warning signal may not arrive: a site may remove it, a step may not be notified, a container may
not forward it. So the flag is also set by the clock, from the known end of the job. Start and end
are times of the controller's clock, and a node's clock may differ. The length of the job is the
same by any clock, and the job is older than this process. So the remaining time is at most the
job's length minus the age of this process, even if a node's clock is behind. This bound is too high
by the time between the start of the job and of this process (prolog, container, imports), which
must fit into the margin. If a node's clock is ahead, the work stops too early; if the clock is
already past the end of the job, it is ignored. The end is read once. So if the time limit of a
running job is extended, the work stops too early; if it is reduced, only the signal stops the work.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from rlinf.errors import SlurmError
from slurm.jobs import STOP_SIGNALS, current_het_components, current_job_id
from slurm.records import parse_job, parse_time

DEFAULT_STOP_MARGIN_S = 90.0
"""Seconds before the end at which work stops, unless :data:`STOP_MARGIN_VARIABLE` sets them."""
STOP_MARGIN_VARIABLE = "RLINF_STOP_MARGIN_S"
"""Environment variable with this margin, in seconds."""
CLOCK_SKEW_WARNING_S = 30.0
"""Clock skew above which a warning is logged."""
_PROCESS_STARTED_AT = time.monotonic()


@dataclass(frozen=True)
class JobWindow:
    """The start and end of a job: seconds since the epoch, controller's clock; None: unknown."""

    start: float | None
    end: float | None

    def remaining_s(self, now: float, age_s: float) -> float | None:
        """Return the seconds until the end; None if it is unknown or not credible.

        Args:
            now: this node's clock, seconds since the epoch.
            age_s: minimum age of this process; the job is older.
        """
        if self.end is None:
            return None
        by_clock = self.end - now
        if self.start is None:
            # A job past its end would not run this code, so the clock must be wrong.
            return by_clock if by_clock > 0 else None
        by_length = self.end - self.start - age_s
        return by_length if by_clock <= 0 else min(by_clock, by_length)

    def clock_skew_s(self, now: float, age_s: float) -> float:
        """Return the minimum skew of this node's clock: negative if behind, positive if ahead."""
        if self.start is not None and now - age_s < self.start:
            return now - age_s - self.start
        return max(0.0, now - self.end) if self.end is not None else 0.0


def current_job_window(
    environment: Mapping[str, str] = os.environ,
    run_command: Callable[[list[str]], str] | None = None,
) -> JobWindow:
    """Return the start and end of the job of this process.

    They come from SLURM_JOB_START_TIME and SLURM_JOB_END_TIME, which later versions set (22.05 does
    not), else from one ``scontrol show job``. Only rank 0 runs scontrol, because it is enough that
    one rank stops: its requeue ends all ranks. Outside of jobs, or if Slurm does not answer, start
    and end are unknown; this is never an error.
    """
    job_id = current_job_id(environment)
    if job_id is None:
        return JobWindow(None, None)
    end = parse_time(environment.get("SLURM_JOB_END_TIME", ""))
    if end is not None:
        return JobWindow(parse_time(environment.get("SLURM_JOB_START_TIME", "")), end)
    if environment.get("SLURM_PROCID", "0") != "0":
        return JobWindow(None, None)
    job_ids = current_het_components(environment) or [job_id]
    if run_command is None:
        from slurm import client

        if shutil.which("scontrol") is None:
            log.warning(
                "the end of job %s is not known, because scontrol is missing, as in a container: "
                "work does not stop before the time limit of the job",
                job_id,
            )
            return JobWindow(None, None)
        run_command = client.run_command
    try:
        jobs = [parse_job(run_command(["scontrol", "show", "job", "-o", i])) for i in job_ids]
        windows = [JobWindow(job.start, job.end) for job in jobs]
        # If the components of a job have different limits, the earliest end is that of the job.
        return min(windows, key=lambda window: math.inf if window.end is None else window.end)
    except SlurmError as error:
        log.warning("the end of job %s is not known: %s", job_id, error)
        return JobWindow(None, None)


def seconds_until_stop(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds after which this process should stop its work; None if no end is known.

    The margin before the end is at most half of the remaining time, so that a short job makes
    progress before it is requeued.
    """
    window = current_job_window(environment)
    now, age_s = time.time(), time.monotonic() - _PROCESS_STARTED_AT
    remaining_s = window.remaining_s(now, age_s)
    skew = window.clock_skew_s(now, age_s)
    if abs(skew) > CLOCK_SKEW_WARNING_S:
        log.warning("this node's clock is %.0f s %s the controller's", abs(skew), _direction(skew))
    if remaining_s is None:
        return None
    try:
        margin = float(environment[STOP_MARGIN_VARIABLE])
    except (KeyError, ValueError):
        margin = DEFAULT_STOP_MARGIN_S
    return max(0.0, remaining_s - min(margin, remaining_s / 2))


def _direction(seconds: float) -> str:
    return "ahead of" if seconds > 0 else "behind"


TIME_LIMIT_SHARE = 0.75
"""A stop is attributed to the time limit after more than this share of the time until the expected
stop, because the warning signal may come early."""
log = logging.getLogger("rlinf")


class StopFlag:
    """A context manager whose flag is set by warning signals and before the end of the job.

    Python allows signal handlers in the main thread only; elsewhere only the clock sets the flag.
    """

    def __init__(self) -> None:
        self._is_set = self._dropped_interrupt = False
        self._entered_at = 0.0
        self._stop_at: float | None = None
        """Time (monotonic, s) from which the flag is set; None: the end of the job is unknown."""
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def is_set(self) -> bool:
        """Return True if the allocation is about to end.

        Raises:
            KeyboardInterrupt: Python dropped an interrupt earlier; in the main thread only.
        """
        if self._dropped_interrupt and threading.current_thread() is threading.main_thread():
            self._dropped_interrupt = False
            raise KeyboardInterrupt
        if not self._is_set and self._stop_at is not None and time.monotonic() >= self._stop_at:
            self._is_set = True
            log.warning("this job ends soon and no signal came yet: stopping")
        return self._is_set

    def is_time_limit(self) -> bool:
        """Return True if the flag is set because of the time limit and not, for example, because of
        a preemption. False if the end of the job is unknown."""
        if not self.is_set() or self._stop_at is None:
            return False
        available_s = self._stop_at - self._entered_at
        return time.monotonic() - self._entered_at > TIME_LIMIT_SHARE * available_s

    def __enter__(self) -> StopFlag:
        until_stop_s = seconds_until_stop()
        self._entered_at = time.monotonic()
        self._stop_at = None if until_stop_s is None else self._entered_at + until_stop_s

        def handle(number: int, frame: FrameType | None) -> None:
            self._is_set = True

        self._previous_hook = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable
        for number in STOP_SIGNALS:
            try:
                self._previous_handlers[number] = signal.signal(number, handle)
            except ValueError:
                break
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._previous_handlers.items():
            signal.signal(number, previous)
        sys.unraisablehook = self._previous_hook

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._dropped_interrupt = True
        else:
            self._previous_hook(unraisable)
