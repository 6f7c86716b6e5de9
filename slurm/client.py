"""The Slurm client: runs all of Slurm's commands, with few calls, and returns typed results.

sbatch prints ``Submitted batch job 12``, with several clusters ``Submitted batch job 12 on cluster
NAME``, or with ``--parsable`` ``12`` or ``12;NAME`` (manual page of sbatch). Some sites wrap sbatch
in a script that prints a banner, checks or the account's balance before and after that line.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from rlinf.errors import SlurmError, SlurmUnresponsiveError
from slurm.jobs import (
    STOP_SIGNALS,
    JobState,
    JobStatus,
    expand_job_ids,
    is_job_id,
    parent_job_id,
    parse_job_state,
)

COMMAND_TIMEOUT_S = 60.0
# -e prints a line for each node type; without it, one line has the minimum CPUs and memory.
SINFO_PARTITIONS = ("sinfo", "-h", "-e", "-o", "%P|%l|%D|%c|%m|%G|%a|%s")
# -r prints a line for each element of a pending array. The reason is last because it is free text.
SQUEUE_JOBS = ("squeue", "-h", "-r", "--me", "-t", "all", "-o", "%i|%T|%P|%a|%q|%N|%r")
SQUEUE_COMMENTS = ("squeue", "-h", "-r", "--me", "-t", "all", "-o", "%i|%k")
SACCT_JOBS = ("sacct", "-n", "-P", "-X", "-o", "JobID,State,ExitCode,Partition,NodeList", "-j")
SLURM_ENV_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SBATCH_",
    "SALLOC_",
    "SQUEUE_",
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
_PARTITION_LINE = re.compile(
    r"[^|\s]+\|[^|\s]+\|\d+\|\d+\+?\|\d+\+?\|[^|]*\|(?:up|down|drain|inact)(?:\|.*)?"
)
"""A line of sinfo's answer to :data:`SINFO_PARTITIONS`. All parsers of Slurm's output skip other
lines, which a site may print."""
_JOB_STATE = re.compile(r"[A-Z][A-Z0-9_]*\+?(?: by \S+)?")
_EXIT_CODE = re.compile(r"(\d+):\d+")
_ALREADY_ENDED = re.compile(r"invalid job id|already (?:completing|completed)", re.IGNORECASE)


@dataclass(frozen=True)
class QueuedJob(JobStatus):
    """A job in the queue, with its account and QOS, to which limits on the number of jobs apply."""

    account: str = ""
    qos: str = ""


@dataclass(frozen=True)
class NodeType:
    """Nodes of a partition with the same hardware; 0 stands for an unknown number."""

    count: int
    cpus: int
    """CPUs per node; memory and GPUs are per node too."""
    mem_mb: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Number of GPUs by type."""

    def __str__(self) -> str:
        gpus = [f"{count} {gpu_type or 'GPUs'}" for gpu_type, count in self.gpus.items()]
        return ", ".join([*gpus, f"{self.cpus} CPUs", f"{self.mem_mb} MiB"])


@dataclass(frozen=True)
class Partition:
    """The limits, state and node types of a partition."""

    name: str
    time_limit_min: int | None
    """Maximum wall time in minutes; None: unlimited."""
    node_types: tuple[NodeType, ...]
    max_nodes: int | None = None
    """Maximum nodes of one job; None: unlimited."""
    is_default: bool = False
    state: str = "up"
    """``up``, ``down`` (jobs wait), ``drain`` (no new jobs) or ``inact`` (down and drain)."""

    @property
    def is_available(self) -> bool:
        """True if jobs may be submitted and may start."""
        return self.state == "up"

    @property
    def nodes(self) -> int:
        """The number of nodes of all types."""
        return sum(node_type.count for node_type in self.node_types)

    @property
    def gpus(self) -> dict[str, int]:
        """The maximum number of GPUs per node, by GPU type."""
        gpus: dict[str, int] = {}
        for node_type in self.node_types:
            for gpu_type, count in node_type.gpus.items():
                gpus[gpu_type] = max(gpus.get(gpu_type, 0), count)
        return gpus


