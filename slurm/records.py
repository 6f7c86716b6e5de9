"""Typed records of what Slurm's commands print: this module has all queries and their parsers.

The queries use delimited text, which is the same from Slurm 20.11 to 25.x. Sites may wrap commands
and print banners, so parsers skip lines that are not of their query.

sbatch prints ``Submitted batch job 12``, with several clusters ``Submitted batch job 12 on cluster
NAME``, or with ``--parsable`` ``12`` or ``12;NAME`` (manual page of sbatch).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from pydantic import Field

from rlinf.config import Section
from rlinf.errors import SlurmError
from slurm.jobs import (
    JobState,
    JobStatus,
    expand_job_ids,
    is_job_id,
    parent_job_id,
    parse_job_state,
)

# -r prints a line for each element of a pending array. The reason is last because it is free text.
SQUEUE_JOBS = ("squeue", "-h", "-r", "--me", "-t", "all", "-o", "%i|%T|%P|%a|%q|%N|%r")
SQUEUE_COMMENTS = ("squeue", "-h", "-r", "--me", "-t", "all", "-o", "%i|%k")
SACCT_JOBS = ("sacct", "-n", "-P", "-X", "-o", "JobID,State,ExitCode,Partition,NodeList", "-j")
# -D prints a row for each start of a job that was requeued.
SACCT_ELAPSED = ("sacct", "-n", "-P", "-X", "-D", "-o", "JobID,State,ElapsedRaw", "-j")
_JOB_STATE = re.compile(r"[A-Z][A-Z0-9_]*\+?(?: by \S+)?")
_EXIT_CODE = re.compile(r"(\d+):\d+")
# sinfo's -o never truncates a value; -O does at its column widths.
SINFO_NODES = ("sinfo", "-h", "-N", "-o", "%N|%R|%T|%c|%m|%G|%f")
SCONTROL_PARTITIONS = ("scontrol", "-o", "show", "partition")
# -d adds GresUsed, which is present even if accounting does not track GPUs.
SCONTROL_NODE_USAGE = ("scontrol", "-o", "-d", "show", "node")
# Only -O prints the total resources of a pending job (%b omits --gpus). Its values have no blanks
# and fit the widths; -r prints each element of an array.
SQUEUE_PENDING = (
    *("squeue", "-h", "-r", "-t", "PD", "-O"),
    "Partition:200,NumNodes:12,tres-alloc:250,tres-per-node:100,Reason:60",
)
SACCTMGR_QOS = (
    *("sacctmgr", "-n", "-P", "show", "qos"),
    "format=Name,Priority,Preempt,MaxWall,MaxJobsPU,MaxSubmitPU,MaxTRESPU,MaxTRES,GrpTRES",
)
SACCTMGR_ASSOCIATIONS = (
    *("sacctmgr", "-n", "-P", "show", "assoc"),
    "format=Cluster,Account,Partition,QOS,MaxJobs,MaxSubmit,MaxWall,MaxTRES,GrpTRES,DefaultQOS",
)
NOT_WAITING_FOR_NODES = re.compile(
    r"\(?(?:JobHeld|Dependency|BeginTime|JobArrayTaskLimit|BadConstraints)"
)
"""Reasons of pending jobs that would not start even if nodes were free."""


@dataclass(frozen=True)
class QueuedJob(JobStatus):
    """A job in the queue, with its account and QOS, to which limits on the number of jobs apply."""

    account: str = ""
    qos: str = ""


class PartitionNode(NamedTuple):
    """A node as a member of one partition."""

    name: str
    partition: str
    state: str
    """Slurm's text, with its flags as a suffix: ``mixed-``."""
    cpus: int
    mem_mb: int
    gres: str
    """Slurm's text: ``gpu:a100:4``."""
    features: str
    """Separated by commas."""


class PendingDemand(NamedTuple):
    """The jobs that wait for a partition, and the GPUs that they request."""

    jobs: int
    gpus: int


def parse_nodes(text: str) -> list[PartitionNode]:
    """Parse ``sinfo -h -N -o "%N|%R|%T|%c|%m|%G|%f"``: a line per node and partition."""
    nodes = []
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) >= 7 and _are_numbers(cells[3:5]):
            name, partition, state, cpus, memory, gres, features = cells[:7]
            nodes.append(
                PartitionNode(
                    name, partition, state, _to_int(cpus), _to_int(memory), gres, features
                )
            )
    return nodes


