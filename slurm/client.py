"""Every question to Slurm goes through here: typed answers, few calls."""

from __future__ import annotations

import getpass
import shutil
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from launchers.base import State, Status
from rlinf.errors import SlurmError
from slurm.limits import ClusterLimits, parse_config, parse_max_submit
from slurm.partitions import SINFO_FORMAT, Partition, parse_partitions, with_settings
from slurm.states import parse_state

__all__ = ["Partition", "SlurmClient", "parse_accounting", "parse_queue", "run"]

TIMEOUT_S = 60.0
QUEUE_FORMAT = "%i|%T|%r|%P|%N|%j"
ACCOUNTING_FIELDS = "JobID,State,ExitCode,Partition,NodeList"


@dataclass
class SlurmClient:
    """Calls Slurm's own commands and reads their text, which 20.11 to 25.x print alike."""

    poll_s: float = 1.0
    """Least seconds between two queries of the queue; looks in between get the last answer."""
    _queue: dict[str, Status] = field(default_factory=dict)
    _asked: float = float("-inf")

    def partitions(self) -> dict[str, Partition]:
        """All partitions.

        Raises:
            SlurmError: Slurm is not installed or does not answer.
        """
        found = parse_partitions(self.run("sinfo", "-h", "-o", SINFO_FORMAT))
        return with_settings(found, self.run("scontrol", "show", "partition", "-o"))

    def limits(self) -> ClusterLimits:
        """Limits of the cluster and of this user.

        Raises:
            SlurmError: Slurm is not installed or does not answer.
        """
        config = self.run("scontrol", "show", "config")
        try:
            who = f"user={getpass.getuser()}"
            links = self.run("sacctmgr", "-nP", "show", "assoc", who, "format=MaxSubmit,QOS")
            qos = self.run("sacctmgr", "-nP", "show", "qos", "format=Name,MaxSubmitPU")
        except SlurmError:  # no accounting
            links = qos = ""
        return parse_config(config, parse_max_submit(links, qos))

    def queue(self, *, fresh: bool = False) -> dict[str, Status]:
        """This user's jobs in the queue by id, those that ended a short while ago included.

        At most one ``squeue`` in ``poll_s`` seconds, except when a ``fresh`` answer is asked for.

        Raises:
            SlurmError: Slurm does not answer.
        """
        now = time.monotonic()
        if fresh or now - self._asked >= self.poll_s:
            text = self.run("squeue", "-h", "--me", "-t", "all", "-o", QUEUE_FORMAT)
            self._queue, self._asked = parse_queue(text), now
        return self._queue

    @property
    def asked(self) -> float:
        """When the answer of :meth:`queue` was asked for, on the monotonic clock."""
        return self._asked

    def accounting(self, ids: Collection[str]) -> dict[str, Status]:
        """What accounting knows of jobs; empty where there is no accounting."""
        jobs = ",".join(sorted(ids))
        try:
            text = self.run("sacct", "-n", "-P", "-X", "-j", jobs, "-o", ACCOUNTING_FIELDS)
        except SlurmError:
            return {}
        return parse_accounting(text)

    def cancel(self, ids: Collection[str]) -> None:
        """Cancel jobs; those already gone are no error."""
        if ids:
            self.run("scancel", *sorted(ids))

    def version(self) -> str:
        """Slurm's version, such as ``22.05.8``."""
        return self.run("sinfo", "--version").split()[-1]

    def run(self, *command: str) -> str:
        """Standard output of a Slurm command.

        Raises:
            SlurmError: not installed, no answer in time, or refused (with its own message).
        """
        return run(command)


def run(command: Sequence[str]) -> str:
    """See :meth:`SlurmClient.run`."""
    if shutil.which(command[0]) is None:
        raise SlurmError(
            f"{command[0]}: command not found; this machine has no Slurm. "
            "Use cluster=local, or log in to the cluster's login node"
        )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise SlurmError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def parse_queue(text: str) -> dict[str, Status]:
    """Read ``squeue -h -o QUEUE_FORMAT``."""
    found = {}
    for line in text.splitlines():
        parts = line.strip().split("|", 5)
        if len(parts) == 6:
            identity, state, reason, partition, node, name = parts
            why = "" if reason in ("None", "(null)") else reason
            found[identity] = Status(parse_state(state), None, why, partition, node, name)
    return found


def parse_accounting(text: str) -> dict[str, Status]:
    """Read ``sacct -n -P -X -o ACCOUNTING_FIELDS``."""
    found = {}
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) >= 5:
            identity, state, exit_code, partition, node = parts[:5]
            kind = parse_state(state)
            code, _, killed_by = exit_code.partition(":")
            reason = "" if kind is State.DONE else state
            if killed_by not in ("", "0"):
                reason += f" (signal {killed_by})"
            number = int(code) if code.isdigit() else None
            found[identity] = Status(kind, number, reason, partition, node)
    return found