@dataclass
class SlurmClient:
    """Runs Slurm's commands and parses their text output, which is the same in 20.11 to 25.x."""

    poll_interval_s: float = 1.0
    """Minimum seconds between two queries of the queue."""

    def partitions(self) -> dict[str, Partition]:
        """Return all partitions by name.

        Raises:
            SlurmError: Slurm is not installed or does not answer.
        """
        return parse_partitions(self.run(*SINFO_PARTITIONS))

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
        rows = _job_rows(self.run(*SQUEUE_COMMENTS), 2)
        return [
            job_id for ids, comment in rows if text in comment for job_id in expand_job_ids(ids)
        ]

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
        text = self.run("sinfo", "--version")
        # Debian prints "slurm-wlm 22.05.8".
        match = re.search(r"^slurm\S*[ \t]+(\d\S*)", text, re.MULTILINE | re.IGNORECASE)
        if match is None:
            raise SlurmError(f"sinfo --version: no version in {text.strip()[:200]!r}")
        return match[1]

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


def command_environment() -> dict[str, str]:
    """Return this process's environment without the variables that change Slurm's commands.

    So commands behave the same on a login node, in an interactive job and in a driver's job.
    """
    return {
        k: v
        for k, v in os.environ.items()
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


def parse_partitions(text: str) -> dict[str, Partition]:
    """Parse sinfo's answer to :data:`SINFO_PARTITIONS`, which has a line for each node type."""
    partitions: dict[str, Partition] = {}
    for line in text.splitlines():
        if not _PARTITION_LINE.fullmatch(line.strip()):
            continue
        name, limit, nodes, cpus, memory, gres, state, *sizes = line.strip().split("|")[:8]
        previous = partitions.get(name.rstrip("*"))
        node_type = NodeType(_to_int(nodes), _to_int(cpus), _to_int(memory), parse_gpus(gres))
        partitions[name.rstrip("*")] = Partition(
            name=name.rstrip("*"),
            time_limit_min=parse_minutes(limit),
            node_types=(*(previous.node_types if previous else ()), node_type),
            # Minimum and maximum nodes of a job: 1-infinite, 1-4, or 2 if they are equal.
            max_nodes=_int_or_none(sizes[0].rpartition("-")[2]) if sizes else None,
            is_default=name.endswith("*"),
            state=state,
        )
    return partitions


def parse_gpus(gres: str) -> dict[str, int]:
    """Parse GPUs of a GRES text: ``gpu:a100:4(S:0-1),gpu:2`` is ``{"a100": 4, "": 2}``."""
    gpus: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = part.strip().split(":")
        if words[0] == "gpu" and words[-1].isdigit():
            gpu_type = words[1] if len(words) > 2 else ""
            gpus[gpu_type] = max(gpus.get(gpu_type, 0), int(words[-1]))
    return gpus


def parse_minutes(text: str) -> int | None:
    """Parse ``1-12:30:00``, ``30:00`` or ``45`` as minutes; None for other texts: ``infinite``."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(?:(\d+):)?(\d+)", text.strip())
    if not match:
        return None
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes = [*numbers, 0, 0][:2]
    elif len(numbers) == 3:
        hours, minutes = numbers[:2]
    else:
        hours, minutes = 0, numbers[0]
    return int(days or 0) * 1440 + hours * 60 + minutes


class _MayBeDefault(Protocol):
    @property
    def is_default(self) -> bool: ...


def default_partition(partitions: Mapping[str, _MayBeDefault]) -> str | None:
    """Return the name of the partition that jobs use by default; None if there is none."""
    return next((name for name, partition in partitions.items() if partition.is_default), None)


def partition_names(text: str) -> tuple[str, ...]:
    """Split ``a100,h100`` into names; the job runs in the first partition with free nodes."""
    return tuple(name.strip() for name in text.split(","))


def parse_queue(text: str) -> dict[str, QueuedJob]:
    """Parse squeue's answer to :data:`SQUEUE_JOBS`."""
    jobs = {}
    for ids, state, partition, account, qos, node, reason in _job_rows(text, 7):
        reason_text = "" if reason in ("None", "(null)") else reason
        status = QueuedJob(parse_job_state(state), None, reason_text, partition, node, account, qos)
        for job_id in expand_job_ids(ids):
            jobs[job_id] = status
    return jobs


def parse_accounting(text: str) -> dict[str, JobStatus]:
    """Parse sacct's answer to :data:`SACCT_JOBS`."""
    statuses = {}
    for ids, state, code, partition, node in _job_rows(text, 5):
        job_state, code_match = parse_job_state(state), _EXIT_CODE.fullmatch(code)
        exit_code = int(code_match[1]) if code_match else None
        reason = "" if job_state is JobState.DONE else state
        for job_id in expand_job_ids(ids):
            statuses[job_id] = JobStatus(job_state, exit_code, reason, partition, node)
    return statuses


def parse_settings(text: str) -> dict[str, str]:
    """Parse ``scontrol show config``, which prints lines of ``Key = value``."""
    pairs = (line.split(" = ", 1) for line in text.splitlines() if " = " in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _job_rows(text: str, columns: int) -> Iterator[list[str]]:
    """Yield the fields, separated by ``|``, of lines that start with a job id.

    With three or more columns the second field must be a job state. The last field may contain
    ``|``. Other lines are skipped.
    """
    for line in text.splitlines():
        parts = line.strip().split("|", columns - 1)
        has_state = columns < 3 or (len(parts) > 1 and _JOB_STATE.fullmatch(parts[1]))
        if len(parts) == columns and is_job_id(parts[0]) and has_state:
            yield parts


def _int_or_none(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _to_int(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits.group()) if digits else 0


_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Terminal escape sequences such as colours (ECMA-48)."""
_SUBMITTED_SENTENCE = re.compile(r"\bSubmitted batch job (\d+)\b", re.IGNORECASE)
_PARSABLE_ANSWER = re.compile(r"(\d+)(?:;[\w.-]+)?")
_MAX_EXCERPT = 1500
"""Maximum characters of an answer in an error message."""


class UnreadableSubmission(SlurmError):
    """The answer of sbatch to an accepted job does not contain the job's id."""


def parse_submitted_id(answer: str, find_tagged: Callable[[], Collection[str]] = tuple) -> str:
    """Return the job id in sbatch's answer.

    Args:
        find_tagged: returns the ids of the queued jobs with this submission's tag; called only if
            the answer contains several numbers, to find which of them is the job.

    Raises:
        UnreadableSubmission: the answer contains no id, or several; the message quotes it.
        SlurmError: the queue was queried and Slurm did not answer.
    """
    candidates = _candidates(answer)
    if len(candidates) > 1:
        tagged = {parent_job_id(job_id) for job_id in find_tagged()}
        candidates = [job_id for job_id in candidates if job_id in tagged] or candidates
    if len(candidates) != 1:
        content = f"several numbers ({', '.join(candidates)})" if candidates else "no job id"
        raise UnreadableSubmission(
            f"sbatch accepted the job, but its answer contains {content}: {_excerpt(answer)}"
        )
    return candidates[0]


def _candidates(answer: str) -> list[str]:
    """Return possible ids: those in the full sentence, else numbers alone on their line."""
    lines = [line.strip() for line in _ESCAPE.sub("", answer).splitlines()]
    in_sentences = [match[1] for line in lines if (match := _SUBMITTED_SENTENCE.search(line))]
    alone_on_line = [match[1] for line in lines if (match := _PARSABLE_ANSWER.fullmatch(line))]
    return list(dict.fromkeys(in_sentences or alone_on_line))


def _excerpt(answer: str) -> str:
    text = _ESCAPE.sub("", answer).strip()
    return repr(text if len(text) <= _MAX_EXCERPT else f"{text[:_MAX_EXCERPT]}...")


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


def parse_expected_wait(text: str, now: datetime) -> float | None:
    """Parse ``sbatch: Job 7 to start at 2026-01-02T03:04:05 using ...``."""
    match = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    if match is None:
        return None
    return max(0.0, (datetime.fromisoformat(match.group(1)) - now).total_seconds())


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


def parse_past_waits(text: str, partition: str) -> list[tuple[int, float]]:
    """Parse ``sacct -n -P -X -o Partition,NNodes,Eligible,Start``; jobs not started are skipped.

    A wait begins when the job is eligible to start, after its dependencies and begin time.
    """
    waits = []
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != 4 or parts[0] != partition or not parts[1].isdigit():
            continue
        try:
            eligible, start = map(datetime.fromisoformat, parts[2:])
        except ValueError:
            continue
        waits.append((int(parts[1]), max(0.0, (start - eligible).total_seconds())))
    return waits
