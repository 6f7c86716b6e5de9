"""How long jobs wait in the queue: what the scheduler expects, and what accounting remembers."""

from __future__ import annotations

import re
from datetime import datetime

from rlinf.errors import SlurmError
from slurm.client import SlurmClient

HISTORY_DAYS = 14


def expected_wait_s(client: SlurmClient, now: datetime, *options: str) -> float | None:
    """Seconds until a job with these sbatch options would start; None where Slurm does not say.

    Args:
        now: local time of the cluster, without a zone.
    """
    try:
        text = client.run("sbatch", "--test-only", *options, "--wrap", "true", errors=True)
    except SlurmError:
        return None
    return parse_expected(text, now)


def parse_expected(text: str, now: datetime) -> float | None:
    """Read ``sbatch: Job 7 to start at 2026-01-02T03:04:05 using ...``."""
    match = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    if match is None:
        return None
    return max(0.0, (datetime.fromisoformat(match.group(1)) - now).total_seconds())


def past_waits_s(client: SlurmClient, partition: str) -> list[tuple[int, float]]:
    """Nodes and wait of the partition's jobs of the last weeks that this user may see."""
    since, fields = f"now-{HISTORY_DAYS}days", "Partition,NNodes,Eligible,Start"
    try:
        text = client.run(
            *("sacct", "-n", "-P", "-X", "-a", "-r", partition, "-S", since, "-o", fields)
        )
    except SlurmError:
        return []
    return parse_waits(text, partition)


def parse_waits(text: str, partition: str) -> list[tuple[int, float]]:
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
