"""The Slurm client: runs all of Slurm's commands, with few calls (:mod:`slurm.records`)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from rlinf.errors import SlurmError, SlurmUnresponsiveError
from slurm.jobs import (
    STOP_SIGNALS,
    JobStatus,
    is_job_id,
    parent_job_id,
)
from slurm.records import (
    SACCT_ELAPSED,
    SACCT_JOBS,
    SQUEUE_COMMENTS,
    SQUEUE_JOBS,
    QueuedJob,
    parse_accounting,
    parse_comments,
    parse_elapsed,
    parse_expected_wait,
    parse_past_waits,
    parse_queue,
    parse_settings,
    parse_version,
)

COMMAND_TIMEOUT_S = 60.0
SLURM_ENV_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SBATCH_",
    "SALLOC_",
    "SQUEUE_",
    "SCANCEL_",
    "SACCT_",
    "SINFO_",
)
"""Prefixes of variables that change what Slurm's commands do or show. Slurm sets some in a job
(``SLURM_MEM_PER_CPU``); users set others (``SBATCH_QOS``, ``SQUEUE_PARTITION``)."""
CONTROLLER_ENV = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""Variables that commands need to find their controller."""
_NO_ANSWER = re.compile(
    "unable to contact|socket timed out|connection (?:refused|failure|timed out|reset)"
    "|zero bytes were transmitted|in standby|slurmctld is down|not responding",
    re.IGNORECASE,
)
"""Parts of the messages that commands print if the controller does not answer."""
_ALREADY_ENDED = re.compile(r"invalid job id|already (?:completing|completed)", re.IGNORECASE)


