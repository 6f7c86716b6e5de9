"""Warning signals and the end of the job: they set a flag, and the work decides when to stop.

Slurm sends USR2 some time before the wall-time limit or a preemption (NCCL owns USR1) and TERM at
the end. A handler does nothing else: Python runs it between bytecodes, possibly in the middle of a
write. Where the signal does not come, the clock sets the flag (:mod:`slurm.stop_signals`).

Python drops an interrupt that comes in a finalizer or in a callback of a weak reference, such as
its import system has: it is raised again where the flag is looked at.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import FrameType, TracebackType
from typing import Any

from rlinf.errors import SlurmError
from slurm.client import STOP_SIGNALS, run_command
from slurm.jobs import current_het_components, current_job_id

DEFAULT_STOP_MARGIN_S = 90.0
"""How long before the end work stops, where :data:`MARGIN` does not say it."""
STOP_MARGIN_VARIABLE = "RLINF_STOP_MARGIN_S"
CLOCK_SKEW_WARNING_S = 30.0
"""A clock that is off by more is worth a warning."""
_FIELD = re.compile(r"\b(StartTime|EndTime)=(\S+)")
_BORN = time.monotonic()


@dataclass(frozen=True)
class JobWindow:
    """Start and end of a job, seconds since the epoch by the controller's clock; None: unknown."""

    start: float | None
    end: float | None

    def remaining_s(self, now: float, age_s: float) -> float | None:
        """Seconds until the end; None: it has none, or none that can be believed.

        Args:
            now: This node's clock, seconds since the epoch.
            age_s: How long this process has run at least; the job has run longer.
        """
        if self.end is None:
            return None
        by_clock = self.end - now
        if self.start is None:
            # A job over its time would hardly ask; a clock may well be wrong.
            return by_clock if by_clock > 0 else None
        by_length = self.end - self.start - age_s
        return by_length if by_clock <= 0 else min(by_clock, by_length)

    def clock_skew_s(self, now: float, age_s: float) -> float:
        """Seconds that this node's clock is off at least: below 0 late, above 0 early."""
        if self.start is not None and now - age_s < self.start:
            return now - age_s - self.start
        return max(0.0, now - self.end) if self.end is not None else 0.0


def current_job_window(
    environment: Mapping[str, str] = os.environ,
    run_command: Callable[[list[str]], str] = run_command,
) -> JobWindow:
    """Start and end of the job that this process belongs to.

    From SLURM_JOB_START_TIME and SLURM_JOB_END_TIME, which later versions set (22.05 does not),
    else by one ``scontrol show job``. Then the first rank of a job asks alone: it is enough that
    one rank stops, since a requeue ends all. Nothing is known outside of jobs and where Slurm does
    not answer: never an error.
    """
    identity = current_job_id(environment)
    if identity is None:
        return JobWindow(None, None)
    end = _seconds(environment.get("SLURM_JOB_END_TIME", ""))
    if end is not None:
        return JobWindow(_seconds(environment.get("SLURM_JOB_START_TIME", "")), end)
    if environment.get("SLURM_PROCID", "0") != "0":
        return JobWindow(None, None)
    names = current_het_components(environment) or [identity]
    try:
        spans = [
            parse_job_window(run_command(["scontrol", "show", "job", "-o", name])) for name in names
        ]
        # Where the components of a job have limits of their own, the shortest ends it.
        return min(spans, key=lambda span: math.inf if span.end is None else span.end)
    except SlurmError as error:
        log.warning("the end of job %s is not known: %s", identity, error)
        return JobWindow(None, None)


def parse_job_window(text: str) -> JobWindow:
    """StartTime and EndTime of ``scontrol show job -o``; ``Unknown`` is None."""
    job = "\n".join(line for line in text.splitlines() if line.lstrip().startswith("JobId="))
    found = {key: _seconds(value) for key, value in _FIELD.findall(job or text)}
    return JobWindow(found.get("StartTime"), found.get("EndTime"))


def seconds_until_stop(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds after which work in this process should stop; None: no end is known.

    The margin before the end is at most half of what is left now, so that a short job gets
    something done before it asks to be started again.
    """
    span = current_job_window(environment)
    now, age_s = time.time(), time.monotonic() - _BORN
    left = span.remaining_s(now, age_s)
    off = span.clock_skew_s(now, age_s)
    if abs(off) > CLOCK_SKEW_WARNING_S:
        log.warning("this node's clock is %.0f s %s the controller's", abs(off), _direction(off))
    if left is None:
        return None
    try:
        margin = float(environment[STOP_MARGIN_VARIABLE])
    except (KeyError, ValueError):
        margin = DEFAULT_STOP_MARGIN_S
    return max(0.0, left - min(margin, left / 2))


def _direction(seconds: float) -> str:
    return "ahead of" if seconds > 0 else "behind"


def _seconds(text: str) -> float | None:
    """A time as Slurm writes it, in seconds since the epoch; None for ``Unknown`` and the like."""
    if text.isdigit():
        return float(text)
    try:
        # Without a zone: it is that of scontrol, and so of this process.
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


TIME_LIMIT_SHARE = 0.75
"""Of the time until work should stop: a stage that is stopped later had the time that there was."""
log = logging.getLogger("rlinf")


class StopFlag:
    """Context manager that turns the warning signals, and the job's end coming near, into a flag.

    Outside the main thread, where Python allows no handlers, the end alone sets it.
    """

    def __init__(self) -> None:
        self._set = self._dropped = False
        self._began = 0.0
        self._stop_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def is_set(self) -> bool:
        """Whether the allocation is about to end.

        Raises:
            KeyboardInterrupt: one came and was dropped; in the main thread.
        """
        if self._dropped and threading.current_thread() is threading.main_thread():
            self._dropped = False
            raise KeyboardInterrupt
        if not self._set and self._stop_at is not None and time.monotonic() >= self._stop_at:
            self._set = True
            log.warning("this job's time is nearly up and no signal came yet: stopping")
        return self._set

    def is_time_limit(self) -> bool:
        """Whether the flag is there because the job's time is nearly over, and not for a preemption
        say; a signal may come early. Only where the end is known."""
        if not self.is_set() or self._stop_at is None:
            return False
        return time.monotonic() - self._began > TIME_LIMIT_SHARE * (self._stop_at - self._began)

    def __enter__(self) -> StopFlag:
        left = seconds_until_stop()
        self._began = time.monotonic()
        self._stop_at = None if left is None else self._began + left

        def handle(number: int, frame: FrameType | None) -> None:
            self._set = True

        self._unraisable = sys.unraisablehook
        sys.unraisablehook = self._drop
        for number in STOP_SIGNALS:
            try:
                self._previous[number] = signal.signal(number, handle)
            except ValueError:
                break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        sys.unraisablehook = self._unraisable

    def _drop(self, lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            self._dropped = True
        else:
            self._unraisable(lost)
