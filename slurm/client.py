"""Every question to Slurm goes through here: typed answers, few calls."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rlinf.errors import SlurmError, SlurmSilent
from slurm.ids import expand, is_id, whole_of
from slurm.jobs import State, Status
from slurm.states import parse_state

TIMEOUT_S = 60.0
# -e gives unlike nodes lines of their own; without, one has the least CPUs and memory of them all.
PARTITIONS = ("sinfo", "-h", "-e", "-o", "%P|%l|%D|%c|%m|%G|%a|%s")
# -r gives each element of a pending array a line. The reason comes last: it may be free text.
QUEUE = ("squeue", "-h", "-r", "--me", "-t", "all", "-o", "%i|%T|%P|%a|%q|%N|%r")
ACCOUNTING = ("sacct", "-n", "-P", "-X", "-o", "JobID,State,ExitCode,Partition,NodeList", "-j")
FOREIGN = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_")
"""Beginnings of variables that change what Slurm's commands do or show: those of a job that this
process runs in (``SLURM_MEM_PER_CPU``), and a user's own (``SBATCH_QOS``, ``SQUEUE_PARTITION``)."""
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""Variables without which no command finds its controller."""
WARNINGS = (signal.SIGUSR2, signal.SIGTERM)
"""Signals by which Slurm says that a job is to end."""
COMMENTS = ("squeue", "-h", "-r", "--me", "-t", "all", "-o", "%i|%k")
_SILENT = re.compile(
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
_GONE = re.compile(r"invalid job id|already (?:completing|completed)", re.IGNORECASE)


@dataclass(frozen=True)
class Queued(Status):
    """A job in the queue, with what limits on the number of jobs go by."""

    account: str = ""
    qos: str = ""


@dataclass(frozen=True)
class LikeNodes:
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
    groups: tuple[LikeNodes, ...]
    max_nodes: int | None = None
    """Of one job; None: unlimited."""
    default: bool = False
    state: str = "up"
    """``up``, ``down`` (jobs wait), ``drain`` (no new jobs) or ``inact`` (neither)."""

    @property
    def available(self) -> bool:
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

    poll_s: float = 1.0
    """Seconds that should pass between two queries of the queue."""

    def partitions(self) -> dict[str, Partition]:
        """All partitions.

        Raises:
            SlurmError: Slurm is not installed or does not answer.
        """
        return parse_partitions(self.run(*PARTITIONS))

    def queue(self) -> dict[str, Queued]:
        """This user's jobs in the queue, array elements singly (``12_3``).

        Those that ended a short while ago are among them.
        """
        return parse_queue(self.run(*QUEUE))

    def with_comment(self, word: str) -> list[str]:
        """Ids of this user's jobs in the queue that have a word in their comment.

        Raises:
            SlurmError: Slurm does not answer.
        """
        rows = _job_rows(self.run(*COMMENTS), 2)
        return [identity for ids, comment in rows if word in comment for identity in expand(ids)]

    def accounting(self, ids: Collection[str]) -> dict[str, Status]:
        """What accounting knows of jobs; empty where there is no accounting."""
        asked = sorted({whole_of(identity) for identity in ids})
        try:
            found = parse_accounting(self.run(*ACCOUNTING, ",".join(asked)))
        except SlurmError:
            return {}
        # Elements that were cancelled while they waited may stand under the id of their array only.
        names = {i: i if i in found else whole_of(i) for i in ids}
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
        ids = {whole_of(identity) if "+" in identity else identity for identity in ids}
        try:
            self.run("scancel", *sorted(ids))
        except SlurmError as error:
            if len(ids) > 1:
                self._cancel_singly(ids)
            elif not _GONE.search(str(error)):
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

    def run(self, *command: str, errors: bool = False) -> str:
        """Standard output of a Slurm command; its error output, where ``errors``.

        Raises:
            SlurmSilent: no answer.
            SlurmError: not installed, or refused (with its own message).
        """
        return run(command, errors=errors)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Commands that are started within outlive the warning which Slurm sends to a whole step.

    A child begins with the mask of the thread that starts it. This process sees the signal later.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def command_environment() -> dict[str, str]:
    """Return this process's environment without what changes Slurm's commands.

    All of them are started so, from a login node, an interactive job or a driver's job alike.
    """
    return {k: v for k, v in os.environ.items() if k in KEPT or not k.startswith(FOREIGN)}


def run(command: Sequence[str], *, errors: bool = False) -> str:
    """See :meth:`SlurmClient.run`."""
    if shutil.which(command[0]) is None:
        raise SlurmError(
            f"{command[0]}: command not found; this machine has no Slurm. "
            "Use cluster=local, or log in to the cluster's login node"
        )
    try:
        with blocked_signals():
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
                env=command_environment(),
            )
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"{command[0]} did not answer within {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise failure(said)(f"{' '.join(command)}: {said}")
    return done.stderr if errors else done.stdout


def failure(said: str) -> type[SlurmError]:
    """What a command's message means: that there was no answer, or that it was refused.

    Where lines of it speak of an error, only these count: a banner may tell of nodes that are not
    responding.
    """
    lines = said.splitlines()
    lines = [line for line in lines if re.search("error|fatal", line, re.IGNORECASE)] or lines
    return SlurmSilent if any(map(_SILENT.search, lines)) else SlurmError


def parse_partitions(text: str) -> dict[str, Partition]:
    """Read sinfo's answer to :data:`PARTITIONS`; unlike nodes have lines of their own."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        if not _PARTITION_LINE.fullmatch(line.strip()):
            continue
        name, limit, nodes, cpus, memory, gres, state, *sizes = line.strip().split("|")[:8]
        known = found.get(name.rstrip("*"))
        group = LikeNodes(_number(nodes), _number(cpus), _number(memory), parse_gpus(gres))
        found[name.rstrip("*")] = Partition(
            name=name.rstrip("*"),
            time_limit_min=parse_minutes(limit),
            groups=(*(known.groups if known else ()), group),
            # From the least to the most nodes of a job: 1-infinite, 1-4, or 2 where they are one.
            max_nodes=_limit(sizes[0].rpartition("-")[2]) if sizes else None,
            default=name.endswith("*"),
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
    def default(self) -> bool: ...


def default_partition(partitions: Mapping[str, _MayBeDefault]) -> str | None:
    """The name of the one that jobs go to which name none."""
    return next((name for name, partition in partitions.items() if partition.default), None)


def partition_names(text: str) -> tuple[str, ...]:
    """``a100,h100`` as its names: the job runs in the first of them that has room."""
    return tuple(name.strip() for name in text.split(","))


def parse_queue(text: str) -> dict[str, Queued]:
    """Read squeue's answer to :data:`QUEUE`."""
    found = {}
    for ids, state, partition, account, qos, node, reason in _job_rows(text, 7):
        why = "" if reason in ("None", "(null)") else reason
        status = Queued(parse_state(state), None, why, partition, node, account, qos)
        for identity in expand(ids):
            found[identity] = status
    return found


def parse_accounting(text: str) -> dict[str, Status]:
    """Read sacct's answer to :data:`ACCOUNTING`."""
    found = {}
    for ids, state, code, partition, node in _job_rows(text, 5):
        kind, numbers = parse_state(state), _EXIT_CODE.fullmatch(code)
        exit_code = int(numbers[1]) if numbers else None
        reason = "" if kind is State.DONE else state
        for identity in expand(ids):
            found[identity] = Status(kind, exit_code, reason, partition, node)
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
        if len(parts) == columns and is_id(parts[0]) and has_state:
            yield parts


def _limit(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits.group()) if digits else 0
