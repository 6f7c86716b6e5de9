"""Every question to Slurm goes through here: typed answers, few calls."""

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
    JobState,
    JobStatus,
    expand_job_ids,
    is_job_id,
    parent_job_id,
    parse_job_state,
)

COMMAND_TIMEOUT_S = 60.0
# -e gives unlike nodes lines of their own; without, one has the least CPUs and memory of them all.
SINFO_PARTITIONS = ("sinfo", "-h", "-e", "-o", "%P|%l|%D|%c|%m|%G|%a|%s")
# -r gives each element of a pending array a line. The reason comes last: it may be free text.
SQUEUE_JOBS = ("squeue", "-h", "-r", "--me", "-t", "all", "-o", "%i|%T|%P|%a|%q|%N|%r")
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
"""Beginnings of variables that change what Slurm's commands do or show: those of a job that this
process runs in (``SLURM_MEM_PER_CPU``), and a user's own (``SBATCH_QOS``, ``SQUEUE_PARTITION``)."""
CONTROLLER_ENV = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""Variables without which no command finds its controller."""
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
"""Signals by which Slurm says that a job is to end."""
SQUEUE_COMMENTS = ("squeue", "-h", "-r", "--me", "-t", "all", "-o", "%i|%k")
_NO_ANSWER = re.compile(
    "unable to contact|socket timed out|connection (?:refused|failure|timed out|reset)"
    "|zero bytes were transmitted|in standby|slurmctld is down|not responding",
    re.IGNORECASE,
)
"""In messages of commands that had no answer from the controller."""
_PARTITION_LINE = re.compile(
    r"[^|\s]+\|[^|\s]+\|\d+\|\d+\+?\|\d+\+?\|[^|]*\|(?:up|down|drain|inact)(?:\|.*)?"
)
"""A line of sinfo's answer to :data:`PARTITIONS`. Around such lines sites print texts of their own,
which all readers of Slurm's answers pass over."""
_STATE = re.compile(r"[A-Z][A-Z0-9_]*\+?(?: by \S+)?")
_EXIT_CODE = re.compile(r"(\d+):\d+")
_ALREADY_ENDED = re.compile(r"invalid job id|already (?:completing|completed)", re.IGNORECASE)


@dataclass(frozen=True)
class QueuedJob(JobStatus):
    """A job in the queue, with what limits on the number of jobs go by."""

    account: str = ""
    qos: str = ""


@dataclass(frozen=True)
class NodeType:
    """Nodes of a partition with the same hardware; 0 where it is unknown."""

    count: int
    cpus: int
    """Per node. So for memory and GPUs."""
    mem_mb: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    """By type."""

    def __str__(self) -> str:
        kinds = [f"{count} {kind or 'GPUs'}" for kind, count in self.gpus.items()]
        return ", ".join([*kinds, f"{self.cpus} CPUs", f"{self.mem_mb} MiB"])


@dataclass(frozen=True)
class Partition:
    """What a partition offers."""

    name: str
    time_limit_min: int | None
    """Longest wall time, minutes; None: unlimited."""
    groups: tuple[NodeType, ...]
    max_nodes: int | None = None
    """Of one job; None: unlimited."""
    is_default: bool = False
    state: str = "up"
    """``up``, ``down`` (jobs wait), ``drain`` (no new jobs) or ``inact`` (neither)."""

    @property
    def is_available(self) -> bool:
        """Whether jobs may be submitted and start."""
        return self.state == "up"

    @property
    def nodes(self) -> int:
        """All nodes."""
        return sum(group.count for group in self.groups)

    @property
    def gpus(self) -> dict[str, int]:
        """The most GPUs of each type that a node has."""
        found: dict[str, int] = {}
        for group in self.groups:
            for kind, count in group.gpus.items():
                found[kind] = max(found.get(kind, 0), count)
        return found


