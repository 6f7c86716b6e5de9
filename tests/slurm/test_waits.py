"""What Slurm prints of waits is read right."""

from __future__ import annotations

from datetime import datetime

from slurm.records import parse_expected_wait, parse_past_waits

NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_the_expected_start_is_read_from_test_only() -> None:
    # As Slurm 22.05 prints it, on the error output.
    text = (
        "sbatch: Job 7 to start at 2026-01-02T03:06:05 using 8 processors on nodes a100-1 "
        "in partition a100\n"
    )
    assert parse_expected_wait(text, NOW) == 120.0
    assert parse_expected_wait(text.replace("03:06:05", "03:04:00"), NOW) == 0.0
    assert parse_expected_wait("allocation failure: Requested node configuration", NOW) is None


def test_waits_count_from_when_a_job_could_have_started() -> None:
    text = """\
a100|2|2026-01-02T03:00:00|2026-01-02T03:01:30
a100|1|2026-01-02T03:00:00|Unknown
a100,h100|1|2026-01-02T03:00:00|2026-01-02T03:01:30
a100|1|Unknown|2026-01-02T03:01:30
a100|1|2026-01-02T03:00:01|2026-01-02T03:00:00
"""
    assert parse_past_waits(text, "a100") == [(2, 90.0), (1, 0.0)]