def parse_partition_records(text: str) -> list[dict[str, str]]:
    """Parse ``scontrol -o show partition``: a line of ``Key=value`` words per partition."""
    records = []
    for line in text.splitlines():
        if line.startswith("PartitionName="):
            records.append(dict(word.split("=", 1) for word in line.split() if "=" in word))
    return records


_NAME = re.compile(r"NodeName=(\S+)")
_GRES_USED = re.compile(r" GresUsed=(\S+)")
_ALLOCATED = re.compile(r" AllocTRES=(\S+)")


def parse_usage(text: str) -> dict[str, dict[str, int]]:
    """Parse ``scontrol -o -d show node``: each node's GPUs in use, by type.

    The numbers come from GresUsed, or from AllocTRES if a version or plugin omits GresUsed. A node
    with neither is skipped.
    """
    gpus_in_use = {}
    for line in text.splitlines():
        name_match = _NAME.match(line)
        if name_match is None:
            continue
        if gres_match := _GRES_USED.search(line):
            gpus_in_use[name_match[1]] = parse_gpus(gres_match[1])
        elif (tres_match := _ALLOCATED.search(line)) and "gres/gpu" in tres_match[1]:
            gpus_in_use[name_match[1]] = _gpus_of_tres(tres_match[1])
    return gpus_in_use


_PENDING_JOB = re.compile(r"\s*\S+\s+\d\S*\s+(?:\S*=\S*|N/A)\s+\S+\s+\S")
"""A line of squeue's answer to :data:`SQUEUE_PENDING`."""


def parse_pending(text: str) -> dict[str, PendingDemand]:
    """Parse squeue's answer to :data:`SQUEUE_PENDING`.

    A job that names several partitions waits in each of them. Its number of GPUs comes from its
    total resources, or from its resources per node if accounting does not track GPUs.
    """
    jobs: Counter[str] = Counter()
    gpus_by_partition: Counter[str] = Counter()
    for line in text.splitlines():
        cells = line.split(maxsplit=4)
        if len(cells) < 5 or not _PENDING_JOB.match(line) or NOT_WAITING_FOR_NODES.match(cells[4]):
            continue
        partitions, nodes, total, per_node, _ = cells
        requested = _gpus_of_tres(total) or _gpus_of_tres(per_node)
        num_gpus = sum(requested.values()) * (1 if "gres/gpu" in total else max(_to_int(nodes), 1))
        for partition in partitions.split(","):
            jobs[partition] += 1
            gpus_by_partition[partition] += num_gpus
    return {name: PendingDemand(count, gpus_by_partition[name]) for name, count in jobs.items()}


def parse_hostnames(text: str, nodes: str) -> list[str]:
    """Parse ``scontrol show hostnames``, which expands a list such as ``a100-[1-3],cpu-1``.

    Only lines that are one word and begin with the prefix of a name in the list count.

    Args:
        nodes: the list.
    """
    names = re.split(r",(?![^\[]*\])", nodes)
    prefixes = {re.split(r"[\d\[]", name, maxsplit=1)[0] for name in names}
    lines = map(str.strip, text.splitlines())
    hosts = [line for line in lines if re.fullmatch(r"[\w.-]+", line)]
    return [host for host in hosts if re.split(r"\d", host, maxsplit=1)[0] in prefixes]


def parse_node_words(text: str) -> set[str]:
    """Return all words of ``scontrol show node -o``, including the node's GPU names and
    features."""
    lines = [line for line in text.splitlines() if line.lstrip().startswith("NodeName=")]
    return set(re.split(r"[\s,:=()]+", " ".join(lines)))


def parse_queue(text: str) -> dict[str, QueuedJob]:
    """Parse squeue's answer to :data:`SQUEUE_JOBS`."""
    jobs = {}
    for ids, state, partition, account, qos, node, reason in _job_rows(text, 7):
        reason_text = "" if reason in ("None", "(null)") else reason
        status = QueuedJob(parse_job_state(state), None, reason_text, partition, node, account, qos)
        for job_id in expand_job_ids(ids):
            jobs[job_id] = status
    return jobs