@dataclass
class SlurmClient:
    """Calls Slurm's own commands and reads their text, which 20.11 to 25.x print alike."""

    poll_interval_s: float = 1.0
    """Seconds that should pass between two queries of the queue."""

    def partitions(self) -> dict[str, Partition]:
        """All partitions.

        Raises:
            SlurmError: Slurm is not installed or does not answer.
        """
        return parse_partitions(self.run(*SINFO_PARTITIONS))

    def queue(self) -> dict[str, QueuedJob]:
        """This user's jobs in the queue, array elements singly (``12_3``).

        Those that ended a short while ago are among them.
        """
        return parse_queue(self.run(*SQUEUE_JOBS))

    def find_by_comment(self, text: str) -> list[str]:
        """Ids of this user's jobs in the queue that have a word in their comment.

        Raises:
            SlurmError: Slurm does not answer.
        """
        rows = _job_rows(self.run(*SQUEUE_COMMENTS), 2)
        return [
            identity for ids, comment in rows if text in comment for identity in expand_job_ids(ids)
        ]

    def accounting(self, ids: Collection[str]) -> dict[str, JobStatus]:
        """What accounting knows of jobs; empty where there is no accounting."""
        job_ids = sorted({parent_job_id(identity) for identity in ids})
        try:
            found = parse_accounting(self.run(*SACCT_JOBS, ",".join(job_ids)))
        except SlurmError:
            return {}
        # Elements that were cancelled while they waited may stand under the id of their array only.
        names = {i: i if i in found else parent_job_id(i) for i in ids}
        return {identity: found[name] for identity, name in names.items() if name in found}

    def cancel(self, ids: Collection[str]) -> None:
        """Cancel jobs; those already gone are no error, and keep no other one alive.

        A component of a heterogeneous job goes with the whole: while it waits, Slurm refuses to
        cancel it alone.

        Raises:
            SlurmError: a job that is there could not be cancelled.
        """
        if not ids:
            return
        ids = {parent_job_id(identity) if "+" in identity else identity for identity in ids}
        try:
            self.run("scancel", *sorted(ids))
        except SlurmError as error:
            if len(ids) > 1:
                self._cancel_singly(ids)
            elif not _ALREADY_ENDED.search(str(error)):
                raise

    def _cancel_singly(self, ids: Collection[str]) -> None:
        """For versions of scancel that stop at the first job that is gone."""
        failed = []
        for identity in sorted(ids):
            try:
                self.cancel([identity])
            except SlurmError as error:
                failed.append(str(error))
        if failed:
            raise SlurmError("; ".join(failed))

    def settings(self) -> dict[str, str]:
        """The cluster's configuration, by the names of slurm.conf.

        Raises:
            SlurmError: Slurm is not installed or does not answer.
        """
        return parse_settings(self.run("scontrol", "show", "config"))

    def version(self) -> str:
        """Slurm's version, such as ``22.05.8``.

        Raises:
            SlurmError: Slurm is not installed, does not answer, or says no version.
        """
        text = self.run("sinfo", "--version")
        # Debian's says "slurm-wlm 22.05.8".
        found = re.search(r"^slurm\S*[ \t]+(\d\S*)", text, re.MULTILINE | re.IGNORECASE)
        if found is None:
            raise SlurmError(f"sinfo --version: no version in {text.strip()[:200]!r}")
        return found[1]

    def run(self, *command: str, return_stderr: bool = False) -> str:
        """Standard output of a Slurm command; its error output, where ``errors``.

        Raises:
            SlurmUnresponsiveError: no answer.
            SlurmError: not installed, or refused (with its own message).
        """
        return run_command(command, return_stderr=return_stderr)


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Commands that are started within outlive the warning which Slurm sends to a whole step.

    A child begins with the mask of the thread that starts it. This process sees the signal later.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def command_environment() -> dict[str, str]:
    """Return this process's environment without what changes Slurm's commands.

    All of them are started so, from a login node, an interactive job or a driver's job alike.
    """
    return {
        k: v
        for k, v in os.environ.items()
        if k in CONTROLLER_ENV or not k.startswith(SLURM_ENV_PREFIXES)
    }