@dataclass
class SlurmClient:
    """Runs Slurm's commands and returns typed records."""

    poll_interval_s: float = 1.0
    """Minimum seconds between two queries of the queue."""

    def queue(self) -> dict[str, QueuedJob]:
        """Return this user's jobs in the queue by id; each array element is an entry (``12_3``).

        Jobs that ended recently are included.
        """
        return parse_queue(self.run(*SQUEUE_JOBS))

    def find_by_comment(self, text: str) -> list[str]:
        """Return the ids of this user's queued jobs whose comment contains ``text``.

        Raises:
            SlurmError: Slurm does not answer.
        """
        comments = parse_comments(self.run(*SQUEUE_COMMENTS))
        return [job_id for job_id, comment in comments.items() if text in comment]

    def accounting(self, ids: Collection[str]) -> dict[str, JobStatus]:
        """Return the status of jobs in accounting; empty if the cluster has no accounting."""
        job_ids = sorted({parent_job_id(job_id) for job_id in ids})
        try:
            by_id = parse_accounting(self.run(*SACCT_JOBS, ",".join(job_ids)))
        except SlurmError:
            return {}
        # An array element that was cancelled while pending may be listed under its array's id only.
        listed_ids = {i: i if i in by_id else parent_job_id(i) for i in ids}
        return {i: by_id[listed_id] for i, listed_id in listed_ids.items() if listed_id in by_id}

    def elapsed_s(self, ids: Collection[str]) -> dict[str, float]:
        """Return how long ended jobs ran, seconds, by id; jobs unknown to accounting are absent."""
        job_ids = sorted({parent_job_id(job_id) for job_id in ids if is_job_id(job_id)})
        try:
            seconds = parse_elapsed(self.run(*SACCT_ELAPSED, ",".join(job_ids))) if job_ids else {}
        except SlurmError:
            return {}
        return {job_id: seconds[job_id] for job_id in ids if job_id in seconds}

    def cancel(self, ids: Collection[str]) -> None:
        """Cancel jobs. Jobs that have already ended are ignored; the others are cancelled anyway.

        A component of a heterogeneous job is cancelled with its whole job, because Slurm refuses
        to cancel a pending component alone.

        Raises:
            SlurmError: an existing job could not be cancelled.
        """
        if not ids:
            return
        ids = {parent_job_id(job_id) if "+" in job_id else job_id for job_id in ids}
        try:
            self.run("scancel", *sorted(ids))
        except SlurmError as error:
            if len(ids) > 1:
                self._cancel_singly(ids)
            elif not _ALREADY_ENDED.search(str(error)):
                raise

    def _cancel_singly(self, ids: Collection[str]) -> None:
        """Cancel jobs one by one, for versions of scancel that stop at the first ended job."""
        failed = []
        for job_id in sorted(ids):
            try:
                self.cancel([job_id])
            except SlurmError as error:
                failed.append(str(error))
        if failed:
            raise SlurmError("; ".join(failed))

    def settings(self) -> dict[str, str]:
        """Return the cluster's configuration by the names of slurm.conf.

        Raises:
            SlurmError: Slurm is not installed or does not answer.
        """
        return parse_settings(self.run("scontrol", "show", "config"))

    def version(self) -> str:
        """Return Slurm's version, such as ``22.05.8``.

        Raises:
            SlurmError: Slurm is not installed, does not answer, or prints no version.
        """
        return parse_version(self.run("sinfo", "--version"))

    def run(self, *command: str, return_stderr: bool = False) -> str:
        """Run a Slurm command and return its standard output.

        Args:
            return_stderr: return the error output instead.

        Raises:
            SlurmUnresponsiveError: Slurm does not answer.
            SlurmError: the command is not installed, or fails with this message.
        """
        return run_command(command, return_stderr=return_stderr)


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Block stop signals, so that commands started meanwhile survive a signal to the whole step.

    A child inherits the signal mask of the thread that starts it. This process gets the signal
    when the ``with`` statement ends.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def command_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without the variables that change Slurm's commands.

    So commands behave the same on a login node, in an interactive job and in a driver's job.
    sbatch passes its environment on, and these variables would also affect the new job's srun.
    """
    return {
        k: v
        for k, v in environment.items()
        if k in CONTROLLER_ENV or not k.startswith(SLURM_ENV_PREFIXES)
    }


def run_command(command: Sequence[str], *, return_stderr: bool = False) -> str:
    """Run a Slurm command; see :meth:`SlurmClient.run`."""
    if shutil.which(command[0]) is None:
        raise SlurmError(
            f"{command[0]}: command not found; this machine has no Slurm. "
            "Use cluster=local, or log in to the cluster's login node"
        )
    try:
        with block_stop_signals():
            completed = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
                env=command_environment(),
            )
    except subprocess.TimeoutExpired:
        raise SlurmUnresponsiveError(
            f"{command[0]} did not answer within {COMMAND_TIMEOUT_S:.0f} s"
        ) from None
    if completed.returncode:
        message = completed.stderr.strip() or completed.stdout.strip()
        raise classify_failure(message)(f"{' '.join(command)}: {message}")
    return completed.stderr if return_stderr else completed.stdout


def classify_failure(message: str) -> type[SlurmError]:
    """Return the error class for a failed command's message: no answer, or refused.

    If some lines contain an error, the other lines are ignored, because a banner may mention nodes
    that are not responding.
    """
    lines = message.splitlines()
    lines = [line for line in lines if re.search("error|fatal", line, re.IGNORECASE)] or lines
    return SlurmUnresponsiveError if any(map(_NO_ANSWER.search, lines)) else SlurmError


WAIT_HISTORY_DAYS = 14
"""Age of the oldest jobs of which :func:`past_waits_s` returns the wait."""


def expected_wait_s(client: SlurmClient, now: datetime, *options: str) -> float | None:
    """Return the seconds until a job with these sbatch options would start; None if unknown.

    Args:
        now: local time of the cluster, without a time zone.
    """
    try:
        text = client.run("sbatch", "--test-only", *options, "--wrap", "true", return_stderr=True)
    except SlurmError:
        return None
    return parse_expected_wait(text, now)


def past_waits_s(client: SlurmClient, partition: str) -> list[tuple[int, float]]:
    """Return (nodes, seconds of waiting) of each past job of a partition that this user may see."""
    since, fields = f"now-{WAIT_HISTORY_DAYS}days", "Partition,NNodes,Eligible,Start"
    try:
        text = client.run(
            *("sacct", "-n", "-P", "-X", "-a", "-r", partition, "-S", since, "-o", fields)
        )
    except SlurmError:
        return []
    return parse_past_waits(text, partition)
