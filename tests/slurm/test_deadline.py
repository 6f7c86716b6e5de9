"""The end of a job is known without the signal, and a wrong clock does no harm."""

from __future__ import annotations

import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlinf.errors import SlurmError
from slurm import stop_signals
from slurm.jobs import HET_GROUPS_VARIABLE
from slurm.records import parse_time
from slurm.stop_signals import (
    STOP_MARGIN_VARIABLE,
    JobWindow,
    StopFlag,
    current_job_window,
    seconds_until_stop,
)

HOUR = 3600.0


def job(**more: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "12", **more}


def fail_on_query(command: list[str]) -> str:
    raise AssertionError(f"asked {command}")


def test_later_versions_state_the_span_in_the_environment() -> None:
    stated = job(SLURM_JOB_START_TIME="1000", SLURM_JOB_END_TIME="4600")
    assert current_job_window(stated, fail_on_query) == JobWindow(1000, 4600)


def record(hours: int) -> str:
    """A running job's line of scontrol."""
    return (
        "JobId=14 UserId=u(1) JobState=RUNNING Reason=None Restarts=0 "
        f"StartTime=2026-01-01T00:00:00 EndTime=2026-01-01T0{hours}:00:00 Deadline=N/A"
    )


def test_earlier_versions_are_asked_once_for_the_element_itself() -> None:
    requests = []

    def answer(command: list[str]) -> str:
        requests.append(command)
        return record(1)

    element = job(SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="3")
    span = current_job_window(element, answer)
    assert requests == [["scontrol", "show", "job", "-o", "12_3"]]
    assert span.start is not None
    assert span.end == span.start + HOUR


def test_the_component_that_ends_first_ends_a_job_of_several() -> None:
    hours = {"12+1": 2, "12+2": 1}

    def answer(command: list[str]) -> str:
        return record(hours[command[-1]])

    span = current_job_window(job(**{HET_GROUPS_VARIABLE: "1,2"}), answer)
    assert span.start is not None
    assert span.end == span.start + HOUR


def test_other_ranks_leave_the_asking_to_the_first() -> None:
    assert current_job_window(job(SLURM_PROCID="1"), fail_on_query) == JobWindow(None, None)


def test_outside_of_jobs_there_is_no_end() -> None:
    assert current_job_window({}, fail_on_query) == JobWindow(None, None)
    assert seconds_until_stop({}) is None


def test_no_answer_is_no_error() -> None:
    def refuse(command: list[str]) -> str:
        raise SlurmError("the controller does not answer")

    assert current_job_window(job(), refuse) == JobWindow(None, None)


def test_a_container_without_scontrol_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    assert current_job_window(job()) == JobWindow(None, None)
    assert "scontrol is missing, as in a container" in caplog.text


@pytest.mark.parametrize("text", ["", "Unknown", "N/A", "soon"])
def test_unknown_ends(text: str) -> None:
    assert parse_time(text) is None


@given(
    length=st.floats(1, 1e6),
    age=st.floats(0, 1e5),
    launch=st.floats(0, 1e3),
    late=st.floats(0, 1e6),
)
def test_a_late_clock_is_corrected_up_to_the_time_of_the_launch(
    length: float, age: float, launch: float, late: float
) -> None:
    """``launch``: from the start of the job to that of the process, which nobody tells us."""
    start = 1e9
    true_left = length - launch - age
    assume(true_left > 0)
    left = JobWindow(start, start + length).remaining_s(start + launch + age - late, age)
    assert left is not None
    assert left <= true_left + min(late, launch) + 1e-3


@given(length=st.floats(1, 1e6), age=st.floats(0, 1e6), early=st.floats(0, 1e6))
def test_an_early_clock_never_makes_a_job_overrun(length: float, age: float, early: float) -> None:
    start = 1e9
    left = JobWindow(start, start + length).remaining_s(start + age + early, age)
    assert left is not None
    assert left <= length - age + 1e-3


def test_an_end_that_seems_past_at_the_start_is_not_believed() -> None:
    """Else the job would be requeued at once, for ever."""
    assert JobWindow(1000, 4600).remaining_s(now=9000, age_s=10) == 3590
    assert JobWindow(None, 4600).remaining_s(now=9000, age_s=10) is None


def test_how_far_the_clock_is_off() -> None:
    assert JobWindow(1000, 4600).clock_skew_s(now=1010, age_s=5) == 0
    assert JobWindow(1000, 4600).clock_skew_s(now=800, age_s=5) == -205
    assert JobWindow(1000, 4600).clock_skew_s(now=5000, age_s=5) == 400


def test_work_stops_by_the_margin_and_a_short_job_gets_something_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop_signals, "_PROCESS_STARTED_AT", time.monotonic())

    def left(length: float, **more: str) -> float:
        now = time.time()
        times = {"SLURM_JOB_START_TIME": f"{now:.0f}", "SLURM_JOB_END_TIME": f"{now + length:.0f}"}
        found = seconds_until_stop(job(**times, **more))
        assert found is not None
        return found

    assert left(HOUR) == pytest.approx(HOUR - stop_signals.DEFAULT_STOP_MARGIN_S, abs=2)
    assert left(HOUR, **{STOP_MARGIN_VARIABLE: "600"}) == pytest.approx(HOUR - 600, abs=2)
    assert left(HOUR, **{STOP_MARGIN_VARIABLE: "soon"}) == pytest.approx(
        HOUR - stop_signals.DEFAULT_STOP_MARGIN_S, abs=2
    )
    assert left(60, **{STOP_MARGIN_VARIABLE: "600"}) == pytest.approx(30, abs=2)


def test_the_flag_is_set_when_time_is_nearly_up_and_no_signal_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop_signals, "_PROCESS_STARTED_AT", time.monotonic())
    now = int(time.time())
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(now))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(now + 3))
    monkeypatch.setenv(STOP_MARGIN_VARIABLE, "2")
    with StopFlag() as stop:
        assert not stop.is_set()
        time.sleep(2.2)
        assert stop.is_set()
