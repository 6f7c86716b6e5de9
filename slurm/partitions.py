"""What a cluster offers: partitions, their GPUs and limits, read from Slurm's own text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

SINFO_FORMAT = "%P|%l|%D|%c|%m|%G|%a"


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
    preempt: str = "OFF"
    """What happens to its jobs when others need the nodes: OFF, REQUEUE, CANCEL, SUSPEND, GANG."""
    grace_s: int = 0
    """Seconds between the signal of a preemption and the end."""
    max_nodes: int | None = None
    """Most nodes of one job; None: unlimited."""

    @property
    def preemptible(self) -> bool:
        """Whether a job may have to make room for others."""
        return any(mode in self.preempt for mode in ("REQUEUE", "CANCEL", "SUSPEND"))


def parse_partitions(text: str) -> dict[str, Partition]:
    """Read ``sinfo -h -o SINFO_FORMAT``; unlike nodes of a partition have lines of their own."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) < 7:
            continue
        name, limit, nodes, cpus, memory, gres, available = parts[:7]
        known = found.get(name.rstrip("*"))
        gpus = dict(known.gpus) if known else {}
        for kind, count in parse_gpus(gres).items():
            gpus[kind] = max(count, gpus.get(kind, 0))
        found[name.rstrip("*")] = Partition(
            name=name.rstrip("*"),
            time_limit_min=parse_minutes(limit),
            nodes=_number(nodes) + (known.nodes if known else 0),
            cpus_per_node=max(_number(cpus), known.cpus_per_node if known else 0),
            mem_mb_per_node=max(_number(memory), known.mem_mb_per_node if known else 0),
            gpus=gpus,
            default=name.endswith("*"),
            available=available == "up",
        )
    return found


def with_settings(partitions: Mapping[str, Partition], text: str) -> dict[str, Partition]:
    """Add what only ``scontrol show partition -o`` tells: preemption and nodes per job."""
    settings = {}
    for line in text.splitlines():
        values = dict(word.split("=", 1) for word in line.split() if "=" in word)
        settings[values.get("PartitionName", "")] = values
    found = {}
    for name, partition in partitions.items():
        values = settings.get(name, {})
        most = values.get("MaxNodes", "UNLIMITED")
        found[name] = replace(
            partition,
            preempt=values.get("PreemptMode", "OFF"),
            grace_s=_number(values.get("GraceTime", "0")),
            max_nodes=int(most) if most.isdigit() else None,
        )
    return found


def parse_gpus(gres: str) -> dict[str, int]:
    """``gpu:a100:4(S:0-1),gpu:2`` as ``{"a100": 4, "": 2}``; other resources are left out."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = part.strip().split(":")
        if words[0] == "gpu" and words[-1].isdigit():
            kind = words[1] if len(words) > 2 else ""
            found[kind] = found.get(kind, 0) + int(words[-1])
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


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits.group()) if digits else 0
