"""Text of several Slurm versions is read alike.

Which of the samples were recorded, and which written after manual pages: ``samples/README.md``.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rlinf.errors import SlurmError
from slurm.client import run_command
from slurm.jobs import JobState, JobStatus, diagnose_pending, parse_job_state
from slurm.records import (
    parse_accounting,
    parse_elapsed,
    parse_gpus,
    parse_job,
    parse_minutes,
    parse_queue,
    parse_settings,
)

SAMPLES = Path(__file__).parent / "samples"
VERSIONS = ("20.11", "21.08", "22.05", "23.02", "23.11", "24.05", "25.05")


def test_a_command_outlives_the_warning_that_a_whole_step_gets() -> None:
    assert run_command(["sh", "-c", "kill -USR2 $$; kill -TERM $$; echo answered"]) == "answered\n"
    assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def sections(version: str) -> dict[str, str]:
    """The answers of a version by the question."""
    parts = (SAMPLES / f"{version}.txt").read_text().split("## ")[1:]
    return dict(part.split("\n", 1) for part in parts)


def test_every_supported_version_has_a_sample() -> None:
    assert {path.stem for path in SAMPLES.glob("??.??.txt")} == set(VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_queue_of_every_version(version: str) -> None:
    queue = parse_queue(sections(version)["squeue"])
    assert {identity: status.state for identity, status in queue.items()} == {
        **dict.fromkeys(["1"], JobState.DONE),
        **dict.fromkeys(["2"], JobState.FAILED),
        **dict.fromkeys(["7"], JobState.CANCELLED),
        **dict.fromkeys(["3_0", "3_1", "4", "6"], JobState.RUNNING),
        **dict.fromkeys(["3_2", "3_3", "5", "10", "11_0", "11_1", "11_2"], JobState.PENDING),
        **dict.fromkeys(["9_5", "9_6", "9_7"], JobState.PENDING),
    }
    assert queue["4"].node == "a100-1"
    assert queue["4"].qos == "normal"
    stalled = {i for i, status in queue.items() if diagnose_pending(status.reason, i)}
    assert stalled == {"5", "9_5", "9_6", "9_7"}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_accounting_of_every_version(version: str) -> None:
    accounts = parse_accounting(sections(version)["sacct"])
    assert accounts["1"] == JobStatus(JobState.DONE, 0, "", "cpu", "cpu-1")
    assert (accounts["2"].state, accounts["2"].exit_code) == (JobState.FAILED, 65)
    assert accounts["7"].state is JobState.CANCELLED
    assert accounts["3_2"].state is accounts["9_6"].state is JobState.PENDING
    queue = parse_queue(sections(version)["squeue"])
    assert {i: s.state for i, s in accounts.items()} == {i: s.state for i, s in queue.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_of_every_version_tells_its_span_and_whether_it_may_be_requeued(
    version: str,
) -> None:
    span = parse_job(sections(version)["job"])
    assert span.start is not None
    assert span.end is not None
    assert span.end - span.start == 3600
    for question in ("job", "element"):
        text = sections(version)[question]
        job = parse_job(text)
        assert (job.state, job.reason, job.restarts) == ("RUNNING", "None", 0)
    endless = parse_job(sections(version)["element"])
    assert endless.start is not None
    assert endless.end is None


@pytest.mark.parametrize("version", VERSIONS)
def test_the_settings_of_every_version(version: str) -> None:
    settings = parse_settings(sections(version)["config"])
    assert settings["SLURM_VERSION"].startswith(version)
    assert settings["AccountingStorageEnforce"] == "associations,limits,qos"
    assert int(settings["MaxArraySize"]) % 1000 == 1
    assert int(settings["MaxJobCount"]) >= 10000


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
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("NODE_FAIL", JobState.NODE_FAIL),
        ("REQUEUE_HOLD", JobState.PENDING),
        ("PREEMPTED", JobState.PREEMPTED),
        ("DEADLINE", JobState.TIMEOUT),
        ("BOOT_FAIL", JobState.NODE_FAIL),
        ("POWER_UP_NODE", JobState.PENDING),
        ("A_STATE_OF_A_LATER_VERSION", JobState.RUNNING),
        ("", JobState.RUNNING),
    ],
)
def test_states_known_and_unknown(text: str, want: JobState) -> None:
    assert parse_job_state(text) is want


def test_a_machine_without_slurm_is_told_apart() -> None:
    with pytest.raises(SlurmError, match="no Slurm"):
        run_command(["sinfo-not-here"])


def test_elapsed_times_add_up_all_starts_of_ended_jobs() -> None:
    answer = (
        "Welcome to the cluster | maintenance on Monday\n"
        "12|REQUEUED|40\n"
        "12|COMPLETED|100\n"
        "13_2|CANCELLED by 1000|7\n"
        "14+1|RUNNING|30\n"
        "15|PREEMPTED|5\n"
        "15|PENDING|0\n"
    )
    assert parse_elapsed(answer) == {"12": 140.0, "13_2": 7.0}