def parse_comments(text: str) -> dict[str, str]:
    """Parse squeue's answer to :data:`SQUEUE_COMMENTS`: comments by id."""
    rows = _job_rows(text, 2)
    return {job_id: comment for ids, comment in rows for job_id in expand_job_ids(ids)}


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


def parse_elapsed(text: str) -> dict[str, float]:
    """Parse sacct's answer to :data:`SACCT_ELAPSED`: seconds of all starts of each ended job."""
    seconds, active = Counter[str](), set()
    for job_id, state, elapsed in _job_rows(text, 3):
        seconds[job_id] += _to_int(elapsed)
        # The row of a start that was requeued has the state REQUEUED.
        if parse_job_state(state).is_active and state != "REQUEUED":
            active.add(job_id)
    return {job_id: float(total) for job_id, total in seconds.items() if job_id not in active}


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


def parse_expected_wait(text: str, now: datetime) -> float | None:
    """Parse ``sbatch: Job 7 to start at 2026-01-02T03:04:05 using ...``."""
    match = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    if match is None:
        return None
    return max(0.0, (datetime.fromisoformat(match.group(1)) - now).total_seconds())


_JOB_FIELD = re.compile(r"\b(JobState|Reason|Restarts|StartTime|EndTime)=(\S+)")


@dataclass(frozen=True)
class JobRecord:
    """A job as ``scontrol show job`` describes it."""

    state: str
    """Slurm's text."""
    reason: str
    restarts: int
    start: float | None
    """Seconds since the epoch, controller's clock; None: unknown. ``end`` likewise."""
    end: float | None


def parse_job(text: str) -> JobRecord:
    """Parse ``scontrol show job -o``.

    Raises:
        SlurmError: the text describes no job.
    """
    # The user's texts may contain such fields. Slurm prints the job's name before UserId and the
    # other texts after its own fields, so the first match after UserId is Slurm's.
    fields = dict(reversed(_JOB_FIELD.findall(text.partition("UserId=")[2])))
    try:
        return JobRecord(
            fields["JobState"],
            fields["Reason"],
            int(fields["Restarts"]),
            parse_time(fields.get("StartTime", "")),
            parse_time(fields.get("EndTime", "")),
        )
    except (KeyError, ValueError):
        raise SlurmError(f"scontrol show job: cannot read {text.strip()[:200]!r}") from None


def parse_time(text: str) -> float | None:
    """Parse a time that Slurm prints into seconds since the epoch; None for ``Unknown`` etc."""
    if text.isdigit():
        return float(text)
    try:
        # The text has no time zone; Slurm's commands and this process use the same zone.
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


class QosLimits(Section):
    """The limits of a QOS. A limit that is not set is None, or absent from a mapping."""

    priority: int = 0
    preempts: tuple[str, ...] = ()
    """QOS whose jobs this QOS may preempt."""
    max_wall_min: int | None = Field(default=None, ge=0)
    max_jobs_per_user: int | None = Field(default=None, ge=0)
    """Maximum number of running jobs."""
    max_submit_per_user: int | None = Field(default=None, ge=0)
    """Maximum number of pending and running jobs."""
    max_tres_per_user: dict[str, int] = {}
    """Amounts by Slurm's names: ``{"gres/gpu": 8, "node": 2}``; memory in MiB."""
    max_tres_per_job: dict[str, int] = {}
    max_tres_all_jobs: dict[str, int] = {}
    """Total of the jobs of all users."""


class Association(Section):
    """The limits of this user under one account."""

    cluster: str
    account: str
    partition: str = ""
    """Partition in lower case, as Slurm's database stores it; "": any partition."""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    max_jobs: int | None = Field(default=None, ge=0)
    """Maximum number of running jobs; the other limits are as in :class:`QosLimits`."""
    max_submit: int | None = Field(default=None, ge=0)
    max_wall_min: int | None = Field(default=None, ge=0)
    max_tres_per_job: dict[str, int] = {}
    max_tres_all_jobs: dict[str, int] = {}


class AccountingLimits(Section):
    """The limits of this user in accounting."""

    qos: dict[str, QosLimits] = {}
    associations: tuple[Association, ...] = ()


def parse_limits(qos: str, associations: str) -> AccountingLimits:
    """Parse the answers that :func:`query_accounting` returns."""
    return AccountingLimits(qos=parse_qos(qos), associations=parse_associations(associations))


