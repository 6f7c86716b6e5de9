"""Text of several Slurm versions is read alike.

``samples/22.05`` was recorded on the dev cluster; the lines of other versions below follow the
formats in those versions' manual pages.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.base import State
from rlinf.errors import SlurmError
from slurm.client import (
    parse_accounting,
    parse_gpus,
    parse_minutes,
    parse_partitions,
    parse_queue,
    run,
)
from slurm.states import parse_state

SAMPLES = Path(__file__).parent / "samples"


def test_recorded_partitions() -> None:
    found = parse_partitions((SAMPLES / "22.05-sinfo.txt").read_text())
    assert set(found) == {"cpu", "a100", "h100", "gpu", "spot"}
    assert found["cpu"].default
    assert found["a100"].gpus == {"a100": 4}
    assert found["gpu"].gpus == {"a100": 4, "h100": 4}, "a partition of unlike nodes"
    assert found["gpu"].nodes == 4
    assert found["a100"].time_limit_min is None


def test_recorded_queue_and_accounting() -> None:
    queue = parse_queue((SAMPLES / "22.05-squeue.txt").read_text())
    assert {status.state for status in queue.values()} >= {State.RUNNING, State.PENDING}
    accounts = parse_accounting((SAMPLES / "22.05-sacct.txt").read_text())
    states = {status.state for status in accounts.values()}
    assert states >= {State.DONE, State.FAILED, State.CANCELLED}
    assert any(status.exit_code == 65 for status in accounts.values())


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("gpu:a100:4", {"a100": 4}),
        ("gpu:4", {"": 4}),
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("gpu:a100_80gb:4(S:0-3),craynetwork:4", {"a100_80gb": 4}),
        ("gpu:a100:4,gpu:h100:2", {"a100": 4, "h100": 2}),
        ("(null)", {}),
        ("", {}),
        ("lustre:1,nvme:no_consume:2T", {}),
    ],
)
def test_gpu_strings_of_many_sites(text: str, want: dict[str, int]) -> None:
    assert parse_gpus(text) == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("infinite", None),
        ("n/a", None),
        ("1-00:00:00", 1440),
        ("2-12", 3600),
        ("12:30:00", 750),
        ("30:00", 30),
        ("45", 45),
    ],
)
def test_time_limits(text: str, want: int | None) -> None:
    assert parse_minutes(text) == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("CANCELLED by 1000", State.CANCELLED),
        ("CANCELLED+", State.CANCELLED),
        ("OUT_OF_MEMORY", State.OUT_OF_MEMORY),
        ("NODE_FAIL", State.NODE_FAIL),
        ("REQUEUE_HOLD", State.PENDING),
        ("PREEMPTED", State.PREEMPTED),
        ("DEADLINE", State.TIMEOUT),
        ("BOOT_FAIL", State.NODE_FAIL),
        ("POWER_UP_NODE", State.RUNNING),
        ("", State.RUNNING),
    ],
)
def test_states_known_and_unknown(text: str, want: State) -> None:
    assert parse_state(text) is want


def test_a_machine_without_slurm_is_told_apart() -> None:
    with pytest.raises(SlurmError, match="no Slurm"):
        run(["sinfo-not-here"])
