"""Every question to Slurm goes through here: typed answers, few calls."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from launchers.base import State, Status
from rlinf.errors import SlurmError
from slurm.states import parse_state

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Partition:
    """What a partition offers."""

    name: str
    time_limit_min: int | None
    """Longest wall time, minutes; None: unlimited."""
    nodes: int
    cpus_per_node: int
    mem_mb_per_node: int
    gpus: dict[str, int]
    """GPUs per node by type."""
    default: bool = False
    available: bool = True


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
        text = self.run("sinfo", "-h", "-o", "%P|%l|%D|%c|%m|%G|%a")
        return parse_partitions(text)

    def queue(self) -> dict[str, Status]:
        """This user's jobs in the queue, those that ended a short while ago included.

        Each task of a job array is listed by itself, as ``ARRAY_TASK``.
        """
        form = "%i|%T|%r|%P|%N"
        return parse_queue(self.run("squeue", "-h", "-r", "--me", "-t", "all", "-o", form))

    def accounting(self, ids: Collection[str]) -> dict[str, Status]:
        """What accounting knows of jobs; empty where there is no accounting."""
        fields = "JobID,State,ExitCode,Partition,NodeList"
        try:
            text = self.run("sacct", "-n", "-P", "-X", "-j", ",".join(sorted(ids)), "-o", fields)
        except SlurmError:
            return {}
        return parse_accounting(text)

    def cancel(self, ids: Collection[str]) -> None:
        """Cancel jobs; those already gone are no error."""
        if ids:
            self.run("scancel", *sorted(ids))

    def version(self) -> str:
        """Slurm's version, such as ``22.05.8``."""
        # Debian's says "slurm-wlm 22.05.8".
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


def parse_partitions(text: str) -> dict[str, Partition]:
    """Read ``sinfo -h -o "%P|%l|%D|%c|%m|%G|%a"``; unlike nodes have lines of their own."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) < 7:
            continue
        name, limit, nodes, cpus, memory, gres, available = parts[:7]
        known = found.get(name.rstrip("*"))
        gpus = parse_gpus(gres)
        found[name.rstrip("*")] = Partition(
            name=name.rstrip("*"),
            time_limit_min=parse_minutes(limit),
            nodes=_number(nodes) + (known.nodes if known else 0),
            cpus_per_node=max(_number(cpus), known.cpus_per_node if known else 0),
            mem_mb_per_node=max(_number(memory), known.mem_mb_per_node if known else 0),
            gpus={**(known.gpus if known else {}), **gpus},
            default=name.endswith("*"),
            available=available == "up",
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


def parse_queue(text: str) -> dict[str, Status]:
    """Read ``squeue -h -o "%i|%T|%r|%P|%N"``."""
    found = {}
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) >= 5:
            identity, state, reason, partition, node = parts[:5]
            why = "" if reason in ("None", "(null)") else reason
            found[identity] = Status(parse_state(state), None, why, partition, node)
    return found


def parse_accounting(text: str) -> dict[str, Status]:
    """Read ``sacct -n -P -X -o JobID,State,ExitCode,Partition,NodeList``."""
    found = {}
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) >= 5:
            identity, state, code, partition, node = parts[:5]
            kind = parse_state(state)
            exit_code = int(code.split(":")[0]) if code.split(":")[0].isdigit() else None
            reason = "" if kind is State.DONE else state
            found[identity] = Status(kind, exit_code, reason, partition, node)
    return found


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits.group()) if digits else 0
