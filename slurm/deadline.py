"""When this job's allocation ends, and when its work should stop for that.

The warning signal may not come: a site may strip it, a step may not be told, a container may not
pass it on. The end is known beforehand.

Start and end are times of the controller's clock, and a node's may differ. How long the job may run
is the same by any clock, and this process is younger than the job, so what is left is at most the
job's length less the age of this process. That bound corrects a node's clock that is late; the time
between the start of the job and that of this process (prolog, container, imports) is not seen by it
and has to fit into the margin. A node's clock that is early stops the work earlier than needed, and
one so early that the end seems past is not believed. A time limit that is changed while the job
runs is not noticed: a longer one ends in a requeue too early, a shorter one needs the signal.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from rlinf.errors import SlurmError
from slurm.client import run
from slurm.ids import own_components, own_id

log = logging.getLogger("rlinf")

MARGIN_S = 90.0
"""How long before the end work stops, where :data:`MARGIN` does not say it."""
MARGIN = "RLINF_STOP_MARGIN_S"
SKEW_S = 30.0
"""A clock that is off by more is worth a warning."""
_FIELD = re.compile(r"\b(StartTime|EndTime)=(\S+)")
_BORN = time.monotonic()


@dataclass(frozen=True)
class Span:
    """Start and end of a job, seconds since the epoch by the controller's clock; None: unknown."""

    start: float | None
    end: float | None

    def left(self, now: float, age_s: float) -> float | None:
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

    def skew(self, now: float, age_s: float) -> float:
        """Seconds that this node's clock is off at least: below 0 late, above 0 early."""
        if self.start is not None and now - age_s < self.start:
            return now - age_s - self.start
        return max(0.0, now - self.end) if self.end is not None else 0.0


def job_span(
    environment: Mapping[str, str] = os.environ, ask: Callable[[list[str]], str] = run
) -> Span:
    """Start and end of the job that this process belongs to.

    From SLURM_JOB_START_TIME and SLURM_JOB_END_TIME, which later versions set (22.05 does not),
    else by one ``scontrol show job``. Then the first rank of a job asks alone: it is enough that
    one rank stops, since a requeue ends all. Nothing is known outside of jobs and where Slurm does
    not answer: never an error.
    """
    identity = own_id(environment)
    if identity is None:
        return Span(None, None)
    end = _seconds(environment.get("SLURM_JOB_END_TIME", ""))
    if end is not None:
        return Span(_seconds(environment.get("SLURM_JOB_START_TIME", "")), end)
    if environment.get("SLURM_PROCID", "0") != "0":
        return Span(None, None)
    names = own_components(environment) or [identity]
    try:
        spans = [parse_span(ask(["scontrol", "show", "job", "-o", name])) for name in names]
        # Where the components of a job have limits of their own, the shortest ends it.
        return min(spans, key=lambda span: math.inf if span.end is None else span.end)
    except SlurmError as error:
        log.warning("the end of job %s is not known: %s", identity, error)
        return Span(None, None)


def parse_span(text: str) -> Span:
    """StartTime and EndTime of ``scontrol show job -o``; ``Unknown`` is None."""
    job = "\n".join(line for line in text.splitlines() if line.lstrip().startswith("JobId="))
    found = {key: _seconds(value) for key, value in _FIELD.findall(job or text)}
    return Span(found.get("StartTime"), found.get("EndTime"))


def stop_in(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds after which work in this process should stop; None: no end is known.

    The margin before the end is at most half of what is left now, so that a short job gets
    something done before it asks to be started again.
    """
    span = job_span(environment)
    now, age_s = time.time(), time.monotonic() - _BORN
    left = span.left(now, age_s)
    off = span.skew(now, age_s)
    if abs(off) > SKEW_S:
        log.warning("this node's clock is %.0f s %s the controller's", abs(off), _direction(off))
    if left is None:
        return None
    try:
        margin = float(environment[MARGIN])
    except (KeyError, ValueError):
        margin = MARGIN_S
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