def run_command(command: Sequence[str], *, return_stderr: bool = False) -> str:
    """See :meth:`SlurmClient.run`."""
    if shutil.which(command[0]) is None:
        raise SlurmError(
            f"{command[0]}: command not found; this machine has no Slurm. "
            "Use cluster=local, or log in to the cluster's login node"
        )
    try:
        with block_stop_signals():
            done = subprocess.run(
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
    if done.returncode:
        message = done.stderr.strip() or done.stdout.strip()
        raise classify_failure(message)(f"{' '.join(command)}: {message}")
    return done.stderr if return_stderr else done.stdout


def classify_failure(message: str) -> type[SlurmError]:
    """What a command's message means: that there was no answer, or that it was refused.

    Where lines of it speak of an error, only these count: a banner may tell of nodes that are not
    responding.
    """
    lines = message.splitlines()
    lines = [line for line in lines if re.search("error|fatal", line, re.IGNORECASE)] or lines
    return SlurmUnresponsiveError if any(map(_NO_ANSWER.search, lines)) else SlurmError


def parse_partitions(text: str) -> dict[str, Partition]:
    """Read sinfo's answer to :data:`PARTITIONS`; unlike nodes have lines of their own."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        if not _PARTITION_LINE.fullmatch(line.strip()):
            continue
        name, limit, nodes, cpus, memory, gres, state, *sizes = line.strip().split("|")[:8]
        known = found.get(name.rstrip("*"))
        group = NodeType(_number(nodes), _number(cpus), _number(memory), parse_gpus(gres))
        found[name.rstrip("*")] = Partition(
            name=name.rstrip("*"),
            time_limit_min=parse_minutes(limit),
            groups=(*(known.groups if known else ()), group),
            # From the least to the most nodes of a job: 1-infinite, 1-4, or 2 where they are one.
            max_nodes=_limit(sizes[0].rpartition("-")[2]) if sizes else None,
            is_default=name.endswith("*"),
            state=state,
        )
    return found


def parse_gpus(gres: str) -> dict[str, int]:
    """``gpu:a100:4(S:0-1),gpu:2`` as ``{"a100": 4, "": 2}``; other resources are left out."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = part.strip().split(":")
        if words[0] == "gpu" and words[-1].isdigit():
            kind = words[1] if len(words) > 2 else ""
            found[kind] = max(found.get(kind, 0), int(words[-1]))
    return found


def parse_minutes(text: str) -> int | None:
    """``1-12:30:00``, ``30:00``, ``45`` as minutes; None for ``infinite`` and the like."""
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
    """The name of the one that jobs go to which name none."""
    return next((name for name, partition in partitions.items() if partition.is_default), None)


def partition_names(text: str) -> tuple[str, ...]:
    """``a100,h100`` as its names: the job runs in the first of them that has room."""
    return tuple(name.strip() for name in text.split(","))


def parse_queue(text: str) -> dict[str, QueuedJob]:
    """Read squeue's answer to :data:`SQUEUE_JOBS`."""
    found = {}
    for ids, state, partition, account, qos, node, reason in _job_rows(text, 7):
        why = "" if reason in ("None", "(null)") else reason
        status = QueuedJob(parse_job_state(state), None, why, partition, node, account, qos)
        for identity in expand_job_ids(ids):
            found[identity] = status
    return found


def parse_accounting(text: str) -> dict[str, JobStatus]:
    """Read sacct's answer to :data:`SACCT_JOBS`."""
    found = {}
    for ids, state, code, partition, node in _job_rows(text, 5):
        kind, numbers = parse_job_state(state), _EXIT_CODE.fullmatch(code)
        exit_code = int(numbers[1]) if numbers else None
        reason = "" if kind is JobState.DONE else state
        for identity in expand_job_ids(ids):
            found[identity] = JobStatus(kind, exit_code, reason, partition, node)
    return found


def parse_settings(text: str) -> dict[str, str]:
    """Read ``scontrol show config``: lines of ``Key = value``."""
    pairs = (line.split(" = ", 1) for line in text.splitlines() if " = " in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _job_rows(text: str, columns: int) -> Iterator[list[str]]:
    """Lines of values parted by ``|``, the first a job's id, a second one of several its state.

    The last value may hold more of these bars. Other lines are left out.
    """
    for line in text.splitlines():
        parts = line.strip().split("|", columns - 1)
        has_state = columns < 3 or (len(parts) > 1 and _STATE.fullmatch(parts[1]))
        if len(parts) == columns and is_job_id(parts[0]) and has_state:
            yield parts


def _limit(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits.group()) if digits else 0


_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours and the like, by ECMA-48."""
_SENTENCE = re.compile(r"\bSubmitted batch job (\d+)\b", re.IGNORECASE)
_PARSABLE = re.compile(r"(\d+)(?:;[\w.-]+)?")
_SHOWN = 1500
"""Characters of an answer in an error."""


class UnreadableSubmission(SlurmError):
    """sbatch took a job, and its answer does not tell the job's id."""


def parse_submitted_id(answer: str, find_tagged: Callable[[], Collection[str]] = tuple) -> str:
    """Return the job's id in the answer of sbatch.

    Args:
        marked: returns the ids of the jobs in the queue that this submission has marked; called
            only where the answer holds several numbers, to tell which of them is the job.

    Raises:
        UnreadableSubmission: it holds no id, or several ambiguous ones; shows the answer.
        SlurmError: the queue was asked and did not answer.
    """
    found = _candidates(answer)
    if len(found) > 1:
        there = {parent_job_id(identity) for identity in find_tagged()}
        found = [identity for identity in found if identity in there] or found
    if len(found) != 1:
        what = f"several numbers ({', '.join(found)})" if found else "no job id"
        raise UnreadableSubmission(
            f"sbatch took the job, but its answer holds {what}: {_shown(answer)}"
        )
    return found[0]


def _candidates(answer: str) -> list[str]:
    """Return what may be the id: by the whole sentence, else numbers alone on their line."""
    lines = [line.strip() for line in _ESCAPE.sub("", answer).splitlines()]
    message = [match[1] for line in lines if (match := _SENTENCE.search(line))]
    alone = [match[1] for line in lines if (match := _PARSABLE.fullmatch(line))]
    return list(dict.fromkeys(message or alone))


def _shown(answer: str) -> str:
    text = _ESCAPE.sub("", answer).strip()
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


WAIT_HISTORY_DAYS = 14


def expected_wait_s(client: SlurmClient, now: datetime, *options: str) -> float | None:
    """Seconds until a job with these sbatch options would start; None where Slurm does not say.

    Args:
        now: local time of the cluster, without a zone.
    """
    try:
        text = client.run("sbatch", "--test-only", *options, "--wrap", "true", return_stderr=True)
    except SlurmError:
        return None
    return parse_expected_wait(text, now)


def parse_expected_wait(text: str, now: datetime) -> float | None:
    """Read ``sbatch: Job 7 to start at 2026-01-02T03:04:05 using ...``."""
    match = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    if match is None:
        return None
    return max(0.0, (datetime.fromisoformat(match.group(1)) - now).total_seconds())


def past_waits_s(client: SlurmClient, partition: str) -> list[tuple[int, float]]:
    """Nodes and wait of the partition's jobs of the last weeks that this user may see."""
    since, fields = f"now-{WAIT_HISTORY_DAYS}days", "Partition,NNodes,Eligible,Start"
    try:
        text = client.run(
            *("sacct", "-n", "-P", "-X", "-a", "-r", partition, "-S", since, "-o", fields)
        )
    except SlurmError:
        return []
    return parse_past_waits(text, partition)


def parse_past_waits(text: str, partition: str) -> list[tuple[int, float]]:
    """Read ``sacct -n -P -X -o Partition,NNodes,Eligible,Start``; jobs not started are left out.

    A wait counts from when the job could have started: after its dependencies and begin time.
    """
    found = []
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != 4 or parts[0] != partition or not parts[1].isdigit():
            continue
        try:
            eligible, start = map(datetime.fromisoformat, parts[2:])
        except ValueError:
            continue
        found.append((int(parts[1]), max(0.0, (start - eligible).total_seconds())))
    return found