def parse_qos(text: str) -> dict[str, QosLimits]:
    """Parse sacctmgr's answer to :data:`SACCTMGR_QOS`."""
    limits = {}
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) < 9 or not cells[0] or not _are_numbers([cells[1], *cells[4:6]]):
            continue
        name, priority, preempts, wall, jobs, submit, per_user, per_job, total = cells[:9]
        limits[name] = QosLimits(
            priority=_to_int(priority),
            preempts=_words(preempts),
            max_wall_min=parse_minutes(wall),
            max_jobs_per_user=_int_or_none(jobs),
            max_submit_per_user=_int_or_none(submit),
            max_tres_per_user=parse_tres(per_user),
            max_tres_per_job=parse_tres(per_job),
            max_tres_all_jobs=parse_tres(total),
        )
    return limits


def parse_associations(text: str) -> tuple[Association, ...]:
    """Parse sacctmgr's answer to :data:`SACCTMGR_ASSOCIATIONS`."""
    associations = []
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) < 10 or not all(cells[:2]) or not _are_numbers(cells[4:6]):
            continue
        cluster, account, partition, qos, jobs, submit, wall, per_job, total, default = cells[:10]
        associations.append(
            Association(
                cluster=cluster,
                account=account,
                partition=partition,
                qos=_words(qos),
                max_jobs=_int_or_none(jobs),
                max_submit=_int_or_none(submit),
                max_wall_min=parse_minutes(wall),
                max_tres_per_job=parse_tres(per_job),
                max_tres_all_jobs=parse_tres(total),
                default_qos=default,
            )
        )
    return tuple(associations)


def parse_version(text: str) -> str:
    """Parse ``sinfo --version``.

    Raises:
        SlurmError: the text contains no version.
    """
    # Debian prints "slurm-wlm 22.05.8".
    match = re.search(r"^slurm\S*[ \t]+(\d\S*)", text, re.MULTILINE | re.IGNORECASE)
    if match is None:
        raise SlurmError(f"sinfo --version: no version in {text.strip()[:200]!r}")
    return match[1]


def parse_settings(text: str) -> dict[str, str]:
    """Parse ``scontrol show config``, which prints lines of ``Key = value``."""
    pairs = (line.split(" = ", 1) for line in text.splitlines() if " = " in line)
    return {key.strip(): value.strip() for key, value in pairs}


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


@functools.lru_cache(maxsize=4096)
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


_GPU_AMOUNT = re.compile(r"gpu(?::([^:=,]+))?[:=](\d+)(?=$|,|\()")


@functools.lru_cache(maxsize=4096)
def _gpus_of_tres(text: str) -> dict[str, int]:
    """Parse GPUs by type of ``gres/gpu=4,gres/gpu:a100=4``, ``gres:gpu:a100:2``, ``gres/gpu:2``.

    An amount without a type is the total of all types, so it becomes the only entry.
    """
    gpus_by_type = {gpu_type: int(amount) for gpu_type, amount in _GPU_AMOUNT.findall(text)}
    return {"": gpus_by_type[""]} if "" in gpus_by_type else gpus_by_type


def parse_tres(text: str) -> dict[str, int]:
    """Parse ``cpu=8,mem=16G,gres/gpu:a100=2``; memory is in MiB, also without a suffix."""
    amounts = {}
    for word in text.split(","):
        if match := re.fullmatch(r"mem=([\d.]+)([KMGTP]?)", word):
            amounts["mem"] = round(float(match[1]) * 1024.0 ** ("KMGTP".index(match[2] or "M") - 1))
        elif match := re.fullmatch(r"([^=]+)=(\d+)", word):
            amounts[match[1]] = int(match[2])
    return amounts


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


def _are_numbers(words: Iterable[str]) -> bool:
    """Return True if all words are numbers or empty, as in Slurm's lines but hardly in a banner."""
    return all(re.fullmatch(r"(?:\d+\+?)?", word) for word in words)


def _value_or_empty(text: str) -> str:
    return "" if text in ("N/A", "(null)", "none") else text


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in _value_or_empty(text).split(",") if word)


def _allowed(text: str) -> tuple[str, ...] | None:
    return None if text == "ALL" else _words(text)
